"""CUDA: what no other accelerator has. ROCm is the same to torch, under the same name."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

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
"""What errors of too little memory contain."""

VARIABLES = ("CUDA", "CUBLAS", "NCCL", "NVIDIA", "HIP", "ROCR")
"""What the names of its environment variables begin with."""


def is_available() -> bool:
    """Return whether torch sees a CUDA device."""
    return torch.cuda.is_available()


def try_algorithms(enabled: bool) -> None:
    """Let cuDNN try which algorithm is the fastest for each shape, or take its usual one."""
    torch.backends.cudnn.benchmark = enabled


def check_generator_state(state: Tensor) -> None:
    """Refuse an invalid state of a CUDA generator (ValueError), on any machine."""
    numel, offset = state.numel(), int(state[8:].view(torch.int64)[0]) if len(state) == GENERATOR_BYTES else 0
    if numel != GENERATOR_BYTES or offset < 0 or offset % 4:
        raise ValueError(f"{numel} bytes, with the offset {offset}")


def has_drawn(state: Tensor) -> bool:
    """Return whether numbers were drawn from a CUDA generator since it was seeded."""
    return bool(state[8:].any())


FOR_EARLIER_READERS: dict[str, list[Tensor]] = {NAME: []}
"""What code that reads a checkpoint's states of generators by number looks for in each."""


def earlier_generators(state: Mapping[str, Any]) -> list[Tensor]:
    """Return the states of generators as checkpoints held them before: those of all devices that were visible, by number."""
    return list(state.get(NAME) or ())


def lock_pages(address: int, size: int) -> bool:
    """Lock host memory where it lies, so that every device copies from and into it by itself; return whether that was done."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    portable = 1
    if int(runtime.cudaHostRegister(address, size, portable)) == 0:
        return True
    with suppress(RuntimeError):
        torch.ones(1, device=NAME)  # otherwise the refusal would be raised by whatever kernel is launched next
    return False


def unlock_pages(address: int) -> None:
    """Unlock what `lock_pages` has locked."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(address)


def makes_graphs(options: dict[str, Any]) -> bool:
    """Return whether these options of torch.compile make CUDA graphs."""
    if options.get("backend") == "cudagraphs" or options.get("mode") in ("reduce-overhead", "max-autotune"):
        return True
    return bool((options.get("options") or {}).get("triton.cudagraphs"))


class GraphGradients:
    """Copies gradients out of the memory of CUDA graphs before the next graph writes over them.

    Autograd may take the output of a backward graph for `.grad` without a copy, so a second batch of a window, or a validation
    within one, would find it overwritten (pytorch/pytorch#169545).
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._copies: list[tuple[nn.Parameter, int]] | None = None
        """Each parameter on a GPU, with the address of the last copy of its gradient; None before the first call."""

    def keep(self) -> None:
        """Replace each gradient by a copy, unless it is one."""
        if self._copies is None:
            self._copies = [(each, 0) for each in self._module.parameters() if each.is_cuda]
        for number, (parameter, copy) in enumerate(self._copies):
            gradient = parameter.grad
            if type(gradient) is not Tensor:
                continue
            if gradient.layout is not torch.strided:  # it has no address
                parameter.grad = gradient.clone()
            elif gradient.data_ptr() != copy:
                parameter.grad = gradient.clone()
                self._copies[number] = (parameter, parameter.grad.data_ptr())
