"""Sources: a stage's loaders, given to the call or made by a hook, and how their batches get to a step."""

from __future__ import annotations

import inspect
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
    """The module or the datamodule whose hook makes the loaders. None if they were passed or are missing."""
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
            raise TypeError(f"{hook} returned None. Return a torch DataLoader, or an iterable of batches.")
        return check_loader(loaders, f"what {hook} returned", self.call, HOOKS[self.stage], is_read_once)


def find_source(
    stage: str, given: Any, datamodule: DataModule | None, module: Module, argument: str, call: str
) -> LoaderSource:
    """Return the source of a stage's loaders: the call's argument, else the datamodule's hook, else the module's."""
    owner: Any = None
    if given is None:
        if datamodule is not None and is_overridden(HOOKS[stage], datamodule, DataModule):
            owner = datamodule
        elif is_overridden(HOOKS[stage], module, Module):
            owner = module
    return LoaderSource(stage, given, owner, argument, call)


def read_datamodule(loaders: Any, datamodule: Any, argument: str, call: str) -> tuple[Any, DataModule | None]:
    """Return (loaders, datamodule) of a call. A DataModule may be passed as the loaders too.

    Raises:
        TypeError: datamodule= is not a DataModule.
        ValueError: both were passed.
    """
    if isinstance(loaders, DataModule):
        loaders, datamodule = None, loaders if datamodule is None else datamodule
    if datamodule is None:
        return loaders, None
    if isinstance(datamodule, type) and issubclass(datamodule, DataModule):
        raise TypeError(f"trainer.{call} was given the class {datamodule.__name__}. Pass an instance of it.")
    if not isinstance(datamodule, DataModule):
        raise TypeError(
            f"trainer.{call} was given datamodule={type(datamodule).__name__}(...). Expected an instance of "
            f"trainwright.DataModule.{foreign_hint(datamodule)}"
        )
    if loaders is not None:
        raise ValueError(f"trainer.{call} was given both {argument}= and datamodule=. Pass one of them.")
    return None, datamodule


class BatchTransfer:
    """Moves a batch to the device and the step's dtype, by the hooks of the datamodule or else of the module."""

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
        """Convert a batch that is already on the device for the step."""
        if self._precision.converts_batch:
            batch = self._precision.convert_batch(batch)
        if "on_after_batch_transfer" in self._hooks:
            batch = self._hooks["on_after_batch_transfer"](batch, loader_index)
        return batch


def find_transfer(
    engine: Any, module: Module, datamodule: DataModule | None, profiler: Profiler
) -> BatchTransfer | None:
    """Return the transfer of batches to a step. None if they need no change."""
    transfer = BatchTransfer(engine, module, datamodule, profiler)
    return transfer if transfer.is_needed else None


@dataclass(frozen=True)
class StepArguments:
    """The arguments of a step: the batch, and the indices of the batch and of the loader if it takes them."""

    takes_index: bool = True
    takes_loader_index: bool = False
    pulls: bool = False
    """Whether the step takes its batches from an iterator."""

    def of(self, batch: Any, index: int, loader_index: int) -> tuple[Any, ...]:
        if self.takes_loader_index:
            return batch, index, loader_index
        return (batch, index) if self.takes_index else (batch,)


def read_step(module: Module, name: str, num_loaders: int = 1, are_named: bool = False) -> StepArguments:
    """Return the arguments that a module's step takes; `are_named`: all loaders have names, or need none.

    Raises:
        TypeError: it requires other arguments than the batch and the two indices, or takes no loader's index although there
            are several loaders without names.
    """
    step = getattr(module, name)
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):  # a callable without a signature
        return StepArguments()
    names = [each.name for each in parameters]
    if "dataloader_iter" in names:
        return StepArguments(takes_index=False, pulls=True)
    takes_any = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = [each for each in positional if each.default is each.empty]
    keyword_only = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty]
    who = f"{type(module).__name__}.{name}"
    in_fit = name == "training_step"
    if (not positional and not takes_any) or len(needed) > (2 if in_fit else 3) or keyword_only:
        given = "batch_idx" if in_fit else "batch_idx and dataloader_idx"
        raise TypeError(
            f"{who}({', '.join(names)}) cannot be called: it is given the batch, and {given} if it takes more, by position."
        )
    # Values logged by several loaders need names that tell them apart; predictions are a list for each loader.
    if num_loaders > 1 and len(positional) < 3 and not takes_any and not are_named and name != "predict_step":
        raise TypeError(
            f"{who}({', '.join(names)}) takes no dataloader_idx, but there are {num_loaders} loaders. Add a third argument, "
            "dataloader_idx=0, or pass the loaders in a dict of names."
        )
    takes_loader_index = len(needed) > 2 or (num_loaders > 1 and (len(positional) > 2 or takes_any))
    return StepArguments(takes_index=len(positional) > 1 or takes_any, takes_loader_index=takes_loader_index)
