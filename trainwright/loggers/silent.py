"""A no-op logger for fast_dev_run: user code may still call it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainwright.loggers.base import Logger


class SilentExperiment:
    """Has every attribute, accepts every call, is a context manager and an empty collection, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look up protocols that this object does not have
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> SilentExperiment:
        return self

    __getitem__ = __enter__ = __call__

    def __exit__(self, *args: Any) -> None:
        pass

    __setattr__ = __setitem__ = __exit__

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class SilentLogger(Logger):
    """Replaces the loggers in a trial run (`fast_dev_run`): every call does nothing."""

    name = ""
    version = ""

    def __init__(self) -> None:
        self.experiment = SilentExperiment()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return SilentExperiment()
