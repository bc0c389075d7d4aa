"""Contents: what a run puts into its checkpoint, and where.

    manifest.json               step, epoch, world size, strategy; every tensor's shape, dtype and pieces; every digest
    state.json                  "optimizers": parameter groups and what is no tensor in their state
                                "precision": the loss scale        "seed": what the data's order starts from
                                "strategy": what it needs to go on bitwise alike
                                "extra": what the modules' get_extra_state returned
                                "position": epoch, batch, step        "lr_schedulers", "callbacks"
                                "metrics": the latest value of each
                                "loggers": their run folders, and how far what lies there goes
    model-RRRRR.safetensors     parameters and buffers by their state_dict names; those of a second model begin with ".1."
    optimizer-RRRRR.safetensors per-parameter tensors as "optimizer number/parameter/key"
    parameters-RRRRR.safetensors  what optimizers step and no model holds, as "parameter optimizer number.place"
    rank-RRRRR.json             "rng": the generators of that rank
                                "metrics": within an epoch, its sums of what was logged, and its torchmetrics states
                                (the tensors in them are in rank-RRRRR.safetensors)

RRRRR is the number of the rank that wrote the file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.tensors import TensorEntry
from trainwright.errors import CheckpointError

EXTRA_STATE = "_extra_state"
"""The last part of the state_dict keys under which torch keeps what a module's `get_extra_state` returned."""


def is_extra_state(name: str) -> bool:
    """Return whether a state_dict key stands for a module's extra state, of whatever kind."""
    return name.rpartition(".")[2] == EXTRA_STATE


def extra_states(module: nn.Module) -> dict[str, Any]:
    """Return the extra states in a module's state_dict by their keys."""
    return {name: value for name, value in module.state_dict(keep_vars=True).items() if is_extra_state(name)}


def fitting_extra_states(
    modules: Sequence[nn.Module], state: Mapping[str, Any], path: str, strict: bool
) -> list[dict[str, Any]]:
    """Return what each module's submodules get back of a checkpoint's extra states; with strict all of it has to fit.

    Raises:
        CheckpointError: there is extra state of a submodule that is not there, or that takes none.
    """
    stored = state.get("extra") or {}
    found: list[dict[str, Any]] = []
    for number, module in enumerate(modules):
        states = stored.get(str(number), {})
        fitting = {name: value for name, value in states.items() if _takes_extra_state(module, name)}
        if strict and len(fitting) < len(states):
            odd = sorted(states.keys() - fitting.keys())
            raise CheckpointError(
                f"{path}: it is of another model (extra state only in it: {', '.join(odd[:5])}). Build the model that was "
                "saved, or set strict_loading = False on the module to take what fits."
            )
        found.append(fitting)
    return found


def _takes_extra_state(module: nn.Module, name: str) -> bool:
    try:
        child = module.get_submodule(name.rpartition(".")[0])
    except AttributeError:
        return False
    return type(child).set_extra_state is not nn.Module.set_extra_state


def set_extra_states(module: nn.Module, states: Mapping[str, Any]) -> None:
    """Give the submodules their extra states back."""
    for name, value in states.items():
        module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)


def describe_optimizer(optimizer: Optimizer, names: Mapping[Tensor, str], left_out: Collection[str]) -> dict[str, Any]:
    """Return the optimizer's parameter groups (parameters by name) and what in its state is no parameter's tensor.

    Raises:
        CheckpointError: a key of its state has no place in a checkpoint.
    """
    groups = []
    plain: dict[str, dict[str, Any]] = {}
    shared = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    _check_keys(optimizer, shared)
    for group in optimizer.param_groups:
        stored = {key: value for key, value in group.items() if key not in left_out}
        groups.append({**stored, "params": [names[parameter] for parameter in group["params"]]})
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            _check_keys(optimizer, state)
            values = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
            if values:
                plain[names[parameter]] = values
    return {
        "type": type(optimizer).__name__,
        "groups": groups,
        "plain": plain,
        **({"shared": shared} if shared else {}),
    }


def _check_keys(optimizer: Optimizer, state: Mapping[Any, Any]) -> None:
    for key in state:
        if not isinstance(key, str) or "/" in key:
            raise CheckpointError(
                f"the state of {type(optimizer).__name__} has the key {key!r}; a checkpoint stores names without a slash. "
                "Give it another name in the optimizer."
            )


def check_optimizer(
    number: int, optimizer: Optimizer, names: Mapping[Tensor, str], described: Mapping[str, Any], path: str
) -> None:
    """Refuse to restore an optimizer from the state of one that steps other parameters (CheckpointError)."""
    stored = [name for group in described["groups"] for name in group["params"]]
    present = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    if len(described["groups"]) != len(optimizer.param_groups) or sorted(stored) != sorted(present):
        odd = sorted(set(stored) ^ set(present))[:5]
        raise CheckpointError(
            f"{path}: optimizer {number} was saved with {len(described['groups'])} parameter groups of {len(stored)} "
            f"parameters, but this run's has {len(optimizer.param_groups)} groups of {len(present)}"
            + (f" (unlike: {', '.join(odd)})" if odd else "")
            + ". Build the same optimizer to resume, or load the weights alone."
        )
    if described["type"] != type(optimizer).__name__:
        raise CheckpointError(
            f"{path}: optimizer {number} was saved by {described['type']}, but this run's is a {type(optimizer).__name__}. "
            "Build the same optimizer to resume, or load the weights alone."
        )


def restore_optimizer(optimizer: Optimizer, names: Mapping[Tensor, str], described: Mapping[str, Any]) -> None:
    """Set the parameter groups' values and the plain values of the state; tensors are read into the pieces."""
    for group, stored in zip(optimizer.param_groups, described["groups"], strict=True):
        for key, value in stored.items():
            if key != "params":
                group[key] = value
        for parameter in group["params"]:
            optimizer.state[parameter].update(described["plain"].get(names[parameter], {}))
    optimizer.state.update(described.get("shared", {}))


def with_dtypes_of(
    names: Mapping[Tensor, str], entries: Mapping[str, TensorEntry], model: Mapping[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """Return an optimizer's entries with the state that had its parameter's dtype in the dtype that this has now.

    So a run may go on in another precision, as torch's own load_state_dict lets it.
    """
    present = {name: parameter.dtype for parameter, name in names.items()}

    def converted(name: str, entry: TensorEntry) -> TensorEntry:
        parameter = name.rsplit("/", 1)[0]
        was, dtype = model.get(parameter), present.get(parameter)
        if was is None or dtype is None or was.dtype == dtype or entry.dtype != was.dtype or not entry.shape:
            return entry
        return replace(entry, dtype=dtype)

    return {name: converted(name, entry) for name, entry in entries.items()}
