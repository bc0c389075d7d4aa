"""The private names of torch that fsdp needs, as read in torch 2.11 to 2.15, for writes into gathered parameters and for hooks.

FSDP2 frees gathered parameters without a look at them. Weight clipping in a step, or the update of a momentum encoder, would
be lost. So every rank copies its rows back into its shard at the end of a forward. Nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.batchnorm import _BatchNorm

BATCH_NORM = _BatchNorm
_PLAIN_DATA: Any = Tensor.data


def write_through_data() -> None:
    """Let `parameter.data = tensor` write the shard, which a DTensor ignores by itself."""
    if "data" not in vars(DTensor):
        DTensor.data = property(lambda shard: _PLAIN_DATA.__get__(shard), _set_data)  # type: ignore[assignment]


def _set_data(shard: DTensor, value: Tensor) -> None:
    # Not by an attribute: torch's module.to() swaps attributes, and fails if there is a weak reference.
    if not (isinstance(shard, nn.Parameter) and isinstance(value, DTensor) and _layout(value) == _layout(shard)):
        _PLAIN_DATA.__set__(shard, value)
        return
    with torch.no_grad():
        shard.copy_(value)


def _layout(sharded: DTensor) -> tuple[Any, ...]:
    return sharded.shape, sharded.dtype, sharded.placements


def first_row(shard: DTensor) -> int:
    """Return the number of the first row of a parameter that this rank holds."""
    _, offsets = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)
    return offsets[0]


def gather_for_backward(root: Any, loss: Tensor) -> None:
    """Let the backward of a loss that was computed within the root's forward gather and reduce the root's group."""
    root._get_fsdp_state()._register_pre_backward_hook(loss)


def record_versions(group: Any) -> None:
    """Record the versions of a group's parameters just after their gathering, and share their shards' hooks with them."""
    for part in _gathered(group):
        share_hooks(part.sharded_param, part._unsharded_param)
        part.shard_version = part._sharded_param_data._version
        part.whole_version = _version(part._unsharded_param)


def share_hooks(shard: Any, whole: Any) -> None:
    """Let hooks of a shard (`register_hook`) see the gathered parameter's gradient, because autograd never reaches the shard.

    Both keep one dict from then on, so a hook that is added or removed later counts too.
    """
    hooks = shard._backward_hooks
    if hooks and whole._backward_hooks is not hooks:
        hooks.update(whole._backward_hooks or {})
        whole._backward_hooks = hooks


@contextmanager
def carried_hooks(group: nn.Module) -> Iterator[None]:
    """Hand the gradient hooks of a group's parameters to the shards made of them within the context."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    found = [
        (name, kind, hooks) for name, p in group.named_parameters() for kind in kinds if (hooks := getattr(p, kind))
    ]
    yield
    for name, kind, hooks in found:
        setattr(group.get_parameter(name), kind, hooks)


def write_back(group: Any) -> None:
    """Copy writes into a group's gathered parameters to this rank's shards."""
    shards: list[Tensor] = []
    rows: list[Tensor] = []
    for part in _gathered(group):
        whole, shard = part._unsharded_param, part._sharded_param_data
        if shard._version != part.shard_version:
            continue  # the optimizer has stepped the shard since
        gathered = part.all_gather_outputs[0]
        is_elsewhere = whole.data_ptr() != gathered.data_ptr()
        kept, mine = _own_rows(part, whole, shard) if is_elsewhere else _same_own_rows(part, whole, shard, gathered)
        if whole.dtype != shard.dtype:
            _refuse_low(part, is_elsewhere, mine, kept)
            continue
        shards.append(kept)
        rows.append(mine)
        if is_elsewhere:
            _gather_into(part, whole, gathered)
    if shards:
        with torch.no_grad():
            torch._foreach_copy_(shards, rows)
        record_versions(group)
        for parts in _groups(group) if shards[0].device.type != "cpu" else ():
            # FSDP's gathering stream has to wait until the shards are written.
            event = parts._reshard_after_forward_event = parts.device_handle.Event()
            event.record()


def _gather_into(part: Any, whole: Tensor, gathered: Tensor) -> None:
    """Let FSDP gather into copied memory after `.data = ...`, because backward may need the old memory."""
    with torch.inference_mode(False), torch.no_grad():
        memory = torch.empty_like(gathered)  # with the padding
        there = torch.as_strided(memory, part._orig_size, part._contiguous_orig_stride)
        there.copy_(whole.detach())
        gathered.data, whole.data = memory, there
    part.own_rows_of = (None, None, None)


def _own_rows(part: Any, whole: Tensor, shard: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's rows of a parameter, in its shard and in the gathered whole, without padding."""
    rank, numel = part.mesh_info.shard_mesh_rank, part.sharded_param._local_tensor.numel()
    mine = whole.detach().reshape(-1).narrow(0, shard.numel() * rank if numel else 0, numel)
    return shard.narrow(0, 0, numel), mine


def _same_own_rows(part: Any, whole: Tensor, shard: Tensor, gathered: Tensor) -> tuple[Tensor, Tensor]:
    """Return `_own_rows`, cached: FSDP allocates and frees memory below these tensors, but keeps the tensors."""
    made_of = getattr(part, "own_rows_of", (None, None, None))
    if made_of[0] is not whole or made_of[1] is not shard or made_of[2] is not gathered:
        part.own_rows_of, part.own_rows = (whole, shard, gathered), _own_rows(part, whole, shard)
    rows: tuple[Tensor, Tensor] = part.own_rows
    return rows


def write_back_after(group: nn.Module, args: Any, output: Any) -> None:
    """Write back, as a forward hook of a group that runs before FSDP's."""
    if torch.compiler.is_compiling():
        torch._dynamo.disable(write_back)(group)  # type: ignore[no-untyped-call]
    else:
        write_back(group)


def record_versions_before(group: nn.Module, args: Any) -> None:
    """Record versions, as a forward pre-hook of a group that runs after FSDP's."""
    if torch.compiler.is_compiling():
        torch._dynamo.disable(record_versions)(group)  # type: ignore[no-untyped-call]
    else:
        record_versions(group)


def _refuse_low(part: Any, is_elsewhere: bool, mine: Tensor, shard: Tensor) -> None:
    is_written = is_elsewhere or _version(part._unsharded_param) != part.whole_version
    if not is_written and not getattr(part, "is_looked_at", False):
        # Compared once, in training: writes through .data leave no version, and comparing waits for the device.
        part.is_looked_at = torch.is_grad_enabled()
        own = shard.to(mine.device, mine.dtype)
        is_written = not bool(((own == mine) | (own.isnan() & mine.isnan())).all())
    if is_written:
        name = str(part._param_fqn or part._module_info.param_name).removeprefix("module.")
        low = str(mine.dtype).removeprefix("torch.")
        raise RuntimeError(
            f"the step wrote the parameter {name!r} while fsdp had gathered it in {low}, so the write was rounded. Write "
            "it in a hook such as on_train_batch_end, where it is float32, make it a buffer, or keep it float32 with "
            "FSDPStrategy(mixed_precision=torch.distributed.fsdp.MixedPrecisionPolicy())."
        )


def _gathered(group: Any) -> Iterator[Any]:
    """Yield FSDP's records of a group's gathered parameters, without inner groups."""
    return (part for parts in _groups(group) if parts.is_unsharded for part in parts.fsdp_params)


def _groups(group: Any) -> Iterator[Any]:
    """Yield FSDP's parameter groups of a module."""
    state = group._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        yield from state._fsdp_param_groups
    elif state._fsdp_param_group is not None:  # torch 2.11 keeps at most one group per module
        yield state._fsdp_param_group


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
