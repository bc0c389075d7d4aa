"""The stated reader: a source with `state_dict` and `load_state_dict`, as the process that reads it begins a pass over it.

Within a pass the source takes the state that it told. Between two passes too: what an epoch leaves is where the next one
goes on, in the run that goes on as in the one that resumes. Sources differ in what they make of the state of their end. Most
begin anew from it; some give nothing more until they are iterated once again, and some for ever. So one that gives nothing is
iterated again, and then given the state that it came with.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypedDict

from trainwright.data.epoch_listeners import tell
from trainwright.data.seeding import set_host_state

END = object()


class ReaderState(TypedDict):
    """Where one process that reads stands."""

    source: Any
    """What the source's state_dict returned."""
    generators: dict[str, Any] | None
    """A worker's generators; None where the main process reads."""
    ended: bool
    """Whether it has come to its end."""


class StateRefused(Exception):
    """A source could not go on from the state that it told."""


class StatedReader:
    """Begins the passes over one source in one process.

    Args:
        source: an iterable dataset, or a loader of one's own.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._came_with: Any = None
        self._is_fresh = True

    def told(self) -> Any:
        """Return the source's state, a copy, since the source goes on."""
        return copy.deepcopy(self._source.state_dict())

    def begin_fresh(self, epoch: int) -> Iterator[Any]:
        """Return the items of a pass that begins as the source's first one did."""
        is_fresh = self._is_fresh
        self._note_beginning()
        if not is_fresh and self._came_with is not None:
            self._source.load_state_dict(copy.deepcopy(self._came_with))
        return self._iterated(epoch)

    def begin_after(self, state: Any, epoch: int) -> Iterator[Any]:
        """Yield the items of a pass that follows on the one which was left at a state."""
        self._note_beginning()
        for each in (state, None, self._came_with):
            if each is not None and not self._is_loaded(each):
                continue
            is_empty = True
            for item in self._iterated(epoch):
                is_empty = False
                yield item
            if not is_empty:
                return

    def begin_within(self, state: ReaderState, epoch: int) -> Iterator[Any]:
        """Yield the items of a pass from a state of it on.

        Raises:
            StateRefused: the source fails at it.
        """
        self._note_beginning()
        try:
            tell(self._source, epoch)
            self._source.load_state_dict(copy.deepcopy(state["source"]))
            items = iter(self._source)
            if state["generators"] is not None:
                set_host_state(state["generators"])
            first = next(items, END)
        except Exception as error:
            raise StateRefused(f"{type(error).__name__}: {error}") from error
        if first is END:
            return
        yield first
        yield from items

    def _iterated(self, epoch: int) -> Iterator[Any]:
        tell(self._source, epoch)
        return iter(self._source)

    def _is_loaded(self, state: Any) -> bool:
        try:
            self._source.load_state_dict(copy.deepcopy(state))
        except Exception:  # it cannot go on from its end, so it begins as it came
            return False
        return True

    def _note_beginning(self) -> None:
        if not self._is_fresh:
            return
        self._is_fresh = False
        try:
            self._came_with = self.told()
        except Exception:  # it may have none before it is iterated
            self._came_with = None
