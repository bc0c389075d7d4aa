"""The profiler contract: actions are started and stopped by name, and summarized at the end of a run.

Every rank profiles, but only rank 0 prints or writes its summary. A run measures the engine's methods below, overridden hooks
("[callback] EarlyStopping.on_train_end", "[module] ..." and "[datamodule] ...") and the wait for batches
("train_dataloader_next" and its counterparts in evaluations). Without a profiler nothing is wrapped, so it costs nothing.
"""

from __future__ import annotations

import functools
import os
import posixpath
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import fsspec.core
from torch import nn

from trainwright.distributed.environment import Environment

T = TypeVar("T")


class Profiler:
    """The base class of profilers, which measures nothing. Override `start`, `stop` and `summary`.

    An action is a step or a hook, such as "training_step", "backward" or "[callback] Timer.on_train_start". It may also be
    the wait for a batch, such as "train_dataloader_next", or a block under `profile`.

    Args:
        dirpath: the output folder, a local path or a URL. The default is the run's log folder.
        filename: the middle of the files' names, between the stage and, on several processes, the rank. The default is
            "profile". Without both arguments the summary is printed.

    Raises:
        ValueError: filename is not a plain name.

    >>> class StepCount(tw.Profiler):
    ...     steps = 0
    ...
    ...     def start(self, action):
    ...         self.steps += action == "training_step"
    ...
    ...     def summary(self):
    ...         return f"training_step was called {self.steps} times"
    >>> tw.Trainer(profiler=StepCount(), max_epochs=1, enable_model_summary=False).fit(module, loader)
    training_step was called 8 times
    """

    def __init__(self, dirpath: str | os.PathLike[str] | None = None, filename: str | None = None) -> None:
        if filename is not None and (not filename or "/" in filename or os.sep in filename):
            raise ValueError(f"filename={filename!r} is not a plain name. Pass the folder as dirpath.")
        self.dirpath = None if dirpath is None else os.fspath(dirpath)
        self.filename = filename
        self.stage: str | None = None
        self.log_dir: str | None = None

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return Environment.detect().rank

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | os.PathLike[str] | None = None) -> None:
        """Called at the start of a run, on every rank. The stage is "fit", "validate", "test" or "predict"."""
        self.stage = stage
        self.log_dir = None if log_dir is None else os.fspath(log_dir)

    def attach(self, module: nn.Module) -> None:
        """Called after `setup` with the run's module, on every rank."""

    def start(self, action: str) -> None:
        """Start an action."""

    def stop(self, action: str) -> None:
        """Stop an action."""

    def summary(self) -> str:
        """Return the measurements as text, which is empty if there are none."""
        return ""

    def describe(self) -> None:
        """On rank 0, print the summary, or write it to a file if dirpath or filename is set."""
        if self.rank != 0:
            return
        text = self.summary()
        if text and (self.dirpath is not None or self.filename is not None):
            try:
                self.write(".txt", lambda path: Path(path).write_text(text + "\n", encoding="utf-8"))
            except OSError:
                print(text, flush=True)  # so that the measurements of a whole run are not lost
                raise
        elif text:
            print(text, flush=True)

    def teardown(self, stage: str) -> None:
        """Called at the end of a run after `describe`, also after a failure, on every rank."""

    @contextmanager
    def profile(self, action: str) -> Iterator[str]:
        """Measure the block as one action."""
        self.start(action)
        try:
            yield action
        finally:
            self.stop(action)

    def timed(self, function: Callable[..., T], action: str) -> Callable[..., T]:
        """Return the function with its calls measured."""
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
        """Return an iterator that measures the wait for every item."""
        fetch = self.timed(iter(iterable).__next__, action)
        with suppress(StopIteration):
            while True:
                yield fetch()

    def write(self, suffix: str, save: Callable[[str], object], *, names_rank: bool = False) -> str:
        """Write a local file with `save(path)`, move it to the output folder, and return its path."""
        rank = str(self.rank) if names_rank or Environment.detect().world_size > 1 else ""
        name = "-".join(part for part in (self.stage, self.filename or "profile", rank) if part) + suffix
        filesystem, folder = fsspec.core.url_to_fs(self.dirpath or self.log_dir or os.getcwd())
        target = posixpath.join(folder, name)
        is_local = "file" in filesystem.protocol
        try:
            filesystem.makedirs(folder, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder if is_local else None, prefix=".") as temporary:
                written = os.path.join(temporary, name)
                save(written)
                if is_local:
                    os.replace(written, target)  # a symbolic link is replaced, not followed
                else:
                    filesystem.put_file(written, target)
        except OSError as error:
            raise OSError(
                f"{type(self).__name__} could not write {target}: {type(error).__name__}: {error}. Free space there, or pass "
                "another dirpath to the profiler."
            ) from error
        return target


class PassThroughProfiler(Profiler):
    """Measures nothing and costs nothing, because it wraps nothing."""

    def timed(self, function: Callable[..., T], action: str) -> Callable[..., T]:
        return function

    def timed_iterator(self, iterable: Iterable[T], action: str) -> Iterator[T]:
        return iter(iterable)


Undo = Callable[[], None]

ENGINE_ACTIONS: Mapping[str, str | None] = {
    "run": None,
    "backward": "backward",
    "step": "optimizer_step",
    "save": "save_checkpoint",
}
"""The measured methods of the engine. None means that the method's second argument is the action ("training_step")."""


def is_measuring(profiler: Profiler | None) -> bool:
    return profiler is not None and not isinstance(profiler, PassThroughProfiler)


def instrument(engine: object, profiler: Profiler | None) -> Undo:
    """Measure the engine's methods until the returned function is called."""
    if profiler is None or not is_measuring(profiler):
        return lambda: None
    for method, action in ENGINE_ACTIONS.items():
        bound = getattr(engine, method)
        setattr(engine, method, _timed_by_name(bound, profiler) if action is None else profiler.timed(bound, action))

    def undo() -> None:
        for method in ENGINE_ACTIONS:
            vars(engine).pop(method, None)

    return undo


def _timed_by_name(function: Callable[..., Any], profiler: Profiler) -> Callable[..., Any]:
    timed = functools.cache(functools.partial(profiler.timed, function))  # one wrapper per name
    return lambda subject, name, *args, **kwargs: timed(name)(subject, name, *args, **kwargs)
