"""Deferred all-reduce: averages gradients that no engine reduces in backward, once before they are used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainwright.strategies.base import broadcast_tensors, refuse_unaveraged, with_gradients


class DeferredAllReduce:
    """Averages gradients at the end of a step; those that only some ranks have count as zero on the others."""

    def __init__(self) -> None:
        self._parameters: dict[Tensor, int | None] = {}

    def track(self, parameters: Iterable[nn.Parameter], owners: Mapping[Tensor, int] | None = None) -> None:
        """Register parameters; with `owners` each gradient is reduced to its rank, and discarded on the others."""
        for parameter in parameters:
            self._parameters[parameter] = None if owners is None else owners[parameter]

    def unknown(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return those that are neither shards nor registered."""
        return [each for each in parameters if not isinstance(each, DTensor) and each not in self._parameters]

    def adopt(self, module: nn.Module) -> None:
        """Register a module's unknown parameters, with rank 0's values. Collective."""
        made = self.unknown(module.parameters())
        broadcast_tensors(made)
        self.track(made)

    def refuse_unknown(self, optimizer: Optimizer, modules: Iterable[nn.Module], strategy: str) -> Self:
        """Raise RuntimeError if the optimizer has a gradient of the modules that would not be averaged."""
        refuse_unaveraged(strategy, modules, self.unknown(with_gradients(optimizer)))
        return self

    def clear(self) -> None:
        self._parameters.clear()

    def reopen(self, optimizer: Optimizer) -> None:
        """Undo the mean of gradients with an owner, before a backward adds to them."""
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            # The other ranks discarded theirs, so the next mean would divide this one by the world size again.
            if parameter.grad is not None and self._parameters.get(parameter) is not None:
                parameter.grad.mul_(dist.get_world_size())

    def reduce(self, optimizer: Optimizer) -> None:
        """Average the gradients of an optimizer's parameters. Collective."""
        if not self._parameters or dist.get_world_size() == 1:
            return
        mine = [p for group in optimizer.param_groups for p in group["params"] if p in self._parameters]
        if not mine:
            return
        used = torch.tensor([float(p.grad is not None) for p in mine], device=mine[0].device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        buckets: dict[tuple[int | None, torch.dtype], list[Tensor]] = {}
        for parameter, is_used in zip(mine, used.tolist(), strict=True):
            if is_used:
                buckets.setdefault((self._parameters[parameter], parameter.dtype), []).append(parameter)
        for (owner, _), parameters in buckets.items():
            self._average(parameters, owner)

    def _average(self, parameters: list[Tensor], owner: int | None) -> None:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).div_(dist.get_world_size())
        if owner is None:
            dist.all_reduce(flat)
        else:
            dist.reduce(flat, dst=owner)
            if owner != dist.get_rank():
                for parameter in parameters:
                    parameter.grad = None
                return
        parts = torch.split(flat, [p.numel() for p in parameters])
        for parameter, gradient, part in zip(parameters, gradients, parts, strict=True):
            gradient.copy_(part.view(gradient.shape))
            parameter.grad = gradient
