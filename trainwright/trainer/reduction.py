"""Reduction: turns the epoch values of every rank into one exact number each.

One all_gather of a fixed-size float64 vector carries a hash of the key set, the number of keys and a (value, weight) pair
for each. Only if the hashes differ (a rank without batches logged nothing) do the ranks exchange the key sets and gather
again; only if the pairs do not fit do they follow in a second gather. A torchmetrics object gathers its own state, in the
same order on every rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection

import torch
from torch import nn

from trainwright.devices.abilities import computes_in
from trainwright.distributed import collectives
from trainwright.trainer.logged_value import Key, LoggedValue, Reduced, read_all
from trainwright.trainer.metric_objects import compute_metrics, reset_metrics
from trainwright.trainer.metrics import MetricCollector
from trainwright.value_kinds import is_metric

VECTOR_LENGTH = 512  # float64: 4 KiB a rank, room for 255 keys
NEUTRAL = {"mean": 0.0, "sum": 0.0, "min": float("inf"), "max": float("-inf")}


def reduce_epoch(
    collector: MetricCollector,
    module: nn.Module,
    world_size: int,
    device: torch.device,
    done: Collection[Key] = (),
) -> dict[Key, Reduced]:
    """Return each epoch value over all ranks, in the order of logging; a value of rank 0 alone on rank 0 only.

    Values that are `done` are left out. Metric objects are computed, not reset. Collective: call on every rank.
    """
    counting = [each for each in collector.values.values() if each.on_epoch and not each.is_ignored]
    values = {logged.key: logged for logged in counting if logged.key not in done}
    computed = {key: number for key, number in collector.computed.items() if key not in done}
    own = {key for key in values if key.rank_zero_only}
    totals = _totals(values)
    keys = sorted((values.keys() | computed.keys()) - own)  # ranks may have logged in different orders
    if world_size > 1:
        gathered, keys = _gathered(keys, totals, device)
        reduced: dict[Key, Reduced] = {**gathered}
    else:
        reduced = {key: _combine(key, [totals[key]]) for key in keys if not key.attribute}
    reduced |= {key: _combine(key, [totals[key]]) for key in own}
    reduced |= computed  # of loaders that have ended: the same on all ranks already
    reduced |= compute_metrics(module, [key for key in keys if key.attribute and key not in computed])
    order = [*values, *(key for key in keys if key not in values)]
    return {key: reduced[key] for key in order}


def end_loader(collector: MetricCollector, module: nn.Module) -> None:
    """Compute and reset the Metric objects of the current loader. Collective: call on every rank, even one without a batch."""
    # The module is the same on all ranks, so all return here or none does.
    if collector.loader is None or not any(is_metric(child) for child in module.modules()):
        return
    of_loader = [each for each in collector.values.values() if each.key.attribute and each.loader == collector.loader]
    keys = union_of_keys([each.key for each in of_loader if each.on_epoch])
    collector.computed.update(compute_metrics(module, keys))
    reset_metrics(module, [*keys, *(each.key for each in of_loader)])


def union_of_keys(keys: list[Key]) -> list[Key]:
    """Return the keys of all ranks, sorted. Collective: call on every rank."""
    described = collectives.gather_object([list(key) for key in keys])
    return sorted({Key(*key) for rank_keys in described for key in rank_keys})


def _totals(values: dict[Key, LoggedValue]) -> dict[Key, tuple[float, float]]:
    """Return this rank's (value, weight) of each plain key, read from the device in one transfer."""
    plain = {key: logged.total() for key, logged in values.items() if not key.attribute}
    numbers = read_all([total for total, _ in plain.values()])
    return {key: (number, weight) for (key, (_, weight)), number in zip(plain.items(), numbers, strict=True)}


def _gathered(
    keys: list[Key], totals: dict[Key, tuple[float, float]], device: torch.device
) -> tuple[dict[Key, float], list[Key]]:
    """Return the reduced plain values and the union of the keys of all ranks."""
    head = [float(_digest(keys)), float(len(keys))]
    body = _pairs(keys, totals)
    fits = len(head) + len(body) <= VECTOR_LENGTH
    rows = _all_gather(head + (body if fits else []), VECTOR_LENGTH, device)
    if len({row[0] for row in rows}) > 1:  # every rank sees the same rows, so all take the same branch
        keys = union_of_keys(keys)
        rows = _all_gather(_pairs(keys, totals), 2 * len(keys), device)
    elif fits:
        rows = [row[2:] for row in rows]
    else:
        rows = _all_gather(body, len(body), device)
    pairs = {key: [(row[2 * index], row[2 * index + 1]) for row in rows] for index, key in enumerate(keys)}
    return {key: _combine(key, each) for key, each in pairs.items() if not key.attribute}, keys


def _pairs(keys: list[Key], totals: dict[Key, tuple[float, float]]) -> list[float]:
    # A Metric has no total here, but keeps its pair, so that each key's index is the same on all ranks.
    return [number for key in keys for number in totals.get(key, (NEUTRAL[key.reduce_fx], 0.0))]


def _all_gather(numbers: list[float], length: int, device: torch.device) -> list[list[float]]:
    vector = torch.zeros(length, dtype=torch.float64)
    vector[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)  # one copy to the device, below
    if not computes_in(device.type, torch.float64):  # a device without float64 can still gather its bytes
        return [
            row.cpu().view(torch.float64).tolist()
            for row in collectives.all_gather(vector.view(torch.uint8).to(device))
        ]
    return [row.tolist() for row in collectives.all_gather(vector.to(device))]


def _digest(keys: list[Key]) -> int:
    text = json.dumps([list(key) for key in keys])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")  # 48 bits: exact in a float64


def _combine(key: Key, pairs: list[tuple[float, float]]) -> float:
    totals = [total for total, weight in pairs if weight > 0]  # a rank without a value has weight 0
    if not totals:
        return float("nan")
    if key.reduce_fx in ("min", "max"):
        values = torch.tensor(totals, dtype=torch.float64)
        return float(values.min() if key.reduce_fx == "min" else values.max())  # NaN if one is NaN
    total = sum(totals)
    return total / sum(weight for _, weight in pairs) if key.reduce_fx == "mean" else total
