"""Devices: which accelerator torch has here, what it can do, and its memory and generators.

`hardware.py` queries torch in the same way for all accelerators, `abilities.py` tries what a device can do, `generators.py`
saves the states of its generators, and `cuda.py` contains everything specific to CUDA.
"""

import os


def num_cores() -> int:
    """Return the number of CPU cores that this process may use, without torch."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
