"""The Trainer: its arguments, the wiring of its parts, and fit, validate, test and predict. The loop itself is fit.py's."""

from __future__ import annotations

import builtins
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright.callbacks.base import Callback
from trainwright.checkpoint.reader import Verify
from trainwright.data.datamodule import DataModule
from trainwright.distributed.sync_points import SyncPoint
from trainwright.engine.compilation import Compiled
from trainwright.engine.engine import Engine
from trainwright.engine.optimizers import SchedulerConfig
from trainwright.engine.prepared import PreparedOptimizer
from trainwright.loggers.base import Logger
from trainwright.module import Module, is_overridden
from trainwright.precision import Precision
from trainwright.profilers import Profiler, resolve_profiler
from trainwright.rank_zero import rank_zero_warn
from trainwright.strategies import Strategy
from trainwright.strategies.base import Clipping
from trainwright.trainer.evaluate import Evaluation, evaluate
from trainwright.trainer.fit import fit
from trainwright.trainer.hooks import HookTable
from trainwright.trainer.inputs import (
    check_compile,
    check_module,
    choose_precision,
    choose_root,
)
from trainwright.trainer.logbook import Logbook
from trainwright.trainer.parts import arranged_callbacks, arranged_loggers, making_modules, set_switches
from trainwright.trainer.predict import predict
from trainwright.trainer.preparation import prepare_fit
from trainwright.trainer.remote_call import call_remotely
from trainwright.trainer.resume import check_save, open_to_resume, restore, save_run
from trainwright.trainer.running import (
    callbacks_for,
    choose_checkpoint,
    evaluating,
    read_request,
    refuse_nested,
    running,
)
from trainwright.trainer.settings import Settings, refuse_unknown
from trainwright.trainer.sources import find_source, find_transfer, read_datamodule
from trainwright.trainer.stage import Stages
from trainwright.trainer.state import TrainerState
from trainwright.trainer.status import Status
from trainwright.trainer.stop import Stop
from trainwright.trainer.table import format_table
from trainwright.trainer.training_data import TrainData
from trainwright.trainer.training_run import TrainingRun


