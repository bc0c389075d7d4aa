"""Parted groups: shards and whole parameters of an optimizer, apart, since torch's kernels over many tensors take one kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

OWN = ("params", "param_names")
"""What a group keeps of its own, whatever a step writes into it."""


@contextmanager
def parted_groups(optimizer: Optimizer) -> Iterator[None]:
    """Let each group that holds both kinds be two for a step, with the same options; what the step writes there is kept."""
    whole = optimizer.param_groups
    if not any(map(_is_mixed, whole)):
        yield
        return
    parts = [[{**group, "params": kind} for kind in _kinds(group["params"])] for group in whole]
    optimizer.param_groups = [part for each in parts for part in each]
    try:
        yield
    finally:
        for group, each in zip(whole, parts, strict=True):
            group.update((key, value) for part in each[:1] for key, value in part.items() if key not in OWN)
        optimizer.param_groups = whole


def by_kind(optimizer: Optimizer) -> list[Any]:
    """Return the parameters of an optimizer that have gradients as groups of one kind each."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return [SimpleNamespace(param_groups=[{"params": kind}]) for kind in _kinds(parameters)]


def _is_mixed(group: dict[str, Any]) -> bool:
    """Return whether a group holds both kinds, and may be stepped by a kernel over many tensors."""
    parameters = group["params"]
    return len({isinstance(each, DTensor) for each in parameters}) > 1 and bool(
        group.get("foreach") or group.get("fused") or any(each.device.type != "cpu" for each in parameters)
    )


def _kinds(parameters: list[Any]) -> list[list[Any]]:
    kinds = ([p for p in parameters if isinstance(p, DTensor) == is_sharded] for is_sharded in (True, False))
    return [kind for kind in kinds if kind]
