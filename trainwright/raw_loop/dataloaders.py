"""Loaders of a raw loop: their options, loaders that begin within an epoch, and the seeds of random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch

from trainwright.arguments import NamedArguments, check_flags, refuses_unknown
from trainwright.data.seeding import seed_rank
from trainwright.devices import cuda
from trainwright.distributed.collectives import data_rank
from trainwright.distributed.environment import Environment, prepare_deterministic
from trainwright.engine.engine import Engine
from trainwright.engine.prepared_loader import Iterations, PreparedLoader
from trainwright.errors import a_type_of


@dataclass
class DataLoaderConfiguration(NamedArguments):
    """How the Accelerator prepares DataLoaders.

    Raises:
        TypeError: a value of another kind.
        ValueError: dispatch_batches=True.

    >>> configuration = tw.DataLoaderConfiguration(split_batches=True, data_seed=7)
    >>> loader = tw.Accelerator(dataloader_config=configuration).prepare(loader)
    """

    split_batches: bool = False
    """Whether a loader's batch is divided over the ranks. By default it belongs to one rank."""
    dispatch_batches: bool | None = None
    """True is rejected: no rank reads for the others. A rank reads only its samples of a dataset with indices. Of an
    IterableDataset it reads all batches and keeps its share."""
    even_batches: bool = True
    """Accepted with either value. The ranks always have equally many batches, and no sample counts twice: a last round is
    divided evenly. A rank for which no sample is left works on another's. It has weight zero in `backward`, and
    `gather_for_metrics` omits it."""
    use_seedable_sampler: bool = False
    """Accepted with either value: the order of the data always follows from the seed and the epoch."""
    data_seed: int | None = None
    """The seed of the order, by default torch's seed on rank 0 when the first loader is prepared."""
    non_blocking: bool = False
    """Accepted with either value: copies from pinned memory to an accelerator never block the host."""
    use_stateful_dataloader: bool = False
    """Whether loaders continue within the epoch after `load_state`, for a loop that neither reads `loader.epoch` nor skips
    batches. Prepared loaders have `state_dict` and `load_state_dict` with either value."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "data_seed":
                if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                    raise TypeError(f"data_seed={value!r} is {a_type_of(value)}. Expected an int, or None.")
            elif field.name == "dispatch_batches" and value not in (None, False):
                raise ValueError(
                    f"dispatch_batches={value!r} is not accepted: every process reads the data, and keeps its share of the "
                    "batches. Omit it. If only one process can read the data, write them to files first."
                )
            elif field.name != "dispatch_batches" and not isinstance(value, bool):
                raise TypeError(f"{field.name}={value!r} is not accepted. Pass True or False.")


class LoaderOptions(NamedTuple):
    """How loaders are prepared."""

    configuration: DataLoaderConfiguration = DataLoaderConfiguration()
    moves: bool = True
    """Whether batches are moved to the device."""
    rng_types: tuple[str, ...] = ()
    """The generators that all ranks set to rank 0's state at the start of an epoch."""

    def prepare(self, engine: Engine, loader: Any, iterations: Iterations, moves: bool | None = None) -> PreparedLoader:
        """Return a loader prepared with these options. Collective."""
        chosen = self.configuration
        types = [
            each for each in self.rng_types if each != "generator"
        ]  # the order never comes from the loader's generator
        return PreparedLoader(
            engine,
            loader,
            iterations,
            splits=chosen.split_batches,
            moves=self.moves if moves is None else moves,
            continues=chosen.use_stateful_dataloader,
            before_epoch=partial(synchronize, types, None, engine.broadcast) if types else None,
        )


def loader_options(
    configuration: DataLoaderConfiguration | None, split_batches: bool, rng_types: Iterable[Any] | None, moves: bool
) -> LoaderOptions:
    """Return the options of loaders from the arguments of an Accelerator.

    Raises:
        TypeError, ValueError: one of them is wrong.
    """
    if configuration is None:
        configuration = DataLoaderConfiguration()
    elif not isinstance(configuration, DataLoaderConfiguration):
        raise TypeError(f"dataloader_config is {a_type_of(configuration)}. Expected a tw.DataLoaderConfiguration.")
    check_flags(split_batches=split_batches, device_placement=moves)
    if split_batches:
        configuration = replace(configuration, split_batches=True)
    return LoaderOptions(configuration, moves, _names(rng_types or ()))


