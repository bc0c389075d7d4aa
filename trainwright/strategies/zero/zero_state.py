"""ZeRO's state: this rank's ranges of masters, optimizer state and gradients, flat inside DeepSpeed's optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.checkpoint.contents import placed
from trainwright.checkpoint.tensors import Piece, TensorEntry
from trainwright.rank_zero import rank_zero_warn
from trainwright.strategies.base import Clipping, by_parameter, new_state
from trainwright.strategies.zero.master_optimizer import MasterOptimizer, Shard


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


def optimizer_pieces(master: MasterOptimizer, names: Mapping[Tensor, str], rank: int) -> Iterator[Piece]:
    """Yield this rank's shard of the user's optimizer state."""
    for parameter, view in master.views.items():
        for key, value in master.own.state.get(view.tensor, {}).items():
            name = f"{names[parameter]}/{key}"
            if isinstance(value, Tensor) and view.is_part(key, value):
                yield Piece(name, view.shard.shape, view.shard.start, value.detach(), rank)
            elif isinstance(value, Tensor):  # ranks without a shard of the parameter have none
                yield Piece(name, tuple(value.shape), 0, value.detach(), view.shard.first)


def allocate(master: MasterOptimizer, names: Mapping[Tensor, str], entries: Mapping[str, TensorEntry]) -> None:
    """Replace the optimizer's state by empty tensors for a load to fill."""
    by_name = by_parameter(entries)
    master.own.state.clear()
    for group, given in zip(master.own.param_groups, master.given, strict=True):
        for view in (master.views[p] for p in given if p in master.views):
            for key, entry in by_name.get(names[view.shard.parameter], {}).items():
                state = master.own.state[view.tensor]
                is_part = tuple(entry.shape) == view.shard.shape and key != "step"
                if is_part and entry.dtype == view.shard.parameter.dtype:
                    entry = replace(entry, dtype=view.tensor.dtype)  # the parameter's dtype becomes the master's
                state[key] = new_state(view.tensor, key, entry, group, is_part)


def move_plain(master: MasterOptimizer) -> None:
    """Move tensors inside non-tensor state, such as lists of them, to the masters' device and dtype after a load."""
    for parameter, view in master.views.items():
        state = master.own.state.get(view.tensor, {})
        for key, value in state.items():
            if not isinstance(value, Tensor):
                state[key] = placed(value, view.tensor, parameter.dtype)


def warn_of_shards(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
    """Warn of a user's `state_dict` call without the parameters that stage 3 has sharded."""
    if any(isinstance(value, nn.Parameter) for value in state.values()):
        return  # called with keep_vars, as the framework does
    lost = [name for name, p in module.named_parameters() if getattr(p, "ds_numel", 0) > 0 and p.numel() == 0]
    if lost:
        rank_zero_warn(
            f"the state_dict of {type(module).__name__} is empty for {lost[0]!r} and {len(lost) - 1} others, of which a "
            "rank holds only a part under ZeRO stage 3. tw.gather_module(module), called on all ranks, returns a whole copy. "
            "To resume later, save with trainer.save_checkpoint(path).",
            stacklevel=3,
        )


def refuse_copy(memo: Any) -> None:
    """Raise RuntimeError for a deep copy of a module that stage 3 has sharded."""
    raise RuntimeError(
        "a module that ZeRO stage 3 has sharded cannot be copied, because a rank holds only a part of it. "
        "tw.gather_module(module), called on all ranks, returns a whole, plain copy in host memory."
    )


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
