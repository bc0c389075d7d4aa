"""The pacer of benchmarks/gpu.py: it is called at the start of each step of any loop, and times turns of it.

A process runs one implementation. The parent sends commands over standard input, one JSON object per line, and gets the results
over a pipe. Between two turns the process waits, so that others have the device. A loop does not end by itself: when the
parent has no more turns the process exits within a step, so a framework's work at the end of training is not run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_probes import (
    counted_waits,
    empty_cache,
    peak_memory_mib,
    profiled_steps,
    reset_peak_memory,
    synchronize,
)
from torch import Tensor

WARMUP_STEPS = 8
UNTIMED_WARMUP_STEPS = 3
"""The first of them, in which a compiler compiles and a recorder records graphs."""
LAST_LOSSES = 10
"""So many losses at the end of a turn are averaged to be compared."""


class Channel:
    """The connection to the parent.

    Args:
        descriptor: the end of the pipe that this process writes to.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def tell(self, event: str, **facts: Any) -> None:
        os.write(self._descriptor, json.dumps({"event": event, **facts}).encode() + b"\n")

    def command(self) -> dict[str, Any]:
        """Wait for the next command of the parent; exit if it has no more, or has ended."""
        line = sys.stdin.readline()
        told: dict[str, Any] = json.loads(line) if line.strip() else {"do": "end"}
        if told["do"] == "end":
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        return told


class Pacer:
    """Called by a loop: `step` at the start of a step, `saw` with its loss.

    Args:
        channel: the line to the parent.
        device: where the loop computes.
        is_crowded: whether the others need the memory that this process could keep between its turns.
        facts: about a step, sent along with its time.
    """

    def __init__(self, channel: Channel, device: torch.device, is_crowded: bool, facts: dict[str, Any]) -> None:
        self._channel, self._device, self._is_crowded = channel, device, is_crowded
        self._facts = facts
        self._losses: deque[Tensor] = deque(maxlen=LAST_LOSSES)
        self._script = self._phases()
        self._ahead = 1

    def step(self) -> None:
        """Begin a step; the previous one has been submitted to the device completely."""
        self._ahead -= 1
        if self._ahead == 0:
            self._ahead = next(self._script)

    def saw(self, loss: Tensor) -> None:
        """Keep a step's loss on its device."""
        self._losses.append(loss.detach())

    def _phases(self) -> Iterator[int]:
        """Yield how many steps to let pass until the next call."""
        torch.manual_seed(0)  # building draws, and not everywhere as much
        began = time.perf_counter()
        yield 1
        synchronize(self._device)
        first = time.perf_counter() - began
        self._channel.tell("first", seconds=first)
        yield UNTIMED_WARMUP_STEPS - 1
        steps = WARMUP_STEPS - UNTIMED_WARMUP_STEPS
        seconds = yield from self._timed(steps)
        self._channel.tell("warm", seconds=seconds / steps, first=first, loss=self._loss(), **self._facts)
        reset_peak_memory(self._device)
        turns: dict[str, Callable[[dict[str, Any]], Iterator[int]]] = {
            "turn": self._turn,
            "arm": self._arm,
            "probe": self._probe,
        }
        while True:
            if self._is_crowded:
                empty_cache(self._device)
            told = self._channel.command()
            yield from turns[told["do"]](told)

    def _timed(self, steps: int) -> Any:
        synchronize(self._device)
        began = time.perf_counter()
        yield steps
        synchronize(self._device)
        return time.perf_counter() - began

    def _turn(self, told: dict[str, Any]) -> Iterator[int]:
        yield told["lead"]
        seconds = yield from self._timed(told["steps"])
        peak = peak_memory_mib(self._device)
        self._channel.tell("turn", seconds=seconds / told["steps"], loss=self._loss(), peak_mib=peak)

    def _arm(self, told: dict[str, Any]) -> Iterator[int]:
        """Start the profiler, which takes seconds: all processes do so at the same time, while nothing is timed."""
        yield from self._seen(profiled_steps, 2, {})
        self._channel.tell("armed")

    def _probe(self, told: dict[str, Any]) -> Iterator[int]:
        found: dict[str, Any] = {}
        for window in (profiled_steps, counted_waits):
            yield from self._seen(window, told["steps"], found)
        self._channel.tell("probe", **found)

    def _seen(self, window: Callable[..., Iterator[None]], steps: int, found: dict[str, Any]) -> Iterator[int]:
        try:
            for _ in window(self._device, steps, found):
                yield 1
        except (RuntimeError, ValueError, OSError, KeyError) as error:  # what cannot be seen here stays empty
            found.setdefault("unseen", f"{window.__name__}: {str(error)[:200]}")

    def _loss(self) -> float:
        """Return the average of the last losses. The host waits for it, so nothing is timed meanwhile."""
        return torch.stack([each.float() for each in self._losses]).mean().item()
