"""Sources with `state_dict` and `load_state_dict`, in the process that reads them.

A worker reads ahead, so a `StatePlan` tells it in advance after which batches to send its state. The state at a worker's end
comes with its last batch, or with an empty batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, repeat
from typing import Any, NamedTuple, TypedDict

import torch
from torch.utils.data import get_worker_info

from trainwright.data.seeding import derive_seed, host_state, seed_generators, set_host_state
from trainwright.data.transfer import pinned
from trainwright.data.workers import SeededIterable, WorkerStart, set_epoch_of, shared_integers

END = object()


class ReaderState(TypedDict):
    """The state of one reading process."""

    source: Any
    """The result of the source's state_dict."""
    generators: dict[str, Any] | None
    """A worker's RNG state, or None if the main process reads."""
    ended: bool
    """Whether the process's pass is over."""


class StateRejected(Exception):
    """A source failed to load its own state."""


class StatefulReader:
    """Begins the passes over one source, an iterable dataset or a user's loader, in one process.

    Within a pass the source loads its state. Between passes the source loads the state at the last epoch's end, in a resumed
    run as in an uninterrupted run. Sources use that state in different ways. Most start over from it. Some yield nothing
    until they are iterated once more, and some never yield again. So a source that yields nothing is iterated again, and then
    loads its initial state.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._initial: Any = None
        self._is_fresh = True

    def state(self) -> Any:
        # A copy, because a source may return an object that it changes at the next item.
        return copy.deepcopy(self._source.state_dict())

    def begin_fresh(self, epoch: int) -> Iterator[Any]:
        """Return the items of a pass that starts like the source's first pass."""
        if not self._is_fresh and self._initial is not None:
            self._source.load_state_dict(copy.deepcopy(self._initial))
        self._record_initial()
        return self._iterated(epoch)

    def begin_after(self, state: Any, epoch: int) -> Iterator[Any]:
        """Yield the items of a pass that continues from the end of the previous pass."""
        self._record_initial()
        for start in (state, None, self._initial):
            if start is not None and not self._is_loaded(start):
                continue
            is_empty = True
            for item in self._iterated(epoch):
                is_empty = False
                yield item
            if not is_empty:
                return

    def begin_within(self, state: ReaderState, epoch: int) -> Iterator[Any]:
        """Yield the items of a pass from a state on (StateRejected if the source fails to load that state)."""
        self._record_initial()
        try:
            set_epoch_of(self._source, epoch)
            self._source.load_state_dict(copy.deepcopy(state["source"]))
            # Before the RNG state is set, because a DataLoader draws its workers' seed here.
            items = iter(self._source)
            if state["generators"] is not None:
                set_host_state(state["generators"])
            # Inside the try, because a source whose __iter__ is a generator loads its state at its first item.
            first = next(items, END)
        except Exception as error:
            raise StateRejected(f"{type(error).__name__}: {error}") from error
        if first is not END:
            yield first
            yield from items

    def _iterated(self, epoch: int) -> Iterator[Any]:
        set_epoch_of(self._source, epoch)
        return iter(self._source)

    def _is_loaded(self, state: Any) -> bool:
        try:
            self._source.load_state_dict(copy.deepcopy(state))
        except Exception:  # the source cannot load the state of its end, so it starts over
            return False
        return True

    def _record_initial(self) -> None:
        if self._is_fresh:
            self._is_fresh = False
            with suppress(Exception):  # the source may have no state before it is iterated
                self._initial = self.state()


ONCE = 2**40
"""An interval that never comes again, even if multiplied by the number of ranks in 64 bits."""
MOST_PAIRS = 16
END_OF_PASS = object()


