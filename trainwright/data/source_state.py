"""Source state: the state of an iterable with `state_dict` and `load_state_dict`, as checkpoints store it.

When a checkpoint needs the state, the source may have been read further: by a batch to see the end, by a round on several
ranks, or by workers that read ahead. So a plan takes the state in advance: after the batches where a save can be expected,
and after every hundredth. A run that resumes at another batch reads the batches since the latest state again and skips
them. The RNG state of the reading process is part of the state, so that a shuffle buffer continues unchanged.

A state contains the fingerprint of the next batch. Some sources keep no record of their shuffle buffer. If a source yields
another batch from its state, or fails to load the state, it is no longer trusted and is read again from the start of its
pass.

A source is a DataLoader whose IterableDataset has the two methods, or a user's loader with these methods.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, TypedDict, cast

import torch
from torch import Tensor

from trainwright.data.seeding import IsolatedGenerators, set_host_state
from trainwright.data.stateful_iterable import (
    END,
    Opening,
    ReaderState,
    StatefulBatch,
    StatefulIterable,
    StatefulReader,
)
from trainwright.data.stream_shard import StreamPosition

MOST_LEAVES, VALUES = 64, 16
"""The parts of a batch in its fingerprint, and the values taken from a tensor."""
SPACING = 100
"""Batches between two states if no save is expected, and so the most that a resumed run reads again."""


class SourceState(TypedDict):
    """The state of a source after some batches, as plain data."""

    passes: int
    items: int
    """Batches of the pass so far. At 0 the pass continues from the states in `readers`."""
    readers: dict[int, ReaderState]
    """The states by worker; number 0 is this process if it has no workers."""
    num_workers: int
    ranks: int
    """The world size."""
    latest: int
    """The worker that returned the latest batch."""
    generators: dict[str, Any] | None
    """The RNG state of this process while it reads the source; None if workers read it."""
    following: list[Any] | None
    """The fingerprint of the next batch; None if that batch was not read."""
    ended: bool
    """Whether the pass is over."""
    begun: dict[int, ReaderState]
    """The states that the pass started from; empty if the source started fresh."""


class SourceStates:
    """The latest states of one source, and the state that it resumes from.

    `dataset` is the loader's dataset if the dataset has the state, and None if the loader has it. With `continues` an epoch
    continues from the previous epoch's end.
    """

    def __init__(
        self,
        source: Any,
        dataset: StatefulIterable | None,
        ranks: int,
        continues: bool,
        end_workers: Callable[[], None],
    ) -> None:
        self._source, self._dataset, self._ranks, self._continues = source, dataset, ranks, continues
        self._num_workers = source.num_workers if dataset is not None else 0
        self._is_persistent = self._num_workers > 0 and source.persistent_workers
        self._end_workers = end_workers
        self._reader = StatefulReader(source)
        """Reads the source if the source, not its dataset, has the state."""
        self._behind = 2 * ranks + 8
        """Batches that may have been read beyond the latest consumed batch: one round waits, and some are prefetched."""
        self._states: deque[SourceState] = deque()
        self._plan: Sequence[tuple[int, int]] = ()
        self._passes = self._read = self._latest = 0
        self._readers: dict[int, ReaderState] = {}
        self._begun: dict[int, ReaderState] = {}
        self._outdated: set[int] = set()
        """The workers that have returned batches since their latest state."""
        self._has_ended = self._is_open = False
        self._end: SourceState | None = None
        self._first = 0
        """The number of the first worker in this pass."""
        self._generators: IsolatedGenerators | None = None
        self._is_trusted = True

    # -- beginning a pass ------------------------------------------------------------------------------------------------

    def fits(self, state: SourceState) -> bool:
        """Return whether the number of workers is unchanged; otherwise the workers read other parts of the data."""
        return state["num_workers"] == self._num_workers

    def begin_after(self, state: SourceState) -> None:
        """Make the next pass continue from the state at the end of an epoch or a pass."""
        end = state if state is self._end and self._first == 0 else None
        self.begin_pass(0, state["readers"], end=end)

    def begin_within(self, state: SourceState) -> None:
        """Make the next pass resume from a state within it."""
        self.begin_pass(state["passes"], state.get("begun", {}), state["items"])
        self._states.append(state)

    def begin_pass(
        self, passes: int, begun: dict[int, ReaderState], items: int = 0, end: SourceState | None = None
    ) -> None:
        """Make the next pass start from the states that it started from before, or fresh if there are none."""
        is_rotated, self._first = self._first != 0, 0
        self._passes, self._read, self._begun, self._end = passes, items, begun, end
        self._has_ended = self._is_open = False
        self._states.clear()
        # Running workers neither load a state nor change their numbers, but they continue from where they ended.
        if self._is_persistent and end is None and (is_rotated or begun or items):
            self._end_workers()

    def open_pass(
        self, passes: int, epoch: int, generators: IsolatedGenerators | None, plan: Sequence[tuple[int, int]]
    ) -> Iterator[Any]:
        """Return an iterator over a pass from its beginning, which takes the state after the planned items.

        It reads with these generators, or with the workers' if they are None. The plan has pairs of an interval and one such
        item of the pass.
        """
        self._generators, self._plan = generators, plan
        follows = self._end is not None
        if passes and passes != self._passes:
            ending = self.ending()
            self._begun, follows = ({}, False) if ending is None else (ending["readers"], True)
            if self._first and self._is_persistent:
                self._end_workers()  # their numbers are rotated, and the new pass starts at number 0
        self._begin_reading(passes, 0, dict(self._begun))
        self._first = 0
        readers = dict(self._begun) if self._continues else {}
        if self._dataset is not None:
            self._dataset.begin(Opening(readers, False, 0), follows and self._continues)
            return cast("Iterator[Any]", iter(self._source))
        return self._reader.begin_after(readers[0]["source"], epoch) if readers else self._reader.begin_fresh(epoch)

    def open_within(
        self, state: SourceState, epoch: int, generators: IsolatedGenerators | None, plan: Sequence[tuple[int, int]]
    ) -> Iterator[Any]:
        """Return an iterator over the rest of a pass from a state on. See `open_pass`."""
        self._generators, self._plan = generators, plan
        self._begin_reading(state["passes"], state["items"], dict(state["readers"]))
        self._states.append(state)
        if state.get("ended"):
            self._has_ended, self._end = True, state
            return iter(())
        self._first = (state["latest"] + 1) % max(1, self._num_workers)  # torch asks workers in turn, from number 0
        if self._dataset is None:
            return self._reader.begin_within({**state["readers"][0], "generators": state["generators"]}, epoch)
        self._dataset.begin(Opening(dict(state["readers"]), True, self._first), False)
        batches = iter(self._source)
        if state["generators"] is not None:
            set_host_state(state["generators"])
        return cast("Iterator[Any]", batches)

    def _begin_reading(self, passes: int, items: int, readers: dict[int, ReaderState]) -> None:
        self._passes, self._read, self._readers = passes, items, readers
        self._has_ended, self._is_open, self._end = False, True, None
        self._states.clear()
        self._outdated.clear()
        if self._dataset is not None:
            self._dataset.plan.set(items, self._plan if self._is_trusted else ())

    def distrust(self) -> None:
        """Use no state of this source again, because it yielded other batches from a state than before."""
        self._is_trusted = False
        self._end_workers()

    # -- reading -----------------------------------------------------------------------------------------------------------

    def recording(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of the opened pass, and store the states that are taken meanwhile."""
        for batch in batches:
            content, is_known = batch, False
            if isinstance(batch, StatefulBatch):
                content, is_known = batch.batch, self._record_worker(batch)
                if batch.is_empty:
                    continue
                self._latest = batch.worker
            if self._states and self._states[-1]["items"] == self._read and self._states[-1]["following"] is None:
                self._states[-1]["following"] = fingerprint(content)
            self._read += 1
            if not self._num_workers:
                is_known = self._is_trusted and any((self._read - one) % every == 0 for every, one in self._plan)
            if is_known:
                self._keep()
            yield content
        self._has_ended = True

    def _record_worker(self, batch: StatefulBatch) -> bool:
        """Store a worker's state; return whether the states of all workers are known after this batch."""
        if batch.state is None:
            self._outdated.add(batch.worker)
            return False
        self._readers[batch.worker] = batch.state
        self._outdated.discard(batch.worker)
        return not self._outdated

    def _keep(self) -> None:
        self._states.append(self._now())
        while len(self._states) > 1 and self._states[1]["items"] <= self._read - self._behind:
            self._states.popleft()

    def _now(self, ended: bool = False) -> SourceState:
        if self._dataset is None:
            self._readers = {0: {"source": self._reader.state(), "generators": None, "ended": ended}}
        elif not self._num_workers:
            self._readers = {0: self._dataset.state()}
        return {
            **self._beginning(),
            "items": self._read,
            "readers": dict(self._readers),
            "latest": self._latest,
            "generators": self._generators.state if self._generators is not None else None,
            "ended": ended,
        }

    def is_other(self, state: SourceState, batch: Any) -> bool:
        """Return whether the first batch from a state differs from the batch that followed the state before."""
        following = state.get("following")
        if following is None or state["ended"]:
            return False
        return batch is END or not matches(fingerprint(batch), following)

    # -- states for a checkpoint -------------------------------------------------------------------------------------------

    def at(self, position: StreamPosition) -> SourceState:
        """Return the state at a position, or the latest known state before it."""
        passes, items = position["passes"], position["items"]
        ending = self.ending() if passes > self._passes or items >= self._read else None
        if ending is not None:  # a round with fewer batches than ranks counts as a full round
            return {**ending, "passes": max(passes, self._passes), "items": 0 if passes > self._passes else items}
        if not self._is_trusted:  # re-reading from the start of the pass is always right
            return self._beginning()
        is_here = self._is_open and self._read == items and not self._num_workers and not self._has_ended
        if is_here and not (self._states and self._states[-1]["items"] == self._read):
            self._keep()
        return next((state for state in reversed(self._states) if state["items"] <= items), self._beginning())

    def ending(self) -> SourceState | None:
        """Return the state at the end of the pass, or None before the end and if a worker's state is missing."""
        if self._has_ended and self._end is None and not self._outdated:
            self._end = self._now(ended=True)
        return self._end if self._has_ended else None

    def _beginning(self) -> SourceState:
        return {
            "passes": self._passes, "items": 0, "readers": self._begun, "num_workers": self._num_workers,
            "ranks": self._ranks, "latest": 0, "generators": None, "following": None, "ended": False,
            "begun": self._begun,
        }  # fmt: skip


