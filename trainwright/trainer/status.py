"""Status: the Trainer's attributes for modules, callbacks and users: its job, its parts and its run."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Sequence
from numbers import Integral
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Generic, TypeVar, cast

from torch import Tensor
from torch.optim import Optimizer

from trainwright.callbacks.base import Callback
from trainwright.callbacks.early_stopping import EarlyStopping
from trainwright.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.callbacks.progress_bar import ProgressBar
from trainwright.data.datamodule import DataModule
from trainwright.engine.engine import Engine
from trainwright.engine.job import device_numbers
from trainwright.engine.optimizers import SchedulerConfig
from trainwright.loggers.base import Logger
from trainwright.module import Module
from trainwright.precision import Precision
from trainwright.strategies import Strategy
from trainwright.trainer.logbook import Logbook
from trainwright.trainer.parts import arranged_loggers, settings_of
from trainwright.trainer.run import Run
from trainwright.trainer.run_position import Position
from trainwright.trainer.settings import Settings
from trainwright.trainer.sources import Batches

T = TypeVar("T")
C = TypeVar("C", bound=Callback)


class Forwarded(Generic[T]):
    """A read-only attribute of the Trainer, found at `path` among its parts. `default` is shown for None."""

    def __init__(self, path: str, doc: str, default: Any = None) -> None:
        self._read, self._default, self.__doc__ = attrgetter(path), default, doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, owner: Any = None) -> T:
        if trainer is None:
            return cast(T, self)
        found = self._read(trainer)
        return cast(T, self._default if found is None else found)

    def __set__(self, trainer: Any, value: Any) -> None:
        raise AttributeError(f"trainer.{self._name} cannot be set.")


class Setting(Forwarded[T]):
    """A setting, found at `path` in the Settings, which the next call takes with the value that it has then."""

    def __init__(self, path: str, doc: str, default: Any = None) -> None:
        super().__init__(f"_settings.{path}", doc, default)

    def __set__(self, trainer: Any, value: Any) -> None:
        trainer._change_setting(self._name, value)


class Status:
    """The Trainer's view of its parts."""

    _settings: Settings
    _arguments: dict[str, Any]
    _ckpt_path: str | None = None
    """The checkpoint of the calls that are given none."""
    engine: Engine
    callbacks: list[Callback]
    _loggers: list[Logger]
    run: Run

    def _refuse_nested(self, call: str) -> None:
        """Refuse a call from within a run of this Trainer, before it changes anything of that (RuntimeError)."""
        if self.run.running_call is not None:
            raise RuntimeError(
                f"trainer.{call} was called while trainer.{self.run.running_call} runs. Call it after that, or from another "
                "Trainer."
            )

    def _change_setting(self, name: str, value: Any) -> None:
        if self.run.running_call is not None:
            raise RuntimeError(
                f"trainer.{name} was set while trainer.{self.run.running_call} runs, which has read it at its start. Set it "
                "before that call."
            )
        # All settings are checked again: the new value may conflict with another one.
        changed = {**self._arguments, name: value}
        self._settings, self._arguments = settings_of(changed), changed

    strategy = Forwarded[Strategy]("engine.strategy", "The strategy.")
    accelerator = Forwarded[str]("engine.device.type", "The kind of device, by torch's name for it.")
    precision = Forwarded[str]("engine.precision.name", "The precision's name, such as '16-mixed'.")
    precision_plugin = Forwarded[Precision]("engine.precision", "The precision. In '16-mixed' it has the loss scaler.")
    global_rank = Forwarded[int]("engine.rank", "The number of this process in the job, from 0.")
    local_rank = Forwarded[int]("engine.local_rank", "The number of this process on its node, from 0.")
    node_rank = Forwarded[int]("engine.environment.node_rank", "The number of this node in the job, from 0.")
    num_nodes = Forwarded[int]("engine.environment.num_nodes", "The nodes of the job.")

    @property
    def world_size(self) -> int:
        """Return the number of processes of the job, or of the next job if each call starts one."""
        return self.engine.num_workers or self.engine.world_size

    @property
    def num_devices(self) -> int:
        """Return the number of processes on this node, one per device."""
        return self.engine.num_workers or self.engine.environment.local_world_size

    @property
    def device_ids(self) -> list[int]:
        """Return the numbers of the devices of this node's processes, or their own numbers on a CPU."""
        given = device_numbers(self._arguments["devices"], self.engine.device.type)
        return given or (list(range(self.num_devices)) if self.num_devices > 1 else [self.engine.device.index or 0])

    @property
    def is_global_zero(self) -> bool:
        """Return whether this is rank 0."""
        return self.engine.rank == 0

    model = Forwarded[Module | None]("run.module", "The module of the current or the latest run.")
    lightning_module = Forwarded[Module | None]("run.module", "The module of the current or the latest run.")
    datamodule = Forwarded[DataModule | None]("run.datamodule", "The DataModule of the current or the latest run.")
    optimizers = Forwarded[list[Optimizer]]("run.trained.optimizers", "What configure_optimizers returned.")
    lr_scheduler_configs = Forwarded[list[SchedulerConfig]]("run.trained.schedulers", "The schedulers.")
    default_root_dir = Forwarded[str]("run.root", "Where logs and checkpoints go unless a part has its own folder.")

    @property
    def ckpt_path(self) -> str | None:
        """Return the checkpoint that the run was given. Set it between two runs for later calls without one."""
        return self.run.choice.path if self.run.running_call is not None or self._ckpt_path is None else self._ckpt_path

    @ckpt_path.setter
    def ckpt_path(self, path: str | os.PathLike[str] | None) -> None:
        self._ckpt_path = None if path is None else os.fspath(path)

    resume_source = Forwarded[str | None]("run.trained.resume_source", "The checkpoint that the fit was resumed from.")

    @property
    def loggers(self) -> list[Logger]:
        """Return the loggers. Set them between two runs, as the argument `logger`."""
        return self._loggers

    @loggers.setter
    def loggers(self, loggers: bool | Logger | Sequence[Logger] | None) -> None:
        self._loggers = arranged_loggers(loggers or [], self.run.root, self._settings)

    @property
    def logger(self) -> Logger | None:
        """Return the first logger, if any."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: bool | Logger | Sequence[Logger] | None) -> None:
        self.loggers = logger

    @property
    def log_dir(self) -> str | None:
        """Return the first logger's folder of this run, default_root_dir without loggers, and None if none has a folder."""
        if not self.loggers:
            return self.default_root_dir
        return next((logger.log_dir for logger in self.loggers if logger.log_dir), None)

    def _all(self, kind: type[C]) -> list[C]:
        return [callback for callback in self.callbacks if isinstance(callback, kind)]

    def _first(self, kind: type[C]) -> C | None:
        return next(iter(self._all(kind)), None)

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        """Return each ModelCheckpoint among the callbacks."""
        return self._all(ModelCheckpoint)

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """Return the first ModelCheckpoint among the callbacks."""
        return self._first(ModelCheckpoint)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """Return each EarlyStopping among the callbacks."""
        return self._all(EarlyStopping)

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """Return the first EarlyStopping among the callbacks."""
        return self._first(EarlyStopping)

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        """Return the progress bar, if any."""
        return self._first(ProgressBar)

    max_epochs = Setting[int]("last_epoch", "The number of epochs to train, -1 for no limit.", -1)
    min_epochs = Setting[int | None]("min_epochs", "Epochs that are trained even if should_stop is set.")
    max_steps = Setting[int]("max_steps", "Optimizer steps to train, -1 for no limit.")
    min_steps = Setting[int | None]("min_steps", "Steps that are trained even if should_stop is set.")
    limit_train_batches = Setting[Batches]("limit_train_batches", "Batches of an epoch: a number or a fraction.", 1.0)
    limit_val_batches = Setting[Batches]("limit_val_batches", "Batches of a validation: a number or a fraction.", 1.0)
    limit_test_batches = Setting[Batches]("limit_test_batches", "Batches of a test: a number or a fraction.", 1.0)
    limit_predict_batches = Setting[Batches]("limit_predict_batches", "Batches to predict, or a fraction.", 1.0)
    overfit_batches = Setting[Batches]("overfit", "The number or fraction of batches to overfit, 0.0 for none.", 0.0)
    val_check_interval = Setting[Any]("val_check_interval", "A fraction of an epoch, batches, or a time.", 1.0)
    check_val_every_n_epoch = Setting[int | None]("check_val_every_n_epoch", "Epochs between two validations.")
    num_sanity_val_steps = Setting[Batches]("sanity_steps", "Validation batches before training, inf for all.")
    reload_dataloaders_every_n_epochs = Setting[int]("reload_dataloaders_every_n_epochs", "0 for never.")
    log_every_n_steps = Setting[int]("log_every", "Steps between two rows of step values, 0 for none.")
    gradient_clip_val = Setting[float | None]("gradient_clip_val", "The limit of the gradients.")
    gradient_clip_algorithm = Setting[str | None]("gradient_clip_algorithm", '"norm" or "value".')
    enable_autolog_hparams = Setting[bool]("enable_autolog_hparams", "Whether loggers get the hyper-parameters.")
    fast_dev_run = Forwarded[bool | int]("_settings.fast_dev_run", "Batches of a trial run, False in a real run.")
    barebones = Forwarded[bool]("_settings.barebones", "Whether everything that adds overhead is off.")

    @property
    def accumulate_grad_batches(self) -> int:
        """Batches of one optimizer step. A callback may change it at an epoch's start."""
        return self.run.trained.accumulate_grad_batches

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise ValueError(
                f"trainer.accumulate_grad_batches={value!r} is not accepted. Set it to an integer of at least 1."
            )
        value = int(value)
        if self.run.running_call is None:
            self._change_setting("accumulate_grad_batches", value)
        self.run.update_trained(accumulate_grad_batches=value)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Return the number of optimizer steps that the fit will make, or math.inf without a limit.

        It loads the training data if that is not loaded yet, as in setup and configure_optimizers. Collective then.

        Raises:
            RuntimeError: before a fit, unless only max_steps limits it.
        """
        last, most = self._settings.last_epoch, self._settings.max_steps
        limit = math.inf if most == -1 else most
        if last is None:
            return limit
        if self.run.running_call == "fit" and self.run.trained.data is not None:
            self.run.trained.data.load()
        batches = self.num_training_batches
        if self.train_dataloader is None and batches == math.inf:
            raise RuntimeError(
                "estimated_stepping_batches follows from the training data, which no fit has loaded yet. Read it in setup, in "
                "configure_optimizers or later, or compute it from len(loader)."
            )
        if batches == math.inf:
            return limit
        scheduler = self._first(GradientAccumulationScheduler)
        length = self.run.trained.accumulate_grad_batches
        lengths = [scheduler.get_accumulate_grad_batches(epoch) if scheduler else length for epoch in range(last)]
        # Rounded up in each epoch, because no window reaches into the next one.
        return min(sum(math.ceil(batches / length) for length in lengths), limit)

    @property
    def fit_loop(self) -> FitLoop:
        """Return the limits and counters of fit as Lightning's loop has them."""
        return FitLoop(self, self.run.state)

    num_training_batches = Forwarded[Batches]("run.stages.num_training_batches", "Batches of an epoch on this rank.")
    num_val_batches = Forwarded[list[Batches]]("run.stages.validation.num_batches", "Batches of every loader.")
    num_sanity_val_batches = Forwarded[list[Batches]]("run.stages.sanity_check.num_batches", "Batches of the check.")
    num_test_batches = Forwarded[list[Batches]]("run.stages.test.num_batches", "Batches of each test loader.")
    num_predict_batches = Forwarded[list[Batches]]("run.stages.predict.num_batches", "Batches of each predict loader.")
    train_dataloader = Forwarded[Any]("run.stages.train_dataloader", "The training loaders, as they were given.")
    val_dataloaders = Forwarded[Any]("run.stages.validation.dataloaders", "The validation loaders, as they were given.")
    test_dataloaders = Forwarded[Any]("run.stages.test.dataloaders", "The test loaders, as they were given.")
    predict_dataloaders = Forwarded[Any]("run.stages.predict.dataloaders", "The predict loaders, as they were given.")
    batch_indices = Forwarded[list[Any] | None]("run.stages.predict.batch_indices", "The samples' indices in predict.")

    state = Forwarded[Position]("run.state", "The counters of the run.")
    current_epoch = Forwarded[int]("run.state.shown_epoch", "The epoch, from 0. After fit, the epochs trained.")
    global_step = Forwarded[int]("run.state.step", "Optimizer steps made, of all optimizers.")
    sanity_checking = Forwarded[bool]("run.state.progress.is_sanity_check", "Whether the sanity check runs.")
    is_dummy_batch = Forwarded[bool]("run.logbook.is_silenced", "Whether this rank has no sample for the batch.")
    enable_validation = Forwarded[bool]("run.enable_validation", "Whether this fit validates.")
    interrupted = Forwarded[bool]("run.stop.was_cut", "Whether an exception, such as Ctrl-C, ended the run.")

    @property
    def is_last_batch(self) -> bool:
        """Return whether the current training batch is the epoch's last."""
        return self.run.running_call == "fit" and self.run.state.progress.is_last_batch

    @property
    def training(self) -> bool:
        """Return whether fit trains: neither its validation nor the sanity check runs."""
        return self.run.running_call == "fit" and not self.run.state.progress.is_evaluating

    @property
    def validating(self) -> bool:
        """Return whether a validation runs, within fit too, but not the sanity check."""
        is_within_fit = self.run.running_call == "fit" and self.run.state.progress.is_evaluating
        return self.run.running_call == "validate" or (is_within_fit and not self.sanity_checking)

    @property
    def testing(self) -> bool:
        """Return whether a test runs."""
        return self.run.running_call == "test"

    @property
    def predicting(self) -> bool:
        """Return whether a prediction runs."""
        return self.run.running_call == "predict"

    @property
    def evaluating(self) -> bool:
        """Return whether a validation, the sanity check or a test runs."""
        return self.validating or self.testing or self.sanity_checking

    def stop_soon(self) -> None:
        """Stop all ranks at the same optimizer step of this fit. Call it on any rank and from any thread.

        On several ranks that needs steps that average gradients. Under manual optimization without any, set should_stop on
        every rank.
        """
        self.run.stop.request_soon()

    @property
    def should_stop(self) -> bool:
        """Set it to True, on any rank, to end the run.

        One process ends after this optimizer step, several after this validation or epoch if it is set there, otherwise
        within the next two steps.
        """
        return self.run.stop.requested

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self.run.stop.request(value)

    @property
    def received_sigterm(self) -> bool:
        """Return whether SIGTERM stops or has stopped the fit, as far as this rank knows."""
        return self.run.stop.received == signal.SIGTERM

    metrics = Forwarded[Logbook]("run.logbook", "The metrics of the run: monitored, record and is_outdated.")
    callback_metrics = Forwarded[dict[str, Tensor]]("run.logbook.callback_metrics", "The latest value of every metric.")
    logged_metrics = Forwarded[dict[str, Tensor]]("run.logbook.logged_metrics", "The metrics that go to the loggers.")
    progress_bar_metrics = Forwarded[dict[str, float]]("run.logbook.progress_bar_metrics", "Those with prog_bar=True.")


class FitLoop:
    """`trainer.fit_loop`: the limits of a fit, which the Trainer's attributes change too, and its counters at this moment."""

    __slots__ = ("_trainer", "epoch_loop", "epoch_progress")

    max_epochs, min_epochs = Status.max_epochs, Status.min_epochs
    max_steps, min_steps = Status.max_steps, Status.min_steps
    _settings = Forwarded[Settings]("_trainer._settings", "The Trainer's arguments.")
    _change_setting = Forwarded[Any]("_trainer._change_setting", "Change an argument.")

    def __init__(self, trainer: Status, state: Position) -> None:
        self._trainer = trainer
        self.epoch_progress = SimpleNamespace(current=SimpleNamespace(completed=state.shown_epoch))
        self.epoch_loop = SimpleNamespace(
            batch_idx=state.batch - 1, total_batch_idx=state.total_batches - 1, global_step=state.step
        )
