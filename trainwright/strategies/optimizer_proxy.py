"""A proxy for the user's optimizer, whose groups show the module's parameters while the engine steps other tensors."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trainwright.strategies.group_view import GroupView


class OptimizerProxy(Optimizer):
    """Shows the module's own parameters in its groups; other attributes (such as `train` and `eval`) are the user's.

    Args:
        own: the user's optimizer.
        parameters: of each group, the module's own parameters.
    """

    def __init__(self, own: Optimizer, parameters: Sequence[Sequence[Tensor]]) -> None:
        self.own = own
        views: list[Any] = [GroupView(group, each) for group, each in zip(own.param_groups, parameters, strict=True)]
        self.param_groups = views
        self.defaults = own.defaults
        self.__class__ = type(type(own).__name__, (type(self),), {})  # a checkpoint names the optimizer's class

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "own" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self.own, name)
        return partial(self._call, value) if inspect.ismethod(value) else value

    @abstractmethod
    def _call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the user's optimizer, and publish the weights that it changed. Collective."""


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the user's optimizer behind a proxy."""
    return optimizer.own if isinstance(optimizer, OptimizerProxy) else optimizer
