"""The accelerator that torch has here: a real one under `make test-gpu`, the simulated one under `make test-device`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """The device that this process computes on."""
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, torch.accelerator.current_device_index())


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """The device, where it is CUDA's."""
    if device.type != "cuda":
        pytest.skip(f"{device.type} has nothing like it: CUDA alone")
    return device


@pytest.fixture
def is_real(device: torch.device) -> bool:
    """Whether a GPU computes, not a simulation of one on the host."""
    return device.type != "sim"


@pytest.fixture
def clean_memory(device: torch.device) -> Iterator[None]:
    """Let go of what earlier tests have left on the device, and of what this one leaves."""
    gc.collect()
    torch.accelerator.empty_cache()
    yield
    gc.collect()
    torch.accelerator.empty_cache()


@pytest.fixture
def refusing_reads(device: torch.device) -> Any:
    """A context within which the host may not wait for the device."""
    module = torch.get_device_module(device)
    if device.type == "cuda":

        def refuse(yes: bool) -> None:
            torch.cuda.set_sync_debug_mode("error" if yes else "default")

    elif hasattr(module, "refuse_sync"):
        refuse = module.refuse_sync
    else:
        pytest.skip(f"{device.type} does not tell when the host waits for it")

    @contextmanager
    def refusing() -> Iterator[None]:
        refuse(True)
        try:
            yield
        finally:
            refuse(False)

    refusing.refuse = refuse  # type: ignore[attr-defined]
    return refusing
