"""The result of a run of soak_job.py, as a flat table of short texts that can be compared with another run's."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainwright.checkpoint.discovery import find_checkpoints
from trainwright.checkpoint.reader import StoredCheckpoint, open_checkpoint

Outcome = dict[str, str]
SHOWN = 5
"""How many differences of a kind are told."""


@dataclass
class Result:
    """The findings of a run with its kills."""

    number: int
    strategy: str
    kills: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    """What differs from the uninterrupted run, or how it ended."""
    lost: list[str] = field(default_factory=list)
    """Checkpoints that a kill has damaged or removed."""
    left: list[str] = field(default_factory=list)
    """What a killed job has left."""
    gone: float = 0.0
    """Seconds until the last trace of a job was gone, at most."""
    kept: int = 0
    """How many more checkpoints there are in the end than without kills."""

    @property
    def told(self) -> list[str]:
        return [line[:1500] for line in (*self.wrong, *self.lost, *self.left)]

    @property
    def is_sound(self) -> bool:
        return not self.told


def read_outcome(folder: Path, final: str, num_ranks: int) -> Outcome:
    """Return the weights, optimizer, generators, counters, callbacks, logged rows and batches of a run that ended.

    A batch that was trained more than once, because it followed the last checkpoint of a killed run, must have been the same
    each time; otherwise all of its versions are listed.
    """
    checkpoint = open_checkpoint(str(folder / final))
    outcome = dict(_stored(checkpoint, num_ranks))
    # A start that was killed before its first checkpoint leaves a run folder behind, and the next one has another.
    rows = max((folder / "logs").glob("version_*/metrics.csv"))
    places = {str(folder): "", rows.parent.name: "version_0"}
    for place, name in places.items():
        outcome = {key.replace(place, name): value.replace(place, name) for key, value in outcome.items()}
    outcome = {key: value for key, value in outcome.items() if "/replaced" not in key}  # what waits to be removed
    outcome = {
        key: value
        for key, value in outcome.items()
        if not re.match(r"state/loggers/\d+/state/(version|files)", key)  # event files are named after processes
    }
    outcome |= _batches(folder, num_ranks)
    with open(rows, newline="") as file:
        for number, row in enumerate(csv.DictReader(file)):
            outcome[f"row/{number:04d}"] = json.dumps({name: row[name] for name in sorted(row) if row[name]})
    outcome |= _scalars(rows.parent)
    outcome["checkpoints"] = str(count_checkpoints(folder))
    return outcome


def differences(found: Outcome, oracle: Outcome) -> list[str]:
    """Return a line for each of the first few differences of each kind; empty if there are none."""
    lines: dict[str, list[str]] = {}
    for key in sorted((found.keys() | oracle.keys()) - {"checkpoints"}):
        if found.get(key) != oracle.get(key):
            text = f"{key}: {found.get(key, 'nothing')} where the uninterrupted run has {oracle.get(key, 'nothing')}"
            kind = "/".join(key.split("/")[: 2 if key.startswith(("state/", "rank/")) else 1])
            lines.setdefault(kind, []).append(text)
    return [
        line
        for kind, told in lines.items()
        for line in (*told[:SHOWN], *([f"{kind}: {len(told)} such differences"] if len(told) > SHOWN else []))
    ]


def unseen_or_seen_twice(found: Outcome, num_samples: int, epochs: int) -> list[str]:
    """Return the epochs in which the counted batches do not contain each sample once."""
    seen: dict[int, list[int]] = {epoch: [] for epoch in range(epochs)}
    for key, value in found.items():
        if key.startswith("batch/"):
            told = json.loads(value.partition(" != ")[0])
            seen[told["epoch"]] += told["samples"]
    return [
        f"epoch {epoch}: {len(samples)} samples of {num_samples}, {len(set(samples))} of them different"
        for epoch, samples in seen.items()
        if sorted(samples) != list(range(num_samples))
    ]


def temporary_names(folder: Path) -> list[str]:
    """Return the temporary files and folders in a run's folder."""
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if ".tmp" in path.name]


def count_checkpoints(folder: Path) -> int:
    """Return how many checkpoints a run has kept."""
    return len(find_checkpoints(str(folder / "checkpoints")))


def _scalars(folder: Path) -> Outcome:
    """Return what TensorBoard shows by tag: steps and values in order, including duplicates."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    found = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    return {f"scalar/{tag}": str(sorted((each.step, each.value) for each in found[tag])) for tag in found}


def _stored(checkpoint: StoredCheckpoint, num_ranks: int) -> Iterator[tuple[str, str]]:
    for section in checkpoint.sections:
        for name in checkpoint.tensors(section):
            yield f"{section}/{name}", _digest(checkpoint.read_tensor(section, name))
    yield from _flat("state", checkpoint.run_state())
    for rank in range(num_ranks):
        yield from _flat(f"rank/{rank}", checkpoint.rank_state(rank))


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(f"{name}/{key}", item)
    elif isinstance(value, (list, tuple)) and 0 < len(value) < 50:
        for number, item in enumerate(value):
            yield from _flat(f"{name}/{number}", item)
    elif isinstance(value, torch.Tensor):
        yield name, _digest(value)
    elif isinstance(value, numpy.ndarray):
        yield name, _digest(torch.from_numpy(value.astype(numpy.int64)))
    else:
        text = repr(value)
        yield name, text if len(text) < 200 else hashlib.sha256(text.encode()).hexdigest()


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.sha256(data).hexdigest()}"


def _batches(folder: Path, num_ranks: int) -> Outcome:
    found: Outcome = {}
    for rank in range(num_ranks):
        for line in (folder / f"batches-{rank}").read_text().splitlines():
            told = json.loads(line)
            key, text = f"batch/{rank}/{told['epoch']:02d}/{told['batch']:02d}", json.dumps(told)
            if key not in found:
                found[key] = text
            elif text not in found[key]:
                found[key] += f" != {text}"
    return found
