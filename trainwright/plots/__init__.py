"""Plots: the curves of runs as one HTML page or one PNG image. They read and write no files."""

from trainwright.plots.curves import AXES, LoggedRun, LoggedSeries, Panel, names_of_runs, panels_of
from trainwright.plots.drawing import FORMATS, Bar, bars_image, bars_of, checked_format, draw
from trainwright.plots.page import document
from trainwright.plots.report import Section, sections_of

__all__ = [
    "AXES",
    "FORMATS",
    "Bar",
    "LoggedRun",
    "LoggedSeries",
    "Panel",
    "Section",
    "bars_image",
    "bars_of",
    "checked_format",
    "document",
    "draw",
    "names_of_runs",
    "panels_of",
    "sections_of",
]
