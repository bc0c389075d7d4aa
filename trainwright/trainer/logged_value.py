"""One logged name: its settings, its latest value, and what the epoch has added up on the value's device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from trainwright.devices.abilities import computes_in, has_pinned_memory, widest_float
from trainwright.trainer.log_rules import LogSettings, choose_levels

if TYPE_CHECKING:
    from torchmetrics import Metric

SUMMED_AT_ONCE = 64
"""Values that wait on the device before they are summed up: one kernel for many values."""

Loader = tuple[int, str | None]
"""An evaluation loader: its index and the name that it was given."""


class Key(NamedTuple):
    """One epoch value, as every rank describes it."""

    hook: str
    base_name: str
    epoch_name: str
    loader: int
    """The index of its loader; -1 for a value of all of them."""
    reduce_fx: str
    prog_bar: bool
    logger: bool
    attribute: str
    """Where the module holds the Metric; empty for a plain value."""
    rank_zero_only: bool


Reduced = float | dict[str, float]
"""An epoch value over all ranks; of a Metric that computes several numbers each of them, by what follows the name."""


def expanded(reduced: Mapping[Key, Reduced]) -> dict[Key, float]:
    """Return each number under a key of its own: those of one Metric as name_key (of a vector name_0, name_1, ...)."""
    numbers: dict[Key, float] = {}
    for key, value in reduced.items():
        parts = {"": value} if isinstance(value, (int, float)) else {f"_{part}": each for part, each in value.items()}
        for part, number in parts.items():
            numbers[key._replace(base_name=f"{key.base_name}{part}", epoch_name=f"{key.epoch_name}{part}")] = number
    return numbers


class LoggedValue:
    """What one hook logs under one name for one loader.

    `base_name` is the name with the loader's suffix. With on_step and on_epoch both, the two values go by `step_name` and
    `epoch_name`; else these are the base name.
    """

    __slots__ = (
        "_pending", "_total", "_weight", "_weights", "attribute", "base_name", "enable_graph", "epoch_name", "hook",
        "is_ignored", "kept", "last", "loader", "logger", "metric", "name", "on_epoch", "on_step", "prog_bar",
        "rank_zero_only", "reduce_fx", "settings", "step_name",
    )  # fmt: skip

    def __init__(
        self,
        hook: str,
        name: str,
        loader: Loader | None,
        settings: LogSettings,
        levels: tuple[bool, bool],
        reduce_fx: str,
    ) -> None:
        self.hook, self.name, self.loader, self.settings = hook, name, loader, settings
        self.on_step, self.on_epoch = levels
        self.reduce_fx = reduce_fx
        self.prog_bar = bool(settings.prog_bar)
        self.logger = settings.logger is None or bool(settings.logger)
        self.enable_graph, self.rank_zero_only = bool(settings.enable_graph), bool(settings.rank_zero_only)
        suffix = _suffix(loader) if settings.add_dataloader_idx else ""
        is_forked = self.on_step and self.on_epoch
        self.base_name = name + suffix
        self.step_name = f"{name}_step{suffix}" if is_forked else self.base_name
        self.epoch_name = f"{name}_epoch{suffix}" if is_forked else self.base_name
        self.is_ignored = False
        """True where another rank's value is the one that counts."""
        self.metric: Metric | None = None
        self.attribute = ""
        self.last: Tensor | float | None = None
        """The latest value; None while there is none."""
        self.kept: Tensor | float | None = None
        """The latest value that the logbook has taken over."""
        self._pending: list[Tensor] = []
        self._weights: list[float] = []
        self._total: Tensor | float | None = None
        self._weight = 0.0

    @property
    def key(self) -> Key:
        """Return what the ranks know it by."""
        return Key(
            self.hook,
            self.base_name,
            self.epoch_name,
            -1 if self.loader is None else self.loader[0],
            self.reduce_fx,
            self.prog_bar,
            self.logger,
            self.attribute,
            self.rank_zero_only,
        )

    def add(self, value: Tensor | float, weight: float) -> None:
        """Add a value of an epoch; a tensor is kept on its device, not read."""
        self._weight += weight
        if isinstance(value, Tensor):
            self._pending.append(value)
            self._weights.append(weight)
            if len(self._pending) == SUMMED_AT_ONCE:
                self._sum_up()
        else:
            self._combine(value * weight if self.reduce_fx == "mean" else value)

    def total(self) -> tuple[Tensor | float, float]:
        """Return (reduced value, weight) of this rank: the weighted sum for a mean, else the sum, minimum or maximum."""
        self._sum_up()
        return (0.0 if self._total is None else self._total, self._weight)

    @property
    def is_restored(self) -> bool:
        """Return whether it comes from a checkpoint, and has not been logged since."""
        return self.settings.reduce_fx is None

    def numbers(self) -> list[Tensor | float]:
        """Return what `state_dict` wants as python numbers."""
        return [each for each in (self._total, self.last) if each is not None] + self._pending

    def state_dict(self, numbers: list[float]) -> dict[str, Any]:
        """Return it as plain data; `numbers` are its own, read from the device. What waits to be summed up goes on waiting."""
        given, rest = self.settings._asdict(), iter(numbers)
        flags = {name: None if value is None else bool(value) for name, value in given.items()}
        return {
            "hook": self.hook,
            "name": str.__str__(self.name),
            "settings": {**flags, "reduce_fx": self.reduce_fx, "metric_attribute": given["metric_attribute"]},
            "attribute": self.attribute,
            "weight": self._weight,
            "total": None if self._total is None else next(rest),
            "last": None if self.last is None else next(rest),
            "pending": list(rest),
            "weights": list(self._weights),
            "device": self._pending[0].device.type if self._pending else "cpu",
        }

    @classmethod
    def restored(cls, state: dict[str, Any], device: torch.device) -> LoggedValue:
        """Return what `state_dict` has described, for the same device, or for a host that has taken its place."""
        settings = LogSettings(**{**state["settings"], "reduce_fx": None})  # unlike those of any call: see `take_over`
        levels = choose_levels(state["name"], state["hook"], settings)
        logged = cls(state["hook"], state["name"], None, settings, levels, state["settings"]["reduce_fx"])
        logged.attribute = state["attribute"]
        logged.last = logged.kept = state["last"]
        logged._total, logged._weight, logged._weights = state["total"], state["weight"], list(state["weights"])
        if state["pending"]:
            place = torch.device("cpu") if state["device"] == "cpu" else device
            logged._pending = list(_on_device(state["pending"], place).unbind())
        return logged

    def take_over(self, restored: LoggedValue) -> None:
        """Go on with what a checkpoint holds under this name, unless it was reduced in another way there."""
        if restored.reduce_fx == self.reduce_fx:
            self.last, self.kept = restored.last, restored.kept
            self._pending, self._weights = restored._pending, restored._weights
            self._total, self._weight = restored._total, restored._weight

    def merge(self, other: LoggedValue) -> None:
        """Add what another rank has of it."""
        total, weight = other.total()
        self._sum_up()
        self._weight += weight
        if weight:
            self._combine(total)

    def _sum_up(self) -> None:
        pending, weights = self._pending, self._weights
        if not pending:
            return
        self._pending, self._weights = [], []
        device = pending[0].device
        values = torch.stack([value.to(device) for value in pending]).to(widest_float(device.type))
        if self.reduce_fx == "min":
            self._combine(values.min())
        elif self.reduce_fx == "max":
            self._combine(values.max())
        elif self.reduce_fx == "sum":
            self._combine(values.sum())
        elif len(set(weights)) == 1:  # the usual case, and the one where nothing goes to the device
            self._combine(values.sum() * weights[0])
        else:
            self._combine((values * _on_device(weights, device)).sum())

    def _combine(self, value: Tensor | float) -> None:
        if self._total is None:
            self._total = value
        elif self.reduce_fx in ("min", "max"):
            self._total = _extreme(self._total, value, self.reduce_fx == "min")
        elif isinstance(self._total, Tensor) and isinstance(value, Tensor):
            self._total = self._total + value.to(self._total.device)
        else:
            self._total = self._total + value


