"""Table: the metrics of an evaluation as lines to print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def format_table(
    title: str, metrics: Sequence[Mapping[str, float]], loaders: Sequence[str | None] | None = None
) -> str:
    """Return a table with a row for each metric and a column for each loader, whose suffix is cut off the metrics' names.

    `loaders` are the names of the loaders; None for a loader without a name, or if all are.
    """
    names = [*(loaders or ()), *[None] * len(metrics)][: len(metrics)]
    suffixes = [f"/dataloader_idx_{index}" if name is None else f"/{name}" for index, name in enumerate(names)]
    heads = ["value"] if names == [None] else [name or f"loader {index}" for index, name in enumerate(names)]
    rows: dict[str, list[str]] = {}
    for index, (values, suffix) in enumerate(zip(metrics, suffixes, strict=True)):
        for name, value in values.items():
            rows.setdefault(name.removesuffix(suffix), [""] * len(metrics))[index] = f"{value:.6g}"
    table = [[title, *heads], *([name, *cells] for name, cells in rows.items())]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  " + "  ".join(f"{text:<{width}}" for text, width in zip(line, widths, strict=True)) for line in table]
    lines = [line.rstrip() for line in lines]
    rule = "-" * max(len(line) for line in lines)
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])
