"""HangWatch: notices ranks without progress, reports the rank that is late, and ends the job after `hang_timeout`.

A healthy run pays two readings of counters per second, in the watcher thread. Only a rank that stands still asks the others,
over the store, and only then are stacks read, by `stacks.py`.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from trainwright.distributed.connection import Connection
from trainwright.distributed.failures import FailureLog, leave
from trainwright.distributed.job_store import Store, post, stores
from trainwright.distributed.signals import is_interactive
from trainwright.distributed.store_channel import Locate, RankPositions
from trainwright.distributed.vendor import count_issued, latest_collective
from trainwright.faults.stacks import (
    awaited,
    foreign_stacks,
    is_loading,
    is_patient,
    read_stacks,
    silence_of,
    stack_of,
    user_frame,
)
from trainwright.rank_zero import say

LOOK_SECONDS = 1.0
SHORTEST_LIMIT = 60.0
"""The least seconds without progress after which a rank asks the others."""
FIRST_LIMIT = 300.0
"""The same before the first progress of a run, which may compile or read a large data set."""
GAP_FACTOR = 20.0
"""The limit as a multiple of the longest step seen."""
BUSY_FACTOR = 10.0
"""For how many times the limit the use of the CPU counts as progress."""
BUSY_PART = 0.2
"""The part of a second for which a main thread has to compute to be busy."""
ANSWER_SECONDS = 5.0
MARGIN_SECONDS = 10.0
"""How long before `hang_timeout` the job ends, so that no collective fails first and blames the rank that waits."""

Place = Callable[[], tuple[str | None, int]]
"""Returns the folder of a run, or None, and its step."""


class LocalProgress:
    """How long this process's main thread has made no progress. `look` is called about once a second, by another thread."""

    def __init__(self, positions: RankPositions, longest_limit: float) -> None:
        self._positions, self._longest_limit = positions, longest_limit
        self._thread = threading.main_thread().ident or 0
        self._position, self._looked, self._cpu = positions.now(), time.monotonic(), self._cpu_seconds()
        self._runs = self._position.order[0]
        self._longest_gaps: list[float] = []
        self.unmoved_seconds = self.stalled_seconds = 0.0
        """Seconds since the position changed, and the same or less if the main thread has used the CPU."""
        self.is_busy = False

    @property
    def limit(self) -> float:
        """Return the seconds without progress that are too many."""
        # The second longest gap, once there are two: the longest may be a compilation or a save.
        gap = self._longest_gaps[-1] if self._longest_gaps else 0.0
        least = max(SHORTEST_LIMIT, GAP_FACTOR * gap)
        return min(least if self._longest_gaps else max(FIRST_LIMIT, SHORTEST_LIMIT), self._longest_limit)

    def look(self) -> None:
        now, cpu, position = time.monotonic(), self._cpu_seconds(), self._positions.now()
        # A process that was stopped or suspended itself has not stood still meanwhile.
        elapsed = min(now - self._looked, 2 * LOOK_SECONDS)
        self.is_busy = cpu - self._cpu >= BUSY_PART * max(now - self._looked, 0.1)
        self._looked, self._cpu = now, cpu
        if position.order[0] != self._runs:
            self._runs, self._longest_gaps = position.order[0], []
        elif position != self._position and self.unmoved_seconds <= self.limit:
            self._longest_gaps = sorted([*self._longest_gaps, self.unmoved_seconds + elapsed], reverse=True)[:2]
        self.unmoved_seconds = 0.0 if position != self._position else self.unmoved_seconds + elapsed
        is_excused = self.is_busy and self.unmoved_seconds < BUSY_FACTOR * self.limit and not self._waits()
        self.stalled_seconds = 0.0 if is_excused else min(self.stalled_seconds + elapsed, self.unmoved_seconds)
        self._position = position

    def _waits(self) -> bool:
        # NCCL's waits use the CPU, so a busy main thread may wait.
        return self.unmoved_seconds > self.limit and latest_collective()[1]

    def _cpu_seconds(self) -> float:
        with suppress(AttributeError, OSError):  # not on macOS and Windows
            return time.clock_gettime(time.pthread_getcpuclockid(self._thread))
        return 0.0


