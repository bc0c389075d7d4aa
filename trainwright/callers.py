"""Callers: the line of the user's code that a warning shows, which is where something can be changed."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType

_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


def warn(message: str | Warning, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
    """Warn as warnings.warn does, but show the line of the user's code that has led to the warning, if there is one.

    The search begins at the frame that `stacklevel` means.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(stacklevel - 1):
        frame = None if frame is None else frame.f_back
    inner = _inner()
    while frame is not None and frame.f_code.co_filename.startswith(inner):
        frame = frame.f_back
    if frame is None:  # nothing of the user's has called it, as in a thread
        warnings.warn(message, category, stacklevel=stacklevel + 1)
        return
    known = frame.f_globals
    module = known.get("__name__") or "<string>"
    registry = known.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


def _inner() -> tuple[str, ...]:
    """Return what the file names of frames begin with that are not the user's: the package's, Python's and torch's."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    return (_OWN, _PYTHON, "<frozen ", *(() if torch is None else (os.path.dirname(torch) + os.sep,)))
