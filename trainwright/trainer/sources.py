"""Sources: a stage's loaders, passed to the call or returned by a hook. They are what users see, and feed the steps."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from trainwright.arguments import foreign_hint
from trainwright.data.combined import ShardedCombination
from trainwright.data.combined_loader import CombinedLoader, is_collection
from trainwright.data.datamodule import DataModule
from trainwright.data.loaders import ShardedLoader
from trainwright.data.transfer import to_device
from trainwright.devices.abilities import copies_aside
from trainwright.errors import a_type_of
from trainwright.module import Module, is_overridden
from trainwright.profilers import Profiler

Shard = ShardedLoader | ShardedCombination
"""This rank's part of one of the user's loaders."""
Batches = int | float
"""A number of batches. math.inf if only the loader's end shows it."""

HOOKS = {"validation": "val_dataloader", **{stage: f"{stage}_dataloader" for stage in ("train", "test", "predict")}}


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

    def load(self) -> Any:
        """Return the loaders, from the hook if there is one (TypeError if they are missing or of another type)."""
        hook, loaders, origin = HOOKS[self.stage], self.given, self.argument
        if loaders is None and self.owner is not None:
            loaders, origin = getattr(self.owner, hook)(), f"{type(self.owner).__name__}.{hook}()"
            if loaders is None:
                raise TypeError(f"{origin} returned None. Return a torch DataLoader, or an iterable of batches.")
            origin = f"what {origin} returned"
        if loaders is None:
            raise TypeError(
                f"trainer.{self.call} was given no {origin}. Pass a torch DataLoader, or an iterable of batches, or define "
                f"{hook} on the module or on a DataModule."
            )
        if isinstance(loaders, str) or not isinstance(loaders, Iterable):  # a str is iterable
            raise TypeError(
                f"{origin} is {a_type_of(loaders)}. Expected a torch DataLoader, an iterable of batches, or several of "
                f"them in a list, a dict or a CombinedLoader.{foreign_hint(loaders)}"
            )
        return loaders


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
    """Return (loaders, datamodule) of a call, where a DataModule may be passed as the loaders too (TypeError, ValueError)."""
    if isinstance(loaders, DataModule):
        loaders, datamodule = None, loaders if datamodule is None else datamodule
    if datamodule is None:
        return loaders, None
    if isinstance(datamodule, type):
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
        self.is_needed = bool(self._hooks) or self._precision.converts_batch or self._device.type != "cpu"
        """Whether it changes a batch at all."""
        moves = {"on_before_batch_transfer", "transfer_batch_to_device"} & self._hooks.keys()
        self.may_go_ahead = not moves and copies_aside(self._device.type)
        """Whether a batch may be copied to the device before its turn: no hook of the user takes part in the copy."""

    def __call__(self, batch: Any, loader_index: int = 0) -> Any:
        hooks = self._hooks
        if "on_before_batch_transfer" in hooks:
            batch = hooks["on_before_batch_transfer"](batch, loader_index)
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


def num_step_arguments(module: Module, name: str, num_loaders: int = 1, are_named: bool = False) -> int:
    """Return how many of the batch, its index and the loader's index a step takes. `are_named`: all loaders have names.

    Raises:
        TypeError: it requires other arguments, or takes no loader's index although there are several loaders without names.
    """
    signature = inspect.signature(getattr(module, name))
    given = ("batch_idx",) if name == "training_step" else ("batch_idx", "dataloader_idx")
    counts = [count for count in range(1, len(given) + 2) if _takes(signature, count)]
    step = f"{type(module).__name__}.{name}({', '.join(signature.parameters)})"
    if "dataloader_iter" in signature.parameters:
        raise TypeError(
            f"{step} cannot take its batches from dataloader_iter. Take batch and batch_idx, and for several batches in a step "
            "pass a larger batch_size or accumulate_grad_batches=."
        )
    if not counts:
        raise TypeError(
            f"{step} cannot be called: it is given the batch, and {' and '.join(given)} if it takes more, by position."
        )
    # Values logged by several loaders need names that tell them apart. Predictions are a list for each loader.
    if num_loaders > 1 and 3 not in counts and not are_named and name != "predict_step":
        raise TypeError(
            f"{step} takes no dataloader_idx, but there are {num_loaders} loaders. Add a third argument, dataloader_idx=0, or "
            "pass the loaders in a dict of names."
        )
    most = 3 if num_loaders > 1 else 2
    return max([count for count in counts if count <= most], default=counts[0])


def _takes(signature: inspect.Signature, count: int) -> bool:
    """Return whether a function can be called with this number of arguments by position."""
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


@dataclass
class Stage:
    """The data of one stage of evaluation."""

    dataloaders: Any = None
    """The loaders as the user passed them, or as the hook returned them."""
    num_batches: list[Batches] = field(default_factory=list)
    """Batches to run of every loader."""
    batch_indices: list[Any] | None = None
    """The dataset's indices of the samples of the current batch. None if its loader has none."""

    def note(self, dataloaders: Any, num_batches: list[int | None]) -> None:
        """Record the loaders and their numbers of batches, None if unknown."""
        self.dataloaders = dataloaders
        self.num_batches = [float("inf") if count is None else count for count in num_batches]

    def note_indices(self, indices: list[Any] | None) -> None:
        self.batch_indices = indices


@dataclass
class Stages:
    train_dataloader: Any = None
    num_training_batches: Batches = float("inf")
    validation: Stage = field(default_factory=Stage)
    sanity_check: Stage = field(default_factory=Stage)
    test: Stage = field(default_factory=Stage)
    predict: Stage = field(default_factory=Stage)

    def note_training(self, dataloader: Any, num_batches: Batches) -> None:
        """Record the training loaders, and the batches of an epoch on this rank."""
        self.train_dataloader = dataloader
        self.num_training_batches = num_batches


def limited(length: int | None, limit: int | float | None) -> int | None:
    """Return how many batches a limit leaves: a number of them, a fraction of a known length, or all (None)."""
    if limit is None:
        return length
    if isinstance(limit, float):
        if limit == 1.0:
            return length
        if length is None:
            raise ValueError(
                f"a limit of {limit} is a fraction of the batches, but this loader has no length. Pass a number of batches."
            )
        if limit > 0 and length > 0 and int(length * limit) == 0:
            raise ValueError(
                f"a limit of {limit} of {length} batches is less than one. Pass a number of batches, or at least "
                f"{math.ceil(1000 / length) / 1000}."
            )
        return int(length * limit)
    return limit if length is None else min(limit, length)


def parts_of(loaders: Any) -> list[Any]:
    """Return a stage's loaders in a flat list."""
    return CombinedLoader(loaders).flattened if is_collection(loaders) else getattr(loaders, "flattened", [loaders])
