"""The progress bar: tqdm in a terminal or a notebook, a plain line an epoch elsewhere; on rank 0 only."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from trainwright.callbacks.base import Callback

if TYPE_CHECKING:
    from trainwright.module import Module
    from trainwright.trainer.trainer import Trainer


class TQDMProgressBar(Callback):
    """Shows batches, rate, time left and the metrics logged with prog_bar=True.

    Args:
        refresh_seconds: least time between two updates. Metrics are read from the device only then.
        line_seconds: where the output is no terminal, least time between two plain lines within an epoch.
    """

    def __init__(self, refresh_seconds: float = 0.1, line_seconds: float = 30.0) -> None:
        self.refresh_seconds, self.line_seconds = refresh_seconds, line_seconds
        self._bar: Any = None
        self._due = 0.0
        self._epoch_started = 0.0
        self._is_shown = False
        self._is_live = False

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._is_shown = trainer.is_global_zero
        self._is_live = self._is_shown and (sys.stderr.isatty() or "ipykernel" in sys.modules)

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        self._epoch_started = time.monotonic()
        self._due = self._epoch_started + (self.refresh_seconds if self._is_live else self.line_seconds)
        if self._is_live:
            self._open(f"Epoch {trainer.current_epoch}", trainer.num_training_batches, trainer.state.batch)

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._is_shown or (now := time.monotonic()) < self._due:
            return
        if self._bar is not None:
            self._due = now + self.refresh_seconds
            self._bar.set_postfix(rounded(trainer.progress_bar_metrics), refresh=False)
            self._bar.update(batch_idx + 1 - self._bar.n)
        else:
            self._due = now + self.line_seconds
            self._line(trainer, batch_idx + 1)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Show the epoch's last state. It runs last, so the epoch's own metrics are there."""
        if self._bar is not None:
            self._bar.set_postfix(rounded(trainer.progress_bar_metrics), refresh=False)
            self._bar.update(trainer.state.batch - self._bar.n)
            self._close(leave=True)
        elif self._is_shown:
            self._line(trainer, trainer.state.batch)

    runs_last = True

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        if self._is_live and self._bar is None:
            self._open("Sanity check" if trainer.sanity_checking else "Validation", trainer.num_val_batches, 0)

    def on_test_start(self, trainer: Trainer, module: Module) -> None:
        if self._is_live:
            self._open("Test", trainer.num_test_batches, 0)

    def on_validation_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._bar is not None and self._bar.desc.startswith(("Sanity", "Validation")):
            self._bar.update(batch_idx + 1 - self._bar.n)

    def on_test_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._bar is not None:
            self._bar.update(batch_idx + 1 - self._bar.n)

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        if self._bar is not None and self._bar.desc.startswith(("Sanity", "Validation")):
            self._close(leave=False)

    def on_test_end(self, trainer: Trainer, module: Module) -> None:
        self._close(leave=False)

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._close(leave=True)

    def _open(self, title: str, total: int | None, initial: int) -> None:
        self._bar = tqdm(desc=title, total=total, initial=initial, dynamic_ncols=True, leave=True, unit="batch")

    def _close(self, *, leave: bool) -> None:
        if self._bar is not None:
            self._bar.leave = leave
            self._bar.close()
            self._bar = None

    def _line(self, trainer: Trainer, batches: int) -> None:
        total = trainer.num_training_batches
        seconds = time.monotonic() - self._epoch_started
        metrics = "".join(f", {name} {value}" for name, value in rounded(trainer.progress_bar_metrics).items())
        of = f"/{total}" if total is not None else ""
        print(
            f"epoch {trainer.current_epoch}: {batches}{of} batches in {seconds:.1f} s{metrics}",
            file=sys.stderr,
            flush=True,
        )


def rounded(metrics: dict[str, float]) -> dict[str, str]:
    """Return the numbers as short text."""
    return {name: f"{value:.4g}" for name, value in metrics.items()}
