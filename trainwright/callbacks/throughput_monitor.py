"""ThroughputMonitor: samples, tokens and FLOP a second, and the share of the time that training waits for data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainwright.arguments import refuses_unknown
from trainwright.callbacks.base import Callback, require_logger
from trainwright.devices.hardware import peak_flops
from trainwright.faults.failing_loggers import outlived

if TYPE_CHECKING:
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer


class Moment(NamedTuple):
    """The work up to a time, in seconds."""

    time: float
    waited: float
    batches: int
    samples: int
    length: int


class ThroughputMonitor(Callback):
    """Logs, with the step values, how fast training is over the last rows.

    The names are `train/device/<rate>` for this process (rank 0's are logged) and `train/<rate>` for all, as if each were as
    fast. The rates are batches_per_sec, samples_per_sec, items_per_sec (of length_fn, such as tokens) and flops_per_sec.
    `train/device/mfu` is the fraction of the device's peak. `train/data_wait` is the fraction of the time in which training
    waited for the next batch. Validation and checkpoints between batches do not count. A row waits for the device once.

    Args:
        batch_size_fn: returns the samples of a batch.
        length_fn: returns the items of a batch, such as its tokens, or None for none.
        window_size: rows over which a rate is taken.
        available_flops: the device's peak in FLOP/s, or None for the peak of known GPUs in 16-bit precision. Without a peak
            there is no mfu.
        flops_per_batch: FLOP of a training step, such as `torch.utils.flop_counter.FlopCounterMode` counts, by default the
            module's `flops_per_batch` (a number or a method), if it has one.

    Raises:
        TypeError: a function cannot be called.
        ValueError: window_size is below 2, or in fit there is no logger.

    >>> speed = tw.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]))
    >>> trainer = tw.Trainer(callbacks=speed, max_epochs=1, log_every_n_steps=2, enable_model_summary=False)
    >>> trainer.fit(module, loader)
    """

    reads_outputs = False

    @refuses_unknown
    def __init__(
        self,
        batch_size_fn: Callable[[Any], int],
        length_fn: Callable[[Any], int] | None = None,
        *,
        window_size: int = 100,
        available_flops: float | None = None,
        flops_per_batch: float | None = None,
    ) -> None:
        if not callable(batch_size_fn) or not (length_fn is None or callable(length_fn)):
            raise TypeError("batch_size_fn and length_fn are called with a batch and return a number; pass functions.")
        if window_size < 2:
            raise ValueError(f"window_size={window_size} is not accepted; a rate needs 2 rows or more.")
        self.batch_size_fn, self.length_fn, self.window_size = batch_size_fn, length_fn, window_size
        self.available_flops, self.flops_per_batch = available_flops, flops_per_batch
        self._begin()

    def _begin(self) -> None:
        self._moments: deque[Moment] = deque(maxlen=self.window_size)
        self._batches = self._samples = self._length = 0
        self._step = 0
        """The steps before the latest batch."""
        self._flops: float | None = self.flops_per_batch

    def setup(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        if stage != "fit":
            return
        require_logger(self, trainer)
        self._begin()

    def on_fit_start(self, trainer: AnyTrainer, module: Module) -> None:
        if self._flops is None:
            self._flops = flops_of(module)

    def on_train_batch_start(self, trainer: AnyTrainer, module: Module, batch: Any, batch_idx: int) -> None:
        if not trainer.is_dummy_batch:  # here, since a step may take entries out of the batch
            self._samples += int(self.batch_size_fn(batch))
            self._length += int(self.length_fn(batch)) if self.length_fn is not None else 0
        self._step = trainer.state.batches_that_stepped

    def on_train_batch_end(self, trainer: AnyTrainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._batches += 1
        step, every = trainer.state.batches_that_stepped, trainer.log_every_n_steps
        is_due = every > 0 and step % every == 0 and step != self._step  # the batches of a window have one step
        if is_due and module.device.type != "cpu":
            torch.accelerator.synchronize(module.device)
        if is_due:
            waited, seconds = trainer.state.timeline.measure()
            self._moments.append(Moment(seconds, waited, self._batches, self._samples, self._length))
            values = self._rates(trainer.engine.num_data_ranks, module.device) if len(self._moments) > 1 else {}
            for logger in trainer.loggers if values and trainer.is_global_zero else ():
                outlived(logger, "log_metrics", values, trainer.state.logged_step)

    def _rates(self, num_data_ranks: int, device: torch.device) -> dict[str, float]:
        first, last = self._moments[0], self._moments[-1]
        seconds = max(last.time - first.time, 1e-9)
        own = {
            "batches_per_sec": (last.batches - first.batches) / seconds,
            "samples_per_sec": (last.samples - first.samples) / seconds,
        }
        if self.length_fn is not None:
            own["items_per_sec"] = (last.length - first.length) / seconds
        if self._flops:
            own["flops_per_sec"] = self._flops * own["batches_per_sec"]
        values = {f"train/device/{name}": value for name, value in own.items()}
        values |= {f"train/{name}": value * num_data_ranks for name, value in own.items()}
        peak = self.available_flops or peak_flops(device)
        if self._flops and peak:
            values["train/device/mfu"] = own["flops_per_sec"] / peak
        values["train/data_wait"] = (last.waited - first.waited) / seconds
        return values


def flops_of(module: Module) -> float | None:
    """Return the FLOP of a training step that a module names in `flops_per_batch`, or None if it names none."""
    flops = getattr(module, "flops_per_batch", None)
    return flops() if callable(flops) else flops
