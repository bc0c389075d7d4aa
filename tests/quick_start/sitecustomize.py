"""What each interpreter that a test starts does first, by its PYTHONPATH: the full collections of garbage become rarer.

The first five, while it imports torch, find nothing and take a fifth of its start. The smaller collections stay as they are.
"""

import gc

young, middle, _ = gc.get_threshold()
gc.set_threshold(young, middle, 1000)
