"""The files of a ladder: its table as CSV and Markdown, and a page and a picture with its bars."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainwright.loggers.files import write_file
from trainwright.plots import Bar, Section, bars_image, bars_of, document, sections_of
from trainwright.tools.ladder.comparison import Comparison
from trainwright.tools.ladder.ladder_table import cells, csv_text, heads, markdown_table

NAME = "ladder"


def write_files(folder: Path, title: str, comparison: Comparison, sentences: Sequence[str]) -> list[Path]:
    """Write the files, and return their paths; the picture only if matplotlib is installed."""
    page, bars = [], list(_bars(comparison))
    axis = heads(comparison)[5]
    table = Section("Rungs", [cells(comparison, each) for each in comparison.results], heads(comparison))
    page += [*bars_of(bars, axis), *sections_of([table, Section("Notes", notes=sentences)])]
    markdown = [f"# {title}", "", *markdown_table(comparison), "", *_paragraphs(sentences)]
    contents = {
        ".csv": csv_text(comparison).encode(),
        ".md": "\n".join(markdown).encode(),
        ".html": document(title, page).encode(),
    }
    with contextlib.suppress(ImportError):  # the page has the same chart
        contents[".png"] = bars_image(bars, axis)
    paths = [folder / f"{NAME}{end}" for end in contents]
    for path, data in zip(paths, contents.values(), strict=True):
        write_file(str(path), data)
    return paths


def _bars(comparison: Comparison) -> Iterator[Bar]:
    chosen = comparison.choice()
    for result in comparison.results:
        rate, row = comparison.rate(result), cells(comparison, result)
        if result.state != "finished" or rate is None:
            yield Bar(result.rung.name, None, result.state if result.state != "finished" else "no rate")
        else:
            yield Bar(result.rung.name, rate.mean, f"{row[5]} ({row[6]})", rate.spread, result is chosen)


def _paragraphs(sentences: Sequence[str]) -> Iterator[str]:
    for each in sentences:
        yield f"```python\n{each.strip()}\n```" if each.startswith("    tw.") else each
        yield ""
