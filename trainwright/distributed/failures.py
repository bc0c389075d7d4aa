"""Failures of ranks: reports over the key-value store, and the end of the other ranks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, replace
from types import TracebackType
from typing import NoReturn

from trainwright.distributed.job_store import Store, post

__all__ = ["shortened"]

PEER_FAILED_EXIT_CODE = 79
"""The exit code by which our launchers know a rank that ends only because another rank failed."""
PRINT_SECONDS = 0.5  # for the first failing rank to print its traceback before the others leave
SECONDARY_SECONDS = 2.0  # that an error about a lost peer waits for the peer's error: a process takes a moment to end
REPORT_SECONDS = 0.5  # that the text of a failure may take after its number
MOST_POLLS = 2500  # of all ranks, that poll in a second; each makes four requests of the 100,000 that a store answers
LONGEST, LONGEST_TRACE, MOST_REPORTS = 600, 100_000, 1000
"""The limits on the characters of an error's message and of a traceback, and on the reports that are read."""
LOST_PEER_TEXTS = ("connection closed by peer", "connection reset by peer", "connection was closed", "broken pipe")
"""Reports of gloo, NCCL and the store, in lower case, when the other end of a connection has gone."""
SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: "; on Linux this is often the out-of-memory killer",
    signal.SIGABRT: "; torch's gloo aborts if ranks exchange different tensors, as in a branch that only some ranks take",
}


@dataclass(frozen=True)
class FailureReport:
    rank: int
    summary: str
    traceback: str
    code: int = 0
    """The exit code of the rank (negative: killed by a signal), or 0 if the rank itself posted."""
    is_secondary: bool = False
    """Whether the rank only reports that another rank has gone."""
    was_printed: bool = False

    @classmethod
    def parse(cls, data: bytes, was_printed: bool) -> FailureReport | None:
        """Return a posted report, or None for other data. Every process that reaches the store can post."""
        try:
            report = cls(**{**json.loads(data), "was_printed": was_printed})
        except (ValueError, TypeError, RecursionError):
            return None
        if [*map(type, astuple(report))] != [int, str, str, int, bool, bool] or report.rank < 0:
            return None
        code = report.code if -65 < report.code < 256 else 1  # a process has 8 bits for it, so 256 would be a success
        summary, trace = report.summary[: 3 * LONGEST], report.traceback[-LONGEST_TRACE:]
        return replace(report, code=code, summary=summary, traceback=trace)


class FailureLog:
    """The failures of a job in the order of their posts, which all ranks and the launcher read."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def post(self, rank: int, summary: str, trace: str = "", code: int = 0, is_secondary: bool = False) -> int:
        """Post a failure and return its number in the order, from 1. A `code` says that a launcher posts it."""
        number = self._store.add("failure/count", 1)
        report = FailureReport(rank, summary, trace, code, is_secondary)
        post(self._store, f"failure/{number}", json.dumps(asdict(report)))
        if code:
            self.mark_printed()  # otherwise the ranks would wait for a traceback
        return number

    def post_error(self, rank: int, error: BaseException) -> int:
        trace = "".join(traceback.format_exception(error))
        return self.post(rank, summarize(error), trace, is_secondary=is_secondary_failure(error))

    def post_exit(self, rank: int, code: int) -> int:
        """Post the end of a rank that has left no report (a negative code: killed by a signal)."""
        names = {number.value: number.name for number in signal.Signals}
        killed = f"killed by {names.get(-code, f'signal {-code}')}{SIGNAL_HINTS.get(-code, '')}"
        return self.post(rank, killed if code < 0 else f"exit code {code}", code=code)

    def mark_printed(self) -> None:
        """Record that the first failing rank has printed its traceback."""
        post(self._store, "failure/printed", "1")

    def wait_until_printed(self, timeout_seconds: float) -> None:
        """Wait for the first failing rank's traceback. Once another rank has left, the launcher ends that rank too."""
        _wait_until(lambda: self._store.check(["failure/printed"]), timeout_seconds)

    def announce_join(self, rank: int) -> None:
        """Record that a rank is connecting to the others, and waits for them."""
        post(self._store, f"joined/{rank}", "1")
        self._store.add("joined", 1)

    def others_wait_for(self, rank: int) -> bool:
        """Return whether another rank is connecting, and this rank never did."""
        return self._store.add("joined", 0) > 0 and not self._store.check([f"joined/{rank}"])

    def announce_end(self) -> None:
        """Record that the launcher is ending the job, so that later errors are no failures."""
        post(self._store, "failure/ending", "1")

    def is_ending(self) -> bool:
        return self._store.check(["failure/ending"])

    def announce_stop(self, code: int) -> None:
        """Record that a signal has stopped the run, and the exit code of its ranks."""
        post(self._store, "stopped/code", str(code))

    def stop_code(self) -> int | None:
        """Return the exit code of ranks whose run a signal has stopped, or None."""
        posted = bytes(self._store.get("stopped/code")) if self._store.check(["stopped/code"]) else b""
        return int(posted) if re.fullmatch(rb"[1-9][0-9]{0,2}", posted) else None

    def count(self) -> int:
        return self._store.add("failure/count", 0)

    def reports(self) -> list[FailureReport]:
        """Return the failures in the order of their posts."""
        names = [f"failure/{number}" for number in range(1, min(self.count(), MOST_REPORTS) + 1)]
        # The count comes first, so the text of a counted failure may still be on its way.
        _wait_until(lambda: not names or self._store.check(names), REPORT_SECONDS)
        was_printed = self._store.check(["failure/printed"])
        posted = [self._store.get(name) for name in names if self._store.check([name])]
        return [report for each in posted if (report := FailureReport.parse(each, was_printed)) is not None]

    def first(self) -> FailureReport | None:
        """Return the first failure, preferably one that is no consequence of another, or None if none was posted."""
        return min(self.reports(), key=lambda report: report.is_secondary, default=None)


