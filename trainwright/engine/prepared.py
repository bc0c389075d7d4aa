"""Prepared: a user's objects as the Engine runs them, for loops that call them themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.data.transfer import map_tensors
from trainwright.engine.engine import Engine
from trainwright.precision.base import Closure, StepResult

if TYPE_CHECKING:
    from trainwright.engine.window import AccumulationWindow


class PreparedOptimizer(Optimizer):
    """Steps an optimizer through the Engine, so that the loss scale and the strategy have their part in it.

    It is an Optimizer with the groups and the state of the one it stands for, so schedulers may be built on it.

    Args:
        engine: steps the optimizer.
        optimizer: what the strategy prepared.
        window: tells whether a step is due, and whether gradients may be cleared; a call at another moment does nothing.
            None where each call is meant.
        before_step, after_step: told the optimizer before each step, and the result after it.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: Optimizer,
        window: AccumulationWindow | None = None,
        after_step: Callable[[StepResult], None] | None = None,
        before_step: Callable[[Optimizer], None] | None = None,
    ) -> None:
        # Optimizer.__init__ is left out: groups and state are the inner optimizer's, and only those.
        self.optimizer = optimizer
        self.step_was_skipped = False
        """Whether the latest step was left out because the gradients held an inf or a NaN."""
        self.is_unscaled = False
        """Whether the gradients have been divided by the loss scale, and no step has been made with them."""
        self._engine, self._window = engine, window
        self._before_step, self._after_step = before_step, after_step

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

    def step(self, closure: Closure | None = None) -> Any:
        """Step once the window ends, unless the gradients are not finite; return what the closure first returned, if any."""
        window, call, losses = self._window, None, []
        if closure is not None:
            if window is not None:
                self._refuse_closure(window)

            def call() -> Any:
                losses.append(closure())
                return losses[-1]

        if window is not None and not window.is_at_end:
            return None
        clip = None
        if window is not None and window.correction != 1.0:
            clip = self._engine.clipper(scale=window.correct(self.optimizer))
        if self._before_step is not None:
            self._before_step(self.optimizer)
        result = self._engine.step(self.optimizer, clip, call)
        self.step_was_skipped, self.is_unscaled = result.skipped, False
        if window is not None:
            window.has_gradients = False
        if self._after_step is not None:
            self._after_step(result)
        return losses[0] if losses else None

    def _refuse_closure(self, window: AccumulationWindow) -> None:
        """Refuse a closure where the optimizer may not call it again and again (TypeError)."""
        strategy, precision = self._engine.strategy, self._engine.precision
        reason = None
        if window.usual_length > 1:
            reason = f"gradient_accumulation_steps={window.usual_length}"
        elif not precision.takes_closure:
            reason = f"precision {precision.name!r}"
        elif not strategy.takes_closure:
            reason = f"strategy {strategy.name!r}"
        if reason is not None:
            raise TypeError(
                f"step was given a closure, which cannot hold under {reason}; compute the loss and its backward before step(), "
                "or leave that setting at its default."
            )

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Within this context only this optimizer's parameters require gradients, of all that optimizers step.

        With sync_grad False backward leaves the ranks' gradients apart, for accumulation under manual optimization.
        """
        own = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        frozen = [
            parameter
            for optimizer in self._engine.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) not in own and parameter.requires_grad
        ]
        for parameter in frozen:
            parameter.requires_grad_(False)
        self._engine.strategy.follow_toggle()
        if not sync_grad:
            self._engine.sync_gradients(False)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)
            self._engine.strategy.follow_toggle()
            if not sync_grad:
                self._engine.sync_gradients(True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; within an accumulation window nothing happens."""
        if self._window is None or self._window.may_clear:
            self.optimizer.zero_grad(set_to_none)
            if self.is_unscaled:
                self._engine.strategy.forget(self.optimizer)
                self.is_unscaled = False

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


class PreparedModule(nn.Module):
    """A module whose forward runs through the strategy's wrapper and in the precision's context.

    Args:
        engine: runs it.
        module: the user's own, to be had back as `.module`.
        to_float32: whether half-precision outputs are converted, so that a loss is computed in full precision.
    """

    def __init__(self, engine: Engine, module: nn.Module, *, to_float32: bool) -> None:
        super().__init__()
        self.module = module
        self._engine = engine
        self._to_float32 = to_float32

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        precision = self._engine.precision
        if precision.converts_batch:
            args, kwargs = precision.convert_batch(args), precision.convert_batch(kwargs)
        outputs = self._engine.run(self.module, "forward", *args, **kwargs)
        return map_tensors(_full_precision, outputs) if self._to_float32 else outputs


class PreparedScheduler:
    """A scheduler that steps once for each optimizer step that was made.

    Args:
        scheduler: the user's own, to be had back as `.scheduler`.
        is_due: tells whether an optimizer step was made.
    """

    def __init__(self, scheduler: Any, is_due: Callable[[], bool]) -> None:
        self.scheduler = scheduler
        self._is_due = is_due

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step, unless the optimizer did not."""
        if self._is_due():
            self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return list(self.scheduler.get_last_lr())

    def state_dict(self) -> dict[str, Any]:
        """Return the inner scheduler's state."""
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the inner scheduler's state."""
        self.scheduler.load_state_dict(state)


def _full_precision(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
