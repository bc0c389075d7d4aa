"""The precision contract. The base class is full 32-bit precision.

A precision chooses the context of a forward, and runs the backward and the optimizer's step. It knows nothing about processes,
which belong to the strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Sender = Callable[..., Any]
"""Runs the backward in place of `loss.backward`, with the loss and the keyword arguments of backward."""
Closure = Callable[[], Any]
"""Recomputes the loss and its gradients, for an optimizer that evaluates them several times in a step."""
ReduceMax = Callable[[Tensor], Any]
"""Replaces a tensor by its maximum over the ranks, in place."""


class Precision:
    """The base of precisions, and full precision, which converts and scales nothing.

    Override the methods that differ in your precision, and pass an instance as `precision=`.

    >>> class UncachedAutocast(tw.Precision):
    ...     name = "bf16-uncached"
    ...     autocast_dtype = torch.bfloat16
    ...
    ...     def forward_context(self):
    ...         return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    >>> trainer = tw.Trainer(precision=UncachedAutocast(), accelerator="cpu", max_epochs=1, enable_model_summary=False)
    >>> trainer.fit(module, loader)
    """

    name = "32-true"
    param_dtype: torch.dtype | None = None
    """The dtype that parameters and buffers are converted to. None converts nothing."""
    autocast_dtype: torch.dtype | None = None
    """The dtype that autocast computes in, or None if there is no autocast."""
    has_scaler = False
    """True if losses are multiplied by a scale, against underflow in float16."""
    takes_closure = True
    """True if an optimizer may call a closure again within its step, which a loss scale forbids."""
    converts_batch = False
    """True if `convert_batch` changes batches."""

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Return the dtype that a forward computes in, or None for the dtype of the parameters."""
        return self.autocast_dtype or self.param_dtype

    def check(self, device: torch.device) -> None:
        """Raise ValueError, with the possible precisions, for a device that cannot compute in this one."""

    def convert_module(self, module: nn.Module) -> None:
        """Convert a module's parameters and buffers to the dtype that it is trained in. The base converts nothing."""

    def restore_module(self, module: nn.Module) -> None:
        """Remove from a module, after a run, everything that is not in its parameters and buffers. The base adds nothing."""

    def convert_batch(self, batch: Any) -> Any:
        """Return a batch, already on its device, in the dtype that the module takes. The base converts nothing."""
        return batch

    def init_context(self) -> AbstractContextManager[Any]:
        """Return the context that makes new modules have the dtype in which they are trained."""
        return nullcontext()

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """Return the context of a forward, or None."""
        return None

    def backward_context(self) -> AbstractContextManager[Any] | None:
        """Return the context of a backward, whether it runs inside a forward or after it, or None."""
        return None

    def step_context(self) -> AbstractContextManager[Any]:
        """Return a context that undoes `forward_context`, even inside it, for an optimizer's arithmetic."""
        return nullcontext()

    def backward(self, loss: Tensor, send: Sender | None = None, **options: Any) -> None:
        """Run `send(loss, **options)` if `send` is passed, otherwise `loss.backward(**options)`."""
        if send is None:
            loss.backward(**options)  # type: ignore[no-untyped-call]
        else:
            send(loss, **options)

    def step(self, optimizer: Optimizer, closure: Closure | None = None) -> bool:
        """Step the optimizer, which may call the closure. Return whether the step was skipped."""
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(closure)
        return False

    def unscale(self, optimizer: Optimizer, reduce_max: ReduceMax | None = None) -> None:
        """Divide the optimizer's gradients by the loss scale, once per backward. The base does nothing.

        Ranks with different gradients pass `reduce_max`, so that all of them skip the step if one found an inf.
        """

    def release(self, optimizer: Optimizer) -> None:
        """Account for unscaled gradients that were discarded without a step. The base does nothing."""

    def track(self, optimizers: Sequence[Optimizer]) -> None:
        """Register all optimizers, whose pending gradients follow changes of the loss scale. The base does nothing."""

    def reset(self) -> None:
        """Return to the initial state at the start of a run. The base has no state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to continue with the same scale."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a result of `state_dict`."""
