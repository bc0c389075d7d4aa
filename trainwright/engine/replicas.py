"""Replicas: checks that the model's layout, and settings that no collective compares, are the same on every rank.

They are compared over the key-value store. Layouts come before the first collective on weights, which would hang or mix up
tensors that differ. If every rank chooses a setting by chance, the replicas would drift apart unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainwright.distributed.ranks import Ranks
from trainwright.errors import a_type_of
from trainwright.rank_zero import rank_zero_warn
from trainwright.strategies.base import UNSAVED_KEYS
from trainwright.tensor_names import clean_name

Row = tuple[str, str]
"""A tensor's name, and its description for the comparison."""
Settings = dict[str, str]
"""Values as text, by their descriptions."""
SHOWN = 5
"""The number of settings that an error names."""
ADVICE = (
    "A setting that each rank chooses by itself (by chance, by the clock, by a study) has to be the same on all: choose it "
    "after tw.seed_everything, hand rank 0's to the others with trainer.engine.broadcast, or pass it on the command line."
)


def refuse_unlike_models(module: nn.Module, ranks: Ranks) -> None:
    """Raise ValueError on every rank for a model that differs between ranks. Collective."""
    if ranks.world_size == 1:
        return
    layouts: list[list[Row]] = ranks.differing(layout_of(module), "comparing the models")
    if not layouts:
        return
    rank = next(rank for rank, layout in enumerate(layouts) if layout != layouts[0])
    pairs = zip_longest(layouts[0], layouts[rank])
    here, there = (
        "nothing more" if row is None else f"{row[0]!r}, a {row[1]}" for row in next((a, b) for a, b in pairs if a != b)
    )
    raise ValueError(
        f"rank {rank} built a different {type(module).__name__} than rank 0: rank 0 has {here} where rank {rank} has {there}. "
        "Build the same model on every rank (the weights may differ): do not branch on the rank, and freeze the same "
        "parameters everywhere."
    )


def layout_of(module: nn.Module) -> list[Row]:
    """Return the parameters, then the buffers, in the module's order."""

    def described(tensor: Tensor, kind: str) -> str:
        shape = "of a shape not known yet" if is_lazy(tensor) else f"of shape {tuple(tensor.shape)}"
        frozen = ", frozen" if kind == "parameter" and not tensor.requires_grad else ""
        return f"{kind} {shape} and {tensor.dtype}{frozen}"

    rows = [(clean_name(name), described(tensor, "parameter")) for name, tensor in module.named_parameters()]
    return rows + [(clean_name(name), described(tensor, "buffer")) for name, tensor in module.named_buffers()]


def refuse_groups(module: nn.Module) -> None:
    """Raise TypeError for a module whose `parameters()` returns an optimizer's groups, or anything but tensors."""
    for path, layer in module.named_modules():
        if type(layer).parameters is nn.Module.parameters:
            continue
        for parameter in layer.parameters():
            if not isinstance(parameter, Tensor):
                where = f"{path!r} ({type(layer).__name__})" if path else type(layer).__name__
                raise TypeError(
                    f"parameters() of {where} returns {a_type_of(parameter)}; it has to return tensors, as torch's does. Give "
                    "the method that returns an optimizer's groups another name, such as parameter_groups."
                )


def refuse_unlike_optimizers(optimizers: Sequence[Optimizer], ranks: Ranks) -> None:
    """Raise ValueError on every rank for optimizers whose kinds or options differ between ranks. Collective."""
    if unlike := _unlike(optimizer_settings(optimizers), ranks):
        raise ValueError(f"the optimizers of the ranks differ, and so would their weights: {unlike}. {ADVICE}")


def refuse_unlike_arguments(arguments: Mapping[str, Any], owner: str, ranks: Ranks) -> None:
    """Raise ValueError on every rank for plain arguments that differ between ranks. Collective."""
    if unlike := _unlike({name: repr(value) for name, value in arguments.items() if is_plain(value)}, ranks, owner):
        raise ValueError(f"the ranks gave the {owner} other arguments: {unlike}. {ADVICE}")


def warn_of_unlike_settings(module: nn.Module, hyper_parameters: Mapping[str, Any], ranks: Ranks) -> None:
    """Warn if hyper-parameters, or numbers among a module's attributes, differ between ranks. Collective."""
    settings = {f"hyper-parameter {name!r}": repr(value) for name, value in hyper_parameters.items() if is_plain(value)}
    settings |= {
        f"attribute {f'{path}.{name}'.lstrip('.')!r}": repr(value)
        for path, child in module.named_modules()
        for name, value in vars(child).items()
        if type(value) in (bool, int, float) and not name.startswith("_")
    }
    # A module that stores its rank's number does so on purpose.
    numbers = [str(rank) for rank in range(ranks.world_size)]
    if unlike := _unlike(settings, ranks, accepted=numbers):
        rank_zero_warn(f"the ranks train modules of different settings: {unlike}. {ADVICE}", stacklevel=2)


def optimizer_settings(optimizers: Iterable[Optimizer]) -> Settings:
    """Return the kinds of optimizers and their options, except options that choose an implementation."""
    settings: Settings = {}
    for number, optimizer in enumerate(optimizers):
        where = f"optimizer {number}"
        settings[where] = type(optimizer).__name__
        for index, group in enumerate(optimizer.param_groups):
            settings[f"the number of parameters in group {index} of {where}"] = str(len(group["params"]))
            for name, value in group.items():
                # A rate may be a tensor, for torch.compile.
                plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
                if name not in UNSAVED_KEYS and is_plain(plain):
                    settings[f"{name} of group {index} of {where}"] = repr(plain)
    return settings


def _unlike(settings: Settings, ranks: Ranks, owner: str = "run", accepted: Sequence[str] = ()) -> str:
    """Return the settings that differ between ranks in words, except if their values are the `accepted` ones."""
    by_rank: list[Settings] = ranks.differing(settings, f"comparing settings of the {owner}")
    texts = []
    for name in dict.fromkeys(name for local in by_rank for name in local):
        values = [local.get(name, "nothing") for local in by_rank]
        if len(set(values)) > 1 and values != accepted:
            rank = next(rank for rank, value in enumerate(values) if value != values[0])
            texts.append(f"{name} is {values[0]} on rank 0 and {values[rank]} on rank {rank}")
    return joined(texts)


def joined(texts: Sequence[str]) -> str:
    """Return the first texts as one, with the number of the others."""
    return "; ".join(texts[:SHOWN]) + (f", and {len(texts) - SHOWN} more" if len(texts) > SHOWN else "")


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a text, a boolean, None, or made of these."""
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, [*value, *value.values()]))
    return value is None or type(value) in (bool, int, float, str)
