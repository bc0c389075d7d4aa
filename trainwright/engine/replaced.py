"""Replaced parameters: what a strategy has replaced parameters with, for optimizers that were made before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary


class ReplacedParameters:
    """The replacement of each parameter that was replaced. It keeps none of them alive."""

    def __init__(self) -> None:
        self._now = WeakIdKeyDictionary()

    @contextmanager
    def followed(self, module: nn.Module) -> Iterator[None]:
        """Note which of the module's parameters the block replaces."""
        # By weak references: a model that is sharded may not stay in memory whole as well.
        before = {name: TensorWeakRef(each) for name, each in module.named_parameters(remove_duplicate=False)}
        yield
        for name, now in module.named_parameters(remove_duplicate=False):
            was = before[name]() if name in before else None
            if was is not None and was is not now:
                self._now[was] = now

    def current(self, parameter: Tensor) -> Tensor:
        """Return a parameter's replacement, or the parameter itself."""
        now: Tensor = self._now.get(parameter, parameter)  # type: ignore[no-untyped-call]
        return now

    def update(self, optimizers: Iterable[Optimizer]) -> None:
        """Let optimizers step the replacements of their parameters (ValueError if one has stepped, or would train nothing)."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                now = [self.current(each) for each in group["params"]]
                for old, new in zip(group["params"], now, strict=True):
                    if new is not old and optimizer.state.get(old):
                        raise ValueError(
                            f"the {type(optimizer).__name__} has state for a parameter that the strategy has replaced; prepare "
                            "it before its first step (a new one in each configure_optimizers), and load its state afterwards."
                        )
                    if new.is_meta:
                        raise ValueError(
                            f"the {type(optimizer).__name__} holds a parameter on the meta device, of shape "
                            f"{tuple(new.shape)}, that is in no prepared model, so its steps would train nothing; prepare the "
                            "model before it, or in the same call."
                        )
                group["params"] = now
