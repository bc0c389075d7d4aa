"""Records of a run, to be compared bit for bit: its final state, its events, and the rows it logged."""

from __future__ import annotations

import csv
import io
import random
import re
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

import trainwright as tw

Record = dict[str, Any]
ASPECTS = (
    "weights", "optimizers", "rates", "counters", "metrics", "random", "stopping", "schedulers", "kept", "events", "rows",
)  # fmt: skip


def leaves(tree: Any) -> list[Tensor]:
    """Return the tensors of a batch."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [leaf for each in tree for leaf in leaves(each)] if isinstance(tree, (list, tuple)) else []


class Recorder(tw.Callback):
    """Records each batch, validation and epoch of a run, in order; a checkpoint holds how many came before it.

    Args:
        validations: whether to record them. If they are timed, they happen elsewhere in a resumed run.
    """

    def __init__(self, validations: bool = True) -> None:
        self.events: list[list[Any]] = []
        self.before = 0
        self.validations = validations
        self._begun: list[Any] = []
        """The latest start of an epoch, whose hooks a resumed run calls again."""

    def state_dict(self) -> dict[str, Any]:
        # A run that goes on from within a validation makes the whole of it.
        starts = [number for number, event in enumerate(self.events) if event[0] == "validation start"]
        ended = any(event[0] == "validation end" for event in self.events[starts[-1] :]) if starts else True
        count = len(self.events) if ended else starts[-1]
        return {"events": self.before + count, "begun": self._begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before, self._begun = int(state["events"]), state["begun"]

    def _note(self, trainer: Any, what: str, *values: Any) -> None:
        if trainer.sanity_checking or (not self.validations and what.startswith("validation")):
            return
        event = [what, trainer.current_epoch, trainer.global_step, *values]
        if not self.events and what == "epoch start" and event[:2] == self._begun[:2]:
            return
        self.events.append(event)
        self._begun = event if what == "epoch start" else self._begun

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._note(trainer, "epoch start")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        seen = [float(each.double().sum()) for each in leaves(batch)]
        self._note(trainer, "batch", batch_idx, seen, [float(each) for each in leaves(outputs)])

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self._note(trainer, "validation start")

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._note(trainer, "validation batch", batch_idx, [float(each.double().sum()) for each in leaves(batch)])

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._note(trainer, "validation end", self._metrics(trainer))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._note(trainer, "epoch end", self._metrics(trainer))

    def _metrics(self, trainer: Any) -> dict[str, float]:
        found = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
        return found if self.validations else {name: value for name, value in found.items() if "val" not in name}


def record(trainer: Any, module: Any, recorder: Recorder, folder: Path) -> Record:
    """Return the record of a finished run."""
    states = [each.state_dict() for each in trainer.optimizers]
    counters = trainer.state.state_dict()
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if not recorder.validations:
        counters = {
            name: value for name, value in counters.items() if "valid" not in name and name != "unchecked_batches"
        }
        metrics = {name: value for name, value in metrics.items() if "val" not in name}
    path = folder / "logs" / "version_0" / "metrics.csv"
    best = folder / "best"
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "optimizers": [{**each, "param_groups": len(each["param_groups"])} for each in states],
        "rates": [group["lr"] for each in trainer.optimizers for group in each.param_groups],
        "counters": {name: value for name, value in counters.items() if name != "saves"},
        "metrics": metrics,
        "random": [torch.rand(3).tolist(), random.random(), float(numpy.random.rand())],
        "stopping": [each.state_dict() for each in trainer.callbacks if isinstance(each, tw.EarlyStopping)],
        "schedulers": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
        "kept": kept(trainer, best),
        "scores": [
            {Path(path).name: float(score) for path, score in each.best_k_models.items()}
            for each in trainer.callbacks
            if isinstance(each, tw.ModelCheckpoint) and each.monitor
        ],
        "events": recorder.events,
        "before": recorder.before,
        "rows": path.read_text() if path.exists() else "",
        "path": folder,
    }


def kept(trainer: Any, folder: Path) -> list[str]:
    """Return the names of the kept checkpoints.

    The one that the run resumed from stays until a later run has resumed, and keeps its name: its successor gets a version
    suffix. A weights-only one that a killed run left after that point stays too.
    """
    names = {each.name for each in folder.iterdir()} if folder.exists() else set()
    best = {Path(path).name for each in trainer.checkpoint_callbacks for path in each.best_k_models}
    source = Path(str(trainer.resume_source or "")).name
    are_weights = any(each.save_weights_only for each in trainer.checkpoint_callbacks)
    return sorted(re.sub(r"-v\d+", "", name) for name in names if name in best or (name != source and not are_weights))


def same(one: Any, other: Any) -> bool:
    """Return whether two trees are equal bit for bit, NaN to NaN."""
    if isinstance(one, Tensor):
        return (
            isinstance(other, Tensor) and one.dtype == other.dtype and one.shape == other.shape and _equal(one, other)
        )
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other) or (one != one and other != other)


def _equal(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all()) if one.is_floating_point() else one.equal(other)


def compare(whole: Record, part: Record, *, goes_on: bool) -> list[str]:
    """Return how a resumed run differs from the uninterrupted one, as "<aspect>: <how>".

    `goes_on`: it resumed in the folder of the interrupted run, so that its rows and kept checkpoints are complete.
    """
    found = []
    for aspect in ASPECTS[:-3]:
        if not same(whole[aspect], part[aspect]):
            found.append(f"{aspect}: {_shown(whole[aspect], part[aspect])}")
    events = part["events"]
    expected = whole["events"][part["before"] :]
    if not same(expected, events):
        at = next((n for n, (a, b) in enumerate(zip(expected, events, strict=False)) if not same(a, b)), None)
        at = min(len(expected), len(events)) if at is None else at
        found.append(
            f"events: {len(expected)}, not {len(events)}; at {at} {expected[at : at + 2]}, not {events[at : at + 2]}"
        )
    if goes_on:
        if whole["kept"] != part["kept"]:
            found.append(f"kept: {whole['kept']}, not {part['kept']}")
        if whole["rows"] != part["rows"]:
            found.append(f"rows: {whole['rows']!r}, not {part['rows']!r}")
    elif not _rows_follow(whole["rows"], part["rows"]):
        found.append(f"rows: {whole['rows']!r} do not end with {part['rows']!r}")
    return found


def _shown(one: Any, other: Any) -> str:
    if isinstance(one, dict) and isinstance(other, dict):
        names = [name for name in {**one, **other} if not same(one.get(name), other.get(name))]
        return ", ".join(f"{name} {one.get(name)}, not {other.get(name)}" for name in names[:2])
    return f"{str(one)[:300]}, not {str(other)[:300]}"


def _rows_follow(whole: str, part: str) -> bool:
    """Return whether the rows of a resumed run are the last ones of the uninterrupted run.

    Its first row may be partial: the uninterrupted run has the values of that step in one row, or in two if a name repeats.
    """
    filled = [
        [{name: value for name, value in row.items() if value} for row in csv.DictReader(io.StringIO(text))]
        for text in (whole, part)
    ]
    if not filled[1]:
        return True
    first, *rest = filled[1]
    end = len(filled[0]) - len(rest)
    told: dict[str, str] = {}
    for row in reversed(filled[0][max(0, end - 2) : end]):
        told = {**row, **told} if row["step"] == first["step"] else told
    return filled[0][end:] == rest and first.items() <= told.items()
