"""DeepSpeed's word for the simulated device, which it does not know by itself."""

from __future__ import annotations

import importlib
from typing import Any

import torch


def let_deepspeed_know() -> None:
    """Make DeepSpeed compute on the simulated device, if there is one. It supports other devices already."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or kind.type != "sim":
        return
    import deepspeed
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    module: Any = torch.get_device_module("sim")

    class Simulated(CPU_Accelerator):
        Stream, Event = module.Stream, module.Event
        stream, current_stream = staticmethod(module.stream), staticmethod(module.current_stream)

        def __init__(self) -> None:
            super().__init__()
            self._name = "sim"
            self._communication_backend_name = "simccl"

        def device_name(self, device_index: Any = None) -> str:
            return "sim" if device_index is None else f"sim:{device_index}"

        def set_device(self, device_index: Any) -> None:
            torch.accelerator.set_device_index(device_index)

        def current_device(self) -> int:
            return torch.accelerator.current_device_index()

        def current_device_name(self) -> str:
            return f"sim:{torch.accelerator.current_device_index()}"

        def device_count(self) -> int:
            return torch.accelerator.device_count()

        def synchronize(self, device_index: Any = None) -> None:
            torch.accelerator.synchronize()

        def default_stream(self, device_index: Any = None) -> Any:
            return module.current_stream()

        def is_synchronized_device(self) -> bool:
            return False

        def on_accelerator(self, tensor: torch.Tensor) -> bool:
            return tensor.device.type == "sim"

        def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
            return tensor.pin_memory()

    deepspeed.accelerator.set_accelerator(Simulated())
    # The collectives that it compiles for the CPU.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