class Trainer(Status):
    """Runs the loop around a Module, and everything beside it as parts.

    Args:
        accelerator: "auto" and "gpu" are whichever accelerator torch has here ("auto" the CPU where it has none); or its
            name, "cuda" (ROCm too), "mps", "xpu" or that of a registered backend; or "cpu".
        strategy: how processes share the work: "auto" (one: single_device, several: ddp), a name, or a Strategy.
        devices: processes on this node, one a device; a list of GPUs; -1 for all (of the CPU, one a core); "auto" is what
            was launched, else every GPU, else one.
        num_nodes: nodes of the job. More than one are started by torchrun, srun or `trainwright launch`, or by the script
            itself on each node, with NODE_RANK, MASTER_ADDR and MASTER_PORT in its environment.
        precision: "32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true", their short forms 32, 16, "bf16",
            64, or a Precision.
        logger: True for the CSV logger, False for none, a Logger or a list of them.
        callbacks: a Callback or a list of them.
        fast_dev_run: a trial run of that many batches (True: one) in each loop, that writes nothing.
        max_epochs: epochs to train; None is 1000 unless max_steps or max_time is given, -1 is without end.
        min_epochs, min_steps: what is trained even if should_stop is set before.
        max_steps: optimizer steps to train; -1 is without end.
        max_time: time to train: "DD:HH:MM:SS", a timedelta, or a dict of its arguments.
        limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches: batches of an epoch on each rank:
            a number (int), or a fraction (float); None for all.
        overfit_batches: train and validate on that many batches, or on that fraction of them, without shuffling.
        val_check_interval: when to validate within an epoch: each such fraction of it (float), each so many training batches
            (int), or each such time (as max_time); None for the epoch's end.
        check_val_every_n_epoch: epochs between two validations; None lets val_check_interval count across epochs.
        num_sanity_val_steps: validation batches to run before training; -1 for all, None for 2.
        log_every_n_steps: steps between two rows of step values in the loggers; None for 50, 0 for none.
        enable_checkpointing, enable_progress_bar, enable_model_summary: add the default callback.
        accumulate_grad_batches: batches of one optimizer step.
        gradient_clip_val: the limit of the gradients; None for no limit.
        gradient_clip_algorithm: "norm" (the total norm) or "value" (each element).
        deterministic: torch's deterministic algorithms: True, or "warn" where there is none.
        benchmark: let cuDNN try which algorithm is the fastest.
        inference_mode: validate, test and predict under torch.inference_mode rather than torch.no_grad. What a module or a
            metric makes there cannot be trained with afterwards.
        use_distributed_sampler: share the data out over the ranks; False where the loaders do so themselves.
        profiler: "simple", "advanced", "pytorch", or a Profiler.
        detect_anomaly: let autograd say which operation made a NaN.
        barebones: leave out all that costs time beside the loop.
        plugins: a Precision.
        sync_batchnorm: compute batch norm over all ranks.
        reload_dataloaders_every_n_epochs: call the loader hooks again each so many epochs; 0 for never.
        default_root_dir: where logs and checkpoints go, a path or an fsspec URL; the working directory by default.
        enable_autolog_hparams: write the hyper-parameters to the loggers.
        compile: True, or a dict of torch.compile's options: compile in place what the steps call of the module.
        fused_optimizers: let optimizers whose `fused` and `foreach` were left alone run fused, where torch can.

    Raises:
        ValueError, TypeError: a setting is wrong; said here, before any process is started.
        LaunchError: the processes of the job could not be started.
        WorkerFailed: by a call that hands its work over, where a rank has failed.

    The first Trainer of a plain script that asks for several devices replaces the process by a launcher that runs the same
    script in that many processes. In a notebook, a REPL, a test and `python -c`, and with strategy="ddp_spawn" or
    "ddp_notebook", each call starts the processes, hands its work over, and brings back what it has changed.

    >>> trainer = tw.Trainer(max_epochs=2, enable_model_summary=False)
    >>> trainer.fit(module, loader)
    >>> trainer.current_epoch, trainer.global_step
    (2, 16)
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: str | Strategy = "auto",
        devices: int | str | list[int] = "auto",
        num_nodes: int = 1,
        precision: str | int | Precision | None = None,
        logger: bool | Logger | Iterable[Logger] | None = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        fast_dev_run: bool | int = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, float] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | str | timedelta | dict[str, float] | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = False,
        use_distributed_sampler: bool = True,
        profiler: str | Profiler | None = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: Any = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | os.PathLike[str] | None = None,
        enable_autolog_hparams: bool = True,
        compile: bool | dict[str, Any] = False,
        fused_optimizers: bool = True,
        **unknown: Any,
    ) -> None:
        given = locals()
        self.given_arguments = {name: value for name, value in given.items() if name not in ("self", "unknown")}
        """What the constructor was given, for the Trainers of processes to which a call is handed over."""
        refuse_unknown(unknown, list(self.given_arguments))
        self.given_settings = Settings(**{each.name: given[each.name] for each in fields(Settings)})
        self.settings = self.given_settings.effective
        self.default_root_dir = choose_root(default_root_dir)
        self.profiler = resolve_profiler(profiler)
        self.callbacks = arranged_callbacks(callbacks, self.settings)
        self.loggers = arranged_loggers(logger, self.default_root_dir, self.settings)
        places = {name: given[name] for name in ("devices", "strategy", "accelerator", "num_nodes")}
        self.engine = Engine(**places, precision=choose_precision(precision, plugins), can_call_workers=True)
        check_compile(self.settings.compile, self.engine.strategy)
        set_switches(self.settings)  # once nothing is left that could be refused
        self.state = TrainerState()
        self.logbook = Logbook(self.loggers, self.engine, self.state)
        self.module: Module | None = None
        self.datamodule: DataModule | None = None
        self.stage: str | None = None
        self.run: TrainingRun | None = None
        self.train_data: TrainData | None = None
        """The training data of the present or the latest fit, which a save after it asks for its position."""
        self.hooks = HookTable(self, Module(), [])  # nobody's before the first run
        self.optimizers: list[Optimizer] = []
        self.prepared_optimizers: list[PreparedOptimizer] = []
        self.lr_scheduler_configs: list[SchedulerConfig] = []
        self.accumulate_grad_batches = self.settings.accumulate_grad_batches
        self.stages = Stages()
        self.ckpt_path: str | None = None
        """The checkpoint that the present or the latest run was given."""
        self.resume_source: str | None = None
        """The checkpoint that this fit was resumed from."""
        self.compiled: Compiled | None = None
        self.stop = self._make_stop()
        self.callbacks_of_module: tuple[list[Callback], list[Callback]] = ([], [])
        """The callbacks that configure_callbacks has given, and those of the trainer's own whose place they have taken."""

    # -- the calls ---------------------------------------------------------------------------------------------------

    def fit(
        self,
        model: Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        weights_only: bool | None = None,
        verify: Verify = "full",
    ) -> None:
        """Train a module. Collective: every rank of the job calls it.

        Args:
            model: has training_step and configure_optimizers; to be validated validation_step too.
            train_dataloaders: a DataLoader or an iterable of batches, several of them in a list, a dict or a CombinedLoader,
                or a DataModule; without it the module's train_dataloader hook.
            val_dataloaders: the same for validation; a dict's keys name the loaders.
            datamodule: a DataModule, in place of the loaders.
            ckpt_path: the checkpoint to go on from: a path; "last", the newest of ModelCheckpoint's folder, which has to be
                whole; "auto", the newest that is whole, or none: so a job can be run again until it has come to its end;
                or "best". From the newest one the loggers go on in its run folder.
            weights_only: accepted and not needed: a checkpoint holds nothing but plain data and tensors.
            verify: how the checkpoint is looked at before anything is changed: "full" (the digest of every file), "size"
                (their sizes) or "off".

        Raises:
            TypeError, ValueError: a module or a loader that cannot be trained.
            CheckpointError: no such checkpoint, or one that is damaged or of another model; or another run holds the folder.
            RunStopped: SIGTERM, SIGUSR1 or Ctrl-C has stopped it, and it is saved; it ends the process.
        """
        refuse_nested(self, "fit")
        check_module(model, ["training_step", "configure_optimizers"], "fit")
        train, datamodule = read_datamodule(train_dataloaders, datamodule, "train_dataloaders", "fit")
        if val_dataloaders is not None:
            check_module(model, ["validation_step"], "fit with val_dataloaders")
        source = find_source("train", train, datamodule, model, "train_dataloaders", "fit")
        if not source.is_defined:
            source.load()  # which says what is missing
        self.callbacks = callbacks_for(self, model, "fit")
        choice = choose_checkpoint(self, ckpt_path, verify, "fit")
        if self.engine.num_workers:
            options = {"train_dataloaders": train, "val_dataloaders": val_dataloaders, "verify": verify}
            call_remotely(self, "fit", model, datamodule, choice.path, **options)
            return
        self.state = TrainerState()
        self.resume_source, self.stop = None, self._make_stop()
        self.accumulate_grad_batches = self.settings.accumulate_grad_batches
        validation = self._validation(model, val_dataloaders, datamodule)
        with (
            self.stop,
            running(self, model, "fit", datamodule, choice, validation),
            torch.autograd.set_detect_anomaly(self.settings.detect_anomaly),
        ):
            self.stop.open()
            opened = open_to_resume(self, choice.checkpoint) if choice.checkpoint is not None else None
            self.run = prepare_fit(self, model, source, validation)
            self.hooks.call("on_fit_start")
            generators = restore(self, opened) if opened is not None else None
            fit(self.run, generators)
            if choice.is_rerunnable and not self.stop.number and self.settings.limit_train_batches != 0:
                self._save_stop("end")  # the same command finds nothing left to do then
            self.hooks.call("on_fit_end")

    def validate(
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
        verify: Verify = "full",
    ) -> list[dict[str, float]]:
        """Evaluate a module with validation_step; arguments and result are those of `test`. Collective."""
        return self._evaluate("validate", "validation", verbose, model, dataloaders, ckpt_path, datamodule, verify)

    def test(
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
        verify: Verify = "full",
    ) -> list[dict[str, float]]:
        """Evaluate a module with test_step, print its metrics on rank 0 and return them. Collective.

        Args:
            model: the module; None is the one of the latest call, with the weights of its best checkpoint if it has one.
            dataloaders: a DataLoader or an iterable of batches, several in a list or a dict of names, or a DataModule;
                without it the module's test_dataloader hook.
            ckpt_path: the weights to take: a path, "best", "last" (the newest) or "auto" (the newest that is whole); None takes
                a given module as it is.
            verbose: print the table of metrics.
            datamodule: a DataModule, in place of the loaders.
            weights_only: accepted and not needed: a checkpoint holds nothing but plain data and tensors.
            verify: "full", "size" or "off", as in `fit`.

        Returns:
            A list of dicts, each loader's metrics by name, over all ranks and each sample counted once.
        """
        return self._evaluate("test", "test", verbose, model, dataloaders, ckpt_path, datamodule, verify)

    def predict(
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        weights_only: bool | None = None,
        verify: Verify = "full",
    ) -> list[Any]:
        """Return what predict_step returns for each batch, on the host, in the order of the dataset. Collective.

        On several ranks each of them gets the outputs of all; the arguments are those of `test`. With
        return_predictions=False nothing is kept: a TensorPredictionWriter writes the outputs, or a callback of your own takes
        them in on_predict_batch_end.

        Returns:
            A list with an entry for each batch; with several loaders a list of such lists.
        """
        asked = read_request(self, "predict", "predict", model, dataloaders, ckpt_path, datamodule, verify)
        if self.engine.num_workers:
            options = {"dataloaders": asked.loaders, "return_predictions": return_predictions, "verify": verify}
            outputs: list[Any] = call_remotely(
                self, "predict", asked.module, asked.datamodule, asked.choice.path, **options
            )
            return outputs
        with evaluating(self, asked) as evaluation:
            predictions = predict(evaluation, return_predictions is not False)
        return predictions[0] if len(predictions) == 1 else predictions

    def save_checkpoint(
        self,
        filepath: str | os.PathLike[str],
        weights_only: bool = False,
        storage_options: Any = None,
        blocking: bool = True,
        overwrite: bool = False,
    ) -> bool:
        """Write a checkpoint and return whether it is there, or, with blocking=False, begun. Collective: call on every rank.

        With blocking=False the loop goes on once all is copied to host memory, and a thread writes and commits. One such save
        is in flight at a time: the next save, the end of a run, a load and the program's end wait for it, and raise its error.

        A path that exists is refused. With overwrite=True a whole checkpoint there, also the one that the run was resumed from,
        is replaced, so that a script can be run again: the new one is committed first, as `-v1` beside it, and then takes its
        place. Whenever the process is killed, one of the two is there, whole. Anything else at that path is refused, and so is
        any path that exists on a file system without a rename (object stores).

        Within an accumulation window it is written when the window ends, since gradients are not part of it, and between an
        epoch's last batch, or the one after which the run stops, and its end (the validation, on_train_epoch_end) when that is
        done and all schedulers have stepped; False then.

        Raises:
            CheckpointError: on every rank alike.
            RuntimeError: there is nothing to save, or no run that could go on from it.
        """
        if storage_options is not None:
            raise ValueError("storage_options is not accepted; put them into the fsspec URL or its configuration.")
        weights_only = check_save(self, weights_only)
        run = self.run
        if run is not None and not run.may_save(weights_only):
            run.waiting_saves.append((str(filepath), weights_only, blocking, overwrite))
            return False
        if run is not None and run.row_is_due:
            run.write_row()
        save_run(self, str(filepath), weights_only, blocking, overwrite)
        return True

    def save_waiting(self) -> None:
        """Write the checkpoints that were asked for within the window that has ended."""
        while self.run is not None and self.run.waiting_saves:
            path, weights_only, blocking, overwrite = self.run.waiting_saves.pop(0)
            self.save_checkpoint(path, weights_only, blocking=blocking, overwrite=overwrite)

    def stop_soon(self) -> None:
        """Ask, on any rank and from any thread, that all ranks stop at one and the same optimizer step of this fit.

        On several ranks that needs steps that average gradients; under manual optimization without any, set should_stop alike.
        """
        self.stop.request_soon()

    def sync_point(self, name: str) -> SyncPoint:
        """Return a moment of this run that all ranks keep at the same step. Collective: make it on every rank."""
        return self.engine.connection.sync_point(name)

    def clip_gradients(self, optimizer: Optimizer, limit: float | None, algorithm: str | None) -> None:
        """Clip the gradients of one optimizer in place: by "norm" (None too) or by "value"; a limit of None does nothing."""
        if algorithm not in (None, "norm", "value"):
            raise ValueError(f"gradient_clip_algorithm={algorithm!r} is unknown; choose from norm, value.")
        if not limit:
            return
        prepared = next((each for each in self.prepared_optimizers if optimizer in (each, each.optimizer)), None)
        inner = optimizer if prepared is None else prepared.optimizer
        clipping = Clipping(value=limit) if algorithm == "value" else Clipping(norm=limit)
        self.engine.strategy.clip_gradients(inner, clipping)

    def manual_backward(self, loss: Tensor, send: Any, options: dict[str, Any]) -> None:
        """Send a loss backward under manual optimization, weighted as its round is, and tell the hooks."""
        if self.run is not None:
            self.run.window.hold_gradients()  # until an optimizer steps
            if self.run.data.uneven and (weight := self.run.weight) != 1.0:
                loss = loss * weight
        self.hooks.call("on_before_backward", loss)
        self.engine.backward(loss, send, **options)
        self.hooks.call("on_after_backward")

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Return a context in which modules are made in the dtype and on the device that they are trained on."""
        return making_modules(self.engine, bool(empty_init))

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only."""
        if self.is_global_zero:
            bar = self.progress_bar_callback if self.stage is not None else None
            (builtins.print if bar is None else bar.print)(*args, **kwargs)  # above a live bar, not through it

    def monitored(self, name: str, asker: str) -> float:
        """Return a metric that a part follows; ValueError with what there is where it was not logged."""
        metrics = self.callback_metrics
        if name not in metrics:
            raise ValueError(
                f"{asker} follows {name!r}, which was not logged; there are {', '.join(sorted(metrics)) or 'no metrics'}. "
                "Log it with self.log, or change monitor."
            )
        return float(metrics[name])

    def record_metrics(self, values: Mapping[str, float]) -> None:
        """Add values, the same on every rank, to callback_metrics."""
        self.logbook.note(values)

    def is_outdated(self, name: str) -> bool:
        """Return whether a metric is a validation's of earlier weights."""
        return self.logbook.is_outdated(name)

    @property
    def should_stop(self) -> bool:
        """Set it to True, on any rank, to end the run.

        On one process it ends after this optimizer step; on several after this validation or epoch if it is set there, else
        within the next two steps.
        """
        return self.stop.requested

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self.stop.requested = value

    @property
    def accumulate_grad_batches(self) -> int:
        """Batches of one optimizer step; a callback may change it at an epoch's start."""
        return self._accumulate_grad_batches

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"trainer.accumulate_grad_batches={value!r} is not accepted; set it to a whole number of batches from 1."
            )
        self._accumulate_grad_batches = value

    # -- how they are wired ------------------------------------------------------------------------------------------

    def _make_stop(self) -> Stop:
        callbacks = self.checkpoint_callbacks
        return Stop(
            self.engine,
            self.settings,
            self.state,
            self._save_stop,
            lambda: any(each.keeps_any for each in callbacks[:1]),
        )

    def _save_stop(self, name: str = "stop") -> str:
        """Save the run whole where it has ended, by the first ModelCheckpoint; return the path. Collective."""
        callback = self.checkpoint_callback
        return "" if callback is None else callback.save_stop(self, name)

    def _validation(self, model: Module, given: Any, datamodule: DataModule | None) -> Evaluation | None:
        """Return the validation of a fit; None where there is nothing to validate with, or limit_val_batches is 0."""
        source = find_source("validation", given, datamodule, model, "val_dataloaders", "fit")
        if not source.is_defined:
            return None
        if not is_overridden("validation_step", model, Module):
            rank_zero_warn(
                f"{type(source.owner).__name__} has a val_dataloader, but the module no validation_step: none is made."
            )
            return None
        if self.settings.limit_val_batches == 0:
            return None  # by the setting, which is alike on every rank: one may have no batch of its own
        transfer = find_transfer(self.engine, model, datamodule)
        return Evaluation(self, model, "validation", source, transfer, self.stages.validation)

    def _evaluate(self, call: str, stage: str, verbose: bool, *given: Any) -> list[dict[str, float]]:
        asked = read_request(self, call, stage, *given)
        metrics: list[dict[str, float]]
        if self.engine.num_workers:
            options = {"dataloaders": asked.loaders, "verbose": verbose, "verify": asked.verify}
            metrics = call_remotely(self, call, asked.module, asked.datamodule, asked.choice.path, **options)
            return metrics
        with evaluating(self, asked) as evaluation:
            metrics = evaluate(evaluation)
        if verbose and any(metrics):
            names = [name for name, _ in evaluation.loaders]
            self.print(format_table(f"{call} metric", metrics, names))
        return metrics
