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
"""The most elements of a parameter that is tried; some optimizers store the state of large ones differently."""
MOST_HELD = 100_000
"""The most objects of an optimizer that is tried."""
CODE = (type, FunctionType, BuiltinFunctionType, ModuleType, weakref.ref)
WHOLE = (*CODE, int, float, complex, str, bytes, type(None), type(...))
"""Types that a deep copy does not enter."""


def state_of_a_step(optimizer: Optimizer, sparse: Collection[int] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that the optimizer's state has after a step, by their keys; none if it cannot be tried.

    The largest parameter of each group that can be tried represents the others, and so does the largest of those with sparse
    gradients, whose ids are `sparse`.
    """
    try:
        _refuse_costly(optimizer)
        tensors = [list(_stand_ins(group["params"], sparse)) for group in optimizer.param_groups]
        with set_apart():
            twin = twin_of(optimizer, tensors)
            type(twin).step(twin)
    except Exception:  # its own first step will show
        return
    for state in twin.state.values():
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, Tensor):
                yield str(key), value


def _stand_ins(parameters: Iterable[Tensor], sparse: Collection[int]) -> Iterator[nn.Parameter]:
    fitting = [each for each in parameters if each.requires_grad and 0 < each.numel() <= LARGEST]
    for is_sparse in (False, True):
        if same := [each for each in fitting if (id(each) in sparse) is is_sparse]:
            largest = max(same, key=Tensor.numel)
            made = nn.Parameter(torch.zeros(tuple(largest.shape), dtype=largest.dtype, device=largest.device))
            made.grad = torch.zeros_like(made.detach()).to_sparse(1) if is_sparse else torch.zeros_like(made)
            yield made


def _refuse_costly(optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer whose copy would include a module, or large tensors besides its parameters."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    seen, size = {id(each) for each in parameters}, 0
    left = _attributes(optimizer)
    for group in optimizer.param_groups:
        made = next((each for each in group["params"] if optimizer.state.get(each)), None)
        if made is not None:
            state = optimizer.state[made].values()
            left += [each for each in state if not (isinstance(each, Tensor) and each.shape == made.shape)]
    kept = []  # so that no id is reused
    while left:
        value = left.pop()
        if isinstance(value, WHOLE) or id(value) in seen:
            continue
        seen.add(id(value))
        kept.append(value)
        size += getattr(value, "nbytes", 0)
        if isinstance(value, nn.Module) or size > LARGEST * 4 or len(kept) > MOST_HELD:
            raise ValueError
        left += [] if isinstance(value, Tensor) else _parts(value)


def _attributes(optimizer: Optimizer) -> list[Any]:
    """Return the attributes that `twin_of` copies, also those of optimizers inside this one."""
    found: list[Any] = []
    optimizers = [optimizer]
    for each in optimizers:  # which grows on the way
        for name, value in vars(each).items():
            if isinstance(value, Optimizer):
                optimizers += [] if any(value is one for one in optimizers) else [value]
            elif name not in ("step", "state") and not (isinstance(value, OrderedDict) and name.endswith("_hooks")):
                found.append(value)
    return found


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
