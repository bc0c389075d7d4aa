"""Table: the metrics of an evaluation as lines to print."""

from __future__ import annotations

from collections.abc import Mapping


def format_table(title: str, metrics: Mapping[str, float]) -> str:
    """Return a table of two columns: the metric's name and its value."""
    width = max(len(title), *(len(name) for name in metrics)) if metrics else len(title)
    rows = [f"  {name:<{width}}  {value:.6g}" for name, value in metrics.items()]
    rule = "-" * max(len(row) for row in [*rows, f"  {title:<{width}}  value"])
    return "\n".join([rule, f"  {title:<{width}}  value", rule, *rows, rule])
