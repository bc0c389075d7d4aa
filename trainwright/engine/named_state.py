"""Named state: what modules and optimizers hold, by the names under which a checkpoint stores it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.tensors import Piece
from trainwright.strategies import Strategy
from trainwright.strategies.base import clean_name

STRAY = "parameter"
"""What a parameter is called that no module holds; the optimizer's number and its place there follow."""
Named = list[tuple[Optimizer, dict[Tensor, str]]]
"""Each optimizer, with the names of all parameters."""


def model_pieces(strategy: Strategy, modules: Sequence[nn.Module]) -> list[Piece]:
    """Return this rank's share of the modules' tensors."""
    return [
        _prefixed(piece, prefix_of(number))
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
            names.setdefault(parameter, prefix_of(number) + clean_name(name))
    for number, position, stepped in _stepped(optimizers):
        names.setdefault(stepped, f"{STRAY} {number}.{position}")
    return [(optimizer, names) for optimizer in optimizers]


def stray_pieces(strategy: Strategy, modules: Iterable[nn.Module], optimizers: Sequence[Optimizer]) -> list[Piece]:
    """Return this rank's share of the parameters that optimizers step and no module holds."""
    own: set[Tensor] = {parameter for module in modules for parameter in module.parameters()}
    holder = nn.Module()
    for number, position, parameter in _stepped(optimizers):
        if parameter in own:
            continue
        own.add(parameter)
        name = f"{STRAY} {number}"
        if not hasattr(holder, name):
            holder.add_module(name, nn.Module())
        if isinstance(parameter, nn.Parameter):
            holder.get_submodule(name).register_parameter(str(position), parameter)
        else:
            holder.get_submodule(name).register_buffer(str(position), parameter)
    return strategy.model_pieces(holder)


def _stepped(optimizers: Iterable[Optimizer]) -> Iterator[tuple[int, int, Tensor]]:
    """Yield each parameter with its optimizer's number and its place in that."""
    for number, optimizer in enumerate(optimizers):
        for position, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            yield number, position, parameter


def prefix_of(number: int) -> str:
    """Return what stands before the names of a module; torch lets none of the first one's own begin with a dot."""
    return f".{number}." if number else ""


def _prefixed(piece: Piece, prefix: str) -> Piece:
    return Piece(prefix + piece.name, piece.shape, piece.start, piece.tensor, piece.writer) if prefix else piece
