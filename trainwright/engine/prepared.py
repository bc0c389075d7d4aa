"""Prepared: a user's objects as the Engine runs them, for loops that call them themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.data.transfer import map_tensors
from trainwright.engine.engine import Engine
from trainwright.precision.base import Closure
from trainwright.strategies.base import Clipping, StepResult

if TYPE_CHECKING:
    from trainwright.engine.window import AccumulationWindows


class PreparedOptimizer(Optimizer):
    """Steps an optimizer through the Engine, so that the loss scale and the strategy have their part in it.

    It is an Optimizer with the groups and the state of the one it stands for, so schedulers may be built on it, and it has
    that one's own methods and attributes.

    Args:
        engine: steps the optimizer.
        optimizer: what the strategy prepared.
        windows: tell whether a step is due; a call at another moment does nothing. None where each call is meant.
        before_step, after_step: told the optimizer before each step, and the result after it.
        given: what the user made, if the strategy has put another in its place.
        clip_norm: the largest norm of the gradients that a step takes, where they were not clipped before; None for any.
        admit: told of this optimizer when a group was added to it.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: Optimizer,
        windows: AccumulationWindows | None = None,
        after_step: Callable[[StepResult], None] | None = None,
        before_step: Callable[[Optimizer], None] | None = None,
        *,
        given: Optimizer | None = None,
        clip_norm: float | None = None,
        admit: Callable[[Optimizer], None] | None = None,
    ) -> None:
        # Optimizer.__init__ is left out: groups and state are the inner optimizer's, and only those.
        self.optimizer = optimizer
        self.given = optimizer if given is None else given
        self.step_was_skipped = False
        """Whether the latest step was left out because the gradients held an inf or a NaN."""
        self.steps_asked = self.steps_made = 0
        """How often it was told to step, and how often it did."""
        self._engine, self._windows = engine, windows
        self._before_step, self._after_step = before_step, after_step
        self._clip_norm, self._admit = clip_norm, admit
        self._is_done = False
        """Whether a step was made with the gradients that are there, and nothing has begun a new window since."""
        self._began = windows.backwards if windows is not None else 0
        """How many losses had been sent backward when it was made."""

    def __getattr__(self, name: str) -> Any:
        """Return what the inner optimizer has of its own, such as the `train` and `eval` of schedule-free ones."""
        if name == "optimizer":  # a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)

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
        windows, call, losses = self._windows, None, []
        if closure is not None:
            if windows is not None:
                self._refuse_closure(windows)

            def call() -> Any:
                losses.append(closure())
                return losses[-1]

        self.step_clipped(call=call)
        return losses[0] if losses else None

    def step_clipped(
        self, norm: float | None = None, value: float | None = None, call: Closure | None = None
    ) -> StepResult | None:
        """Clip where asked and step; None where the window has not ended."""
        windows, scale = self._windows, 1.0
        self.steps_asked += 1
        if windows is not None:
            if not windows.at_hand.is_at_end:
                self._is_done = False
                return None
            scale = windows.at_hand.correct(self.optimizer)
        if self._clip_norm is not None and self.optimizer not in self._engine.strategy.finalized:
            norm = self._clip_norm
        if self._before_step is not None:
            self._before_step(self.optimizer)
        result = self._engine.step(self.optimizer, Clipping.needed(norm, value, scale), call)
        self.step_was_skipped = result.skipped
        self.steps_made += not result.skipped
        self._is_done = True
        if windows is not None:
            windows.has_gradients = False
        if self._after_step is not None:
            self._after_step(result)
        return result

    def clip(self, norm: float | None, value: float | None) -> Tensor | None:
        """Clip the gradients that the next step takes; return their norm before, where it was taken."""
        scale = self._windows.at_hand.correct(self.optimizer) if self._windows is not None else 1.0
        if norm is not None and self._clip_norm is not None:
            norm = self._clip_norm
        return self._engine.strategy.clip_gradients(self.optimizer, Clipping(norm, value, scale))

    def _refuse_closure(self, windows: AccumulationWindows) -> None:
        """Refuse a closure where the optimizer may not call it again and again (TypeError)."""
        strategy, precision = self._engine.strategy, self._engine.precision
        reason = None
        if windows.usual_length > 1:
            reason = f"gradient_accumulation_steps={windows.usual_length}"
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
        self._engine.strategy.refresh_toggled()
        if not sync_grad:
            self._engine.sync_gradients(False)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)
            self._engine.strategy.refresh_toggled()
            if not sync_grad:
                self._engine.sync_gradients(True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, but those of an accumulation window that has not ended yet."""
        windows = self._windows
        is_plain = windows is None or (windows.usual_length == 1 and windows.at_hand.is_at_end)
        if windows is None or is_plain or self._is_done or windows.backwards == self._began:
            self.drop_gradients(set_to_none)

    def drop_gradients(self, set_to_none: bool = True) -> None:
        """Clear the gradients, also those that wait for the end of a window."""
        self._is_done = False
        self.optimizer.zero_grad(set_to_none)
        if self._windows is not None:
            self._began = self._windows.backwards
        strategy = self._engine.strategy
        if self.optimizer in strategy.finalized:
            strategy.release(self.optimizer)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer. Collective in a loop of one's own: call on every rank.

        Raises:
            ValueError: on several ranks, parameters of no prepared model.
        """
        self.optimizer.add_param_group(param_group)
        if self._admit is not None:
            self._admit(self.optimizer)

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

    Its parameters, buffers and submodules have the names that they have in the user's own module. A pickle is that module
    alone; a deep copy has a copy of it and runs in the same precision, but belongs to no optimizer.

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
        self.register_state_dict_post_hook(_own_names)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_inner_names)  # type: ignore[no-untyped-call]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the module's parameters by its own names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the module's buffers by its own names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the module and its submodules by its own names."""
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """Return a submodule by the module's own name for it."""
        return self.module.get_submodule(target)

    def __copy__(self) -> PreparedModule:
        copied = self.__class__.__new__(self.__class__)
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedModule:
        """Return one whose module is a copy, and whose engine is the same."""
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        memo[id(self._engine)] = self._engine
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __reduce__(self) -> tuple[Callable[[nn.Module], nn.Module], tuple[nn.Module]]:
        """Pickle the module alone: an engine is of this process."""
        return _itself, (self.module,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        precision = self._engine.precision
        if precision.converts_batch:
            args, kwargs = precision.convert_batch(args), precision.convert_batch(kwargs)
        outputs = self._engine.run(self.module, "forward", *args, **kwargs)
        return map_tensors(_full_precision, outputs) if self._to_float32 else outputs


class PreparedScheduler:
    """A scheduler that leaves out what its optimizer left out. What else the scheduler has, this one has.

    Args:
        scheduler: the user's own, to be had back as `.scheduler`.
        optimizers: those whose rates it sets.
        windows: tell whether a step is due.
    """

    def __init__(self, scheduler: Any, optimizers: Sequence[PreparedOptimizer], windows: AccumulationWindows) -> None:
        self.scheduler = scheduler
        self._optimizers, self._windows = optimizers, windows
        self._asked, self._made = self._counts()

    def __getattr__(self, name: str) -> Any:
        """Return what the scheduler has."""
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step, unless its optimizer was told to since the last time and did not, or its window has not ended."""
        asked, made = self._counts()
        is_due = made > self._made or (asked == self._asked and self._windows.at_hand.is_at_end)
        self._asked, self._made = asked, made
        if is_due:
            self.scheduler.step(*args, **kwargs)

    def steps_since(self) -> list[int]:
        """Return how often its optimizers were told to step since its own last one, and how often they did."""
        asked, made = self._counts()
        return [asked - self._asked, made - self._made]

    def take_steps(self, asked: int, made: int) -> None:
        """Go on from what `steps_since` returned."""
        all_asked, all_made = self._counts()
        self._asked, self._made = all_asked - asked, all_made - made

    def _counts(self) -> tuple[int, int]:
        return sum(each.steps_asked for each in self._optimizers), sum(each.steps_made for each in self._optimizers)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner scheduler's state."""
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the inner scheduler's state."""
        self.scheduler.load_state_dict(state)


def _full_precision(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _itself(module: nn.Module) -> nn.Module:
    return module


def _own_names(prepared: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give a state_dict the names of the module itself."""
    _rename(state, f"{prefix}module.", prefix)
    _rename(getattr(state, "_metadata", {}), f"{prefix}module.", prefix, end=".")


def _inner_names(prepared: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let a state_dict with the module's own names be found from here."""
    _rename(state, prefix, f"{prefix}module.")


def _rename(names: dict[str, Any], old: str, new: str, end: str = "") -> None:
    moved = {name: names.pop(name) for name in list(names) if (name + end).startswith(old)}
    for name, value in moved.items():
        names[(new + (name + end).removeprefix(old)).removesuffix(end)] = value
