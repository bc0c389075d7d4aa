"""Status: what a Trainer tells modules and callbacks about its job and its run."""

from __future__ import annotations

import math
import signal
from operator import attrgetter
from typing import Any, Generic, TypeVar, cast

from torch import Tensor
from torch.optim import Optimizer

from trainwright.callbacks.base import Callback
from trainwright.callbacks.early_stopping import EarlyStopping
from trainwright.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.callbacks.progress_bar import TQDMProgressBar
from trainwright.data.datamodule import DataModule
from trainwright.distributed.ranks import Ranks
from trainwright.engine.engine import Engine
from trainwright.engine.optimizers import SchedulerConfig
from trainwright.loggers.base import Logger
from trainwright.module import Module
from trainwright.precision import Precision
from trainwright.strategies import Strategy
from trainwright.trainer.phase import Phase
from trainwright.trainer.run import Run
from trainwright.trainer.settings import Settings
from trainwright.trainer.stage import Batches
from trainwright.trainer.state import TrainerState

T = TypeVar("T")


class Forwarded(Generic[T]):
    """A read-only attribute of the Trainer, found at `path` among its parts."""

    def __init__(self, path: str, doc: str) -> None:
        self._read, self.__doc__ = attrgetter(path), doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, owner: Any = None) -> T:
        return cast(T, self if trainer is None else self._read(trainer))

    def __set__(self, trainer: Any, value: Any) -> None:
        raise AttributeError(f"trainer.{self._name} cannot be set; pass it to the Trainer.")


