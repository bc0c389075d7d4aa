"""Split groups: separates an optimizer's shards from its whole parameters, because foreach kernels take one kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

OWN = ("params", "param_names")
"""Keys of a group that no write of a step changes."""


@contextmanager
def split_groups(optimizer: Optimizer) -> Iterator[None]:
    """Split every group that holds both kinds in two while the optimizer steps, and keep the step's writes into them."""
    if not any(map(_is_mixed, optimizer.param_groups)):
        yield
        return
    split, handles = _Split(optimizer), []
    if hasattr(optimizer, "_optimizer_step_post_hooks"):
        handles = [optimizer.register_step_pre_hook(split.part), optimizer.register_step_post_hook(split.join)]
        optimizer._optimizer_step_post_hooks.move_to_end(handles[1].id, last=False)  # type: ignore[attr-defined]
    else:  # it has never called torch's constructor
        split.part()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        split.end()  # of a step that has raised, or that has no hooks


class _Split:
    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._depth = 0  # a subclass's step calls its base's step, with the hooks around both
        self._whole: list[dict[str, Any]] | None = None
        self._parts: list[list[dict[str, Any]]] = []

    def part(self, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._whole = whole = self._optimizer.param_groups
            self._parts = [[{**group, "params": kind} for kind in by_kind(group["params"])] for group in whole]
            self._optimizer.param_groups = [part for each in self._parts for part in each]

    def join(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.end()

    def end(self) -> None:
        if self._whole is None:
            return
        for group, each in zip(self._whole, self._parts, strict=True):
            group.update((key, value) for part in each[:1] for key, value in part.items() if key not in OWN)
        self._optimizer.param_groups, self._whole, self._depth = self._whole, None, 0


def _is_mixed(group: dict[str, Any]) -> bool:
    """Return whether a group holds both kinds, and a foreach or fused kernel may step it."""
    is_foreach = group.get("foreach") or group.get("fused") or any(p.device.type != "cpu" for p in group["params"])
    return bool(is_foreach) and len(by_kind(group["params"])) > 1


def by_kind(parameters: list[Any]) -> list[list[Any]]:
    """Return the lists of shards and of whole parameters that are not empty."""
    kinds = ([p for p in parameters if isinstance(p, DTensor) == is_sharded] for is_sharded in (True, False))
    return [kind for kind in kinds if kind]
