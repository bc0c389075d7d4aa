"""Gradients that wait over an epoch's end for a step of manual optimization, for a checkpoint and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from trainwright.compiled_names import clean_name


def held_gradients(modules: Sequence[nn.Module]) -> list[dict[str, Tensor]]:
    """Return what this rank holds of each module's gradients, by the names of the parameters."""
    return [
        {
            clean_name(name): _local(parameter.grad).detach()
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }
        for module in modules
    ]


def hold_gradients(modules: Sequence[nn.Module], held: Sequence[Mapping[str, Tensor]]) -> None:
    """Give the parameters what `held_gradients` returned on this rank, in a job of the same strategy and size."""
    for module, gradients in zip(modules, held, strict=True):
        for name, parameter in module.named_parameters():
            gradient = gradients.get(clean_name(name))
            if gradient is not None:
                parameter.grad = _like(gradient, parameter)


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _like(gradient: Tensor, parameter: Any) -> Tensor:
    """Return a gradient on the parameter's device, and sharded as it is."""
    gradient = gradient.to(parameter.device).clone()
    if not hasattr(parameter, "to_local"):
        return gradient
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        gradient,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
