"""Callers: the line of the user's code that a warning shows; messages to stderr, above the progress bars of tqdm."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, cast

__all__ = ["say"]

_OWN = os.path.dirname(__file__) + os.sep  # not normalized, like the names of the frames' files
_PYTHON = os.path.dirname(os.__file__) + os.sep
_INSTALLED = tuple(f"{_PYTHON}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
"""What is installed within Python's folder, outside of a virtual environment: it does not count as Python's."""


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
    """Return what the file names of the package's frames and of torch's begin with, and those of frozen modules."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    return (_OWN, "<frozen ", *(() if torch is None else (os.path.dirname(torch) + os.sep,)))


def _is_inner(file: str, inner: tuple[str, ...]) -> bool:
    """Return whether a frame's file belongs to the package, to torch or to Python."""
    return file.startswith(inner) or (file.startswith(_PYTHON) and not file.startswith(_INSTALLED))
