"""The measurements of benchmarks/gpu.py: one record per process, and the table rows made from them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_cases import LABELS, Case

PEAK_TFLOPS = {
    # Dense bf16 with accumulation in float32, as the makers' data sheets say it; the first name that fits counts.
    "H100 PCIe": 756.0,
    "H100 NVL": 835.5,
    "H100": 989.4,
    "H200": 989.4,
    "GH200": 989.4,
    "B200": 2250.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10": 125.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "MI300X": 1307.4,
}
OTHERS = ("Laptop", "D", "A100X")
"""Words in the names of devices that have another peak, which is not listed."""
TOLERANCES = {"fp32": (1e-3, 0.02), "tf32": (5e-3, 0.05), "16-mixed": (0.02, 0.05), "bf16-mixed": (0.02, 0.05)}
"""How far a loss may be from that by hand, after the warm-up and at the end, as a part of the warm-up's loss by hand."""

CUT_SHORT = "cut short"
"""How the reason begins of what could have been measured, had there been time."""


@dataclass
class Record:
    """What one process reported in one visit of its case.

    Args:
        seconds: of a step, of a call to save, or of a start; one number per turn.
        committed: of saves, until all was written.
        losses: at the end of each turn.
        first: the seconds of the first step, with what is compiled and allocated in it.
        reason: why it did not finish; empty if it did.
    """

    case: str
    implementation: str
    visit: int
    seconds: list[float] = field(default_factory=list)
    committed: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    warm_loss: float | None = None
    first: float | None = None
    peak_mib: float | None = None
    facts: dict[str, float] = field(default_factory=dict)
    probe: dict[str, Any] = field(default_factory=dict)
    reason: str = ""

    def take_warm(self, told: dict[str, Any]) -> None:
        self.first, self.warm_loss = told.get("first"), told.get("loss")
        self.facts = {key: told[key] for key in ("samples", "tokens", "flops", "written_mb") if key in told}

    def take_turn(self, told: dict[str, Any]) -> None:
        self.seconds.append(told["seconds"])
        if "committed" in told:
            self.committed.append(told["committed"])
        if told.get("loss") is not None:
            self.losses.append(told["loss"])
        if told.get("peak_mib"):
            self.peak_mib = max(self.peak_mib or 0.0, told["peak_mib"])


@dataclass(frozen=True)
class Row:
    """A line of the table: one implementation of one case, over all visits. What was not measured is None."""

    case: str
    implementation: str
    rounds: int
    ms: float | None = None
    ratio: float | None = None
    lowest: float | None = None
    highest: float | None = None
    committed_ms: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    idle: float | None = None
    peak_mib: float | None = None
    syncs: float | None = None
    waits: float | None = None
    kernels: float | None = None
    h2d_kib: float | None = None
    d2h_kib: float | None = None
    first_s: float | None = None
    loss: float | None = None
    is_loss_off: bool = False
    note: str = ""


class Records:
    """The records of a run, written to disk as they arrive.

    Args:
        path: a file of JSON lines, the first of them the environment.
        environment: what the run runs on.
        resumes: whether to keep the contents of the file rather than overwrite them.

    Raises:
        ValueError: the file to resume is from another environment.
    """

    def __init__(self, path: Path, environment: dict[str, Any], resumes: bool) -> None:
        self.path, self.environment = path, environment
        self.all: list[Record] = []
        if resumes and path.exists():
            first, *lines = path.read_text().splitlines()
            if (before := json.loads(first)) != environment:
                other = sorted(key for key in {*before, *environment} if before.get(key) != environment.get(key))
                raise ValueError(
                    f"--resume: {path} was measured elsewhere ({', '.join(other)} differ); give another --out"
                )
            self.all = [Record(**json.loads(line)) for line in lines]
        else:
            path.write_text(json.dumps(environment) + "\n")
        self._num_earlier = len(self.all)

    def add(self, record: Record) -> None:
        self.all.append(record)
        with open(self.path, "a") as stream:
            stream.write(json.dumps(asdict(record)) + "\n")

    def visits(self, case: Case) -> int:
        """Return how often a case was visited, successfully or not."""
        return len({each.visit for each in self.all if each.case == case.name})

    def has_failed(self, case: Case) -> bool:
        """Return whether a visit of a case finished in this run without a measurement, so that another one is pointless."""
        mine = [each for each in self.all[self._num_earlier :] if each.case == case.name]
        cut = {each.visit for each in mine if each.reason.startswith(CUT_SHORT)}
        return bool({each.visit for each in mine} - cut) and not any(each.seconds for each in mine)

    def rows(self, cases: Iterable[Case], unfinished: Iterable[Record] = ()) -> list[Row]:
        """Return the rows of the table in the order of the cases, including those of running processes."""
        records = [*self.all, *unfinished]
        found = []
        for case in cases:
            mine = [each for each in records if each.case == case.name]
            for name in LABELS:
                if own := [each for each in mine if each.implementation == name]:
                    base = {each.visit: each for each in mine if each.implementation == "by_hand"}
                    found.append(make_row(case, own, base, str(self.environment.get("name", ""))))
        return found


