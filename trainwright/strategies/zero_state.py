"""ZeRO's state as pieces: a rank's share of a parameter is one range of it, which lies somewhere in a flat float32 master."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.tensors import Piece, TensorEntry
from trainwright.rank_zero import rank_zero_warn

Share = tuple[Tensor, Tensor, int, int, int, tuple[int, ...]]
"""(parameter, flat master, offset in the master, start in the parameter, elements, shape of the parameter)."""


def shares_of(zero: Any, stage: int, rank: int) -> Iterator[Share]:
    """Yield this rank's share of each parameter that a ZeRO optimizer steps."""
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
                yield parameter, flat, offset, start, numel, tuple(parameter.ds_shape)
            elif parameter._hp_mapping is None:  # all of it is others'
                yield parameter, flat, 0, 0, 0, tuple(parameter.shape)
            else:
                mine = parameter._hp_mapping.lp_fragment_address
                there = parameter._hp_mapping.hp_fragment_address
                yield parameter, flat, there.start, mine.start, mine.numel, tuple(parameter.shape)


def partition_piece(name: str, parameter: Any, rank: int) -> Piece:
    """Return this rank's share of a parameter that stage 3 has sharded and that has no master."""
    start = min(parameter.ds_tensor.numel() * rank, parameter.ds_numel)
    share = parameter.ds_tensor.detach()[: min(parameter.ds_tensor.numel(), parameter.ds_numel - start)]
    return Piece(name, tuple(parameter.ds_shape), start, share, rank)


def allocate(
    optimizer: Optimizer,
    shares: Iterable[Share],
    names: Mapping[Tensor, str],
    entries: Mapping[str, TensorEntry],
) -> None:
    """Make the flat state tensors that a load fills."""
    optimizer.state.clear()
    by_name: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        parameter_name, key = name.rsplit("/", 1)
        by_name.setdefault(parameter_name, {})[key] = entry
    for parameter, flat, *_, shape in shares:
        for key, entry in by_name.get(names[parameter], {}).items():
            like_parameter = tuple(entry.shape) == shape and key != "step"
            made = torch.zeros_like(flat, dtype=entry.dtype) if like_parameter else torch.zeros(entry.shape)
            optimizer.state[flat].setdefault(key, made)


def fill_missing_gradients(zero: Any, stage: int) -> None:
    """Let a step whose window no loss reached be one of zero gradients; DeepSpeed takes it that one did."""
    if stage == 3:
        partitions = zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        for index, group in enumerate(zero.fp16_groups if not zero.offload_optimizer else []):
            if zero.averaged_gradients.get(index) is None:
                zero.averaged_gradients[index] = [partitions[parameter.ds_id] for parameter in group]
        return
    if stage == 1:
        zero.setup_buckets()  # which its step reduces through; made by the backward, where there was one
        return
    for index, owned in enumerate(zero.params_in_partition if not zero.cpu_offload else []):
        if zero.all_grad_tensors.get(index) is None:
            zero.all_grad_tensors[index] = zero.get_all_grad_tensors(owned, zero.gradient_accumulation_dtype)


def warn_of_shards(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
    """Say that a state_dict holds nothing of what stage 3 has sharded; it runs whenever a user asks for one."""
    if any(isinstance(value, nn.Parameter) for value in state.values()):
        return  # asked for with keep_vars, as we do
    lost = [name for name, p in module.named_parameters() if getattr(p, "ds_numel", 0) > 0 and p.numel() == 0]
    if lost:
        rank_zero_warn(
            f"the state_dict of {type(module).__name__} is empty for {lost[0]!r} and {len(lost) - 1} others, of which each "
            "rank holds a part under ZeRO stage 3. tw.gather_module(module), called on all ranks, gives a whole copy of it; to "
            "go on from later, save with trainer.save_checkpoint(path).",
            stacklevel=3,
        )


def refresh(parameters: Sequence[Any]) -> None:
    """Let parameters without a master, which a load has changed in their partition, show it where they are gathered."""
    for parameter in parameters:
        if hasattr(parameter, "ds_tensor") and parameter.ds_status.name == "AVAILABLE":
            parameter.partition(has_been_updated=False)
            parameter.all_gather()


def refresh_from_masters(zero: Any, stage: int) -> None:
    """Let the weights that a forward uses follow their float32 masters. Collective."""
    if stage < 3:
        zero.update_lp_params()
        return
    zero._partition_all_parameters()
    for group in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(group)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
