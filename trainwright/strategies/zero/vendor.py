"""The private names of DeepSpeed that ZeRO needs, as read in DeepSpeed 0.19.8."""

from __future__ import annotations

import importlib
import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.tensors import Piece
from trainwright.distributed.environment import Environment, announce_local_rank, announced
from trainwright.precision.base import Precision
from trainwright.strategies.base import Clipping
from trainwright.strategies.zero.master_optimizer import MasterOptimizer, Shard

ADDED_LATER = ("pre_bwd_fn", "post_bwd_fn", "ds_grads_remaining", "applied_pre_backward_ref_cnt")
"""Attributes that the first forward and backward add to a module."""


def import_deepspeed(device: torch.device) -> Any:
    """Return the package, set to this device, with only its warnings shown, or raise ValueError for the device."""
    with announced(**({"DS_ACCELERATOR": "cpu"} if device.type == "cpu" else {})):
        import deepspeed

    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    logger.addFilter(_is_relevant)  # once, however often it is called
    # DeepSpeed calls collectives by deprecated names, which users cannot change.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    accelerator = deepspeed.accelerator.get_accelerator()
    if accelerator.device_name() != device.type:
        raise ValueError(
            f"strategy='deepspeed' on {device.type!r}: DeepSpeed does not support it, or this process has used DeepSpeed on "
            f"{accelerator.device_name()!r} before. Choose 'fsdp', start another process, or call "
            f"deepspeed.accelerator.set_accelerator with a class for {device.type!r} before you make the Trainer."
        )
    if device.type == "cpu":
        # DeepSpeed's CPU collectives need a compiler, and leak shared memory when killed.
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    else:
        keep_to_current_device(accelerator)
    return deepspeed


def keep_to_current_device(accelerator: Any) -> None:
    """Make DeepSpeed compute on the current device, not on device LOCAL_RANK, which counts processes."""
    name_of = accelerator.device_name
    if getattr(name_of, "keeps_to_current_device", False):
        return

    def device_name(index: Any = None) -> str:
        return str(accelerator.current_device_name() if isinstance(index, str) else name_of(index))

    device_name.keeps_to_current_device = True  # type: ignore[attr-defined]
    accelerator.device_name = device_name


def _is_relevant(record: logging.LogRecord) -> bool:
    known = ("untested optimizer", "learning rate from scheduler before it has started")
    return not any(text in record.getMessage() for text in known)


def make_engine(
    part: nn.Module,
    optimizer: MasterOptimizer | None,
    trained: Any,
    config: dict[str, Any],
    device: torch.device,
    check: Callable[[Optimizer], None],
) -> Any:
    """Return DeepSpeed's engine for a module with rank 0's weights. `check` may reject the config's optimizer. Collective."""
    from pydantic import ValidationError

    announce_local_rank(Environment.detect())
    deepspeed = import_deepspeed(device)
    is_stage_3 = config["zero_optimization"]["stage"] == 3
    whole = [p for p in part.parameters() if is_stage_3 and not hasattr(p, "ds_id")]
    scalars = [p for p in whole if p.dim() == 0]
    for parameter in whole:  # stage 3 shards the memory, whatever its strides
        parameter.data = parameter.data.contiguous().reshape(parameter.shape or (1,))
    try:
        with _patched(deepspeed.DeepSpeedEngine, check):
            engine = deepspeed.initialize(
                args=None if device.type == "cpu" else SimpleNamespace(device_rank=device.index),
                model=part,
                optimizer=optimizer,
                model_parameters=trained,
                config=config,
                dist_init_required=False,
            )[0]
    except ValidationError as error:
        raise ValueError(
            f"DeepSpeed rejects a setting of the strategy or its config: {error}. Its settings are listed at "
            "https://www.deepspeed.ai/docs/config-json."
        ) from error
    for parameter in scalars:
        parameter.ds_shape = torch.Size([])  # type: ignore[attr-defined]
        if parameter.numel() == 1:
            parameter.data = parameter.data.reshape(())
    return engine


def scale_losses(engine: Any) -> None:
    """Give an engine with float32 weights the loss scale of its float16 configuration."""
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

    engine.optimizer.loss_scaler = CreateLossScaler(
        dtype=torch.float16,
        static_loss_scale=engine.loss_scale(),
        dynamic_scaling=engine.dynamic_loss_scale(),
        dynamic_loss_args=engine.dynamic_loss_scale_args(),
    )
    engine.optimizer.dynamic_loss_scale = engine.optimizer.loss_scaler.dynamic


