"""Source state: the state of an iterable (`state_dict`, `load_state_dict`), as checkpoints hold it.

When a checkpoint needs the state, the source may have been read further: by a batch, to see the end; by a round, on several
ranks; by its workers, which read ahead. So the state is taken in advance, according to a plan: after the batches where a save
can be foreseen, and every hundredth. A run that resumes elsewhere reads the batches since the latest state again and skips
them. The generators of the reading process are part of the state, so that a shuffle buffer continues as it would have.

The fingerprint of the next batch is kept with a state. A source that yields another batch from its state (some keep no record
of their shuffle buffer), or fails to load it, is no longer trusted, and is read from where its pass began.

A source is a DataLoader whose IterableDataset has the two methods, or a user's own loader that has them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypedDict, cast

from trainwright.data.fingerprint import fingerprint, matches
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

SPACING = 100
"""Batches between two states taken although no save is expected: the most that a resumed run reads again."""


class SourceState(TypedDict):
    """The state of a source after some batches, as plain data."""

    passes: int
    items: int
    """Batches of the pass so far; 0 at its beginning, which continues from what `readers` say."""
    readers: dict[int, ReaderState]
    """The states by worker; 0 is this process if it has no workers."""
    num_workers: int
    ranks: int
    """The world size."""
    latest: int
    """The worker that gave the latest batch."""
    generators: dict[str, Any] | None
    """What this process draws from while it reads the source; None if workers read it."""
    following: list[Any] | None
    """The fingerprint of the next batch; None if it was not read."""
    ended: bool
    """Whether the pass is over."""
    begun: dict[int, ReaderState]
    """The states that the pass started from; empty if the source started as it was given."""


class SourceStates:
    """The latest states of one source, and the one that it resumes from.

    `dataset` is the loader's dataset if that has the state; None if the loader itself has it. `continues` is whether an epoch
    continues from the one before.
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
        """Reads the source if that itself has the state."""
        self._behind = 2 * ranks + 8
        """Batches that may have been read beyond the latest consumed one: a round is held back, some are prefetched."""
        self._states: deque[SourceState] = deque()
        self._plan: Sequence[tuple[int, int]] = ()
        self._passes = self._read = self._latest = 0
        self._readers: dict[int, ReaderState] = {}
        self._begun: dict[int, ReaderState] = {}
        self._outdated: set[int] = set()
        """The workers that have given batches since their latest state."""
        self._has_ended = self._is_open = False
        self._end: SourceState | None = None
        self._first = 0
        """The number of the first worker in this pass."""
        self._generators: IsolatedGenerators | None = None
        self._is_trusted = True

    # -- where a reading begins --------------------------------------------------------------------------------------

    def fits(self, state: SourceState) -> bool:
        """Return whether the same number of workers reads now; with another, each reads other parts in a different order."""
        return state["num_workers"] == self._num_workers

    def begin_after(self, state: SourceState) -> None:
        """Let the next pass continue from the state that an epoch, or another pass, left."""
        end = state if state is self._end and self._first == 0 else None
        self.begin_pass(0, state["readers"], end=end)

    def begin_within(self, state: SourceState) -> None:
        """Let the next pass resume from a state within it."""
        self.begin_pass(state["passes"], state.get("begun", {}), state["items"])
        self._states.append(state)

    def begin_pass(
        self, passes: int, begun: dict[int, ReaderState], items: int = 0, end: SourceState | None = None
    ) -> None:
        """Let the next pass start from the states that it started from before; without any, as the source was given."""
        is_rotated, self._first = self._first != 0, 0
        self._passes, self._read, self._begun, self._end = passes, items, begun, end
        self._has_ended = self._is_open = False
        self._states.clear()
        # Running workers neither load a state nor change their numbers, but they continue from where they ended.
        if self._is_persistent and end is None and (is_rotated or begun or items):
            self._end_workers()

    def plan(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Choose the items of the pass after which the state is taken: pairs of an interval and one such item."""
        self._plan = pairs

    def open_pass(self, passes: int, epoch: int) -> Iterator[Any]:
        """Return an iterator over a pass from its beginning."""
        follows = self._end is not None
        if passes and passes != self._passes:
            ending = self.ending()
            self._begun, follows = ({}, False) if ending is None else (ending["readers"], True)
            if self._first and self._is_persistent:
                self._end_workers()  # their numbers are rotated, and the new pass starts at 0
        self._begin_reading(passes, 0, dict(self._begun))
        self._first = 0
        readers = dict(self._begun) if self._continues else {}
        if self._dataset is not None:
            self._dataset.begin(Opening(readers, False, 0), follows and self._continues)
            return cast("Iterator[Any]", iter(self._source))
        return self._reader.begin_after(readers[0]["source"], epoch) if readers else self._reader.begin_fresh(epoch)

    def open_within(self, state: SourceState, epoch: int) -> Iterator[Any]:
        """Return an iterator over the rest of a pass, from a state on."""
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

    def read_with(self, generators: IsolatedGenerators | None) -> None:
        """Note what the source draws from in this process; None if workers read it."""
        self._generators = generators

    def distrust(self) -> None:
        """Use no state of this source again: it has yielded other batches from one than it did before."""
        self._is_trusted = False
        self._end_workers()

    # -- while it is read --------------------------------------------------------------------------------------------

    def noting(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of the opened pass, and keep the states that are taken meanwhile."""
        for batch in batches:
            content, is_known = batch, False
            if isinstance(batch, StatefulBatch):
                content, is_known = batch.batch, self._note_worker(batch)
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

    def _note_worker(self, batch: StatefulBatch) -> bool:
        """Keep a worker's state; return whether the states of all workers are known after this batch."""
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
        """Return whether the first batch from a state differs from the one that came after it before."""
        following = state.get("following")
        if following is None or state["ended"]:
            return False
        return batch is END or not matches(fingerprint(batch), following)

    # -- what a checkpoint holds -------------------------------------------------------------------------------------

    def at(self, position: StreamPosition) -> SourceState:
        """Return the state at a position, or the latest known one before it."""
        passes, items = position["passes"], position["items"]
        ending = self.ending() if passes > self._passes or items >= self._read else None
        if ending is not None and passes > self._passes:
            return {**ending, "passes": passes, "items": 0}
        if ending is not None and items >= self._read:  # a round with fewer batches than ranks counts as a full one
            return {**ending, "items": items}
        if not self._is_trusted:  # re-reading from the start of the pass is always right
            return self._beginning()
        is_here = self._is_open and self._read == items and not self._num_workers and not self._has_ended
        if is_here and not (self._states and self._states[-1]["items"] == self._read):
            self._keep()
        return next((each for each in reversed(self._states) if each["items"] <= items), self._beginning())

    def ending(self) -> SourceState | None:
        """Return the state at the end of the pass; None before it, and if a worker's state is missing."""
        if self._has_ended and self._end is None and not self._outdated:
            self._end = self._now(ended=True)
        return self._end if self._has_ended else None

    def _beginning(self) -> SourceState:
        return {
            "passes": self._passes,
            "items": 0,
            "readers": self._begun,
            "num_workers": self._num_workers,
            "ranks": self._ranks,
            "latest": 0,
            "generators": None,
            "following": None,
            "ended": False,
            "begun": self._begun,
        }