class Status:
    """The Trainer's view on its parts."""

    _settings: Settings
    engine: Engine
    callbacks: list[Callback]
    loggers: list[Logger]
    run: Run

    # -- the job -----------------------------------------------------------------------------------------------------

    strategy = Forwarded[Strategy]("engine.strategy", "The strategy.")

    accelerator = Forwarded[str]("engine.device.type", "The kind of device, by torch's name for it.")

    precision = Forwarded[str]("engine.precision.name", "The precision's name, such as '16-mixed'.")

    precision_plugin = Forwarded[Precision]("engine.precision", "The precision.")

    global_rank = Forwarded[int]("engine.rank", "This process's number in the job, from 0.")

    local_rank = Forwarded[int]("engine.local_rank", "This process's number on its node, from 0.")

    node_rank = Forwarded[int]("engine.environment.node_rank", "This node's number in the job, from 0.")

    @property
    def world_size(self) -> int:
        """Return how many processes the job has, or will have where each call starts it."""
        return self.engine.num_workers or self.engine.world_size

    num_nodes = Forwarded[int]("engine.environment.num_nodes", "How many nodes the job has.")

    @property
    def num_devices(self) -> int:
        """Return how many processes, one a device, run on this node."""
        return self.engine.num_workers or self.engine.environment.local_world_size

    @property
    def is_global_zero(self) -> bool:
        """Return whether this is rank 0."""
        return self.engine.rank == 0

    @property
    def ranks(self) -> Ranks:
        """Return what the ranks agree on small values with."""
        return self.engine.ranks

    state = Forwarded[TrainerState]("run.state", "The counters of the present or the latest run.")

    # -- the parts ---------------------------------------------------------------------------------------------------

    model = Forwarded[Module | None]("run.module", "The module of the present or the latest run.")
    lightning_module = Forwarded[Module | None]("run.module", "The module of the present or the latest run.")

    datamodule = Forwarded[DataModule | None]("run.datamodule", "The DataModule of that run.")

    optimizers = Forwarded[list[Optimizer]](
        "run.trained.optimizers", "The optimizers, as configure_optimizers returned them."
    )

    lr_scheduler_configs = Forwarded[list[SchedulerConfig]](
        "run.trained.schedulers", "The schedulers, and when they step."
    )

    default_root_dir = Forwarded[str](
        "run.root", "Where logs and checkpoints go unless a logger or a callback has its folder."
    )

    ckpt_path = Forwarded[str | None]("run.ckpt_path", "The checkpoint that the present or the latest run was given.")

    resume_source = Forwarded[str | None](
        "run.trained.resume_source", "The checkpoint that the latest fit was resumed from."
    )

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
        last = self._settings.last_epoch
        return -1 if last is None else last

    min_epochs = Forwarded[int | None]("_settings.min_epochs", "The epochs that are trained whatever asks for a stop.")

    max_steps = Forwarded[int]("_settings.max_steps", "The number of optimizer steps to train; -1 without end.")

    min_steps = Forwarded[int | None]("_settings.min_steps", "The steps that are made whatever asks for a stop.")

    fast_dev_run = Forwarded[bool | int]("_settings.fast_dev_run", "The batches of a trial run; False in a real one.")

    check_val_every_n_epoch = Forwarded[int | None](
        "_settings.check_val_every_n_epoch",
        "The epochs between two validations; None where batches count across epochs.",
    )

    @property
    def val_check_interval(self) -> Any:
        """Return the interval of validations: a fraction of an epoch, a number of batches, or a time."""
        interval = self._settings.val_check_interval
        return 1.0 if interval is None else interval

    log_every_n_steps = Forwarded[int]("_settings.log_every", "The steps between two rows of step values.")

    gradient_clip_val = Forwarded[float | None]("_settings.gradient_clip_val", "The limit of the gradients.")

    gradient_clip_algorithm = Forwarded[str | None]("_settings.gradient_clip_algorithm", '"norm" or "value".')

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Return how many optimizer steps the run will make; math.inf where nothing limits it.

        It may be asked for in configure_optimizers: the training loaders are loaded then. Collective where they are not yet.

        Raises:
            RuntimeError: outside of fit.
        """
        data = self.run.trained.data
        if self.run.stage != "fit" or data is None:
            raise RuntimeError("estimated_stepping_batches is known in trainer.fit only.")
        data.load()
        settings, batches = self._settings, self.num_training_batches
        last = settings.last_epoch
        limit = math.inf if settings.max_steps == -1 else settings.max_steps
        if last is None or batches == math.inf:
            return limit
        scheduler = next((each for each in self.callbacks if isinstance(each, GradientAccumulationScheduler)), None)
        if scheduler is None:
            return min(math.ceil(batches / self.run.trained.accumulate_grad_batches) * last, limit)
        windows = [scheduler.get_accumulate_grad_batches(epoch) for epoch in range(last)]
        return min(sum(math.ceil(batches / window) for window in windows), limit)

    num_training_batches = Forwarded[Batches](
        "run.stages.num_training_batches",
        "Batches of an epoch on this rank.",
    )
    num_val_batches = Forwarded[list[Batches]](
        "run.stages.validation.num_batches", "Batches of each validation loader."
    )
    num_sanity_val_batches = Forwarded[list[Batches]](
        "run.stages.sanity_check.num_batches", "Those of the sanity check."
    )
    num_test_batches = Forwarded[list[Batches]]("run.stages.test.num_batches", "Batches of each test loader.")
    num_predict_batches = Forwarded[list[Batches]](
        "run.stages.predict.num_batches", "Batches of each loader of a prediction."
    )
    train_dataloader = Forwarded[Any]("run.stages.train_dataloader", "The training loaders, as they were given.")
    val_dataloaders = Forwarded[Any]("run.stages.validation.dataloaders", "The validation loaders, as they were given.")
    test_dataloaders = Forwarded[Any]("run.stages.test.dataloaders", "The test loaders, as they were given.")
    predict_dataloaders = Forwarded[Any](
        "run.stages.predict.dataloaders", "The loaders of a prediction, as they were given."
    )
    batch_indices = Forwarded[list[Any] | None](
        "run.stages.predict.batch_indices",
        "The dataset's indices of a prediction's batch, if any.",
    )

    # -- where the run is --------------------------------------------------------------------------------------------

    current_epoch = Forwarded[int](
        "run.state.epoch", "The number of the epoch, from 0; after fit, how many epochs were finished."
    )

    global_step = Forwarded[int](
        "run.state.step",
        "How many optimizer steps were made; under manual optimization those of every optimizer count.",
    )

    @property
    def is_last_batch(self) -> bool:
        """Return whether the training batch at hand is the epoch's last."""
        return self.run.stage == "fit" and self.run.state.progress.is_last_batch

    @property
    def is_dummy_batch(self) -> bool:
        """Return whether the batch only keeps collectives in step with other ranks; its results are discarded."""
        collector = self.run.logbook.collector
        return collector is not None and collector.silent

    @property
    def is_within_window(self) -> bool:
        """Return whether gradients wait for a step: in an accumulation window, or since the latest manual_backward."""
        return self.run.is_within_window

    @property
    def is_mid_epoch_validation(self) -> bool:
        """Return whether a validation within a training epoch runs."""
        return self.run.state.progress.phase is Phase.VALIDATION_WITHIN

    @property
    def training(self) -> bool:
        """Return whether fit runs, apart from its validations and the sanity check."""
        return self.run.stage == "fit" and not self.run.state.progress.is_evaluating and not self.sanity_checking

    @property
    def validating(self) -> bool:
        """Return whether a validation runs, that of fit among them, but not the sanity check."""
        is_within_fit = self.run.stage == "fit" and self.run.state.progress.is_evaluating
        return self.run.stage == "validate" or (is_within_fit and not self.sanity_checking)

    @property
    def testing(self) -> bool:
        """Return whether a test runs."""
        return self.run.stage == "test"

    @property
    def predicting(self) -> bool:
        """Return whether a prediction runs."""
        return self.run.stage == "predict"

    @property
    def evaluating(self) -> bool:
        """Return whether a validation or a test runs."""
        return self.validating or self.testing

    @property
    def sanity_checking(self) -> bool:
        """Return whether the validation that runs is the sanity check."""
        return self.run.state.progress.phase is Phase.SANITY_CHECK

    @property
    def enable_validation(self) -> bool:
        """Return whether this fit validates."""
        return self.run.enable_validation

    @property
    def received_sigterm(self) -> bool:
        """Return whether a SIGTERM stops, or has stopped, the present or latest fit, as far as this rank knows."""
        return self.run.stop.received == signal.SIGTERM

    interrupted = Forwarded[bool]("run.stop.interrupted", "Whether Ctrl-C has ended the latest run.")

    # -- the metrics -------------------------------------------------------------------------------------------------

    callback_metrics = Forwarded[dict[str, Tensor]](
        "run.logbook.callback_metrics",
        "Every metric's latest value: an epoch's, over all ranks, where there is one, else this rank's step's.",
    )

    logged_metrics = Forwarded[dict[str, Tensor]](
        "run.logbook.logged_metrics", "The metrics that go to the loggers, under the names they have there."
    )

    progress_bar_metrics = Forwarded[dict[str, float]](
        "run.logbook.progress_bar_metrics", "The metrics logged with prog_bar=True, as python numbers."
    )