def fingerprint(batch: Any) -> list[Any]:
    """Return a batch's shapes, a few values, and digests of its texts; other objects count by their class's name."""
    return list(islice(_values(batch), MOST_LEAVES * VALUES))


def matches(one: list[Any], other: list[Any]) -> bool:
    """Return whether two fingerprints show the same batch; numbers may differ as they do between two machines."""
    return len(one) == len(other) and all(map(_is_close, one, other))


def _is_close(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):  # floats differ a little between machines
        return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-6) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def _values(batch: Any) -> Iterator[Any]:
    if isinstance(batch, (bool, int, float, type(None))):
        yield batch
    elif isinstance(batch, (str, bytes)):
        # Not hash(), which returns a different number for the same text in every process.
        yield zlib.crc32(batch.encode() if isinstance(batch, str) else batch)
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield str(key)
            yield from _values(value)
    elif isinstance(batch, (list, tuple)):
        yield len(batch)
        yield from chain.from_iterable(map(_values, batch))
    elif isinstance(batch, Tensor) and batch.layout == torch.strided and batch.numel():
        yield from batch.shape
        flat = batch.detach().reshape(-1)
        indices = torch.linspace(0, len(flat) - 1, min(len(flat), VALUES), device=flat.device).long()
        indices = indices.clamp_(max=len(flat) - 1)  # above 2**24 elements float32 may round up to the length
        taken = flat[indices]
        yield from (torch.view_as_real(taken).reshape(-1) if taken.is_complex() else taken).tolist()
    elif "numpy" in sys.modules and isinstance(batch, sys.modules["numpy"].ndarray) and batch.dtype.kind in "biuf":
        yield from _values(torch.as_tensor(batch.copy()))
    else:
        yield type(batch).__name__
