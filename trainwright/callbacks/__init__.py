"""Callbacks: what watches a run without being part of the model. One file each; subclass `Callback` for your own."""

from trainwright.callbacks.base import Callback
from trainwright.callbacks.early_stopping import EarlyStopping, EarlyStoppingReason
from trainwright.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
from trainwright.callbacks.lambda_callback import LambdaCallback
from trainwright.callbacks.learning_rate_monitor import LearningRateMonitor
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.callbacks.model_summary import ModelSummary
from trainwright.callbacks.prediction_writer import BasePredictionWriter, TensorPredictionWriter, load_predictions
from trainwright.callbacks.progress_bar import TQDMProgressBar
from trainwright.callbacks.timer import Timer
from trainwright.callbacks.trainer_protocol import TrainerProtocol

__all__ = [
    "BasePredictionWriter",
    "Callback",
    "EarlyStopping",
    "EarlyStoppingReason",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "TQDMProgressBar",
    "TensorPredictionWriter",
    "Timer",
    "TrainerProtocol",
    "load_predictions",
]
