"""Status: what a Trainer tells modules and callbacks about its job and its run."""

from __future__ import annotations

import math
import signal
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from trainwright.callbacks.base import Callback
from trainwright.callbacks.early_stopping import EarlyStopping
from trainwright.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.callbacks.progress_bar import TQDMProgressBar
from trainwright.data.datamodule import DataModule
from trainwright.devices.abilities import has_pinned_memory
from trainwright.distributed.ranks import Ranks
from trainwright.distributed.sync_points import SyncPoint
from trainwright.engine.engine import Engine
from trainwright.engine.optimizers import SchedulerConfig
from trainwright.engine.prepared import PreparedOptimizer
from trainwright.loggers.base import Logger
from trainwright.module import Module
from trainwright.precision import Precision
from trainwright.strategies import Strategy
from trainwright.trainer.logbook import Logbook
from trainwright.trainer.settings import Settings
from trainwright.trainer.state import TrainerState
from trainwright.trainer.stop import SignalStop

if TYPE_CHECKING:
    from trainwright.trainer.training_run import TrainingRun

Batches = int | float
"""A number of batches; math.inf where it shows only when the loader ends."""


class Status:
    """The Trainer's view on its parts."""

    settings: Settings
    engine: Engine
    state: TrainerState
    logbook: Logbook
    callbacks: list[Callback]
    loggers: list[Logger]
    module: Module | None
    datamodule: DataModule | None
    stage: str | None
    """"fit", "validate", "test" or "predict" while it runs; None outside."""
    run: TrainingRun | None
    optimizers: list[Optimizer]
    prepared_optimizers: list[PreparedOptimizer]
    lr_scheduler_configs: list[SchedulerConfig]
    should_stop: bool
    is_evaluating: bool
    signal_stop: SignalStop
    """The stop on a signal of the present or the latest fit."""
    stop_point: SyncPoint | None = None

    # -- the job -----------------------------------------------------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        """Return the strategy."""
        return self.engine.strategy

    @property
    def accelerator(self) -> str:
        """Return the kind of device: "cpu", "cuda", "mps", "xpu" or another that torch has here."""
        return self.engine.device.type

    @property
    def precision(self) -> str:
        """Return the precision's name, such as "16-mixed"."""
        return self.engine.precision.name

    @property
    def precision_plugin(self) -> Precision:
        """Return the precision."""
        return self.engine.precision

    @property
    def scaler(self) -> Any:
        """Return the loss scaler of "16-mixed"; None elsewhere."""
        return getattr(self.engine.precision, "scaler", None)

    @property
    def global_rank(self) -> int:
        """Return this process's number in the job, from 0."""
        return self.engine.rank

    @property
    def local_rank(self) -> int:
        """Return this process's number on its node, from 0."""
        return self.engine.local_rank

    @property
    def node_rank(self) -> int:
        """Return this node's number in the job, from 0."""
        return self.engine.environment.node_rank

    @property
    def world_size(self) -> int:
        """Return how many processes the job has, or will have where each call starts it."""
        return self.engine.num_workers or self.engine.world_size

    @property
    def num_nodes(self) -> int:
        """Return how many nodes the job has."""
        return self.engine.environment.num_nodes

    @property
    def num_devices(self) -> int:
        """Return how many processes, one a device, run on this node."""
        return self.engine.num_workers or self.engine.environment.local_world_size

    @property
    def device_ids(self) -> list[int]:
        """Return the numbers of this node's devices."""
        return list(range(self.num_devices))

    @property
    def is_global_zero(self) -> bool:
        """Return whether this is rank 0."""
        return self.engine.rank == 0

    @property
    def ranks(self) -> Ranks:
        """Return what the ranks agree on small values with."""
        return self.engine.ranks

    # -- the parts ---------------------------------------------------------------------------------------------------

    @property
    def model(self) -> Module | None:
        """Return the module of the present or the latest run."""
        return self.module

    @property
    def lightning_module(self) -> Module | None:
        """Return the module of the present or the latest run."""
        return self.module

    @property
    def logger(self) -> Logger | None:
        """Return the first logger; None where there is none."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self.loggers = [] if logger is None else [logger]

    @property
    def log_dir(self) -> str | None:
        """Return the first logger's folder of this run; None before a run, or without a logger that has one."""
        return next((logger.log_dir for logger in self.loggers if logger.log_dir), None)

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        """Return each ModelCheckpoint among the callbacks."""
        return [each for each in self.callbacks if isinstance(each, ModelCheckpoint)]

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """Return the first ModelCheckpoint among the callbacks."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """Return each EarlyStopping among the callbacks."""
        return [each for each in self.callbacks if isinstance(each, EarlyStopping)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """Return the first EarlyStopping among the callbacks."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> TQDMProgressBar | None:
        """Return the progress bar."""
        return next((each for each in self.callbacks if isinstance(each, TQDMProgressBar)), None)

    # -- the limits --------------------------------------------------------------------------------------------------

    @property
    def max_epochs(self) -> int | None:
        """Return the number of epochs to train; -1 without end."""
        last = self.settings.last_epoch
        return -1 if last is None else last

    @property
    def min_epochs(self) -> int | None:
        """Return the epochs that are trained whatever asks for a stop."""
        return self.settings.min_epochs

    @property
    def max_steps(self) -> int:
        """Return the number of optimizer steps to train; -1 without end."""
        return self.settings.max_steps

    @property
    def min_steps(self) -> int | None:
        """Return the steps that are made whatever asks for a stop."""
        return self.settings.min_steps

    @property
    def max_time(self) -> str | timedelta | dict[str, float] | None:
        """Return the time after which training stops."""
        return self.settings.max_time

    @property
    def fast_dev_run(self) -> bool | int:
        """Return the batches of a trial run; False in a real one."""
        return self.settings.fast_dev_run

    @property
    def check_val_every_n_epoch(self) -> int | None:
        """Return the epochs between two validations; None where batches count across epochs."""
        return self.settings.check_val_every_n_epoch

    @property
    def val_check_interval(self) -> Any:
        """Return the interval of validations: a fraction of an epoch, a number of batches, or a time."""
        interval = self.settings.val_check_interval
        return 1.0 if interval is None else interval

    @property
    def log_every_n_steps(self) -> int:
        """Return the steps between two rows of step values."""
        return self.settings.log_every

    @property
    def gradient_clip_val(self) -> float | None:
        """Return the limit of the gradients."""
        return self.settings.gradient_clip_val

    @property
    def gradient_clip_algorithm(self) -> str | None:
        """Return "norm" or "value"."""
        return self.settings.gradient_clip_algorithm

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Return how many optimizer steps the run will make; math.inf where nothing limits it.

        It may be asked for in configure_optimizers: the training loaders are loaded then. Collective where they are not yet.

        Raises:
            RuntimeError: outside of fit.
        """
        if self.run is None:
            raise RuntimeError("estimated_stepping_batches is known in trainer.fit only.")
        self.run.data.load()
        settings, batches = self.settings, self.num_training_batches
        last = settings.last_epoch
        limit = math.inf if settings.max_steps == -1 else settings.max_steps
        if last is None or batches == math.inf:
            return limit
        scheduler = next((each for each in self.callbacks if isinstance(each, GradientAccumulationScheduler)), None)
        if scheduler is None:
            return min(math.ceil(batches / self.accumulate_grad_batches) * last, limit)
        windows = [scheduler.get_accumulate_grad_batches(epoch) for epoch in range(last)]
        return min(sum(math.ceil(batches / window) for window in windows), limit)

    accumulate_grad_batches: int
    num_training_batches: Batches

    # -- where the run is --------------------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """Return the number of the epoch, from 0; after fit, how many epochs were finished."""
        return self.state.epoch

    @property
    def global_step(self) -> int:
        """Return how many optimizer steps were made; under manual optimization those of every optimizer count."""
        return self.state.step

    @property
    def is_last_batch(self) -> bool:
        """Return whether the training batch at hand is the epoch's last."""
        return self.run is not None and self.run.is_last_batch

    @property
    def is_dummy_batch(self) -> bool:
        """Return whether the batch only keeps collectives in step with other ranks; its results are discarded."""
        collector = self.logbook.collector
        return collector is not None and collector.silent

    @property
    def is_within_window(self) -> bool:
        """Return whether gradients wait for a step: in an accumulation window, or since the latest manual_backward."""
        return self.run is not None and self.run.is_within_window

    @property
    def is_within_batch(self) -> bool:
        """Return whether a training batch is being worked on: a run could not go on from here as if it had not stopped."""
        return self.run is not None and self.run.is_within_batch

    @property
    def training(self) -> bool:
        """Return whether fit runs, apart from its validations and the sanity check."""
        return self.stage == "fit" and not self.is_evaluating and not self.sanity_checking

    @property
    def validating(self) -> bool:
        """Return whether a validation runs, that of fit among them, but not the sanity check."""
        return self.stage == "validate" or (self.stage == "fit" and self.is_evaluating and not self.sanity_checking)

    @property
    def testing(self) -> bool:
        """Return whether a test runs."""
        return self.stage == "test"

    @property
    def predicting(self) -> bool:
        """Return whether a prediction runs."""
        return self.stage == "predict"

    @property
    def evaluating(self) -> bool:
        """Return whether a validation or a test runs."""
        return self.validating or self.testing

    @property
    def sanity_checking(self) -> bool:
        """Return whether the validation that runs is the sanity check."""
        return self.logbook.is_silent

    @property
    def enable_validation(self) -> bool:
        """Return whether this fit validates."""
        return self.run is not None and self.run.validation is not None

    @property
    def received_sigterm(self) -> bool:
        """Return whether a SIGTERM stops, or has stopped, the present or latest fit, as far as this rank knows."""
        return self.signal_stop.received == signal.SIGTERM

    @property
    def is_done(self) -> bool:
        """Return whether no epoch is left to train, nor one that a stopped run was resumed within."""
        last, is_stopped = self.settings.last_epoch, self.wants_to_stop
        return (is_stopped and not self.state.is_unfinished) or (last is not None and self.state.epoch >= last)

    @property
    def wants_to_stop(self) -> bool:
        """Return whether the run ends at this optimizer step."""
        raise NotImplementedError

    # -- the metrics -------------------------------------------------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Return every metric's latest value: an epoch's, over all ranks, where there is one, else this rank's step's."""
        return self.logbook.callback_metrics

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """Return the metrics that go to the loggers, under the names they have there."""
        return self.logbook.logged_metrics

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Return the metrics logged with prog_bar=True, as python numbers."""
        return self.logbook.progress_bar_metrics

    @property
    def uses_inference_mode(self) -> bool:
        """Return whether evaluations run under torch.inference_mode: asked for, and not within fit."""
        return self.settings.inference_mode and self.stage != "fit"

    @property
    def loader_options(self) -> dict[str, Any]:
        """Return how loaders are shared out."""
        pins = has_pinned_memory(self.engine.device.type)
        return {"shard": self.settings.use_distributed_sampler, "pin_memory": pins}