def refuse_plain_backward(zero: Any, is_expected: Callable[[], bool], name: str) -> None:
    """Raise RuntimeError if another backward than the strategy's reaches a ZeRO optimizer's parameters.

    Its hooks on the parameters would reduce them in a state of the last backward, or not at all.
    """
    asked_first = zero.should_refresh_expected_hook_count  # in all of those hooks

    def checked() -> bool:
        if not is_expected():
            raise RuntimeError(
                f"loss.backward() was called under strategy {name!r}, which scales losses and shards gradients in a separate "
                "backward. Call accelerator.backward(loss) in a loop, and self.manual_backward(loss) in a training_step."
            )
        return bool(asked_first())

    zero.should_refresh_expected_hook_count = checked


def refuse_other_dtype(sharded: Mapping[str, Any], precision: Precision) -> None:
    low = precision.param_dtype
    for name, parameter in sharded.items():
        is_low = parameter.ds_tensor.dtype in (torch.bfloat16, torch.float16)
        if parameter.ds_tensor.dtype != low and (low is not None or is_low):
            raise ValueError(
                f"parameter {name!r} was sharded by a run in a different precision, and this one is in {precision.name}. "
                "Continue in that precision, take the whole copy that tw.gather_module(module, all_ranks=True) returns, or "
                "create the module again and load a checkpoint."
            )


@contextmanager
def _patched(kind: Any, check: Callable[[Optimizer], None]) -> Iterator[None]:
    """Patch how engines of this class are created, within the context.

    DeepSpeed imports its optimizer Muon to see whether it was passed, and compiling Muon imports inductor: a second. It
    broadcasts parameters as bytes, which fails for 0-dim ones: they are rank 0's already. For windows summed in float32 it
    would choose another class in stage 1, with other masters.
    """
    make, choose = kind._configure_basic_optimizer, kind._do_optimizer_sanity_check

    def configure(engine: Any, parameters: Any) -> MasterOptimizer:
        optimizer = make(engine, parameters)
        check(optimizer)
        return MasterOptimizer(optimizer)

    def sanitize(engine: Any, optimizer: Any) -> Any:
        chosen = choose(engine, optimizer)
        return "zero_optimization" if engine.zero_optimization() else chosen

    patches = (
        (importlib.import_module("deepspeed.runtime.compiler"), "compile", lambda: lambda function: function),
        (kind, "_broadcast_model", lambda engine: None),
        (kind, "_configure_basic_optimizer", configure),
        (kind, "_do_optimizer_sanity_check", sanitize),
    )
    theirs = [getattr(owner, name) for owner, name, _ in patches]
    try:
        for owner, name, ours in patches:
            setattr(owner, name, ours)
        yield
    finally:
        for (owner, name, _), their in zip(patches, theirs, strict=True):
            setattr(owner, name, their)


def shards_of(zero: Any, stage: int, rank: int) -> Iterator[Shard]:
    """Yield this rank's shards of the parameters that a ZeRO optimizer steps."""
    if stage == 3:
        groups, flats = zero.fp16_groups, zero.fp32_partitioned_groups_flat
    else:
        groups, flats = zero.bit16_groups, zero.single_partition_of_fp32_groups
    for group, flat in zip(groups, flats, strict=True):
        for parameter in group:
            if stage == 3:
                _, offset, padded = zero.grad_position[zero.get_param_id(parameter)]
                start = min(padded * rank, parameter.ds_numel)
                numel = min(padded, parameter.ds_numel - start)
                yield Shard(parameter, flat, offset, start, numel, tuple(parameter.ds_shape), 0)
            elif parameter._hp_mapping is None:  # other ranks hold all of it
                yield Shard(parameter, flat, 0, 0, 0, tuple(parameter.shape), 0)
            else:
                mine = parameter._hp_mapping.lp_fragment_address
                there = parameter._hp_mapping.hp_fragment_address
                first = (rank * flat.numel() + there.start - mine.start) // flat.numel()
                yield Shard(parameter, flat, there.start, mine.start, mine.numel, tuple(parameter.shape), first)


def partition_piece(name: str, parameter: Any, rank: int) -> Piece:
    """Return this rank's shard of a stage 3 parameter without a master."""
    start = min(parameter.ds_tensor.numel() * rank, parameter.ds_numel)
    shard = parameter.ds_tensor.detach()[: min(parameter.ds_tensor.numel(), parameter.ds_numel - start)]
    return Piece(name, tuple(parameter.ds_shape), start, shard, rank)


def refresh(parameters: Iterable[Any]) -> None:
    """Gather parameters without a master again, after a load has written their partitions."""
    for parameter in parameters:
        if hasattr(parameter, "ds_tensor") and parameter.ds_status.name == "AVAILABLE":
            parameter.partition(has_been_updated=False)
            parameter.all_gather()


