"""Preparations: what an Accelerator has prepared, and for which of the user's objects each stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainwright.engine.prepared import PreparedModule, PreparedOptimizer, PreparedScheduler
from trainwright.engine.prepared_loader import PreparedLoader


class Preparations:
    """The prepared models, optimizers, loaders and schedulers, each in the order in which they were given."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[PreparedOptimizer] = []
        self.loaders: list[PreparedLoader] = []
        self.schedulers: list[PreparedScheduler] = []

    def of(self, given: Any) -> Any:
        """Return what stands for an object, which may be that itself; None where it was not prepared."""
        for model in self.models:
            if given is model or (isinstance(model, PreparedModule) and given is model.module):
                return model
        for optimizer in self.optimizers:
            if given is optimizer or given is optimizer.optimizer or given is optimizer.given:
                return optimizer
        for loader in self.loaders:
            if given is loader or given is loader.loader:
                return loader
        for scheduler in self.schedulers:
            if given is scheduler or given is scheduler.scheduler:
                return scheduler
        return None

    def to_prepare(self, given: Any) -> Any:
        """Return an object as the user made it, where another Accelerator has prepared it; else as it is."""
        if self.of(given) is not None:
            return given
        if isinstance(given, PreparedModule):
            return given.module
        if isinstance(given, PreparedOptimizer):
            return given.given
        if isinstance(given, PreparedLoader):
            return given.loader
        return given.scheduler if isinstance(given, PreparedScheduler) else given


KINDS: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("module", lambda each: isinstance(each, nn.Module)),
    ("optimizer", lambda each: isinstance(each, Optimizer)),
    ("loader", lambda each: isinstance(each, (DataLoader, PreparedLoader))),
    ("scheduler", lambda each: isinstance(each, PreparedScheduler) or _is_scheduler(each)),
)


def kind_of(each: Any) -> str | None:
    """Return which kind of object this is; None for what cannot be prepared."""
    return next((name for name, fits in KINDS if fits(each)), None)


def _is_scheduler(each: Any) -> bool:
    has = all(callable(getattr(each, name, None)) for name in ("step", "state_dict"))
    return has and not hasattr(each, "param_groups")  # which is an optimizer of another kind
