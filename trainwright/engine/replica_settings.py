"""The settings of a replica: what has to be alike on all ranks beside the model's layout, and is no tensor.

A script that each rank runs by itself may choose a learning rate or a dropout by chance, on each rank another one: the ranks
then train replicas that drift apart, and no collective notices. Compared once, over the key-value store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.distributed.ranks import Ranks
from trainwright.rank_zero import rank_zero_warn

Rows = dict[str, str]
"""What a setting is, and its value as text."""

CALL = "the comparison of settings"
SHOWN = 5
"""How many settings an error names."""


def refuse_unlike_optimizers(optimizers: Sequence[Optimizer], ranks: Ranks) -> None:
    """Refuse optimizers whose kinds or options differ between the ranks, on all alike (ValueError). Call on every rank."""
    unlike = _unlike(optimizer_rows(optimizers), ranks)
    if unlike:
        raise ValueError(f"the optimizers of the ranks differ, and so would their weights: {_told(unlike)}. {ADVICE}")


def warn_of_unlike_settings(module: nn.Module, hyper_parameters: Mapping[str, Any], ranks: Ranks) -> None:
    """Warn where hyper-parameters or numbers among a module's attributes differ between ranks. Call on every rank."""
    rows = {f"hyper-parameter {name!r}": repr(value) for name, value in hyper_parameters.items() if _is_plain(value)}
    unlike = _unlike(rows | attribute_rows(module), ranks)
    # A rank that keeps its own number means to.
    numbers = [str(rank) for rank in range(ranks.world_size)]
    unlike = {name: values for name, values in unlike.items() if values != numbers}
    if unlike:
        rank_zero_warn(f"the ranks train modules of different settings: {_told(unlike)}. {ADVICE}", stacklevel=2)


ADVICE = (
    "A setting that each rank chooses by itself (by chance, by the clock, by a study) has to be the same on all: choose it "
    "after tw.seed_everything, hand rank 0's to the others with trainer.engine.broadcast, or pass it on the command line."
)


def optimizer_rows(optimizers: Iterable[Optimizer]) -> Rows:
    """Return each optimizer's kind and the plain options of its groups."""
    rows: Rows = {}
    for number, optimizer in enumerate(optimizers):
        where = f"optimizer {number}"
        rows[where] = type(optimizer).__name__
        for place, group in enumerate(optimizer.param_groups):
            rows[f"the number of parameters in group {place} of {where}"] = str(len(group["params"]))
            for name, value in group.items():
                plain = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
                if name != "params" and _is_plain(plain):
                    rows[f"{name} of group {place} of {where}"] = repr(plain)
    return rows


def attribute_rows(module: nn.Module) -> Rows:
    """Return the numbers among the public attributes of a module and of those in it."""
    rows: Rows = {}
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if type(value) in (bool, int, float) and not name.startswith("_"):
                rows[f"attribute {f'{path}.{name}'.lstrip('.')!r}"] = repr(value)
    return rows


def _unlike(rows: Rows, ranks: Ranks) -> dict[str, list[str]]:
    """Return what differs between the ranks, with the value of each. Call on every rank."""
    all_rows: list[Rows] = ranks.differing(rows, CALL)
    names = dict.fromkeys(name for each in all_rows for name in each)
    values = {name: [each.get(name, "nothing") for each in all_rows] for name in names}
    return {name: each for name, each in values.items() if len(set(each)) > 1}


def _told(unlike: dict[str, list[str]]) -> str:
    said = []
    for name, values in list(unlike.items())[:SHOWN]:
        rank = next(rank for rank, value in enumerate(values) if value != values[0])
        said.append(f"{name} is {values[0]} on rank 0 and {values[rank]} on rank {rank}")
    more = f", and {len(unlike) - SHOWN} more" if len(unlike) > SHOWN else ""
    return "; ".join(said) + more


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(each) for each in value)
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(each) for name, each in value.items())
    return value is None or type(value) in (bool, int, float, str)
