"""Metric merging: what the ranks of a saved run had logged in their epoch, dealt to the ranks of a run of another size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.trainer.logged_value import LoggedValue
from trainwright.trainer.metric_objects import found_at

Combine = Callable[[list[Tensor]], Tensor]
COMBINATIONS: dict[str, Combine] = {
    "dim_zero_sum": lambda values: torch.stack(values).sum(0),
    "dim_zero_max": lambda values: torch.stack(values).amax(0),
    "dim_zero_min": lambda values: torch.stack(values).amin(0),
    "dim_zero_cat": torch.cat,
}
"""How a Metric's states of several ranks become one, by the name of torchmetrics' reduction for them."""


def merged(states: list[dict[str, Any]], module: nn.Module) -> tuple[dict[str, Any] | None, list[str]]:
    """Return several ranks' states of an epoch as one, and the names of the Metric objects that cannot be merged.

    One state stays as it is, and without any there is none.
    """
    if len(states) < 2:
        return (states[0] if states else None), []
    values: dict[tuple[str, str], list[dict[str, Any]]] = {}
    metrics: dict[str, list[dict[str, Any]]] = {}
    for state in states:
        for each in state["values"]:
            values.setdefault((each["hook"], each["name"]), []).append(each)
        for path, each in state["metrics"].items():
            metrics.setdefault(path, []).append(each)
    together = {path: _one_metric(found_at(module, path), each) for path, each in metrics.items()}
    kept = {path: each for path, each in together.items() if each is not None}
    return {"values": [_one_value(each) for each in values.values()], "metrics": kept}, sorted(together.keys() - kept)


def _one_value(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one name's (reduced value, weight) of several ranks as one; its latest value is the first rank's."""
    whole = LoggedValue.restored(states[0], torch.device("cpu"))
    for state in states[1:]:
        whole.merge(LoggedValue.restored(state, torch.device("cpu")))
    total, weight = whole.total()
    folded: dict[str, Any] = {"total": float(total) if weight else None, "weight": weight, "pending": [], "weights": []}
    return {**states[0], **folded}


def _one_metric(metric: Any, states: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return a Metric's states of several ranks as one; None where its reductions do not say how."""
    together: dict[str, Any] = {}
    for name in states[0]["states"]:
        parts = [state["states"][name] for state in states]
        combine = COMBINATIONS.get(getattr(getattr(metric, "_reductions", {}).get(name), "__name__", ""))
        if isinstance(parts[0], list):
            together[name] = [item for part in parts for item in part]
        elif combine is not None:
            together[name] = combine(parts)
        else:
            return None
    return {"updates": sum(state["updates"] for state in states), "states": together}
