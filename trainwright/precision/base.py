"""The precision contract; the base class is full 32-bit precision.

A precision decides the context of a forward, how the backward runs and how an optimizer steps. It knows nothing about
processes: what ranks do together is the strategy's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Sender = Callable[..., Any]
"""Runs the backward in place of `loss.backward`; called with the loss and backward's keyword arguments."""
Closure = Callable[[], Any]
"""Recomputes the loss and its gradients, for an optimizer that evaluates them several times in a step."""

ReduceMax = Callable[[Tensor], Any]
"""Replaces a tensor by its maximum over the ranks, in place."""


class Precision:
    """The base of precisions, and full precision: nothing is converted, and nothing is scaled.

    Override what yours does differently, and pass the instance as `precision=`.

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
    """The dtype that parameters and buffers are converted to; None keeps their own."""
    autocast_dtype: torch.dtype | None = None
    """The dtype that autocast computes in; None without autocast."""
    has_scaler = False
    """True where losses are multiplied by a scale, against underflow in float16."""
    takes_closure = True
    """True where an optimizer may call a closure again within its step; a loss scale forbids it."""
    converts_batch = False
    """True where `convert_batch` has something to do."""

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Return the dtype that a forward computes in; None for the parameters' own."""
        return self.autocast_dtype or self.param_dtype

    def check(self, device: torch.device) -> None:
        """Raise ValueError for a device that cannot compute in this precision, naming the precisions that it has."""

    def convert_module(self, module: nn.Module) -> None:
        """Convert a module's parameters and buffers to the dtype that it is trained in; nothing here."""

    def convert_batch(self, batch: Any) -> Any:
        """Convert a batch, already on its device, to the dtype that the module takes; unchanged here."""
        return batch

    def init_context(self) -> AbstractContextManager[Any]:
        """Return the context in which modules are made in the dtype that they are trained in."""
        return nullcontext()

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """Return the context to enter for each forward, or None."""
        return None

    def backward_context(self) -> AbstractContextManager[Any] | None:
        """Return the context of a backward, whether it runs inside a forward or after it, or None."""
        return None

    def step_context(self) -> AbstractContextManager[Any]:
        """Return a context that undoes `forward_context`, even inside it, for an optimizer's arithmetic."""
        return nullcontext()

    def backward(self, loss: Tensor, send: Sender | None = None, **options: Any) -> None:
        """Run `send(loss, **options)` if given, otherwise `loss.backward(**options)`."""
        if send is None:
            loss.backward(**options)  # type: ignore[no-untyped-call]
        else:
            send(loss, **options)

    def step(self, optimizer: Optimizer, closure: Closure | None = None) -> bool:
        """Step the optimizer, which may call the closure; return whether the step was skipped."""
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(closure)
        return False

    def unscale(self, optimizer: Optimizer, reduce_max: ReduceMax | None = None) -> None:
        """Divide the optimizer's gradients by the loss scale, once per backward; nothing here.

        Ranks that hold different gradients pass `reduce_max`, so that all of them skip the step if one found an inf.
        """

    def release(self, optimizer: Optimizer) -> None:
        """Note that the optimizer's unscaled gradients were discarded without a step; nothing here."""

    def track(self, optimizers: Sequence[Optimizer]) -> None:
        """Register all optimizers, so that pending gradients can follow a change of the loss scale; nothing here."""

    def reset(self) -> None:
        """Return to the initial state at the start of a run; nothing here."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to continue with the same scale."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
