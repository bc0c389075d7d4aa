"""What a loop may call backward on: a loss that a prepared model made and a prepared optimizer can step on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from trainwright.engine.engine import Engine
from trainwright.engine.prepared import PreparedModule, stepped_by
from trainwright.strategies.autograd_graph import graph_leaves


def check_loss(loss: Any, engine: Engine, models: Sequence[nn.Module], options: dict[str, Any]) -> None:
    """Refuse what the backward of a loop with these prepared models cannot use.

    Raises:
        TypeError: it is not a tensor.
        ValueError: it needs no gradients, or no prepared model made it, or no prepared optimizer could step on it.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(f"backward was given a {type(loss).__name__}; accepted is a loss tensor.")
    if loss.numel() != 1 and options.get("gradient") is None:
        raise ValueError(f"backward was given a loss of shape {tuple(loss.shape)}; take its mean or its sum.")
    if not loss.requires_grad:
        raise ValueError(
            "backward was given a loss that needs no gradients; compute it from the outputs of a prepared model, outside "
            "torch.no_grad(), and do not detach it."
        )
    if engine.strategy.holds_modules and models:
        own = {parameter for module in engine.modules for parameter in module.parameters()}
        leaves = graph_leaves(loss)
        if leaves and own.isdisjoint(leaves):
            raise ValueError(
                "backward was given a loss that no prepared model made: none of their parameters are in its graph. Call the "
                "model that accelerator.prepare returned."
            )
    if engine.world_size > 1 and engine.strategy.trains_prepared_only and engine.modules:
        stepped = stepped_by(*engine.optimizers)
        leaves = graph_leaves(loss) if engine.strategy.holds_modules else set()
        if not stepped or (leaves and stepped.isdisjoint(leaves)):
            raise ValueError(
                "backward was given a loss of a model whose optimizer was not prepared; under "
                f"strategy={engine.strategy.name!r} its steps would train nothing, or each rank by itself. "
                "Pass the optimizer to accelerator.prepare, too, with its model, and step what it returns."
            )
    wrapped = [each for each in models if isinstance(each, PreparedModule)]
    if engine.world_size > 1 and wrapped and not any(each.forwards for each in wrapped):
        raise ValueError(
            "backward was given a loss that a method of a prepared model made, or the model as it was before prepare, whose "
            "gradients no strategy averages over the ranks; call the model that accelerator.prepare returned itself, and let "
            "its forward call the method."
        )
