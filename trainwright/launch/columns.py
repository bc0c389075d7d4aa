"""Columns: tables that fit the terminal they are printed on. Pipes and files get whole tables."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Collection, Sequence
from typing import TextIO

__all__ = ["fill", "lay_out", "terminal_width"]

GAP = 2
LEAST_WIDTH = 20
"""A column is not shortened below this. It still shows the end of a path."""


def terminal_width(stream: TextIO | None) -> int | None:
    """Return the columns of the terminal behind a stream, or None if it is a pipe or a file."""
    return shutil.get_terminal_size().columns if stream is not None and stream.isatty() else None


def shorten(text: str, width: int) -> str:
    """Return a text with "..." for its middle if it is longer. More is left of its end, which tells paths apart."""
    if len(text) <= width:
        return text
    first = (width - 3) // 4
    return f"{text[:first]}...{text[len(text) - (width - 3 - first) :]}"


def fill(text: str, width: int | None) -> str:
    """Return a sentence in lines that end between words."""
    return text if width is None else textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def lay_out(
    rows: Sequence[Sequence[str]],
    width: int | None,
    *,
    indent: int = 0,
    right: Collection[int] = (),
    shortened: Collection[int] = (),
    dropped: Sequence[int] = (),
) -> list[str]:
    """Return the lines of a table that fit a width: columns are shortened, and if that is not enough, others are dropped.

    Args:
        rows: the cells, of which the first row has the heads.
        width: the terminal's, or None for whole cells.
        indent: blanks before the lines.
        right: the columns of numbers, which are aligned at their ends.
        shortened: the columns of paths.
        dropped: the columns that can be dropped, in this order.
    """
    columns = list(range(len(rows[0])))
    candidates = list(dropped)
    while True:
        widths = {at: max(len(row[at]) for row in rows) for at in columns}
        excess = 0 if width is None else indent + sum(widths.values()) + GAP * (len(widths) - 1) - width
        for at in sorted(set(shortened) & set(widths), key=lambda at: -widths[at]):
            cut = max(0, min(excess, widths[at] - LEAST_WIDTH))
            widths[at] -= cut
            excess -= cut
        if excess <= 0 or not candidates:
            break
        columns.remove(candidates.pop(0))
    lines = []
    for row in rows:
        cells = {at: shorten(row[at], size) for at, size in widths.items()}
        line = (" " * GAP).join(
            cells[at].rjust(size) if at in right else cells[at].ljust(size) for at, size in widths.items()
        )
        lines.append(f"{' ' * indent}{line}".rstrip())
    return lines
