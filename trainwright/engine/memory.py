"""Memory: what a model, its gradients and its optimizer's state take on each device, under each strategy.

Activations are not counted: they depend on the batch. What is said is said from sizes alone, so nothing is allocated.
"""

from __future__ import annotations

import inspect
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainwright.devices import accelerator
from trainwright.engine.engine import Engine
from trainwright.rank_zero import rank_zero_warn
from trainwright.strategies.memory_plan import ALONE, FULLY_SHARDED, MEMORY_PLANS, MemoryPlan

MOST_USED = 0.8
"""The part of a device's memory that may be spoken for; activations need the rest."""
ADAM_BYTES = 8
"""What an optimizer that cannot be tried is counted with, for each parameter."""
SURELY_ENOUGH = 16
"""Memory of so many times the parameters' bytes is enough for any usual optimizer: nothing is worked out then."""
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
HOW_COMPUTED = ("params", "fused", "foreach", "capturable", "differentiable")
"""Options of an optimizer that change no size, and that may not run without data."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a model in training, without activations; `str` of it is a table."""

    parameters: int
    """Of the parameters and buffers."""
    gradients: int
    optimizer: int
    """Of the optimizers' state."""
    is_assumed: bool
    """Whether an optimizer could not be tried, so that it was counted as Adam."""
    num_devices: int
    available: int
    """What each device has."""
    per_device: dict[str, int]
    """What each device would hold, by the strategy's name."""

    def fits(self, name: str) -> bool:
        """Return whether a strategy leaves a fifth of each device's memory, or more, for activations."""
        return self.per_device[name] <= MOST_USED * self.available

    @property
    def advice(self) -> str:
        """Return, in one sentence, which strategy is needed."""
        fitting = next((name for name in self.per_device if self.fits(name)), None)
        if fitting is not None:
            return f"strategy={fitting!r} would need {_size(self.per_device[fitting])} of the {_size(self.available)}."
        whole = MEMORY_PLANS[FULLY_SHARDED].bytes_on_device(
            parameters=self.parameters, gradients=self.gradients, optimizer=self.optimizer, masters=0, num_devices=1
        )
        devices = math.ceil(whole / (MOST_USED * self.available))
        return (
            f"no strategy fits it on {self.num_devices} device(s) of {_size(self.available)}: strategy={FULLY_SHARDED!r} would "
            f"need {devices} of them."
        )

    def __str__(self) -> str:
        assumed = ", counted as Adam's" if self.is_assumed else ""
        head = (
            f"parameters {_size(self.parameters)}, gradients {_size(self.gradients)}, optimizer state "
            f"{_size(self.optimizer)}{assumed}; on each of {self.num_devices} device(s) with {_size(self.available)}:"
        )
        rows = [
            f"  {name:<18} {_size(size):>10}  {size / self.available:7.1%}" for name, size in self.per_device.items()
        ]
        return "\n".join([head, *rows, f"{self.advice} Activations are not counted: they come on top."])


def estimate_memory(
    module: nn.Module,
    optimizer: type[Optimizer] | Optimizer | Sequence[Optimizer] | float = torch.optim.AdamW,
    num_devices: int | None = None,
    available_bytes: int | None = None,
) -> MemoryEstimate:
    """Return what training a module takes on each device under each strategy, activations aside. Nothing is allocated.

    Args:
        module: the model; on the meta device too.
        optimizer: an optimizer, several of them, a class, or the bytes of its state for each trained parameter.
        num_devices: how many devices share the work; None is every GPU, or one.
        available_bytes: what each device has; None is the GPU's memory, or this process's share of the machine's.

    Raises:
        ValueError, TypeError: a number that is not positive, a module whose parameters have no shape yet, no optimizer.
    """
    if num_devices is None:
        num_devices = accelerator.count() or 1
    if isinstance(num_devices, bool) or not isinstance(num_devices, int) or num_devices < 1:
        raise ValueError(f"num_devices={num_devices!r} is not accepted; pass a whole number from 1.")
    if any(is_lazy(each) for each in (*module.parameters(), *module.buffers())):
        raise ValueError(
            f"{type(module).__name__} has lazy parameters, which have no shape yet; run it on one batch first, or give its "
            "layers their sizes."
        )
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    state, is_assumed = _state_bytes(optimizer, trained)
    parameters = _bytes(module.parameters()) + _bytes(module.buffers())
    gradients, masters = _bytes(trained), 4 * sum(each.numel() for each in trained)

    def on_device(plan: MemoryPlan) -> int:
        return plan.bytes_on_device(
            parameters=parameters, gradients=gradients, optimizer=state, masters=masters, num_devices=num_devices
        )

    kinds = {ALONE: MemoryPlan()} if num_devices == 1 else MEMORY_PLANS
    return MemoryEstimate(
        parameters=parameters,
        gradients=gradients,
        optimizer=state,
        is_assumed=is_assumed,
        num_devices=num_devices,
        available=available_memory() if available_bytes is None else available_bytes,
        per_device={name: on_device(plan) for name, plan in kinds.items()},
    )


