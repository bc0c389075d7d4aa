"""Named state: what modules and optimizers hold, by the names under which a checkpoint stores it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.tensors import Piece
from trainwright.strategies import Strategy
from trainwright.strategies.base import clean_name

Named = list[tuple[Optimizer, dict[Tensor, str]]]
"""Each optimizer, with the names of all parameters."""


def model_pieces(strategy: Strategy, modules: Sequence[nn.Module]) -> list[Piece]:
    """Return this rank's share of the modules' tensors; those after the first have the module's number before their names."""
    return [
        _prefixed(piece, f"{number}." if number else "")
        for number, module in enumerate(modules)
        for piece in strategy.model_pieces(module)
    ]


def optimizer_pieces(strategy: Strategy, named: Named) -> list[Piece]:
    """Return this rank's share of the optimizers' tensors, as "optimizer number/parameter/key"."""
    return [
        _prefixed(piece, f"{number}/")
        for number, (optimizer, names) in enumerate(named)
        for piece in strategy.optimizer_pieces(optimizer, names)
    ]


def named_optimizers(modules: Iterable[nn.Module], optimizers: Sequence[Optimizer]) -> Named:
    """Return each optimizer with the names of the modules' parameters, and of those that no module holds."""
    names: dict[Tensor, str] = {}
    for number, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            names.setdefault(parameter, (f"{number}." if number else "") + clean_name(name))
    for number, optimizer in enumerate(optimizers):
        for position, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            names.setdefault(parameter, f"parameter {number}.{position}")  # not the module's own
    return [(optimizer, names) for optimizer in optimizers]


def _prefixed(piece: Piece, prefix: str) -> Piece:
    return Piece(prefix + piece.name, piece.shape, piece.start, piece.tensor, piece.writer) if prefix else piece
