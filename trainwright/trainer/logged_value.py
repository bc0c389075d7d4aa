"""One logged name: the rules of its hook, its settings, its latest value, and the epoch's sum on the value's device."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainwright.devices.abilities import has_pinned_memory, widest_float
from trainwright.errors import a_type_of
from trainwright.value_kinds import is_dtensor

SUMMED_AT_ONCE = 64
"""Values that are collected on the device before one kernel sums them."""

Loader = tuple[int, str | None]
"""An evaluation loader: its index and the name that the user gave it."""

_OF_TRAINING_BATCH = """
    on_train_batch_start on_before_zero_grad optimizer_zero_grad training_step on_before_backward backward on_after_backward
    on_before_optimizer_step configure_gradient_clipping clip_gradients optimizer_step on_train_batch_end
"""
_OF_EVALUATION_BATCH = ("on_{}_batch_start", "{}_step", "on_{}_batch_end")
_BETWEEN_BATCHES = ("on_{}_start", "on_{}_epoch_start", "on_{}_epoch_end")
LOG_RULES: dict[str, tuple[bool, bool]] = {
    **dict.fromkeys(_OF_TRAINING_BATCH.split(), (True, True)),
    **{name.format(stage): (False, True) for stage in ("validation", "test") for name in _OF_EVALUATION_BATCH},
    **{name.format(stage): (False, False) for stage in ("train", "validation", "test") for name in _BETWEEN_BATCHES},
}
"""For each hook that may log: whether on_step is the default (otherwise on_epoch is), and whether it belongs to a batch."""

# By name, or by the functions that scripts written for Lightning pass.
_REDUCTIONS: dict[str, tuple[Any, ...]] = {
    "mean": ("mean", "avg", torch.mean),
    "sum": ("sum", sum, torch.sum),
    "min": ("min", min, torch.min),
    "max": ("max", max, torch.max),
}


class LogSettings(NamedTuple):
    """The arguments of self.log that every call for a name must repeat."""

    prog_bar: bool
    logger: bool | None
    on_step: bool | None
    on_epoch: bool | None
    reduce_fx: Any
    enable_graph: bool
    sync_dist: bool
    sync_dist_group: Any
    add_dataloader_idx: bool
    metric_attribute: str | None
    rank_zero_only: bool


class Key(NamedTuple):
    """One epoch value, as every rank describes it."""

    hook: str
    base_name: str
    epoch_name: str
    loader: int
    """The index of its loader. -1 for a value of all loaders."""
    reduce_fx: str
    prog_bar: bool
    logger: bool
    attribute: str
    """The path of the Metric in the module. Empty for a plain value."""
    rank_zero_only: bool


class LoggedValue:
    """The values that one hook logs under one name for one loader.

    The key's `base_name` is the name with the loader's suffix. With on_step and on_epoch both, the two values have the names
    `step_name` and `key.epoch_name`, which are otherwise the base name.
    """

    def __init__(self, hook: str, name: str, loader: Loader | None, settings: LogSettings, rank: int = 0) -> None:
        self.name, self.loader, self.settings = str.__str__(name), loader, settings
        self.on_step, self.on_epoch = choose_levels(name, hook, settings)
        self.reduce_fx = reduction_named(settings.reduce_fx)
        self.is_ignored = bool(settings.rank_zero_only) and rank != 0
        self.keeps_graph = bool(settings.enable_graph)
        self.is_restored = False
        """Whether it comes from a checkpoint, whose settings the program may have changed since."""
        suffix = f"/dataloader_idx_{loader[0]}" if loader is not None and settings.add_dataloader_idx else ""
        is_forked = self.on_step and self.on_epoch
        self.step_name = f"{name}_step{suffix}" if is_forked else f"{name}{suffix}"
        names = (f"{name}{suffix}", f"{name}_epoch{suffix}" if is_forked else f"{name}{suffix}")
        is_logged, index = settings.logger is None or bool(settings.logger), -1 if loader is None else loader[0]
        is_shown, is_of_first = bool(settings.prog_bar), bool(settings.rank_zero_only)
        self.key = Key(hook, *names, index, self.reduce_fx, is_shown, is_logged, "", is_of_first)
        """The description that all ranks share."""
        self.last: Tensor | float | None = None
        """The latest value. None before the first."""
        self._shown: Tensor | float | None = None
        self._pending: list[Tensor] = []
        self._weights: list[float] = []
        self._total: Tensor | float | None = None
        self._weight = 0.0

    def take_new(self) -> Tensor | float | None:
        """Return the latest value. None if it was returned before."""
        value = None if self.last is self._shown else self.last
        self._shown = self.last
        return value

    def observe(self, attribute: str, value: Tensor | None) -> None:
        """Follow the Metric at a path of the module, whose value of this step is `value`."""
        self.key = self.key._replace(attribute=attribute)
        if self.on_step:
            self.last = value

    def add(self, value: Any, weight: float) -> None:
        """Take a value, and add it to the epoch's sum. A tensor on a device stays there and is not read."""
        # The usual types first, since this runs at every batch. Host memory is read in 0.2 us, and copied in 1.3 us.
        if type(value) is Tensor and value.is_cpu and not (value.dim() or self.keeps_graph):
            value = value.item()
        elif type(value) is not float:
            value = self._checked(value)
        self.last = value
        if not self.on_epoch:
            return
        self._weight += weight
        if isinstance(value, Tensor):
            self._pending.append(value.detach())
            self._weights.append(weight)
            if len(self._pending) == SUMMED_AT_ONCE:
                self._sum_up()
        else:
            self._combine(value * weight if self.reduce_fx == "mean" else value)

    def total(self) -> tuple[Tensor | float, float]:
        """Return this rank's (reduced value, weight): the weighted sum for a mean, otherwise the sum, minimum or maximum."""
        self._sum_up()
        return (0.0 if self._total is None else self._total, self._weight)

    def numbers(self) -> list[Tensor | float]:
        return [number for number in (self._total, self.last) if number is not None] + self._pending

    def state_dict(self, numbers: list[float]) -> dict[str, Any]:
        """Return the state as plain data, given `numbers()` read from the device. Pending values stay pending.

        Summing them here would change how the sums are rounded, compared with a run that does not save.
        """
        settings, rest = self.settings._asdict(), iter(numbers)
        flags = {name: None if value is None else bool(value) for name, value in settings.items()}
        return {
            "hook": self.key.hook,
            "name": self.name,
            "settings": {**flags, "reduce_fx": self.reduce_fx, "metric_attribute": settings["metric_attribute"]},
            "attribute": self.key.attribute,
            "weight": self._weight,
            "total": None if self._total is None else next(rest),
            "last": None if self.last is None else next(rest),
            "pending": list(rest),
            "weights": list(self._weights),
            "device": self._pending[0].device.type if self._pending else "cpu",
        }

    @classmethod
    def restored(cls, state: dict[str, Any], device: torch.device, rank: int = 0) -> LoggedValue:
        """Return the value that `state_dict` described. Pending values go to `device`, if they were not on the host."""
        logged = cls(state["hook"], state["name"], None, LogSettings(**state["settings"]), rank)
        logged.is_restored = True
        logged.key = logged.key._replace(attribute=state["attribute"])
        logged.last = logged._shown = state["last"]
        logged._total, logged._weight, logged._weights = state["total"], state["weight"], list(state["weights"])
        if state["pending"]:
            pending_device = torch.device("cpu") if state["device"] == "cpu" else device
            logged._pending = list(_on_device(state["pending"], pending_device).unbind())
        return logged

    def take_over(self, restored: LoggedValue) -> None:
        """Continue from a checkpoint's entry of this name, if it was reduced in the same way."""
        if restored.reduce_fx == self.reduce_fx:
            self.last, self._shown = restored.last, restored._shown
            self._pending, self._weights = restored._pending, restored._weights
            self._total, self._weight = restored._total, restored._weight

    def absorb(self, other: LoggedValue) -> None:
        """Add the epoch's values of another rank."""
        self._sum_up()
        total, weight = other.total()
        if weight:
            self._combine(total)
        self._weight += weight

    def _checked(self, value: Any) -> Tensor | float:
        """Return a number as a float, and a tensor as a copy: the user may change it in place before it is read."""
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"self.log({self.name!r}, ...) got a tensor of shape {tuple(value.shape)}. Expected one element. Reduce "
                    "it first, for example with .mean()."
                )
            if is_dtensor(value):
                if not all(placement.is_replicate() for placement in value.placements):
                    raise TypeError(
                        f"self.log({self.name!r}, ...) got a value of sharded parameters, of which every rank has a part. Pass "
                        "value.full_tensor(), computed on every rank."
                    )
                value = value.to_local()
            copied: Tensor = value.reshape(()).clone()  # shapes (1,) and () could not be stacked
            return copied if self.keeps_graph else copied.detach()
        if isinstance(value, Real):  # int, bool, numpy's numbers
            return float(value)
        raise TypeError(
            f"self.log({self.name!r}, ...) got {a_type_of(value)}. Expected a number, a tensor of one element, a torchmetrics "
            "Metric, or a dict of these."
        )

    def _sum_up(self) -> None:
        pending, weights = self._pending, self._weights
        if not pending:
            return
        self._pending, self._weights = [], []
        device = pending[0].device
        # One dtype as wide as the device has: an epoch's sum in float16 would overflow.
        values = torch.stack([value.to(device) for value in pending]).to(widest_float(device.type))
        if self.reduce_fx != "mean":  # values.sum(), .min() or .max()
            self._combine(getattr(values, self.reduce_fx)())
        elif len(set(weights)) == 1:  # the usual case, in which nothing is copied to the device
            self._combine(values.sum() * weights[0])
        else:
            self._combine((values * _on_device(weights, device)).sum())

    def _combine(self, value: Tensor | float) -> None:
        if self._total is None:
            self._total = value
        elif self.reduce_fx in ("min", "max"):
            self._total = _extreme(self._total, value, self.reduce_fx)
        elif isinstance(self._total, Tensor) and isinstance(value, Tensor):
            self._total = self._total + value.to(self._total.device)
        else:
            self._total = self._total + value


