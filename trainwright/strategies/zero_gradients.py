"""ZeRO's gradients: averages and clips this rank's shard before DeepSpeed's step would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def fill_missing_gradients(zero: Any, stage: int) -> None:
    """Allow a step without a backward, with zero gradients; DeepSpeed assumes that there was one."""
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
            continue  # its step makes what is missing
        if zero.all_grad_tensors.get(index) is None:
            zero.all_grad_tensors[index] = zero.get_all_grad_tensors(owned, zero.gradient_accumulation_dtype)


def finalize(engine: Any, stage: int) -> None:
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


def own_gradients(engine: Any) -> list[Tensor]:
    """Return this rank's shard of the finalized gradients, as views that the step will use."""
    groups = engine.optimizer.averaged_gradients.values()
    return [gradient for group in groups if group is not None for gradient in group]


def clip_by_value(gradients: Sequence[Tensor], value: float | None, scale: float, loss_scale: float) -> None:
    """Multiply the gradients in place, then clip their elements."""
    for gradient in gradients:
        gradient.mul_(scale)
        if value is not None:
            gradient.clamp_(-value * loss_scale, value * loss_scale)


def clip_by_norm(gradients: Sequence[Tensor], norm: float, loss_scale: float, device: torch.device) -> Tensor:
    """Clip the gradients in place by the total norm of all ranks', and return that. Collective."""
    total = torch.zeros((), device=device)
    for gradient in gradients:
        total += gradient.float().square().sum()
    dist.all_reduce(total)
    total = torch.sqrt(total) / loss_scale
    for gradient in gradients:
        gradient.mul_((norm / (total + 1e-6)).clamp(max=1.0))
    return total
