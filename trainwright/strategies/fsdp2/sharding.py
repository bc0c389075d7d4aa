"""Sharding: makes the groups of a module into FSDP2's, innermost first, from rank 0's values."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from trainwright.precision.base import Precision
from trainwright.strategies.fsdp2 import vendor
from trainwright.strategies.fsdp2.sharded_access import (
    Root,
    open_methods,
    refuse_second_order,
    reshard_after_call,
    unshard_for_call,
    without_views,
)
from trainwright.strategies.fsdp2.tensor_plan import TensorGroup
from trainwright.strategies.fsdp2.wrap_policy import (
    ROOT,
    Float32,
    WrapPolicy,
    choose_groups,
    find_float32,
    refuse_mixed,
)
from trainwright.strategies.module_checks import refuse_copy
from trainwright.strategies.placement import innermost_first, materialize, move
from trainwright.strategies.replication import equalize
from trainwright.value_kinds import is_dtensor


@dataclass(frozen=True)
class ShardingOptions:
    """The arguments of FSDPStrategy that decide how a module is sharded. FSDPStrategy describes them."""

    auto_wrap_policy: WrapPolicy | None
    min_parameters: int
    reshard_after_forward: bool
    is_offloaded: bool
    activation_checkpointing_policy: bool | WrapPolicy | None
    mixed_precision: MixedPrecisionPolicy | None


def low_policy(options: ShardingOptions, precision: Precision) -> MixedPrecisionPolicy:
    """Return the dtypes in which low-precision layers are gathered and reduced."""
    dtype = precision.autocast_dtype
    if options.mixed_precision is not None:
        return options.mixed_precision
    if dtype is None:
        return MixedPrecisionPolicy()
    # Autocast stays on inside, so operations cast their inputs and targets keep their dtype.
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


class ModuleSharding:
    """Shards one module over a mesh, and over the ranks of a tensor group if there is one."""

    def __init__(
        self,
        options: ShardingOptions,
        mesh: DeviceMesh,
        device: torch.device,
        precision: Precision,
        tensor: TensorGroup | None,
    ) -> None:
        self._options, self._mesh, self._device, self._precision = options, mesh, device, precision
        self._tensor = tensor
        self._low = low_policy(options, precision)
        self._float32 = Float32()

    def shard(self, module: nn.Module) -> None:
        """Shard a module, whose root is then its attribute ROOT. Collective."""
        groups = choose_groups(module, self._options.auto_wrap_policy, self._options.min_parameters)
        policy = self._options.activation_checkpointing_policy
        to_checkpoint = (groups if policy else []) if isinstance(policy, bool | None) else choose_groups(module, policy)
        root = Root(module, self._low.param_dtype, groups)
        divided = self._tensor.plan(module) if self._tensor is not None else set()
        chosen, self._float32 = set(groups), self._find_float32(module, divided)
        names = {each: name for name, each in module.named_modules()}
        is_meta = any(each.is_meta for each in (*module.parameters(), *module.buffers()))
        constructed: list[nn.Module] = []
        # Innermost first, the order in which constructors draw the values of meta modules.
        for each in innermost_first(module):
            constructed.append(each)
            is_chosen = each in chosen
            if each is module or not (is_chosen or each in self._float32.groups):
                continue
            if is_meta:
                self._materialize(module, constructed, each)
            kind = type(each)
            each.register_forward_hook(partial(refuse_second_order, names[each]))
            writes = self._shard_group(each)
            if is_chosen:
                open_methods(each, kind, writes, lambda: root.depth > 0)
            constructed = []
        if is_meta:
            self._materialize(module, constructed, module)
        for each in to_checkpoint:
            each.forward = partial(checkpoint, each.forward, use_reentrant=False)
        root.writes = self._shard_group(root)
        module.__dict__[ROOT] = root  # not as a submodule
        module.__dict__["__deepcopy__"] = refuse_copy
        module.register_forward_pre_hook(unshard_for_call)
        module.register_forward_hook(reshard_after_call, always_call=True)

    def _find_float32(self, module: nn.Module, divided: Collection[nn.Module]) -> Float32:
        """Return the parts of a module that are gathered in float32 although others are in a low dtype."""
        if self._low.param_dtype is None:
            return Float32()
        if self._options.mixed_precision is not None:
            return Float32(groups={each for each in module.modules() if isinstance(each, vendor.BATCH_NORM)})
        found = find_float32(module)
        # A divided layer cannot be whole on every rank.
        layers = {layer for layer, _ in found.whole if layer in divided}
        return Float32({(layer, name) for layer, name in found.whole if layer not in layers}, found.groups | layers)

    def _materialize(self, module: nn.Module, parts: list[nn.Module], group: nn.Module) -> None:
        materialize(module, parts)
        self._precision.convert_module(group)  # meta tensors were skipped the first time

    def _shard_group(self, group: nn.Module) -> vendor.WriteCheck:
        """Broadcast rank 0's values of a group, and keep this rank's shard. Collective."""
        is_root = isinstance(group, Root)
        is_float32 = (group.module if isinstance(group, Root) else group) in self._float32.groups
        kept, sharded = self._place(group)
        if self._tensor is not None:
            self._tensor.divide(group)
        if not is_root or self._tensor is not None:
            group.register_forward_hook(without_views)  # after the hooks of divided layers, whose outputs are views
        writes = vendor.WriteCheck(group, sharded)
        if not is_root:  # whose forward checks them
            group.register_forward_hook(writes.check)
        offload = self._options.is_offloaded and self._device.type != "cpu"
        fully_shard(
            group,
            mesh=self._mesh,
            mp_policy=MixedPrecisionPolicy() if is_float32 else self._low,
            reshard_after_forward=self._options.reshard_after_forward and not is_root,
            offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
            ignored_params=kept,
        )
        type(group).__deepcopy__ = refuse_copy  # type: ignore[attr-defined]
        if not is_root:
            group.register_forward_pre_hook(writes.record)
        return writes

    def _place(self, group: nn.Module) -> tuple[set[nn.Parameter], set[nn.Parameter]]:
        """Move a group to the device, and return its parameters that stay whole and the others. Collective."""
        # Shards that are offloaded stay in host memory.
        move(group, self._device, stays=is_dtensor)
        whole = [parameter for parameter in group.parameters() if not isinstance(parameter, DTensor)]
        equalize((*whole, *(group.buffers() if isinstance(group, Root) else ())))
        # FSDP2 shards rows, which 0-dim parameters lack, and cannot reduce empty ones.
        kept = {each for each in whole if each.dim() == 0 or each.numel() == 0}.union(self._float32.parameters(group))
        sharded = {each for each in whole if each not in kept}
        refuse_mixed(group, sharded)
        for parameter in whole:
            parameter.data = parameter.data.contiguous()
        return kept, sharded
