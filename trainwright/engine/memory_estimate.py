"""Memory estimate: the bytes of a model, its gradients and its optimizer's state under every strategy, from sizes only."""

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

from trainwright.devices import hardware
from trainwright.engine.engine import Engine
from trainwright.rank_zero import rank_zero_warn
from trainwright.strategies.fsdp2.wrap_policy import WrapPolicy, check_policy, choose_groups, made_groups
from trainwright.strategies.memory_plan import ALONE, FULLY_SHARDED, MEMORY_PLANS, DeviceBytes, MemoryPlan

__all__ = ["MOST_USED", "available_memory", "size_text"]

MOST_USED = 0.8
"""The part of a device's memory that an estimate may take. Activations need the rest."""
ADAM_BYTES = 8
"""Bytes per parameter that are assumed for an optimizer that cannot be tried."""
SURELY_ENOUGH = 16
"""This multiple of the parameters' bytes is enough for any usual optimizer, without an estimate."""
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
HOW_COMPUTED = ("params", "fused", "foreach", "capturable", "differentiable")
"""Options of an optimizer that change no size, and may fail without data."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a model in training, without activations. `str` of it is a table."""

    parameters: int
    """The bytes of the parameters and buffers."""
    gradients: int
    optimizer: int
    """The bytes of the optimizers' state."""
    gathered: int
    """The bytes that fsdp gathers on every device at once, without buffers, for any number of devices."""
    unsharded: int
    """The bytes of the module's buffers, which every strategy stores whole on every device."""
    is_assumed: bool
    """Whether an optimizer could not be tried, and was counted as Adam."""
    num_devices: int
    available: int
    """The bytes of a device."""
    parts: dict[str, DeviceBytes]
    """The bytes on every device, by the strategy's name."""

    @property
    def per_device(self) -> dict[str, int]:
        """Return the bytes on every device, by the strategy's name."""
        return {name: part.total for name, part in self.parts.items()}

    def fits(self, name: str) -> bool:
        """Return whether a strategy leaves at least a fifth of a device's memory for activations."""
        return self.per_device[name] <= MOST_USED * self.available

    @property
    def advice(self) -> str:
        """Return a sentence that names the strategy to use."""
        fitting = next((name for name in self.per_device if self.fits(name)), None)
        if fitting is not None:
            return f"strategy={fitting!r} would need {size_text(self.per_device[fitting])} of the {size_text(self.available)}."
        none = f"no strategy fits it on {self.num_devices} device(s) of {size_text(self.available)}"
        whole = self.gathered + self.unsharded
        left = MOST_USED * self.available - whole
        if left <= 0:
            return (
                f"{none}, nor does {FULLY_SHARDED} on more: the parts that it gathers at once take "
                f"{size_text(whole)}. Choose smaller groups (auto_wrap_policy)."
            )
        devices = math.ceil((self.parameters - self.unsharded + self.gradients + self.optimizer) / left)
        return f"{none}: strategy={FULLY_SHARDED!r} would need {devices} of them."

    def __str__(self) -> str:
        assumed = ", counted as Adam's" if self.is_assumed else ""
        head = (
            f"parameters {size_text(self.parameters)}, gradients {size_text(self.gradients)}, optimizer state "
            f"{size_text(self.optimizer)}{assumed}; on each of {self.num_devices} device(s) with {size_text(self.available)}:"
        )
        rows = [
            f"  {name:<18} {size_text(size):>10}  {size / self.available:7.1%}"
            for name, size in self.per_device.items()
        ]
        return "\n".join([head, *rows, f"{self.advice} Activations are not counted, and come on top."])