def synchronize(rng_types: Iterable[Any], generator: torch.Generator | None, broadcast: Callable[[Any], Any]) -> None:
    """Set generators of this process to rank 0's state, by name. "generator" is the one given. Collective.

    Raises:
        TypeError: not a list.
        ValueError: a name that is not one of a generator of this machine.
    """
    for name in _names(rng_types):
        if name == "generator":
            if generator is None:
                raise ValueError('rng_types has "generator", but no generator was given. Pass generator=.')
            # Generators take states in host memory. The broadcast may have put them on the device.
            generator.set_state(broadcast(generator.get_state()).cpu())
        elif name == "torch":
            torch.set_rng_state(broadcast(torch.get_rng_state()).cpu())
        else:
            module: Any = torch.get_device_module(name)
            module.set_rng_state(broadcast(module.get_rng_state()).cpu())


def _names(rng_types: Iterable[Any]) -> tuple[str, ...]:
    """Return the names of generators, or of members of an enum of them (TypeError, ValueError)."""
    if isinstance(rng_types, str) or not isinstance(rng_types, Iterable):
        raise TypeError(f"rng_types={rng_types!r} is not a list. Expected a list of names, such as ['torch'].")
    names = tuple(str(getattr(each, "value", each)) for each in rng_types)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    known = ["torch", "generator", *([] if device is None else [device.type])]
    if unknown := [each for each in names if each not in known]:
        raise ValueError(f"rng_types has {unknown[0]!r}. Expected {', '.join(known)}.")
    return names


class SkippedBatches:
    """A loader whose first iteration begins within the epoch, and later ones at an epoch's start.

    It has the loader's other attributes.
    """

    def __init__(self, loader: Any, num_batches: int) -> None:
        self.loader, self.num_batches = loader, num_batches
        self._is_begun = False

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self.num_batches)

    def __iter__(self) -> Iterator[Any]:
        if self._is_begun:  # the first iteration was left before its end
            self.num_batches = 0
        self._is_begun = True
        if not isinstance(self.loader, PreparedLoader):
            return self._until_end(islice(iter(self.loader), self.num_batches, None))
        if self.num_batches:
            self.loader.skip(self.num_batches)
        return self._until_end(iter(self.loader))

    def _until_end(self, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from batches
        finally:
            self.num_batches = 0  # only now, since `len` describes the iteration under way


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> SkippedBatches:
    """Return a loader whose first iteration begins at batch `num_batches` of the epoch, with the batches of a whole one.

    Later iterations are whole epochs. A loader that `load_state` has put at that batch begins there: nothing is skipped twice.

    Args:
        dataloader: any loader, prepared or not. A prepared DataLoader with indices does not read the skipped samples.
        num_batches: batches of this rank, counted from the start of the epoch.

    Raises:
        TypeError, ValueError: not a loader, or not a number of batches.

    >>> loader = tw.Accelerator().prepare(loader)
    >>> rest = tw.skip_first_batches(loader, 6)
    >>> len(list(rest)), len(list(rest))  # its second iteration is a whole epoch
    (2, 8)
    """
    if isinstance(num_batches, bool) or not isinstance(num_batches, int) or num_batches < 0:
        raise ValueError(f"num_batches={num_batches!r} is not accepted. Pass an integer of at least 0.")
    if not isinstance(dataloader, Iterable):
        raise TypeError(f"skip_first_batches was given {a_type_of(dataloader)}. Expected a loader.")
    return SkippedBatches(dataloader, num_batches)


@refuses_unknown
def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed python, numpy and torch on every device: `seed_everything(seed)`, with two options.

    The order of the data depends only on rank 0's seed, also with device_specific.

    Args:
        seed: from 0 to 2**32 - 1, the same on every rank.
        device_specific: add the rank to the seed, for different random numbers (dropout, noise) on the ranks.
        deterministic: let torch use deterministic algorithms only, in this process from now on. Call it before a GPU is used.

    Raises:
        TypeError, ValueError: the seed is not such a number.

    >>> tw.set_seed(42)
    >>> noise = torch.rand(3)
    >>> tw.set_seed(42)
    >>> torch.equal(noise, torch.rand(3))
    True
    """
    seed_rank(seed, data_rank(Environment.detect().rank) if device_specific else 0, verbose=False)
    if deterministic:
        prepare_deterministic()
        torch.use_deterministic_algorithms(True)
        # cuDNN's search may choose another algorithm in every run.
        cuda.try_algorithms(False)
