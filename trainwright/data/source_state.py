"""Source state: what an iterable says of where it stands (`state_dict`, `load_state_dict`), kept with its batches.

Workers read ahead, so what counts is the state after the batches that were consumed. It is asked for after each batch, in
the process that reads: a worker sends it along with the batch. What that process's generators are at goes with it, so that a
buffer is shuffled on as it would have been.

A source is a DataLoader whose IterableDataset has the two methods, or a loader of one's own that has them itself.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

from torch.utils.data import get_worker_info

from trainwright.data.seeding import SideGenerators, derive_seed, host_state, set_host_state
from trainwright.data.share import Place
from trainwright.data.transfer import pinned
from trainwright.data.workers import SeededIterable, WorkerStart, seed_generators


class ReaderState(TypedDict):
    """Where one process that reads stands."""

    source: Any
    """What the source's state_dict returned."""
    generators: dict[str, Any] | None
    """A worker's generators; None where this process reads."""
    ended: bool
    """Whether it has come to its end."""


class SourceState(TypedDict):
    """Where a source stands after some batches, as plain data."""

    passes: int
    items: int
    readers: dict[int, ReaderState]
    """By worker; 0 is this process where there are none."""
    num_workers: int
    ranks: int
    """How many ranks the job had."""
    latest: int
    """The worker that gave the latest batch."""
    generators: dict[str, Any] | None
    """What this process draws from while the source is read; None where workers read."""


class StateLog:
    """The states of one source after the latest batches that were read, and the one that it goes on from.

    Args:
        source: the loader that is iterated.
        dataset: stands for the loader's dataset where that is what tells its state; None where it is the loader itself.
        ranks: how many ranks the job has.
    """

    def __init__(self, source: Any, dataset: StatefulIterable | None, ranks: int) -> None:
        self._source, self._dataset, self._ranks = source, dataset, ranks
        self._num_workers = source.num_workers if dataset is not None else 0
        self._states: deque[SourceState] = deque(maxlen=2 * ranks + 8)
        """As many as may have been read since the latest that was consumed: a round is held back, batches are moved ahead."""
        self.side: SideGenerators | None = None
        """What the source draws from in this process; None where workers read."""

    @property
    def is_moved(self) -> bool:
        """Return whether the workers that are there were begun at a state, and stand for other numbers than their own."""
        return self._dataset is not None and bool(self._dataset.start)

    def begin(self, place: Place, state: SourceState | None) -> SourceState | None:
        """Let the next reading begin at a place; return the state to go on from, None where it does not fit."""
        if state is not None and (state["passes"] != place["passes"] or state["num_workers"] != self._num_workers):
            state = None  # other workers read other parts, in another order
        self._states.clear()
        if state is not None:
            self._states.append({**state, "items": place["items"]})
        if self._dataset is not None:
            self._dataset.start = {} if state is None else dict(state["readers"])
            self._dataset.first = 0 if state is None else (state["latest"] + 1) % max(1, self._num_workers)
        return state

    def open(self, state: SourceState | None) -> Iterator[Any]:
        """Return the source's iterator, begun at a state or at its start."""
        if state is not None and self._dataset is None:
            self._source.load_state_dict(copy.deepcopy(state["readers"][0]["source"]))
        batches: Iterator[Any] = iter(self._source)
        if state is not None and state["generators"] is not None:
            set_host_state(state["generators"])
        return batches

    def noting(self, batches: Iterator[Any], passes: int, items: int, state: SourceState | None) -> Iterator[Any]:
        """Yield the batches, with the state after each kept; they are those from one of a pass on."""
        readers = {} if state is None else dict(state["readers"])
        for number, batch in enumerate(batches, start=items + 1):
            worker, content = 0, batch
            if isinstance(batch, StatedBatch):
                worker, readers[batch.worker], content = batch.worker, batch.state, batch.batch
            else:
                told = copy.deepcopy(self._source.state_dict())
                readers[0] = {"source": told, "generators": None, "ended": False}
            self._states.append(
                {
                    "passes": passes,
                    "items": number,
                    "readers": dict(readers),
                    "num_workers": self._num_workers,
                    "ranks": self._ranks,
                    "latest": worker,
                    "generators": self.side.state if self.side is not None else None,
                }
            )
            yield content

    def at(self, place: Place) -> SourceState | None:
        """Return the state at a place; None where nothing was read, or where it is not kept any more."""
        found = [each for each in self._states if (each["passes"], each["items"]) <= (place["passes"], place["items"])]
        if not found or found[-1]["passes"] != place["passes"]:
            return None
        if found[-1]["items"] < place["items"] and found[-1] is not self._states[-1]:
            return None
        return {
            **found[-1],
            "items": place["items"],
        }  # a last round with fewer batches than ranks counts as a whole one


class StatefulIterable(SeededIterable):
    """Stands for an iterable dataset with a state, in the process that reads it."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self.start: dict[int, ReaderState] = {}
        """Where each worker begins its next pass; one that is not there begins at the start."""
        self.first = 0
        """The number that the first worker goes by, so that the next batch comes from whom it would have come."""
        self._has_ended = False

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        start = self.start.pop(0 if info is None else info.id, None)
        self._has_ended = start is not None and start["ended"]
        if self._has_ended:
            return
        if info is not None:
            seed_generators(derive_seed(int(self._pass[0]), info.id))
        if start is not None:
            self.dataset.load_state_dict(copy.deepcopy(start["source"]))
        items = iter(self.dataset)
        if start is not None and start["generators"] is not None:
            set_host_state(start["generators"])
        yield from items
        self._has_ended = True

    def state(self) -> ReaderState:
        """Return where this process stands."""
        is_worker = get_worker_info() is not None
        told = copy.deepcopy(self.dataset.state_dict())  # it is sent while the worker reads on
        return {"source": told, "generators": host_state() if is_worker else None, "ended": self._has_ended}


class StatedBatch:
    """A batch on its way from a worker, with the state after it."""

    def __init__(self, batch: Any, worker: int, state: ReaderState) -> None:
        self.batch, self.worker, self.state = batch, worker, state

    def pin_memory(self) -> StatedBatch:
        """Return it with the batch in pinned memory; a loader that pins calls this."""
        return StatedBatch(pinned(self.batch), self.worker, self.state)


class StatedCollate:
    """The collate_fn of a loader whose dataset tells its state: it calls the loader's own, then asks."""

    def __init__(self, dataset: StatefulIterable, collate: Callable[[Any], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def __call__(self, samples: Any) -> StatedBatch:
        """Return the batch of the samples, with the state after it."""
        info = get_worker_info()
        batch = self._collate(samples)
        return StatedBatch(batch, 0 if info is None else info.id, self._dataset.state())


class StatedStart(WorkerStart):
    """The worker_init_fn of such a loader."""

    def __init__(self, dataset: StatefulIterable, init: Callable[[int], Any] | None) -> None:
        super().__init__(dataset.dataset, init)
        self._iterable = dataset

    def __call__(self, worker_id: int) -> None:
        """Give the worker the number that it goes by, and begin it."""
        info: Any = get_worker_info()
        number = (worker_id + self._iterable.first) % info.num_workers
        object.__setattr__(info, "id", number)
        super().__call__(number)


def tells_state(source: Any) -> bool:
    """Return whether an object has both a `state_dict` and a `load_state_dict`."""
    return callable(getattr(source, "state_dict", None)) and callable(getattr(source, "load_state_dict", None))