def estimate_memory(
    module: nn.Module,
    optimizer: type[Optimizer] | Optimizer | Sequence[Optimizer] | float = torch.optim.AdamW,
    num_devices: int | None = None,
    available_bytes: int | None = None,
    auto_wrap_policy: WrapPolicy | None = None,
) -> MemoryEstimate:
    """Return the bytes that training a module takes on a device under every strategy, without activations.

    For fsdp they include the parts that are gathered at once: the parameters outside of groups and of two groups, since torch
    gathers the next group early, and the gradients of one. Nothing is allocated. `print` shows the estimate as a table,
    `advice` names a strategy, `per_device` has the bytes by strategy, and `fits(name)` says whether it leaves
    enough for activations.

    Args:
        module: the model, also on the meta device.
        optimizer: an optimizer, several of them, a class, or the bytes of its state per trained parameter.
        num_devices: by default every GPU, or 1.
        available_bytes: memory of a device, by default the GPU's, or this process's part of the machine's.
        auto_wrap_policy: the argument of `FSDPStrategy`, which chooses the groups.

    Raises:
        ValueError, TypeError: a number that is not positive, a module whose parameters have no shape yet, no optimizer, or a
            policy that FSDPStrategy rejects.

    >>> with tw.init_empty_weights():
    ...     model = nn.Transformer(num_encoder_layers=12, num_decoder_layers=12, batch_first=True)
    >>> print(tw.estimate_memory(model, torch.optim.AdamW, num_devices=4, available_bytes=2**30).advice)
    strategy='fsdp' would need 384.9 MiB of the 1.0 GiB.
    """
    if num_devices is None:
        num_devices = hardware.count() or 1
    if isinstance(num_devices, bool) or not isinstance(num_devices, int) or num_devices < 1:
        raise ValueError(f"num_devices={num_devices!r} is not accepted; pass an integer of at least 1.")
    if not isinstance(module, nn.Module):
        raise TypeError(f"module={module!r:.80} is not accepted; pass a torch module, which may be on the meta device.")
    if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
        raise ValueError(
            f"{type(module).__name__} has lazy parameters, which have no shape yet; run it on one batch first, or pass "
            "its layers their sizes."
        )
    check_policy("auto_wrap_policy", auto_wrap_policy)
    available = available_memory() if available_bytes is None else available_bytes
    if isinstance(available, bool) or not isinstance(available, (int, float)) or not 1 <= available < math.inf:
        raise ValueError(
            f"available_bytes={available!r} is not accepted; pass a number of at least 1, such as 80 * 2**30."
        )
    return _estimate(module, optimizer, num_devices, int(available), choose_groups(module, auto_wrap_policy))


def _estimate(
    module: nn.Module, optimizer: Any, num_devices: int, available: int, groups: Sequence[nn.Module]
) -> MemoryEstimate:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    state, is_assumed = _state_bytes(optimizer, trained)
    of_masters, _ = _state_bytes(optimizer, trained, torch.float32)
    sizes = {
        "parameters": _bytes((*module.parameters(), *module.buffers())),
        "gradients": _bytes(trained),
        "optimizer": state,
        "unsharded": _bytes(module.buffers()),
        "gathered": _gathered_bytes(module, groups),
        "num_devices": num_devices,
    }
    masters = 4 * sum(parameter.numel() for parameter in trained)
    plans = {ALONE: MemoryPlan()} if num_devices == 1 else MEMORY_PLANS
    return MemoryEstimate(
        **sizes,
        is_assumed=is_assumed,
        available=available,
        parts={name: plan.on_device(**sizes, masters=masters, of_masters=of_masters) for name, plan in plans.items()},
    )


