"""Sources: a stage's loaders, given to the call or made by a hook, and how their batches get to a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trainwright.arguments import foreign_hint
from trainwright.data.datamodule import DataModule
from trainwright.data.transfer import to_device
from trainwright.devices.abilities import computes_in, copies_aside
from trainwright.module import Module, is_overridden
from trainwright.profilers import Profiler
from trainwright.trainer.inputs import check_loader

HOOKS = {
    "train": "train_dataloader",
    "validation": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


@dataclass(frozen=True)
class LoaderSource:
    stage: str
    """"train", "validation", "test" or "predict"."""
    given: Any
    owner: Any
    """The module or the datamodule whose hook makes the loaders; None if they were given or are missing."""
    argument: str
    """The name of the loaders in errors."""
    call: str

    @property
    def is_defined(self) -> bool:
        return self.given is not None or self.owner is not None

    def load(self, is_read_once: bool = True) -> Any:
        """Return the loaders, from the hook if there is one. Iterators are accepted only if `is_read_once`.

        Raises:
            TypeError: no loaders, or something else, or iterators that the run would read more than once.
        """
        if self.given is not None or self.owner is None:
            return check_loader(self.given, self.argument, self.call, HOOKS[self.stage], is_read_once)
        hook = f"{type(self.owner).__name__}.{HOOKS[self.stage]}()"
        loaders = getattr(self.owner, HOOKS[self.stage])()
        if loaders is None:
            raise TypeError(f"{hook} returned None; return a torch DataLoader, or an iterable of batches.")
        return check_loader(loaders, f"what {hook} returned", self.call, HOOKS[self.stage], is_read_once)


def find_source(
    stage: str, given: Any, datamodule: DataModule | None, module: Module, argument: str, call: str
) -> LoaderSource:
    """Return the source of a stage's loaders: those given to the call, else the datamodule's hook, else the module's."""
    owner: Any = None
    if given is None:
        if datamodule is not None and is_overridden(HOOKS[stage], datamodule, DataModule):
            owner = datamodule
        elif is_overridden(HOOKS[stage], module, Module):
            owner = module
    return LoaderSource(stage, given, owner, argument, call)


def read_datamodule(loaders: Any, datamodule: Any, argument: str, call: str) -> tuple[Any, DataModule | None]:
    """Return (loaders, datamodule) of a call; a DataModule may be passed as the loaders too.
    TypeError if datamodule= is not a DataModule, ValueError if both were given.
    """
    if isinstance(loaders, DataModule):
        loaders, datamodule = None, loaders if datamodule is None else datamodule
    if datamodule is None:
        return loaders, None
    if isinstance(datamodule, type) and issubclass(datamodule, DataModule):
        raise TypeError(f"trainer.{call} was given the class {datamodule.__name__}; pass an instance of it.")
    if not isinstance(datamodule, DataModule):
        raise TypeError(
            f"trainer.{call} was given datamodule={type(datamodule).__name__}(...); expected an instance of "
            f"trainwright.DataModule.{foreign_hint(datamodule)}"
        )
    if loaders is not None:
        raise ValueError(f"trainer.{call} was given both {argument}= and datamodule=; pass one of them.")
    return None, datamodule


class BatchTransfer:
    """Brings a batch to a step: by the hooks of the datamodule, else of the module, to the device and the step's dtype."""

    def __init__(self, engine: Any, module: Module, datamodule: DataModule | None, profiler: Profiler) -> None:
        self._device, self._precision = engine.device, engine.precision
        self._hooks: dict[str, Any] = {}
        for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
            if datamodule is not None and is_overridden(name, datamodule, DataModule):
                self._hooks[name] = profiler.timed(getattr(datamodule, name), f"[datamodule] {name}")
            elif is_overridden(name, module, Module):
                self._hooks[name] = profiler.timed(getattr(module, name), f"[module] {name}")
        # Before its conversion a batch may hold float64, which such a device does not have.
        self._converts_first = self._precision.converts_batch and not computes_in(self._device.type, torch.float64)
        self.is_needed = bool(self._hooks) or self._precision.converts_batch or self._device.type != "cpu"
        """Whether it changes a batch at all."""
        moves = {"on_before_batch_transfer", "transfer_batch_to_device"} & self._hooks.keys()
        self.may_go_ahead = not moves and copies_aside(self._device.type) and not self._converts_first
        """Whether a batch may be copied to the device before its turn: no hook of the user takes part in the copy."""

    def __call__(self, batch: Any, loader_index: int = 0) -> Any:
        hooks = self._hooks
        if "on_before_batch_transfer" in hooks:
            batch = hooks["on_before_batch_transfer"](batch, loader_index)
        if self._converts_first:
            batch = self._precision.convert_batch(batch)
        if "transfer_batch_to_device" in hooks:
            batch = hooks["transfer_batch_to_device"](batch, self._device, loader_index)
        elif self._device.type != "cpu":
            batch = to_device(batch, self._device)
        return self.arrived(batch, loader_index)

    def arrived(self, batch: Any, loader_index: int = 0) -> Any:
        """Convert a batch that is already on the device to what a step gets."""
        if self._precision.converts_batch:
            batch = self._precision.convert_batch(batch)
        if "on_after_batch_transfer" in self._hooks:
            batch = self._hooks["on_after_batch_transfer"](batch, loader_index)
        return batch


def find_transfer(
    engine: Any, module: Module, datamodule: DataModule | None, profiler: Profiler
) -> BatchTransfer | None:
    """Return what brings batches to a step; None if they need no change."""
    transfer = BatchTransfer(engine, module, datamodule, profiler)
    return transfer if transfer.is_needed else None
