"""LossCheck: rejects losses on which a loop cannot call backward."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from trainwright.engine.engine import Engine
from trainwright.engine.prepared import PreparedModule, stepped_by
from trainwright.errors import a_type_of
from trainwright.raw_loop.loop_objects import Preparation
from trainwright.strategies.module_checks import graph_leaves


class LossCheck:
    """Checks every loss in a few calls, and walks the autograd graph of the first one."""

    def __init__(self, engine: Engine, preparation: Preparation) -> None:
        self._engine, self._preparation = engine, preparation
        self._has_passed = False
        """Whether a loss has passed the check."""
        self._has_autocast = False
        """Whether the loop has asked for the precision's context, to compute a loss in it without a prepared model."""

    def forward_context(self, is_enabled: bool) -> AbstractContextManager[Any] | None:
        """Return the precision's context, for computations of the loop outside its models."""
        self._has_autocast = self._has_autocast or is_enabled
        return self._engine.precision.forward_context()

    def check(self, loss: Any, options: dict[str, Any]) -> None:
        """Check a loss before its backward, whose keyword arguments are `options`.

        Raises:
            TypeError: the loss is not a tensor.
            ValueError: it needs no gradients, or no prepared model made it, or no prepared optimizer could step on it.
            RuntimeError: nothing was prepared.
        """
        if not isinstance(loss, Tensor):
            raise TypeError(f"backward was given {a_type_of(loss)}. Expected a loss tensor.")
        if loss.numel() != 1 and options.get("gradient") is None:
            raise ValueError(f"backward was given a loss of shape {tuple(loss.shape)}. Take its mean or its sum.")
        if not loss.requires_grad:
            raise ValueError(
                "backward was given a loss that needs no gradients. Compute it from the outputs of a prepared model, outside "
                "torch.no_grad(), and do not detach it."
            )
        if not self._has_passed:
            self._check_first(loss)
            self._has_passed = True

    def _check_first(self, loss: Tensor) -> None:
        """Reject the first loss if it does not belong to prepared models and optimizers. It walks the graph of the loss."""
        engine, preparation = self._engine, self._preparation
        if not preparation.models and not preparation.optimizers:
            raise RuntimeError(
                "backward was called before a model was prepared. Pass the model and its optimizer to accelerator.prepare, "
                "and compute the loss with the model that it returns."
            )
        leaves = graph_leaves(loss) if engine.strategy.capabilities.holds_modules else set[Tensor]()
        weights = {parameter for module in engine.modules for parameter in module.parameters()}
        if leaves and leaves.isdisjoint(weights | stepped_by(*preparation.optimizers)):
            raise ValueError(
                "backward was given a loss that no prepared model made: none of their parameters are in its graph. Call the "
                "model that accelerator.prepare returned."
            )
        if engine.modules:
            self._check_optimizer(leaves)
            self._check_forward(leaves & weights)

    def _check_optimizer(self, leaves: set[Tensor]) -> None:
        """Reject a loss without a prepared optimizer (ValueError) if another optimizer would train it wrongly."""
        engine = self._engine
        trains_prepared_only = engine.world_size > 1 and engine.strategy.capabilities.trains_prepared_only
        stepped = stepped_by(*engine.optimizers)
        is_stepped = bool(stepped) and not (leaves and stepped.isdisjoint(leaves))
        if is_stepped or not (engine.precision.has_scaler or trains_prepared_only):
            return
        if trains_prepared_only:
            reason = (
                f"under strategy={engine.strategy.name!r} its steps would train nothing, or each rank separately. "
                "Pass the optimizer to accelerator.prepare, too, with its model, and step the optimizer that it returns."
            )
        else:
            reason = (
                f"precision {engine.precision.name!r} multiplies losses by a scale, and only a prepared optimizer divides the "
                "gradients by it. Pass the optimizer to accelerator.prepare, too, and step the optimizer that it returns."
            )
        raise ValueError(f"backward was given a loss of a model whose optimizer was not prepared; {reason}")

    def _check_forward(self, weights: set[Tensor]) -> None:
        """Reject a loss with these weights of prepared models (ValueError) if no prepared model was called."""
        engine = self._engine
        models = [model for model in self._preparation.models if isinstance(model, PreparedModule)]
        if not models or any(model.forwards for model in models):
            return
        if engine.world_size > 1:
            raise ValueError(
                "backward was given a loss that a method of a prepared model made, or the model as it was before prepare, "
                "whose gradients no strategy averages over the ranks. Call the model that accelerator.prepare returned "
                "itself, and let its forward call the method."
            )
        is_precise = self._has_autocast or any(model.method_calls for model in models)
        if weights and not is_precise and engine.precision.forward_context() is not None:
            raise ValueError(
                "backward was given a loss of the model as it was before prepare, or of a part of it, which does not compute "
                f"in precision {engine.precision.name!r}. Prepare does not change your model. Call the model that "
                "accelerator.prepare returned, or call a part of it within accelerator.autocast()."
            )
