"""Private names of torch's DataLoader and of the package datasets, read against torch 2.11 to 2.13 and datasets 5.2."""

from __future__ import annotations

import atexit
import os
import re
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from trainwright.data.worker_process import forked_until_running, holding_signals
from trainwright.faults.vendor import watch_workers

_begun: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""The iterators, and the processes that began them."""


def record_iterators(loader: DataLoader[Any], iterators: weakref.WeakSet[Any]) -> None:
    """Make a loader with workers add every iterator that it begins to a set. The iterator's workers end with this process."""
    # A strong reference to the loader would be a cycle that keeps workers alive until its collection.
    vars(loader)["_get_iterator"] = partial(_begin, weakref.ref(loader), iterators)


def _begin(loader: Callable[[], DataLoader[Any] | None], iterators: weakref.WeakSet[Any]) -> Any:
    clone = loader()
    assert clone is not None
    with holding_signals(), forked_until_running(clone):
        iterator = type(clone)._get_iterator(clone)
    iterators.add(iterator)
    _begun[iterator] = os.getpid()
    watch_workers(iterator, clone)
    # Registered last, so it runs before torch's handlers, which wait 5 s per iterator.
    atexit.unregister(_end_all)
    atexit.register(_end_all)
    return iterator


def _end_all() -> None:
    # A forked child must not end its parent's workers.
    end_workers([iterator for iterator, process in list(_begun.items()) if process == os.getpid()])


def end_workers(iterators: Iterable[Any]) -> None:
    """End the workers of iterators."""
    for iterator in iterators:
        if callable(shutdown := getattr(iterator, "__del__", None)):  # another package's iterator may have none
            shutdown()


def forget_iterator(loader: DataLoader[Any]) -> None:
    """Make a loader with persistent workers begin new ones at its next iteration."""
    vars(loader)["_iterator"] = None  # through __dict__, because a subclass may define properties


def has_torchs_iterator(loader: DataLoader[Any]) -> bool:
    """Return whether a loader's class iterates as torch's does."""
    return type(loader)._get_iterator is DataLoader._get_iterator


def is_split_after_shuffle(stream: Any) -> bool:
    """Return whether a stream of the package datasets takes or skips items after a shuffle, which an epoch would change."""
    names, part = "", getattr(stream, "_ex_iterable", None)
    while part is not None:
        names, part = names + type(part).__name__, getattr(part, "ex_iterable", None)
    return re.search("(Take|Skip)Examples.*BufferShuffled", names) is not None


def is_loop_done(frame: FrameType | None) -> bool:
    """Return whether the parent has ended torch's worker loop in this process; True if unknown."""
    while frame is not None and frame.f_code.co_name != "_worker_loop":
        frame = frame.f_back
    event = frame.f_locals.get("done_event") if frame is not None else None
    try:
        return bool(event._flag.get_value())  # type: ignore[union-attr] # is_set() takes a lock that this thread may hold
    except (AttributeError, NotImplementedError):  # another version of torch's loop, or a system without this value
        return True
