"""Module state: a module's own way to load itself, which a load uses where it has one, as `load_from_checkpoint` does.

A plain module is filled in place, each process reading only its part. One that computes entries of its state_dict, keeps other
values than tensors there, or has methods or hooks of its own that load it, is given the whole state_dict instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from trainwright.checkpoint.contents import extra_states, fitting_extra_states, is_extra_state, set_extra_states
from trainwright.checkpoint.reader import Checkpoint
from trainwright.compiled_names import clean_name, own_name
from trainwright.engine.named_state import prefix_of
from trainwright.errors import CheckpointError
from trainwright.strategies import Strategy
from trainwright.strategies.state_entries import computed_entries

KNOWN = ("torch", "torchmetrics", "trainwright", "deepspeed", "fairscale")
"""Packages whose layers and hooks load what a fill in place has loaded already."""
NOT_KNOWN = ("torch.ao", "torch.nn.quantized")
LOADERS = ("load_state_dict", "_load_from_state_dict")
HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


class ModuleLoads:
    """How the modules of one load are loaded, and what of the model in the checkpoint is each one's.

    Args:
        strategy: what has set the modules up.
        modules: the modules, in the order of the checkpoint.
        state: the checkpoint's plain data.
        path: its path.
    """

    def __init__(self, strategy: Strategy, modules: Sequence[nn.Module], state: Mapping[str, Any], path: str) -> None:
        self._strategy, self._modules, self._path = strategy, modules, path
        extra = state.get("extra") or {}
        self._stored_extra: list[dict[str, Any]] = [extra.get(str(number), {}) for number in range(len(modules))]
        self._extra = self._stored_extra
        self._wholes: set[int] = set()
        """The numbers of those that are given a whole state_dict."""

    def check(self, strict: bool) -> None:
        """Find out how each is loaded, and look at what is no tensor.

        Raises:
            CheckpointError: extra state does not fit, or nothing can be loaded into what a module computes.
        """
        for number, module in enumerate(self._modules):
            computes = bool(computed_entries(self._strategy, module))
            if self._strategy.holds_modules and (computes or _loads_itself(module) or _keeps_values(module)):
                self._wholes.add(number)
        self._extra = [
            states if number in self._wholes else fitting_extra_states(module, states, self._path, strict)
            for number, (module, states) in enumerate(zip(self._modules, self._stored_extra, strict=True))
        ]

    def is_filled(self, name: str) -> bool:
        """Return whether a tensor of this name is of a module that is filled in place."""
        number = int(name.split(".", 2)[1]) if name.startswith(".") else 0
        return number not in self._wholes

    def load_wholes(self, checkpoint: Checkpoint, tensors: Mapping[str, Tensor] | None, strict: bool) -> None:
        """Give whole state_dicts to those that are to have them.

        Args:
            checkpoint: where they are read from.
            tensors: the model's, where hooks have changed them.
            strict: what is missing, or fits nowhere, is an error.

        Raises:
            CheckpointError: one does not take it.
        """
        for number in sorted(self._wholes):
            state = _stored(checkpoint, tensors, prefix_of(number))
            _load(self._modules[number], {**state, **self._extra[number]}, strict, self._path)

    def finish(self) -> None:
        """Give those that were filled in place what is no tensor, and call what they have of their own for a load.

        Raises:
            CheckpointError: a method or a hook failed.
        """
        for number, (module, states) in enumerate(zip(self._modules, self._extra, strict=True)):
            if number in self._wholes:
                continue
            if not _loads_itself(module) and not _keeps_values(module):
                set_extra_states(module, states)
                continue
            in_use = module.state_dict(keep_vars=True)
            given = {clean_name(name): value for name, value in in_use.items() if isinstance(value, Tensor)}
            _load(module, {**given, **states}, False, self._path)


def _load(module: nn.Module, state: Mapping[str, Any], strict: bool, path: str) -> None:
    before = dict(module.named_parameters())
    try:
        module.load_state_dict({own_name(module, name): value for name, value in state.items()}, strict=strict)
    except Exception as error:  # what a user's own method raises
        raise CheckpointError(f"{path}: {type(module).__name__} does not take it: {error}") from error
    _refuse_replaced(module, before, path)


def _stored(checkpoint: Checkpoint, tensors: Mapping[str, Tensor] | None, prefix: str) -> dict[str, Tensor]:
    """Return what a checkpoint holds of one module, whole and in host memory, by the names that it has there."""
    names = checkpoint.tensors("model") if tensors is None else tensors
    own = [name for name in names if (name.startswith(prefix) if prefix else not name.startswith("."))]
    if tensors is None:
        return {name[len(prefix) :]: checkpoint.read_tensor("model", name) for name in own}
    return {name[len(prefix) :]: tensors[name] for name in own}


def _refuse_replaced(module: nn.Module, before: Mapping[str, nn.Parameter], path: str) -> None:
    for name, parameter in module.named_parameters():
        if before.get(name) is not parameter:
            raise CheckpointError(
                f"{path}: when {type(module).__name__} loaded it, another Parameter took the place of {clean_name(name)!r}, "
                "which the run's optimizer does not step. Copy the values into the Parameter that is there, under no_grad()."
            )


def _loads_itself(module: nn.Module) -> bool:
    """Return whether a method or a hook of a module's, or of a submodule's, has a part in how it is loaded."""
    return any(not _is_known(each) for each in _loaders(module))


def _keeps_values(module: nn.Module) -> bool:
    """Return whether a module keeps other values than tensors in its state_dict, beside extra states."""
    return any(not is_extra_state(name) for name in extra_states(module))


def _loaders(module: nn.Module) -> Iterator[Any]:
    """Yield what has a part in loading a module: methods that are overridden, and hooks."""
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
    place = getattr(function, "__module__", None) or type(function).__module__
    parts = place.split(".")
    return parts[0] in KNOWN and not any(place == each or place.startswith(f"{each}.") for each in NOT_KNOWN)
