"""Module state: how the modules of a load get their tensors, and tensors that have no shape yet.

The tensors of a plain module are read in place, every process its part. A module that computes entries of its state_dict, keeps
other values there than tensors, or overrides how it is loaded, gets the whole state_dict, as in `load_from_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainwright.checkpoint.contents import (
    MODEL,
    TRAINING,
    extra_states,
    fitting_extra_states,
    set_extra_states,
)
from trainwright.checkpoint.reader import StoredCheckpoint
from trainwright.engine.named_state import computed_keys, prefix_of
from trainwright.errors import CheckpointError
from trainwright.strategies import Strategy
from trainwright.tensor_names import clean_name, is_extra_state, own_name

KNOWN = ("torch", "torchmetrics", "trainwright", "deepspeed", "fairscale")
"""Packages whose layers and hooks load nothing else than the tensors that are read in place."""
NOT_KNOWN = ("torch.ao", "torch.nn.quantized")
LOADERS = ("load_state_dict", "_load_from_state_dict")
HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


class ModuleLoads:
    """How the modules of one load are loaded, in the order of the checkpoint."""

    def __init__(self, strategy: Strategy, modules: Sequence[nn.Module], state: Mapping[str, Any], path: str) -> None:
        self._strategy, self._modules, self._path = strategy, modules, path
        extra = state.get("extra") or {}
        self._extra: list[dict[str, Any]] = [extra.get(str(number), {}) for number in range(len(modules))]
        self._wholes: set[int] = set()
        """The numbers of the modules that get a whole state_dict."""

    def check(self, strict: bool) -> None:
        """Determine how the modules are loaded, and raise CheckpointError for extra state that does not fit."""
        for number, module in enumerate(self._modules):
            computes = bool(computed_keys(self._strategy, module))
            # Under the other strategies a module contains parts of its tensors, or copies.
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

    def load_wholes(
        self, checkpoint: StoredCheckpoint, tensors: Mapping[str, Tensor] | None, strict: bool, trained: Collection[str]
    ) -> None:
        """Load the modules that get a whole state_dict (CheckpointError).

        `tensors` are the model's if hooks have changed them. `trained` names the weights that a resumed run trains on from,
        where the model stores averages.
        """
        names = [*(checkpoint.tensors(MODEL) if tensors is None else tensors)]
        for number in sorted(self._wholes):
            prefix = prefix_of(number)
            state = {
                name.removeprefix(prefix): checkpoint.read_tensor(TRAINING if name in trained else MODEL, name)
                if tensors is None or name in trained
                else tensors[name]
                for name in names
                if (name.startswith(prefix) if prefix else not name.startswith("."))
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
            # The tensors are loaded already. They are passed again for the module's methods.
            in_use = module.state_dict(keep_vars=True)
            tensors = {clean_name(name): value for name, value in in_use.items() if isinstance(value, Tensor)}
            # Copying a tensor to itself is no write, which a strategy would have to keep or refuse.
            with torch.autograd._unsafe_preserve_version_counter(tuple(tensors.values())):  # type: ignore[attr-defined]
                _load(module, {**tensors, **states}, False, self._path)


def _load(module: nn.Module, state: Mapping[str, Any], strict: bool, path: str) -> None:
    before = dict(module.named_parameters())
    try:
        module.load_state_dict({own_name(module, name): value for name, value in state.items()}, strict=strict)
    except Exception as error:  # from a user's method
        raise CheckpointError(f"{path}: {type(module).__name__} cannot load it: {error}") from error
    for name, parameter in module.named_parameters():
        if before.get(name) is not parameter:
            raise CheckpointError(
                f"{path}: {type(module).__name__} replaced its parameter {clean_name(name)!r} when it loaded it, so the run's "
                "optimizer would not step it. Copy the values into the existing parameter, under no_grad()."
            )


def _loads_itself(module: nn.Module) -> bool:
    """Return whether a method or a hook of the user takes part in a load."""
    return any(not _is_known(loader) for loader in _loaders(module))


def _keeps_values(module: nn.Module) -> bool:
    """Return whether a module's state_dict has values that are neither tensors nor extra states."""
    return any(not is_extra_state(name) for name in extra_states(module))


def _loaders(module: nn.Module) -> Iterator[Any]:
    """Yield the methods that a module or its submodules override for a load, and their load hooks."""
    for layer in module.modules():
        for name in LOADERS:
            method = getattr(type(layer), name)
            if method is not getattr(nn.Module, name) and (layer is module or name != "load_state_dict"):
                yield method
        for name in HOOKS:
            hooks: Iterable[Any] = layer.__dict__.get(name, {}).values()
            yield from (getattr(hook, "hook", hook) for hook in hooks)


def _is_known(function: Any) -> bool:
    while hasattr(function, "func"):  # a partial
        function = function.func
    module = f"{getattr(function, '__module__', None) or type(function).__module__}."
    return module.split(".")[0] in KNOWN and not module.startswith(tuple(f"{package}." for package in NOT_KNOWN))


class LazyTensor(NamedTuple):
    """A tensor that gets its shape in the first forward, its layer, and its name there."""

    tensor: Any
    layer: nn.Module
    leaf: str


def lazy_tensors(modules: Sequence[nn.Module]) -> dict[str, LazyTensor]:
    """Return the tensors without a shape in the modules' state, by all of their names in a checkpoint."""
    found: dict[str, LazyTensor] = {}
    for number, module in enumerate(modules):
        if not any(map(is_lazy, chain(module.parameters(), module.buffers()))):
            continue
        for name, value in module.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor) and is_lazy(value):
                path, _, leaf = name.rpartition(".")
                found[prefix_of(number) + clean_name(name)] = LazyTensor(value, module.get_submodule(path), leaf)
    return found


def refuse_lazy_tensors(path: str, modules: Sequence[nn.Module]) -> None:
    """Raise CheckpointError if modules to save have tensors without a shape."""
    if names := list(lazy_tensors(modules)):
        more = f" and {len(names) - 1} more" if names[1:] else ""
        raise CheckpointError(
            f"checkpoint {path} was not written: {names[0]!r}{more} is an uninitialised lazy tensor, and a checkpoint stores "
            "tensors with a shape. Save after a forward that reaches the layer, run one on a sample in the module's __init__, "
            "or pass the layer its size."
        )


def check_lazy_shapes(path: str, lazy: Mapping[str, LazyTensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError for shapes that do not match the output size that a layer was constructed with."""
    for name, (_, layer, leaf) in lazy.items():
        size = getattr(layer, "out_features", None) or getattr(layer, "out_channels", None)
        begins_with_size = leaf == "bias" or (leaf == "weight" and not getattr(layer, "transposed", False))
        if size is not None and begins_with_size and name in shapes and shapes[name][:1] != (size,):
            raise CheckpointError(
                f"{path}: it is of another model (other shape: {name} {shapes[name]} there, {(size, '...')} here). Build the "
                "model that was saved, or choose another checkpoint."
            )


def give_shapes(lazy: Mapping[str, LazyTensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Give lazy tensors their shapes from a checkpoint, and no values yet. Others stay lazy."""
    # Their layers then draw no values in the first forward, so the generators continue as without a stop.
    for name, (tensor, layer, _) in lazy.items():
        if name not in shapes:
            continue
        if is_lazy(tensor):  # once if it is tied
            tensor.materialize(shapes[name])
        if getattr(layer, "num_features", None) == 0 and len(shapes[name]) == 1:
            layer.num_features = shapes[name][0]  # type: ignore[assignment] # an instance norm compares it to its input
