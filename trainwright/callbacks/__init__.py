"""Callbacks act at points of a run without being part of the model. Subclass `Callback` for your own.

The names in `__all__` are names of `trainwright` too.
"""

from trainwright.callbacks.base import Callback, LambdaCallback
from trainwright.callbacks.base import Checkpoint as Checkpoint
from trainwright.callbacks.batch_size_finder import BatchSizeFinder
from trainwright.callbacks.classification_report import ClassificationReport
from trainwright.callbacks.classification_report import ClassificationScores as ClassificationScores
from trainwright.callbacks.device_stats_monitor import DeviceStatsMonitor
from trainwright.callbacks.early_stopping import EarlyStopping
from trainwright.callbacks.early_stopping import EarlyStoppingReason as EarlyStoppingReason
from trainwright.callbacks.finetuning import BackboneFinetuning, BaseFinetuning
from trainwright.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
from trainwright.callbacks.learning_rate_finder import LearningRateFinder
from trainwright.callbacks.learning_rate_monitor import LearningRateMonitor
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.callbacks.model_summary import ModelSummary, RichModelSummary
from trainwright.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from trainwright.callbacks.prediction_writer import BasePredictionWriter
from trainwright.callbacks.progress_bar import ProgressBar
from trainwright.callbacks.ray_report import RayReport
from trainwright.callbacks.rich_progress_bar import RichProgressBar
from trainwright.callbacks.rich_progress_bar import RichProgressBarTheme as RichProgressBarTheme
from trainwright.callbacks.run_report import RunReport
from trainwright.callbacks.stochastic_weight_averaging import StochasticWeightAveraging
from trainwright.callbacks.throughput_monitor import ThroughputMonitor
from trainwright.callbacks.timer import Timer
from trainwright.callbacks.tqdm_progress_bar import TQDMProgressBar
from trainwright.callbacks.trainer_protocol import TrainerProtocol as TrainerProtocol
from trainwright.callbacks.weight_averaging import EMAWeightAveraging, WeightAveraging

__all__ = [
    "BackboneFinetuning", "BaseFinetuning", "BasePredictionWriter", "BatchSizeFinder", "Callback",
    "ClassificationReport", "DeviceStatsMonitor", "EMAWeightAveraging", "EarlyStopping",
    "GradientAccumulationScheduler", "LambdaCallback", "LearningRateFinder", "LearningRateMonitor",
    "ModelCheckpoint", "ModelSummary", "OnExceptionCheckpoint", "ProgressBar", "RayReport", "RichModelSummary",
    "RichProgressBar", "RunReport", "StochasticWeightAveraging", "TQDMProgressBar",
    "ThroughputMonitor", "Timer", "WeightAveraging",
]  # fmt: skip
