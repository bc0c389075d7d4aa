"""The Trainer: its arguments, and the calls fit, validate, test and predict. The training loop is in fit.py."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainwright.arguments import refuse_unknown, refuses_unknown
from trainwright.callbacks.base import Callback
from trainwright.callbacks.ray_report import RayReport
from trainwright.checkpoint.reader import Verify
from trainwright.checkpoint.weight_files import export_settings
from trainwright.data.datamodule import DataModule
from trainwright.devices import cuda
from trainwright.duration import seconds_of
from trainwright.engine.engine import Engine
from trainwright.engine.script_settings import refuse_unlike_arguments
from trainwright.loggers.base import Logger, SilentLogger
from trainwright.module import Module, hook_of
from trainwright.overrides import overridable
from trainwright.paths import absolute
from trainwright.precision import Precision
from trainwright.profilers import Profiler, resolve_profiler
from trainwright.strategies import Strategy
from trainwright.trainer.checkpoint_choice import CheckpointSearch, Choice
from trainwright.trainer.evaluate import Evaluation, evaluate, predict
from trainwright.trainer.fit import fit
from trainwright.trainer.logbook import format_table
from trainwright.trainer.parts import (
    PARTS,
    TRIAL,
    arranged_callbacks,
    arranged_loggers,
    check_compile,
    choose_precision,
    copied,
    root_folder,
    set_switches,
    settings_of,
    with_the_modules,
)
from trainwright.trainer.preparation import Request, read_evaluation, read_fit
from trainwright.trainer.remote_call import call_remotely, changes
from trainwright.trainer.resume import Resumption, restore_datamodule
from trainwright.trainer.run import Parts, Run
from trainwright.trainer.run_position import Position
from trainwright.trainer.saving import edit_with_hooks, export_weights, save_checkpoint
from trainwright.trainer.settings import REPLACED, Settings
from trainwright.trainer.sources import find_source
from trainwright.trainer.status import Status
from trainwright.trainer.training_run import TrainingRun


class Trainer(Status):
    """Trains, validates, tests and predicts with a Module. Strategy, precision, callbacks and loggers are its parts.

    Args:
        accelerator: "auto" (whichever accelerator torch has here, else the CPU), "gpu", "cpu", or a torch device type such as
            "cuda" (ROCm too), "mps", "xpu" or a registered backend's.
        strategy: how processes share the work: "auto" (single_device, or ddp on several processes), a name, or a Strategy.
        devices: number of processes on this node, one per device, a list of device numbers, or -1 for all. On the CPU a device
            is a core. "auto": the launcher's number if launched, otherwise all GPUs, otherwise 1.
        num_nodes: nodes of the job. torchrun, srun or `trainwright launch` starts more than one, or the script on every node
            with NODE_RANK, MASTER_ADDR and MASTER_PORT in its environment.
        precision: "32-true", "16-mixed", "bf16-mixed", "fp8-mixed", "16-true", "bf16-true" or "64-true", the short forms 32,
            16, "bf16", "fp8" and 64, or a Precision.
        logger: True for the CSV logger, False for none, a Logger or a list of them.
        callbacks: a Callback or a list of them.
        fast_dev_run: run this many batches (True: one) in each loop, and write nothing.
        max_epochs: epochs to train, None is 1000 unless max_steps or max_time is given, -1 no limit.
        min_epochs, min_steps: what is trained even if should_stop is set before.
        max_steps: optimizer steps to train, -1 for no limit.
        max_time: time to train: "DD:HH:MM:SS", a timedelta, or a dict of its arguments.
        limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches: batches of an epoch on every rank, as
            a number (int) or a fraction (float), None for all.
        overfit_batches: train and validate on this number or fraction of batches, without shuffling.
        val_check_interval: validate within an epoch after each such fraction of it (float), number of training batches (int)
            or time (as max_time), None to validate at its end.
        check_val_every_n_epoch: epochs between two validations, None lets val_check_interval count across epochs.
        num_sanity_val_steps: validation batches to run before training, -1 for all, None for 2.
        log_every_n_steps: steps between two rows of step values in the loggers, None for 50, 0 for no rows.
        enable_checkpointing, enable_progress_bar, enable_model_summary: add the default callback.
        enable_report: add RunReport, which writes report.html into the run's folder, None if a logger of files has one.
        accumulate_grad_batches: batches of one optimizer step.
        gradient_clip_val: the limit of the gradients, None for no limit.
        gradient_clip_algorithm: "norm" (the total norm) or "value" (each element).
        deterministic: use torch's deterministic algorithms: True, or "warn" to only warn if an operation has none.
        benchmark: let cuDNN try which algorithm is the fastest.
        inference_mode: validate, test and predict under torch.inference_mode instead of torch.no_grad. Tensors that the module
            or a metric makes there cannot be trained with later.
        use_distributed_sampler: shard the data over the ranks, False if the loaders do that themselves.
        profiler: "simple", "advanced", "pytorch", or a Profiler.
        detect_syncs: on CUDA, print each line of your code at which the host waits for the device in a fit, and how often.
        memory_snapshot: on CUDA, write torch's record of the memory to memory-rank<k>.pickle in the run's folder: "on_oom" if a
            fit runs out of memory, or a number for a fit's first optimizer steps.
        detect_anomaly: have autograd name the operation that made a NaN.
        nan_policy: what happens if a loss or a gradient is not finite: None warns, "raise" ends the run, "skip" omits the step,
            "rollback" also returns to the newest checkpoint.
        barebones: disable everything that adds overhead: logging, checkpoints, progress bar, summary, sanity check.
        plugins: a Precision.
        sync_batchnorm: compute batch norm over all ranks.
        reload_dataloaders_every_n_epochs: epochs after which the loader hooks are called again, 0 for never.
        default_root_dir: the folder of logs and checkpoints, a path or an fsspec URL, None for the working directory, or for
            the run's folder in the storage of Ray Train.
        enable_autolog_hparams: write the hyper-parameters to the loggers.
        hang_timeout: seconds, or a timedelta, after which a job without progress ends, and the limit of a collective. None: the
            strategy's timeout, or half an hour.
        accumulate_by: "batches" gives every batch of an optimizer step the same weight, "tokens" every token:
            training_step returns {"loss": the sum over its tokens, "num_tokens": their number}.
        activation_checkpointing: recompute activations in the backward to save memory: True for the repeated blocks of the
            module, "selective" to recompute only cheap operations, or a set of classes of blocks. A dict has "blocks",
            "selective" and "offload" (keep the blocks' inputs in host memory).
        compile: True, or a dict of torch.compile's options: compile in place the submodules that the steps call.
        fused_optimizers: run optimizers fused if torch can and their `fused` and `foreach` were not set.

    Raises:
        ValueError, TypeError: a wrong setting, before any process is started.
        LaunchError: the processes of the job could not be started.
        WorkerFailed: by a call that starts processes, if a rank fails.

    The first Trainer of a plain script that asks for several devices replaces the process by a launcher, which runs the same
    script in that many processes. In a notebook, a REPL, a test and `python -c`, and with strategy="ddp_spawn" or
    "ddp_notebook", each call starts processes instead, runs in them, and brings back what changed.

    >>> trainer = tw.Trainer(max_epochs=2, enable_model_summary=False)
    >>> trainer.fit(module, loader)
    >>> trainer.current_epoch, trainer.global_step
    (2, 16)
    """

    _trial_settings: Settings | None = None  # of a trial run, which the module does not see

    @overridable("Trainer")
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
        enable_report: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = False,
        use_distributed_sampler: bool = True,
        profiler: str | Profiler | None = None,
        detect_syncs: bool = False,
        memory_snapshot: int | str | None = None,
        detect_anomaly: bool = False,
        nan_policy: str | None = None,
        barebones: bool = False,
        plugins: Any = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | os.PathLike[str] | None = None,
        enable_autolog_hparams: bool = True,
        hang_timeout: float | timedelta | None = None,
        accumulate_by: str = "batches",
        activation_checkpointing: Any = False,
        compile: bool | dict[str, Any] = False,
        fused_optimizers: bool = True,
        **unknown: Any,
    ) -> None:
        # First, while the local variables are only the arguments.
        given = locals()
        self._arguments = {name: value for name, value in given.items() if name not in ("self", "unknown")}
        refuse_unknown("Trainer", unknown, self._arguments, REPLACED)
        # Before the engine connects the originals to this job.
        self._fresh = {name: copied(given[name]) for name in PARTS}
        """Copies of parts that were given as objects, for another Trainer."""
        self._settings = settings_of(self._arguments)
        root = root_folder(default_root_dir)
        self.profiler = resolve_profiler(profiler)
        self._loggers = arranged_loggers(logger, root, self._settings)
        self.callbacks = arranged_callbacks(callbacks, self._settings, self._loggers)
        places = {name: given[name] for name in ("devices", "strategy", "accelerator", "num_nodes")}
        places |= {"precision": choose_precision(precision, plugins), "can_call_workers": True}
        self.engine = Engine(**places, timeout_seconds=seconds_of(hang_timeout, "hang_timeout"))
        check_compile(self._settings.compile, self.engine.strategy)
        cuda.check_memory_snapshot(self._settings.memory_snapshot, self.engine.device)
        set_switches(self._settings)  # once nothing is left that could be refused
        self.run = Run(self._parts(root), "fit", None, None, Choice(), None)
        """The present or the latest call. Before the first one it has no module."""

    @refuses_unknown
    def fit(
        self,
        model: Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        weights_only: bool | None = None,
        verify: Verify = "full",
        fresh: str | Sequence[str] = (),
    ) -> None:
        """Train a module. Collective: call on every rank.

        Args:
            model: has training_step and configure_optimizers, and validation_step to be validated.
            train_dataloaders: a DataLoader or an iterable of batches; several in a list, a dict or a CombinedLoader; or a
                DataModule. None: the module's train_dataloader hook.
            val_dataloaders: the same for validation. A dict's keys name the loaders.
            datamodule: a DataModule, instead of the loaders.
            ckpt_path: the checkpoint to resume from: a path; "best"; "last", the newest of ModelCheckpoint's folder, which
                must be complete; or "auto", the newest complete one if any. With "auto" the same command can be repeated until
                the run is finished. From the newest checkpoint the loggers continue in its run folder.
            weights_only: accepted and not needed: a checkpoint holds nothing but plain data and tensors.
            verify: how the checkpoint is checked before anything changes: "full" (every file's digest), "size" or "off".
            fresh: what a resume takes from the script instead of from the checkpoint, one name or both. "schedulers": they
                begin at their step 0, at the script's learning rate. "optimizer_settings": learning rate, weight decay and
                other options, but not the state, such as momentum. A schedule continues in proportion to the new initial rate.
                Without it the checkpoint's settings are used, and one warning names those that differ.

        Raises:
            TypeError, ValueError: a module or a loader that cannot be trained, or another name in `fresh`.
            CheckpointError: the checkpoint is missing, damaged or another model's, or another run holds the folder.
            RunStopped: SIGTERM, SIGUSR1 or Ctrl-C has stopped the run, saved if a ModelCheckpoint keeps any; ends the process.
        """
        self._refuse_nested("fit")
        path = self._ckpt_path if ckpt_path is None else ckpt_path
        request = read_fit(model, train_dataloaders, datamodule, path, verify, fresh)
        parts, choice = self._begin(request)
        if self.engine.num_workers:
            options = {"val_dataloaders": val_dataloaders, "verify": verify, "fresh": request.fresh}
            run = Run(parts, "fit", model, request.datamodule, choice, self.run)
            self.run.stages.validation.note(val_dataloaders, [])
            self._call_workers(run, {"train_dataloaders": request.loaders, **options})
            return
        run = TrainingRun(parts, model, request.datamodule, choice, self.run, request.source, val_dataloaders)
        if choice.path is None and not self.fast_dev_run:
            loaders = {"train_dataloaders": train_dataloaders, "val_dataloaders": val_dataloaders}
            run.hooks.call("on_tune", {**loaders, "datamodule": datamodule})
        self.run = run
        # The stop is outermost, because it raises RunStopped once everything else is closed.
        with run.stop, self.run.opened(), torch.autograd.set_detect_anomaly(self._settings.detect_anomaly):
            run.stop.open()
            if Resumption(run, choice.checkpoint, request.fresh).run():
                fit(run)
            run.stop.save_end()
            run.hooks.call("on_fit_end")

    def trial(self, **changes: Any) -> Trainer:
        """Return a Trainer with the same arguments for a trial run: it writes nothing, validates nothing and has no callbacks.

        Its max_epochs and max_steps show the limits of this Trainer, from which the module may make a scheduler.

        Args:
            changes: arguments that differ, such as callbacks= and max_steps=.
        """
        settings = {**self._arguments, **{name: copied(part) for name, part in self._fresh.items()}, **TRIAL}
        settings["logger"] = SilentLogger() if self.loggers else False  # a step may write to self.logger
        if overfit := settings["overfit_batches"]:  # it would set the validation's batches too
            settings |= {"overfit_batches": 0.0, "limit_train_batches": overfit}
        trial = Trainer.__new__(Trainer)
        Trainer.__init__.__wrapped__(trial, **settings | changes)  # type: ignore[attr-defined]  # without overrides
        trial.callbacks = [callback for callback in trial.callbacks if not isinstance(callback, RayReport)]
        shown = replace(trial._settings, max_epochs=self.max_epochs, max_steps=self.max_steps)
        trial._trial_settings, trial._settings = replace(trial._settings, is_trial=True), shown
        return trial

    @refuses_unknown
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
        """Evaluate a module with validation_step. Arguments and result are those of `test`. Collective.

        Without a module, and without a hook for the loaders, the latest validation loaders are used, such as the fit's.
        """
        given = (model, dataloaders, ckpt_path, datamodule, verify)
        return self._measure("validate", "validation", given, verbose)

    @refuses_unknown
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
            model: the module, or None for the latest run's, with the weights of its best checkpoint if there is one.
            dataloaders: a DataLoader or an iterable of batches, several in a list or a dict of names, or a DataModule. None:
                the module's test_dataloader hook.
            ckpt_path: the weights to load: a path, "best", "last" (the newest) or "auto" (the newest that is complete); None
                leaves a given module as it is.
            verbose: print the table of metrics.
            datamodule: a DataModule, instead of the loaders.
            weights_only, verify: as in `fit`.

        Returns:
            A list of dicts, every loader's metrics by name, over all ranks with every sample counted once.
        """
        return self._measure("test", "test", (model, dataloaders, ckpt_path, datamodule, verify), verbose)

    @refuses_unknown
    def predict(
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | str | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        weights_only: bool | None = None,
        verify: Verify = "full",
    ) -> list[Any] | None:
        """Return what predict_step returns for each batch, on the host, in the dataset's order. Collective.

        Every rank gets the outputs of all. The arguments are those of `test`. With return_predictions=False nothing is kept: a
        BasePredictionWriter writes the outputs, or your callback's on_predict_batch_end takes them. With "own" each rank gets
        its own outputs, of any kind. Where the call starts the processes, those of rank 0.

        Returns:
            A list with an entry for every batch; with several loaders a list of such lists; None with return_predictions=False.
        """
        if return_predictions not in (None, True, False, "own"):
            raise ValueError(f"return_predictions={return_predictions!r} is not accepted. Pass True, False or 'own'.")
        given, wanted = (model, dataloaders, ckpt_path, datamodule, verify), return_predictions
        run = partial(predict, return_predictions=wanted is not False, own_only=wanted == "own")
        predictions: list[Any] | None = self._evaluate("predict", "predict", given, run, return_predictions=wanted)
        return predictions

    def save_checkpoint(
        self,
        filepath: str | os.PathLike[str],
        weights_only: bool = False,
        storage_options: Any = None,
        blocking: bool = True,
        overwrite: bool = True,
        *,
        trained_only: bool = False,
        export: str | None = None,
    ) -> bool:
        """Write a checkpoint, and return whether it is written, or begun with blocking=False. Collective: call on every rank.

        Args:
            filepath: a path or an fsspec URL.
            weights_only: save only the weights, from which no fit resumes.
            storage_options: not accepted. Put them into the URL or fsspec's configuration.
            blocking: False copies everything to host memory and lets a thread write it while training continues. One such save
                is in flight at a time: the next save or load, the end of the run and the program's end wait for it and raise
                its error.
            overwrite: replace an earlier checkpoint at this path, even the one that the run was resumed from, so that a script
                can be repeated. Other files in its folder stay. A kill at any moment leaves the old or the new checkpoint at
                the path. Where the file system cannot exchange two directories (NFS), the new one may be at a path with `-v1`.
                A file, a link, a damaged checkpoint, and on an object store any checkpoint, are rejected. False rejects every
                path that exists.
            export: "huggingface" or "safetensors" also writes the weights as `export` does, into a folder of this name in the
                checkpoint. Local disks only.
            trained_only: omit the parameters that require no gradients and that no optimizer steps, as
                `ModelCheckpoint(trained_only=True)` does.

        Within a batch, an accumulation window or an epoch's end the save waits for its end, and returns False. A save of the
        weights waits for a window only.

        Raises:
            CheckpointError: on every rank.
            RuntimeError: nothing to save, or nothing that a run could resume from.
        """
        if storage_options is not None:
            raise ValueError("storage_options is not accepted. Put them into the fsspec URL or its configuration.")
        options = {"blocking": blocking, "overwrite": overwrite, "trained_only": trained_only}
        return save_checkpoint(self.run, str(filepath), weights_only=weights_only, export=export, **options)

    def export(
        self,
        path: str | os.PathLike[str],
        format: str = "huggingface",
        dtype: str | torch.dtype | None = None,
        max_shard_size: int | str = "5GB",
        model: str | None = None,
        overwrite: bool = False,
    ) -> bool:
        """Write the weights for other libraries, under every strategy. Collective: call on every rank.

        Every rank writes its part in place, so no rank needs memory for the whole model. A kill at any moment leaves the whole
        folder or nothing at the path. Within an accumulation window the export waits for its end, and returns False.

        Args:
            path: a local folder that does not exist. In the format "safetensors", a name with that suffix is one file.
            format: "huggingface" for the model of transformers in an attribute of the module, with its config, generation
                config and tokenizer, for `from_pretrained`. From a PeftModel only its active adapter is written.
                "safetensors" writes all weights of the module under their names in checkpoints.
            dtype: "bf16", "f16", "f32" or a torch.dtype to convert floating-point tensors to. None keeps a checkpoint's.
            max_shard_size: the most bytes of a file ("5GB", "512MiB"). A larger tensor has a file by itself.
            model: the attribute with the model, if the module has several.
            overwrite: replace an earlier export at the path, in one step, so that a script can be repeated.

        Raises:
            ValueError: an argument is not accepted, or the module has no such model.
            CheckpointError: on every rank, if the path exists or was not written.

        >>> trainer = tw.Trainer(max_epochs=1, enable_model_summary=False)
        >>> trainer.fit(module, loader)
        >>> trainer.export("exported", format="safetensors")
        True
        """
        settings = export_settings(format, dtype, max_shard_size, model, overwrite)
        return export_weights(self.run, absolute(path), settings)

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """Return a context that makes modules in the run's dtype and on its device, without values if `empty_init`."""
        with self.engine.precision.init_context(), torch.device("meta") if empty_init else self.engine.device:
            yield

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only, and flush, so that a file of stdout and stderr has their lines in order."""
        if self.is_global_zero:
            kwargs.setdefault("flush", True)
            bar = self.progress_bar_callback if self.run.running_call is not None else None
            (builtins.print if bar is None else bar.print)(*args, **kwargs)  # above a live bar, not through it

    def __reduce__(self) -> Any:
        raise TypeError("A Trainer cannot be copied or pickled. Make another Trainer with the same arguments.")

    def _parts(self, root: str) -> Parts:
        settings = self._trial_settings or self._settings
        return Parts(self, settings, self.engine, self.loggers, self.profiler, bool(settings.overfit), root)

    def _begin(self, request: Request) -> tuple[Parts, Choice]:
        """Return the parts of a call and its checkpoint, once the module has given its callbacks. Collective."""
        # First: configure_callbacks may return the ModelCheckpoint that ckpt_path='best' or 'last' is about. An evaluation of
        # the latest module keeps the callbacks of its fit, with their state.
        if request.call == "fit" or self.run.module is not request.module:
            returned = hook_of(request.module, "configure_callbacks", Module)()
            self.callbacks = with_the_modules(self.callbacks, returned)
        parts, callbacks = self._parts(self.run.root), self.checkpoint_callbacks
        saving = [type(each).__name__ for each in callbacks]
        refuse_unlike_arguments({**parts.settings.shared, "callbacks that save": saving}, "Trainer", self.engine.ranks)
        is_trial = request.call == "fit" and bool(self.fast_dev_run)
        places = (callbacks, self.loggers, self.run.root)
        search = CheckpointSearch(self.engine, *places, request.call, request.verify, is_trial=is_trial, say=self.print)
        return parts, search.choose(request.ckpt_path)

    def _measure(self, call: str, stage: str, given: tuple[Any, ...], verbose: bool) -> list[dict[str, float]]:
        def work(evaluation: Evaluation) -> list[dict[str, float]]:
            metrics = evaluate(evaluation)
            if verbose and any(metrics):
                tables.append(format_table(f"{call} metric", metrics, [name for name, _ in evaluation.loaders]))
            return metrics

        tables: list[str] = []
        metrics: list[dict[str, float]] = self._evaluate(call, stage, given, work, verbose=verbose)
        for table in tables:
            self.print(table)  # once the progress bar is closed
        return metrics

    def _evaluate(
        self, call: str, stage: str, given: tuple[Any, ...], work: Callable[[Evaluation], Any], **options: Any
    ) -> Any:
        """Return the result of `work` on an evaluation, surrounded with what it needs. Collective: call on every rank.

        `options` are the arguments of the call that a worker of it needs too.
        """
        self._refuse_nested(call)
        model, loaders, path, datamodule, verify = given
        path = self._ckpt_path if path is None else path
        request = read_evaluation(self.run, call, stage, model, loaders, path, datamodule, verify)
        module, engine, previous = request.module, self.engine, self.run
        parts, choice = self._begin(request)
        run = Run(parts, call, module, request.datamodule, choice, previous)
        if engine.num_workers:
            return self._call_workers(run, {"dataloaders": request.loaders, "verify": request.verify, **options})
        trained = list(engine.optimizers) if choice.path is None and previous.module is module else []
        # If the strategy drops optimizers together with other state, the module stays as the fit has left it.
        stays = bool(trained) and not engine.strategy.capabilities.keeps_optimizers
        self.run = run
        with self.run.opened(stays):
            # Before the strategy wraps the module, since on_load_checkpoint may still build layers.
            edit, checkpoint = edit_with_hooks(run, "on_load_checkpoint"), choice.checkpoint
            opened = None if checkpoint is None else engine.open(checkpoint, edit=edit)
            self.run.prepare_module(module)
            if not stays:
                engine.prepare_module(module, None)
            if opened is not None:
                restored = engine.load(opened, weights_only=True, strict=module.strict_loading is not False)
                restore_datamodule(run, restored.state)
            engine.take_seed()
            # setup() may have added the loaders' hook
            source = find_source(stage, request.loaders, request.datamodule, module, "dataloaders", call)
            result = work(Evaluation(run, module, stage, source))
        # The optimizers of the fit can still be saved, unless the module has other weights now.
        engine.optimizers = trained
        if not trained:
            self.run.update_trained(optimizers=[], prepared_optimizers=[], schedulers=[])
        return result

    def _call_workers(self, run: Run, options: dict[str, Any]) -> Any:
        """Make a call in processes started for it, and return its result."""
        self.run.stop.note_end(None)
        others = (run.call, run.choice.path, self.run.module is run.module, self.state.plain())
        try:
            result = call_remotely(self, run, call_in_worker, self._arguments, others, options)
        except KeyboardInterrupt as error:
            self.run.stop.note_end(error)
            raise
        self.run = run
        return result


def call_in_worker(
    folder: Path,
    model: Module,
    datamodule: DataModule | None,
    callbacks: list[Callback],
    loggers: list[Logger],
    profiler: Profiler,
    Trainer: dict[str, Any],
    others: tuple[Any, ...],
    **options: Any,
) -> dict[str, Any]:
    """Make a call of a Trainer on a rank of the job that was started for it, and return its changes. Collective."""
    from trainwright.trainer import trainer as home  # the argument hides the class

    call, path, is_known, state = others
    trainer = home.Trainer(**Trainer)
    trainer.callbacks, trainer._loggers, trainer.profiler = callbacks, loggers, profiler
    known, counters = model if is_known else None, Position.of_plain(state)
    trainer.run = Run(trainer._parts(trainer.run.root), "fit", known, None, Choice(), None, counters)
    result = getattr(trainer, call)(model, datamodule=datamodule, ckpt_path=path, **options)
    return changes(trainer, result, folder)
