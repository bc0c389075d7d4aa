"""Timeline: the seconds of a fit by phase, as the host sees them, and advice if training waits for data."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from trainwright.devices.abilities import copies_aside
from trainwright.rank_zero import rank_zero_warn

Pair = tuple[Any, bool]
PHASES = ("data", "step", "validation", "checkpoints", "other")
TIMED_BATCHES, LONG_WAIT_SECONDS, LARGE_SHARE = 1000, 10.0, 0.3
"""Training warns if waits in its first batches take this long in total, and this share of the time."""
ADVISED_SHARE, ADVISED_SECONDS, SHORT_SECONDS = 0.1, 3.0, 1e-4
"""Above this share and number of seconds of waits the line has advice. A wait of less than SHORT_SECONDS is not compared with
the device's work."""


class Timeline:
    """How long a fit waits for data, trains, validates and saves. A phase within another phase counts only as itself.

    The times are the host's. A wait at whose end a GPU still computes costs nothing, so it counts as "step".
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        """The seconds of every phase from the first epoch's start on: "data", "step", "validation", "checkpoints", "other"."""
        self.steps = self.batches = 0
        self.samples = self.tokens = 0.0
        """Optimizer steps, known when the fit ends, and this rank's batches, samples and tokens (0 or NaN if unknown)."""
        self._phase: str | None = None
        """The current phase, or None outside of a fit's loop."""
        self._since = self._first_waits = 0.0

    def begin(self, loaders: Iterable[Any], processes: int, device: torch.device, step: int) -> None:
        """Begin the loop of a fit at an optimizer step. `processes` share the cores of this machine."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._cores, self._device, self._first_step = cores // processes, device, step
        self._loaders = [loader for loader in loaders if isinstance(loader, DataLoader)]
        self._workers = min((loader.num_workers for loader in self._loaders), default=cores)
        self._can_overlap = self._workers + 1 < self._cores and (device.type == "cpu" or copies_aside(device.type))
        self._left = TIMED_BATCHES if self._can_overlap else 0
        self._phase, self._since = "other", perf_counter()

    def enter(self, phase: str | None) -> str | None:
        """Begin another phase, None for the end of the loop, and return the previous phase."""
        now, before = perf_counter(), self._phase
        if before is not None:
            self.seconds[before] += now - self._since
        self._phase, self._since = phase, now
        return before

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count the block as a phase, if the loop runs."""
        before = self.enter(phase if self._phase is not None else None)
        try:
            yield
        finally:
            self.enter(before)

    def end(self, step: int) -> bool:
        """End the loop at an optimizer step, and return whether it ran."""
        has_run = self.enter(None) is not None
        self.steps = step - self._first_step if has_run else self.steps
        return has_run

    def measure(self) -> tuple[float, float]:
        """Return the seconds of waits for data, and the seconds of waits and steps, until now."""
        self.enter(self._phase)
        return self.seconds["data"], self.seconds["data"] + self.seconds["step"]

    def timed(self, pairs: Iterator[Pair]) -> Iterator[Pair]:
        """Yield the batches of an epoch, each with whether it is the last. Two readings of the clock for a batch."""
        stream = None if self._device.type == "cpu" else torch.accelerator.current_stream(self._device)
        seconds, is_first, key, counts = self.seconds, True, None, False
        self.enter("data")
        for pair in pairs:
            batch, now = pair[0], perf_counter()
            wait = now - self._since
            is_hidden = wait > SHORT_SECONDS and stream is not None and not stream.query()
            seconds["step" if is_hidden else "data"] += wait
            self._phase, self._since = "step", now
            if is_first:
                is_first, self._first_waits = False, self._first_waits + wait  # it starts the workers
                key, counts = _size_key(batch)
            elif self._left:
                self._left -= 1
                if seconds["data"] - self._first_waits > LONG_WAIT_SECONDS:
                    self._warn_of_waits()
            self.batches += 1
            if counts and batch is not None:
                try:
                    shape = (batch if key is None else batch[key]).shape
                    self.samples += shape[0]
                    self.tokens += shape.numel() if key == "input_ids" else 0
                except (AttributeError, LookupError, TypeError):  # of another form than the first batch
                    counts, self.samples, self.tokens = False, float("nan"), float("nan")
            yield pair
            now = perf_counter()
            seconds[self._phase] += now - self._since  # of the phase that the step has left
            self._phase, self._since = "data", now
        self.enter("step")  # a prefetcher asks for the end before the last step

    def _warn_of_waits(self) -> None:
        """Warn once, if the waits are a large share of the training so far."""
        waited = self.seconds["data"] - self._first_waits
        share = waited / (waited + self.seconds["step"])
        if share > LARGE_SHARE:
            self._left = 0
            rank_zero_warn(
                f"training has waited for data during {share:.0%} of its time: the loader has num_workers={self._workers}, and "
                f"this process has {self._cores} cores. Pass a larger num_workers.",
                stacklevel=2,
            )

    def describe(self, num_data_ranks: int, flops: float | None = None, peak: float | None = None) -> str:
        """Return the line of a fit's end. `flops` is FLOP of a batch, `peak` the device's FLOP/s."""
        total, training = max(sum(self.seconds.values()), 1e-9), max(self.measure()[1], 1e-9)
        counts = {"steps": self.steps, "samples": self.samples * num_data_ranks, "tokens": self.tokens * num_data_ranks}
        rates = [f"{count / training:,.2f} {name}/s" for name, count in counts.items() if count > 0]
        if flops and peak:
            rates.append(f"MFU {flops * self.batches / training / peak:.1%}")
        shares = ", ".join(
            f"{phase} {seconds / total:.0%}" for phase, seconds in self.seconds.items() if seconds > total / 200
        )
        return f"trained for {total:.3g} s: {', '.join(rates)}. Time: {shares}.{self._advice(total)}"

    def _advice(self, total: float) -> str:
        """Return a sentence on the settings of the loader, or "" if training has hardly waited."""
        waited = self.seconds["data"]
        if waited <= max(ADVISED_SHARE * total, ADVISED_SECONDS) or not self._loaders:
            return ""
        if waited - self._first_waits <= ADVISED_SHARE * total and not self._workers:  # the first call of code is slow
            return ""
        loader = next(loader for loader in self._loaders if loader.num_workers == self._workers)
        now = f" The loader has num_workers={loader.num_workers}"
        if self._first_waits > waited / 2 and loader.num_workers and not loader.persistent_workers:
            return f"{now}, which each epoch starts again. Pass persistent_workers=True to it."
        if loader.num_workers < self._cores > 1:
            more = min(self._cores, max(2, 2 * loader.num_workers))
            return f"{now}, and this process has {self._cores} cores. Pass num_workers={more} to it."
        factor = f", or raise prefetch_factor above {loader.prefetch_factor}" if loader.num_workers else ""
        return f"{now}, and this process has {self._cores} core(s): prepare the data before training{factor}."


def _size_key(batch: Any) -> tuple[Any, bool]:
    """Return the key or index of a batch's tensor whose first size is the number of samples, and whether there is one.

    The key is None if the batch is a tensor. With integer `input_ids` of two dimensions the tokens are known too.
    """
    if isinstance(batch, Tensor):
        return None, batch.dim() > 0
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point():
            return "input_ids", True
        items: Iterable[tuple[Any, Any]] = batch.items()
    else:
        items = enumerate(batch) if isinstance(batch, (list, tuple)) else ()
    return next(((key, True) for key, item in items if isinstance(item, Tensor) and item.dim() > 0), (None, False))
