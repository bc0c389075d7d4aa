"""State probe: what state an optimizer makes in its first step, told by a copy of it that steps other tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.strategies.step_probe import twin_of

LARGEST = 1 << 18
"""Elements of a parameter up to which one of its shape is tried: some optimizers keep large ones in another way."""


def state_of_a_step(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that the optimizer's state has after a step, by their keys; none where it cannot be tried.

    Of each group the largest parameter that is trained, of those that are not too large to be tried, stands for all.
    """
    tensors = []
    for group in optimizer.param_groups:
        fitting = [each for each in group["params"] if each.requires_grad and 0 < each.numel() <= LARGEST]
        largest = max(fitting, key=lambda each: int(each.numel()), default=None)
        tensors.append([] if largest is None else [_like(largest)])
    devices = [each.device for group in tensors for each in group if each.device.type == "cuda"]
    try:
        with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"):
            twin = twin_of(optimizer, tensors)
            type(twin).step(twin)
    except Exception:  # its own first step will tell
        return
    for state in twin.state.values():
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, Tensor):
                yield str(key), value


def _like(parameter: Tensor) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(tuple(parameter.shape), dtype=parameter.dtype, device=parameter.device))
    made.grad = torch.zeros_like(made)
    return made
