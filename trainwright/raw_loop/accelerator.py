"""The Accelerator: the Engine's parts for a training loop that the user writes."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import profile
from torch.utils.hooks import RemovableHandle

from trainwright.arguments import check_flags, refuse_unknown, refuses_unknown
from trainwright.checkpoint.reader import Verify
from trainwright.checkpoint.weight_files import size_of
from trainwright.data.seeding import rng_state, set_rng_state
from trainwright.duration import seconds_of
from trainwright.engine.engine import Engine
from trainwright.engine.prepared import PreparedOptimizer, PreparedScheduler
from trainwright.engine.prepared_loader import PreparedLoader
from trainwright.engine.script_settings import refuse_unlike_arguments
from trainwright.faults.nan_policy import CHECK_EVERY, NanGuard, RunParts
from trainwright.overrides import overridden
from trainwright.precision import Precision
from trainwright.raw_loop.bare_models import extract_model_from_parallel
from trainwright.raw_loop.batch_size import release_memory
from trainwright.raw_loop.dataloaders import DataLoaderConfiguration, loader_options
from trainwright.raw_loop.gathering import Collectives
from trainwright.raw_loop.job_states import AcceleratorState, GradientState
from trainwright.raw_loop.loop_objects import Preparation, PreparationOptions, check_kind
from trainwright.raw_loop.loop_settings import REPLACED, LoopSettings, word_for
from trainwright.raw_loop.loss_check import LossCheck
from trainwright.raw_loop.model_files import load_object, save_model, save_object, state_dict_of
from trainwright.raw_loop.options import AutocastKwargs, ProfileKwargs, profiled
from trainwright.raw_loop.plugins import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    check_length,
)
from trainwright.raw_loop.project import ProjectConfiguration, chosen_project
from trainwright.raw_loop.saved_states import SavedStates, refuse_load_options, refuse_pickle, refuse_save_options
from trainwright.raw_loop.tracking import Options, Tracker, Trackers, chosen_loggers
from trainwright.strategies import Strategy
from trainwright.strategies.base import Optimization, StepResult


class Accelerator(Collectives):
    """Strategy, precision, data sharding and checkpoints for a training loop that you write.

    Collective: create it on every rank.

    Args:
        mixed_precision: "no", "fp16" or "bf16".
        gradient_accumulation_steps: batches per optimizer step, inside `accumulate`.
        cpu: the same as accelerator="cpu".
        deepspeed_plugin, fsdp_plugin: a strategy with its options, instead of strategy=.
        gradient_accumulation_plugin: further options of the accumulation.
        step_scheduler_with_optimizer: False steps a prepared scheduler at every call of its step.
        kwargs_handlers: options of parts: AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs,
            InitProcessGroupKwargs, ProfileKwargs.
        dynamo_backend: compile prepared models with this backend of torch.compile, such as "inductor".
        device_placement: whether prepared loaders move their batches to the device. Models are always on it.
        split_batches: whether a loader's batch is divided over the ranks. See DataLoaderConfiguration.
        dataloader_config: further options of loaders.
        rng_types: generators that all ranks set to rank 0's state at the start of an epoch: "torch", or the kind of
            accelerator, such as "cuda". The order of the data needs none of them.
        fused_optimizers: run optimizers fused if torch can and their `fused` and `foreach` were not set.
        scale_schedulers: step prepared schedulers once for each process at each optimizer step, as Accelerate does; with
            split_batches once.
        accelerator: the kind of device, as for the Trainer: "auto" (the accelerator that torch finds, else the CPU), "gpu",
            "cpu", "cuda", "mps", "xpu", or the name of a backend that another package registers.
        devices: number of processes on this node, one per device, or a list of devices. "auto": the launcher's count if
            launched, otherwise every device of the accelerator, otherwise 1.
        precision: any precision of the Trainer, instead of mixed_precision.
        nan_policy: "raise" ends the loop at a loss or weights that are not finite, "skip" skips such steps.
        accumulate_by: "tokens" gives all tokens of a window the same weight: pass the sum of their losses and
            `num_tokens` to `backward`.
        strategy, num_nodes, hang_timeout, activation_checkpointing: as for the Trainer.
        log_with: "csv", "tensorboard", "wandb", "mlflow", "all" for all that can be used here, a Logger, or a
            list of these.
        project_dir: the folder of numbered checkpoints (`project_dir/checkpoints`) and of the logs, a path or an fsspec URL.
        project_config: the same folders, and how many checkpoints are kept.

    Raises:
        ValueError, TypeError: a setting is wrong, before any process is started, or differs between ranks.
        RuntimeError: this machine does not have the accelerator.
        ImportError: the package of a logger is not installed.
        LaunchError: the processes of the job could not be started.

    >>> accelerator = tw.Accelerator(gradient_accumulation_steps=2)
    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    >>> for inputs, targets in loader:
    ...     with accelerator.accumulate(model):
    ...         accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    """

    def __init__(
        self,
        *,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        deepspeed_plugin: DeepSpeedPlugin | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: Any = None,
        device_placement: bool = True,
        split_batches: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        rng_types: Sequence[str] | None = None,
        fused_optimizers: bool = True,
        scale_schedulers: bool = False,
        accelerator: str = "auto",
        devices: int | str | list[int] = "auto",
        strategy: str | Strategy = "auto",
        precision: str | int | Precision | None = None,
        num_nodes: int = 1,
        nan_policy: str | None = None,
        accumulate_by: str = "batches",
        activation_checkpointing: Any = False,
        hang_timeout: float | timedelta | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown("Accelerator", unknown, [*inspect.signature(Accelerator).parameters][:-1], REPLACED)
        check_flags(cpu=cpu, step_scheduler_with_optimizer=step_scheduler_with_optimizer)
        check_flags(fused_optimizers=fused_optimizers, scale_schedulers=scale_schedulers)
        # Every setting is checked before the Engine is made, which may start the job's processes.
        project, loggers = chosen_project(project_dir, project_config), chosen_loggers(log_with)
        settings = LoopSettings(
            mixed_precision, precision, cpu, accelerator, strategy, deepspeed_plugin, fsdp_plugin, gradient_accumulation_steps,
            gradient_accumulation_plugin, kwargs_handlers, dynamo_backend, nan_policy,
            accumulate_by, activation_checkpointing,
        )  # fmt: skip
        loaders = loader_options(dataloader_config, split_batches, rng_types, device_placement)
        engine = Engine(
            devices=devices,
            strategy=settings.chosen_strategy,
            precision=settings.chosen_precision,
            accelerator=settings.device_type,
            timeout_seconds=seconds_of(hang_timeout, "hang_timeout") or settings.timeout_seconds,
            num_nodes=num_nodes,
        )
        super().__init__(engine, project.logging_dir)
        steps = settings.accumulation.num_steps or 1
        steps = overridden("Accelerator", "gradient_accumulation_steps", steps, is_open=steps == 1)
        self._optimization = engine.strategy.resolve(Optimization(accumulate=steps, clip_norm=settings.clip_norm))
        """Accumulation and clipping. A strategy's configuration overrides the arguments."""
        self._autocast, self._profiling = settings.autocast, settings.profiling
        if settings.compiler is not None and not engine.strategy.capabilities.takes_compile:
            raise ValueError(
                f"dynamo_backend={settings.compiler!r} is not accepted with strategy {engine.strategy.name!r}, whose hooks "
                "torch.compile cannot trace. Leave it out, or choose another strategy."
            )
        options = PreparationOptions(
            fused_optimizers,
            settings.compiler,
            settings.accumulate_by == "tokens",
            settings.checkpointing,
            step_scheduler_with_optimizer,
            engine.num_data_ranks if scale_schedulers and not loaders.configuration.split_batches else 1,
            loaders,
        )
        self._new_preparation = partial(Preparation, engine, self._optimization, settings.accumulation, options)
        self._preparations = self._new_preparation()
        self._trackers = Trackers(engine.ranks, loggers, project.logging_dir)
        self._states = SavedStates(engine, project, self._trackers)
        parts = RunParts(lambda: self.step_count, self.logging_dir or self.project_dir or ".", rng_state, set_rng_state)
        NanGuard(engine, nan_policy, parts, CHECK_EVERY).install()
        arguments = {field.name: getattr(settings, field.name) for field in fields(settings)}
        arguments |= {"gradient_accumulation_steps": steps, "split_batches": loaders.configuration.split_batches}
        refuse_unlike_arguments(arguments, "Accelerator", engine.ranks)
        self._weighs_rounds = engine.num_data_ranks > 1  # one process has no uneven rounds
        self._loss_check = LossCheck(engine, self._preparations)

    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Return the models, optimizers, loaders and schedulers, prepared by the strategy, in the same order.

        Pass the models and their optimizers in one call. An object that is already prepared, and None, are returned
        unchanged. Collective: call on every rank.

        Raises:
            TypeError: an object of another kind, or none at all.
            ValueError: an optimizer whose parameters belong to no prepared model, or were replaced before it was prepared.
        """
        if not objects:
            raise TypeError("prepare was given nothing. Pass the loop's models, optimizers, loaders and schedulers.")
        prepared = self._preparations.prepare(objects, device_placement)
        return prepared[0] if len(prepared) == 1 else prepared

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the module that was given to `prepare`.

        Its forward was not changed, so `keep_fp32_wrapper` has no effect. With keep_torch_compile=False a module that
        torch.compile returned is unwrapped too.
        """
        return extract_model_from_parallel(model, keep_torch_compile=keep_torch_compile)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return a model's whole state_dict, under the names of the user's module whether or not `unwrap` is set.

        Under fsdp and ZeRO stage 3 it is a copy in host memory on rank 0, and empty on the others. Otherwise every rank has
        its own tensors. DeepSpeed's are in the precision that it computes in. Collective: call on every rank.

        Raises:
            RuntimeError: on every rank under fsdp and ZeRO stage 3. The ranks have used different parameters in a step.
        """
        return state_dict_of(model, self.engine.strategy)

    @refuses_unknown
    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights as safetensors files, which safetensors and from_pretrained of transformers read.

        One file is model.safetensors. Several have an index, model.safetensors.index.json. Of tied weights the first name is
        stored, and the others are in the file's metadata. Files of an earlier save_model are replaced. Collective: call on
        every rank.

        Args:
            max_shard_size: the most bytes of a file ("5GB", "512MiB"). A larger tensor has a file by itself.
            safe_serialization: True. No pickle is written.

        Raises:
            CheckpointError: on every rank, if they were not written.
            ValueError: max_shard_size is not a size.
            RuntimeError: as `get_state_dict`.
        """
        refuse_pickle("save_model", safe_serialization)
        save_model(model, os.fspath(save_directory), size_of(max_shard_size), self.engine.strategy, self.engine.ranks)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = True) -> None:
        """Write plain data and tensors into one file, new or replaced, on rank 0 (with save_on_each_node, on every node).

        A dict of tensors, or data with tensors, becomes a safetensors file whatever its name. Data without tensors becomes
        JSON. `load` reads both.

        Raises:
            TypeError: the object holds something else.
            CheckpointError: the file was not written.
        """
        refuse_pickle("save", safe_serialization)
        on_each = self.project_configuration.save_on_each_node
        save_object(obj, f, is_writer=self.is_local_main_process if on_each else self.is_main_process)

    def load(self, f: str | os.PathLike[str]) -> Any:
        """Return the data of `save`, a dict in its order, or the tensors of any safetensors file, in host memory.

        Raises:
            CheckpointError: the file is missing, damaged or of another kind.
        """
        return load_object(f)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return the context of one batch, in which optimizers and schedulers step only at the end of a window.

        A window ends after `gradient_accumulation_steps` batches, and at the end of the loader. If the loop leaves the loader
        before that, the window's gradients are dropped and the next batch begins a new one. A set of models passed here
        has its own windows.
        """
        return self._preparations.windows.of(models)

    def backward(self, loss: Tensor, *, num_tokens: int | Tensor | None = None, **options: Any) -> None:
        """Run backward on a loss, divided by the length of its window, and weighted by its samples in an uneven last round.

        With accumulate_by="tokens" it is the sum of the losses of `num_tokens` tokens, and the step has the gradient of the
        mean over all tokens of the window. Tensor.backward gets the other keyword arguments.

        Raises:
            TypeError, ValueError: something else than the loss of a prepared model, and, where it matters, of one whose
                optimizer was prepared.
            RuntimeError: nothing was prepared.
        """
        self._loss_check.check(loss, options)  # before the loss is counted as sent backward
        scaled = self._preparations.windows.scale_loss(loss, num_tokens, weighs_round=self._weighs_rounds)
        self.engine.backward(scaled, **options)

    def step(
        self, optimizer: Optimizer, *, max_norm: float | None = None, clip_value: float | None = None
    ) -> StepResult | None:
        """Clip, if given a limit, and step a prepared optimizer. Return None before the end of its window."""
        prepared = self._preparations.optimizer_of(optimizer)
        return prepared.step_clipped(max_norm, clip_value)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor | None:
        """Clip the total norm of a prepared optimizer's gradients. Return the norm, or None before the window's end.

        Raises:
            ValueError: no single prepared optimizer steps the parameters, or norm_type is not 2.
        """
        if norm_type != 2:
            raise ValueError(f"norm_type={norm_type!r} is not accepted: strategies that shard gradients add squares.")
        return self._clip(parameters, max_norm, None)

    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clip the elements of a prepared optimizer's gradients, at the window's end."""
        self._clip(parameters, None, clip_value)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return the context that forwards run in, for code outside the model. The argument replaces the constructor's."""
        options = self._autocast if autocast_handler is None else autocast_handler
        inner = self._loss_check.forward_context(options.enabled)
        if inner is None or options == AutocastKwargs():
            return inner or nullcontext()
        dtype = self.engine.precision.autocast_dtype
        if dtype is None and options.enabled:
            return inner  # a precision without autocast, which has no cache
        return torch.autocast(self.device.type, dtype, enabled=options.enabled, cache_enabled=options.cache_enabled)

    @contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Iterator[None]:
        """Accumulate gradients within the block without averaging them over the ranks.

        It holds for all prepared models: `model` has no effect.
        """
        self.engine.sync_gradients(False)
        try:
            yield
        finally:
            self.engine.sync_gradients(True)

    def trigger_sync_in_backward(self, model: nn.Module | None = None) -> None:
        """Average the gradients over the ranks in the next backward, though its forward ran in `no_sync`."""
        self.engine.sync_gradients(True)

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Divide the gradients by the loss scale before the step, of one prepared optimizer, of several, or of all."""
        given = self._preparations.optimizers if optimizer is None else optimizer
        for each in [given] if isinstance(given, Optimizer) else given:
            prepared = self._preparations.optimizer_of(each)
            if self.sync_gradients:
                # Without a limit this only averages and unscales the gradients.
                prepared.clip(None, None)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Return one prepared model; with evaluation_mode it will not be trained. Collective: call on every rank."""
        check_kind("prepare_model", model, "module")
        if not evaluation_mode or self._preparations.of(model) is not None:
            prepared: nn.Module = self.prepare(model)
            return prepared
        return self._preparations.add_module(model, is_trained=False)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> PreparedOptimizer:
        """Return one prepared optimizer. Prepare its models first. Collective: call on every rank."""
        check_kind("prepare_optimizer", optimizer, "optimizer")
        prepared: PreparedOptimizer = self.prepare(optimizer)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Return one prepared scheduler. Prepare its optimizer first."""
        check_kind("prepare_scheduler", scheduler, "scheduler")
        prepared: PreparedScheduler = self.prepare(scheduler)
        return prepared

    def prepare_data_loader(self, data_loader: Any, device_placement: bool | None = None) -> PreparedLoader:
        """Return one prepared DataLoader. `device_placement` replaces the constructor's. Collective: call on every rank."""
        check_kind("prepare_data_loader", data_loader, "loader")
        prepared: PreparedLoader = self.prepare(data_loader, device_placement=[device_placement])
        return prepared

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[profile]:
        """Record the block with torch.profiler and yield that. The argument replaces the options of kwargs_handlers.

        Every rank records, and writes its traces if there is an output_trace_dir. Collective then: call on every rank.
        """
        options = self._profiling if profile_handler is None else profile_handler
        with profiled(options) as recorder:
            yield recorder
        if options.output_trace_dir is not None:
            self.wait_for_everyone()  # so that all traces are there

    def free_memory(self, *objects: Any) -> Any:
        """Release all prepared objects, collect garbage, and return a None per argument, to assign to its variable.

        Objects of `register_for_checkpointing` are dropped too, with a warning. Collective: call on every rank.
        """
        self.engine.close()
        self._states.drop_objects()
        self._preparations = self._new_preparation()
        self._loss_check = LossCheck(self.engine, self._preparations)
        return release_memory(*objects)

    clear = free_memory

    @property
    def state(self) -> AcceleratorState:
        """Return a view of the processes and the precision."""
        return AcceleratorState(self)

    @property
    def gradient_state(self) -> GradientState:
        """Return a view of the accumulation windows and the loaders."""
        return GradientState(self._preparations.windows, self._preparations.iterations)

    @property
    def step_count(self) -> int:
        """Return the number of optimizer steps, summed over the optimizers. Skipped steps count."""
        return self._preparations.step_count

    @property
    def mixed_precision(self) -> str:
        """Return "no", "fp16" or "bf16", or the name of another precision."""
        return word_for(self.engine.precision)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Return the loss scaler of fp16, or None under any other precision."""
        return getattr(self.engine.precision, "scaler", None)

    @property
    def sync_gradients(self) -> bool:
        """Return whether the current batch ends its accumulation window."""
        return self._preparations.windows.current.is_at_end

    @property
    def gradient_accumulation_steps(self) -> int:
        """Return the batches per optimizer step, inside `accumulate`. A new value applies from the next window on."""
        return self._preparations.windows.usual_length

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, length: int) -> None:
        check_length(length, "gradient_accumulation_steps")
        self._preparations.windows.set_length(self.engine.strategy.resolve(Optimization(accumulate=length)).accumulate)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Return whether an optimizer's latest step was skipped because its gradients were not finite."""
        return any(optimizer.step_was_skipped for optimizer in self._preparations.optimizers)

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Return the folders of the project, and how its checkpoints are numbered and kept."""
        return self._states.numbered.config

    @property
    def project_dir(self) -> str | None:
        """Return the project's folder, or None if there is none."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Return the folder of the project's logs, or None if there is none."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """Return the number of the next numbered checkpoint, unless the folder has that one already."""
        return self.project_configuration.iteration

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        overwrite: bool = True,
        trained_only: bool = False,
        **unknown: Any,
    ) -> str:
        """Write a checkpoint of everything that was prepared or registered, in the Trainer's format. Return its path.

        Without a path it is the next of `project_dir/checkpoints/checkpoint_0`, `checkpoint_1`, .., also after a resume.
        `ProjectConfiguration(total_limit=...)` removes the oldest complete ones once it is committed, but not one that was
        loaded by its path. Collective: call on every rank.

        Args:
            safe_serialization: True. A checkpoint holds no pickle.
            blocking: False returns once all is copied to host memory, and a thread writes: see `finish_save`.
            overwrite: replace an earlier checkpoint at that path, once the new one is complete. Other files in the folder
                stay. False rejects a path that exists.
            trained_only: omit frozen parameters, as in `ModelCheckpoint`.

        Raises:
            CheckpointError: on every rank, if it was not written, something at the path cannot be replaced (a file, a link, a
                damaged checkpoint, anything in an object store), or another run uses the project's checkpoints.
            ValueError: no path, and no project.
            RuntimeError: within an accumulation window, since checkpoints hold no gradients.
        """
        refuse_save_options(unknown)
        refuse_pickle("save_state", safe_serialization)
        return self._states.save(self._preparations, output_dir, blocking, overwrite, trained_only)

    def finish_save(self) -> None:
        """Wait for a `save_state(..., blocking=False)`, as later saves and loads do too. Collective: call on every rank.

        Raises:
            CheckpointError: on every rank, if that save failed. Earlier checkpoints are unchanged.
        """
        self._states.numbered.finish()

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        verify: Verify = "full",
        *,
        weights_only: bool = False,
        strict: bool = True,
        fresh: str | Sequence[str] = (),
        **unknown: Any,
    ) -> None:
        """Resume from a checkpoint of `save_state`, or of a Trainer with the same model, optimizers and schedulers.

        The next iteration of each loader resumes at its saved position. A Trainer's checkpoint has one for the first loader
        only. If it is the newest of its folder, loggers that have not written yet continue in its run. Collective: call on
        every rank.

        Args:
            input_dir: the checkpoint, of any strategy and number of processes, by default the newest complete one of
                `project_dir/checkpoints`. Damaged ones are skipped with a warning.
            verify: how the files are checked first: "full" (every digest), "size", or "off".
            weights_only: load the model's weights and nothing else, also from an imported checkpoint.
            strict: False skips tensors of the model that only one side has.
            fresh: settings that are the script's and not the checkpoint's, as in `Trainer.fit`.

        Raises:
            CheckpointError: no checkpoint, a damaged one, or one of another model, optimizer or scheduler.
            RuntimeError: nothing was prepared.
            ValueError: no path and no project, or another name in `fresh`.
        """
        refuse_load_options(unknown)
        self._states.load(self._preparations, input_dir, verify, weights_only=weights_only, strict=strict, fresh=fresh)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load the state of these objects in checkpoints, too, as rank 0's `state_dict` returns it.

        Raises:
            TypeError: an object without state_dict and load_state_dict.
            CheckpointError: a state that holds more than plain data and tensors.
        """
        self._states.register(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` on every rank before every `save_state`. The handle's remove() ends that.

        Its files in output_dir become a part of the checkpoint, verified and removed with it: a folder with another
        name until the commit. `weights` are the models' state_dicts, to read, if every rank has them whole. Otherwise the list
        is empty. The checkpoint is complete in any case: a model that a hook removes from the two lists is stored all the same.
        """
        return self._states.add_save_hook(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, input_dir)` on every rank in every `load_state`, once the checkpoint was verified.

        All models are loaded after it, also if it removes one from the list. The handle's remove() ends that.
        """
        return self._states.add_load_hook(hook)

    @property
    def trackers(self) -> list[Tracker]:
        """Return the loggers of `init_trackers`, on the ranks that have called it."""
        return self._trackers.all

    @refuses_unknown
    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Options | None = None) -> None:
        """Make the loggers of log_with. Call it on every rank, or only on rank 0.

        Rank 0 writes, into `logging_dir/project_name/version_n` for a logger of a name. The loggers start when they are first
        used, so that `load_state` can let them continue in the checkpoint's run.

        Args:
            config: hyper-parameters to record, a dict or a Namespace.
            init_kwargs: by a logger's name, further arguments of its class.

        Raises:
            ValueError, TypeError: an argument is wrong.
            RuntimeError: it was called before.
        """
        self._trackers.init(project_name, config, init_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the logger of that name, or with `unwrap` its `experiment`. Its calls do nothing on other ranks than 0.

        Raises:
            ValueError: no logger has the name.
            RuntimeError: before `init_trackers`, or after `end_training`.
        """
        return self._trackers.get(name, unwrap)

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Options | None = None) -> None:
        """Write a row of numbers, which may be tensors of one element, with all loggers. Only rank 0 writes.

        Texts are written by loggers that can (TensorBoard, Weights & Biases, MLflow), and otherwise skipped with a warning.

        Args:
            step: by default `step_count`.
            log_kwargs: by a logger's name, further arguments of its `log_metrics`.

        Raises:
            RuntimeError: on rank 0, before `init_trackers`, or after `end_training`.
            TypeError: a value that is neither a number nor a text.
        """
        self._trackers.log(values, self.step_count if step is None else step, log_kwargs)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Options | None = None) -> None:
        """Write images with the loggers that can (TensorBoard, Weights & Biases, MLflow). `log` describes the arguments.

        A value is an array, a tensor or a list of images.
        """
        self._trackers.log_images(values, self.step_count if step is None else step, log_kwargs)

    def end_training(self) -> None:
        """Wait for a save in flight, and close the loggers. Collective: call on every rank.

        Raises:
            CheckpointError: on every rank, if the save failed. The loggers are closed.
            RuntimeError: as `get_state_dict`. The loggers are closed.
        """
        try:
            self._states.end()
        finally:
            self._trackers.end()

    def _ranks_with_samples(self, loader: Any) -> Sequence[bool] | None:
        return self._preparations.ranks_with_samples(loader)

    def _clip(self, parameters: Iterable[Tensor], norm: float | None, value: float | None) -> Tensor | None:
        if not self.sync_gradients:
            return None
        prepared = self._preparations.optimizer_that_steps(parameters)
        return prepared.clip(norm, value)
