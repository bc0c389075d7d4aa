"""State entries: the tensors of a module's state_dict, in use by the module or computed for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainwright.checkpoint.contents import is_extra_state
from trainwright.compiled_names import clean_name
from trainwright.errors import CheckpointError

if TYPE_CHECKING:
    from trainwright.strategies.base import Strategy


def state_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a module's state_dict by name: those in use, which a load may write into, and computed ones."""
    yield from ((name, value) for name, value, _ in _entries(module))


def computed_entries(strategy: Strategy, module: nn.Module) -> list[str]:
    """Return the names of computed state_dict entries, which no load can write into; raise CheckpointError if sharded."""
    names = [clean_name(name) for name, _, is_in_use in _entries(module) if not is_in_use]
    if names and not strategy.holds_modules:
        raise CheckpointError(
            f"{names[0]!r} in the state_dict of {type(module).__name__} is computed from what it holds, of which each rank "
            f"has a part, or a copy in low precision, under strategy={strategy.name!r}. Keep it as a parameter or buffer, or "
            "choose 'ddp'."
        )
    return names


def _entries(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield each tensor of a module's state_dict with its name and whether it is in use."""
    state = module.state_dict(keep_vars=True)  # first, because FSDP's hooks replace parameters by their shards
    in_use: dict[Any, Tensor] = {}
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
                    yield name, own, True
                    continue
        yield name, value, value in in_use


def _memory(tensor: Tensor) -> Any:
    """Return a key that is equal for tensors over the same memory, and unique for those without memory."""
    local = getattr(tensor, "_local_tensor", tensor)  # the part of a DTensor
    if is_lazy(local) or local.layout is not torch.strided or local.is_meta or local.numel() == 0:
        return ("none", id(tensor))
    return local.data_ptr(), local.dtype, tuple(local.shape), local.stride(), tuple(tensor.shape)
