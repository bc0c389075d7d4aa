"""Sources: where a stage's loaders come from: the call's argument, a hook of the datamodule, or one of the module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from trainwright.data.datamodule import DataModule
from trainwright.data.transfer import to_device
from trainwright.devices.abilities import computes_in, copies_aside
from trainwright.module import Module, is_overridden
from trainwright.trainer.inputs import check_loader
from trainwright.trainer.logbook import Logbook

HOOKS = {
    "train": "train_dataloader",
    "validation": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


@dataclass(frozen=True)
class LoaderSource:
    """Gives the loaders of one stage.

    Args:
        stage: "train", "validation", "test" or "predict".
        given: the loaders that the call was given; None for none.
        owner: the module or the datamodule whose hook makes them; None where they were given, or nobody does.
        argument, call: how an error names them.
    """

    stage: str
    given: Any
    owner: Any
    argument: str
    call: str

    @property
    def is_defined(self) -> bool:
        """Return whether there are loaders."""
        return self.given is not None or self.owner is not None

    def load(self, is_read_once: bool = True) -> Any:
        """Return the loaders; calls the hook where one makes them. Those that can be read only once want `is_read_once`.

        Raises:
            TypeError: nobody gives loaders, or what came is none, or cannot be read as often as the run does.
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
    """Return where the loaders of a stage come from: what the call was given, the datamodule's hook, else the module's."""
    owner: Any = None
    if given is None:
        if datamodule is not None and is_overridden(HOOKS[stage], datamodule, DataModule):
            owner = datamodule
        elif is_overridden(HOOKS[stage], module, Module):
            owner = module
    return LoaderSource(stage, given, owner, argument, call)


def read_datamodule(loaders: Any, datamodule: Any, argument: str, call: str) -> tuple[Any, DataModule | None]:
    """Return (loaders, datamodule) of a call: a DataModule may stand in the place of the loaders.

    Raises:
        TypeError: datamodule= is no DataModule.
        ValueError: both were given.
    """
    if isinstance(loaders, DataModule):
        loaders, datamodule = None, loaders if datamodule is None else datamodule
    if datamodule is None:
        return loaders, None
    if isinstance(datamodule, type) and issubclass(datamodule, DataModule):
        raise TypeError(f"trainer.{call} was given the class {datamodule.__name__}; pass an instance of it.")
    if not isinstance(datamodule, DataModule):
        raise TypeError(
            f"trainer.{call} was given datamodule={type(datamodule).__name__}(...); accepted is an instance of "
            "trainwright.DataModule."
        )
    if loaders is not None:
        raise ValueError(f"trainer.{call} was given both {argument}= and datamodule=; pass one of them.")
    return None, datamodule


class BatchTransfer:
    """What a batch goes through before a step gets it: the module's or the datamodule's hooks, device and dtype.

    Args:
        trainer's engine, module and datamodule; a hook that the datamodule overrides is taken from it.
    """

    def __init__(self, engine: Any, module: Module, datamodule: DataModule | None) -> None:
        self._device, self._precision = engine.device, engine.precision
        self._hooks: dict[str, Any] = {}
        for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
            if datamodule is not None and is_overridden(name, datamodule, DataModule):
                self._hooks[name] = getattr(datamodule, name)
            elif is_overridden(name, module, Module):
                self._hooks[name] = getattr(module, name)
        # Until it is converted a batch may hold what the device does not have.
        self._converts_first = self._precision.converts_batch and not computes_in(self._device.type, torch.float64)

    @property
    def is_needed(self) -> bool:
        """Return whether a batch changes at all on its way to a step."""
        return bool(self._hooks) or self._precision.converts_batch or self._device.type != "cpu"

    @property
    def may_go_ahead(self) -> bool:
        """Return whether the copy to the device may be made before the batch's turn: no hook of the user's is part of it."""
        moves = {"on_before_batch_transfer", "transfer_batch_to_device"}
        return not moves & self._hooks.keys() and copies_aside(self._device.type) and not self._converts_first

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
        """Return a batch that is on the device already as a step gets it."""
        if self._precision.converts_batch:
            batch = self._precision.convert_batch(batch)
        if "on_after_batch_transfer" in self._hooks:
            batch = self._hooks["on_after_batch_transfer"](batch, loader_index)
        return batch


def find_transfer(engine: Any, module: Module, datamodule: DataModule | None) -> BatchTransfer | None:
    """Return what a batch goes through on its way to a step; None where it stays as it is."""
    transfer = BatchTransfer(engine, module, datamodule)
    return transfer if transfer.is_needed else None


class PulledBatches(Iterator[tuple[Any, int, int]]):
    """What a step with a `dataloader_iter` argument takes its batches from: (batch, batch_idx, dataloader_idx) each.

    Args:
        batches: pairs of a batch and whether it is the last.
        transfer: brings a batch to the device; None where nothing is to be done.
        start: the number of the first batch.
        logbook: its collector is told which batch is worked on.
        outside: a context in which nothing of a step's precision holds: a loader computes as it does before a step.
        is_ghost: whether a batch, by its number, is not this rank's own; a step that has begun with one of its own is not
            given such a one.
    """

    def __init__(
        self,
        batches: Iterator[tuple[Any, bool]],
        transfer: BatchTransfer | None,
        start: int,
        logbook: Logbook,
        outside: Callable[[], AbstractContextManager[Any]],
        is_ghost: Callable[[int], bool] | None = None,
    ) -> None:
        self._outside = outside
        self._batches, self._transfer, self._logbook, self._is_ghost = batches, transfer, logbook, is_ghost
        self._begun = start
        self.count = start
        """How many batches of the epoch have been taken."""
        self.latest: Any = None
        """The batch that was taken last."""
        self.is_at_end = False
        self._held: tuple[Any, bool] | None = next(batches, None)
        if self._held is None:
            self.is_at_end = True

    @property
    def holds_last(self) -> bool:
        """Return whether one batch is left to take, the epoch's last."""
        return self._held is not None and self._held[1]

    def begin_step(self) -> int:
        """Begin another step; return how many batches have been taken."""
        self._begun = self.count
        return self.count

    def __next__(self) -> tuple[Any, int, int]:
        if self._held is None:
            raise StopIteration
        if self.count > self._begun and self._is_ghost is not None and self._is_ghost(self.count):
            raise StopIteration
        batch, is_last = self._held
        with self._outside():
            self._held = None if is_last else next(self._batches, None)
            self.latest = batch if self._transfer is None else self._transfer(batch)
        self.is_at_end = self._held is None
        self.count += 1
        if self._logbook.collector is not None:
            self._logbook.collector.take_batch(self.latest)
        return self.latest, self.count - 1, 0
