"""Reduction: turns the epoch values of every rank into one exact number each.

One gather carries the keys of every rank with their (value, weight) pairs, since a rank without batches has logged nothing. A
torchmetrics object gathers its own state, in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from trainwright.distributed import collectives
from trainwright.trainer.logged_value import Key, read_all
from trainwright.trainer.metric_objects import compute_metrics, reset_metrics
from trainwright.trainer.metrics import MetricCollector
from trainwright.value_kinds import is_metric


def reduce_epoch(collector: MetricCollector, module: nn.Module, done: Collection[Key] = ()) -> dict[Key, float]:
    """Return each epoch value over all ranks, in the order of logging; a value of rank 0 alone on rank 0 only.

    Values that are `done` are omitted. Metric objects are computed, not reset. Collective: call on every rank.
    """
    logged_values = [logged for logged in collector.values.values() if logged.on_epoch and not logged.is_ignored]
    values = {logged.key: logged for logged in logged_values if logged.key not in done}
    totals = {key: logged.total() for key, logged in values.items() if not key.attribute}
    numbers = read_all([total for total, _ in totals.values()])  # one transfer from the device
    pairs = {key: [number, totals[key][1]] for key, number in zip(totals, numbers, strict=True)}
    of_ranks: dict[Key, list[list[float]]] = {key: [pairs[key]] for key in pairs if key.rank_zero_only}
    of_ranks = {key: of_ranks.get(key, []) for key in values}
    shared = [[list(key), pairs.get(key, [])] for key in values if not key.rank_zero_only]
    for rank in collectives.gather_object(shared):
        for fields, pair in rank:
            of_ranks.setdefault(Key(*fields), []).append(pair)
    computed = {key: number for key, number in collector.computed.items() if key not in done}
    keys = [key for key in of_ranks if key.attribute and key not in computed]
    computed |= compute_metrics(module, keys)
    reduced = {key: computed[key] if key.attribute else _combine(key, of_rank) for key, of_rank in of_ranks.items()}
    return reduced | computed  # those of loaders that have ended on other ranks only


def end_loader(collector: MetricCollector, module: nn.Module) -> None:
    """Compute and reset the Metric objects of the current loader. Collective: call on every rank, even one without a batch."""
    # The module is the same on all ranks, so all return here or none does.
    if collector.loader is None or not any(is_metric(child) for child in module.modules()):
        return
    logged_values = [logged for logged in collector.values.values() if logged.loader == collector.loader]
    keys = [list(logged.key) for logged in logged_values if logged.on_epoch and logged.key.attribute]
    shared = {Key(*fields) for rank in collectives.gather_object(keys) for fields in rank}
    collector.computed.update(compute_metrics(module, shared))
    reset_metrics(module, shared)


def _combine(key: Key, pairs: list[list[float]]) -> float:
    totals = [total for total, weight in pairs if weight > 0]
    if not totals:
        return float("nan")
    if key.reduce_fx in ("min", "max"):
        values = torch.tensor(totals, dtype=torch.float64)
        return float(values.min() if key.reduce_fx == "min" else values.max())  # NaN if one is NaN
    return sum(totals) / (sum(weight for _, weight in pairs) if key.reduce_fx == "mean" else 1)
