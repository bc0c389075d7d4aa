"""Prepared: the user's optimizers, modules and schedulers as the Engine runs them, for loops that call them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainwright.data.transfer import map_tensors
from trainwright.engine.engine import Engine
from trainwright.engine.optimizers import clear_gradients
from trainwright.engine.prepared_loader import PreparedLoader
from trainwright.engine.window import AccumulationWindows, ModelWindow
from trainwright.precision.base import Closure
from trainwright.strategies.base import Clipping, StepResult


class PreparedOptimizer(Optimizer):
    """Steps an optimizer through the Engine, for the loss scale and the strategy.

    It has the groups, the state and the other attributes of the optimizer that it wraps, so schedulers may be built on it.

    Args:
        optimizer: the optimizer that the strategy prepared.
        windows: whether a step is due. If it is not, a call does nothing. None if every call steps.
        after_step, before_step, after_group: called with the result, and with the optimizer, also when it has another group.
        given: the user's optimizer, if the strategy has replaced it.
        clip_norm: the limit on the gradients' norm in a step, if they were not clipped before.
        has_loss: the loss is computed before a step, so a strategy that steps alone does not call the closure.
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
        after_group: Callable[[Optimizer], None] | None = None,
        has_loss: bool = False,
    ) -> None:
        # Optimizer.__init__ is not called, because groups and state are the inner optimizer's.
        self.optimizer = optimizer
        self.given = optimizer if given is None else given
        self.step_was_skipped = False
        """Whether the latest step was skipped because the gradients contained an inf or a NaN."""
        self.steps_called = self.steps_made = 0
        """How often step was called, and how often it stepped."""
        self._engine, self._windows = engine, windows
        self._before_step, self._after_step = before_step, after_step
        self._clip_norm, self._after_group, self._has_loss = clip_norm, after_group, has_loss
        self._is_done = False
        """Whether a step has used the current gradients."""
        self._cleared_at: int | None = None
        """The number of backwards at a deferred `zero_grad`, or None."""
        self._stepped_in: tuple[ModelWindow, int] | None = None
        """The window of the latest step, and its number of batches then."""

    def __getattr__(self, name: str) -> Any:  # param_groups, state and the other attributes
        if name == "optimizer":  # a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def step(self, closure: Closure | None = None) -> Any:
        """Step at the window's end, unless the gradients are not finite. Return the closure's first result."""
        if closure is None:
            self.step_clipped()
            return None
        losses: list[Any] = []

        def call() -> Any:
            losses.append(closure())
            return losses[-1]

        strategy, precision = self._engine.strategy, self._engine.precision
        takes_closure = strategy.capabilities.takes_closure and precision.takes_closure
        if self._windows is not None and (self._windows.usual_length > 1 or not takes_closure):
            raise TypeError(
                "step was given a closure, which cannot be used with gradient accumulation, with precision '16-mixed', or with "
                f"a strategy that shards (here {self._windows.usual_length} batches a step, precision {precision.name!r} and "
                f"strategy {strategy.name!r}); compute the loss and its backward before step(), or change that setting."
            )
        if self._has_loss or takes_closure:
            self.step_clipped(call=call)
        else:
            # Gradients have to be final (averaged, unscaled) before such a step, so it cannot compute them itself.
            with torch.enable_grad():
                call()
            self.step_clipped()
        return losses[0] if losses else None

    def step_clipped(
        self, norm: float | None = None, value: float | None = None, call: Closure | None = None
    ) -> StepResult | None:
        """Clip, if there is a limit, and step. Return None before the window's end."""
        windows, scale = self._windows, 1.0
        self.steps_called += 1
        if windows is not None:
            if not windows.current.is_at_end:
                self._is_done = False  # a later zero_grad keeps this window's gradients
                return None
            if self._cleared_at == windows.backwards:
                self._drop_waiting()  # cleared after the last backward, so there are no gradients
            self._cleared_at = None
            scale = windows.current.correct(self.optimizer)
        if self._clip_norm is not None and self.optimizer not in self._engine.strategy.finalized:
            norm = self._clip_norm  # otherwise the loop has clipped them already
        if self._before_step is not None:
            self._before_step(self.optimizer)
        result = self._engine.step(self.optimizer, Clipping.needed(norm, value, scale), call)
        self.step_was_skipped = result.skipped
        self.steps_made += not result.skipped
        self._is_done = True
        if windows is not None:
            self._stepped_in = windows.current, windows.current.batches
            windows.clear()
        if self._after_step is not None:
            self._after_step(result)
        return result

    def clip(self, norm: float | None, value: float | None) -> Tensor | None:
        """Clip the gradients for the next step. Return their norm before, if it was computed."""
        scale = self._windows.current.correct(self.optimizer) if self._windows is not None else 1.0
        if norm is not None and self._clip_norm is not None:
            norm = self._clip_norm
        return self._engine.strategy.clip_gradients(self.optimizer, Clipping(norm, value, scale))

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Freeze the parameters of all other optimizers within the block.

        With sync_grad False backward does not average gradients over ranks, for accumulation under manual optimization.
        """
        others = stepped_by(*self._engine.optimizers) - stepped_by(self)
        frozen = [parameter for parameter in others if parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(False)
        self._engine.strategy.refresh_trainable((), in_step=True)
        if not sync_grad:
            self._engine.sync_gradients(False)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)
            self._engine.strategy.refresh_trainable((), in_step=True)
            if not sync_grad:
                self._engine.sync_gradients(True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless their accumulation window has not ended."""
        windows = self._windows
        # Loops call this in every batch, before the backward or after the step. It must not lose a window's gradients.
        if (
            windows is None
            or not windows.is_counting
            or (windows.usual_length == 1 and windows.current.is_at_end)
            or self._is_done
            or self.optimizer in self._engine.strategy.finalized
            # Another model's loss has left gradients since its window ended with a step.
            or (self._stepped_in is not None and self._stepped_in[0].batches == self._stepped_in[1])
        ):
            self.drop_gradients(set_to_none)
        elif windows.current.is_at_end:  # before the last backward, or instead of a step
            self._cleared_at = windows.backwards
            windows.current.put_off(self._drop_waiting)

    def drop_gradients(self, set_to_none: bool = True) -> None:
        """Clear the gradients, also if they wait for the end of a window."""
        self._is_done, self._cleared_at = False, None
        if set_to_none:
            clear_gradients(self.optimizer)
        else:
            self.optimizer.zero_grad(set_to_none)
        if self.optimizer in self._engine.strategy.finalized:  # by a clip without a step
            self._engine.strategy.release(self.optimizer)

    def _drop_waiting(self) -> None:
        if self._cleared_at is not None:
            self.drop_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)
        if self._after_group is not None:
            self._after_group(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


class PreparedModule(nn.Module):
    """A module whose forward runs through the strategy's wrapper and in the precision's context.

    Its parameters, buffers and submodules have the same names as in the user's module, and it has the module's other
    attributes. A method of the user, such as `generate`, runs in the precision's context, but not through the strategy's
    wrapper, so it must not be used for training. A pickle contains only the module. A deep copy has a copy of the module and
    runs in the same precision, but belongs to no optimizer. With `to_float32`, half-precision outputs are converted, so that a
    loss is computed in full precision.
    """

    def __init__(self, engine: Engine, module: nn.Module, *, to_float32: bool) -> None:
        super().__init__()
        self.forwards = self.method_calls = 0
        """How often it was called, and how often its methods ran in the precision's context, with gradients enabled."""
        self.module = module
        self._engine = engine
        self._to_float32 = to_float32
        # A state_dict has the names in the user's module.
        self.register_state_dict_post_hook(  # type: ignore[no-untyped-call]
            lambda _, state, prefix, *__: _rename(state, f"{prefix}module.", prefix)
        )
        self.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
            lambda _, state, prefix, *__: _rename(state, prefix, f"{prefix}module.")
        )

    def __getattr__(self, name: str) -> Any:
        if name == "module":
            return super().__getattr__(name)
        module = self.module
        value = getattr(module, name)
        is_own = inspect.ismethod(value) and value.__self__ is module
        if not is_own or self._engine.precision.forward_context() is None:
            return value

        @wraps(value)
        def in_context(*args: Any, **kwargs: Any) -> Any:
            self.method_calls += torch.is_grad_enabled()
            with self._engine.precision.forward_context() or nullcontext():
                return value(*args, **kwargs)

        return in_context

    def __setattr__(self, name: str, value: Any) -> None:
        inner = None if name == "module" or name in self.__dict__ else getattr(self, "module", None)
        if inner is not None and hasattr(inner, name):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        yield from self.module.named_modules(*args, **kwargs)

    def get_submodule(self, target: str) -> nn.Module:
        return self.module.get_submodule(target)

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedModule:
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        memo[id(self._engine)] = self._engine  # not copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __reduce__(self) -> tuple[Callable[[nn.Module], nn.Module], tuple[nn.Module]]:
        return _itself, (self.module,)  # without the engine, which belongs to this process

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        precision = self._engine.precision
        self.forwards += torch.is_grad_enabled()
        if precision.converts_batch:
            args, kwargs = precision.convert_batch(args), precision.convert_batch(kwargs)
        outputs = self._engine.run(self.module, "forward", *args, **kwargs)
        return map_tensors(_full_precision, outputs) if self._to_float32 else outputs


