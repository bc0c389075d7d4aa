"""Tracebacks sent from a worker to the notebook, the only process that has the source of functions in its cells."""

from __future__ import annotations

import linecache
import traceback
from typing import Any

CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"


def carry(error: BaseException) -> list[dict[str, Any]]:
    """Return an exception and its causes as plain data, the first cause first."""
    parts: list[dict[str, Any]] = []
    seen: set[int] = set()
    current: BaseException | None = error
    link = ""
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        frames = [
            [each.filename, each.lineno, each.name, each.line] for each in traceback.extract_tb(current.__traceback__)
        ]
        text = "".join(traceback.format_exception_only(current))
        parts.insert(0, {"frames": frames, "text": text, "link": link})
        is_caused = current.__cause__ is not None
        link = CAUSE if is_caused else CONTEXT
        current = current.__cause__ if is_caused or current.__suppress_context__ else current.__context__
    return parts


def render(parts: list[dict[str, Any]]) -> str:
    """Return the text of a carried traceback; source lines that the worker did not have are looked up here."""
    text = ""
    for part in parts:
        frames = [
            traceback.FrameSummary(name, number, function, line=line or linecache.getline(name, number).strip() or None)
            for name, number, function, line in part["frames"]
        ]
        lines = traceback.format_list(traceback.StackSummary.from_list(frames))
        text += f"Traceback (most recent call last):\n{''.join(lines)}{part['text']}{part['link']}"
    return text