def refresh_from_masters(zero: Any, stage: int) -> None:
    """Update the weights from their float32 masters. Collective."""
    if stage < 3:
        zero.update_lp_params()
        return
    zero._partition_all_parameters()
    for group in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(group)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def fill_missing_gradients(zero: Any, stage: int) -> None:
    """Allow a step without a backward, with zero gradients, although DeepSpeed assumes that there was one."""
    if stage == 3:
        partitions = zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        for index, group in enumerate(zero.fp16_groups if not zero.offload_optimizer else []):
            if zero.averaged_gradients.get(index) is None:
                zero.averaged_gradients[index] = [partitions[parameter.ds_id] for parameter in group]
        return
    if stage == 1:
        zero.setup_buckets()  # which the backward creates, and the step reduces through
        return
    for index, owned in enumerate(zero.params_in_partition if not zero.cpu_offload else []):
        if zero._use_compact_grad_partition_buffer(index):
            continue  # its step makes the missing gradients
        if zero.all_grad_tensors.get(index) is None:
            zero.all_grad_tensors[index] = zero.get_all_grad_tensors(owned, zero.gradient_accumulation_dtype)


def finalize_gradients(engine: Any, stage: int) -> None:
    """Average the gradients of the window over the ranks, as the step would do first. Collective."""
    zero = engine.optimizer
    fill_missing_gradients(zero, stage)
    if stage == 1:
        engine._running_engine_step = True  # DeepSpeed only reduces at the boundary of a window
        engine.allreduce_gradients()
        engine._running_engine_step = False
    elif stage == 2:
        # The step does this first: it takes views of this rank's shard, so that clipping them lasts.
        kept = dict(zero.all_grad_tensors)
        zero.finalize_gradient_accumulation_boundary()
        zero.all_grad_tensors = kept


def clip_gradients(zero: Any, clipping: Clipping, device: torch.device) -> Tensor | None:
    """Clip this rank's shard of the finalized gradients, in the views that the step uses. Return the total norm. Collective."""
    gradients = [each for group in zero.averaged_gradients.values() if group is not None for each in group]
    loss_scale = float(zero.loss_scale)
    for gradient in gradients:
        gradient.mul_(clipping.scale)
        if clipping.value is not None:
            gradient.clamp_(-clipping.value * loss_scale, clipping.value * loss_scale)
    if clipping.norm is None:
        return None
    total = sum((each.float().square().sum() for each in gradients), torch.zeros((), device=device))
    dist.all_reduce(total)
    total = torch.sqrt(total) / loss_scale
    for gradient in gradients:
        gradient.mul_((clipping.norm / (total + 1e-6)).clamp(max=1.0))
    return total


def release_module(module: nn.Module) -> None:
    """Remove a module tree from stage 3's process-wide stack of running forwards and caches, which would keep it in memory."""
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    own, stack = set(module.modules()), parameter_offload.FWD_MODULE_STACK
    stack[:] = [each for each in stack if each not in own]
    for method in filter(inspect.isfunction, vars(PartitionedParameterCoordinator).values()):
        for wrapped in inspect.getclosurevars(method).nonlocals.values():
            if hasattr(wrapped, "cache_clear"):
                wrapped.cache_clear()


def release_parameters(part: Any) -> None:
    """Shard the parameters that a failed forward or backward has left gathered, because no later engine could."""
    in_flight = getattr(part, "ds_inflight_param_registry", {})
    for parameter in (p for p in part.parameters() if hasattr(p, "ds_active_sub_modules")):
        if (gathering := in_flight.pop(parameter, None)) is not None:
            gathering.wait()
        parameter.ds_active_sub_modules.clear()
        if not parameter.ds_persist and parameter.ds_status.name == "AVAILABLE":
            parameter.partition()


def end_training(engines: Iterable[Any]) -> None:
    """Remove stage 3 engines' buffers and gradient hooks, which outlive the modules. The modules can still be called."""
    for engine in dict.fromkeys(engines):
        release_module(engine.module)
        if hasattr(engine.optimizer, "ipg_buckets"):  # an engine for evaluation has no optimizer
            for hook in (*engine.optimizer._grad_acc_hooks, *engine.optimizer._leaf_module_hooks):
                hook.remove()
            engine.optimizer.ipg_buckets.clear()


def destroy(engines: Iterable[Any]) -> None:
    for engine in dict.fromkeys(engines):
        engine.destroy()
        # An engine destroys itself again when it is collected, and would clear the attributes of the module's next engine.
        engine.destroy = lambda: None
        release_module(engine.module)
        release_parameters(engine.module)


def gather_whole(parameter: Any) -> Tensor:
    """Return the whole value of a stage 3 parameter. Collective."""
    part = parameter.ds_tensor.detach().to(parameter.device)
    gathered: Tensor = part.new_empty(part.numel() * dist.get_world_size(parameter.ds_process_group))
    dist.all_gather_into_tensor(gathered, part.contiguous(), group=parameter.ds_process_group)
    return gathered[: parameter.ds_numel].view(parameter.ds_shape)