class PreparedScheduler:
    """A scheduler that skips its step when its optimizers skipped a step, with the attributes of the user's scheduler.

    Args:
        with_optimizer: if False, every call steps.
        repeats: steps of the user's scheduler per step, up to its `total_steps`.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[PreparedOptimizer],
        windows: AccumulationWindows,
        *,
        with_optimizer: bool = True,
        repeats: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self._optimizers, self._windows = optimizers, windows
        self._with_optimizer, self._repeats = with_optimizer, repeats
        self._called, self._made = self._counts()

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step, unless its optimizer was called since and did not step, or its window has not ended."""
        called, made = self._counts()
        # A loop may call it after every call of the optimizer's step, or without one, as at the end of an epoch.
        is_due = made > self._made or (called == self._called and self._windows.current.is_at_end)
        self._called, self._made = called, made
        if self._with_optimizer and not is_due:
            return
        for _ in range(self._repeats):
            total = getattr(self.scheduler, "total_steps", None)
            if self._repeats > 1 and total is not None and self.scheduler.last_epoch >= total:
                return  # OneCycleLR rejects a step beyond its last
            self.scheduler.step(*args, **kwargs)

    def steps_since(self) -> list[int]:
        """Return how often its optimizers' step was called, and made, since its own last step."""
        called, made = self._counts()
        return [called - self._called, made - self._made]

    def take_steps(self, called: int, made: int) -> None:
        """Resume from the counts of `steps_since`."""
        all_called, all_made = self._counts()
        self._called, self._made = all_called - called, all_made - made

    def _counts(self) -> tuple[int, int]:
        called = sum(optimizer.steps_called for optimizer in self._optimizers)
        return called, sum(optimizer.steps_made for optimizer in self._optimizers)


