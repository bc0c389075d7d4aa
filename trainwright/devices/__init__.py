"""Devices: which accelerator torch has here, what it can do, and its memory and generators.

`accelerator.py` queries torch in the same way for all, `abilities.py` tries what one of them can do, `inventory.py` describes
what is here, `generators.py` keeps the states of their generators, and `cuda.py` holds what is CUDA's alone.
"""
