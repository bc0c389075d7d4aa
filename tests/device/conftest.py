"""The accelerator that torch has here: a real one under `make test-gpu`, the simulated one under `make test-device`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """The device that this process computes on."""
    kind = torch.accelerator.current_accelerator()
    return torch.device(kind.type, torch.accelerator.current_device_index())


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """The device, where it is CUDA's."""
    if device.type != "cuda":
        pytest.skip(f"it is of CUDA alone, and {device.type} is here")
    return device


@pytest.fixture
def clean_memory(device: torch.device) -> Iterator[None]:
    """Free the memory that earlier tests and this one have used on the device."""
    _let_go()
    yield
    _let_go()


@pytest.fixture
def refusing_reads(device: torch.device) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Return a factory of contexts within which the host may not wait for the device."""
    module: Any = torch.get_device_module(device)
    if not hasattr(module, "set_sync_debug_mode"):
        pytest.skip(f"{device.type} does not tell when the host waits for it")

    @contextmanager
    def refusing() -> Iterator[None]:
        module.set_sync_debug_mode("error")
        try:
            yield
        finally:
            module.set_sync_debug_mode("default")

    yield refusing
    module.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def _no_violations(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail where the simulated device has found memory that was used too early, too late or by two."""
    watches = request.node.get_closest_marker("gpu") is not None and hasattr(torch, "sim")
    if watches:
        torch.sim.synchronize()  # type: ignore[attr-defined]
        torch.sim.clear_violations()  # type: ignore[attr-defined]
    yield
    if watches:
        torch.sim.synchronize()  # type: ignore[attr-defined]
        found = torch.sim.violations()  # type: ignore[attr-defined]
        torch.sim.clear_violations()  # type: ignore[attr-defined]
        assert found == []


def _let_go() -> None:
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
