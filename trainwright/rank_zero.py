"""Rank zero: functions to call on every rank that act on rank 0 only, and warnings that show the user's line.

Messages to stderr appear above the progress bars of tqdm.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, ParamSpec, TypeVar, cast, overload

from trainwright.distributed.environment import Environment

__all__ = ["say"]

_OWN = os.path.dirname(__file__) + os.sep  # not normalized, like the names of the frames' files
_PYTHON = os.path.dirname(os.__file__) + os.sep
_INSTALLED = tuple(f"{_PYTHON}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
"""Folders of installed packages within Python's folder, which do not count as Python's."""


def above_bars() -> AbstractContextManager[Any]:
    """Return a context in which text goes to stderr above the bars of tqdm, which are drawn again at its end."""
    tqdm: Any = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    has_bars = bool(getattr(tqdm, "_instances", None))  # without a bar, tqdm would only make a lock of processes
    return cast(AbstractContextManager[Any], tqdm.external_write_mode(file=sys.stderr)) if has_bars else nullcontext()


def say(text: str) -> None:
    """Print a message to stderr, above the bars of tqdm."""
    with above_bars():
        print(text, file=sys.stderr, flush=True)


def warn(message: str | Warning, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
    """Warn as warnings.warn does, but show the line of the user's code that has led to the warning, if there is one.

    The search begins at the frame that `stacklevel` means.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(stacklevel - 1):
        frame = None if frame is None else frame.f_back
    inner = _inner()
    while frame is not None and _is_inner(frame.f_code.co_filename, inner):
        frame = frame.f_back
    if frame is None:  # nothing of the user's has called it, as in a thread
        with above_bars():
            warnings.warn(message, category, stacklevel=stacklevel + 1)
        return
    known = frame.f_globals
    module = known.get("__name__") or "<string>"
    registry = known.setdefault("__warningregistry__", {})
    with above_bars():
        warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


def _inner() -> tuple[str, ...]:
    """Return the beginnings of file names of frames of the package, of torch and of frozen modules."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    return (_OWN, "<frozen ", *(() if torch is None else (os.path.dirname(torch) + os.sep,)))


def _is_inner(file: str, inner: tuple[str, ...]) -> bool:
    """Return whether a frame's file belongs to the package, to torch or to Python."""
    return file.startswith(inner) or (file.startswith(_PYTHON) and not file.startswith(_INSTALLED))


P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D")

logger = logging.getLogger("trainwright")


class RankZeroOnly:
    """A decorator: the function runs on rank 0 only, and returns a default on other ranks.

    The rank is read from the environment at the first use, unless it was set.

    >>> @tw.rank_zero_only
    ... def announce(accuracy):
    ...     print(f"accuracy: {accuracy:.1%}")
    >>> announce(0.925)  # on other ranks it returns None
    accuracy: 92.5%
    """

    def __init__(self) -> None:
        self._rank: int | None = None
        self._pid = os.getpid()

    @property
    def rank(self) -> int:
        """Return the global rank of this process."""
        if self._rank is None or self._pid != os.getpid():  # a forked process may have another rank
            self._rank, self._pid = Environment.detect().rank, os.getpid()
        return self._rank

    @rank.setter
    def rank(self, rank: int) -> None:
        self._rank, self._pid = rank, os.getpid()

    @overload
    def __call__(self, function: Callable[P, T]) -> Callable[P, T | None]: ...
    @overload
    def __call__(self, function: Callable[P, T], default: D) -> Callable[P, T | D]: ...
    def __call__(self, function: Callable[P, T], default: Any = None) -> Callable[P, Any]:
        """Return a function that runs on rank 0 and returns `default` on other ranks."""

        @functools.wraps(function)
        def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> Any:
            return function(*args, **kwargs) if self.rank == 0 else default

        return on_rank_zero


rank_zero_only = RankZeroOnly()


def rank_zero_info(message: object, *args: object, stacklevel: int = 1) -> None:
    """Log at level INFO to the logger "trainwright" on rank 0.

    Args:
        message: a text, with formats such as %s for `args`.
        args: the values to format.
        stacklevel: whose line is logged: 1 for the caller's, 2 for its caller's.

    >>> tw.rank_zero_info("%d samples are longer than the context", 3)
    """
    if rank_zero_only.rank == 0:
        logger.info(message, *args, stacklevel=stacklevel + 1)


def rank_zero_warn(message: str | Warning, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
    """Warn on rank 0.

    Args:
        message: a text, or a Warning, whose class is then the category.
        category: the class of the warning.
        stacklevel: whose line is shown: 1 for the caller's, 2 for its caller's. Instead of a line of this package
            or of torch, the line that called it is shown.

    >>> tw.rank_zero_warn("3 samples are longer than the context")
    """
    if rank_zero_only.rank == 0:
        warn(message, category, stacklevel + 1)


def rank_zero_debug(message: object, *args: object, stacklevel: int = 1) -> None:
    """Log at level DEBUG to the logger "trainwright" on rank 0."""
    if rank_zero_only.rank == 0:
        logger.debug(message, *args, stacklevel=stacklevel + 1)


def rank_zero_deprecation(message: str | Warning, stacklevel: int = 1) -> None:
    """Warn of a deprecation on rank 0."""
    rank_zero_warn(message, DeprecationWarning, stacklevel=stacklevel + 1)
