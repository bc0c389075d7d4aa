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

    def __getitem__(self, key: Any) -> SilentExperiment:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __setattr__(self, name: str, value: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> SilentExperiment:
        return self

    def __exit__(self, *error: object) -> None:
        pass


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
