"""Loggers: where the numbers of a run are written. One file each; subclass `Logger` for your own."""

from trainwright.loggers.base import Logger, SilentLogger, rank_zero_experiment
from trainwright.loggers.comet import CometLogger
from trainwright.loggers.csv import CSVLogger
from trainwright.loggers.folder import start_loggers, withdraw_loggers
from trainwright.loggers.mlflow import MLFlowLogger
from trainwright.loggers.position import logger_states, match_states, refuse_branch, resume_loggers
from trainwright.loggers.tensorboard import TensorBoardLogger
from trainwright.loggers.wandb import WandbLogger

DummyLogger = SilentLogger
"""Lightning's name."""

__all__ = [
    "CSVLogger",
    "CometLogger",
    "DummyLogger",
    "Logger",
    "MLFlowLogger",
    "SilentLogger",
    "TensorBoardLogger",
    "WandbLogger",
    "logger_states",
    "match_states",
    "rank_zero_experiment",
    "refuse_branch",
    "resume_loggers",
    "start_loggers",
    "withdraw_loggers",
]