def choose_levels(name: str, hook: str, settings: LogSettings) -> tuple[bool, bool]:
    """Return (on_step, on_epoch), by default as the hook's rule says.

    Raises:
        RuntimeError: nothing may be logged in the hook.
        ValueError: the hook cannot have these levels.
    """
    if hook not in LOG_RULES:
        raise RuntimeError(
            f"self.log({name!r}, ...) was called {f'in {hook}' if hook else 'outside of a step or hook'}, where nothing is "
            "collected. Log in training_step, validation_step, test_step, in the hooks of a batch, in on_train_start, "
            "on_train_epoch_start or on_train_epoch_end, or in those hooks of validation and test."
        )
    by_step, has_batch = LOG_RULES[hook]
    on_step = by_step if settings.on_step is None else bool(settings.on_step)
    on_epoch = not by_step if settings.on_epoch is None else bool(settings.on_epoch)
    if not has_batch and (on_step or not on_epoch):
        raise ValueError(
            f"self.log({name!r}, on_step={on_step}, on_epoch={on_epoch}) was called in {hook}, where there is no batch and so "
            "no step. Leave on_step at False and on_epoch at True."
        )
    if not on_step and not on_epoch:
        raise ValueError(f"self.log({name!r}, ...) has on_step=False and on_epoch=False. Set at least one of them.")
    return on_step, on_epoch


