"""Source state: what an iterable says of where it stands (`state_dict`, `load_state_dict`), as checkpoints hold it.

It is asked for when it is wanted, not after each batch. But where a checkpoint is asked for, the source may have been read on:
by a batch, to see the end; by a round, on several ranks; by its workers, who read ahead. So the reading asks beforehand, after
the batches of a plan: those after which a save can be foreseen, and each hundredth. What was read since the latest of them is
read again, and skipped, by a run that goes on from elsewhere. What the reading process draws goes along, so that a buffer is
shuffled on as it would have been.

With a state goes the fingerprint of the batch that came next. A source that comes with another one from that state (of a
shuffle buffer some keep no record), or fails at it, is not trusted: it is read anew from where its pass began.

A source is a DataLoader whose IterableDataset has the two methods, or a loader of one's own that has them itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypedDict

from trainwright.data.fingerprint import fingerprint, is_alike
from trainwright.data.seeding import SideGenerators, set_host_state
from trainwright.data.share import Place
from trainwright.data.stated_reader import END, ReaderState, StatedReader
from trainwright.data.stateful_iterable import Opening, StatedBatch, StatefulIterable

SPACING = 100
"""Batches between two states that are asked for though no save is foreseen: so many are read again at most."""


class SourceState(TypedDict):
    """Where a source stands after some batches, as plain data."""

    passes: int
    items: int
    """Batches of the pass that lie behind; 0 where it is at its beginning, which follows on what `readers` say."""
    readers: dict[int, ReaderState]
    """By worker; 0 is this process where there are none."""
    num_workers: int
    ranks: int
    """How many ranks the job had."""
    latest: int
    """The worker that gave the latest batch."""
    generators: dict[str, Any] | None
    """What this process draws from while the source is read; None where workers read."""
    following: list[Any] | None
    """The fingerprint of the next batch; None where it was not read."""
    ended: bool
    """Whether the pass has come to its end."""
    begun: dict[int, ReaderState]
    """What the pass followed on; empty where the source began as it came."""


class StateLog:
    """The states of one source that were asked for of late, and the one that it goes on from.

    Args:
        source: the loader that is iterated.
        dataset: stands for the loader's dataset where that is what tells its state; None where it is the loader itself.
        ranks: how many ranks the job has.
        goes_on: whether an epoch follows on the one before; False where each is to begin as the first did.
        let_go: ends the workers that stay.
    """

    def __init__(
        self,
        source: Any,
        dataset: StatefulIterable | None,
        ranks: int,
        goes_on: bool,
        let_go: Callable[[], None],
    ) -> None:
        self._source, self._dataset, self._ranks, self._goes_on = source, dataset, ranks, goes_on
        self._num_workers = source.num_workers if dataset is not None else 0
        self._stays = self._num_workers > 0 and source.persistent_workers
        self._reader = StatedReader(source) if dataset is None else None
        self._behind = 2 * ranks + 8
        """Batches that may have been read since the latest that was consumed: a round is held back, some are moved ahead."""
        self._states: deque[SourceState] = deque()
        self._plan: list[tuple[int, int]] = []
        self._passes = self._read = self._latest = 0
        self._readers: dict[int, ReaderState] = {}
        self._begun: dict[int, ReaderState] = {}
        self._untold: set[int] = set()
        """The workers that have given batches since they told their state."""
        self._has_ended = self._is_open = False
        self._end: SourceState | None = None
        self._first = 0
        self.side: SideGenerators | None = None
        """What the source draws from in this process; None where workers read."""
        self.let_go = let_go
        self.is_trusted = True
        """Whether the source goes on from its states as it has gone on before, as far as that has shown."""

    # -- where a reading begins --------------------------------------------------------------------------------------

    def fits(self, state: SourceState) -> bool:
        """Return whether the processes that read now can go on from it: other workers read other parts, in another order."""
        return state["num_workers"] == self._num_workers

    def begin_after(self, state: SourceState) -> None:
        """Let the next reading follow on what an epoch, or another pass, has left."""
        stays_on = state is self._end and self._first == 0
        self._begin(0, 0, state["readers"], stays_on)
        if stays_on:
            self._end = state

    def begin_within(self, state: SourceState) -> None:
        """Let the next reading go on from a state within its pass."""
        self._begin(state["passes"], state["items"], state.get("begun", {}), False)
        self._states.append(state)

    def begin_pass(self, passes: int, readers: dict[int, ReaderState]) -> None:
        """Let the next reading begin a pass as it was begun before; without readers, as the source came."""
        self._begin(passes, 0, readers, False)

    def _begin(self, passes: int, items: int, begun: dict[int, ReaderState], stays_on: bool) -> None:
        is_rotated, self._first = self._first != 0, 0
        self._passes, self._read, self._begun, self._end = passes, items, begun, None
        self._has_ended = self._is_open = False
        self._states.clear()
        if self._stays and not stays_on and (is_rotated or begun or items):
            self.let_go()  # they would neither see a state nor give up the numbers that they go by

    def plan(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Choose after which items of the pass the state is asked for: an interval, and one of them, each."""
        self._plan = list(pairs)

    def open_pass(self, passes: int, epoch: int) -> Iterator[Any]:
        """Return the iterator of a pass from its beginning."""
        follows = self._end is not None
        if passes and passes != self._passes:
            ending = self.ending()
            self._begun, follows = ({}, False) if ending is None else (ending["readers"], True)
            if self._first and self._stays:
                self.let_go()
        self._begin_reading(passes, 0, dict(self._begun))
        self._first = 0
        if self._dataset is not None:
            readers = dict(self._begun) if self._goes_on else {}
            self._dataset.begin(Opening(readers, False, 0), follows and self._goes_on)
            opened: Iterator[Any] = iter(self._source)
            return opened
        assert self._reader is not None
        if self._begun and self._goes_on:
            return self._reader.begin_after(self._begun[0]["source"], epoch)
        return self._reader.begin_fresh(epoch)

    def open_within(self, state: SourceState, epoch: int) -> Iterator[Any]:
        """Return the iterator of the rest of a pass, from a state on."""
        self._begin_reading(state["passes"], state["items"], dict(state["readers"]))
        self._states.append(state)
        if state.get("ended"):
            self._has_ended, self._end = True, state
            return iter(())
        self._first = (state["latest"] + 1) % max(1, self._num_workers)
        if self._dataset is None:
            assert self._reader is not None
            return self._reader.begin_within({**state["readers"][0], "generators": state["generators"]}, epoch)
        self._dataset.begin(Opening(dict(state["readers"]), True, self._first), False)
        batches: Iterator[Any] = iter(self._source)
        if state["generators"] is not None:
            set_host_state(state["generators"])
        return batches

    def _begin_reading(self, passes: int, items: int, readers: dict[int, ReaderState]) -> None:
        self._passes, self._read, self._readers = passes, items, readers
        self._has_ended, self._is_open, self._end = False, True, None
        self._states.clear()
        self._untold.clear()
        if self._dataset is not None:
            self._dataset.plan.set(items, self._plan if self.is_trusted else ())

    # -- what is read ------------------------------------------------------------------------------------------------

    def noting(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of the pass that was opened, with the states that are asked for meanwhile kept."""
        for batch in batches:
            content, is_told = batch, False
            if isinstance(batch, StatedBatch):
                content, is_told = batch.batch, self._heard(batch)
                if batch.is_empty:
                    continue
                self._latest = batch.worker
            if self._states and self._states[-1]["items"] == self._read and self._states[-1]["following"] is None:
                self._states[-1]["following"] = fingerprint(content)
            self._read += 1
            if is_told or (self.is_trusted and not self._num_workers and self._is_due(self._read)):
                self._keep()
            yield content
        self._has_ended = True

    def _heard(self, batch: StatedBatch) -> bool:
        """Take what a worker says; return whether the states of all are known after this batch."""
        if batch.state is None:
            self._untold.add(batch.worker)
            return False
        self._readers[batch.worker] = batch.state
        self._untold.discard(batch.worker)
        return not self._untold

    def _is_due(self, items: int) -> bool:
        return any((items - one) % every == 0 for every, one in self._plan)

    def _keep(self) -> None:
        self._states.append(self._now())
        while len(self._states) > 1 and self._states[1]["items"] <= self._read - self._behind:
            self._states.popleft()

    def _now(self, ended: bool = False) -> SourceState:
        if self._dataset is None:
            assert self._reader is not None
            self._readers = {0: {"source": self._reader.told(), "generators": None, "ended": ended}}
        elif not self._num_workers:
            self._readers = {0: self._dataset.state()}
        return {
            "passes": self._passes,
            "items": self._read,
            "readers": dict(self._readers),
            "num_workers": self._num_workers,
            "ranks": self._ranks,
            "latest": self._latest,
            "generators": self.side.state if self.side is not None else None,
            "following": None,
            "ended": ended,
            "begun": self._begun,
        }

    def is_other(self, state: SourceState, batch: Any) -> bool:
        """Return whether the batch that has come from a state is another than the one which came from it before."""
        following = state.get("following")
        if following is None or state["ended"]:
            return False
        return batch is END or not is_alike(fingerprint(batch), following)

    # -- what is told ------------------------------------------------------------------------------------------------

    def at(self, place: Place) -> SourceState:
        """Return the state at a place, or the latest that is known before it."""
        if place["passes"] > self._passes or (self._has_ended and place["items"] >= self._read):
            ending = self.ending()
            if ending is not None and place["passes"] > self._passes:
                return {**ending, "passes": place["passes"], "items": 0}
            if ending is not None:
                return {
                    **ending,
                    "items": place["items"],
                }  # a round with fewer batches than ranks counts as a whole one
        if not self.is_trusted:
            return self._beginning()
        is_here = self._is_open and self._read == place["items"] and not self._num_workers and not self._has_ended
        if is_here and not (self._states and self._states[-1]["items"] == self._read):
            self._keep()
        found = [each for each in self._states if each["items"] <= place["items"]]
        return found[-1] if found else self._beginning()

    def ending(self) -> SourceState | None:
        """Return the state at the end of the pass; None where it has not come to it, or a worker has not told."""
        if self._has_ended and self._end is None and not self._untold:
            self._end = self._now(ended=True)
        if not self._has_ended:
            return None
        return self._end

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
