"""The batch stream: shards a loader without indices (an iterable dataset, a list of batches) over the ranks.

A source with a state (source_state.py) resumes from that state. A resumed run reads any other source from its start again,
and prints a line about it. While the source is read, isolated generators replace this process's generators. They are seeded
from (seed, epoch), so the order depends on nothing else, and a second reading does not change the random numbers of
training.

Every rank reads the whole stream and keeps its shard (stream_shard.py), so all ranks know where it ends. The last round is
neither split nor padded. A rank weighs its loss by the samples of its batch, and a rank without a batch works on the
round's first batch with weight zero.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
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

    `generator` draws the workers' base seeds, and `seed_rank` is part of their seed (0 if all ranks read the same data).
    `draws` tells whether reading the source uses this process's random number generators.
    """

    def __init__(
        self,
        source: Iterable[Any],
        *,
        rank: int,
        world_size: int,
        mode: Mode,
        cycles: bool,
        seed_rank: int,
        generator: torch.Generator | None,
        draws: bool,
        states: SourceStates | None,
    ) -> None:
        super().__init__(source, rank=rank, world_size=world_size, mode=mode, cycles=cycles)
        self.seed_rank, self.states = seed_rank, states
        self._plan: Sequence[tuple[int, int]] = ()
        self._generator, self._draws = generator, draws
        self._compare: Callable[[Any], Any] | None = None
        self._from: SourceState | None = None
        """A state in the pass that the shard starts in, at the start or before it."""
        self._why_reread = ""
        """Why the source must be read again up to the start."""

    def set_epoch(
        self,
        seed: int,
        epoch: int,
        start_batch: int = 0,
        position: StreamPosition | None = None,
        state: SourceState | None = None,
    ) -> None:
        """See StreamShard; ValueError if the batch size has changed and the position lies within a batch of the new size."""
        super().set_epoch(seed, epoch, start_batch, position)
        if self.states is not None:
            self._resume(self.states, state, position)

    def compare_first(self, compare: Callable[[Any], Any]) -> None:
        """Pass the next batch that is read through `compare`, which compares it with the other ranks' batches."""
        self._compare = compare

    def plan_states(self, batches: Sequence[tuple[int, int]]) -> None:
        self._plan = batches

    @property
    def exact_source_length(self) -> int | None:
        # Only a list's length is certain: a DataLoader or a dataset may report a wrong length.
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
        if rest:
            raise ValueError(
                f"the checkpoint was saved after {samples // was} batches of {was} samples, which is not a whole number of "
                f"batches of {self.item_size}, and {a_type_of(self.source)} is read batch by batch. Resume with "
                f"batch_size={was}, or from a checkpoint at an epoch's end."
            )
        return items

    def drawn(self, pass_number: int, start: int = 0) -> Iterator[Any]:
        if isinstance(self.source, Sequence):
            return islice(iter(self.source), start, None)
        if is_read_once(self.source):
            return islice(self._read_once(self.source, pass_number), start, None)
        if self.states is not None:
            return self._read_from_state(self.states, pass_number, start)
        self._print_reread(pass_number, start, "has no state_dict()")
        return islice(self._opened(pass_number, lambda *_: iter(self.source)), start, None)

    @property
    def _kind(self) -> str:
        """Return the name of the dataset's class with its article."""
        dataset = getattr(self.source, "dataset", self.source)
        return a_type_of(getattr(dataset, "dataset", dataset))

    def _read_once(self, source: Iterator[Any], pass_number: int) -> Iterator[Any]:
        is_empty = True
        for batch in self._opened(pass_number, lambda *_: source):
            is_empty = False
            yield batch
        if is_empty:
            raise RuntimeError(
                f"the {type(source).__name__} yields no batches: an iterator can be read only once. Pass a list, a "
                "DataLoader or an object whose __iter__ starts from the beginning, or read the iterator once (max_epochs=1)."
            )

    def _print_reread(self, pass_number: int, batches: int, why: str) -> None:
        if batches and pass_number == self.start_pass:
            self._print(
                f"skipping the first {batches} batches of this epoch: {self._kind} {why}, so they have to be re-read."
            )

    def _print(self, text: str) -> None:
        if self.rank == self.seed_rank == 0:
            say(f"trainwright: {text}")

    def _opened(self, pass_number: int, begin: Callable[..., Iterator[Any]]) -> Iterator[Any]:
        """Return the batches that `begin` reads (a pass or its rest) with the pass's generators and its plan of states."""
        seed = derive_seed(self.pass_seed(pass_number), self.epoch)
        if self._generator is not None:
            self._generator.manual_seed(seed)
        if isinstance(self.source, DataLoader) and isinstance(self.source.dataset, SeededIterable):
            self.source.dataset.set_pass(derive_seed(seed, self.seed_rank), self.epoch)
        isolated, plan = IsolatedGenerators(seed) if self._draws else None, []
        if self.states is not None:
            base, _, begun = next(beginning for beginning in reversed(self._begun) if beginning[1] == pass_number)
            ranks = self.world_size  # this rank counts rounds, and the source counts batches of all ranks
            plan = [(every * ranks, begun + (batch - base) * ranks) for every, batch in self._plan]
        if isolated is None:
            batches = begin(isolated, plan)
        else:
            with isolated.active():
                batches = read_isolated(begin(isolated, plan), repeat(isolated))
        compare, self._compare = self._compare, None
        return batches if compare is None else chain(map(compare, islice(batches, 1)), batches)

    def _resume(self, states: SourceStates, state: SourceState | None, position: StreamPosition | None) -> None:
        """Choose the state that the source resumes from: a state in this pass, or at its start the end of the last epoch."""
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
            if not state["items"]:
                readers = state["readers"]
            elif position["size"] in (0, self.item_size):
                self._from = state
            else:  # it counts batches of another size
                readers = state.get("begun", {})
        if self._from is not None:
            states.begin_within(self._from)
        else:
            states.begin_pass(self.start_pass, readers)

    def _read_from_state(self, states: SourceStates, pass_number: int, start: int) -> Iterator[Any]:
        """Yield the batches of a pass from `start` on, resuming the source from a state in this pass if there is one."""
        state, why = self._from if pass_number == self.start_pass else None, self._why_reread
        if state is not None:
            batches = states.recording(self._opened(pass_number, partial(states.open_within, state, self.epoch)))
            try:
                first = next(batches, END)
                is_rejected = states.is_other(state, first)
                # A source whose state lacks its shuffle buffer yields other batches from that state.
                why = "yields a different batch after load_state_dict() than before (does its state include a shuffle buffer?)"
            except StateRejected as error:
                is_rejected, why = True, f"failed to load its state ({_cause(error)})"
            if not is_rejected:
                yield from islice(chain([] if first is END else [first], batches), start - state["items"], None)
                return
            states.distrust()
            states.begin_pass(pass_number, state.get("begun", {}))
        self._print_reread(pass_number, start, why)
        batches = self._opened(pass_number, partial(states.open_pass, pass_number, self.epoch))
        yield from islice(states.recording(batches), start, None)

    def cut_round(self, items: list[Any], number: int) -> Any:
        """Return this rank's batch of a pass's last round, or the first rank's batch, with weight zero, if it has none."""
        if sizes := round_sizes(map(sample_counts, items), self.world_size):
            self.uneven[number] = sizes
        return items[self.rank] if self.rank < len(items) else items[0]