def make_row(case: Case, own: list[Record], base: dict[int, Record], device: str) -> Row:
    """Return the table row for an implementation's records, relative to the hand-written loop in the same visits."""
    seconds = [each for record in own for each in record.seconds]
    note = "; ".join(dict.fromkeys(record.reason for record in own if record.reason))
    if not seconds:
        return Row(case.name, own[0].implementation, 0, note=note)
    pairs = [
        (mine, reference)
        for record in own
        if record.visit in base
        for mine, reference in zip(record.seconds, base[record.visit].seconds, strict=False)  # one may have failed
    ]
    ratios = [mine / reference for mine, reference in pairs if reference > 0]
    second = statistics.median(seconds)
    facts = own[-1].facts
    probe: dict[str, Any] = {}
    for record in own:
        probe.update(record.probe)
    committed = [each for record in own for each in record.committed]
    busy, peak = probe.get("busy_ms"), peak_flops(device)
    flops = facts.get("flops", 0.0)
    return Row(
        case.name,
        own[0].implementation,
        len(seconds),
        ms=1e3 * second,
        ratio=statistics.median(ratios) if ratios else None,
        lowest=min(ratios, default=None),
        highest=max(ratios, default=None),
        committed_ms=1e3 * statistics.median(committed) if committed else None,
        samples_per_second=facts["samples"] / second if facts.get("samples") else None,
        tokens_per_second=facts["tokens"] / second if facts.get("tokens") else None,
        mfu=flops / second / peak if flops and peak else None,
        idle=max(0.0, 1.0 - busy / 1e3 / second) if busy is not None else None,
        peak_mib=max((each.peak_mib for each in own if each.peak_mib is not None), default=None),
        first_s=min((each.first for each in own if each.first is not None), default=None),
        loss=own[-1].losses[-1] if own[-1].losses else None,
        is_loss_off=any(is_off(case, each, base.get(each.visit)) for each in own),
        note="; ".join(each for each in (note, str(probe.get("unseen", ""))) if each),
        **{key: probe.get(key) for key in ("syncs", "waits", "kernels", "h2d_kib", "d2h_kib")},
    )


def is_off(case: Case, record: Record, base: Record | None) -> bool:
    """Return whether a record's losses differ from the hand-written loop's, after the warm-up or the last turn of both."""
    if base is None or base is record or base.warm_loss is None or record.warm_loss is None:
        return False
    early, late = TOLERANCES[case.precision]
    scale = abs(base.warm_loss)
    pairs = [(record.warm_loss, base.warm_loss, early)]
    turns = min(len(record.losses), len(base.losses))
    if turns:
        pairs.append((record.losses[turns - 1], base.losses[turns - 1], late))
    return any(not abs(mine - reference) <= tolerance * scale for mine, reference, tolerance in pairs)


def peak_flops(device: str) -> float | None:
    """Return the peak bf16 FLOP/s of a device of this name; None if unknown."""
    words = device.replace("-", " ").split()
    if any(each in words for each in OTHERS):
        return None
    return next(
        (1e12 * peak for name, peak in PEAK_TFLOPS.items() if all(part in words for part in name.split())), None
    )
