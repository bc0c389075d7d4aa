"""Plots: the curves of runs as one HTML page. They read and write no files."""

from trainwright.plots.curves import AXES, LoggedRun, LoggedSeries, Panel, names_of_runs, panels_of
from trainwright.plots.drawing import Bar, bars_of, check_page, draw
from trainwright.plots.page import Section, document, sections_of

__all__ = [
    "AXES", "Bar", "LoggedRun", "LoggedSeries", "Panel", "Section", "bars_of", "check_page", "document", "draw",
    "names_of_runs", "panels_of", "sections_of",
]  # fmt: skip