def _cause(error: StateRejected) -> str:
    """Return the error's last line; an error in a worker begins with the worker's traceback."""
    return str(error).strip().splitlines()[-1].rpartition("StateRejected: ")[2]


def round_sizes(counts: Iterable[list[int]], ranks: int) -> list[int]:
    """Return the number of samples per rank in a round, or an empty list if all ranks have equally many."""
    counts = list(counts)
    if len(counts) == ranks and all(count == counts[0] for count in counts):
        return []
    if unclear := [count for count in counts if len(count) != 1]:
        rank_zero_warn(
            f"the number of samples in a batch is unclear: its parts have the lengths {unclear[0]}. So its weight in a "
            "last round may be wrong. Let collate_fn return tensors or lists with one entry per sample.",
            stacklevel=2,
        )
    # Batches whose samples are unknown all have the same weight.
    sizes = [count[0] if count else 0 for count in counts]
    return (sizes if all(sizes) else [sys.maxsize] * len(counts)) + [0] * (ranks - len(counts))


def sample_counts(batch: Any) -> list[int]:
    """Return the numbers of samples in the parts of a batch: one number if they agree, none if they are unknown."""
    # A list of plain values, such as class names, does not count next to columns that agree.
    counts = {*_lengths(batch, True, False), *_lengths(batch, False, False)}
    if len(counts) == 1:
        return list(counts)
    columns = set(_lengths(batch, True, True))
    return list(columns) if len(columns) == 1 else list(dict.fromkeys(_lengths(batch, False, True)))


def _lengths(value: Any, of_columns: bool, of_plain: bool, depth: int = 0) -> Iterator[int]:
    """Yield the lengths of a batch's columns, as default_collate makes them, or of its lists of samples."""
    if isinstance(shape := getattr(value, "shape", None), tuple):
        yield from shape[:1]
        return
    if isinstance(count := getattr(value, "num_graphs", None), int):  # a batch of PyTorch Geometric
        yield count
        return
    parts, is_list = _parts_of(value)
    lengths = [list(_lengths(part, of_columns, of_plain, depth + 1)) for part in parts]
    if is_list and not any(lengths):
        yield from [len(parts)] if parts and of_plain else []
    elif is_list and not of_columns and _are_samples(parts, depth):
        yield len(parts)
    else:
        yield from chain.from_iterable(lengths)
        if of_columns and depth and any(lengths) and not all(lengths):
            yield 0  # tensors next to plain values are one sample, not columns


def _parts_of(value: Any) -> tuple[list[Any], bool]:
    """Return the values in a mapping, a dataclass or a sequence, and whether it is a sequence."""
    if isinstance(value, Mapping):
        return list(value.values()), False
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)], False
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    return list(value) if is_list else [], is_list


def _are_samples(parts: list[Any], depth: int) -> bool:
    """Return whether the items of a list all have the structure of a sample; tensors at the top are columns."""
    kinds = {_kind(part) for part in parts}
    return len(kinds) == 1 and not kinds & {None, "list"} and (depth > 0 or not isinstance(next(iter(kinds)), int))


def _kind(value: Any) -> Any:
    """Return the structure of a sample: an array's dimensions, "list" for values of one kind, None for a plain value."""
    if isinstance(value, (list, tuple)):
        kinds = [_kind(item) for item in value]
        return tuple(kinds) if len(set(kinds)) > 1 else "list"
    dimensions = len(getattr(value, "shape", ()))
    return dimensions or ("mapping" if isinstance(value, Mapping) else None)
