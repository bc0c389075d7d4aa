"""Reduction: the epoch values of every rank into one exact number each.

One all_gather of a fixed-size float64 vector carries a hash of the key set, the number of keys and a (value, weight) pair
for each. Only where the hashes differ (a rank without batches logged nothing) do the ranks exchange the key sets and
gather once more; only where the pairs outgrow the vector do they follow in a second one.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainwright.distributed import collectives
from trainwright.trainer.metrics import LoggedValue, MetricCollector

VECTOR_LENGTH = 512  # float64: 4 KiB a rank, room for 255 keys
NEUTRAL = {"mean": 0.0, "sum": 0.0, "min": float("inf"), "max": float("-inf")}


class Key(NamedTuple):
    """One epoch value, as every rank describes it."""

    name: str
    reduce_fx: str
    on_step: bool
    prog_bar: bool
    logger: bool
    attribute: str

    @property
    def epoch_name(self) -> str:
        """Return the name that the epoch's value is logged under."""
        return f"{self.name}_epoch" if self.on_step else self.name


def reduce_epoch(
    collector: MetricCollector, module: nn.Module, world_size: int, device: torch.device
) -> dict[Key, float]:
    """Return each epoch value over all ranks, in the order in which they were logged.

    Collective: call on every rank.
    """
    values = {_key(logged): logged for logged in collector.values.values() if logged.on_epoch}
    keys = sorted(values)
    if world_size > 1:
        reduced, keys = _gathered(keys, values, device)
    else:
        reduced = {key: _combine(key, [values[key].total()]) for key in keys if not key.attribute}
    for key in keys:
        if key.attribute:
            reduced[key] = _computed(module, key)
    order = [*values, *(key for key in keys if key not in values)]
    return {key: reduced[key] for key in order}


def _key(logged: LoggedValue) -> Key:
    return Key(logged.name, logged.reduce_fx, logged.on_step, logged.prog_bar, logged.logger, logged.attribute)


def _gathered(
    keys: list[Key], values: dict[Key, LoggedValue], device: torch.device
) -> tuple[dict[Key, float], list[Key]]:
    """Return the reduced plain values and the union of the keys of all ranks."""
    head = [float(_digest(keys)), float(len(keys))]
    body = _pairs(keys, values)
    fits = len(head) + len(body) <= VECTOR_LENGTH
    rows = _all_gather(head + (body if fits else []), VECTOR_LENGTH, device)
    if len({row[0] for row in rows}) > 1:
        described = collectives.gather_object([list(key) for key in keys])
        keys = sorted({Key(*key) for rank_keys in described for key in rank_keys})
        rows = _all_gather(_pairs(keys, values), 2 * len(keys), device)
    elif fits:
        rows = [row[2:] for row in rows]
    else:
        rows = _all_gather(body, len(body), device)
    reduced = {}
    for place, key in enumerate(keys):
        if not key.attribute:
            reduced[key] = _combine(key, [(row[2 * place], row[2 * place + 1]) for row in rows])
    return reduced, keys


def _pairs(keys: list[Key], values: dict[Key, LoggedValue]) -> list[float]:
    pairs: list[float] = []
    for key in keys:
        logged = values.get(key)
        pairs += (NEUTRAL[key.reduce_fx], 0.0) if logged is None or key.attribute else logged.total()
    return pairs


def _all_gather(numbers: list[float], length: int, device: torch.device) -> list[list[float]]:
    vector = torch.zeros(length, dtype=torch.float64)
    vector[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    return [row.tolist() for row in collectives.all_gather(vector.to(device))]


def _digest(keys: list[Key]) -> int:
    text = json.dumps([list(key) for key in keys])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")  # 48 bits: exact in a float64


def _combine(key: Key, pairs: list[tuple[float, float]]) -> float:
    totals = [total for total, weight in pairs if weight > 0]
    if not totals:
        return float("nan")
    if key.reduce_fx in ("min", "max"):
        values = torch.tensor(totals, dtype=torch.float64)
        return float(values.min() if key.reduce_fx == "min" else values.max())  # a NaN among them stays one
    total = sum(totals)
    return total / sum(weight for _, weight in pairs) if key.reduce_fx == "mean" else total


def _computed(module: nn.Module, key: Key) -> float:
    """Compute a torchmetrics object; it gathers its own state over the ranks."""
    metric: Any = module.get_submodule(key.attribute)
    with warnings.catch_warnings():
        # A rank without a batch of its own computes too; that it had no update is no news to the user.
        warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
        value = metric.compute()
    metric.reset()  # on every rank: one without a batch of its own would keep what it computed, and not take part again
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(
            f"the metric logged as {key.name!r} computes a tensor of shape {tuple(value.shape)}; accepted is one element. "
            "Log its elements under names of their own."
        )
    return float(value)
