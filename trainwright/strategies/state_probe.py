"""State probe: finds the state that an optimizer creates in its first step, by stepping a copy of it."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.strategies.step_probe import set_apart, twin_of

LARGEST = 1 << 18
"""Elements of a parameter up to which one of its shape is tried: some optimizers keep large ones in another way."""
MOST_HELD = 100_000
"""Objects of an optimizer that are looked at before it is copied; one with more is not tried."""
CODE = (type, FunctionType, BuiltinFunctionType, ModuleType, weakref.ref)
WHOLE = (*CODE, int, float, complex, str, bytes, type(None), type(...))
"""Types that a deep copy does not enter."""


def state_of_a_step(optimizer: Optimizer, sparse: Collection[int] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that the optimizer's state has after a step, by their keys; none where it cannot be tried.

    It is not tried where the copy would take along a module, or large tensors that are no parameters.

    Of each group the largest parameter that is trained, of those that are not too large to be tried, stands for all; and of
    those that get sparse gradients, of which `sparse` has the ids, another one.
    """
    try:
        _refuse_costly(optimizer)
        tensors = [_stand_ins(group["params"], sparse) for group in optimizer.param_groups]
        with set_apart():
            twin = twin_of(optimizer, tensors)
            type(twin).step(twin)
    except Exception:  # its own first step will tell
        return
    for state in twin.state.values():
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, Tensor):
                yield str(key), value


def _stand_ins(parameters: Iterable[Tensor], sparse: Collection[int]) -> list[nn.Parameter]:
    fitting = [each for each in parameters if each.requires_grad and 0 < each.numel() <= LARGEST]
    found = []
    for is_sparse in (False, True):
        alike = [each for each in fitting if (id(each) in sparse) is is_sparse]
        if alike:
            found.append(_like(max(alike, key=Tensor.numel), is_sparse))
    return found


def _like(parameter: Tensor, is_sparse: bool) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(tuple(parameter.shape), dtype=parameter.dtype, device=parameter.device))
    made.grad = torch.zeros_like(made.detach()).to_sparse(1) if is_sparse else torch.zeros_like(made)
    return made


class Costly(Exception):
    """A copy of an optimizer would be a large one."""


def _refuse_costly(optimizer: Optimizer) -> None:
    """Refuse to copy an optimizer that holds a module, or more than a large tensor beside its parameters (Costly)."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    seen, size = {id(each) for each in parameters}, 0
    left = [value for each in _nested(optimizer) for value in _attributes(each)]
    for group in optimizer.param_groups:
        made = next((each for each in group["params"] if optimizer.state.get(each)), None)
        if made is not None:
            state = optimizer.state[made].values()
            left += [each for each in state if not (isinstance(each, Tensor) and each.shape == made.shape)]
    kept = []  # so that no id is given again
    while left:
        value = left.pop()
        if isinstance(value, WHOLE) or id(value) in seen:
            continue
        seen.add(id(value))
        kept.append(value)
        size += getattr(value, "nbytes", 0)
        if isinstance(value, nn.Module) or size > LARGEST * 4 or len(kept) > MOST_HELD:
            raise Costly
        left += [] if isinstance(value, Tensor) else _parts(value)


def _nested(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizer and those that it is around."""
    found = [optimizer]
    for each in found:
        found += [
            value
            for value in vars(each).values()
            if isinstance(value, Optimizer) and not any(value is one for one in found)
        ]
    return found


def _attributes(optimizer: Optimizer) -> list[Any]:
    """Return the attributes that a copy has copies of."""
    return [
        value
        for name, value in vars(optimizer).items()
        if name not in ("step", "state")
        and not isinstance(value, Optimizer)
        and not (isinstance(value, OrderedDict) and name.endswith("_hooks"))
    ]


def _parts(value: Any) -> list[Any]:
    """Return what a deep copy of a value copies next."""
    if type(value) is dict:
        return [*value.keys(), *value.values()]
    if type(value) in (list, tuple):
        return list(value)
    if isinstance(value, MethodType):
        return [value.__self__]
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):
        return []
    return [*reduced[1:3], *(list(each) for each in reduced[3:5] if each is not None)]
