"""Columns: tables that fit the terminal they are printed on. Pipes and files get whole tables."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Collection, Sequence
from typing import TextIO


def terminal_width(stream: TextIO | None) -> int | None:
    """Return the columns of the terminal behind a stream, or None if it is a pipe or a file."""
    return shutil.get_terminal_size().columns if stream is not None and stream.isatty() else None


def fill(text: str, width: int | None) -> str:
    """Return a sentence in lines that end between words."""
    return text if width is None else textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def lay_out(
    rows: Sequence[Sequence[str]], width: int | None, *, right: Collection[int] = (), dropped: Sequence[int] = ()
) -> list[str]:
    """Return the indented lines of a table, whose first row has the heads, without columns that do not fit.

    The columns `right` are aligned at their ends, as numbers are. The columns `dropped` can be dropped, in this order.
    """
    widths = {at: max(len(row[at]) for row in rows) for at in range(len(rows[0]))}
    for at in dropped:
        if width is not None and sum(widths.values()) + 2 * len(widths) > width:
            del widths[at]
    aligned = [
        [row[at].rjust(size) if at in right else row[at].ljust(size) for at, size in widths.items()] for row in rows
    ]
    return [f"  {'  '.join(cells)}".rstrip() for cells in aligned]
