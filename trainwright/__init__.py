"""Trainwright: train PyTorch models; one changed argument makes it faster, or the model fit.

    import trainwright as tw

The public names are loaded when they are first used, so importing the package costs little more than importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainwright.callbacks import Callback, ModelCheckpoint, ModelSummary, TQDMProgressBar
    from trainwright.data.seeding import seed_everything
    from trainwright.engine.accelerator import Accelerator
    from trainwright.engine.engine import Engine
    from trainwright.errors import CheckpointError, LaunchError, TrainwrightError
    from trainwright.loggers import CSVLogger, Logger
    from trainwright.module import Module
    from trainwright.precision import Precision
    from trainwright.strategies import Strategy
    from trainwright.strategies.ddp import DDPStrategy
    from trainwright.trainer.trainer import Trainer

__version__ = "0.1.0"

_HOMES = {
    "Accelerator": "trainwright.engine.accelerator",
    "CSVLogger": "trainwright.loggers",
    "Callback": "trainwright.callbacks",
    "CheckpointError": "trainwright.errors",
    "DDPStrategy": "trainwright.strategies.ddp",
    "Engine": "trainwright.engine.engine",
    "LaunchError": "trainwright.errors",
    "Logger": "trainwright.loggers",
    "ModelCheckpoint": "trainwright.callbacks",
    "ModelSummary": "trainwright.callbacks",
    "Module": "trainwright.module",
    "Precision": "trainwright.precision",
    "Strategy": "trainwright.strategies",
    "TQDMProgressBar": "trainwright.callbacks",
    "Trainer": "trainwright.trainer.trainer",
    "TrainwrightError": "trainwright.errors",
    "seed_everything": "trainwright.data.seeding",
}

__all__ = [
    "Accelerator",
    "CSVLogger",
    "Callback",
    "CheckpointError",
    "DDPStrategy",
    "Engine",
    "LaunchError",
    "Logger",
    "ModelCheckpoint",
    "ModelSummary",
    "Module",
    "Precision",
    "Strategy",
    "TQDMProgressBar",
    "Trainer",
    "TrainwrightError",
    "__version__",
    "seed_everything",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trainwright' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
