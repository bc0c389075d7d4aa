"""HangWatch: notices ranks without progress, reports the rank that is late, and ends the job after `hang_timeout`.

In a healthy run the watcher thread reads counters once a second. Only a rank without progress asks the others over the
store, and only then does every rank read its stacks (`stacks.py`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from trainwright.distributed.connection import Connection
from trainwright.distributed.environment import argument_variables
from trainwright.distributed.failures import FailureLog, leave
from trainwright.distributed.job_store import Store, post, stores
from trainwright.distributed.signals import is_interactive
from trainwright.distributed.store_channel import Locate, RankPositions
from trainwright.distributed.vendor import count_issued
from trainwright.faults import stacks
from trainwright.faults.vendor import awaited_worker, latest_collective
from trainwright.rank_zero import say

LOOK_SECONDS = 1.0
SHORTEST_LIMIT = 60.0
"""The least seconds without progress after which a rank asks the others."""
FIRST_LIMIT = 300.0
"""The same before the first progress of a run, which may compile or read a large data set."""
GAP_FACTOR = 20.0
"""The limit as a multiple of the second longest step seen."""
BUSY_FACTOR, BUSY_PART = 10.0, 0.2
"""A main thread that computes for this part of the time makes progress, for at most so many times the limit."""
ANSWER_SECONDS = 5.0
GRACE_SECONDS, AGAIN_SECONDS = "25", 5.0
"""A process of one rank without progress for so long after SIGTERM, or before another SIGTERM, ends. SLURM and Kubernetes kill
it after 30 s."""
MARGIN_SECONDS = 10.0
"""How long before `hang_timeout` the job ends, so that no collective fails first and blames the rank that waits."""

SAMPLES, LATE_SHARE, OTHERS_SHARE = 60, 0.5, 0.2
"""A rank is slow if it is late in half of the seconds of a minute, and no other rank is late in a fifth of them."""

Place = Callable[[], tuple[str | None, int]]
"""Returns the folder of a run, if it has one, and its step."""


class LocalProgress:
    """How long this process's main thread has made no progress. `look` is called once a second, by another thread."""

    def __init__(self, positions: RankPositions, longest_limit: float) -> None:
        self._positions, self._longest_limit = positions, longest_limit
        self._position, self._looked, self._cpu = positions.now(), time.monotonic(), 0.0
        self._gaps, self._known = list[float](), 0.0
        self.unmoved_seconds = self.stalled_seconds = 0.0
        """Seconds since the position changed, and the same or less if the main thread has computed."""
        self.is_busy = False

    @property
    def limit(self) -> float:
        """Return the seconds without progress that are too many."""
        # Of two gaps the shorter one: the longest may be a compilation or a save.
        least = max(SHORTEST_LIMIT, GAP_FACTOR * self._gaps[-1]) if self._gaps else FIRST_LIMIT
        return min(max(least, self._known), self._longest_limit)

    def look(self, cpu: float) -> None:
        """Look at the position, and at the CPU seconds of the thread that runs the loop."""
        now, position = time.monotonic(), self._positions.now()
        # A process that was stopped or suspended itself was not hanging meanwhile.
        elapsed = min(now - self._looked, 2 * LOOK_SECONDS)
        self.is_busy = cpu - self._cpu >= BUSY_PART * (now - self._looked)
        self._looked, self._cpu = now, cpu
        self.unmoved_seconds += elapsed
        if position.order[0] != self._position.order[0]:  # another run
            self._gaps, self._known = [], 0.0
        elif position != self._position and self.unmoved_seconds > self.limit:
            self._known = 1.5 * self.unmoved_seconds  # such a pause, as of a long hook, may come again
        elif position != self._position:
            self._gaps = sorted([*self._gaps, self.unmoved_seconds], reverse=True)[:2]
        if position != self._position:
            self._position, self.unmoved_seconds = position, 0.0
        computes = self.is_busy and self.unmoved_seconds < BUSY_FACTOR * self.limit
        if computes and self.unmoved_seconds > self.limit:
            computes = not latest_collective()[1]  # NCCL's waits use the CPU
        self.stalled_seconds = 0.0 if computes else min(self.stalled_seconds + elapsed, self.unmoved_seconds)


def _cpu_seconds(thread: int) -> float:
    if thread != threading.main_thread().ident:
        return time.process_time()  # the clock of a thread that has ended would crash the process
    with suppress(AttributeError, OSError):  # not on macOS and Windows
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return 0.0


