"""Module state: how each module of a load is loaded.

The tensors of a plain module are read in place, each process its part. A module that computes entries of its state_dict, keeps
values there that are not tensors, or overrides how it is loaded, gets the whole state_dict, as in `load_from_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.checkpoint.contents import (
    MODEL,
    TRAINING,
    extra_states,
    fitting_extra_states,
    set_extra_states,
)
from trainwright.checkpoint.reader import StoredCheckpoint
from trainwright.compiled_names import clean_name, own_name
from trainwright.engine.lazy_tensors import LazyTensor
from trainwright.engine.named_state import computed_keys, prefix_of
from trainwright.errors import CheckpointError
from trainwright.strategies import Strategy
from trainwright.tensor_names import is_extra_state

KNOWN = ("torch", "torchmetrics", "trainwright", "deepspeed", "fairscale")
"""Packages whose layers and hooks load nothing more than is read in place."""
NOT_KNOWN = ("torch.ao", "torch.nn.quantized")
LOADERS = ("load_state_dict", "_load_from_state_dict")
HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


class ModuleLoads:
    """How the modules of one load, in the order of the checkpoint, are loaded."""

    def __init__(self, strategy: Strategy, modules: Sequence[nn.Module], state: Mapping[str, Any], path: str) -> None:
        self._strategy, self._modules, self._path = strategy, modules, path
        extra = state.get("extra") or {}
        self._extra: list[dict[str, Any]] = [extra.get(str(number), {}) for number in range(len(modules))]
        self._wholes: set[int] = set()
        """The numbers of the modules that get a whole state_dict."""

    def check(self, strict: bool) -> None:
        """Find out how each module is loaded, and refuse extra state that does not fit (CheckpointError)."""
        for number, module in enumerate(self._modules):
            computes = bool(computed_keys(self._strategy, module))
            # Under the other strategies a module holds parts of its tensors, or copies.
            if self._strategy.capabilities.holds_modules and (
                computes or _loads_itself(module) or _keeps_values(module)
            ):
                self._wholes.add(number)
            else:
                self._extra[number] = fitting_extra_states(module, self._extra[number], self._path, strict)

    def is_filled(self, name: str) -> bool:
        """Return whether a tensor of this name is read in place."""
        number = int(name.split(".", 2)[1]) if name.startswith(".") else 0
        return number not in self._wholes

    def resized(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, LazyTensor]:
        """Return the buffers that their layers resize to a checkpoint's shape, by name: a quantizer's before it has run.

        Such layers load themselves. A layer with parameters is not asked, since a strategy may have divided them.
        """
        found: dict[str, LazyTensor] = {}
        for number, module in enumerate(self._modules):
            for path, layer in module.named_modules():
                if type(layer)._load_from_state_dict is nn.Module._load_from_state_dict or any(
                    True for _ in layer.parameters()
                ):
                    continue
                prefix = prefix_of(number) + clean_name(f"{path}." if path else "")
                own = {name: buffer for name, buffer in layer.named_buffers() if prefix + name in shapes}
                unlike = {name: each for name, each in own.items() if each.shape != shapes[prefix + name]}
                if unlike and _takes(
                    layer, {name: each.new_zeros(shapes[prefix + name]) for name, each in own.items()}
                ):
                    found |= {prefix + name: LazyTensor(each, layer, name) for name, each in unlike.items()}
        return found

    def load_wholes(
        self, checkpoint: StoredCheckpoint, tensors: Mapping[str, Tensor] | None, strict: bool, trained: Collection[str]
    ) -> None:
        """Load the modules that get a whole state_dict, of `tensors` if hooks have changed the model's (CheckpointError).

        Those in `trained` are the weights that a resumed run trains on from, where the model holds averages.
        """
        names = [*(checkpoint.tensors(MODEL) if tensors is None else tensors)]
        for number in sorted(self._wholes):
            prefix = prefix_of(number)
            own = [name for name in names if (name.startswith(prefix) if prefix else not name.startswith("."))]
            state = {
                name.removeprefix(prefix): checkpoint.read_tensor(TRAINING if name in trained else MODEL, name)
                if tensors is None or name in trained
                else tensors[name]
                for name in own
            }
            _load(self._modules[number], {**state, **self._extra[number]}, strict, self._path)

    def finish(self) -> None:
        """Load the extra state of the other modules, and call their methods and hooks for a load (CheckpointError)."""
        for number, (module, states) in enumerate(zip(self._modules, self._extra, strict=True)):
            if number in self._wholes:
                continue
            if not _loads_itself(module) and not _keeps_values(module):
                set_extra_states(module, states)
                continue
            in_use = module.state_dict(keep_vars=True)
            # Its tensors are loaded already; they are passed again for what else its methods do with them.
            given = {clean_name(name): value for name, value in in_use.items() if isinstance(value, Tensor)}
            # Copying a tensor to itself is no write, which a strategy would have to keep or refuse.
            with torch.autograd._unsafe_preserve_version_counter(tuple(given.values())):  # type: ignore[attr-defined]
                _load(module, {**given, **states}, False, self._path)


def _load(module: nn.Module, state: Mapping[str, Any], strict: bool, path: str) -> None:
    before = dict(module.named_parameters())
    try:
        module.load_state_dict({own_name(module, name): value for name, value in state.items()}, strict=strict)
    except Exception as error:  # what a user's own method raises
        raise CheckpointError(f"{path}: {type(module).__name__} does not take it: {error}") from error
    for name, parameter in module.named_parameters():
        if before.get(name) is not parameter:
            raise CheckpointError(
                f"{path}: {type(module).__name__} replaced its parameter {clean_name(name)!r} when it loaded it, so the run's "
                "optimizer would not step it. Copy the values into the existing parameter, under no_grad()."
            )


def _takes(layer: nn.Module, state: Mapping[str, Tensor]) -> bool:
    """Return whether a layer's own load gives its buffers the shapes of a state; tried on a copy."""
    trial = deepcopy(layer)
    try:
        trial.load_state_dict(state, strict=False)
    except Exception:  # what a user's own method raises
        return False
    buffers = dict(trial.named_buffers())
    return all(name in buffers and buffers[name].shape == value.shape for name, value in state.items())


def _loads_itself(module: nn.Module) -> bool:
    """Return whether a method or a hook of a user's has a part in how a module is loaded."""
    return any(not _is_known(each) for each in _loaders(module))


def _keeps_values(module: nn.Module) -> bool:
    """Return whether a module's state_dict has values that are neither tensors nor extra states."""
    return any(not is_extra_state(name) for name in extra_states(module))


def _loaders(module: nn.Module) -> Iterator[Any]:
    """Yield the methods that a module or its submodules override for a load, and their hooks for one."""
    for each in module.modules():
        for name in LOADERS:
            method = getattr(type(each), name)
            if method is not getattr(nn.Module, name) and (each is module or name != "load_state_dict"):
                yield method
        for name in HOOKS:
            hooks: Iterable[Any] = each.__dict__.get(name, {}).values()
            yield from (getattr(hook, "hook", hook) for hook in hooks)


def _is_known(function: Any) -> bool:
    while hasattr(function, "func"):  # a partial
        function = function.func
    module = getattr(function, "__module__", None) or type(function).__module__
    return module.split(".")[0] in KNOWN and not f"{module}.".startswith(tuple(f"{each}." for each in NOT_KNOWN))
