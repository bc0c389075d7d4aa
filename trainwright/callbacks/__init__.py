"""Callbacks: what watches a run without being part of the model. One file each; subclass `Callback` for your own."""

from trainwright.callbacks.base import Callback
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.callbacks.model_summary import ModelSummary
from trainwright.callbacks.progress_bar import TQDMProgressBar

__all__ = ["Callback", "ModelCheckpoint", "ModelSummary", "TQDMProgressBar"]
