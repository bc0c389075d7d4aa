"""The saves of one engine, one after the other, each within the call or in the background.

In the background the call returns once this rank's part is in host memory. A thread then does the same as a blocking save,
without a collective: the ranks exchange results over the key-value store, on a channel for these saves only.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from trainwright.checkpoint.filesystem import describe, resolve
from trainwright.checkpoint.host_copy import HostMemory
from trainwright.checkpoint.store import Contents, collect, write_contents
from trainwright.checkpoint.tensors import Piece
from trainwright.distributed.ranks import Ranks
from trainwright.errors import CheckpointError

NICENESS = 10
DROP_SECONDS = 2.0
"""How long an abandoned save may take to stop using the files and the store."""


class BackgroundSave:
    """One save in its thread.

    Args:
        path: what it writes.
        write: writes and commits it.
    """

    def __init__(self, path: str, write: Callable[[], None]) -> None:
        self.path = path
        self.error: CheckpointError | None = None
        """Why it failed, the same on every rank; None unless it has."""
        self._write = write
        # Not Thread.is_alive: up to Python 3.12, a join interrupted by Ctrl-C marks a running thread as ended.
        self._has_ended = threading.Event()
        # A daemon: the interpreter waits in `_finish_at_exit` instead, which knows whether the other ranks have failed.
        self._thread = threading.Thread(target=self._run, name="trainwright-save", daemon=True)

    @property
    def is_committed(self) -> bool:
        """Whether the checkpoint is durable."""
        return self._has_ended.is_set() and self.error is None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it has committed or failed; return whether it did within the given time."""
        return self._has_ended.wait(seconds)

    def _run(self) -> None:
        _lower_priority()
        try:
            self._write()
        except CheckpointError as error:
            self.error = error
        except BaseException as error:
            self.error = CheckpointError(f"checkpoint {self.path} was not written: {describe(error, self.path)}")
            self.error.__cause__ = error
        finally:
            self._has_ended.set()


class CheckpointWriter:
    """Writes the checkpoints of one engine. Collective: make it on every rank, and save on every rank in the same order.

    Args:
        ranks: those that save.
        has_failed: returns whether this process has failed, so that its peers are leaving.
    """

    def __init__(self, ranks: Ranks, has_failed: Callable[[], bool]) -> None:
        self._ranks, self._thread_ranks = ranks, ranks.subchannel("saves")
        self._has_failed = has_failed
        self._memory = HostMemory()
        self.in_flight: BackgroundSave | None = None
        """The save in the background, until it is waited for."""

    def save(
        self,
        path: str,
        *,
        sections: Mapping[str, Sequence[Piece]],
        state: Any,
        rank_state: Any,
        header: Mapping[str, Any],
        blocking: bool,
        overwrite: bool = False,
    ) -> None:
        """Write a checkpoint (see `write_checkpoint`), or start to. Collective.

        Raises:
            CheckpointError: this save failed, or the one in flight before it; the same on every rank.
        """
        self.finish()
        files, inside = resolve(path)
        path = inside if files.has_rename else path  # the working directory may change before the thread runs
        write = partial(write_contents, path, header=header, overwrite=overwrite)
        gather = partial(collect, sections, state, rank_state, self._ranks.rank, self._ranks.world_size)
        if blocking:
            write(gather=gather, ranks=self._ranks)
            return
        copied = self._copied(gather)
        save = BackgroundSave(path, partial(write, gather=copied, ranks=self._thread_ranks))
        save.start()
        self.in_flight = save
        atexit.register(self._finish_at_exit)

    def finish(self) -> None:
        """Wait for the save in flight, if any. Collective.

        Raises:
            CheckpointError: it failed, the same on every rank; earlier checkpoints are unchanged.
        """
        save = self.in_flight
        if save is None:
            return
        try:
            save.wait()
        except BaseException:  # Ctrl-C
            self.drop()
            raise
        self._clear()
        if save.error is not None:
            raise save.error

    def drop(self) -> None:
        """Abandon the save in flight, since a rank that it needs is gone; earlier checkpoints are unchanged."""
        save = self.in_flight
        if save is not None:
            self._clear()
            self._thread_ranks.give_up()
            memory, self._memory = self._memory, HostMemory()  # the abandoned save may still read its copy
            if save.wait(DROP_SECONDS):
                self._memory = memory

    def release(self) -> None:
        """Free the host memory that is kept for the next save."""
        if self.in_flight is None:
            self._memory.release()

    def _copied(self, gather: Callable[[], Contents]) -> Callable[[], Contents]:
        """Return a function that returns a copy of the contents, or raises the copy's error in the exchange with all ranks."""
        try:
            contents = gather()
            names = [*contents.sections, *contents.plain]
            parts = [*contents.sections.values(), *(tensors for _, tensors in contents.plain.values())]
            copies = dict(zip(names, self._memory.copy(parts), strict=True))
        except Exception as error:
            return partial(_raise, error)
        sections = {name: copies[name] for name in contents.sections}
        plain = {name: (value, copies[name]) for name, (value, _) in contents.plain.items()}
        return lambda: Contents(sections, plain)

    def _clear(self) -> None:
        self.in_flight = None
        atexit.unregister(self._finish_at_exit)

    def _finish_at_exit(self) -> None:
        """Keep the process from ending before its last save has committed, and print a failure."""
        save = self.in_flight
        if save is None:
            return
        if self._has_failed():
            self.drop()
        elif not save.wait(self._ranks.timeout_seconds):
            print(
                f"trainwright: checkpoint {save.path} was not written: it was not done {self._ranks.timeout_seconds:g} s after "
                "the end of the program.",
                file=sys.stderr,
            )
        elif save.error is not None:
            print(f"trainwright: {save.error}", file=sys.stderr)


def _lower_priority() -> None:
    """Lower the priority of this thread and those that it starts, where threads have one.

    The threads of a training step wait for each other, so slowing one of them down slows down all.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _raise(error: Exception) -> Contents:
    raise error
