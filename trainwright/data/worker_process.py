"""The process of a loader's worker. A fork can leave a child that never runs: it is killed, and the process forked again.

CPython before 3.12 takes a lock of its runtime in the child before it renews that lock. If a thread of the parent was entering
or leaving the interpreter at the fork, as gloo's do to release a tensor, the lock is held by a thread that the child does not
have. The child waits for it before it runs any Python, so the loader would wait for the child's batches without end.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.queues import Queue
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader

logger = logging.getLogger("trainwright")

WAITS = (5, 10, 20, 40, 80)
"""Seconds to wait in each attempt. A child that was only slow has not begun the worker's work, so nothing is lost with it."""


class WorkerProcess:
    """A forked process that runs `target(*args)`, with what torch's loader and its errors need of a `multiprocessing.Process`.

    `start` raises RuntimeError if the process runs at none of its attempts.
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
            logger.info("A loader worker did not run within %d s of its fork; it is forked again.", seconds)
        raise RuntimeError(
            f"a loader worker did not run within {WAITS[-1]} s of its fork, at the last of {len(WAITS)} attempts. A thread of "
            "this process may hold a lock that the worker waits for: pass multiprocessing_context='forkserver' to the "
            "DataLoader, which forks its workers from a process without threads, or num_workers=0."
        )

    def _forked(self, seconds: float) -> ForkProcess | None:
        """Fork the process and return it; if it does not run within this many seconds, kill it and return None."""
        ours, its = multiprocessing.Pipe()
        is_running = False
        with ours, its:
            process = ForkProcess(target=_run, args=(ours, its, self._target, self._args), daemon=self.daemon)
            process.start()
            its.close()
            try:
                if is_running := ours.poll(seconds):
                    with suppress(OSError):  # a process that has ended already: the loader reports it
                        ours.send_bytes(b"run")
            finally:
                if not is_running:
                    # Also if a signal's handler has raised: the interpreter would wait for this child when it ends.
                    process.kill()
                    process.join()
        return process if is_running else None

    @property
    def _started(self) -> ForkProcess:
        assert self._process is not None, "start() comes first"
        return self._process

    @property
    def pid(self) -> int | None:
        return self._started.pid

    @property
    def exitcode(self) -> int | None:
        return self._started.exitcode

    def is_alive(self) -> bool:
        return self._started.is_alive()

    def join(self, timeout: float | None = None) -> None:
        self._started.join(timeout)

    def terminate(self) -> None:
        self._started.terminate()


class WorkerQueue(Queue):  # type: ignore[type-arg]
    """A queue that sends the error if a batch cannot be pickled: the loader would wait for the batch forever."""

    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:
        number, content = item  # which may be the dataset's own exception
        text = content.exc_msg if isinstance(content, ExceptionWrapper) else f"a batch cannot be pickled: {error}"
        failure: Any = ExceptionWrapper((RuntimeError, RuntimeError(text), None), "in a loader worker")  # type: ignore[no-untyped-call]
        self.put((number, failure))


class WorkerContext(ForkContext):
    """The start method fork with a WorkerProcess for each process, and queues that report what cannot be pickled."""

    Process = WorkerProcess  # type: ignore[assignment]

    def Queue(self, maxsize: int = 0) -> WorkerQueue:
        return WorkerQueue(maxsize, ctx=self.get_context())


@contextmanager
def forked_until_running(loader: DataLoader[Any]) -> Iterator[None]:
    """Let a loader whose workers are forked start each as a WorkerProcess in the block.

    Other start methods have no such children, and a subclass of their context may have another process.
    """
    context = loader.multiprocessing_context
    if (context or multiprocessing).get_start_method() != "fork" or type(context) not in (type(None), ForkContext):
        yield
        return
    loader.multiprocessing_context = WorkerContext()
    try:
        yield
    finally:
        loader.multiprocessing_context = context  # None is the start method of each moment, which a user may set


def _run(ours: Connection, its: Connection, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run the target in the child once the parent has seen that the child runs; not if the parent has ended."""
    ours.close()
    with its:
        try:
            its.send_bytes(b"running")
            its.recv_bytes()
        except (EOFError, OSError):
            return
    target(*args)
