"""Replication: buffers and gradients that a strategy keeps equal on all ranks, because its engine does not."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainwright.strategies.ddp.vendor import broadcast_coalesced
from trainwright.strategies.divided_optimizers import parameters_of, with_gradients
from trainwright.strategies.module_checks import refuse_unaveraged
from trainwright.value_kinds import is_dtensor


def equalize(tensors: Iterable[Tensor]) -> None:
    """Replace tensors by rank 0's, in place. Collective: call on every rank."""
    present = [tensor.detach() for tensor in tensors if not is_lazy(tensor) and tensor.numel() > 0]
    if present and dist.is_initialized() and dist.get_world_size() > 1:
        broadcast_coalesced(present)


class SyncedBuffers:
    """Broadcasts rank 0's buffers before the first training forward of a window, for modules that train parameters.

    Not before every forward: two forwards may share one backward, which fails if a buffer changed in between.
    """

    def __init__(self) -> None:
        self._slots: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        self._due: set[nn.Module] = set()

    def track(self, module: nn.Module, skipped: Collection[str] = ()) -> None:
        """Broadcast a module's buffers from its next step on, except the skipped names. Call again after changes."""
        # Owners and names, not tensors: a step may replace a buffer.
        slots = [
            (owner, name)
            for path, owner in module.named_modules()
            for name in owner._buffers
            if f"{path}.{name}".removeprefix(".") not in skipped
        ]
        self._slots.pop(module, None)
        self._due.discard(module)
        if slots and any(parameter.requires_grad for parameter in module.parameters()):
            self._slots[module] = slots
            self._due.add(module)

    def begin_step(self, module: nn.Module) -> None:
        """Broadcast if due; without gradients, do nothing. Collective: call before every forward."""
        if module not in self._due or not torch.is_grad_enabled():
            return
        self._due.discard(module)
        present = (owner._buffers.get(name) for owner, name in self._slots[module])
        equalize(buffer for buffer in present if isinstance(buffer, Tensor))

    def end_window(self) -> None:
        """Broadcast before the next step."""
        self._due.update(self._slots)

    def clear(self) -> None:
        self._slots.clear()
        self._due.clear()


class DeferredAllReduce:
    """Averages gradients that no engine reduces in backward, once at the end of a step.

    A gradient that only some ranks have counts as zero on the others.
    """

    def __init__(self) -> None:
        self._parameters: set[Tensor] = set()

    def unknown(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that are neither shards nor registered."""
        return [
            parameter for parameter in parameters if not is_dtensor(parameter) and parameter not in self._parameters
        ]

    def adopt(self, module: nn.Module) -> None:
        """Register a module's unknown parameters, with rank 0's values. Collective."""
        created = self.unknown(module.parameters())
        equalize(created)
        self._parameters.update(created)

    def clear(self) -> None:
        self._parameters.clear()

    def reduce(self, optimizer: Optimizer, modules: Iterable[nn.Module], strategy: str) -> None:
        """Average the gradients of an optimizer's parameters. Collective.

        Raises:
            RuntimeError: one of the modules' other gradients would not be averaged.
        """
        refuse_unaveraged(strategy, modules, self.unknown(with_gradients(optimizer)))
        created = self._parameters
        tracked: list[Tensor] = [p for p in parameters_of(optimizer) if p in created] if created else []
        if not tracked or dist.get_world_size() == 1:
            return
        used = torch.tensor([float(p.grad is not None) for p in tracked], device=tracked[0].device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        buckets: dict[torch.dtype, list[Tensor]] = {}
        for parameter, is_used in zip(tracked, used.tolist(), strict=True):  # NOTE: waits for the device
            if is_used:
                buckets.setdefault(parameter.dtype, []).append(parameter)
        for bucket in buckets.values():
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).div_(dist.get_world_size())
            dist.all_reduce(flat)
            parts = torch.split(flat, [p.numel() for p in bucket])
            for parameter, gradient, part in zip(bucket, gradients, parts, strict=True):
                gradient.copy_(part.view(gradient.shape))
                parameter.grad = gradient
