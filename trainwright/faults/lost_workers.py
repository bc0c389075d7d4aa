"""Texts about loader workers that were killed, hang or leak: which worker, with the batch that it reads and its dataset."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from trainwright.faults.out_of_memory import OutOfMemoryKills
from trainwright.rank_zero import warn

LONG_WAIT_SECONDS = 60.0
"""A wait for one batch that is worth a warning."""
GROWTH_BYTES, GROWTH_FACTOR = 1 << 30, 3
"""The growth of a worker's memory since its first epoch that is worth a warning: both."""
CHECK_SECONDS = 60.0
MOST_BATCHES, MOST_INDICES = 2, 8

out_of_memory_kills = cache(OutOfMemoryKills)
"""Returns the kills since the first worker began."""


@dataclass(frozen=True)
class Worker:
    """A loader worker."""

    number: int
    process: Any
    """A multiprocessing.Process."""
    dataset: str
    batches: Mapping[int, Sequence[Any]]
    """The indices of the batches that it has not delivered, by their numbers in the epoch. () for an iterable dataset."""

    def __str__(self) -> str:
        return f"worker {self.number} (pid {self.process.pid}) of the loader of {self.dataset}"

    def work(self, most: int = 1) -> str:
        """Return the batch that it reads in words, and the following ones."""
        texts = []
        for number, indices in islice(self.batches.items(), most):
            more = ", ..." if len(indices) > MOST_INDICES else ""
            shown = ", ".join(map(repr, indices[:MOST_INDICES]))
            texts.append(f"batch {number} of the epoch" + f" (indices {shown}{more})" * bool(shown))
        return " and ".join(texts) or "no batch"


def describe_end(text: str, workers: Sequence[Worker]) -> str:
    """Return torch's text about the end of workers, with the workers whose processes it names."""
    found = re.search(r"\(pid(?:\(s\))? ([\d, ]+)\)", text)
    pids = set(found[1].split(", ")) if found else set()
    ends = [_describe_end(worker) for worker in workers if str(worker.process.pid) in pids]
    return " ".join([f"{text.strip().rstrip('.')}.", *ends])


def _describe_end(worker: Worker) -> str:
    code, reason = worker.process.exitcode, ""
    if code == -signal.SIGKILL:
        reason = out_of_memory_kills().describe() or "; on Linux this is often the out-of-memory killer"
    how = f"ended with exit code {code}" if code is None or code >= 0 else f"was killed by {signal.Signals(-code).name}"
    return f"It is {worker}. It {how}{reason}. It had not delivered {worker.work(MOST_BATCHES)}."


class WorkerWait:
    """A wait of the training for one batch of a loader with workers."""

    def __init__(self) -> None:
        self._batch: int | None = None
        self._began, self._is_warned = 0.0, False

    def go_on(self, seconds: float, worker: Worker) -> None:
        """Record that no batch has come within these seconds more, and warn once if that takes long."""
        if (batch := min(worker.batches, default=0)) != self._batch:
            self._batch, self._began, self._is_warned = batch, time.monotonic() - seconds, False
        if (waited := time.monotonic() - self._began) >= LONG_WAIT_SECONDS and not self._is_warned:
            self._is_warned = True
            warn(
                f"training has waited {waited:.0f} s for {worker}, which reads {worker.work()}. It waits on. "
                f"`py-spy dump --pid {worker.process.pid}` shows where the worker is. Pass timeout=... to the DataLoader for "
                "an error instead."
            )


class WorkerGrowth:
    """The memory of persistent workers, which a leak increases from epoch to epoch."""

    def __init__(self) -> None:
        self._first: dict[int, int] = {}
        self._due = 0.0

    def check(self, workers: Sequence[Worker]) -> None:
        """Warn once per worker that has grown since the first call."""
        if time.monotonic() < self._due:  # the kernel takes some ms per worker
            return
        self._due = time.monotonic() + CHECK_SECONDS
        for worker in workers:
            now = private_bytes(worker.process.pid)
            first = self._first.setdefault(worker.process.pid, now)
            if first > 0 and now > max(first + GROWTH_BYTES, GROWTH_FACTOR * first):
                self._first[worker.process.pid] = 0
                warn(
                    f"the memory of {worker} has grown from {first >> 20} to {now >> 20} MiB since its first epoch. "
                    "Usually the dataset keeps items, or has many Python objects, whose reference counts every worker copies: "
                    "store the data in arrays or tensors, or pass persistent_workers=False."
                )


def private_bytes(pid: int) -> int:
    """Return the memory that only this process uses, or 0 if it is unknown."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # another system, or the process has ended
        return 0
    return sum(int(size) << 10 for size in re.findall(r"Private_\w+: +(\d+) kB", text))
