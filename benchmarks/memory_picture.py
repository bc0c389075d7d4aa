"""The picture of benchmarks/sharded_memory.py: what fills a rank under each strategy, and the largest networks in a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memory_models import FAMILIES

Record = dict[str, Any]
"""A line of the benchmark's records."""
PARTS = ("parameters", "gathered", "gradients", "optimizer", "activations")
LABELS = ("parameters", "gathered for a while", "gradients and buckets", "optimizer state", "activations")
COLOURS = ("#1f77b4", "#9ecae1", "#ff7f0e", "#2ca02c", "#bbbbbb")
SHADES = ("#9ecae1", "#3182bd", "#08519c")
"""Of numbers of ranks."""
MIB = 2**20


def total(record: Record) -> int:
    return sum(int(record[part]) for part in PARTS)


def of_ddp(record: Record, records: list[Record]) -> int | None:
    """Return the parameters of the largest network under ddp on as many ranks."""
    same = (each for each in records if all(each[key] == record[key] for key in ("family", "ranks", "kind")))
    return next((int(each["count"]) for each in same if each["strategy"] == "ddp"), None)


def draw(path: Path, records: list[Record]) -> None:
    """Draw a column for each family: the parts of the memory for each number of ranks, then the largest networks."""
    from matplotlib.figure import Figure

    families = list(dict.fromkeys(each["family"] for each in records))
    ranks = list(dict.fromkeys(each["ranks"] for each in records))
    names = list(dict.fromkeys(each["strategy"] for each in records))
    largest = [each for each in records if each["kind"] == "largest"]
    rows = len(ranks) + bool(largest)
    figure = Figure(figsize=(1.4 + 3.4 * len(families), 0.6 + 2.4 * rows), layout="constrained")
    panels = figure.subplots(rows, len(families), squeeze=False)
    for column, family in enumerate(families):
        title = FAMILIES[family].title
        for row, number in enumerate(ranks):
            chosen = [each for each in records if (each["family"], each["ranks"]) == (family, number)]
            draw_parts(panels[row][column], [each for each in chosen if each["kind"] == "table"], names)
            panels[row][column].set_title(f"{title}, {number} ranks", fontsize=9)
        if largest:
            draw_largest(panels[-1][column], [each for each in largest if each["family"] == family], names, ranks)
            panels[-1][column].set_title(f"{title}: largest in {largest[0]['budget'] // MIB} MiB a rank", fontsize=9)
    for row in panels:
        for panel in row:
            panel.set_yticks(range(len(names)), names if panel is row[0] else [""] * len(names))
            panel.invert_yaxis()
            panel.tick_params(labelsize=8)
            panel.grid(axis="x", alpha=0.3)
            panel.set_axisbelow(True)
    handles, _ = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, LABELS, loc="outside lower center", ncols=len(PARTS) if len(families) > 1 else 2, fontsize=8)
    figure.savefig(path, dpi=100)


def draw_parts(panel: Any, records: list[Record], names: list[str]) -> None:
    places = [names.index(each["strategy"]) for each in records]
    lefts = [0.0] * len(records)
    for part, colour in zip(PARTS, COLOURS, strict=True):
        sizes = [each[part] / MIB for each in records]
        panel.barh(places, sizes, left=lefts, color=colour, label=part)
        lefts = [left + size for left, size in zip(lefts, sizes, strict=True)]
    for place, left in zip(places, lefts, strict=True):
        panel.text(left, place, f" {left:.0f}", fontsize=7, va="center")
    panel.set_xlim(0, 1.15 * max(lefts))
    panel.set_xlabel("MiB a rank", fontsize=8)


def draw_largest(panel: Any, records: list[Record], names: list[str], ranks: list[int]) -> None:
    height = 0.8 / len(ranks)
    for each in records:
        index, size, base = ranks.index(each["ranks"]), each["count"] / 1e6, of_ddp(each, records)
        place = names.index(each["strategy"]) + (index - (len(ranks) - 1) / 2) * height
        panel.barh(place, size, height=0.9 * height, color=SHADES[index % len(SHADES)])
        times = "" if base is None or each["strategy"] == "ddp" else f", {each['count'] / base:.1f} x ddp"
        panel.text(size, place, f" {each['ranks']} ranks: {size:.0f} M{times}", fontsize=6, va="center")
    panel.set_xlim(0, 1.6 * max(each["count"] / 1e6 for each in records))
    panel.set_xlabel("million parameters", fontsize=8)
