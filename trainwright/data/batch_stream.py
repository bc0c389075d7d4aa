"""The batch stream: whose batches are whose where a loader has no indices (an iterable dataset, a list of batches).

A source that tells its state (source_state.py) goes on from it. Any other can only be begun at its start and read, so a
resumed run reads again what it has had, and says so. What the source draws while it is read is drawn aside, under a seed of
(seed, epoch): the order is a function of the two, and reading again leaves the generators of training where they were.

On several ranks each one reads the whole stream and keeps its share (share.py), so that all know alike where it ends. The
last round is neither split nor padded: each rank weighs by the samples of its own batch, and one that has none works on the
round's first batch with no weight.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from trainwright.data.seeding import SideGenerators, derive_seed
from trainwright.data.share import Mode, Place, Share
from trainwright.data.source_state import SourceState, StateLog
from trainwright.data.stated_reader import END, StateRefused
from trainwright.data.workers import SeededIterable


class BatchStream(Share):
    """One rank's share of an iterable of batches.

    Args:
        source: the iterable; its `__iter__` begins anew.
        rank, world_size: whose share.
        mode: "train", "evaluate" or "ghost" (see share.py).
        seed_rank: the rank that the workers' seeds are made of; 0 where all ranks are to read the same.
        generator: what a DataLoader draws its workers' seeds from; None for no such loader.
        draws: whether the source draws from this process's generators while it is read.
        states: where the source's states are kept, where it tells them; None where it has none.
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
        states: StateLog | None = None,
    ) -> None:
        super().__init__(rank=rank, world_size=world_size, mode=mode)
        self.source = source
        self.seed_rank = seed_rank
        self.states = states
        self.plan: Sequence[tuple[int, int]] = ()
        """After which batches of this rank the source's state is asked for: an interval, and one of them, each."""
        self._generator, self._draws = generator, draws
        self._from: SourceState | None = None
        """A state of the pass at the start, at the start or before it."""
        self._why_again = ""
        """Why the source is read again up to the start, where it is."""

    def set_epoch(
        self,
        seed: int,
        epoch: int,
        start_batch: int = 0,
        place: Place | None = None,
        state: SourceState | None = None,
    ) -> None:
        """Choose the order that comes next, and where it starts (see share.py), with the source's state there if it is known.

        Raises:
            ValueError: the batch size has changed, and the place lies within a batch of the new one.
        """
        # Another batch size may take what is left of a batch, but not what would have to be read again before it.
        is_exact = state is not None and place is not None and state["items"] == place["items"]
        self._from = state if is_exact else None
        super().set_epoch(seed, epoch, start_batch, place)
        if self.states is not None:
            self._take_up(self.states, state, place)

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

    @property
    def item_size(self) -> int:
        """Return the loader's batch size; 0 where it has none."""
        size = getattr(self.source, "batch_size", None)
        return size if isinstance(size, int) else 0

    def fitted(self, place: Place) -> tuple[int, int]:
        """Return the pass and the batch that a place stands for; where the batch size has changed, by the samples."""
        size, was = self.item_size, place["size"]
        if not size or not was or size == was:
            return super().fitted(place)
        items, rest = divmod(place["items"] * was, size)
        if rest and self._from is None:
            raise ValueError(
                f"{place['items']} batches of {was} samples were consumed, which is no whole number of batches of {size}, and "
                f"a {type(self.source).__name__} without a state of its own is read batch by batch; go on with "
                f"batch_size={was}, or from a checkpoint of an epoch's end."
            )
        return place["passes"], items + (rest > 0)

    def drawn(self, pass_number: int, start: int = 0) -> Iterator[Any]:
        """Return the batches of one pass from one of them on, for all ranks."""
        if isinstance(self.source, Sequence):
            return islice(iter(self.source), start, None)
        if isinstance(self.source, Iterator):
            return islice(self._read_once(self.source, pass_number), start, None)
        if self.states is not None:
            return self._stated(self.states, pass_number, start)
        self._say_what_is_read_again(pass_number, start, "tells no state to go on from")
        return islice(self._opened(pass_number, lambda: iter(self.source)), start, None)

    @property
    def _kind(self) -> str:
        dataset = getattr(self.source, "dataset", self.source)
        return type(getattr(dataset, "dataset", dataset)).__name__

    def _read_once(self, source: Iterator[Any], pass_number: int) -> Iterator[Any]:
        is_empty = True
        for batch in self._opened(pass_number, lambda: source):
            is_empty = False
            yield batch
        if is_empty:
            raise RuntimeError(
                f"the {type(source).__name__} that was given has no batch, or none left: it can be read once. Pass a list, "
                "a DataLoader or an object whose __iter__ begins anew, or ask for no more than it has (max_epochs=1)."
            )

    def _say_what_is_read_again(self, pass_number: int, batches: int, why: str) -> None:
        if batches and pass_number == self.start_pass and self.rank == self.seed_rank == 0:
            print(
                f"trainwright: the first {batches} batches of this epoch were consumed before; {_article(self._kind)} {why}, "
                "so they are read again and skipped.",
                file=sys.stderr,
            )

    def _opened(self, pass_number: int, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return the batches of a pass, or of its rest, that `begin` begins under the pass's seed."""
        seed = derive_seed(self.pass_seed(pass_number), self.epoch)
        if self._generator is not None:
            self._generator.manual_seed(seed)
        if isinstance(self.source, DataLoader) and isinstance(self.source.dataset, SeededIterable):
            self.source.dataset.set_pass(derive_seed(seed, self.seed_rank), self.epoch)
        side = SideGenerators(seed) if self._draws else None
        if self.states is not None:
            self.states.side = side
        return begin() if side is None else _drawn_aside(side, begin)

    def _take_up(self, states: StateLog, state: SourceState | None, place: Place | None) -> None:
        """Let the source begin at a state that fits: one of this pass, or what the last epoch left at this one's beginning."""
        self._from, self._why_again = None, "was not asked for its state"
        if state is not None and not states.fits(state):
            was, now = state["num_workers"], getattr(self.source, "num_workers", 0)
            self._why_again = f"was read by {was} workers, from whose states {now} cannot go on"
            is_lost = state["readers"] and not (self.start_item or self.start_pass or state["ended"])
            if is_lost and self.rank == self.seed_rank == 0:
                print(f"trainwright: {_article(self._kind)} {self._why_again}, so it begins anew.", file=sys.stderr)
            state = None
        is_at_start = not (self.start_item or self.start_pass)
        if state is not None and not is_at_start and state["passes"] == self.start_pass and place is not None:
            state = self._fitted_state(state, place) if state["items"] else state
        elif not is_at_start:
            state = None
        if state is None:
            states.begin_pass(self.start_pass, {})
        elif is_at_start:
            states.begin_after(state)
        elif state["items"]:
            self._from = state
            states.begin_within(state)
        else:
            states.begin_pass(self.start_pass, state["readers"])

    def _fitted_state(self, state: SourceState, place: Place) -> SourceState | None:
        """Return a state with the batches behind it counted in those of now; None where these do not come to a whole number."""
        since, size, was = place["items"] - state["items"], self.item_size, place["size"]
        if not size or not was or size == was:
            return state
        since, rest = divmod(since * was, size)
        return None if rest else {**state, "items": self.start_item - since, "following": None}

    def _stated(self, states: StateLog, pass_number: int, start: int) -> Iterator[Any]:
        """Yield the batches of a pass from one on, from the source's state where it has told one of this pass."""
        base, _, begun = next(each for each in reversed(self._begun) if each[1] == pass_number)
        ranks = self.world_size
        states.plan([(every * ranks, begun + (batch - base) * ranks) for every, batch in self.plan])
        state, why = self._from if pass_number == self.start_pass else None, self._why_again
        if state is not None:
            batches = states.noting(self._opened(pass_number, lambda: states.open_within(state, self.epoch)))
            try:
                first = next(batches, END)
                is_refused = states.is_other(state, first)
                why = "goes on from its state as it did not before (what a shuffle buffer holds is in no state)"
            except StateRefused as error:
                is_refused, why = True, f"fails at its state ({_cause(error)})"
            if not is_refused:
                yield from islice(chain([] if first is END else [first], batches), start - state["items"], None)
                return
            states.is_trusted = False
            states.let_go()
            states.begin_pass(pass_number, state.get("begun", {}))
        self._say_what_is_read_again(pass_number, start, why)
        yield from islice(
            states.noting(self._opened(pass_number, lambda: states.open_pass(pass_number, self.epoch))), start, None
        )

    def cut_round(self, items: list[Any], number: int) -> Any:
        """Return this rank's batch of a pass's last round; another's, which weighs nothing, where it has none."""
        counted = [count_samples(batch) for batch in items]
        sizes = [size for size in counted if size]
        if len(sizes) < len(counted):
            sizes = [sys.maxsize] * len(items)  # unknown: each batch weighs the same, and all of it is its rank's
        if len(items) < self.world_size or len(set(sizes)) > 1:
            self.uneven[number] = sizes + [0] * (self.world_size - len(items))
        return items[self.rank] if self.rank < len(items) else items[0]


def _article(kind: str) -> str:
    return f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind}"


def _cause(error: StateRefused) -> str:
    """Return what went wrong: a worker's error comes with the worker's traceback before it."""
    return str(error).strip().splitlines()[-1].rpartition("StateRefused: ")[2]


def _drawn_aside(side: SideGenerators, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    with side.drawn():
        batches = begin()
    while True:
        with side.drawn():
            batch = next(batches, END)
        if batch is END:
            return
        yield batch


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
