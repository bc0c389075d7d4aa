"""Loggers by name, as a raw loop chooses them.

To give a logger a name, add one line to `LOGGERS`; the class is imported only when it is chosen.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import NamedTuple

from trainwright.errors import did_you_mean
from trainwright.loggers.base import Logger


class NamedLogger(NamedTuple):
    """Where a logger's class is, as "module:Class", and the package that it needs, if any."""

    path: str
    package: str = ""


LOGGERS = {
    "csv": NamedLogger("trainwright.loggers.csv:CSVLogger"),
    "tensorboard": NamedLogger("trainwright.loggers.tensorboard:TensorBoardLogger", "tensorboard"),
    "wandb": NamedLogger("trainwright.loggers.wandb:WandbLogger", "wandb"),
    "comet_ml": NamedLogger("trainwright.loggers.comet:CometLogger", "comet_ml"),
    "mlflow": NamedLogger("trainwright.loggers.mlflow:MLFlowLogger", "mlflow"),
}


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
    path, package = LOGGERS[name]
    if package and importlib.util.find_spec(package) is None:
        raise ImportError(f"the logger {name!r} needs {package}: pip install {package}, or choose 'csv'.")
    module_name, class_name = path.split(":")
    found: type[Logger] = getattr(importlib.import_module(module_name), class_name)
    return found


def available_loggers() -> list[str]:
    """Return the names of the loggers that can be used here."""
    return [
        name for name, (_, package) in LOGGERS.items() if not package or importlib.util.find_spec(package) is not None
    ]


def name_of(logger: Logger) -> str:
    """Return the name of a logger's class; for one without, the class's own."""
    kind = type(logger)
    own = f"{kind.__module__}:{kind.__qualname__}"
    return next((name for name, (path, _) in LOGGERS.items() if path == own), kind.__name__)
