"""One logged name: its settings, its latest value, and the epoch's sum on the value's device."""

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
"""Values that are collected on the device before one kernel sums them."""

Loader = tuple[int, str | None]
"""An evaluation loader: its index and the name that the user gave it."""


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


Reduced = float | dict[str, float]
"""An epoch value over all ranks. A Metric that computes several numbers has them by suffix."""


def expanded(reduced: Mapping[Key, Reduced]) -> dict[Key, float]:
    """Return the numbers by key: a Metric's parts as name_key, or name_0, name_1 and so on for a vector."""
    numbers: dict[Key, float] = {}
    for key, value in reduced.items():
        parts = {"": value} if isinstance(value, (int, float)) else {f"_{part}": each for part, each in value.items()}
        for part, number in parts.items():
            numbers[key._replace(base_name=f"{key.base_name}{part}", epoch_name=f"{key.epoch_name}{part}")] = number
    return numbers


class LoggedValue:
    """The values that one hook logs under one name for one loader.

    `base_name` is the name with the loader's suffix. With on_step and on_epoch both, the two values have the names
    `step_name` and `key.epoch_name`, which are otherwise the base name.
    """

    def __init__(
        self,
        hook: str,
        name: str,
        loader: Loader | None,
        settings: LogSettings,
        levels: tuple[bool, bool],
        reduce_fx: str,
        rank: int = 0,
    ) -> None:
        self.hook, self.name, self.loader, self.settings = hook, name, loader, settings
        self.on_step, self.on_epoch = levels
        self.reduce_fx = reduce_fx
        self.prog_bar = bool(settings.prog_bar)
        self.logger = settings.logger is None or bool(settings.logger)
        self.enable_graph, self.rank_zero_only = bool(settings.enable_graph), bool(settings.rank_zero_only)
        self.is_ignored = self.rank_zero_only and rank != 0
        suffix = _suffix(loader) if settings.add_dataloader_idx else ""
        is_forked = self.on_step and self.on_epoch
        self.base_name = name + suffix
        self.step_name = f"{name}_step{suffix}" if is_forked else self.base_name
        epoch_name = f"{name}_epoch{suffix}" if is_forked else self.base_name
        index = -1 if loader is None else loader[0]
        self.key = Key(
            hook, self.base_name, epoch_name, index, reduce_fx, self.prog_bar, self.logger, "", self.rank_zero_only
        )
        """The description that all ranks share."""
        self.metric: Metric | None = None
        self.last: Tensor | float | None = None
        """The latest value. None before the first."""
        self._shown: Tensor | float | None = None
        self._pending: list[Tensor] = []
        self._weights: list[float] = []
        self._total: Tensor | float | None = None
        self._weight = 0.0

    def show(self, value: Tensor | float | None) -> None:
        self.last = value

    def take_new(self) -> Tensor | float | None:
        """Return the latest value. None if it was returned before."""
        value = None if self.last is self._shown else self.last
        self._shown = self.last
        return value

    def follow(self, metric: Metric, attribute: str) -> None:
        self.metric = metric
        self.key = self.key._replace(attribute=attribute)

    def add(self, value: Tensor | float, weight: float) -> None:
        """Add a value to the epoch's sum. A tensor stays on its device and is not read."""
        self._weight += weight
        if isinstance(value, Tensor):
            self._pending.append(value)
            self._weights.append(weight)
            if len(self._pending) == SUMMED_AT_ONCE:
                self._sum_up()
        else:
            self._combine(value * weight if self.reduce_fx == "mean" else value)

    def total(self) -> tuple[Tensor | float, float]:
        """Return this rank's (reduced value, weight): the weighted sum for a mean, otherwise the sum, minimum or maximum."""
        self._sum_up()
        return (0.0 if self._total is None else self._total, self._weight)

    @property
    def is_restored(self) -> bool:
        """Whether it comes from a checkpoint, and was not logged since."""
        return self.settings.reduce_fx is None

    def numbers(self) -> list[Tensor | float]:
        return [each for each in (self._total, self.last) if each is not None] + self._pending

    def state_dict(self, numbers: list[float]) -> dict[str, Any]:
        """Return the state as plain data, given `numbers()` read from the device. Pending values stay pending.

        Summing them here would change how the sums are rounded, compared with a run that does not save.
        """
        given, rest = self.settings._asdict(), iter(numbers)
        flags = {name: None if value is None else bool(value) for name, value in given.items()}
        return {
            "hook": self.hook,
            "name": str.__str__(self.name),  # a subclass of str is not plain data
            "settings": {**flags, "reduce_fx": self.reduce_fx, "metric_attribute": given["metric_attribute"]},
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
        # Unlike the settings of any call, so that the next log of this name goes through the checks and `take_over`.
        settings = LogSettings(**{**state["settings"], "reduce_fx": None})
        levels = choose_levels(state["name"], state["hook"], settings)
        logged = cls(state["hook"], state["name"], None, settings, levels, state["settings"]["reduce_fx"], rank)
        logged.key = logged.key._replace(attribute=state["attribute"])
        logged.last = logged._shown = state["last"]
        logged._total, logged._weight, logged._weights = state["total"], state["weight"], list(state["weights"])
        if state["pending"]:
            own_device = torch.device("cpu") if state["device"] == "cpu" else device
            logged._pending = list(_on_device(state["pending"], own_device).unbind())
        return logged

    def take_over(self, restored: LoggedValue) -> None:
        """Continue from a checkpoint's entry of this name, if it was reduced in the same way."""
        if restored.reduce_fx == self.reduce_fx:
            self.last, self._shown = restored.last, restored._shown
            self._pending, self._weights = restored._pending, restored._weights
            self._total, self._weight = restored._total, restored._weight

    @classmethod
    def merged(cls, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Merge the states of several ranks. The latest value comes from the first rank."""
        empty: dict[str, Any] = {"total": None, "weight": 0.0, "pending": [], "weights": []}
        whole = cls.restored({**states[0], **empty}, torch.device("cpu"))  # on the host, where sums are float64
        for state in states:
            total, weight = cls.restored(state, torch.device("cpu")).total()
            whole._weight += weight
            if weight:
                whole._combine(total)
        total, weight = whole.total()
        return {**states[0], **empty, "total": float(total) if weight else None, "weight": weight}

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
            self._total = _extreme(self._total, value, self.reduce_fx == "min")
        elif isinstance(self._total, Tensor) and isinstance(value, Tensor):
            self._total = self._total + value.to(self._total.device)
        else:
            self._total = self._total + value


def to_numbers(values: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Return the values as python numbers. NOTE: waits for the device."""
    return dict(zip(values, read_all(list(values.values())), strict=True))


def read_all(values: list[Tensor | float]) -> list[float]:
    """Return the values as python numbers, the tensors among them in one transfer. NOTE: waits for the device.

    On a device without float64 there is one transfer per dtype, so that no value is rounded.
    """
    indices_of: dict[torch.dtype, list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, Tensor):
            has_float64 = computes_in(value.device.type, torch.float64)
            indices_of.setdefault(torch.float64 if has_float64 else value.dtype, []).append(index)
    read = dict(enumerate(values))
    for dtype, indices in indices_of.items():
        tensors = [values[index].detach().to(dtype) for index in indices]  # type: ignore[union-attr]
        device = tensors[0].device
        read.update(zip(indices, torch.stack([each.to(device) for each in tensors]).tolist(), strict=True))
    return [float(read[index]) for index in range(len(values))]


def _suffix(loader: Loader | None) -> str:
    if loader is None:
        return ""
    return f"/dataloader_idx_{loader[0]}"


def _on_device(numbers: list[float], device: torch.device) -> Tensor:
    tensor = torch.tensor(numbers, dtype=widest_float(device.type))
    if not has_pinned_memory(device.type):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # NOTE: from pageable memory the copy would wait


def _extreme(one: Tensor | float, other: Tensor | float, is_minimum: bool) -> Tensor | float:
    """Return the smaller or the larger of two values, NaN if one is NaN. No tensor is read."""
    device = next((each.device for each in (one, other) if isinstance(each, Tensor)), None)
    if device is None:
        numbers = torch.tensor([one, other], dtype=torch.float64)
        return float(numbers.min() if is_minimum else numbers.max())
    dtype = widest_float(device.type)
    # `full` fills on the device, while `tensor` would copy from the host and wait.
    pair = [
        each.to(device, dtype) if isinstance(each, Tensor) else torch.full((), each, dtype=dtype, device=device)
        for each in (one, other)
    ]
    return torch.minimum(*pair) if is_minimum else torch.maximum(*pair)