def versions(parameter: Any) -> Any:
    """Return the versions of a stage 3 parameter and of its shard, or None for another parameter."""
    return (parameter._version, parameter.ds_tensor._version) if hasattr(parameter, "ds_tensor") else None


def trained_groups(zero: Any, stage: int) -> Any:
    """Return the groups of parameters that a ZeRO optimizer steps."""
    return zero.fp16_groups if stage == 3 else zero.bit16_groups


def flat_weights(zero: Any, stage: int, rank: int) -> list[tuple[Any, Any]]:
    """Return this rank's flat weights with their masters. `zero` may be a substitute without any."""
    if stage < 3:
        parts = [group[rank] for group in zero.parallel_partitioned_bit16_groups]
        return list(zip(parts, zero.single_partition_of_fp32_groups, strict=True))
    parts = getattr(zero, "fp16_partitioned_groups_flat", [])
    return list(zip(parts, getattr(zero, "fp32_partitioned_groups_flat", []), strict=True))


def replace_reduction(zero: Any, reduce: Callable[..., None], finish: Callable[[], None]) -> tuple[Any, Any]:
    """Replace the calls that take a gradient and that end a backward, and return DeepSpeed's."""
    theirs = zero.reduce_independent_p_g_buckets_and_remove_grads, zero.independent_gradient_partition_epilogue
    zero.reduce_independent_p_g_buckets_and_remove_grads, zero.independent_gradient_partition_epilogue = reduce, finish
    return theirs


def fill_gradient(zero: Any, parameter: Any) -> None:
    """Set a parameter's gradient to zeros."""
    if getattr(zero, "use_grad_accum_attribute", False):
        parameter.grad_accum = torch.zeros_like(parameter, dtype=zero.gradient_accumulation_dtype)
    else:
        parameter.grad = torch.zeros_like(parameter)


def on_all_gradients(zero: Any, hook: Callable[[], None]) -> None:
    """Call a hook, in place of the engine's, when DeepSpeed has counted all gradients of a backward."""
    zero.unregister_grad_acc_post_hooks()
    zero.register_grad_acc_post_hook(hook)


def begin_backward(engine: Any) -> None:
    engine.optimizer.clear_backward_seen_flag()
    engine._backward_prologue()


def finish_backward(engine: Any) -> None:
    """End a backward of an engine. Collective."""
    engine._backward_post_hook()


def reset_depth(engine: Any) -> None:
    """Forget backwards that ran no epilogue, because no loss has reached the engine. The next forward's would run it."""
    engine.optimizer._backward_hook_state.backward_active_depth = 0


def discard_gradients(zero: Any) -> None:
    zero.zero_grad()
    if hasattr(zero, "all_grad_tensors"):  # stages 1 and 2
        zero.all_grad_tensors = dict.fromkeys(zero.all_grad_tensors)
        zero.averaged_gradients = dict.fromkeys(zero.averaged_gradients)
    else:
        # Otherwise a parameter that is unused from now on keeps its last gradient.
        for buffer in zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition.values():
            buffer.zero_()


def step_engine(engine: Any, largest_norm: float, reduces: bool) -> tuple[Any, bool]:
    """Clip by norm and step. Return the norm (None if it was not clipped) and whether the step was skipped. Collective."""
    zero = engine.optimizer
    zero.clip_grad = largest_norm
    # The flag means "reduce in step()": finalized gradients are averages, and would be divided a second time.
    engine.enable_backward_allreduce = reduces
    engine.step()
    engine.enable_backward_allreduce = True
    return zero._global_grad_norm if zero.clip_grad else None, bool(zero.overflow)


def scale_state(scaler: Any) -> dict[str, Any]:
    """Return a dynamic loss scale under the names of torch's GradScaler."""
    return {
        "scale": float(scaler.cur_scale),
        "growth_factor": float(scaler.scale_factor),
        "backoff_factor": 1.0 / float(scaler.scale_factor),
        "growth_interval": int(scaler.scale_window),
        "_growth_tracker": int(scaler.cur_iter - scaler.last_overflow_iter - 1),
        "iterations": int(scaler.cur_iter),
        "hysteresis": int(scaler.cur_hysteresis),
    }


def load_scale(scaler: Any, state: dict[str, Any]) -> None:
    scaler.cur_scale = float(state["scale"])
    if getattr(scaler, "dynamic", False):
        scaler.cur_iter = int(state.get("iterations", state["_growth_tracker"]))
        scaler.last_overflow_iter = scaler.cur_iter - int(state["_growth_tracker"]) - 1
        scaler.cur_hysteresis = int(state.get("hysteresis", scaler.cur_hysteresis))