class StatePlan:
    """The items of a pass after which to take the state, in shared memory: pairs of an interval and one such item."""

    def __init__(self) -> None:
        self._numbers = shared_integers(2 + 2 * MOST_PAIRS)
        self.pairs: list[tuple[int, int]] = []
        self.start = 0

    def set(self, start: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Choose the pairs for the next pass, which begins at item `start`."""
        self.start, self.pairs = start, list(pairs[:MOST_PAIRS])
        flat = [start, len(self.pairs), *chain.from_iterable(self.pairs)]
        self._numbers[: len(flat)] = torch.tensor(flat)

    def refresh(self) -> None:
        """In a worker, read the pairs that the main process has chosen."""
        self.start, count, *flat = self._numbers.tolist()
        self.pairs = list(zip(flat[::2], flat[1::2], strict=True))[:count]

    def is_due(self, item: int, length: int) -> bool:
        """Return whether the state is taken after one of the `length` items from this item on."""
        return any((one - item) % every < length for every, one in self.pairs)


class Opening(NamedTuple):
    """The start of the next pass."""

    readers: dict[int, ReaderState]
    """The states by worker. A worker that is missing here starts fresh."""
    is_within: bool
    """Whether the states are from within the same pass."""
    first: int
    """The number of the first worker, so that the next batch comes from the same worker as in an uninterrupted run."""


class StatefulIterable(SeededIterable):
    """Wraps an iterable dataset with a state in the process that reads it."""

    def __init__(self, dataset: Any, batch_size: int | None) -> None:
        super().__init__(dataset)
        self.plan = StatePlan()
        self.opening = Opening({}, False, 0)
        self._batch_size = batch_size or 1
        self._follows = shared_integers(1)
        self._reader = StatefulReader(dataset)
        self._num_batches = 0
        self._end: ReaderState | None = None

    def begin(self, opening: Opening, follows: bool) -> None:
        """Choose the start of the next pass. If it `follows`, persistent workers continue from their ends."""
        self.opening = opening
        self._follows.fill_(follows)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        # Removed, because a persistent worker uses it only once.
        opening = self.opening.readers.pop(0 if info is None else info.id, None)
        epoch, is_within = int(self._pass[1]), self.opening.is_within
        if info is not None:
            if opening is None and self._end is not None and int(self._follows):
                opening, is_within = self._end, False
            self.plan.refresh()
            seed_generators(derive_seed(int(self._pass[0]), info.id))
        self._num_batches, self._end = 0, None
        if opening is None:
            yield from self._reader.begin_fresh(epoch)
        elif not is_within:
            yield from self._reader.begin_after(opening["source"], epoch)
        elif opening["ended"]:
            self._end = opening
        else:
            yield from self._reader.begin_within(opening, epoch)
        if info is not None:
            self._end = self._end or {"source": self._reader.state(), "generators": None, "ended": True}
            yield from repeat(END_OF_PASS, self._batch_size)  # a whole batch, which drop_last does not drop

    def state(self) -> ReaderState:
        """Return the state of this process."""
        generators = None if get_worker_info() is None else host_state()
        return self._end or {"source": self._reader.state(), "generators": generators, "ended": False}

    def wants_state(self) -> bool:
        """Return whether to take the state after the batch that this worker has just read. Called once per batch."""
        info: Any = get_worker_info()
        turn = (info.id - self.opening.first) % info.num_workers
        item = self.plan.start + self._num_batches * info.num_workers + turn + 1
        self._num_batches += 1
        # The state at an item consists of the workers' states after their latest batches up to that item.
        return self.plan.is_due(item, info.num_workers)


class StatefulBatch:
    """A batch from a worker, with the state after the batch if the plan asks for it."""

    def __init__(self, batch: Any, worker: int, state: ReaderState | None, is_empty: bool = False) -> None:
        self.batch, self.worker, self.state, self.is_empty = batch, worker, state, is_empty

    def pin_memory(self) -> StatefulBatch:
        """Return a copy with the batch in pinned memory. torch's pinning calls this method."""
        return self if self.is_empty else StatefulBatch(pinned(self.batch), self.worker, self.state)


class StatefulCollate:
    """The collate_fn for workers whose dataset has a state. It calls the user's function, then takes the state."""

    def __init__(
        self, dataset: StatefulIterable, collate: Callable[[Any], Any], batch_size: int | None, drop_last: bool
    ) -> None:
        self._dataset, self._collate = dataset, collate
        self._batch_size, self._drop_last = batch_size, drop_last

    def __call__(self, samples: Any) -> StatefulBatch:
        info: Any = get_worker_info()
        wants_state, size = self._dataset.wants_state(), self._batch_size
        if (samples if size is None else samples[-1]) is not END_OF_PASS:
            batch = self._collate(samples)
            return StatefulBatch(batch, info.id, self._dataset.state() if wants_state else None)
        rest = [] if size is None else [sample for sample in samples if sample is not END_OF_PASS]
        is_empty = not rest or (self._drop_last and size is not None and len(rest) < size)
        return StatefulBatch(None if is_empty else self._collate(rest), info.id, self._dataset.state(), is_empty)


class StatefulWorkerStart(WorkerStart):
    """The worker_init_fn for such a dataset. It sets the worker's number, which may be rotated, before the worker starts."""

    def __init__(self, dataset: StatefulIterable, init: Callable[[int], Any] | None) -> None:
        super().__init__(dataset.dataset, init)
        self._iterable = dataset

    def __call__(self, worker_id: int) -> None:
        info: Any = get_worker_info()
        number = (worker_id + self._iterable.opening.first) % info.num_workers
        object.__setattr__(info, "id", number)
        super().__call__(number)


def is_stateful(source: Any) -> bool:
    """Return whether an object has the methods `state_dict` and `load_state_dict`."""
    return callable(getattr(source, "state_dict", None)) and callable(getattr(source, "load_state_dict", None))
