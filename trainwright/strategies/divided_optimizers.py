"""Divided optimizers: which optimizers may step a shard, how a strategy shows them, and their shards after a run."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections import UserDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adafactor, Adagrad, Adam, Adamax, NAdam, Optimizer, RAdam, RMSprop, Rprop

from trainwright.optim import SplitOptimizer

ELEMENTWISE = (SGD, Adam, Adagrad, NAdam, RAdam, Adamax, ASGD, Rprop, RMSprop, Adadelta)  # AdamW is an Adam
"""torch's optimizers that step every element independently."""
UNSHARDED = (Adafactor, Rprop)
"""torch's optimizers that cannot step DTensors. Others fail in their first step."""
ELEMENTWISE_OF_DEEPSPEED = ("FusedAdam", "DeepSpeedCPUAdam", "FusedLion", "DeepSpeedCPULion", "DeepSpeedCPUAdagrad")
REPLACED = (
    "the parameters of an optimizer's group were replaced after this strategy had divided them among the ranks. Copy the new "
    "values into the existing parameters (under torch.no_grad()), or choose 'ddp', which accepts other parameters in "
    "on_train_epoch_start."
)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def with_gradients(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for parameter in parameters_of(optimizer) if parameter.grad is not None]


def refuse_undivided(optimizer: Optimizer, strategy: str, accepts_unknown: bool) -> None:
    """Raise ValueError for an optimizer that may step an element by other elements, such as of its matrix."""
    if isinstance(optimizer, (SplitOptimizer, torch.optim.Muon)):  # whose rounding in bfloat16 depends on the shards
        raise ValueError(
            f"{type(optimizer).__name__} steps whole matrices, and strategy={strategy!r} gives a rank only a shard of their "
            "elements. Choose strategy='ddp', or 'ddp_sharded', which divides the optimizer's state by whole tensors. To use "
            f"{strategy!r}, choose another optimizer, such as AdamW."
        )
    if not (accepts_unknown or is_elementwise(optimizer)):
        raise ValueError(
            f"{type(optimizer).__name__} is not known to step every element independently, and strategy={strategy!r} gives "
            "a rank only a shard of the elements. If it does, pass elementwise=True to the strategy. Otherwise choose "
            "strategy='ddp' or 'ddp_sharded', which step whole tensors, or another optimizer, such as AdamW."
        )


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to step every element independently, or inherits such a step."""
    kind = type(optimizer)
    if kind.__module__.startswith("deepspeed.ops.") and kind.__name__ in ELEMENTWISE_OF_DEEPSPEED:
        return True
    return any(
        all(
            inspect.unwrap(getattr(kind, name)) is inspect.unwrap(getattr(known, name))
            for name in ("step", "_init_group")
            if hasattr(known, name)
        )
        for known in ELEMENTWISE
        if isinstance(optimizer, known)
    )


def no_shards(optimizer: Optimizer) -> str:
    """Return the text of the error for an optimizer that cannot compute on sharded parameters."""
    return (
        f"{type(optimizer).__name__} does not compute on the sharded parameters (DTensors) that strategy='fsdp' gives it. Use "
        "another optimizer, such as AdamW, or strategy='ddp' or 'ddp_sharded', where a parameter is stepped whole."
    )


class GroupView(UserDict[str, Any]):
    """A group with all options of the group that an engine steps, but with other tensors.

    So options set by schedulers and loads reach the step.
    """

    def __init__(self, stepped: dict[str, Any], parameters: Iterable[Tensor]) -> None:
        self.data = stepped
        self.parameters = list(parameters)

    def __getitem__(self, key: str) -> Any:
        return self.parameters if key == "params" else super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":  # the engine would step them on every rank, with that rank's gradients
            raise RuntimeError(REPLACED)
        super().__setitem__(key, value)


class OptimizerProxy(Optimizer):
    """An optimizer that shows the module's parameters in its groups while an engine steps other tensors.

    Other attributes, such as `train` and `eval`, come from the user's optimizer, `own`.
    """

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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise RuntimeError, because the parameters were divided among the ranks."""
        raise RuntimeError(
            "this strategy divides parameters among the ranks when the optimizer is prepared, so groups cannot be added later. "
            "Pass them to the optimizer in configure_optimizers, frozen if necessary."
        )

    @abstractmethod
    def _call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the user's optimizer, and publish the weights that it changed. Collective."""


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the user's optimizer behind a proxy."""
    return optimizer.own if isinstance(optimizer, OptimizerProxy) else optimizer


class UsedParameters:
    """Records which parameters receive gradients, so that a step skips the others, where engines fill in zeros."""

    def __init__(self) -> None:
        self._used: set[Tensor] = set()
        self._hooks: list[Any] = []

    def track(self, parameters: Iterable[Any]) -> None:
        for parameter in parameters:
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._used.add))

    def is_unused(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Return whether no rank used a parameter. If another rank did, its averaged gradient is not zero."""
        return parameter not in self._used and not bool(gradient.any())

    def clear(self) -> None:
        """Start over, after a step or when gradients were discarded."""
        self._used.clear()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._used.clear()


DIVIDED: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()
"""Optimizers of which a rank holds only a shard since an earlier run, with that run's strategy."""


def refuse_divided(optimizers: Iterable[Optimizer]) -> None:
    for optimizer in optimizers:
        if optimizer in DIVIDED:
            raise ValueError(
                f"this {type(optimizer).__name__} was prepared before, under strategy={DIVIDED[optimizer]!r}, which has left a "
                "part of its state on every rank. Make a new optimizer for every fit, in configure_optimizers. To continue "
                "with the state, save a checkpoint and resume from it."
            )
