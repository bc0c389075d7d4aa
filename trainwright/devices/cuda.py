"""CUDA: everything that only CUDA has. To torch, ROCm is the same device under the same name."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["VARIABLES"]

NAME = "cuda"
GENERATOR_BYTES = 16
"""A seed and an offset."""
OUT_OF_MEMORY = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",  # for a workspace that does not fit
    "HIP out of memory",
    "HIP error: out of memory",
)
"""Texts of out-of-memory errors."""
VARIABLES = ("CUDA", "CUBLAS", "NCCL", "NVIDIA", "HIP", "ROCR")
"""Prefixes of its environment variables."""


def is_available() -> bool:
    """Return whether torch sees a CUDA device."""
    return torch.cuda.is_available()


def multiplies_float8(device: torch.device) -> bool:
    """Return whether a device has kernels that multiply matrices in float8, as since compute capability 8.9."""
    return device.type == NAME and torch.cuda.get_device_capability(device) >= (8, 9)


def try_algorithms(enabled: bool) -> None:
    """Choose whether cuDNN measures the fastest algorithm for every shape, or uses its default."""
    torch.backends.cudnn.benchmark = enabled


def record_memory(enabled: bool) -> None:
    """Begin to record all allocations with their stacks, or stop and forget them."""
    # By default every allocation of a run stays in the host's memory.
    torch.cuda.memory._record_memory_history(enabled="all" if enabled else None, max_entries=100_000)


def save_memory_record(path: str) -> None:
    """Write the recorded allocations to a local file, for https://docs.pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]


def check_memory_snapshot(when: Any, device: torch.device) -> None:
    """Raise ValueError for memory_snapshot= on a device whose memory torch cannot record."""
    if when is not None and device.type != NAME:
        raise ValueError(
            f"memory_snapshot={when!r} needs CUDA, whose memory torch can record, but this Trainer runs on {device.type}. Omit "
            "it, or run on a GPU."
        )


def check_generator_state(state: Tensor) -> None:
    """Raise ValueError for an invalid state of a CUDA generator, on any machine."""
    numel, offset = state.numel(), int(state[8:].view(torch.int64)[0]) if len(state) == GENERATOR_BYTES else 0
    if numel != GENERATOR_BYTES or offset < 0 or offset % 4:
        raise ValueError(f"{numel} bytes, with the offset {offset}")


FOR_EARLIER_READERS: dict[str, list[Tensor]] = {NAME: []}
"""An entry for older code, which reads the generator states of a checkpoint by device number."""


def lock_pages(address: int, size: int) -> bool:
    """Lock host memory in place, so that every device can copy from and into it, and return whether that worked."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    portable = 1
    if int(runtime.cudaHostRegister(address, size, portable)) == 0:
        return True
    with suppress(RuntimeError):
        torch.ones(1, device=NAME)  # otherwise the next kernel launch would raise this error
    return False


def unlock_pages(address: int) -> None:
    """Unlock memory that `lock_pages` has locked."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(address)


def makes_graphs(options: dict[str, Any]) -> bool:
    """Return whether these options of torch.compile make CUDA graphs."""
    if options.get("backend") == "cudagraphs" or options.get("mode") in ("reduce-overhead", "max-autotune"):
        return True
    return bool((options.get("options") or {}).get("triton.cudagraphs"))


class GraphGradients:
    """Copies gradients out of the memory of CUDA graphs before the next graph overwrites them.

    Autograd may use the output of a backward graph as `.grad` without a copy. A second batch of a window, or a validation
    within the window, would overwrite it (pytorch/pytorch#169545).
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._copies: list[tuple[nn.Parameter, int]] | None = None
        """The parameters on a GPU, with the addresses of the last copies of their gradients, or None before the first call."""

    def keep(self) -> None:
        """Replace gradients by copies, except earlier copies."""
        if self._copies is None:
            self._copies = [(parameter, 0) for parameter in self._module.parameters() if parameter.is_cuda]
        for number, (parameter, copy) in enumerate(self._copies):
            gradient = parameter.grad
            if type(gradient) is not Tensor:
                continue
            if gradient.layout is not torch.strided:  # it has no address
                parameter.grad = gradient.clone()
            elif gradient.data_ptr() != copy:
                parameter.grad = gradient.clone()
                self._copies[number] = (parameter, parameter.grad.data_ptr())
