"""Loggers: they write the numbers of a run. To add one, subclass `Logger`; to give it a name, add it to `LOGGERS`."""

from __future__ import annotations

import importlib.util

from trainwright.errors import did_you_mean
from trainwright.loggers.base import Logger, SilentLogger, rank_zero_experiment
from trainwright.loggers.csv import CSVLogger
from trainwright.loggers.folder import start_loggers, withdraw_loggers
from trainwright.loggers.mlflow import MLFlowLogger
from trainwright.loggers.position import logger_states, match_states, refuse_branch, resume_loggers
from trainwright.loggers.tensorboard import TensorBoardLogger
from trainwright.loggers.wandb import WandbLogger

DummyLogger = SilentLogger
"""Lightning's name."""
LOGGERS: dict[str, tuple[type[Logger], str]] = {
    "csv": (CSVLogger, ""),
    "tensorboard": (TensorBoardLogger, "tensorboard"),
    "wandb": (WandbLogger, "wandb"),
    "mlflow": (MLFlowLogger, "mlflow"),
}
"""The classes of the names in a raw loop's log_with=, and the packages that they need."""

__all__ = [
    "CSVLogger", "DummyLogger", "Logger", "MLFlowLogger", "SilentLogger", "TensorBoardLogger", "WandbLogger",
    "logger_states", "match_states", "rank_zero_experiment", "refuse_branch", "resume_loggers", "start_loggers",
    "withdraw_loggers",
]  # fmt: skip


def logger_class(name: str) -> type[Logger]:
    """Return the class of a name.

    Raises:
        ValueError: the name is unknown.
        ImportError: its package is not installed.
    """
    if name not in LOGGERS:
        raise ValueError(
            f"the logger {name!r} is unknown; choose from {', '.join(LOGGERS)}, or pass a Logger instance."
            f"{did_you_mean(name, LOGGERS)}"
        )
    kind, package = LOGGERS[name]
    if not _is_usable(package):
        raise ImportError(f"the logger {name!r} needs {package}: pip install {package}, or choose 'csv'.")
    return kind


def available_loggers() -> list[str]:
    """Return the names of the loggers whose packages are installed."""
    return [name for name, (_, package) in LOGGERS.items() if _is_usable(package)]


def _is_usable(package: str) -> bool:
    return not package or importlib.util.find_spec(package) is not None


def name_of(logger: Logger) -> str:
    """Return the name of a logger's class in `LOGGERS`, or the class's name."""
    return next((name for name, (kind, _) in LOGGERS.items() if kind is type(logger)), type(logger).__name__)
