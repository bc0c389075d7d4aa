"""The precision contract, with full 32-bit precision as its default.

A precision says in which context a forward runs, how a loss is sent backward and how an optimizer is stepped. It knows
nothing of processes: what ranks have to do together is the strategy's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Sender = Callable[..., Any]
"""Sends a loss backward in place of `loss.backward`: called with the loss and with backward's keyword arguments."""
Closure = Callable[[], Any]
"""Computes the loss and its gradients anew, for an optimizer that looks at them several times in a step."""

Agree = Callable[[Tensor], Any]
"""Puts the maximum over the ranks into a tensor, in place."""


class Precision:
    """Full precision: nothing is converted and nothing is scaled."""

    name = "32-true"
    param_dtype: torch.dtype | None = None
    """The dtype that floating-point parameters and buffers are converted to; None where they keep their own."""
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
        """Refuse a device that does not compute in this precision's dtype.

        Raises:
            ValueError: which dtype it is, and which precisions the device has.
        """

    def convert_module(self, module: nn.Module) -> None:
        """Give a module's parameters and buffers the dtype that it is trained in; nothing here."""

    def convert_batch(self, batch: Any) -> Any:
        """Return a batch, already on its device, in the dtype that the module takes; here as it is."""
        return batch

    def init_context(self) -> AbstractContextManager[Any]:
        """Return the context in which modules are made in the dtype that they are trained in."""
        return nullcontext()

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """Return the context that a forward runs in, entered anew for each; None where there is none."""
        return None

    def backward_context(self) -> AbstractContextManager[Any] | None:
        """Return the context of a backward, the same whether it is sent within a forward or after it; None for none."""
        return None

    def step_context(self) -> AbstractContextManager[Any]:
        """Return a context in which nothing of `forward_context` holds, even within it: for an optimizer's arithmetic."""
        return nullcontext()

    def backward(self, loss: Tensor, send: Sender | None = None, **options: Any) -> None:
        """Send the loss backward: by `send(loss, **options)` where it is given, else by `loss.backward(**options)`."""
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

    def unscale(self, optimizer: Optimizer, agree: Agree | None = None) -> None:
        """Divide the gradients of this optimizer by the loss scale, once until the next backward; nothing here.

        `agree` is for ranks that hold different gradients: it is given a tensor that is 1 where one of this rank's is not
        finite, and leaves in it the maximum over the ranks.
        """

    def release(self, optimizer: Optimizer) -> None:
        """Let this optimizer's unscaled gradients go: they were discarded without a step; nothing here."""

    def follow(self, optimizers: Sequence[Optimizer]) -> None:
        """Take note of all optimizers that will be stepped, whose gradients a loss scale has to keep to; nothing here."""

    def reset(self) -> None:
        """Begin anew, as a run does; nothing here."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on with the same scale."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