def reduction_named(reduce_fx: Any) -> str:
    """Return "mean", "sum", "min" or "max" for a name or a function; ValueError for any other."""
    wanted = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx
    for reduction, forms in _REDUCTIONS.items():
        if wanted in forms:
            return reduction
    raise ValueError(
        f"reduce_fx={reduce_fx!r} is unknown; choose from mean, sum, min, max. For another reduction log a torchmetrics Metric."
    )


def to_numbers(values: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Return the values as python numbers. NOTE: waits for the device."""
    return dict(zip(values, read_all(list(values.values())), strict=True))


def read_all(values: list[Tensor | float]) -> list[float]:
    """Return the values as python numbers, the tensors among them in one transfer. NOTE: waits for the device."""
    tensors = [value.detach() for value in values if isinstance(value, Tensor)]
    if not tensors:
        return [float(value) for value in values]
    device = tensors[0].device
    dtype = widest_float(device.type)
    numbers = iter(torch.stack([tensor.to(device, dtype) for tensor in tensors]).tolist())
    return [next(numbers) if isinstance(value, Tensor) else float(value) for value in values]


def _on_device(numbers: list[float], device: torch.device) -> Tensor:
    tensor = torch.tensor(numbers, dtype=widest_float(device.type))
    if not has_pinned_memory(device.type):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # NOTE: from pageable memory the copy would wait


def _extreme(one: Tensor | float, other: Tensor | float, kind: str) -> Tensor | float:
    """Return the "min" or the "max" of two values, NaN if one is NaN. No tensor is read."""
    like = next((value for value in (one, other) if isinstance(value, Tensor)), None)
    if like is None:
        return one if one != one else {"min": min, "max": max}[kind](other, one)
    # `full_like` fills on the device, while `tensor` would copy from the host and wait.
    pair = [value.to(like) if isinstance(value, Tensor) else torch.full_like(like, value) for value in (one, other)]
    return torch.minimum(*pair) if kind == "min" else torch.maximum(*pair)
