"""DeepSpeed's package: imported where it is used, and set to the device that this process computes on."""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import Any

import torch

from trainwright.devices import cuda
from trainwright.distributed.environment import announced
from trainwright.precision.base import Precision

ACCELERATORS = ("cpu", cuda.NAME, "xpu")
"""The devices of torch's own that DeepSpeed has a class for."""


def check_supported(device_type: str, precision: Precision) -> None:
    """Refuse what DeepSpeed does not compute on or in (ValueError); it is imported for unknown kinds of devices alone."""
    if precision.compute_dtype == torch.float64:
        raise ValueError(
            f"precision={precision.name!r}: DeepSpeed computes in 32 or 16 bits; choose one of these, or 'fsdp'."
        )
    if device_type not in ACCELERATORS:
        import_deepspeed(torch.device(device_type))


def import_deepspeed(device: torch.device) -> Any:
    """Return the package, set to this device, and silent but for warnings.

    Raises:
        ValueError: it computes on no such kind of device.
    """
    with announced(**({"DS_ACCELERATOR": "cpu"} if device.type == "cpu" else {})):
        import deepspeed

    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    if _is_worth_telling not in logger.filters:
        logger.addFilter(_is_worth_telling)
    # DeepSpeed calls collectives by names that torch has others for by now; a user can do nothing about it.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    accelerator = _accelerator(deepspeed, device.type)
    if device.type == "cpu":
        # Its own collectives for the CPU want a compiler, and leave shared memory behind when they are killed.
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    else:
        _keep_to_current_device(accelerator)
    return deepspeed


def _accelerator(deepspeed: Any, device_type: str) -> Any:
    """Return what stands for a kind of device in DeepSpeed, in use from now on: a process may have used another before."""
    present = deepspeed.accelerator.get_accelerator()
    if present.device_name() == device_type:
        return present
    if device_type not in ACCELERATORS:
        raise ValueError(
            f"strategy='deepspeed' on {device_type!r}: DeepSpeed does not support it, and would compute on "
            f"{present.device_name()!r}; choose 'fsdp', or call deepspeed.accelerator.set_accelerator with a class for "
            f"{device_type!r} before you make the Trainer."
        )
    module = importlib.import_module(f"deepspeed.accelerator.{device_type}_accelerator")
    general = importlib.import_module("deepspeed.accelerator.abstract_accelerator").DeepSpeedAccelerator
    kinds = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, general)]
    deepspeed.accelerator.set_accelerator(next(each for each in kinds if each is not general)())
    return deepspeed.accelerator.get_accelerator()


def _keep_to_current_device(accelerator: Any) -> None:
    """Let DeepSpeed compute on the current device where it would take LOCAL_RANK for its number.

    LOCAL_RANK counts processes: it is 0 on the device 2 of `devices=[2, 3]`, and 1 where a second task sees one device of
    its own. DeepSpeed names devices by it, as the text that it is, when it shards parameters and in its first steps.
    """
    name_of = accelerator.device_name
    if getattr(name_of, "keeps_to_current_device", False):
        return

    def device_name(index: Any = None) -> str:
        return str(accelerator.current_device_name() if isinstance(index, str) else name_of(index))

    device_name.keeps_to_current_device = True  # type: ignore[attr-defined]
    accelerator.device_name = device_name


def _is_worth_telling(record: logging.LogRecord) -> bool:
    told = record.getMessage()
    return not any(
        text in told for text in ("untested optimizer", "learning rate from scheduler before it has started")
    )
