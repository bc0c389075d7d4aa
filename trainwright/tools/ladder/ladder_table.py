"""The table of a ladder: for a terminal, and as files in JSON, Markdown and HTML. advice.py has the sentences below it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainwright.loggers.files import write_file
from trainwright.memory.memory_estimate import size_text
from trainwright.plots import Bar, Section, bars_of, document, sections_of
from trainwright.tools.columns import lay_out
from trainwright.tools.ladder.attempt import Attempt
from trainwright.tools.ladder.comparison import Comparison

NAME = "ladder"
NO_VALUE = "-"


def terminal_table(comparison: Comparison, width: int | None) -> list[str]:
    """Return the lines of the table, without the columns that do not fit."""
    rows = [heads(comparison), *(cells(comparison, result) for result in comparison.results)]
    return lay_out(rows, width, right=range(2, len(rows[0])), dropped=(2, 1, 7, 3))


def heads(comparison: Comparison) -> list[str]:
    steps, metric = comparison.common_steps, comparison.metric
    times = [f"to step {steps}" if steps else "to a step", "to the end"]
    names = ["rung", "with", "steps", *times, rate_unit(comparison), "speed-up", "memory"]
    return names if metric is None else [*names, metric.name]


def cells(comparison: Comparison, result: Attempt) -> list[str]:
    """Return the row of a rung."""
    end = [NO_VALUE] if comparison.metric is not None else []
    if result.state != "finished":
        return [result.rung.name, _with(result), NO_VALUE, NO_VALUE, NO_VALUE, result.state, NO_VALUE, NO_VALUE, *end]
    speed_up, peak = comparison.speed_up(result), result.figure(lambda record: record.peak_bytes)
    steps = result.figure(lambda record: record.steps)
    return [
        result.rung.name,
        _with(result),
        NO_VALUE if steps is None else f"{steps:,.0f}",
        seconds_text(comparison.seconds_to_common(result)),
        seconds_text(result.figure(lambda record: record.seconds)),
        _number(comparison.rate(result)),
        NO_VALUE if speed_up is None else f"{speed_up:.2f}x",
        NO_VALUE if peak is None else size_text(int(peak)),
        *([score_text(comparison.score(result))] if end else []),
    ]


def rate_unit(comparison: Comparison) -> str:
    return "samples/s" if comparison.counts_samples else "batches/s"


def markdown_table(comparison: Comparison) -> list[str]:
    """Return the whole table as Markdown."""
    first = heads(comparison)
    rows = [first, ["---", "---", *["---:"] * (len(first) - 2)]]
    rows += [cells(comparison, result) for result in comparison.results]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]


def data_of(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the rungs with their records as plain data, without the times of all steps."""
    rows = []
    for result in comparison.results:
        name = None if comparison.metric is None else comparison.metric.name
        row = {**asdict(result), "metric": name, "value": comparison.score(result)}
        if row["record"] is not None:
            del row["record"]["points"]
        rows.append(row)
    return rows


def write_files(folder: Path, title: str, comparison: Comparison, sentences: Sequence[str]) -> list[Path]:
    """Write the files and return their paths."""
    bars, axis = list(_bars(comparison)), heads(comparison)[5]
    table = Section("Rungs", [cells(comparison, result) for result in comparison.results], heads(comparison))
    page = [*bars_of(bars, axis), *sections_of([table, Section("Notes", notes=sentences)])]
    markdown = [f"# {title}", "", *markdown_table(comparison), "", *_paragraphs(sentences)]
    contents = {
        ".json": json.dumps(data_of(comparison), indent=2).encode(),
        ".md": "\n".join(markdown).encode(),
        ".html": document(title, page).encode(),
    }
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
            yield Bar(result.rung.name, rate, f"{row[5]} ({row[6]})", result is chosen)


def _paragraphs(sentences: Sequence[str]) -> Iterator[str]:
    for sentence in sentences:
        yield f"```python\n{sentence.strip()}\n```" if sentence.startswith("    tw.") else sentence
        yield ""


def _with(result: Attempt) -> str:
    rung = result.rung
    devices = f"{rung.devices} device{'s' * (rung.devices > 1)}" if rung.devices else ""
    parts = [rung.precision or "", "compile" if rung.compile else "", devices]
    return ", ".join(part for part in parts if part and part != rung.name)


def seconds_text(figure: float | None) -> str:
    return NO_VALUE if figure is None else f"{_number(figure)} s"


def _number(figure: float | None) -> str:
    return NO_VALUE if figure is None else f"{figure:{'.3g' if figure < 100 else ',.0f'}}"


def score_text(figure: float | None) -> str:
    return NO_VALUE if figure is None else f"{figure:.4g}"
