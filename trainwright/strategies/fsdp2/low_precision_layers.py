"""Low-precision layers: their weights may be gathered in the low dtype, because autocast computes in it anyway.

All other parameters stay float32, as on one process: norms, embeddings, recurrent nets and parametrizations. So do a module's
bare parameters, whose use is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from trainwright.strategies.fsdp2.wrap_policy import has_forward

SMALL = 100_000
"""Up to this many elements a layer's float32 parameters stay whole on every rank, because sharding costs more."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
FORWARDS = frozenset(kind.forward for kind in (nn.Linear, nn.MultiheadAttention, *CONVOLUTIONS))
PROJECTIONS = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")
NAMES = frozenset(["weight", "bias", "bias_k", "bias_v", *PROJECTIONS])
"""The parameters of such layers. A layer with others computes its weights from them."""


def is_low(module: nn.Module) -> bool:
    """Return whether autocast uses this layer's parameters in the low dtype."""
    return type(module).forward in FORWARDS and module._parameters.keys() <= NAMES and not is_parametrized(module)


@dataclass
class Float32:
    whole: set[tuple[nn.Module, str]] = field(default_factory=set)
    """Parameters that stay whole on every rank, by their module and name."""
    groups: set[nn.Module] = field(default_factory=set)
    """Modules that are sharded as a separate group."""

    def parameters(self, module: nn.Module) -> Iterator[Any]:
        """Yield the parameters within a module that stay whole on every rank."""
        for each in module.modules():
            for name, parameter in each.named_parameters(recurse=False):
                if (each, name) in self.whole:
                    yield parameter


def find_float32(module: nn.Module) -> Float32:
    """Return the parts of a module that stay float32.

    A parameter of more than SMALL elements may be tied to a low-precision layer, or be bare in a module with children. It can
    neither stay whole nor be a separate group, so it stays in its group.
    """
    owners: dict[Tensor, list[nn.Module]] = {}
    for each in module.modules():
        for parameter in each.parameters(recurse=False):
            owners.setdefault(parameter, []).append(each)
    found, done = Float32(), set[nn.Module]()
    for each in module.modules():
        if each in done or is_low(each):
            continue
        members = list(each.modules()) if is_parametrized(each) else [each]
        done.update(members)
        inside = set(members)
        own = [
            (member, name, parameter)
            for member in members
            for name, parameter in member._parameters.items()
            if parameter is not None and parameter.is_floating_point() and not any(map(is_low, owners[parameter]))
        ]
        is_unit = all(inside.issuperset(owners[parameter]) for *_, parameter in own) and not any(
            True for child in each.modules() if child not in inside for _ in child.parameters(recurse=False)
        )
        if sum(parameter.numel() for *_, parameter in own) > SMALL and is_unit and has_forward(each):
            found.groups.add(each)
        else:
            found.whole.update((member, name) for member, name, parameter in own if parameter.numel() <= SMALL)
    return found


def allow_float32(module: nn.Module) -> None:
    """Let low-precision layers run in float32 inside a user's context that turns autocast off."""
    for each in module.modules():
        if is_low(each) and _as_float32 not in each._forward_pre_hooks.values():
            each.register_forward_pre_hook(_as_float32)
            each.register_forward_hook(_as_it_was, always_call=True)


def _as_float32(module: nn.Module, args: Any) -> Any:
    gathered = module._parameters
    if torch.compiler.is_compiling() or not any(_is_half(each) for each in gathered.values()):
        return None
    device = next(each.device.type for each in gathered.values() if each is not None)
    if not torch.is_autocast_enabled(device):
        module.__dict__["_gathered"] = dict(gathered)
        gathered.update({name: each.float() for name, each in gathered.items() if _is_half(each)})  # type: ignore[union-attr, misc]
        # Inputs created in the dtype of `layer.weight` would be float32 on one process.
        return tuple(each.float() if isinstance(each, Tensor) and _is_half(each) else each for each in args)
    return None


def _as_it_was(module: nn.Module, args: Any, output: Any) -> None:
    gathered = module.__dict__.pop("_gathered", None)
    if gathered is not None:
        module._parameters.update(gathered)


def _is_half(parameter: Tensor | None) -> bool:
    return parameter is not None and parameter.dtype in (torch.bfloat16, torch.float16)