def as_tensor(value: Tensor | float) -> Tensor:
    """Return a python number as a float64 tensor, a tensor as it is."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def to_numbers(values: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Return the values as python numbers, the tensors among them in one transfer from the device."""
    return dict(zip(values, read_all(list(values.values())), strict=True))


def read_all(values: list[Tensor | float]) -> list[float]:
    """Return the values as python numbers, the tensors among them in one transfer. NOTE: waits for the device.

    On a device without float64 it is one transfer a dtype, so that none is rounded.
    """
    kinds: dict[torch.dtype, list[int]] = {}
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            has_float64 = computes_in(value.device.type, torch.float64)
            kinds.setdefault(torch.float64 if has_float64 else value.dtype, []).append(place)
    read = dict(enumerate(values))
    for dtype, places in kinds.items():
        tensors = [values[place].detach().to(dtype) for place in places]  # type: ignore[union-attr]
        device = tensors[0].device
        read.update(zip(places, torch.stack([each.to(device) for each in tensors]).tolist(), strict=True))
    return [float(read[place]) for place in range(len(values))]


def _suffix(loader: Loader | None) -> str:
    if loader is None:
        return ""
    index, name = loader
    return f"/dataloader_idx_{index}" if name is None else f"/{name}"


def _on_device(weights: list[float], device: torch.device) -> Tensor:
    tensor = torch.tensor(weights, dtype=widest_float(device.type))
    if not has_pinned_memory(device.type):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # NOTE: from pageable memory the copy would wait


def _extreme(one: Tensor | float, other: Tensor | float, is_minimum: bool) -> Tensor | float:
    """Return the smaller or the larger of two values; a NaN among them stays one, and nothing is read."""
    device = next((each.device for each in (one, other) if isinstance(each, Tensor)), None)
    if device is not None:
        pair = [
            each.to(device, widest_float(device.type))
            if isinstance(each, Tensor)
            else torch.full((), each, dtype=widest_float(device.type), device=device)
            for each in (one, other)
        ]
        return torch.minimum(*pair) if is_minimum else torch.maximum(*pair)
    assert not isinstance(one, Tensor)
    assert not isinstance(other, Tensor)
    if one != one or other != other:
        return float("nan")
    return min(one, other) if is_minimum else max(one, other)
