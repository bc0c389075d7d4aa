"""Tensor names: the one name of each parameter and buffer, for checkpoints, averages, callbacks and messages.

Hooks of state_dict may rename its keys, as torch's `checkpoint_wrapper` does. A parameter's path in the module then
differs from its name in the checkpoint.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainwright.compiled_names import clean_name

EXTRA_STATE = "_extra_state"
"""The last part of the state_dict keys under which torch stores what a module's `get_extra_state` returned."""


def is_extra_state(name: str) -> bool:
    """Return whether a state_dict key names a module's extra state."""
    return name.rpartition(".")[2] == EXTRA_STATE


def names_of(module: nn.Module) -> dict[Tensor, str]:
    """Return the name of each parameter and buffer; the first one of a tied tensor."""
    names: dict[Tensor, str] = {}
    for name, tensor in named_tensors(module):
        names.setdefault(tensor, name)
    return names


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers by their names in a checkpoint, a tied tensor by each of its names.

    A tensor that is not in the state_dict is named by the path of its module.
    """
    named = [(name, tensor) for name, tensor, is_in_use in state_entries(module) if is_in_use]
    stored = {tensor for _, tensor in named}
    own = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return named + [(clean_name(name), tensor) for name, tensor in own if tensor not in stored]


def state_entries(module: nn.Module) -> list[tuple[str, Tensor, bool]]:
    """Return the tensors of a module's state_dict by name, and for each whether the module itself uses it."""
    state = module.state_dict(keep_vars=True)  # first, because FSDP's hooks replace parameters by their shards
    in_use: dict[Any, Tensor] = {}
    entries = []
    for each in (*module.buffers(), *module.parameters()):
        in_use[each] = in_use[_memory(each)] = each
    for name, value in state.items():
        if not isinstance(value, Tensor) or is_extra_state(name) or is_lazy(value):
            continue
        if value not in in_use:
            value = in_use.get(_memory(value), value)  # the same tensor by other means, such as .data
        if value not in in_use:
            path, _, leaf = name.rpartition(".")
            with suppress(AttributeError):
                own = module.get_submodule(path).__dict__.get(leaf)
                if isinstance(own, Tensor) and own.shape == value.shape:  # a Metric puts copies of its states there
                    value = in_use[own] = own
        entries.append((clean_name(name), value, value in in_use))
    return entries


def _memory(tensor: Tensor) -> Any:
    """Return a key that is equal for tensors over the same memory, and unique for those without memory."""
    local = getattr(tensor, "_local_tensor", tensor)  # the part of a DTensor
    if is_lazy(local) or local.layout is not torch.strided or local.is_meta or local.numel() == 0:
        return ("none", id(tensor))
    return local.data_ptr(), local.dtype, tuple(local.shape), local.stride(), tuple(tensor.shape)