class PeerWatch:
    """Ends this process when another rank has failed, and reports failures of this process to the others.

    A daemon thread polls the store, and `sys.excepthook` is wrapped. A rank that is blocked in a collective runs no Python
    code in its main thread, so the thread ends the process by `os._exit`.

    Args:
        store: a connection only for this thread, because another thread's wait would block it.
        name: separates the shutdowns of several groups.
        store_host: the rank whose process hosts the store, or None if a launcher does.
        error_file: gets this rank's error in elastic's format, for torchrun's summary.
        poll: called at every poll, for other watches.
        poll_seconds: the seconds between two polls, or more in a job of many ranks.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        name: str = "0",
        store_host: int | None = None,
        error_file: str | None = None,
        poll_seconds: float = 0.2,
        poll: Callable[[], None] | None = None,
    ) -> None:
        self.has_failed = False
        self.has_said_goodbye = False
        """Whether this rank no longer uses the store, whose host may then end."""
        self._store, self._log = store, FailureLog(store)
        self._rank, self._world_size, self._store_host = rank, world_size, store_host
        self._closing, self._goodbyes = f"closing/{name}", f"goodbyes/{name}"
        self._error_file = error_file
        # Of several exit codes srun returns the highest, which is to be that of the rank that failed.
        self._secondary_code = PEER_FAILED_EXIT_CODE if store_host is None else 1
        self._poll = poll
        self.poll_seconds = max(poll_seconds, world_size / MOST_POLLS)
        self._pid = os.getpid()
        self._stopped = threading.Event()
        self._previous_hook: Callable[..., object] = sys.excepthook
        self._hook = self._on_uncaught  # one object, so that stop() recognises it
        self._thread = threading.Thread(target=self._watch, name="trainwright-peer-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wrap_excepthook(self) -> None:
        """Post an uncaught error before the current `sys.excepthook` prints it."""
        self._previous_hook = sys.excepthook
        sys.excepthook = self._hook

    def stop(self, farewell_seconds: float = 2.0) -> None:
        """Stop watching. From then on, peers and the store may go away."""
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous_hook
        if self._stopped.is_set() or os.getpid() != self._pid:
            return
        # Joined, because a daemon thread in the store's C++ code can abort the process at interpreter shutdown. A poll makes
        # several requests, and on a bad network an answer takes seconds.
        self._stopped.set()
        self._thread.join(timeout=2 * self.poll_seconds + 20.0)
        if self._store_host is not None and not self.has_failed:
            with contextlib.suppress(RuntimeError):
                self._say_goodbye(farewell_seconds)

    def _say_goodbye(self, farewell_seconds: float) -> None:
        """Make sure that no rank mistakes the end of the store's host for a failure."""
        if self._rank != self._store_host:
            self._acknowledge()
            return
        self._store.set(self._closing, "1")
        _wait_until(lambda: self._store.add(self._goodbyes, 0) >= self._world_size - 1, farewell_seconds)

    def _acknowledge(self) -> None:
        if not self.has_said_goodbye:
            self.has_said_goodbye = True
            self._store.add(self._goodbyes, 1)

    def _watch(self) -> None:
        # All ranks poll in the same moments, so that their counts of collectives compare.
        while not self._stopped.wait(self.poll_seconds - time.time() % self.poll_seconds):
            try:
                if self._log.count() > 0 and not self.has_failed:
                    self._log.wait_until_printed(PRINT_SECONDS)
                    leave(self._secondary_code)
                if self._store_host is not None and self._store.check([self._closing]):
                    self._acknowledge()
                    return
                if self._poll is not None:
                    self._poll()
            except RuntimeError:  # the store's host has gone, and so has the job
                if self._stopped.is_set() or self.has_failed:
                    return
                leave(self._secondary_code)

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self._pid or self._stopped.is_set():
            self._previous_hook(kind, error, trace)
        elif issubclass(kind, KeyboardInterrupt):
            self.has_failed = True
            if self._rank == 0:  # one traceback for a Ctrl-C, not one per rank
                self._previous_hook(kind, error, trace)
        else:
            self._report(kind, error, trace)

    def _report(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Post the failure, then print it, unless another rank failed first."""
        number = 1
        with contextlib.suppress(RuntimeError):  # if the store is gone, only the traceback is printed
            if is_secondary_failure(error):
                time.sleep(SECONDARY_SECONDS)  # the first failing rank's report ends this process here
            if self._log.is_ending():
                leave(self._secondary_code)
            self.has_failed = True
            if self._error_file:  # before the post, because torchrun ends this rank once another has left
                write_error_file(self._error_file, error)
            number = self._log.post_error(self._rank, error)
        if number > 1:
            leave(self._secondary_code)
        self.has_failed = True
        self._previous_hook(kind, error, trace)
        flush_streams()
        with contextlib.suppress(RuntimeError):
            self._log.mark_printed()


def _wait_until(is_done: Callable[[], bool], timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not is_done() and time.monotonic() < deadline:
        time.sleep(0.01)


def summarize(error: BaseException) -> str:
    """Return the kind of an error and the first lines of its text and its notes, shortened."""
    first, *notes = (str(text).strip().partition("\n")[0] for text in (error, *getattr(error, "__notes__", ())))
    head = f"{type(error).__name__}: {shortened(first)}" if first else type(error).__name__
    notes = [note for note in notes if note]
    return f"{head}; {shortened('; '.join(notes))}" if notes else head


def shortened(text: str) -> str:
    """Return the text, or its beginning and "..." if it is longer than LONGEST."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ..."


def is_secondary_failure(error: BaseException) -> bool:
    """Return whether an error, or a cause of it, only reports that a peer or the store has gone."""
    from torch.distributed import DistBackendError, DistNetworkError

    chain: dict[int, BaseException] = {}  # by identity: a user's exception may define another equality
    current: BaseException | None = error
    while current is not None and id(current) not in chain:
        chain[id(current)] = current
        current = current.__cause__ or current.__context__
    return any(
        isinstance(cause, (DistBackendError, DistNetworkError))
        or (isinstance(cause, RuntimeError) and any(text in str(cause).lower() for text in LOST_PEER_TEXTS))
        for cause in chain.values()
    )


def write_error_file(path: str, error: BaseException) -> None:
    """Write an error in torch elastic's format, so that torchrun shows the traceback and the true first failure."""
    # torchrun considers the smallest timestamp, in whole seconds, the first failure. A rank that left because of this failure
    # may get the same second, hence the subtraction.
    timestamp = int(time.time()) - 1
    details = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(timestamp)}
    content = {"message": {"message": summarize(error), "extraInfo": details}}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump(content, file)


def flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def leave(code: int) -> NoReturn:
    """Flush the streams and end this process at once, without cleanup."""
    # In a thread with a limit, because the main thread may have locked a stream in a write that never ends.
    flusher = threading.Thread(target=flush_streams, daemon=True)
    flusher.start()
    flusher.join(timeout=0.5)
    os._exit(code)
