"""The batch stream: whose batches are whose for a loader without indices (an iterable dataset, a list of batches).

A source with a state (source_state.py) resumes from it. Any other source can only be read from its start, so a resumed run
reads again what was consumed, and prints that it does. What the source draws while it is read comes from isolated generators
under a seed of (seed, epoch): the order is a function of the two, and reading again does not move the generators of training.

Every rank reads the whole stream and keeps its shard (stream_shard.py), so all ranks know where it ends. The last round is
neither split nor padded: each rank weighs by the samples of its batch, and a rank without one works on the round's first batch
with weight zero.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainwright.data.combined_loader import is_read_once
from trainwright.data.seeding import IsolatedGenerators, derive_seed, read_isolated
from trainwright.data.source_state import SourceState, SourceStates
from trainwright.data.stateful_iterable import END, ReaderState, StateRejected
from trainwright.data.stream_shard import Mode, StreamPosition, StreamShard
from trainwright.data.workers import SeededIterable
from trainwright.errors import a_type_of
from trainwright.rank_zero import rank_zero_warn, say

__all__ = ["sample_counts"]


class BatchStream(StreamShard):
    """One rank's shard of an iterable of batches.

    `seed_rank` seeds the workers (0 if all ranks read the same), with what `generator` draws. `draws` is whether reading the
    source draws from this process's generators.
    """

    def __init__(
        self,
        source: Iterable[Any],
        *,
        rank: int,
        world_size: int,
        mode: Mode,
        seed_rank: int,
        generator: torch.Generator | None,
        draws: bool,
        states: SourceStates | None,
    ) -> None:
        super().__init__(source, rank=rank, world_size=world_size, mode=mode)
        self.seed_rank, self.states = seed_rank, states
        self._plan: Sequence[tuple[int, int]] = ()
        self._generator, self._draws = generator, draws
        self._compare: Callable[[Any], Any] | None = None
        self._from: SourceState | None = None
        """A state within the pass that the shard starts in, at the start or before it."""
        self._why_reread = ""
        """Why the source has to be read again up to the start."""

    def set_epoch(
        self,
        seed: int,
        epoch: int,
        start_batch: int = 0,
        position: StreamPosition | None = None,
        state: SourceState | None = None,
    ) -> None:
        """See StreamShard; ValueError if the batch size has changed and the position lies within a batch of the new one."""
        # With an exact state the rest of a batch may be dropped. Without one, batches of the new size would have to be re-read,
        # and they do not end where the consumed ones ended.
        is_exact = state is not None and position is not None and state["items"] == position["items"]
        self._from = state if is_exact else None
        super().set_epoch(seed, epoch, start_batch, position)
        if self.states is not None:
            self._resume(self.states, state, position)

    def compare_first(self, compare: Callable[[Any], Any]) -> None:
        """Pass the next batch that is read through a function, which compares it with those of other ranks."""
        self._compare = compare

    def plan_states(self, batches: Sequence[tuple[int, int]]) -> None:
        self._plan = batches

    @property
    def exact_source_length(self) -> int | None:
        # Only a list's length is certain: that of a DataLoader or a dataset need not be true.
        return self.source_length if isinstance(self.source, Sequence) else None

    @property
    def real_length(self) -> int | None:
        return self._dummy_at

    @property
    def item_size(self) -> int:
        size = getattr(self.source, "batch_size", None)
        return size if isinstance(size, int) else 0

    def item_at(self, samples: int, was: int) -> int:
        items, rest = divmod(samples, self.item_size)
        if rest and self._from is None:
            raise ValueError(
                f"{samples // was} batches of {was} samples were consumed, which is not a whole number of batches of "
                f"{self.item_size}, and {a_type_of(self.source)} without a state is read batch by batch; resume with "
                f"batch_size={was}, or from a checkpoint of an epoch's end."
            )
        return items + (rest > 0)

    def drawn(self, pass_number: int, start: int = 0) -> Iterator[Any]:
        if isinstance(self.source, Sequence):
            return islice(iter(self.source), start, None)
        if is_read_once(self.source):
            return islice(self._read_once(self.source, pass_number), start, None)
        if self.states is not None:
            return self._read_from_state(self.states, pass_number, start)
        self._print_reread(pass_number, start, "has no state_dict()")
        return islice(self._opened(pass_number, lambda: iter(self.source)), start, None)

    @property
    def _kind(self) -> str:
        """Return the name of the dataset's class with its article."""
        dataset = getattr(self.source, "dataset", self.source)
        return a_type_of(getattr(dataset, "dataset", dataset))

    def _read_once(self, source: Iterator[Any], pass_number: int) -> Iterator[Any]:
        is_empty = True
        for batch in self._opened(pass_number, lambda: source):
            is_empty = False
            yield batch
        if is_empty:
            raise RuntimeError(
                f"the {type(source).__name__} has no batches, or none left: an iterator can be read once. Pass a list, a "
                "DataLoader or an object whose __iter__ starts from the beginning, or read it once (max_epochs=1)."
            )

    def _print_reread(self, pass_number: int, batches: int, why: str) -> None:
        if batches and pass_number == self.start_pass:
            self._print(
                f"skipping the first {batches} batches of this epoch: {self._kind} {why}, so they have to be re-read."
            )

    def _print(self, text: str) -> None:
        if self.rank == self.seed_rank == 0:
            say(f"trainwright: {text}")

    def _opened(self, pass_number: int, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return the batches that `begin` reads, a pass or the rest of one, under the pass's seed."""
        seed = derive_seed(self.pass_seed(pass_number), self.epoch)
        if self._generator is not None:
            self._generator.manual_seed(seed)
        if isinstance(self.source, DataLoader) and isinstance(self.source.dataset, SeededIterable):
            self.source.dataset.set_pass(derive_seed(seed, self.seed_rank), self.epoch)
        isolated = IsolatedGenerators(seed) if self._draws else None
        if self.states is not None:
            self.states.read_with(isolated)
        if isolated is None:
            batches = begin()
        else:
            with isolated.active():
                batches = read_isolated(begin(), repeat(isolated))
        compare, self._compare = self._compare, None
        return batches if compare is None else chain(map(compare, islice(batches, 1)), batches)

    def _resume(self, states: SourceStates, state: SourceState | None, position: StreamPosition | None) -> None:
        """Let the source resume from a state that fits: one within this pass, or at its start what the last epoch left."""
        self._from, self._why_reread = None, "has no state saved within this epoch"
        is_at_start = not (self.start_item or self.start_pass)
        if state is not None and not states.fits(state):
            was, now = state["num_workers"], getattr(self.source, "num_workers", 0)
            self._why_reread = f"was read by {was} workers, whose states do not fit {now}"
            if is_at_start and state["readers"] and not state["ended"]:
                self._print(f"{self._kind} {self._why_reread}, so it starts over.")
            state = None
        if state is not None and is_at_start:
            states.begin_after(state)
            return
        readers: dict[int, ReaderState] = {}
        if state is not None and position is not None and state["passes"] == self.start_pass:
            if state["items"]:
                self._from = self._fitted_state(state, position)
            else:
                readers = state["readers"]
        if self._from is not None:
            states.begin_within(self._from)
        else:
            states.begin_pass(self.start_pass, readers)

    def _fitted_state(self, state: SourceState, position: StreamPosition) -> SourceState | None:
        """Return a state with its batches counted in those of now; None if that is not a whole number."""
        since, size, was = position["items"] - state["items"], self.item_size, position["size"]
        if not size or not was or size == was:
            return state
        # The fingerprint goes: the next batch has a different size now.
        since, rest = divmod(since * was, size)
        return None if rest else {**state, "items": self.start_item - since, "following": None}

    def _read_from_state(self, states: SourceStates, pass_number: int, start: int) -> Iterator[Any]:
        """Yield the batches of a pass from `start` on, resuming the source from a state within this pass if there is one."""
        base, _, begun = next(each for each in reversed(self._begun) if each[1] == pass_number)
        ranks = self.world_size  # this rank counts rounds, and the source counts batches of all ranks
        states.plan([(every * ranks, begun + (batch - base) * ranks) for every, batch in self._plan])
        state, why = self._from if pass_number == self.start_pass else None, self._why_reread
        if state is not None:
            batches = states.noting(self._opened(pass_number, lambda: states.open_within(state, self.epoch)))
            try:
                first = next(batches, END)
                is_refused = states.is_other(state, first)
                # A shuffle buffer whose contents are not in the state yields something else from it than it did before.
                why = "yields a different batch after load_state_dict() than before (is a shuffle buffer in its state?)"
            except StateRejected as error:
                is_refused, why = True, f"failed to load its state ({_cause(error)})"
            if not is_refused:
                yield from islice(chain([] if first is END else [first], batches), start - state["items"], None)
                return
            states.distrust()
            states.begin_pass(pass_number, state.get("begun", {}))
        self._print_reread(pass_number, start, why)
        batches = self._opened(pass_number, lambda: states.open_pass(pass_number, self.epoch))
        yield from islice(states.noting(batches), start, None)

    def cut_round(self, items: list[Any], number: int) -> Any:
        """Return this rank's batch of a pass's last round; if it has none, the first rank's, with weight zero."""
        if sizes := round_sizes(map(sample_counts, items), self.world_size):
            self.uneven[number] = sizes
        return items[self.rank] if self.rank < len(items) else items[0]


def _cause(error: StateRejected) -> str:
    """Return what went wrong; a worker's error comes after the worker's traceback."""
    return str(error).strip().splitlines()[-1].rpartition("StateRejected: ")[2]


def round_sizes(counts: Iterable[list[int]], ranks: int) -> list[int]:
    """Return the samples that each rank has in a round; an empty list if all have equally many."""
    counts = list(counts)
    if len(counts) == ranks and all(each == counts[0] for each in counts):
        return []
    if unclear := [each for each in counts if len(each) != 1]:
        rank_zero_warn(
            f"the samples of a batch are unclear (its parts have the lengths {unclear[0]}), so its weight in a last round may "
            "be wrong. Let collate_fn return tensors or lists that all have one entry for each sample.",
            stacklevel=2,
        )
    # Each batch has the same weight if its samples are unknown.
    sizes = [each[0] if each else 0 for each in counts]
    return (sizes if all(sizes) else [sys.maxsize] * len(counts)) + [0] * (ranks - len(counts))


def sample_counts(batch: Any) -> list[int]:
    """Return the numbers of samples that the parts of a batch show: one number if they agree, none if they are unknown."""
    # A list of plain values, such as class names, does not count beside columns that agree.
    counts = {*_lengths(batch, True, False), *_lengths(batch, False, False)}
    if len(counts) == 1:
        return list(counts)
    columns = set(_lengths(batch, True, True))
    return list(columns) if len(columns) == 1 else list(dict.fromkeys(_lengths(batch, False, True)))


def _lengths(value: Any, of_columns: bool, of_plain: bool, depth: int = 0) -> Iterator[int]:
    """Yield the length of each column of a batch, as default_collate makes them, or of each list of samples."""
    if is_dataclass(value) and not isinstance(value, (type, Mapping)):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    if isinstance(shape := getattr(value, "shape", None), tuple):
        yield from shape[:1]
    elif isinstance(count := getattr(value, "num_graphs", None), int):  # a batch of PyTorch Geometric
        yield count
    elif isinstance(value, Mapping) or is_list:
        parts = list(value if is_list else value.values())
        found = [list(_lengths(part, of_columns, of_plain, depth + 1)) for part in parts]
        kinds = {_kind(part) for part in parts}
        kind = kinds.pop() if len(kinds) == 1 else None
        # Tensors at the top are columns.
        has_samples = kind not in (None, "list") and (depth > 0 or not isinstance(kind, int))
        if is_list and (not any(found) or (has_samples and not of_columns)):
            yield from [len(parts)] if parts and (of_plain or any(found)) else []
            return
        yield from chain.from_iterable(found)
        if of_columns and depth and any(found) and not all(found):
            yield 0  # tensors with plain values within a batch are a sample, and no columns


def _kind(value: Any) -> Any:
    """Return the structure of a sample: an array's dimensions, "list" for values of one kind, None for a plain value."""
    if isinstance(value, (list, tuple)):
        kinds = [_kind(each) for each in value]
        return tuple(kinds) if len(set(kinds)) > 1 else "list"
    dimensions = len(getattr(value, "shape", ()))
    return dimensions or ("mapping" if isinstance(value, Mapping) else None)
