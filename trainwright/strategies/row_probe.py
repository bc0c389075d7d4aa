"""Row probe: whether an optimizer steps tensors sharded by rows (DTensors) as it steps whole ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from trainwright.distributed import collectives
from trainwright.strategies.step_probe import (
    STEPS,
    TOLERANCE,
    Untried,
    set_apart,
    shapes_of,
    stepped,
    stepped_whole,
    steps_elements,
)


def refuse_sharded_steps(optimizer: Optimizer, mesh: DeviceMesh, strategy: str) -> None:
    """Raise ValueError for an optimizer that steps sharded tensors differently than whole ones, or not at all. Collective.

    Some take the local shard for the whole, as `float(gradient.sum())` does. The optimizer is not changed.
    """
    if steps_elements(optimizer):
        return
    told = ""
    try:
        distance = _distance(optimizer, mesh)
    except Untried:  # its first step will show
        distance = 0.0
    except Exception as error:
        distance, told = math.inf, f" ({type(error).__name__}: {str(error).partition(chr(10))[0][:200]})"
    found = collectives.gather_object([distance if math.isfinite(distance) else None, told])
    if any(far is None or far > TOLERANCE for far, _ in found):
        told = next((text for _, text in found if text), "")
        raise ValueError(
            f"{type(optimizer).__name__} does not compute on the sharded parameters (DTensors) that strategy={strategy!r} "
            f"gives it as on whole ones{told}. Use another optimizer, such as AdamW, or strategy='ddp' or 'ddp_sharded', where "
            "a parameter is stepped whole."
        )


def _distance(optimizer: Optimizer, mesh: DeviceMesh) -> float:
    """Return how far sharded tensors end up from whole ones, relative to the distance moved."""
    generator = torch.Generator().manual_seed(0)
    device = torch.device(mesh.device_type)

    def drawn(shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=generator).to(device)

    def rows(tensor: Tensor) -> Tensor:
        return tensor.chunk(mesh.size())[dist.get_rank()] if tensor.dim() else tensor

    def sharded(tensor: Tensor) -> Tensor:
        # Every rank has drawn the same, so nothing is sent.
        return DTensor.from_local(rows(tensor).clone(), mesh, [Shard(0)], run_check=False) if tensor.dim() else tensor

    # Equal numbers of rows, so that every rank fails alike.
    shapes = [[_even(shape, mesh.size()) for shape in shapes_of(group)] for group in optimizer.param_groups]
    starts = [[drawn(shape) for shape in group] for group in shapes]
    gradients = [[[drawn(shape) * 0.1 for shape in group] for group in shapes] for _ in range(STEPS)]
    with set_apart():
        whole = stepped_whole(optimizer, starts, gradients)
        parts = stepped(
            optimizer,
            [[sharded(each) for each in group] for group in starts],
            [[[sharded(each) for each in group] for group in step] for step in gradients],
        )
    moved = distance = 0.0
    for before, after, found in zip(starts, whole, parts, strict=True):
        for start, end, part in zip(before, after, found, strict=True):
            moved = max(moved, float((end - start).abs().max()))
            local = part.to_local() if isinstance(part, DTensor) else part
            distance = max(distance, float((rows(end) - local).abs().max()))
    return distance / moved if moved else 0.0


def _even(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    return (-(-shape[0] // ranks) * ranks, *shape[1:]) if shape else shape
