"""Loggers: where the numbers of a run are written. One file each; subclass `Logger` for your own."""

from trainwright.loggers.base import Logger
from trainwright.loggers.csv import CSVLogger

__all__ = ["CSVLogger", "Logger"]
