"""Tensor names: the one name of a parameter or buffer, for checkpoints, averages, callbacks and messages.

Names contain no parts of wrappers such as torch.compile's. Hooks of state_dict may rename its keys, as torch's
`checkpoint_wrapper` does, so a parameter's path in the module may differ from its name in the checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

WRAPPER = "_orig_mod"
"""The attribute in which a compiled module holds the original one."""
RECOMPUTED = "_checkpoint_wrapped_module"
"""The attribute in which torch's activation wrappers store the original. Their hooks keep it out of a state_dict."""


def clean_name(name: str) -> str:
    """Return a state_dict key or the name of a parameter or module without the parts that wrappers add."""
    if WRAPPER not in name and RECOMPUTED not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in (WRAPPER, RECOMPUTED))


def register_clean_names(module: nn.Module) -> None:
    """Give a module's state_dict clean names, and let it load both forms, whatever is compiled then."""
    module.register_state_dict_post_hook(_clean)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(_adapt)  # type: ignore[no-untyped-call]


def is_compiled(module: object) -> bool:
    """Return whether torch.compile returned this module."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def _clean(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    _rename(state_dict, prefix, clean_name)


def _adapt(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Rename the keys to the form that this module uses."""
    _rename(state_dict, prefix, lambda name: own_name(module, name))


def own_name(module: nn.Module, name: str) -> str:
    """Return the key of a name in the state_dict of a module, whatever is compiled."""
    current: Any = module
    parts = []
    for part in clean_name(name).split("."):
        while is_compiled(current) or RECOMPUTED in getattr(current, "_modules", ()):
            if is_compiled(current):
                parts.append(WRAPPER)
            current = current._modules[WRAPPER if is_compiled(current) else RECOMPUTED]
        parts.append(part)
        current = current._modules.get(part) if isinstance(current, nn.Module) else None
    return ".".join(parts)


def _rename(state_dict: dict[str, Any], prefix: str, rename: Callable[[str], str]) -> None:
    """Rename the keys below a prefix, keeping their order."""
    names = [prefix + rename(name[len(prefix) :]) if name.startswith(prefix) else name for name in state_dict]
    if names != list(state_dict):
        values = list(state_dict.values())
        state_dict.clear()
        state_dict.update(zip(names, values, strict=True))


EXTRA_STATE = "_extra_state"
"""The last part of the state_dict keys under which torch stores the results of `get_extra_state`."""


def is_extra_state(name: str) -> bool:
    """Return whether a state_dict key names a module's extra state."""
    return name.rpartition(".")[2] == EXTRA_STATE


def names_of(module: nn.Module) -> dict[Tensor, str]:
    """Return the names of all parameters and buffers. A tied tensor has its first name."""
    names: dict[Tensor, str] = {}
    for name, tensor in named_tensors(module):
        names.setdefault(tensor, name)
    return names


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers by their names in a checkpoint, a tied tensor by all of its names.

    A tensor that is not in the state_dict is named by the path of its module.
    """
    named = [(name, tensor) for name, tensor, is_in_use in state_entries(module) if is_in_use]
    stored = {tensor for _, tensor in named}
    own = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return named + [(clean_name(name), tensor) for name, tensor in own if tensor not in stored]


def state_entries(module: nn.Module) -> list[tuple[str, Tensor, bool]]:
    """Return the tensors of a module's state_dict by name, and whether the module itself uses them."""
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
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # the part of a DTensor
    if is_lazy(local) or local.layout is not torch.strided or local.is_meta or local.numel() == 0:
        return ("none", id(tensor))
    return local.data_ptr(), local.dtype, tuple(local.shape), local.stride(), tuple(tensor.shape)
