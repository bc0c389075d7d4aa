"""Out of memory: which errors mean that, and how memory that is no longer used is given back."""

from __future__ import annotations

import gc

import torch

from trainwright.devices import cuda
from trainwright.devices.accelerator import accelerator_type

TEXTS = (
    *cuda.OUT_OF_MEMORY,
    "MPS backend out of memory",
    "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
"""What torch's errors of too little memory contain, where they are plain RuntimeErrors."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or what caused it, says that a device or the host has too little memory."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(cause, RuntimeError) and any(text in str(cause) for text in TEXTS):
            return True
        cause = cause.__cause__
    return False


def give_back() -> None:
    """Collect garbage, and return the accelerator's unused memory to its driver."""
    gc.collect()
    if accelerator_type() is not None:
        torch.accelerator.empty_cache()
