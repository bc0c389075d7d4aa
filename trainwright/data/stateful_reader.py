"""The stateful reader: begins the passes over a source with `state_dict` and `load_state_dict` in the process that reads it.

Within a pass the source loads its own state. Between passes too: the next epoch continues from what the last one left, in a run
that was not interrupted as in one that resumes. Sources differ in what they do with the state of their end. Most start over
from it; some yield nothing until they are iterated once more, and some never yield again. So a source that yields nothing is
iterated again, and then loads its initial state.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TypedDict

from trainwright.data.epoch_listeners import set_epoch_of
from trainwright.data.seeding import set_host_state

END = object()


class ReaderState(TypedDict):
    """The state of one process that reads."""

    source: Any
    """What the source's state_dict returned."""
    generators: dict[str, Any] | None
    """A worker's generators; None if the main process reads."""
    ended: bool
    """Whether its pass is over."""


class StateRejected(Exception):
    """A source failed to load its own state."""


class StatefulReader:
    """Begins the passes over one source, an iterable dataset or a user's loader, in one process."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._initial: Any = None
        self._is_fresh = True

    def state(self) -> Any:
        # A source may return what it works with, which the next item changes.
        return copy.deepcopy(self._source.state_dict())

    def begin_fresh(self, epoch: int) -> Iterator[Any]:
        """Return the items of a pass that starts as the source's first one did."""
        if not self._is_fresh and self._initial is not None:
            self._source.load_state_dict(copy.deepcopy(self._initial))
        self._note_beginning()
        return self._iterated(epoch)

    def begin_after(self, state: Any, epoch: int) -> Iterator[Any]:
        """Yield the items of a pass that continues from the state that the one before left."""
        self._note_beginning()
        for each in (state, None, self._initial):
            if each is not None and not self._is_loaded(each):
                continue
            is_empty = True
            for item in self._iterated(epoch):
                is_empty = False
                yield item
            if not is_empty:
                return

    def begin_within(self, state: ReaderState, epoch: int) -> Iterator[Any]:
        """Yield the items of a pass from a state within it on (StateRejected if the source fails to load it)."""
        self._note_beginning()
        try:
            set_epoch_of(self._source, epoch)
            self._source.load_state_dict(copy.deepcopy(state["source"]))
            # The generators come after it, since a DataLoader draws its workers' seed here.
            items = iter(self._source)
            if state["generators"] is not None:
                set_host_state(state["generators"])
            # Read inside the try: a source that is a generator function loads its state at its first item.
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
        except Exception:  # it cannot load the state of its end, so it starts over
            return False
        return True

    def _note_beginning(self) -> None:
        if self._is_fresh:
            self._is_fresh = False
            with suppress(Exception):  # the source may have no state before it is iterated
                self._initial = self.state()
