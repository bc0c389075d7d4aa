"""Loader workers that are killed or hang, the latest collective, and compilations, by private names of torch 2.11 to 2.13."""

from __future__ import annotations

import json
import re
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainwright.devices.out_of_memory import OutOfMemoryKills

MOST_BATCHES, MOST_INDICES = 2, 8  # in a message
kills = cache(OutOfMemoryKills)  # since the first worker began
_streams: weakref.WeakKeyDictionary[Any, tuple[Any, str]] = weakref.WeakKeyDictionary()
"""The sampler and the name of the dataset by iterator."""


def watch_workers(iterator: Any, loader: DataLoader[Any]) -> None:
    """Name the workers of an iterator in errors, and in reports of hangs."""
    if not hasattr(iterator, "_task_info"):  # another package's iterator
        return
    # Not by truth: a batch sampler of a stream has a __len__ that raises.
    stream = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    _streams[iterator] = stream, type(getattr(loader.dataset, "dataset", loader.dataset)).__name__
    kills()
    vars(iterator)["_try_get_data"] = partial(_try_get_data, weakref.ref(iterator))
    previous = signal.getsignal(signal.SIGCHLD)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and callable(previous) and getattr(previous, "func", None) is not _on_child:
        signal.signal(signal.SIGCHLD, partial(_on_child, previous))  # torch's raises wherever the main thread is


def _try_get_data(reference: Callable[[], Any], *timeout: float) -> tuple[bool, Any]:
    iterator = reference()
    try:
        result: tuple[bool, Any] = type(iterator)._try_get_data(iterator, *timeout)
    except RuntimeError as error:
        raise _explained(error)  # noqa: B904 - perhaps the same error
    if timeout and not result[0]:
        raise RuntimeError(f"DataLoader timed out after {timeout[0]} seconds, waiting for {awaited_worker()}.")
    return result


def _on_child(previous: Callable[[int, FrameType | None], object], number: int, frame: FrameType | None) -> None:
    try:
        previous(number, frame)
    except RuntimeError as error:
        raise _explained(error)  # noqa: B904 - perhaps the same error


def _explained(error: RuntimeError) -> RuntimeError:
    """Return torch's error about ended workers with their descriptions, and other errors as they are."""
    text = str(error).strip().rstrip(".")
    found = re.match(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)", text)
    # The handler of torch may have raised it within the call that raises it again.
    if found is None or ". It is worker " in text:
        return error
    for iterator in list(_streams):
        for number, worker in enumerate(iterator._workers):
            if str(worker.pid) in found[1].split(", "):
                code = worker.exitcode or 0
                how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                if code == -signal.SIGKILL:
                    how += kills().describe() or "; on Linux this is often the out-of-memory killer"
                text += f". It is {_described(iterator, number)}: {how}"
    return RuntimeError(f"{text}.")


def awaited_worker() -> str:
    """Return the worker that has the next batch of a loader in words, or "" if none works on one."""
    for iterator in list(_streams):
        with suppress(AttributeError, ValueError):  # the iterator has ended, or has all batches
            waiting = [(task, info[0]) for task, info in list(iterator._task_info.items()) if len(info) == 1]
            return _described(iterator, min(waiting)[1])
    return ""


def _described(iterator: Any, number: int) -> str:
    """Return a worker in words, with the batches that it has not delivered."""
    stream, dataset = _streams[iterator]
    recent, first = dict(getattr(stream, "recent", ())), getattr(stream, "start_batch", 0)
    batches = sorted(first + task for task, info in list(iterator._task_info.items()) if info == (number,))
    texts = []
    for batch in batches[:MOST_BATCHES]:
        indices = list(recent.get(batch, ()))
        shown = ", ".join(map(repr, indices[:MOST_INDICES])) + ", ..." * (len(indices) > MOST_INDICES)
        texts.append(f"batch {batch} of the epoch" + f" (indices {shown})" * bool(shown))
    has_not = f", which has not delivered {' and '.join(texts)}" if texts else ""
    return f"worker {number} (pid {iterator._workers[number].pid}) of the loader of {dataset}{has_not}"


def latest_collective() -> tuple[str, bool]:
    """Return the latest collective, such as "all_reduce", and whether it runs. Without torch's flight recorder: "", False."""
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # torch for CPUs has only the second
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None and (entries := json.loads(dump() or "{}").get("entries")):
            return entries[-1]["profiling_name"].partition(":")[2], not entries[-1]["retired"]
    return "", False


class CompilationWatch:
    """Finds the causes of torch.compile's compilations of the functions of one file, after their first."""

    def __init__(self, path: str) -> None:
        from torch._dynamo.callback import callback_handler
        from torch._dynamo.utils import get_compilation_metrics

        self._path, self._handler, self._metrics = path, callback_handler, get_compilation_metrics
        self.has_news = False
        """Whether something was compiled since `new_causes` was called."""
        self._seen = get_compilation_metrics()
        self._handler.register_end_callback(self._note)

    def _note(self, *_: Any) -> None:
        self.has_news = True

    def new_causes(self) -> list[str]:
        """Return the causes since the last call. A change to evaluation and back is none."""
        self.has_news = False
        seen, self._seen = set(map(id, self._seen)), self._metrics()
        new = [entry for entry in self._seen if id(entry) not in seen]
        causes = [entry.recompile_reason for entry in new if entry.co_filename == self._path and entry.recompile_reason]
        causes = [re.sub(r"^\d+/\d+: ", "", cause).split("  #")[0] for cause in causes]
        return [cause for cause in causes if "grad_mode" not in cause and "training" not in cause]

    def close(self) -> None:
        with suppress(ValueError):  # it was closed before
            self._handler.remove_end_callback(self._note)
