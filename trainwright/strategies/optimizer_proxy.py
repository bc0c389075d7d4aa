"""An optimizer that stands in for the user's own where that one steps other tensors than the module's parameters."""

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
    """An optimizer with the module's own parameters in its groups, in place of the user's, which the engine steps.

    What else the user's class has (methods such as `train` and `eval`) it has too.

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
        """Call a method of the user's optimizer, and let all that it has changed be seen. Collective."""


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the user's optimizer of one that the engine holds."""
    return optimizer.own if isinstance(optimizer, OptimizerProxy) else optimizer