@dataclass(frozen=True)
class Answer:
    """What one rank says about itself when a rank has asked."""

    rank: int
    order: list[int]
    text: str
    """The position in words, or ""."""
    stalled_seconds: float
    is_patient: bool
    is_busy: bool
    issued: int
    """Number of collectives so far."""
    waits_in: str
    """The call in which the main thread waits for other ranks, or ""."""
    is_loading: bool
    place: str
    """The line of the user's code that runs."""
    pid: int
    host: str
    stacks: str

    def doing(self) -> str:
        """Return the activity of the rank and its place, in words."""
        activity = f"waiting in {self.waits_in} " if self.waits_in else "computing " if self.is_busy else ""
        loading = ", waiting for a loader's worker" if self.is_loading else ""
        return f"{activity}at {self.place}{loading}{f' ({self.text})' if self.text else ''}"


Answers = dict[int, Answer | None]
"""By rank; None for a rank that has not answered."""


class HangWatch:
    """Watches one job, from each of its processes. The watcher thread of the connection polls it.

    A process without other ranks has a thread only during a run, and only under the Trainer: without counters of batches an
    idle process would look the same.
    """

    def __init__(self, connection: Connection, timeout_seconds: float) -> None:
        environment = connection.environment
        self._rank, self._world_size = environment.rank, environment.world_size
        self._timeout = timeout_seconds
        self._positions = RankPositions(0) if connection.channel is None else connection.channel.positions
        self._place: Place = _no_place
        self._is_alone = connection.channel is None
        self._progress: LocalProgress | None = None
        self._looked = 0.0
        self._asks_at = 0.0
        """The seconds without progress at which this rank asks next, or 0 for its limit."""
        self._answered: int | None = None
        self._round: tuple[int, float] | None = None
        """The number of this rank's question and the time until which it waits for answers."""
        self._reported = 0.0
        """When the hang began that this rank has reported, or 0."""
        self._has_warned = False
        self._polls = connection.polls

    def locate_by(self, locate: Locate, folder: str | None) -> None:
        """Watch a loop whose end is unknown, from now on. Call it on every rank."""
        self._place, self._polls["hang"] = (lambda: (folder, locate()[0][0])), self.poll
        self._positions.locate_by(locate)

    @contextmanager
    def watching(self, locate: Locate, place: Place) -> Iterator[None]:
        """Watch a run during the block. Enter it on every rank."""
        outer, self._place = self._place, place
        self._polls["hang"] = self.poll  # instead of the watch of another engine
        stopped, thread = threading.Event(), None
        if self._is_alone and outer is _no_place:  # otherwise a run within a run
            thread = threading.Thread(target=self._watch, args=(stopped,), name="trainwright-hang-watch", daemon=True)
            thread.start()
        try:
            with self._positions.located_by(locate):
                yield
        finally:
            self._place = outer
            stopped.set()
            if thread is not None:
                thread.join()

    def _watch(self, stopped: threading.Event) -> None:
        store = stores().HashStore()
        self._progress = self._answered = self._round = None
        while not stopped.wait(LOOK_SECONDS / 2):
            self.poll(store)

    def poll(self, store: Store) -> None:
        """Look at the progress of this process, and at questions of other ranks. A watcher thread calls this."""
        if self._round is not None:
            self._finish_round(store, *self._round)
        now = time.monotonic()
        if now < self._looked + LOOK_SECONDS:
            return
        self._looked = now
        if self._progress is None:
            self._progress = LocalProgress(self._positions, self._timeout / 2)
            post(store, f"hang/process/{self._rank}", json.dumps([os.getpid(), socket.gethostname()]))
        progress = self._progress
        progress.look()
        requested = store.add("hang/requested", 0)
        if self._answered is None:
            self._answered = requested
        if requested > self._answered:
            self._answer(store, requested)
        if progress.unmoved_seconds == 0.0 if self._reported else progress.stalled_seconds == 0.0:
            self._end_hang(store)
        elif self._round is None and progress.stalled_seconds >= min(self._asks_at or progress.limit, self._ends_at):
            number = store.add("hang/requested", 1)
            is_mine = number == self._answered + 1  # another rank may have asked in between
            self._answer(store, number)
            if is_mine:
                self._round = number, now + min(ANSWER_SECONDS, self._timeout / 5)

    @property
    def _ends_at(self) -> float:
        return self._timeout - min(MARGIN_SECONDS, self._timeout / 4)

    def _answer(self, store: Store, number: int) -> None:
        assert self._progress is not None
        stacks = read_stacks()
        frames = stack_of(threading.main_thread().ident or 0, stacks)
        issued, (name, is_pending) = count_issued() or 0, latest_collective()
        order, text = self._positions.now()
        answer = Answer(
            rank=self._rank,
            order=list(order),
            text=text,
            stalled_seconds=self._progress.stalled_seconds,
            is_patient=is_patient(frames),
            is_busy=self._progress.is_busy,
            issued=issued,
            waits_in=awaited(frames, name and f"{name} (collective {issued})", is_pending),
            is_loading=is_loading(frames),
            place=str(user_frame(frames) or "an unknown line"),
            pid=os.getpid(),
            host=socket.gethostname(),
            stacks=stacks,
        )
        for question in range((self._answered or 0) + 1, number + 1):
            post(store, f"hang/answer/{question}/{self._rank}", json.dumps(asdict(answer)))
        self._answered = number
        self._asks_at = max(self._asks_at, self._progress.stalled_seconds + self._progress.limit)

    def _finish_round(self, store: Store, number: int, deadline: float) -> None:
        """Report the hang once all ranks have answered, or time is up, unless a rank makes progress."""
        keys = [f"hang/answer/{number}/{rank}" for rank in range(self._world_size)]
        present = [store.check([key]) for key in keys]
        if not all(present) and time.monotonic() < deadline:
            return
        self._round = None
        answers: Answers = {
            rank: Answer(**json.loads(store.get(key))) if present[rank] else None for rank, key in enumerate(keys)
        }
        progress = self._progress
        assert progress is not None
        given = [answer for answer in answers.values() if answer is not None]
        moves = any(answer.is_patient or answer.stalled_seconds < progress.limit / 2 for answer in given)
        if progress.stalled_seconds < progress.limit or (all(present) and moves):
            return
        if store.add("hang/reports", 1) == 1:
            self._reported = time.monotonic() - progress.stalled_seconds
            self._report(store, answers, progress.stalled_seconds)
        if progress.stalled_seconds >= self._ends_at - LOOK_SECONDS:
            self._end_job(store, answers, progress.stalled_seconds)
        else:
            self._asks_at = self._ends_at

    def _report(self, store: Store, answers: Answers, seconds: float) -> None:
        remaining = self._timeout - seconds
        ending = "" if self._never_ends(answers) else f" hang_timeout={self._timeout:g} ends it in {remaining:.0f} s."
        lines = [f"Hang: {self._summary(store, answers, seconds)}.", *self._details(answers)]
        lines = lines if len(lines) > 3 else lines[:1]  # the summary names two groups of ranks
        folder, step = self._place()
        path = os.path.join(folder if folder and "://" not in folder else ".", f"hang-{step}.txt")
        text = "\n".join(lines)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(f"{text}\n\n{self._all_stacks(store, answers)}")
            written = f" The stacks of all ranks are in {os.path.abspath(path)}."
        except OSError as error:
            written = f" The stacks could not be written: {error}."
        say(f"{text}\n  The job goes on waiting.{ending}{written}")

    def _summary(self, store: Store, answers: Answers, seconds: float) -> str:
        """Return the report's first line, which names the rank that is late."""
        if self._is_alone:
            answer = answers[0]
            assert answer is not None
            return f"no progress for {seconds:.0f} s, {answer.doing()}"
        late, others = _late_and_others(answers)
        answer, example = answers[late[0]], answers[others[0]] if others else None
        if answer is None:
            text = f"{_named(late)} never came: {self._silence(store, late[0])}"
        elif example is None:
            return f"{_named(late, 'is are')} without progress for {seconds:.0f} s, {answer.doing()}"
        elif answer.waits_in:
            text = f"{_named(late, 'is are')} elsewhere, {answer.doing()}"
        else:
            text = f"{_named(late)} never came: {'it is' if len(late) == 1 else 'they are'} {answer.doing()}"
        meanwhile = f", while {_named(others, 'is are')} {example.doing()}" if example is not None else ""
        return f"{text}{meanwhile}, for {seconds:.0f} s"

    def _details(self, answers: Answers) -> list[str]:
        """Return lines about all ranks. Ranks that do the same share a line."""
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for rank, answer in answers.items():
            groups["no answer" if answer is None else answer.doing()].append(rank)
        return [f"  {_named(ranks)}: {text}" for text, ranks in groups.items()]

    def _silence(self, store: Store, rank: int) -> str:
        pid, host = self._process(store, rank)
        if host != socket.gethostname():
            return f"it does not answer (process {pid} on {host}); it is stopped, or its machine cannot be reached"
        return f"{silence_of(pid)} (process {pid})"

    def _process(self, store: Store, rank: int) -> tuple[int, str]:
        key = f"hang/process/{rank}"
        pid, host = json.loads(store.get(key)) if store.check([key]) else (0, "unknown")
        return pid, host

    def _all_stacks(self, store: Store, answers: Answers) -> str:
        parts = []
        for rank, answer in answers.items():
            pid, host = self._process(store, rank)
            stacks = answer.stacks if answer is not None else "No stack: the process does not answer.\n"
            if answer is None and host == socket.gethostname():
                stacks = foreign_stacks(pid)
            parts.append(f"=== rank {rank}, process {pid} on {host}\n{stacks}")
        return "\n".join(parts)

    def _never_ends(self, answers: Answers) -> bool:
        """Return whether the job goes on without a limit: nobody waits for others, or the session is interactive."""
        if self._is_alone:
            return is_interactive()
        given = [answer for answer in answers.values() if answer is not None]
        return not any(answer.waits_in or answer.text for answer in given)

    def _end_job(self, store: Store, answers: Answers, seconds: float) -> None:
        late, _ = ([0], []) if self._is_alone else _late_and_others(answers)
        answer = answers[late[0]]
        summary = self._summary(store, answers, seconds)
        self._asks_at = seconds + self._timeout
        if self._never_ends(answers):
            return
        if answer is not None and answer.is_busy and not answer.waits_in:
            if not self._has_warned:
                self._has_warned = True
                say(
                    f"hang_timeout={self._timeout:g} has passed, but {_named(late, 'computes compute')}, so the job goes on: {summary}."
                )
            return
        text = f"hang_timeout={self._timeout:g} has passed: {summary}"
        if self._is_alone:
            say(f"{text}. The process ends.")
            leave(1)
        log = FailureLog(store)
        log.post(late[0], text)
        log.mark_printed()

    def _end_hang(self, store: Store) -> None:
        if self._reported:
            say(
                f"The hang is over after {time.monotonic() - self._reported:.0f} s: rank {self._rank} makes progress again."
            )
            store.delete_key("hang/reports")
        self._asks_at, self._reported, self._has_warned = 0.0, 0.0, False