def warn_of_memory(engine: Engine, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Warn, on rank 0, where the strategy in use leaves too little of a device's memory, and say which one would do."""
    if engine.rank != 0 or any(is_lazy(each) for each in (*module.parameters(), *module.buffers())):
        return
    available = available_memory(engine.device, engine.environment.local_world_size)
    if SURELY_ENOUGH * (_bytes(module.parameters()) + _bytes(module.buffers())) < MOST_USED * available:
        return
    estimate = estimate_memory(module, optimizers, engine.world_size, available)
    used = engine.strategy.name
    if engine.world_size == 1:
        used = ALONE
    if used in estimate.per_device and not estimate.fits(used):
        rank_zero_warn(
            f"strategy={used!r} leaves too little memory for activations: {estimate}",
            stacklevel=2,
        )


def available_memory(device: torch.device | None = None, processes: int = 1) -> int:
    """Return the bytes that this process may have: of its GPU what is free or its own, else its part of the machine's."""
    if device is None:
        device = torch.device(accelerator.accelerator_type() or "cpu")
    if device.type != "cpu" and (free := accelerator.free_memory(device)) is not None:
        return free
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in CGROUP_LIMITS:
        try:
            with open(path, encoding="ascii") as file:
                limits.append(int(file.read()))
        except (OSError, ValueError):  # no such kind of cgroup, or "max"
            continue
    return min(limits) // processes


def _state_bytes(optimizer: Any, trained: Sequence[Tensor]) -> tuple[int, bool]:
    """Return the bytes of the optimizers' state, and whether an optimizer was counted as Adam."""
    if isinstance(optimizer, (int, float)) and not isinstance(optimizer, bool):
        if not 0 <= optimizer < math.inf:
            raise ValueError(f"optimizer={optimizer!r} is not accepted; pass bytes for each parameter, from 0 on.")
        return int(optimizer * sum(each.numel() for each in trained)), False
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        sizes = [_tried(optimizer, {}, trained)]
        groups = [trained]
    else:
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        if not isinstance(optimizers, (list, tuple)) or not all(isinstance(each, Optimizer) for each in optimizers):
            raise TypeError(
                f"optimizer={optimizer!r} is not accepted; pass an optimizer, a list of them, a class such as "
                "torch.optim.AdamW, or the bytes of its state for each parameter."
            )
        pairs = [(each, group) for each in optimizers for group in each.param_groups]
        groups = [[each for each in group["params"] if each.requires_grad] for _, group in pairs]
        sizes = [_tried(type(each), group, params) for (each, group), params in zip(pairs, groups, strict=True)]
    total = sum(
        ADAM_BYTES * sum(each.numel() for each in group) if size is None else size
        for size, group in zip(sizes, groups, strict=True)
    )
    return total, None in sizes


def _tried(kind: type[Optimizer], options: dict[str, Any], parameters: Iterable[Tensor]) -> int | None:
    """Return the bytes of the state that one step makes, without data; None for an optimizer that cannot do that."""
    accepted = inspect.signature(kind).parameters
    options = {name: value for name, value in options.items() if name in accepted and name not in HOW_COMPUTED}
    total = 0
    for (shape, dtype), count in Counter((each.shape, each.dtype) for each in parameters).items():
        stand_in = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        stand_in.grad = torch.empty_like(stand_in)
        optimizer: Optimizer | None = None
        try:
            optimizer = kind([stand_in], **options)
            optimizer.step()
        except Exception:  # whatever it needs beside: a closure, values, other arguments
            if optimizer is None or not optimizer.state[stand_in]:
                return None  # else it has failed behind the point where it makes its state
        total += count * _bytes(each for each in optimizer.state[stand_in].values() if isinstance(each, Tensor))
    return total


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def _size(count: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 2**power:
            return f"{count / 2**power:.1f} {unit}"
    return f"{count} bytes"
