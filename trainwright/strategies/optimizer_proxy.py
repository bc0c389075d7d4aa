"""Optimizer proxy: shows the module's own parameters in its groups, while an engine steps other tensors."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections import UserDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

REPLACED = (
    "the parameters of an optimizer's group were replaced after this strategy had divided them among the ranks. Copy the new "
    "values into the parameters that are there (under torch.no_grad()), or choose 'ddp', which takes other parameters in "
    "on_train_epoch_start."
)


class GroupView(UserDict[str, Any]):
    """The group that an engine steps, with all its options, so that schedulers and loads reach the step, but other tensors."""

    def __init__(self, stepped: dict[str, Any], parameters: Iterable[Tensor]) -> None:
        self.data = stepped
        self.parameters = list(parameters)

    def __getitem__(self, key: str) -> Any:
        return self.parameters if key == "params" else super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":  # the engine would step them on every rank, with that rank's own gradients
            raise RuntimeError(REPLACED)
        super().__setitem__(key, value)


class OptimizerProxy(Optimizer):
    """Shows `parameters`, those of each group; other attributes (such as `train` and `eval`) are the user's optimizer's."""

    def __init__(self, own: Optimizer, parameters: Sequence[Sequence[Tensor]]) -> None:
        self.own = own
        self.param_groups: list[Any] = list(map(GroupView, own.param_groups, parameters))
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


class UsedParameters:
    """Records which parameters receive gradients: a step leaves the others alone, where engines fill in zeros."""

    def __init__(self) -> None:
        self._found: set[Tensor] = set()
        self._hooks: list[Any] = []

    def track(self, parameters: Iterable[Any]) -> None:
        for parameter in parameters:
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._found.add))

    def is_unused(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Return whether no rank used a parameter; if another rank did, its averaged gradient is not zero."""
        return parameter not in self._found and not bool(gradient.any())

    def clear(self) -> None:
        """Start over, after a step or when gradients were discarded."""
        self._found.clear()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._found.clear()
