"""Prepared: a user's optimizer as the Engine steps it, for loops that call `optimizer.step()` themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trainwright.engine.engine import Engine
from trainwright.precision import StepResult


class PreparedOptimizer(Optimizer):
    """Steps an optimizer through the Engine, so that the loss scale and the strategy have their part in it.

    It is an Optimizer with the groups and the state of the one it stands for, so schedulers may be built on it.

    Args:
        engine: steps the optimizer.
        optimizer: what the strategy prepared.
        is_due: tells whether a step is due (an accumulation window ends); a call at another moment does nothing.
        after_step: told each result.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: Optimizer,
        is_due: Callable[[], bool] | None = None,
        after_step: Callable[[StepResult], None] | None = None,
    ) -> None:
        # Optimizer.__init__ is left out: groups and state are the inner optimizer's, and only those.
        self.optimizer = optimizer
        self.step_was_skipped = False
        """Whether the latest step was left out because the gradients held an inf or a NaN."""
        self._engine = engine
        self._is_due = is_due
        self._after_step = after_step

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the inner optimizer's groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Return the inner optimizer's state by parameter."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the inner optimizer's default options."""
        return self.optimizer.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step once the window ends, unless the gradients are not finite."""
        if closure is not None:
            raise TypeError(
                "a prepared optimizer takes no closure; compute the loss and its backward before step(), or step the inner "
                "optimizer (.optimizer) yourself."
            )
        if self._is_due is not None and not self._is_due():
            return
        result = self._engine.step(self.optimizer)
        self.step_was_skipped = result.skipped
        if self._after_step is not None:
            self._after_step(result)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; within an accumulation window nothing happens."""
        if self._is_due is None or self._is_due():
            self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state_dict."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state_dict."""
        self.optimizer.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"


def unscaled_gradients(engine: Engine, optimizers: list[Optimizer]) -> list[Tensor]:
    """Divide the optimizers' gradients by the loss scale, once a step, and return them."""
    for optimizer in optimizers:
        engine.precision.unscale(optimizer)
    return [p.grad for o in optimizers for group in o.param_groups for p in group["params"] if p.grad is not None]
