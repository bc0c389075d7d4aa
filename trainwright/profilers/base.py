"""The profiler contract: actions are started and stopped by name, and told about in a summary at the end of a run.

Every rank profiles; rank 0 alone prints or writes its summary.
"""

from __future__ import annotations

import functools
import os
import posixpath
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import fsspec.core
from torch import nn

from trainwright.distributed.environment import Environment

T = TypeVar("T")


class Profiler:
    """Override `start`, `stop` and `summary`; this one measures nothing.

    Args:
        dirpath: the folder for what is written; a local path or a URL. The run's log folder where left out.
        filename: what the files are called, between the stage and the rank; "profile" where left out. With neither of
            both, the summary is printed.
    """

    def __init__(self, dirpath: str | os.PathLike[str] | None = None, filename: str | None = None) -> None:
        if filename is not None and (not filename or "/" in filename or os.sep in filename):
            raise ValueError(f"filename={filename!r} is no plain name; give the folder as dirpath.")
        self.dirpath = None if dirpath is None else os.fspath(dirpath)
        self.filename = filename
        self.stage: str | None = None
        self.log_dir: str | None = None

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return Environment.detect().rank

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | os.PathLike[str] | None = None) -> None:
        """Called at the beginning of a run, on every rank; the stage is "fit", "validate", "test" or "predict"."""
        self.stage = stage
        self.log_dir = None if log_dir is None else os.fspath(log_dir)

    def attach(self, module: nn.Module) -> None:
        """Called after `setup` with the module that is run, on every rank."""

    def start(self, action: str) -> None:
        """Begin an action."""

    def stop(self, action: str) -> None:
        """End an action."""

    def summary(self) -> str:
        """Return what was measured, as text; empty where there is nothing to tell."""
        return ""

    def describe(self) -> None:
        """Print the summary, or write it to a file where a folder or a file name was given; on rank 0."""
        if self.rank != 0:
            return
        text = self.summary()
        if not text:
            return
        if self.dirpath is None and self.filename is None:
            print(text, flush=True)
        else:
            self.write(".txt", lambda path: Path(path).write_text(text + "\n", encoding="utf-8"))

    def teardown(self, stage: str) -> None:
        """Called at the end of a run, after `describe`, and after a failure too; on every rank."""

    def profile(self, action: str) -> AbstractContextManager[str]:
        """Measure what is in the block as one action."""
        return self._measure(action)

    def timed(self, function: Callable[..., T], action: str) -> Callable[..., T]:
        """Return the function with each of its calls measured."""
        start, stop = self.start, self.stop

        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> T:
            start(action)
            try:
                return function(*args, **kwargs)
            finally:
                stop(action)

        return measured

    def timed_iterator(self, iterable: Iterable[T], action: str) -> Iterator[T]:
        """Return an iterator that measures how long each item is waited for."""
        return TimedIterator(iter(iterable), self, action)

    def write(self, suffix: str, save: Callable[[str], object]) -> str:
        """Have `save(path)` write a local file and bring it to its place, whose path is returned."""
        name = "-".join(part for part in (self.stage, self.filename or "profile", str(self.rank)) if part) + suffix
        filesystem, folder = fsspec.core.url_to_fs(self.dirpath or self.log_dir or os.getcwd())
        filesystem.makedirs(folder, exist_ok=True)
        place = posixpath.join(folder, name)
        is_local = "file" in filesystem.protocol
        with tempfile.TemporaryDirectory(dir=folder if is_local else None, prefix=".") as temporary:
            written = os.path.join(temporary, name)
            save(written)
            if is_local:
                os.replace(written, place)  # not through a symbolic link that stands there
            else:
                filesystem.put_file(written, place)
        return place

    @contextmanager
    def _measure(self, action: str) -> Iterator[str]:
        self.start(action)
        try:
            yield action
        finally:
            self.stop(action)


class TimedIterator(Iterator[T]):
    """An iterator with each of its `next` calls measured.

    Args:
        iterator: where the items come from.
        profiler: measures.
        action: what a call is counted as.
    """

    def __init__(self, iterator: Iterator[T], profiler: Profiler, action: str) -> None:
        self._next = profiler.timed(iterator.__next__, action)

    def __next__(self) -> T:
        return self._next()


class PassThroughProfiler(Profiler):
    """Measures nothing and costs nothing: what is to be measured is returned as it is."""

    def profile(self, action: str) -> AbstractContextManager[str]:
        return nullcontext(action)

    def timed(self, function: Callable[..., T], action: str) -> Callable[..., T]:
        return function

    def timed_iterator(self, iterable: Iterable[T], action: str) -> Iterator[T]:
        return iter(iterable)
