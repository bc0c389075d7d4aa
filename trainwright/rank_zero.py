"""Rank zero: functions to call on every rank that act on rank 0 only, and warnings that show the user's line."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch

from trainwright.distributed.environment import Environment

__all__ = ["say"]

_INNER = (os.path.dirname(__file__) + os.sep, os.path.dirname(torch.__file__) + os.sep, contextlib.__file__)


def above_bars() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which text goes to stderr above the bars of tqdm, which are drawn again at its end."""
    tqdm = sys.modules.get("tqdm.std")
    return contextlib.nullcontext() if tqdm is None else tqdm.tqdm.external_write_mode(file=sys.stderr)


def say(text: str) -> None:
    """Print a message to stderr, above the bars of tqdm."""
    with above_bars():
        print(text, file=sys.stderr, flush=True)


def warn(message: str | Warning, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
    """Warn as warnings.warn does, but show the line that called this package or torch."""
    frame: FrameType | None = sys._getframe(stacklevel)
    while frame is not None and frame.f_code.co_filename.startswith(_INNER):
        frame, stacklevel = frame.f_back, stacklevel + 1
    with above_bars():
        warnings.warn(message, category, stacklevel=stacklevel + 1)


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

    def __call__(self, function: Callable[P, T], default: D | None = None) -> Callable[P, T | D | None]:
        """Return a function that runs on rank 0 and returns `default` on other ranks."""

        @functools.wraps(function)
        def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> T | D | None:
            return function(*args, **kwargs) if self.rank == 0 else default

        return on_rank_zero


rank_zero_only = RankZeroOnly()


def rank_zero_info(message: object, *args: object, stacklevel: int = 1) -> None:
    """Log at level INFO to the logger "trainwright" on rank 0, as `logging.info` does.

    >>> tw.rank_zero_info("%d samples are longer than the context", 3)
    """
    if rank_zero_only.rank == 0:
        logger.info(message, *args, stacklevel=stacklevel + 1)


def rank_zero_warn(message: str | Warning, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
    """Warn on rank 0, as `warnings.warn` does, but show the line that called this package or torch.

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