def _no_place() -> tuple[str | None, int]:
    return None, 0


def _late_and_others(answers: Answers) -> tuple[list[int], list[int]]:
    """Return the ranks that the job waits for, and the rest."""
    ranks = list(answers)
    given = {rank: answer for rank, answer in answers.items() if answer is not None}
    late = [rank for rank in ranks if rank not in given]
    for measure in (_issued, _order, _is_waiting):
        if late:
            break
        least = min(measure(answer) for answer in given.values())
        late = [rank for rank, answer in given.items() if measure(answer) == least]
        late = late if len(late) < len(ranks) else []
    late = late or [rank for rank in ranks if given[rank].waits_in != given[ranks[-1]].waits_in] or ranks
    return late, [rank for rank in ranks if rank not in late]


def _issued(answer: Answer) -> tuple[int, ...]:
    return (answer.issued,)


def _order(answer: Answer) -> tuple[int, ...]:
    return tuple(answer.order)


def _is_waiting(answer: Answer) -> tuple[int, ...]:
    return (bool(answer.waits_in),)


def _named(ranks: Sequence[int], verbs: str = "") -> str:
    """Return ranks in words, at most eight, and the verb for one or for several ranks."""
    numbers = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    is_one = len(ranks) == 1
    verb = verbs.split()[not is_one] if verbs else ""
    return f"{'rank' if is_one else 'ranks'} {numbers} {verb}".rstrip()
