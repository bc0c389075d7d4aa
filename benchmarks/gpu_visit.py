"""A visit of benchmarks/gpu.py: the processes of one case, which start together and then take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from gpu_cases import Case
from gpu_job import Job, JobFailed, Place
from gpu_records import CUT_SHORT, Record

COMPILED_PATIENCE = 2.5
"""How much longer a process may be silent that compiles."""
LOADER_STEPS = 15_000
"""The most steps that the turns of a visit take; the loaders hold more."""


class Visit:
    """One visit of one case.

    Args:
        place: where the processes compute.
        case: the case.
        names: its implementations.
        number: how often it was visited already.
        rounds: turns of each.
        turn_seconds: about how long a turn of the loop by hand is to take.
        patience: seconds that a process may be silent, while it imports, warms up or takes a turn.
        memory_gib: the device's memory; 0 if unknown.
        deadline: when the visit must end, on the monotonic clock.
        finish: called with each record that is done.
        progress: called after each round.
    """

    def __init__(
        self,
        place: Place,
        case: Case,
        names: list[str],
        *,
        number: int,
        rounds: int,
        turn_seconds: float,
        patience: float,
        memory_gib: float,
        deadline: float,
        finish: Callable[[Record], None],
        progress: Callable[[], None],
    ) -> None:
        self.place, self.case, self.rounds, self.number = place, case, rounds, number
        self.turn_seconds, self.deadline = turn_seconds, deadline
        self._patience = patience * (COMPILED_PATIENCE if case.compiled else 1.0)
        self._finish, self._progress = finish, progress
        room = int(0.8 * memory_gib / case.gib)
        self.is_crowded = place.device != "cpu" and memory_gib > 0 and room < len(names)
        self.at_once = max(room, 1) if self.is_crowded else len(names)
        self.records = {name: Record(case.name, name, number) for name in names}
        """Of those that are under way."""
        self._jobs: dict[str, Job] = {}
        self._leaving: list[Job] = []
        self._ready: set[str] = set()

    def start(self) -> None:
        """Start the processes, which import what they need and wait before they touch the device."""
        if self.case.kind != "start":
            self._each(list(self.records), self._start)

    def settle(self) -> None:
        """Wait until the processes have imported what they need, or have failed."""
        for name in [each for each in self._jobs if each not in self._ready]:
            self._each([name], lambda name: self._ask(name, "imported"))
            self._ready.add(name)

    def run(self, meanwhile: Callable[[], Visit | None]) -> None:
        """Measure the case that was started; `meanwhile` may start the next one while this one warms up."""
        try:
            if self.case.kind == "start":
                self._time_starts()
            else:
                self._take_turns(meanwhile)
        finally:
            self.end(CUT_SHORT)

    def end(self, reason: str = "") -> None:
        """End what is running; with a reason, keep what was measured."""
        for job in (leaving := [*self._jobs.values(), *self._leaving]):
            job.leave(at_once=bool(reason) and job in self._jobs.values())
        for job in leaving:
            job.end()
        self._jobs.clear()
        self._leaving.clear()
        for name in list(self.records) if reason else []:
            self._close(name, reason)

    def _close(self, name: str, reason: str = "") -> None:
        record = self.records.pop(name)
        record.reason = reason
        if name in self._jobs:
            job = self._jobs.pop(name)
            self._leaving.append(job)
            job.leave(at_once=bool(reason))
        self._finish(record)

    def _each(self, names: list[str], action: Callable[[str], None]) -> None:
        """Apply a function to each of the processes; one that fails is closed with the reason, and the others continue."""
        for name in names:
            if name in self.records:
                try:
                    action(name)
                except JobFailed as error:
                    is_over = time.monotonic() >= self.deadline
                    self._close(name, f"{CUT_SHORT}, the time was up" if is_over else str(error))

    def _start(self, name: str) -> None:
        try:
            self._jobs[name] = Job(self.place, self.case, name, self.is_crowded)
        except OSError as error:
            raise JobFailed(f"could not be started: {error}") from error

    def _take_turns(self, meanwhile: Callable[[], Visit | None]) -> None:
        self.settle()
        names, upcoming = list(self.records), None
        speeds: dict[str, float] = {}

        def take_warm(name: str) -> None:
            told = self._ask(name, "warm")
            speeds[name] = told["seconds"]
            self.records[name].take_warm(told)

        for first in range(0, len(names), self.at_once):
            group = names[first : first + self.at_once]
            self._each(group, lambda name: self._jobs[name].tell("go"))
            if first == 0:
                upcoming = meanwhile()
            self._each(group, take_warm)
        if not speeds:
            return
        if upcoming is not None:
            upcoming.settle()  # nobody imports while others are timed
        speed = speeds.get("by_hand") or statistics.median(speeds.values())
        steps = max(4, min(int(self.turn_seconds / speed), LOADER_STEPS // (self.rounds + 1), 1000))
        lead = max(
            3, steps // 8, 4 * self.case.num_workers
        )  # what workers have made ready while they waited is used up

        def take_turn(name: str) -> None:
            self._jobs[name].tell("turn", steps=steps, lead=lead)
            self.records[name].take_turn(self._ask(name, "turn"))

        for turn in range(self.rounds):
            self._each(names if turn % 2 == 0 else names[::-1], take_turn)
            self._progress()

        if self.case.kind == "steps" and self.number == 0:  # later visits would see the same
            self._look_closer(names, min(steps, 10))
        self._each(names, lambda name: self._close(name))

    def _look_closer(self, names: list[str], steps: int) -> None:
        """Have the processes profile a step on the device, one after another, since each needs the device alone."""
        for first in range(0, len(names), self.at_once):
            group = [each for each in names[first : first + self.at_once] if each in self.records]
            for name in group:
                self._jobs[name].tell("arm")
            self._each(group, lambda name: self._ask(name, "armed"))

        def take_probe(name: str) -> None:
            self._jobs[name].tell("probe", steps=steps)
            self.records[name].probe = self._ask(name, "probe")

        self._each(names, take_probe)

    def _ask(self, name: str, event: str) -> dict[str, Any]:
        left = self.deadline - time.monotonic()
        return self._jobs[name].wait_for(event, max(min(self._patience, left), 0.1))

    def _time_starts(self) -> None:
        names = list(self.records)

        def time_start(name: str) -> None:
            self._start(name)
            told = self._ask(name, "first")
            self.records[name].take_turn({"seconds": time.monotonic() - self._jobs[name].began})
            self.records[name].first = told["seconds"]
            self._jobs.pop(name).end()

        for turn in range(self.rounds):
            self._each(names if turn % 2 == 0 else names[::-1], time_start)
            self._progress()
        self._each(names, lambda name: self._close(name))
