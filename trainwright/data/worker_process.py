"""The process of a loader's worker. If a forked child never runs, it is killed and forked again.

CPython before 3.12 takes a lock of its runtime in the child before it renews that lock. A thread of the parent may hold the
lock at the fork, because it enters or leaves the interpreter, as gloo's threads do to release a tensor. The child does not
have that thread. So the child waits for the lock before it runs any Python, and the loader would wait for the child without
end.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any

from torch.utils.data import DataLoader

from trainwright.distributed.signals import STOP_SIGNALS

logger = logging.getLogger("trainwright")

WAITS = (5, 10, 20, 40, 80)
"""Seconds to wait in the attempts. A child that was only slow has not begun its work, so killing it loses nothing."""


class WorkerProcess:
    """A forked process that runs `target(*args)`, with the members of a `multiprocessing.Process` that torch's loader uses.

    `start` raises RuntimeError if all attempts fail.
    """

    def __init__(self, target: Callable[..., Any], args: tuple[Any, ...] = ()) -> None:
        self._target, self._args = target, args
        self._process: ForkProcess | None = None
        self.daemon = False

    def start(self) -> None:
        """Start the process and wait until it runs."""
        for seconds in WAITS:
            self._process = self._forked(seconds)
            if self._process is not None:
                del self._target, self._args  # as Process does, so that no reference cycle keeps the dataset
                return
            logger.info("A loader worker did not run within %d s of its fork. It is forked again.", seconds)
        raise RuntimeError(
            f"a loader worker did not run within {WAITS[-1]} s of its fork, at the last of {len(WAITS)} attempts. A thread "
            "of this process may hold a lock that the worker waits for: pass multiprocessing_context='forkserver' to the "
            "DataLoader, which forks its workers from a process without threads, or num_workers=0."
        )

    def _forked(self, seconds: float) -> ForkProcess | None:
        """Fork the process and return it. If it does not run within this many seconds, kill it and return None."""
        ours, its = multiprocessing.Pipe()
        is_running = False
        with ours, its:
            process = ForkProcess(target=_run, args=(ours, its, self._target, self._args), daemon=self.daemon)
            process.start()
            its.close()
            try:
                if is_running := ours.poll(seconds):
                    with suppress(OSError):  # the process may have ended, which the loader reports
                        ours.send_bytes(b"run")
            finally:
                if not is_running:
                    # Also if a signal handler raised an error, because the interpreter would wait for this child at its end.
                    process.kill()
                    process.join()
        return process if is_running else None

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the started process."""
        if name.startswith("_"):  # for example while a copy is unpickled
            raise AttributeError(name)
        return getattr(self._process, name)


class WorkerContext(ForkContext):
    """The start method fork with WorkerProcesses."""

    Process = WorkerProcess  # type: ignore[assignment]


@contextmanager
def holding_signals() -> Iterator[None]:
    """Defer signals while workers start in the block, until they have their handlers."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # workers inherit it until hear_signals
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def forked_until_running(loader: DataLoader[Any]) -> Iterator[None]:
    """Make a loader that forks its workers start them as WorkerProcesses in the block.

    Other start methods have no such children, and a subclass of their context may use another process class.
    """
    context = loader.multiprocessing_context
    if (context or multiprocessing).get_start_method() != "fork" or type(context) not in (type(None), ForkContext):
        yield
        return
    loader.multiprocessing_context = WorkerContext()
    try:
        yield
    finally:
        loader.multiprocessing_context = context  # None means the current start method, which a user may change


def _run(ours: Connection, its: Connection, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """In the child, run the target after the parent has seen that the child runs. Do nothing if the parent has ended."""
    ours.close()
    with its:
        try:
            its.send_bytes(b"running")
            its.recv_bytes()
        except (EOFError, OSError):
            return
    target(*args)
