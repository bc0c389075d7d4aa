"""Loggers: where the numbers of a run are written. One file each; subclass `Logger` for your own."""

from trainwright.loggers.base import Logger, SilentLogger
from trainwright.loggers.csv import CSVLogger
from trainwright.loggers.folder import start_loggers, withdraw_loggers
from trainwright.loggers.position import logger_states, match_states, resume_loggers
from trainwright.loggers.tensorboard import TensorBoardLogger

__all__ = [
    "CSVLogger",
    "Logger",
    "SilentLogger",
    "TensorBoardLogger",
    "logger_states",
    "match_states",
    "resume_loggers",
    "start_loggers",
    "withdraw_loggers",
]
