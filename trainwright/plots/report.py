"""The report of a run as one page: its state, its curves and tables of other facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trainwright.plots.curves import Panel
from trainwright.plots.page import curves_of, document, escaped

MOST_ROWS = 500
"""The largest number of shown rows of a table."""
LONGEST_CELL, LONGEST_TEXT = 2_000, 40_000
"""The largest numbers of shown characters."""


@dataclass(frozen=True)
class Section:
    """A part of the report: sentences, rows of cells, and a text with its line breaks.

    If there is no header, the first cell of a row names the others.
    """

    title: str
    rows: Sequence[Sequence[str]] = ()
    header: Sequence[str] = ()
    notes: Sequence[str] = ()
    text: str = ""
    wraps: bool = False
    """Whether long lines of the text are wrapped."""


@dataclass(frozen=True)
class Report:
    """The content of the report: the state, the panels of the curves, and sections around them."""

    title: str
    state: str
    summary: str
    first: Sequence[Section] = ()
    panels: Sequence[Panel] = ()
    notes: Sequence[str] = field(default=())
    """Sentences about the curves."""
    others: Sequence[Section] = ()

    def to_html(self, axis: str = "step") -> str:
        """Return the page."""
        lines = [
            f'<p><span class="state {escaped(self.state.split()[-1])}">{escaped(self.state)}</span> {escaped(self.summary)}</p>'
        ]
        lines += sections_of(self.first)
        lines += [f"<p>{escaped(note)}</p>" for note in self.notes]
        lines += curves_of(self.panels, axis) if self.panels else ()
        return document(self.title, [*lines, *sections_of(self.others)])


def sections_of(sections: Sequence[Section]) -> Iterator[str]:
    """Yield the lines of sections."""
    for section in sections:
        yield from _section(section)


def _section(section: Section) -> Iterator[str]:
    yield f"<h2>{escaped(section.title)}</h2>"
    for note in section.notes:
        yield f"<p>{escaped(note)}</p>"
    if section.rows:
        yield "<table>"
        if section.header:
            yield f"<tr>{''.join(f'<th>{escaped(name)}</th>' for name in section.header)}</tr>"
        for row in section.rows[:MOST_ROWS]:
            first, *others = (_cut(cell, LONGEST_CELL) for cell in row)
            head = f"<td>{escaped(first)}</td>" if section.header else f'<th scope="row">{escaped(first)}</th>'
            yield f"<tr>{head}{''.join(f'<td>{escaped(cell)}</td>' for cell in others)}</tr>"
        yield "</table>"
        if len(section.rows) > MOST_ROWS:
            yield f'<p class="soft">and {len(section.rows) - MOST_ROWS:,} more</p>'
    if section.text:
        kind = ' class="wrapped"' if section.wraps else ""
        yield f"<pre{kind}>{escaped(_cut(section.text, LONGEST_TEXT), keeps_lines=True)}</pre>"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most:,} more characters)"
