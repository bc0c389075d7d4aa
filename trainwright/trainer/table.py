"""Table: the metrics of an evaluation as lines to print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def format_table(
    title: str, metrics: Sequence[Mapping[str, float]], loaders: Sequence[str | None] | None = None
) -> str:
    """Return a table with a row for each metric and a column for each loader.

    Args:
        title: stands above the names.
        metrics: the metrics of each loader, under their full names; of a loader's own ones the suffix goes to the column.
        loaders: the names of the loaders; None, or a None among them, for those that have none.
    """
    names = [*(loaders or ()), *[None] * len(metrics)][: len(metrics)]
    suffixes = [f"/dataloader_idx_{place}" if name is None else f"/{name}" for place, name in enumerate(names)]
    heads = [f"loader {place}" if name is None else name for place, name in enumerate(names)]
    if names == [None]:
        heads = ["value"]
    rows: dict[str, list[str]] = {}
    for place, (values, suffix) in enumerate(zip(metrics, suffixes, strict=True)):
        for name, value in values.items():
            cells = rows.setdefault(name.removesuffix(suffix), [""] * len(metrics))
            cells[place] = f"{value:.6g}"
    table = [[title, *heads], *([name, *cells] for name, cells in rows.items())]
    widths = [max(len(line[place]) for line in table) for place in range(len(table[0]))]
    lines = ["  " + "  ".join(f"{text:<{width}}" for text, width in zip(line, widths, strict=True)) for line in table]
    lines = [line.rstrip() for line in lines]
    rule = "-" * max(len(line) for line in lines)
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])
