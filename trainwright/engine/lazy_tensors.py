"""Lazy tensors: parameters and buffers that get their shape in the first forward, if a checkpoint needs it before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainwright.engine.named_state import prefix_of
from trainwright.errors import CheckpointError
from trainwright.tensor_names import clean_name


class LazyTensor(NamedTuple):
    """A tensor without a shape yet, its layer, and its name there."""

    tensor: Any
    layer: nn.Module
    leaf: str


def lazy_tensors(modules: Sequence[nn.Module]) -> dict[str, LazyTensor]:
    """Return the tensors without a shape in the modules' state, by their names in a checkpoint, each of tied ones."""
    found: dict[str, LazyTensor] = {}
    for number, module in enumerate(modules):
        if not any(is_lazy(each) for each in chain(module.parameters(), module.buffers())):
            continue
        for name, value in module.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor) and is_lazy(value):
                path, _, leaf = name.rpartition(".")
                found[prefix_of(number) + clean_name(name)] = LazyTensor(value, module.get_submodule(path), leaf)
    return found


def refuse_lazy_tensors(path: str, modules: Sequence[nn.Module]) -> None:
    """Refuse to save modules with tensors that have no shape yet (CheckpointError)."""
    if names := list(lazy_tensors(modules)):
        more = f" and {len(names) - 1} more" if names[1:] else ""
        raise CheckpointError(
            f"checkpoint {path} was not written: {names[0]!r}{more} is an uninitialised lazy tensor, and a checkpoint stores "
            "tensors with a shape. Save after a forward that reaches the layer, run one on a sample in the module's __init__, "
            "or give the layer its size."
        )


def check_lazy_shapes(path: str, lazy: Mapping[str, LazyTensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse shapes that do not match the output size that a layer was constructed with (CheckpointError)."""
    for name, (_, layer, leaf) in lazy.items():
        size = getattr(layer, "out_features", None) or getattr(layer, "out_channels", None)
        begins_with_size = leaf == "bias" or (leaf == "weight" and not getattr(layer, "transposed", False))
        if size is not None and begins_with_size and name in shapes and shapes[name][:1] != (size,):
            raise CheckpointError(
                f"{path}: it is of another model (other shape: {name} {shapes[name]} there, {(size, '...')} here). Build the "
                "model that was saved, or choose another checkpoint."
            )


def give_shapes(lazy: Mapping[str, LazyTensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Give lazy tensors the shapes that they have in a checkpoint, and no values yet; others stay lazy."""
    # Their layers then draw no values in the first forward, so the generators continue as without a stop.
    for name, (tensor, layer, _) in lazy.items():
        if name not in shapes:
            continue
        if is_lazy(tensor):  # once where it is tied
            tensor.materialize(shapes[name])
        elif tensor.shape != shapes[name]:  # a buffer that its layer resizes when it is loaded
            tensor.resize_(shapes[name])
        if getattr(layer, "num_features", None) == 0 and len(shapes[name]) == 1:
            layer.num_features = shapes[name][0]  # type: ignore[assignment] # an instance norm compares it to its input
