"""The Trainer: its arguments, the wiring of its parts, and fit, validate and test. The loop itself is fit.py's."""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trainwright.callbacks.base import Callback
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.callbacks.model_summary import ModelSummary
from trainwright.callbacks.progress_bar import TQDMProgressBar
from trainwright.engine.engine import Engine
from trainwright.engine.optimizers import SchedulerConfig
from trainwright.engine.prepared import PreparedOptimizer
from trainwright.loggers.base import Logger
from trainwright.loggers.csv import CSVLogger
from trainwright.module import Module, is_overridden
from trainwright.precision import Precision
from trainwright.strategies import Strategy
from trainwright.trainer.evaluate import evaluate, limited
from trainwright.trainer.fit import TrainingRun, fit
from trainwright.trainer.hooks import HookTable
from trainwright.trainer.inputs import check_loader, check_module, choose_checkpoint
from trainwright.trainer.logbook import Logbook
from trainwright.trainer.preparation import prepare_fit
from trainwright.trainer.resume import restore, run_state
from trainwright.trainer.settings import Settings
from trainwright.trainer.state import TrainerState
from trainwright.trainer.table import format_table


class Trainer:
    """Runs the loop around a Module, and everything beside it as parts.

    Args:
        accelerator: "auto", "cpu" or "cuda".
        strategy: how processes share the work: "auto" (one: single_device, several: ddp), a name, or a Strategy.
        devices: processes on this node, one a device; -1 for all; "auto" is what was launched, else every GPU, else one.
        precision: "32-true", "16-mixed", "bf16-mixed", their short forms 32, 16, "bf16", or a Precision.
        logger: True for the CSV logger, False for none, a Logger or a list of them.
        callbacks: a Callback or a list of them.
        max_epochs: epochs to train; None is 1000 unless max_steps is given, -1 is without end.
        max_steps: optimizer steps to train; -1 is without end.
        limit_train_batches, limit_val_batches, limit_test_batches: batches of an epoch on each rank: a number (int), or
            a fraction (float); None for all.
        check_val_every_n_epoch: epochs between two validations.
        num_sanity_val_steps: validation batches to run before training; -1 for all.
        log_every_n_steps: steps between two rows of step values in the loggers.
        accumulate_grad_batches: batches of one optimizer step.
        gradient_clip_val: the limit of the gradients; None for no limit.
        gradient_clip_algorithm: "norm" (the total norm) or "value" (each element).
        compile: True, or a dict of torch.compile's options: compile the module's children in place.
        enable_checkpointing, enable_progress_bar, enable_model_summary: add the default callback.
        default_root_dir: where logs and checkpoints go, a path or an fsspec URL; the working directory by default.

    Raises:
        ValueError, TypeError: a setting is wrong; said here, before any process is started.
        LaunchError: the processes of the job could not be started.

    The first Trainer of a plain script that asks for several devices replaces the process by a launcher that runs the same
    script in that many processes.
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: str | Strategy = "auto",
        devices: int | str = "auto",
        precision: str | int | Precision | None = None,
        logger: bool | Logger | Iterable[Logger] | None = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        max_epochs: int | None = None,
        max_steps: int = -1,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        check_val_every_n_epoch: int = 1,
        num_sanity_val_steps: int = 2,
        log_every_n_steps: int = 50,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str = "norm",
        compile: bool | dict[str, Any] = False,
        enable_checkpointing: bool = True,
        enable_progress_bar: bool = True,
        enable_model_summary: bool = True,
        default_root_dir: str | None = None,
    ) -> None:
        self.settings = Settings(
            max_epochs=max_epochs,
            max_steps=max_steps,
            limit_train_batches=limit_train_batches,
            limit_val_batches=limit_val_batches,
            limit_test_batches=limit_test_batches,
            check_val_every_n_epoch=check_val_every_n_epoch,
            num_sanity_val_steps=num_sanity_val_steps,
            log_every_n_steps=log_every_n_steps,
            accumulate_grad_batches=accumulate_grad_batches,
            gradient_clip_val=gradient_clip_val,
            gradient_clip_algorithm=gradient_clip_algorithm,
            compile=compile,
        )
        self.default_root_dir = "." if default_root_dir is None else str(default_root_dir)
        self.callbacks = _with_defaults(callbacks, enable_checkpointing, enable_progress_bar, enable_model_summary)
        self.loggers = _loggers(logger, self.default_root_dir)
        self.engine = Engine(devices=devices, strategy=strategy, precision=precision, accelerator=accelerator)
        self.state = TrainerState()
        self.logbook = Logbook(self.loggers, self.engine, self.state)
        self.module: Module | None = None
        self.optimizers: list[Optimizer] = []
        self.prepared_optimizers: list[PreparedOptimizer] = []
        self.lr_scheduler_configs: list[SchedulerConfig] = []
        self.should_stop = False
        """Set it to True, on every rank in the same batch, to end the run after this optimizer step."""
        self.num_training_batches: int | None = None
        self.num_val_batches: int | None = None
        self.num_test_batches: int | None = None
        self.resume_source: str | None = None
        """The checkpoint that this run was resumed from."""
        self._run: TrainingRun | None = None

    # -- the calls ---------------------------------------------------------------------------------------------------

    def fit(
        self,
        model: Module,
        train_dataloaders: Iterable[Any] | None = None,
        val_dataloaders: Iterable[Any] | None = None,
        *,
        ckpt_path: str | None = None,
    ) -> None:
        """Train a module. Collective: every rank of the job calls it.

        Args:
            model: has training_step and configure_optimizers; with val_dataloaders validation_step too.
            train_dataloaders: a DataLoader with the training batches.
            val_dataloaders: a DataLoader with the validation batches.
            ckpt_path: the checkpoint to go on from: a path, "last" (the newest of ModelCheckpoint's folder) or "best".

        Raises:
            TypeError, ValueError: a module or a loader that cannot be trained.
            CheckpointError: no such checkpoint, or one that is damaged or of another model.
        """
        check_module(model, ["training_step", "configure_optimizers"], "fit")
        train_loader = check_loader(train_dataloaders, "train_dataloaders", "fit")
        if val_dataloaders is not None:
            check_module(model, ["validation_step"], "fit with val_dataloaders")
            check_loader(val_dataloaders, "val_dataloaders", "fit")
        path = choose_checkpoint(ckpt_path, self.checkpoint_callback, self.engine)
        self.state = TrainerState()
        self.should_stop, self.resume_source = False, None
        with self._running(model, "fit"):
            self._run = prepare_fit(self, model, train_loader)
            val_loader = None
            if val_dataloaders is not None:
                val_loader = self._evaluation_loader(val_dataloaders)
                self.num_val_batches = limited(val_loader.length, self.settings.limit_val_batches)
                if self.settings.limit_val_batches == 0:
                    val_loader = None  # by the setting, which is alike on every rank: one may have no batch of its own
            self.hooks.call("on_fit_start")
            generators = restore(self, path) if path is not None else None
            fit(self._run, val_loader, generators)
            self.hooks.call("on_fit_end")

    def validate(
        self, model: Module | None = None, dataloaders: Iterable[Any] | None = None, *, ckpt_path: str | None = None
    ) -> list[dict[str, float]]:
        """Evaluate a module with validation_step; arguments and result are those of `test`. Collective."""
        return self._evaluate("validate", "validation", model, dataloaders, ckpt_path)

    def test(
        self, model: Module | None = None, dataloaders: Iterable[Any] | None = None, *, ckpt_path: str | None = None
    ) -> list[dict[str, float]]:
        """Evaluate a module with test_step, print its metrics on rank 0 and return them. Collective.

        Args:
            model: the module; None is the one of the latest call, with the weights of its best checkpoint if it has one.
            dataloaders: a DataLoader with the batches.
            ckpt_path: the weights to take: a path, "best" or "last"; None takes a given module as it is.

        Returns:
            A list of one dict, the loader's metrics by name, over all ranks and each sample counted once.
        """
        return self._evaluate("test", "test", model, dataloaders, ckpt_path)

    def save_checkpoint(self, filepath: str, weights_only: bool = False) -> bool:
        """Write a checkpoint and return whether it is there. Collective: call on every rank.

        Within an accumulation window it is written when the window ends, since gradients are not part of it; False then.

        Raises:
            CheckpointError: on every rank alike.
            RuntimeError: there is nothing to save, or no run that could go on from it.
        """
        if not self.engine.modules:
            raise RuntimeError("there is nothing to save: save_checkpoint works from fit's beginning on.")
        if not weights_only and not self.engine.optimizers:
            raise RuntimeError(
                "the latest run was an evaluation, which has no optimizer to save; pass weights_only=True, or save after fit."
            )
        if self._run is not None and self._run.is_within_window:
            self._run.waiting_saves.append((str(filepath), weights_only))
            return False
        state = {} if weights_only else run_state(self)
        self.engine.save(
            str(filepath), step=self.state.step, epoch=self.state.epoch, state=state, weights_only=weights_only
        )
        return True

    def save_waiting(self) -> None:
        """Write the checkpoints that were asked for within the window that has ended."""
        while self._run is not None and self._run.waiting_saves:
            self.save_checkpoint(*self._run.waiting_saves.pop(0))

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only."""
        if self.is_global_zero:
            builtins.print(*args, **kwargs)

    # -- how they are wired ------------------------------------------------------------------------------------------

    @contextmanager
    def _running(self, model: Module, stage: str) -> Iterator[None]:
        """Set up what surrounds a run, and take it down whatever happens."""
        self.module = model
        for child in model.modules():
            if isinstance(child, Module):
                child._trainer = self  # one within another may log too
        self.logbook = Logbook(self.loggers, self.engine, self.state)
        self.hooks = HookTable(self, model, self.callbacks)
        self.engine.close()
        try:
            for logger in self.loggers:
                logger.start(self.engine.agreed, is_writer=self.is_global_zero)
            self.hooks.call("setup", stage)
            yield
        except BaseException as error:
            for callback in self.callbacks:
                callback.on_exception(self, model, error)
            raise
        finally:
            for logger in self.loggers if self.is_global_zero else ():
                logger.close()
            self.hooks.call("teardown", stage)
            self.logbook.collector, self._run = None, None

    def _evaluation_loader(self, dataloaders: Iterable[Any]) -> Any:
        ghosts = self.engine.strategy.forward_is_collective
        return self.engine.prepare_loader(dataloaders, "ghost" if ghosts else "evaluate")

    def _evaluate(
        self, call: str, stage: str, model: Module | None, dataloaders: Iterable[Any] | None, ckpt_path: str | None
    ) -> list[dict[str, float]]:
        callback = self.checkpoint_callback
        if model is None and ckpt_path is None and callback is not None and callback.best_model_path:
            ckpt_path = "best"
            self.print(f"trainer.{call} was given no module: it takes the best checkpoint, {callback.best_model_path}")
        model = model if model is not None else self.module
        check_module(model, [f"{stage}_step"], call)
        assert model is not None
        loader = check_loader(dataloaders, "dataloaders", call)
        path = choose_checkpoint(ckpt_path, callback, self.engine)
        with self._running(model, call):
            sharded = self._evaluation_loader(loader)
            limit = self.settings.limit_test_batches if stage == "test" else self.settings.limit_val_batches
            setattr(self, "num_test_batches" if stage == "test" else "num_val_batches", limited(sharded.length, limit))
            self.engine.prepare_module(model, None)
            if path is not None:
                self.engine.load(path, weights_only=True)
            self.engine.take_seed()
            metrics = evaluate(self, model, sharded, stage, limit)
        if metrics:
            self.print(format_table(f"{call} metric", metrics))
        return [metrics]

    def monitored(self, name: str, asker: str) -> float:
        """Return a metric that a part follows; ValueError with what there is where it was not logged."""
        metrics = self.callback_metrics
        if name not in metrics:
            raise ValueError(
                f"{asker} follows {name!r}, which was not logged; there are {', '.join(sorted(metrics)) or 'no metrics'}. "
                "Log it with self.log, or change monitor."
            )
        return float(metrics[name])

    # -- where the run is --------------------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """Return whether no epoch is left to train."""
        last = self.settings.last_epoch
        return self.wants_to_stop or (last is not None and self.state.epoch >= last)

    @property
    def wants_to_stop(self) -> bool:
        """Return whether the run ends at this optimizer step."""
        return self.should_stop or -1 < self.settings.max_steps <= self.state.step

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """Return the first ModelCheckpoint among the callbacks."""
        return next((each for each in self.callbacks if isinstance(each, ModelCheckpoint)), None)

    @property
    def log_dir(self) -> str | None:
        """Return the first logger's folder of this run; None before a run, or without a logger that has one."""
        return next((logger.log_dir for logger in self.loggers if logger.log_dir), None)

    @property
    def current_epoch(self) -> int:
        """Return the number of the epoch, from 0; after fit, how many epochs were finished."""
        return self.state.epoch

    @property
    def global_step(self) -> int:
        """Return how many optimizer steps were made; under manual optimization those of every optimizer count."""
        return self.state.step

    @property
    def global_rank(self) -> int:
        """Return this process's number in the job, from 0."""
        return self.engine.rank

    @property
    def world_size(self) -> int:
        """Return how many processes the job has."""
        return self.engine.world_size

    @property
    def is_global_zero(self) -> bool:
        """Return whether this is rank 0."""
        return self.engine.rank == 0

    @property
    def sanity_checking(self) -> bool:
        """Return whether the validation that runs is the sanity check."""
        return self.logbook.is_silent

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


def _with_defaults(
    callbacks: Callback | Sequence[Callback] | None, checkpointing: bool, progress_bar: bool, summary: bool
) -> list[Callback]:
    """Return the user's callbacks, and before them the default ones that are enabled and not among them."""
    given = [callbacks] if isinstance(callbacks, (Callback, type)) else list(callbacks or [])
    for each in given:
        if not isinstance(each, Callback):
            raise TypeError(
                f"callbacks= holds {each!r}, a {type(each).__name__}; accepted are instances of trainwright.Callback."
            )
    keys = [each.state_key for each in given if is_overridden("state_dict", each, Callback)]
    if len(set(keys)) < len(keys):
        raise ValueError(
            f"callbacks= holds two of one state_key ({', '.join(keys)}), so a checkpoint could keep the state of only one; "
            "give them settings or a state_key that differ."
        )
    defaults: list[tuple[bool, type[Callback]]] = [
        (summary, ModelSummary),
        (progress_bar, TQDMProgressBar),
        (checkpointing, ModelCheckpoint),
    ]
    missing = [kind() for wanted, kind in defaults if wanted and not any(isinstance(each, kind) for each in given)]
    if not checkpointing and any(isinstance(each, ModelCheckpoint) for each in given):
        raise ValueError(
            "enable_checkpointing=False, but callbacks= holds a ModelCheckpoint; leave out one of the two."
        )
    return [*missing, *given]


def _loggers(logger: bool | Logger | Iterable[Logger] | None, root: str) -> list[Logger]:
    if logger is None or logger is True:
        return [CSVLogger(root)]
    loggers = [logger] if isinstance(logger, (Logger, str)) else [] if logger is False else list(logger)
    for each in loggers:
        if not isinstance(each, Logger):
            raise TypeError(
                f"logger= holds {each!r}, a {type(each).__name__}; accepted are True, False or Logger instances."
            )
    return loggers
