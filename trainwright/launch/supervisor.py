"""Supervisor: runs the ranks of one machine and ends all of them if one fails. elastic.py joins several machines."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import IO, Any, TextIO

from trainwright.devices.out_of_memory import OutOfMemoryKills
from trainwright.distributed.failures import LOST_PEER_TEXTS, PEER_FAILED_EXIT_CODE, FailureLog, FailureReport
from trainwright.distributed.job_store import STORE_PREFIX, Store, stores
from trainwright.distributed.signals import STOPPED_EXIT_CODE, Presses
from trainwright.launch.config import printable
from trainwright.launch.nodes import Job, JobOutcome, Place

LEAVE_SECONDS = 1.0  # for ranks to flush their output and exit after a failure is posted
CAUSE_SECONDS = 10.0  # for a rank to exit that others have missed
CLOSE_SECONDS = 3.0  # between SIGTERM and SIGKILL to a rank, or to its loader workers
MAX_LINE_BYTES = 1 << 20  # longer lines are split, so that a rank that prints no newline cannot fill the memory
ENTRY = str(Path(__file__).with_name("entry.py"))


class Supervisor:
    """Runs the ranks of one machine.

    The first SIGTERM, SIGUSR1 or Ctrl-C is passed on to the ranks, which save and exit within `job.grace_seconds`. A second
    Ctrl-C kills them.
    """

    def __init__(self, job: Job) -> None:
        self.signal = 0  # the number of the signal that was passed on, or 0
        self.failures: FailureLog
        self._job = job
        self._kills = OutOfMemoryKills()
        self._interrupts, self._deadline = Presses(), float("inf")
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        self._printers: list[threading.Thread] = []

    def on_signal(self, number: int, _: FrameType | None = None) -> None:
        if number == signal.SIGINT:
            self._interrupts.add()
        if self._interrupts.count > 1:
            self.signal, self._deadline = signal.SIGINT, 0.0
        elif not self.signal:
            self.signal = number
            self._deadline = min(self._deadline, time.monotonic() + self._job.grace_seconds)
            self._send(number)

    def run(self, place: Place, open_store: Callable[[], Store]) -> JobOutcome:
        """Run the ranks of one start to their end."""
        self._deadline, self._ranks, self._printers = (self._deadline if self.signal else float("inf")), {}, []
        try:
            for local_rank in range(self._job.num_processes):
                self._start(place, local_rank)
            if self.signal:  # it arrived meanwhile
                self._send(self.signal)
            # The ranks start first, because this imports torch.
            self.failures = FailureLog(stores().PrefixStore(f"{STORE_PREFIX}/{place.start}", open_store()))
            return self._watch(place)
        finally:
            end_groups(self._running(), CLOSE_SECONDS)
            deadline = time.monotonic() + LEAVE_SECONDS  # a process that outlives the rank may hold its pipe open
            for printer in self._printers:
                printer.join(max(0.0, deadline - time.monotonic()))

    def _start(self, place: Place, local_rank: int) -> None:
        rank = place.first_rank(place.node) + local_rank
        targets: list[TextIO | None] = [sys.stdout, sys.stderr]
        # In a terminal rank 0 writes directly, for its progress bars. Elsewhere lines of ranks must not mix.
        if rank == 0 and self._job.logs is None:
            targets = [None if isinstance(own, TextIOWrapper) and own.isatty() else own for own in targets]
        variables = place.variables(local_rank, self._job)
        if targets[0] is not None:  # a pipe would buffer lines, and lose them in a crash
            variables.setdefault("PYTHONUNBUFFERED", "1")
        process = self._ranks[rank] = subprocess.Popen(
            [sys.executable, "-I", "-S", ENTRY, "attached", str(os.getpid()), *self._job.command],
            env=variables,
            stdout=None if targets[0] is None else subprocess.PIPE,
            stderr=None if targets[1] is None else subprocess.PIPE,
            start_new_session=True,
        )
        log = os.devnull if self._job.logs is None else os.path.join(self._job.logs, f"rank{rank}.log")
        os.makedirs(os.path.dirname(log) or ".", exist_ok=True)
        prefix = f"[rank{rank}] ".encode() if rank else b""
        for pipe, target in zip((process.stdout, process.stderr), targets, strict=True):
            if pipe is not None and target is not None:
                file = open(log, "ab", buffering=0)  # noqa: SIM115 - the thread closes it
                printer = threading.Thread(target=_print_lines, args=(pipe, prefix, target, file), daemon=True)
                printer.start()
                self._printers.append(printer)

    def _watch(self, place: Place) -> JobOutcome:
        ends_at = float("inf")
        while True:
            time.sleep(0.05)
            codes = self._exit_codes()
            # The exit codes on which ranks stopped by a signal have agreed. A single rank has no store to announce its own in.
            stops = {STOPPED_EXIT_CODE, 128 + signal.SIGINT} if place.world_size == 1 else {self.failures.stop_code()}
            failed = {rank: code for rank, code in codes.items() if code and code not in stops}
            if stops & set(codes.values()):  # perhaps only a rank was signalled
                self._deadline = min(self._deadline, time.monotonic() + self._job.grace_seconds)
            if (stop := self._find_stop(failed)) is not None:
                return self.abandon(stop)
            has_finished = not failed and len(codes) == len(self._ranks)
            if outcome := self.finish(place, max(codes.values())) if has_finished else self.look_around():
                return outcome
            self._check_early_exits(codes)
            if self.failures.count() > 0:
                # A failed rank may not end by itself while one of its threads runs.
                ends_at = min(ends_at, time.monotonic() + (LEAVE_SECONDS if self._running() else 0.0))
            if failed or time.monotonic() >= ends_at:
                return self._fail(place, codes, failed)

    def _check_early_exits(self, codes: dict[int, int]) -> None:
        for rank, code in codes.items():
            if code == 0 and self.failures.count() == 0 and self.failures.others_wait_for(rank):
                text = "it exited with code 0 before it made its Trainer or Accelerator, and the others wait for it"
                self.failures.post(rank, text, code=1)

    def look_around(self) -> JobOutcome | None:
        """Return the end of the ranks if a reason outside of them ends them."""
        return None

    def finish(self, place: Place, code: int) -> JobOutcome | None:
        """Return the end after all ranks of this machine have ended well, or None to wait for the other machines."""
        return JobOutcome(code)

    def abandon(self, outcome: JobOutcome) -> JobOutcome:
        """End the ranks without naming one."""
        self.failures.announce_end()
        end_groups(self._running(), CLOSE_SECONDS)
        return outcome

    def _find_stop(self, failed: dict[int, int]) -> JobOutcome | None:
        """Return how a signal ends ranks that did not wait for a save, or that have not exited in time."""
        if self.signal and failed and set(failed.values()) <= {-self.signal, 128 + self.signal}:
            return JobOutcome(128 + self.signal)
        if time.monotonic() < self._deadline:
            return None
        number, text = self.signal or signal.SIGTERM, "second Ctrl-C; the ranks were killed."
        if self._interrupts.count < 2:
            text = (
                f"the ranks had not left {self._job.grace_seconds:g} s after {signal.Signals(number).name} and were killed. "
                "The last complete checkpoint is unchanged. Set TRAINWRIGHT_GRACE_SECONDS to give them more time."
            )
        return JobOutcome(128 + number, rest=f"trainwright: {text}\n")

    def _fail(self, place: Place, codes: dict[int, int], failed: dict[int, int]) -> JobOutcome:
        """End all ranks after a failure, and return which rank of the job failed first."""
        self._post_exits(failed)
        end_groups([self._ranks[rank] for rank in failed], CLOSE_SECONDS)
        began, is_named, report = time.monotonic(), False, None
        while self._running() or not is_named:
            if time.monotonic() - began > (LEAVE_SECONDS if is_named else CAUSE_SECONDS):
                break
            time.sleep(0.02)
            self._post_exits(self._exit_codes())
            report = self.failures.first()
            # A report of a lost peer waits for the peer's, which may be on another machine.
            is_named = not (report is None or report.is_secondary) or (len(place.hosts) == 1 and not self._running())
        end_groups(self._running(), CLOSE_SECONDS)
        report = report or FailureReport(min(failed, default=0), "it left no report", "")
        return self._name(place, report, codes, failed)

    def _name(self, place: Place, report: FailureReport, codes: dict[int, int], failed: dict[int, int]) -> JobOutcome:
        """Return the exit code of a failed job, and which rank failed first."""
        code = failed.get(report.rank) or report.code or 1  # never 0, whatever was posted
        if code < 0:
            # A rank that had posted its error and was killed while it was ending counts as an error.
            code = 1 if report.traceback else 128 - code
        where = rest = ""
        if len(place.hosts) > 1:
            node = max(node for node in range(len(place.hosts)) if place.first_rank(node) <= report.rank)
            where = f", on node {node} ({place.hosts[node]}),"
        ended = ", ".join(str(rank) for rank, code in codes.items() if code == 0)
        if ended and any(text in report.summary.lower() for text in LOST_PEER_TEXTS):
            rest = f"trainwright: before that, rank {ended} had reached the end of its script or exited with code 0.\n"
        # A rank of another node has printed its traceback there only.
        if not (report.was_printed and report.rank in self._ranks):
            rest += printable(report.traceback, "\t\n")
        reason = f"rank {report.rank} of {place.world_size}{where} failed first ({printable(report.summary)})"
        return JobOutcome(1 if code == PEER_FAILED_EXIT_CODE else code, reason, rest)

    def _post_exits(self, codes: dict[int, int]) -> None:
        """Post the failures of ranks that have left none themselves, first the most likely cause."""
        known = {report.rank for report in self.failures.reports()}
        # Ranks that missed another one, or that a signal stopped, only count if nothing else is known.
        counted = [
            rank for rank, code in codes.items() if code not in (0, PEER_FAILED_EXIT_CODE, STOPPED_EXIT_CODE)
        ] or ([] if known else codes)
        silent = [rank for rank in counted if codes[rank] and rank not in known]
        for rank in sorted(silent, key=lambda rank: (codes[rank] != -signal.SIGKILL, rank)):
            if codes[rank] == -signal.SIGKILL and (reason := self._kills.describe()):
                self.failures.post(rank, f"killed by SIGKILL{reason}", code=codes[rank])
            else:
                self.failures.post_exit(rank, codes[rank])

    def _exit_codes(self) -> dict[int, int]:
        """Return the exit codes of the ended ranks (negative: killed by a signal)."""
        return {rank: process.returncode for rank, process in self._ranks.items() if process.poll() is not None}

    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self._ranks.values() if process.poll() is None]

    def _send(self, number: int) -> None:
        for process in self._running():
            process.send_signal(number)  # not to its process group: the rank ends its loader workers


def catch_signals(handler: Callable[[int, FrameType | None], object] | int, *numbers: int) -> dict[int, Any]:
    """Install a signal handler, and return the previous ones. Ignored signals stay ignored (nohup)."""
    caught = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    return {number: signal.signal(number, handler) for number in caught}


def end_groups(processes: Iterable[subprocess.Popen[bytes]], seconds: float) -> None:
    """End the process groups of ranks: SIGTERM, and after some seconds SIGKILL, to the ranks first.

    Loader workers end when their rank has ended, and remove their temporary folders.
    """
    groups = list(processes)
    for number, is_rank in ((signal.SIGTERM, False), (signal.SIGKILL, True), (signal.SIGKILL, False)):
        for process in groups if is_rank else ():
            process.kill()
        groups = [process for process in groups if _reaches(process, 0 if is_rank else number)]
        deadline = time.monotonic() + seconds
        while groups and time.monotonic() < deadline:
            time.sleep(0.01)
            groups = [process for process in groups if _reaches(process, 0)]


def _reaches(process: subprocess.Popen[bytes], number: int) -> bool:
    process.poll()  # an ended process stays in its group until then
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
        return True
    return False


def _print_lines(pipe: IO[bytes], prefix: bytes, target: TextIO, log: IO[bytes]) -> None:
    with pipe, log:
        for line in iter(lambda: pipe.readline(MAX_LINE_BYTES), b""):
            # A progress bar redraws its line after a carriage return: only the last state is printed.
            shown = line.rstrip(b"\r\n").rpartition(b"\r")[2] + b"\n"
            with contextlib.suppress(Exception):  # keep reading the pipe even if our output is closed or breaks
                if isinstance(target, TextIOWrapper):  # its encoding may differ from the rank's
                    target.buffer.write(prefix + shown)
                else:  # a notebook's
                    target.write((prefix + shown).decode(errors="replace"))
                target.flush()
            with contextlib.suppress(OSError):
                log.write(shown)
