"""Plots: the curves of runs as one HTML page or one PNG image. It draws what it is given, and reads and writes no files."""

from trainwright.plots.curves import Panel, panels_of
from trainwright.plots.drawing import FORMATS, checked_format, draw
from trainwright.plots.history import AXES, History, Series

__all__ = ["AXES", "FORMATS", "History", "Panel", "Series", "checked_format", "draw", "panels_of"]
