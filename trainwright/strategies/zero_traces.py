"""Zero traces: what DeepSpeed hangs on a user's modules and parameters, and leaves there when its engine goes."""

from __future__ import annotations

from typing import Any

from torch import nn

ADDED_LATER = ("pre_bwd_fn", "post_bwd_fn", "ds_grads_remaining", "applied_pre_backward_ref_cnt")
"""What the first forward and backward add to a module."""


class ZeroTraces:
    """Notes, as a context around the making of an engine, what that adds to modules and parameters, to take it off again.

    Args:
        modules: what the engine will own of the user's modules.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        members = dict.fromkeys(each for module in modules for each in module.modules())
        parameters = dict.fromkeys(p for each in members for p in each._parameters.values() if p is not None)
        self._modules: dict[Any, set[str]] = {each: set(each.__dict__) for each in members}
        self._parameters: dict[Any, set[str]] = {each: set(each.__dict__) for each in parameters}

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        for table in (self._modules, self._parameters):
            for each, before in table.items():
                table[each] = set(each.__dict__) - before

    def remove(self) -> None:
        """Take it off; whole parameters get memory of their own, and shards stay what they are."""
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
            parameter.data = parameter.data.clone()  # out of the flat buffer of all, which goes with the engine
