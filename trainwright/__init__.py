"""Trainwright: train PyTorch models; one changed argument makes it faster, or the model fit.

>>> import trainwright as tw

The public names are loaded when they are first used, so importing the package costs little more than importing torch.
`LightningModule` and `LightningDataModule` are other names of Module and DataModule, for scripts that have them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainwright.callbacks import (
        BasePredictionWriter,
        Callback,
        EarlyStopping,
        GradientAccumulationScheduler,
        LambdaCallback,
        LearningRateMonitor,
        ModelCheckpoint,
        ModelSummary,
        TensorPredictionWriter,
        Timer,
        TQDMProgressBar,
        load_predictions,
    )
    from trainwright.data.combined_loader import CombinedLoader
    from trainwright.data.datamodule import DataModule
    from trainwright.data.datamodule import DataModule as LightningDataModule
    from trainwright.data.seeding import isolate_rng, seed_everything
    from trainwright.engine.accelerator import Accelerator
    from trainwright.engine.engine import Engine
    from trainwright.engine.memory import estimate_memory
    from trainwright.engine.worker_calls import notebook_launcher
    from trainwright.errors import CheckpointError, LaunchError, RunStopped, TrainwrightError, WorkerFailed
    from trainwright.loggers import CSVLogger, Logger, TensorBoardLogger
    from trainwright.module import Module
    from trainwright.module import Module as LightningModule
    from trainwright.precision import Precision
    from trainwright.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler
    from trainwright.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
    from trainwright.strategies import Strategy
    from trainwright.strategies.ddp import DDPStrategy
    from trainwright.strategies.ddp_sharded import ShardedDDPStrategy
    from trainwright.strategies.deepspeed import DeepSpeedStrategy
    from trainwright.strategies.fsdp import FSDPStrategy
    from trainwright.strategies.whole_module import gather_module
    from trainwright.trainer.trainer import Trainer

__version__ = "0.1.0"

_HOMES = {
    "Accelerator": "trainwright.engine.accelerator",
    "AdvancedProfiler": "trainwright.profilers",
    "BasePredictionWriter": "trainwright.callbacks",
    "CSVLogger": "trainwright.loggers",
    "Callback": "trainwright.callbacks",
    "CheckpointError": "trainwright.errors",
    "CombinedLoader": "trainwright.data.combined",
    "DDPStrategy": "trainwright.strategies.ddp",
    "DataModule": "trainwright.data.datamodule",
    "DeepSpeedStrategy": "trainwright.strategies.deepspeed",
    "EarlyStopping": "trainwright.callbacks",
    "Engine": "trainwright.engine.engine",
    "FSDPStrategy": "trainwright.strategies.fsdp",
    "GradientAccumulationScheduler": "trainwright.callbacks",
    "LambdaCallback": "trainwright.callbacks",
    "LaunchError": "trainwright.errors",
    "LearningRateMonitor": "trainwright.callbacks",
    "LightningDataModule": "trainwright.data.datamodule:DataModule",
    "LightningModule": "trainwright.module:Module",
    "Logger": "trainwright.loggers",
    "ModelCheckpoint": "trainwright.callbacks",
    "ModelSummary": "trainwright.callbacks",
    "Module": "trainwright.module",
    "Precision": "trainwright.precision",
    "Profiler": "trainwright.profilers",
    "PyTorchProfiler": "trainwright.profilers",
    "RunStopped": "trainwright.errors",
    "ShardedDDPStrategy": "trainwright.strategies.ddp_sharded",
    "SimpleProfiler": "trainwright.profilers",
    "Strategy": "trainwright.strategies",
    "TQDMProgressBar": "trainwright.callbacks",
    "TensorBoardLogger": "trainwright.loggers",
    "TensorPredictionWriter": "trainwright.callbacks",
    "Timer": "trainwright.callbacks",
    "Trainer": "trainwright.trainer.trainer",
    "TrainwrightError": "trainwright.errors",
    "WorkerFailed": "trainwright.errors",
    "estimate_memory": "trainwright.engine.memory",
    "gather_module": "trainwright.strategies.whole_module",
    "isolate_rng": "trainwright.data.seeding",
    "load_predictions": "trainwright.callbacks",
    "notebook_launcher": "trainwright.engine.worker_calls",
    "rank_zero_info": "trainwright.rank_zero",
    "rank_zero_only": "trainwright.rank_zero",
    "rank_zero_warn": "trainwright.rank_zero",
    "seed_everything": "trainwright.data.seeding",
}
"""Where each name lives; after a colon, what it is called there."""

__all__ = [
    "Accelerator",
    "AdvancedProfiler",
    "BasePredictionWriter",
    "CSVLogger",
    "Callback",
    "CheckpointError",
    "CombinedLoader",
    "DDPStrategy",
    "DataModule",
    "DeepSpeedStrategy",
    "EarlyStopping",
    "Engine",
    "FSDPStrategy",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LaunchError",
    "LearningRateMonitor",
    "LightningDataModule",
    "LightningModule",
    "Logger",
    "ModelCheckpoint",
    "ModelSummary",
    "Module",
    "Precision",
    "Profiler",
    "PyTorchProfiler",
    "RunStopped",
    "ShardedDDPStrategy",
    "SimpleProfiler",
    "Strategy",
    "TQDMProgressBar",
    "TensorBoardLogger",
    "TensorPredictionWriter",
    "Timer",
    "Trainer",
    "TrainwrightError",
    "WorkerFailed",
    "__version__",
    "estimate_memory",
    "gather_module",
    "isolate_rng",
    "load_predictions",
    "notebook_launcher",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "seed_everything",
]


_PACKAGES = ("callbacks", "loggers", "profilers", "strategies")
"""Parts that may be named in full, such as `tw.callbacks.EarlyStopping`."""


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"trainwright.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'trainwright' has no attribute {name!r}")
    home, _, original = _HOMES[name].partition(":")
    value = getattr(importlib.import_module(home), original or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
