"""Cleanup after ZeRO: removes the attributes and hooks that DeepSpeed attaches to modules and parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

ADDED_LATER = ("pre_bwd_fn", "post_bwd_fn", "ds_grads_remaining", "applied_pre_backward_ref_cnt")
"""Attributes that the first forward and backward add to a module."""


class AddedAttributes:
    """Records the attributes that the creation of an engine within this context adds to modules, to remove them later."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        members = [each for module in modules for each in module.modules()]
        parameters = [p for each in members for p in each._parameters.values() if p is not None]
        self._modules: dict[Any, set[str]] = {each: set(each.__dict__) for each in members}
        self._parameters: dict[Any, set[str]] = {each: set(each.__dict__) for each in parameters}

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        for table in (self._modules, self._parameters):
            for each, before in table.items():
                table[each] = set(each.__dict__) - before

    def remove(self) -> None:
        """Remove the attributes, and copy whole parameters to separate memory. Shards stay."""
        for module, added in self._modules.items():
            for name in added.union(ADDED_LATER):
                module.__dict__.pop(name, None)
            if type(module._parameters) is not dict:
                module._parameters = dict(module._parameters.items())
        for parameter, added in self._parameters.items():
            parameter.grad = None
            if hasattr(parameter, "ds_id"):
                continue
            for name in added:
                parameter.__dict__.pop(name, None)
            parameter.data = parameter.data.clone()  # out of the engine's flat buffer


class Bottom(nn.Module):
    """Replaces engines' modules on DeepSpeed's stack of running forwards, and holds only weak references."""

    def __init__(self) -> None:
        super().__init__()
        self._external_params: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()


def release_module(module: nn.Module) -> None:
    """Remove a module tree from DeepSpeed's process-wide state. The module can still be called.

    Stage 3's stack of running forwards keeps the modules of an engine and of a failed forward. A cache keeps the engine. All
    of them would stay in memory until the process ends.
    """
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    own = set(module.modules())
    listed = parameter_offload.FWD_MODULE_STACK
    bottom = next((each for each in listed if isinstance(each, Bottom)), None) or Bottom()
    listed[:] = [bottom, *(each for each in listed if each not in own and each is not bottom)]
    for method in filter(inspect.isfunction, vars(PartitionedParameterCoordinator).values()):
        for wrapped in inspect.getclosurevars(method).nonlocals.values():
            if hasattr(wrapped, "cache_clear"):
                wrapped.cache_clear()


def release_parameters(part: nn.Module) -> None:
    """Shard the parameters that a failed forward or backward has left gathered, because no later engine could."""
    in_flight = getattr(part, "ds_inflight_param_registry", {})
    sharded: list[Any] = [p for p in part.parameters() if hasattr(p, "ds_active_sub_modules")]
    for parameter in sharded:
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
    """Destroy every engine once."""
    for engine in dict.fromkeys(engines):
        engine.destroy()
        # An engine destroys itself again when it is collected, and would clear the attributes of the module's next engine.
        engine.destroy = _do_nothing
        release_module(engine.module)
        release_parameters(engine.module)


def _do_nothing() -> None:
    pass