class Preparations:
    """The prepared models, optimizers, loaders and schedulers, in the order of their preparation."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[PreparedOptimizer] = []
        self.loaders: list[PreparedLoader] = []
        self.schedulers: list[PreparedScheduler] = []

    def of(self, obj: Any) -> Any:
        """Return the prepared form of an object, or None if it was not prepared."""
        every = (*self.models, *self.optimizers, *self.loaders, *self.schedulers)
        return next((prepared for prepared in every if any(obj is form for form in _forms(prepared))), None)

    def to_prepare(self, obj: Any) -> Any:
        """Return the user's object if another Accelerator has prepared it, otherwise the same object."""
        return obj if self.of(obj) is not None else _forms(obj)[-1]


def _forms(prepared: Any) -> tuple[Any, ...]:
    """Return an object and its earlier forms, the user's last."""
    if isinstance(prepared, PreparedModule):
        return prepared, prepared.module
    if isinstance(prepared, PreparedOptimizer):
        return prepared, prepared.optimizer, prepared.given
    if isinstance(prepared, PreparedLoader):
        return prepared, prepared.loader
    return (prepared, prepared.scheduler) if isinstance(prepared, PreparedScheduler) else (prepared,)


def stepped_by(*optimizers: Optimizer) -> set[Tensor]:
    return {parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]}


def kind_of(obj: Any) -> str | None:
    """Return the kind of an object, or None if it cannot be prepared."""
    if isinstance(obj, type):
        return None
    if isinstance(obj, nn.Module):
        return "module"
    if isinstance(obj, Optimizer):
        return "optimizer"
    if isinstance(obj, (DataLoader, PreparedLoader)):
        return "loader"
    # With groups, it is a foreign optimizer.
    is_scheduler = all(callable(getattr(obj, name, None)) for name in ("step", "state_dict"))
    return "scheduler" if is_scheduler and not hasattr(obj, "param_groups") else None


def _full_precision(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _itself(module: nn.Module) -> nn.Module:
    return module


def _rename(state: dict[str, Any], old: str, new: str) -> None:
    moved = {name: state.pop(name) for name in list(state) if name.startswith(old)}
    state.update((new + name.removeprefix(old), value) for name, value in moved.items())