def warn_of_memory(engine: Engine, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Warn, on rank 0, if the strategy in use leaves too little of a device's memory, and name a better one."""
    tensors = [*module.parameters(), *module.buffers()]
    if engine.rank != 0 or any(map(is_lazy, tensors)):
        return
    available = available_memory(engine.device, engine.environment.local_world_size)
    if SURELY_ENOUGH * _bytes(tensors) < MOST_USED * available:
        return
    groups = made_groups(module)
    if groups is None:
        groups = choose_groups(module, None)
    estimate = _estimate(module, optimizers, engine.world_size, available, groups)
    used = ALONE if engine.world_size == 1 else engine.strategy.name
    if used in estimate.per_device and not estimate.fits(used):
        rank_zero_warn(f"strategy={used!r} leaves too little memory for activations: {estimate}", stacklevel=2)


def available_memory(device: torch.device | None = None, processes: int = 1) -> int:
    """Return the bytes that this process may use on its GPU, or else its part of the machine's memory."""
    if device is None:
        device = torch.device(hardware.accelerator_type() or "cpu")
    if device.type != "cpu" and (free := hardware.free_memory(device)) is not None:
        return free
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in CGROUP_LIMITS:
        try:
            with open(path, encoding="ascii") as file:
                limits.append(int(file.read()))
        except (OSError, ValueError):  # no such kind of cgroup, or "max"
            continue
    return min(limits) // processes


def _gathered_bytes(module: nn.Module, groups: Sequence[nn.Module]) -> int:
    """Return the bytes that fsdp gathers at once, or 0 for a list of parameters, whose groups are unknown."""
    if isinstance(module, (nn.ParameterList, nn.ParameterDict)):
        return 0
    taken: set[Tensor] = set()
    parts = []
    for group in (*groups, module):
        parts.append([parameter for parameter in group.parameters() if parameter not in taken])
        taken.update(parts[-1])
    largest = sorted(map(_bytes, parts[:-1]))[-2:]
    gradients = max(_bytes(parameter for parameter in part if parameter.requires_grad) for part in parts)
    return _bytes(parts[-1]) + sum(largest) + gradients


def _state_bytes(optimizer: Any, trained: Sequence[Tensor], dtype: torch.dtype | None = None) -> tuple[int, bool]:
    """Return the bytes of the optimizers' state, and whether any is a guess. `dtype` replaces the parameters' dtypes."""
    if isinstance(optimizer, (int, float)) and not isinstance(optimizer, bool):
        if not 0 <= optimizer < math.inf:
            raise ValueError(f"optimizer={optimizer!r} is not accepted; pass the bytes per parameter, at least 0.")
        return int(optimizer * sum(parameter.numel() for parameter in trained)), False
    groups: list[tuple[type[Optimizer], dict[str, Any], Sequence[Tensor]]]
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        groups = [(optimizer, {}, trained)]
    else:
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        if not isinstance(optimizers, (list, tuple)) or not all(isinstance(item, Optimizer) for item in optimizers):
            raise TypeError(
                f"optimizer={optimizer!r} is not accepted; pass an optimizer, a list of them, a class such as "
                "torch.optim.AdamW, or the bytes of its state per parameter."
            )
        groups = [
            (type(item), group, [parameter for parameter in group["params"] if parameter.requires_grad])
            for item in optimizers
            for group in item.param_groups
        ]
    sizes = [_tried(*group, dtype) for group in groups]
    counts = [sum(parameter.numel() for parameter in parameters) for *_, parameters in groups]
    total = sum(ADAM_BYTES * count if size is None else size for size, count in zip(sizes, counts, strict=True))
    return total, None in sizes


def _tried(
    kind: type[Optimizer], options: dict[str, Any], parameters: Iterable[Tensor], new_dtype: torch.dtype | None
) -> int | None:
    """Return the bytes of the state after one step on the meta device, or None if the optimizer cannot do that."""
    accepted = _accepted(kind)
    options = {name: value for name, value in options.items() if name in accepted and name not in HOW_COMPUTED}
    total = 0
    for (shape, dtype), count in Counter((value.shape, new_dtype or value.dtype) for value in parameters).items():
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        parameter.grad = torch.empty_like(parameter)
        optimizer: Optimizer | None = None
        try:
            optimizer = kind([parameter], **options)
            optimizer.step()
        except Exception:  # it needs a closure, values or other arguments
            if optimizer is None or not optimizer.state[parameter]:
                return None  # otherwise it failed after it had made its state
        total += count * _bytes(value for value in optimizer.state[parameter].values() if isinstance(value, Tensor))
    return total


def _accepted(kind: type[Optimizer]) -> set[str]:
    """Return the argument names of a constructor, and of its base classes' constructors that get its other arguments."""
    names: set[str] = set()
    for base in kind.__mro__:
        if (constructor := vars(base).get("__init__")) is not None:
            arguments = inspect.signature(constructor).parameters
            names.update(arguments)
            if all(argument.kind is not argument.VAR_KEYWORD for argument in arguments.values()):
                break
    return names


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def size_text(count: int) -> str:
    """Return a number of bytes in words, such as "1.5 GiB"."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 2**power:
            return f"{count / 2**power:.1f} {unit}"
    return f"{count} bytes"
