"""The batch stream: whose batches are whose where a loader has no indices (an iterable dataset, a list of batches).

What cannot be begun anywhere is begun at its start and read, so a resumed run reads again what it has had. What the source
draws while it is read is drawn aside, under a seed of (seed, epoch): the order is a function of the two, and reading again
leaves the generators of training where they were.

On several ranks each one reads the whole stream and keeps its share (share.py), so that all know alike where it ends. The
last round of training is not split: each rank weighs by the samples of its own batch, and one that has none works on the
round's first batch with no weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from trainwright.data.seeding import SideGenerators, derive_seed
from trainwright.data.share import Mode, Share
from trainwright.data.workers import SeededIterable

END = object()


class BatchStream(Share):
    """One rank's share of an iterable of batches.

    Args:
        source: the iterable; its `__iter__` begins anew.
        rank, world_size: whose share.
        mode: "train", "evaluate" or "ghost" (see share.py).
        seed_rank: the rank that the workers' seeds are made of; 0 where all ranks are to read the same.
        generator: what a DataLoader draws its workers' seeds from; None for no such loader.
        draws: whether the source draws from this process's generators while it is read.
    """

    def __init__(
        self,
        source: Iterable[Any],
        *,
        rank: int,
        world_size: int,
        mode: Mode,
        seed_rank: int = 0,
        generator: torch.Generator | None = None,
        draws: bool = True,
    ) -> None:
        super().__init__(rank=rank, world_size=world_size, mode=mode)
        self.source = source
        self.seed_rank = seed_rank
        self._generator, self._draws = generator, draws

    def set_epoch(self, seed: int, epoch: int, start_batch: int = 0) -> None:
        """Choose the order that comes next, and the batch of this rank that it starts with."""
        super().set_epoch(seed, epoch, start_batch)
        if isinstance(self.source, DataLoader) and (sampler := distributed_sampler(self.source)) is not None:
            sampler.set_epoch(epoch)

    @property
    def source_length(self) -> int | None:
        """Return what the source says of its length, which need not be true; None where it says nothing."""
        try:
            return len(self.source)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None

    @property
    def exact_source_length(self) -> int | None:
        """Return the length of a list of batches; None for all else."""
        return self.source_length if isinstance(self.source, Sequence) else None

    @property
    def drops_short_round(self) -> bool:
        """Return whether a last round with fewer batches than ranks is left out, as a short batch is."""
        return self.mode == "train" and getattr(self.source, "drop_last", False) is True

    @property
    def real_length(self) -> int | None:
        """Return how many batches of an evaluation count on this rank; None while all that have come do."""
        return self._ghost_at

    def drawn(self, pass_number: int) -> Iterator[Any]:
        """Return the batches of one pass, for all ranks."""
        seed = derive_seed(self.pass_seed(pass_number), self.epoch)
        if self._generator is not None:
            self._generator.manual_seed(seed)
        if isinstance(self.source, DataLoader) and isinstance(self.source.dataset, SeededIterable):
            self.source.dataset.set_seed(derive_seed(seed, self.seed_rank))
        return self._drawn_aside(SideGenerators(seed)) if self._draws else iter(self.source)

    def _drawn_aside(self, side: SideGenerators) -> Iterator[Any]:
        with side.drawn():
            batches = iter(self.source)
        while True:
            with side.drawn():
                batch = next(batches, END)
            if batch is END:
                return
            yield batch

    def last_round(self, items: list[Any]) -> Any:
        """Return this rank's batch of a pass's last round; another's, which weighs nothing, where it has none."""
        counted = [count_samples(batch) for batch in items]
        sizes = [size for size in counted if size]
        if len(sizes) < len(counted):
            sizes = [1] * len(items)  # unknown: each batch weighs the same
        if len(items) < self.world_size or len(set(sizes)) > 1:
            self.real_sizes = sizes + [0] * (self.world_size - len(items))
        return items[self.rank] if self.rank < len(items) else items[0]


def count_samples(batch: Any) -> int | None:
    """Return how many samples a batch has, by its first tensor or list of plain things; None where that does not show."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else None
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if not isinstance(batch, Sequence) or isinstance(batch, (str, bytes)):
        return None
    if batch and not any(isinstance(each, (Tensor, Mapping, list, tuple)) for each in batch):
        return len(batch)
    return next((size for each in batch if (size := count_samples(each)) is not None), None)


def distributed_sampler(loader: DataLoader[Any]) -> DistributedSampler[Any] | None:
    """Return the DistributedSampler that the user gave the loader, within a batch sampler too."""
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            return sampler
    return None
