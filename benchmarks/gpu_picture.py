"""The picture of benchmarks/gpu.py: the ratios to the hand-written loop as bars; by matplotlib, or as an SVG without it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from gpu_cases import LABELS
from gpu_records import Row

COLOURS = ("#555555", "#999999", "#1f77b4", "#17a2e8", "#7fc4f0", "#0b4f8a", "#d62728", "#ff7f0e", "#9467bd", "#2ca02c")
WIDEST_RATIO = 4.0
"""Longer bars are cut here, with their number beside them."""


def draw(folder: Path, rows: list[Row], environment: dict[str, Any]) -> Path | None:
    """Write the picture and return its path; None if there is nothing to draw yet."""
    bars = [row for row in rows if row.ratio is not None]
    if not bars:
        return None
    title = f"Time beside the loop by hand: {environment.get('name', '')}, torch {environment.get('torch', '')}"
    title += ", small models" if environment.get("small") else ""
    if "matplotlib" in environment.get("installed", []):
        try:
            return _by_matplotlib(folder / "ratios.png", bars, title)
        except Exception as error:  # a broken installation costs its picture, and not the run
            print(f"matplotlib cannot draw here ({error}); the picture is an SVG", flush=True)
    return _by_hand(folder / "ratios.svg", bars, title)


def _colour(row: Row) -> str:
    return COLOURS[list(LABELS).index(row.implementation) % len(COLOURS)]


def _text(row: Row) -> str:
    return LABELS[row.implementation].replace("`", "")


def _by_matplotlib(path: Path, bars: list[Row], title: str) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.2 + 0.24 * (len(bars) + len({row.case for row in bars}))), layout="constrained")
    axes = figure.subplots()
    place, case, marks = 0.0, "", []
    for row in bars:
        place += 1.0 if row.case == case else 2.0
        if row.case != case:
            case = row.case
            axes.text(0.03, place - 0.9, case, fontsize=8, fontweight="bold", va="center")
        length = min(row.ratio or 0.0, WIDEST_RATIO)
        axes.barh(place, length, color=_colour(row), height=0.8)
        axes.text(length + 0.02, place, f"{row.ratio:.3f}", fontsize=7, va="center")
        marks.append((place, _text(row)))
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks([each for each, _ in marks], [text for _, text in marks], fontsize=7)
    axes.set_ylim(place + 1.0, -0.5)
    axes.set_xlim(0.0, WIDEST_RATIO * 1.08)
    axes.set_xlabel("ratio of the times; less is faster", fontsize=8)
    axes.set_title(title, fontsize=9)
    beside = path.with_name("." + path.name)
    figure.savefig(beside, dpi=110)
    os.replace(beside, path)
    return path


def _by_hand(path: Path, bars: list[Row], title: str) -> Path:
    left, scale, high = 260, 150, 16
    lines = [f'<text x="8" y="18" font-size="13">{escape(title)}</text>']
    top, case = 26, ""
    for row in bars:
        if row.case != case:
            case = row.case
            top += 2 * high
            lines.append(f'<text x="8" y="{top - 4}" font-weight="bold">{escape(case)}</text>')
        length = round(scale * min(row.ratio or 0.0, WIDEST_RATIO))
        lines += [
            f'<text x="{left - 6}" y="{top + 11}" text-anchor="end">{escape(_text(row))}</text>',
            f'<rect x="{left}" y="{top}" width="{length}" height="{high - 3}" fill="{_colour(row)}"/>',
            f'<text x="{left + length + 4}" y="{top + 11}">{row.ratio:.3f}</text>',
        ]
        top += high
    one = left + scale
    lines.append(f'<line x1="{one}" y1="30" x2="{one}" y2="{top}" stroke="black" stroke-width="0.8"/>')
    width = left + round(scale * WIDEST_RATIO) + 60
    body = "\n".join(lines)
    beside = path.with_name("." + path.name)
    beside.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top + 12}" font-family="sans-serif" '
        f'font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )
    os.replace(beside, path)
    return path
