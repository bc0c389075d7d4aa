"""Memory estimate: the bytes of a model, its gradients and its optimizer's state under every strategy, from sizes only."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, NAdam, Optimizer, RAdam, RMSprop

from trainwright.devices import hardware
from trainwright.strategies.fsdp2.wrap_policy import WrapPolicy, check_policy, choose_groups
from trainwright.strategies.memory_plan import ALONE, FULLY_SHARDED, MEMORY_PLANS, DeviceBytes, MemoryPlan

__all__ = ["MOST_USED", "available_memory", "size_text"]

MOST_USED = 0.8
"""The part of a device's memory that an estimate may take. Activations need the rest."""
TENSORS: dict[Any, int] = {SGD: 0, (RMSprop, Adagrad): 1, (Adam, Adadelta, Adamax, NAdam, RAdam): 2}
"""The numbers of tensors of a parameter's size that torch's optimizers store for it, without further options."""
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


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
    """Whether an optimizer is unknown, and was counted as Adam."""
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
        return (
            f"no strategy fits it on {self.num_devices} device(s) of {size_text(self.available)}: use more or larger devices, "
            f"or smaller groups under {FULLY_SHARDED} (auto_wrap_policy)."
        )

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
        available_bytes: memory of a device, by default the GPU's, or the machine's.
        auto_wrap_policy: the argument of `FSDPStrategy`, which chooses the groups.

    Raises:
        ValueError, TypeError: a number that is not positive, no optimizer, or a policy that FSDPStrategy rejects.

    >>> with tw.init_empty_weights():
    ...     model = nn.Transformer(num_encoder_layers=12, num_decoder_layers=12, batch_first=True)
    >>> print(tw.estimate_memory(model, torch.optim.AdamW, num_devices=4, available_bytes=2**30).advice)
    strategy='fsdp' would need 384.9 MiB of the 1.0 GiB.
    """
    num_devices = num_devices or hardware.count() or 1
    available = available_memory() if available_bytes is None else available_bytes
    for name, value in (("num_devices", num_devices), ("available_bytes", available)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value < math.inf:
            raise ValueError(f"{name}={value!r} is not accepted; pass a number of at least 1.")
    check_policy("auto_wrap_policy", auto_wrap_policy)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    state, of_masters, is_assumed = _state_bytes(optimizer, trained)
    gathered, regathered = _gathered_bytes(module, choose_groups(module, auto_wrap_policy))
    whole = {
        "parameters": _bytes((*module.parameters(), *module.buffers())),
        "gradients": _bytes(trained),
        "optimizer": state,
        "unsharded": _bytes(module.buffers()),
        "gathered": gathered,
        "num_devices": num_devices,
    }
    masters = 4 * sum(parameter.numel() for parameter in trained)
    sizes = () if isinstance(module, nn.ParameterList) else tuple(map(Tensor.numel, trained))
    more = {"masters": masters, "of_masters": of_masters, "regathered": regathered}
    plans = {ALONE: MemoryPlan()} if num_devices == 1 else MEMORY_PLANS
    return MemoryEstimate(
        **whole,
        is_assumed=is_assumed,
        available=int(available),
        parts={name: plan.on_device(**whole, **more, sizes=sizes) for name, plan in plans.items()},
    )


def available_memory() -> int:
    """Return the bytes that this process may use on its GPU, or else of the machine's memory."""
    device = torch.device(hardware.accelerator_type() or "cpu")
    if device.type != "cpu" and (free := hardware.free_memory(device)) is not None:
        return free
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in CGROUP_LIMITS:
        with suppress(OSError, ValueError), open(path, encoding="ascii") as file:  # no such cgroup, or "max"
            limits.append(int(file.read()))
    return min(limits)


def _gathered_bytes(module: nn.Module, groups: Sequence[nn.Module]) -> tuple[int, int]:
    """Return the bytes that fsdp gathers at once, and those that it gathers again for backward.

    For a list of parameters, whose groups are unknown, these are 0 and all.
    """
    if isinstance(module, nn.ParameterList):
        return 0, _bytes(module.parameters())
    taken: set[Tensor] = set()
    parts = []
    for group in (*groups, module):
        parts.append([parameter for parameter in group.parameters() if parameter not in taken])
        taken.update(parts[-1])
    sizes = dict(zip((*groups, module), map(_bytes, parts), strict=True))
    around = dict.fromkeys(groups, 0)  # the bytes that stay gathered while a group within them is called
    outer: set[nn.Module] = set()
    for group in groups:
        for inner in around.keys() & set(group.modules()) - {group}:
            around[inner] += sizes[group]
            outer.add(group)
    largest = sorted(sizes[group] for group in groups if group not in outer)[-2:]
    gradients = max(_bytes(parameter for parameter in part if parameter.requires_grad) for part in parts)
    most = sizes[module] + max(around.values(), default=0) + sum(largest) + gradients
    return most, sum(sizes.values()) - sizes[module]


def _state_bytes(optimizer: Any, trained: Sequence[Tensor]) -> tuple[int, int, bool]:
    """Return the bytes of the optimizers' state, the same for float32 parameters, and whether any is a guess."""
    if isinstance(optimizer, (int, float)) and 0 <= optimizer < math.inf:
        size = int(optimizer * sum(parameter.numel() for parameter in trained))
        return size, size, False
    groups: list[tuple[type[Optimizer], Mapping[str, Any]]] = []
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        groups.append((optimizer, {"params": trained}))
    for item in () if groups else optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
        if not isinstance(item, Optimizer):
            raise TypeError(
                f"optimizer={item!r} is not accepted; pass an optimizer, a list of them, a class such as torch.optim.AdamW, or "
                "the bytes of its state per parameter, at least 0."
            )
        groups += [(type(item), group) for group in item.param_groups]
    state = of_masters = 0
    is_assumed = False
    for kind, group in groups:
        count = next((count for classes, count in TENSORS.items() if issubclass(kind, classes)), None)
        is_assumed = is_assumed or count is None
        count = 2 if count is None else count + sum(bool(group.get(key)) for key in ("momentum", "centered", "amsgrad"))
        parameters = [parameter for parameter in group["params"] if parameter.requires_grad]
        state += count * _bytes(parameters)
        of_masters += count * 4 * sum(parameter.numel() for parameter in parameters)
    return state, of_masters, is_assumed


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def size_text(count: int) -> str:
    """Return a number of bytes in words, such as "1.5 GiB"."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 2**power:
            return f"{count / 2**power:.1f} {unit}"
    return f"{count} bytes"