class SlowRanks:
    """Names the rank for which the others wait in most collectives.

    Every second all ranks sample how many collectives they have begun. After a minute rank 0 compares the samples. Seconds
    without a new collective, such as those of a save by rank 0, do not count.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._keys = rank, [f"slow/{each}" for each in range(world_size)]
        self._samples: dict[int, tuple[float, int]] = {}
        self._named: set[int] = set()

    def look(self, store: Store) -> None:
        now = time.time()  # clocks of machines agree, but not their monotonic ones
        if int(now) in self._samples:
            return
        if self._samples and int(now) // SAMPLES > max(self._samples) // SAMPLES:
            post(store, self._keys[self._rank], json.dumps(self._samples))
            self._samples = {}
        self._samples[int(now)] = now % 1.0, count_issued(in_all=True) or 0
        if self._rank == 0 and len(self._samples) == 3 and store.check(self._keys):  # the others have posted by now
            self._compare([json.loads(store.get(key)) for key in self._keys])

    def _compare(self, samples: Sequence[dict[str, tuple[float, int]]]) -> None:
        seconds = sorted(set.intersection(*map(set, samples)))
        late, looks, latest = [0] * len(samples), 0, -1
        for second in seconds:
            newest = max(count for _, count in (each[second] for each in samples))
            rate, latest = newest - latest if latest >= 0 else 0, newest
            if rate > 0:
                # As if all had been sampled in the same moment.
                counts = [count - rate * part for part, count in (each[second] for each in samples)]
                looks, late = looks + 1, [n + (c < max(counts) - 0.5) for n, c in zip(late, counts, strict=True)]
        ordered = sorted(range(len(late)), key=late.__getitem__)
        slow = ordered[-1]
        is_clear = late[slow] > LATE_SHARE * looks and late[ordered[-2]] < OTHERS_SHARE * looks
        if looks >= SAMPLES / 2 and is_clear and slow not in self._named:
            self._named.add(slow)
            say(f"Rank {slow} is slower than the others, which waited for it in {late[slow]} of {looks} samples.")


class Answer(NamedTuple):
    """The state of one rank when a rank has asked."""

    order: list[int]
    issued: int
    """Number of collectives so far."""
    stalled_seconds: float
    is_patient: bool
    is_busy: bool
    waits_in: str
    """The call in which the main thread waits for other ranks, or ""."""
    is_in_run: bool
    doing: str
    stacks: str

    def lateness(self) -> tuple[int, list[int], bool]:
        """Return a key by which the rank that the others wait for is the first."""
        return self.issued, self.order, bool(self.waits_in)


class HangWatch:
    """Watches one job from each of its processes. The watcher thread of the connection polls it.

    A process without other ranks has a thread only during a call of a Trainer: in a raw loop nothing tells a hang from a
    program that has no more to do. A hang that lasts for the timeout ends the job if `ends`.
    """

    def __init__(self, connection: Connection, timeout_seconds: float, *, ends: bool) -> None:
        self._rank, self._world_size = connection.environment.rank, connection.environment.world_size
        self._timeout, self._ends, self._polls = timeout_seconds, ends, connection.polls
        self._ends_at = timeout_seconds - min(MARGIN_SECONDS, timeout_seconds / 4)
        self._is_alone = connection.channel is None
        self._positions = RankPositions(0) if connection.channel is None else connection.channel.positions
        self._slow = SlowRanks(self._rank, self._world_size)
        self._place: Place | None = None
        self._terms: Callable[[], Sequence[float]] = list
        self._patient_at, self._thread = 0.0, threading.main_thread().ident or 0
        grace = argument_variables("grace").get("seconds", GRACE_SECONDS)
        if not grace.isdecimal():
            raise ValueError(f"TRAINWRIGHT_GRACE_SECONDS={grace}: expected an integer of at least 0.")
        self._grace = float(grace)
        self._begin()

    def _begin(self) -> None:
        self._progress: LocalProgress | None = None
        self._answered, self._round = 0, (0, 0.0)
        """The latest question, and the question of this rank that is open with the end of the wait for answers."""
        self._asks_at = self._reported = 0.0
        """When this rank asks again, in seconds without progress, and when the hang began that it has reported."""

    def locate_by(self, locate: Locate, folder: str | None) -> None:
        """Watch a loop whose end is unknown, from now on. Call it on every rank."""
        self._place, self._polls["hang"] = (lambda: (folder, locate()[0][0])), self.poll
        self._positions.locate_by(locate)

    def end_after(self, terms: Callable[[], Sequence[float]]) -> None:
        """End this process if it has no other ranks and makes no progress after SIGTERM, whose times `terms` returns."""
        if self._is_alone:  # otherwise the connection would keep the run in memory
            self._terms = terms

    @contextmanager
    def watching(self, locate: Locate, place: Place) -> Iterator[None]:
        """Watch a run during the block. Enter it on every rank."""
        outer = self._place, self._thread
        self._place, self._thread = place, threading.get_ident()
        self._polls["hang"] = self.poll  # in place of another engine's
        stopped = threading.Event()
        thread = threading.Thread(target=self._watch, args=(stopped,), name="trainwright-hang-watch", daemon=True)
        has_thread = self._is_alone and outer[0] is None  # not in a run within a run
        if has_thread:
            thread.start()
        try:
            with self._positions.located_by(locate):
                yield
        finally:
            self._place, self._thread = outer
            if has_thread:
                stopped.set()
                thread.join()

    def _watch(self, stopped: threading.Event) -> None:
        self._begin()
        store = stores().HashStore()
        while not stopped.wait(LOOK_SECONDS):
            self.poll(store)

    def poll(self, store: Store) -> None:
        """Look at the progress of this process, and at questions of other ranks. A watcher thread calls this."""
        if self._round[0]:
            self._finish_round(store, *self._round)
        progress = self._progress
        if progress is None:
            progress = self._progress = LocalProgress(self._positions, self._timeout / 2)
            self._answered, self._looked = store.add("hang/asked", 0), time.monotonic()
            post(store, f"hang/process/{self._rank}", json.dumps([os.getpid(), socket.gethostname()]))
        if not self._is_alone:
            self._slow.look(store)
        if time.monotonic() < self._looked + LOOK_SECONDS / 2:
            return
        self._looked = time.monotonic()
        progress.look(_cpu_seconds(self._thread))
        if self._is_alone and (terms := self._terms()):
            self._look_after_signal(terms, progress)
        if (asked := store.add("hang/asked", 0)) > self._answered:
            self._answer(store, progress, asked)
        if progress.unmoved_seconds == 0.0 if self._reported else progress.stalled_seconds == 0.0:
            if self._reported:
                store.delete_key("hang/reports")
                seconds = time.monotonic() - self._reported
                say(f"The hang is over after {seconds:.0f} s: rank {self._rank} makes progress again.")
            self._asks_at = self._reported = 0.0
        elif not self._round[0] and progress.stalled_seconds >= min(self._asks_at or progress.limit, self._ends_at):
            asked = store.add("hang/asked", 1)
            if asked == self._answered + 1:  # otherwise another rank has asked in between
                self._round = asked, time.monotonic() + min(ANSWER_SECONDS, self._timeout / 10)
            self._answer(store, progress, asked)

    def _look_after_signal(self, terms: Sequence[float], progress: LocalProgress) -> None:
        now, first = time.monotonic(), max(terms[0], self._patient_at)
        # A main thread that computes is in a long step, unless SIGTERM comes again.
        since, unmoved_since = (max(first, now - each) for each in (progress.stalled_seconds, progress.unmoved_seconds))
        if now - since < self._grace and terms[-1] - unmoved_since < AGAIN_SECONDS:
            return
        stack = stacks.stack_of(self._thread, stacks.read_stacks())
        if stacks.is_patient(stack):
            self._patient_at = now
            return
        text = (
            f"trainwright: the run made no progress for {now - unmoved_since:.0f} s after SIGTERM, so the process ends."
        )
        lines = "".join(f'  File "{file}", line {line} in {function}\n' for file, line, function in stack)
        # Not through sys.stderr, which the main thread may have locked.
        os.write(2, f"{text} Nothing is saved. The main thread hangs here:\n{lines}".encode())
        leave(128 + signal.SIGTERM)

    def _answer(self, store: Store, progress: LocalProgress, asked: int) -> None:
        text = stacks.read_stacks()
        stack = stacks.stack_of(self._thread, text)
        issued, (name, is_pending), (order, position) = count_issued() or 0, latest_collective(), self._positions.now()
        waits_in = stacks.awaited(stack, name and f"{name} (collective {issued})", is_pending)
        activity = f"waiting in {waits_in} " if waits_in else "computing " if progress.is_busy else ""
        doing = f"{activity}{stacks.user_place(stack, awaited_worker())}{f' ({position})' if position else ''}"
        numbers = list(order), issued, progress.stalled_seconds
        answer = Answer(*numbers, stacks.is_patient(stack), progress.is_busy, waits_in, bool(position), doing, text)
        for question in range(self._answered + 1, asked + 1):
            post(store, f"hang/answer/{question}/{self._rank}", json.dumps(answer))
        self._answered, self._asks_at = asked, max(self._asks_at, progress.stalled_seconds + progress.limit)

    def _finish_round(self, store: Store, asked: int, deadline: float) -> None:
        """Report the hang once all ranks have answered, or time is up, unless a rank makes progress."""
        keys = [f"hang/answer/{asked}/{rank}" for rank in range(self._world_size)]
        answers = [Answer(*json.loads(store.get(key))) if store.check([key]) else None for key in keys]
        progress, is_complete = self._progress, None not in answers
        if progress is None or (not is_complete and time.monotonic() < deadline):
            return
        self._round = 0, 0.0
        given = [answer for answer in answers if answer is not None]
        # A script may have no more to do after its run or its loop.
        is_awaited = any(answer.waits_in or answer.is_in_run for answer in given)
        moves = is_complete and _makes_progress(given, progress.limit)
        if is_awaited and progress.stalled_seconds >= progress.limit and not moves:
            self._report(store, answers, progress.stalled_seconds)

    def _report(self, store: Store, answers: Sequence[Answer | None], seconds: float) -> None:
        late, can_end = _late_ranks(answers), self._ends and not (self._is_alone and is_interactive())
        summary = f"Hang for {seconds:.0f} s: {self._described(store, answers, late)}"
        if store.add("hang/reports", 1) == 1:
            self._reported = time.monotonic() - seconds
            ends_in = max(0.0, self._ends_at - seconds)
            ending = f" hang_timeout={self._timeout:g} ends it in {ends_in:.0f} s." if can_end else ""
            say(f"{summary}.\n  The job continues to wait.{ending} {self._write(store, summary, answers)}")
        self._asks_at = self._ends_at if seconds < self._ends_at else seconds + self._timeout
        if seconds >= self._ends_at and can_end:
            self._end_job(store, late[0], answers[late[0]], summary)

    def _described(self, store: Store, answers: Sequence[Answer | None], late: Sequence[int]) -> str:
        """Return the late ranks in words, and then the other ranks."""
        example = answers[late[0]]
        if example is None:
            pid, host = self._process(store, late[0])
            silence = stacks.silence_of(pid) if host == socket.gethostname() else "no answer"
            text = f"never came: {silence} (process {pid} on {host})"
        elif len(late) == len(answers):
            text = f"made no progress, {example.doing}"
        else:
            text = f"{'went elsewhere:' if example.waits_in else 'never came:'} {example.doing}"
        groups: dict[str, list[int]] = {}
        for rank, answer in enumerate(answers):
            if answer is not None and rank not in late:
                groups.setdefault(answer.doing, []).append(rank)
        return "; ".join([f"{_named(late)} {text}", *(f"{_named(ranks)}: {doing}" for doing, ranks in groups.items())])

    def _process(self, store: Store, rank: int) -> tuple[int, str]:
        key = f"hang/process/{rank}"
        pid, host = json.loads(store.get(key)) if store.check([key]) else (0, "an unknown machine")
        return pid, host

    def _write(self, store: Store, summary: str, answers: Sequence[Answer | None]) -> str:
        """Write the report with the stacks of all ranks into the run's folder, and return the place in words."""
        folder, step = self._place() if self._place is not None else (None, 0)
        folder = "." if folder is None or "://" in folder else folder
        parts = [f"{summary}\n"]
        for rank, answer in enumerate(answers):
            pid, host = self._process(store, rank)
            text = "" if answer is None else answer.stacks
            if answer is None and host == socket.gethostname():
                text = stacks.foreign_stacks(pid)
            parts.append(f"== rank {rank}, process {pid} on {host}\n{text}")
        try:
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, f"hang-{step}.txt"), "w", encoding="utf-8") as file:
                file.write("\n".join(parts))
        except OSError as error:
            return f"The stacks were not written: {error}."
        return f"The stacks of all ranks are in {os.path.abspath(file.name)}."

    def _end_job(self, store: Store, late: int, answer: Answer | None, summary: str) -> None:
        text = f"hang_timeout={self._timeout:g} ends the job. {summary}"
        if answer is not None and answer.is_busy and not answer.waits_in:
            say(f"{summary}. Rank {late} still computes, so hang_timeout={self._timeout:g} does not end the job.")
        elif self._is_alone:
            say(f"{text}. The process ends.")
            leave(1)
        else:
            FailureLog(store).post(late, text)
            FailureLog(store).mark_printed()


def _makes_progress(given: Sequence[Answer], limit: float) -> bool:
    return any(answer.is_patient or answer.stalled_seconds < limit / 2 for answer in given)


def _late_ranks(answers: Sequence[Answer | None]) -> list[int]:
    """Return the ranks that the others wait for: those without an answer, or those with the fewest collectives."""
    lateness = [None if answer is None else answer.lateness() for answer in answers]
    first = None if None in lateness else min(key for key in lateness if key is not None)
    late = [rank for rank, key in enumerate(lateness) if key == first]
    if len(late) < len(answers):
        return late
    # Of ranks that wait in different collectives of one position, all but those in the last rank's.
    calls = [answer.waits_in if answer is not None else "" for answer in answers]
    return [rank for rank, call in enumerate(calls) if call != calls[-1]] or late


def _named(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{more}"
