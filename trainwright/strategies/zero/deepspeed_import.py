"""DeepSpeed's package, imported on use and set to this process's device."""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import Any

import torch

from trainwright.devices import cuda
from trainwright.distributed.environment import announced

ACCELERATORS = ("cpu", cuda.NAME, "xpu")
"""The torch devices that DeepSpeed supports."""


def import_deepspeed(device: torch.device) -> Any:
    """Return the package, set to this device, with only its warnings shown, or raise ValueError for the device."""
    with announced(**({"DS_ACCELERATOR": "cpu"} if device.type == "cpu" else {})):
        import deepspeed

    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    logger.addFilter(_is_relevant)  # once, however often it is called
    # DeepSpeed calls collectives by deprecated names, which users cannot change.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    accelerator = _accelerator(deepspeed, device.type)
    if device.type == "cpu":
        # DeepSpeed's CPU collectives need a compiler, and leak shared memory when killed.
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    else:
        _keep_to_current_device(accelerator)
    return deepspeed


def _accelerator(deepspeed: Any, device_type: str) -> Any:
    """Select and return DeepSpeed's class for a kind of device. The process may have used another before."""
    present = deepspeed.accelerator.get_accelerator()
    if present.device_name() == device_type:
        return present
    if device_type not in ACCELERATORS:
        raise ValueError(
            f"strategy='deepspeed' on {device_type!r}: DeepSpeed does not support it, and would compute on "
            f"{present.device_name()!r}. Choose 'fsdp', or call deepspeed.accelerator.set_accelerator with a class for "
            f"{device_type!r} before you make the Trainer."
        )
    module = importlib.import_module(f"deepspeed.accelerator.{device_type}_accelerator")
    general = importlib.import_module("deepspeed.accelerator.abstract_accelerator").DeepSpeedAccelerator
    kinds = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, general)]
    deepspeed.accelerator.set_accelerator(next(each for each in kinds if each is not general)())
    return deepspeed.accelerator.get_accelerator()


def _keep_to_current_device(accelerator: Any) -> None:
    """Make DeepSpeed compute on the current device, not on device LOCAL_RANK, which counts processes."""
    name_of = accelerator.device_name
    if getattr(name_of, "keeps_to_current_device", False):
        return

    def device_name(index: Any = None) -> str:
        return str(accelerator.current_device_name() if isinstance(index, str) else name_of(index))

    device_name.keeps_to_current_device = True  # type: ignore[attr-defined]
    accelerator.device_name = device_name


def _is_relevant(record: logging.LogRecord) -> bool:
    known = ("untested optimizer", "learning rate from scheduler before it has started")
    return not any(text in record.getMessage() for text in known)
