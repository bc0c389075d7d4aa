"""The progress bar: tqdm in a terminal or a notebook, occasional plain lines elsewhere; on rank 0 only."""

from __future__ import annotations

import builtins
import math
import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor
from tqdm.auto import tqdm

from trainwright.callbacks.base import Callback

if TYPE_CHECKING:
    from trainwright.module import Module
    from trainwright.trainer.trainer import Trainer

NEVER = math.inf
BAR_WIDTH = 10
"""The columns that the metrics leave to the bar."""
NARROW = f"{{l_bar}}{{bar:{BAR_WIDTH}}}| {{n_fmt}}/{{total_fmt}} [{{remaining}}, {{rate_fmt}}{{postfix}}]"
"""The format of a line whose metrics would leave less."""


class TQDMProgressBar(Callback):
    """Shows batches, rate, time left and the metrics logged with prog_bar=True.

    Args:
        refresh_rate: minimum number of batches between two updates; 0 shows nothing.
        process_position: pairs of lines above the bars that are left to other processes.
        leave: keep each epoch's bar; False uses one bar for the whole training.
        refresh_seconds: minimum time between two updates. Metrics are only read from the device then.
        line_seconds: outside of a terminal, minimum time between two plain lines within an epoch.
    """

    runs_last = True  # so that the epoch's own metrics are shown at its end
    reads_outputs = False
    counts_rounds = True

    def __init__(
        self,
        refresh_rate: int = 1,
        process_position: int = 0,
        leave: bool = False,
        *,
        refresh_seconds: float = 0.1,
        line_seconds: float = 30.0,
    ) -> None:
        for name, value in (("refresh_rate", refresh_rate), ("process_position", process_position)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name}={value!r} is not accepted; pass a whole number from 0.")
        self.refresh_rate, self.process_position, self.leave = refresh_rate, process_position, leave
        self.refresh_seconds, self.line_seconds = refresh_seconds, line_seconds
        self._is_wanted = True
        self._is_shown = self._is_live = False
        self._train_bar: Any = None
        self._eval_bar: Any = None
        self._title = ""
        self._loader = self._count = self._eval_count = self._eval_shown = 0
        self._started = self._eval_started = 0.0
        self._due = self._eval_due = NEVER
        """When the next update is due; NEVER if nothing is shown. A batch costs one comparison with it."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_train_bar": None, "_eval_bar": None}

    @property
    def is_enabled(self) -> bool:
        """Return whether anything is shown."""
        return self._is_wanted and self.refresh_rate > 0

    @property
    def is_disabled(self) -> bool:
        """Return whether nothing is shown."""
        return not self.is_enabled

    def disable(self) -> None:
        """Show nothing from now on."""
        self._is_wanted = self._is_shown = self._is_live = False
        self._due = self._eval_due = NEVER
        self._close()

    def enable(self) -> None:
        """Show progress again, from the next run on."""
        self._is_wanted = True

    def get_metrics(self, trainer: Trainer, module: Module) -> dict[str, Any]:
        """Return what is shown next to a bar: the run's version and the metrics. Override it to change that."""
        version = getattr(trainer.loggers[0], "version", None) if trainer.loggers else None
        items: dict[str, Any] = {} if version in (None, "") else {"v_num": version}
        return {**items, **trainer.progress_bar_metrics}

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Print, above the bars if there are any."""
        if self._train_bar is not None or self._eval_bar is not None:
            tqdm.write(sep.join(map(str, args)), **kwargs)
        else:
            builtins.print(*args, sep=sep, **kwargs)

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        bars = [type(each).__name__ for each in trainer.callbacks if isinstance(each, TQDMProgressBar)]
        if len(bars) > 1:
            raise ValueError(
                f"callbacks= holds {len(bars)} progress bars ({', '.join(bars)}); give the Trainer one of them."
            )
        self._is_shown = trainer.is_global_zero and self.is_enabled
        self._is_live = self._is_shown and (sys.stderr.isatty() or "ipykernel" in sys.modules)
        self._due = self._eval_due = NEVER

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._close()

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        if not self._is_shown:
            return
        self._started = time.monotonic()
        self._due = self._started + (self.refresh_seconds if self._is_live else self.line_seconds)
        self._count = trainer.state.batch
        if self._is_live:
            title, total = f"Epoch {trainer.current_epoch}", _known(trainer.num_training_batches)
            if self._train_bar is None:
                self._train_bar = self._open(title, total, 0, leave=True, initial=trainer.state.batch)
            else:
                _restart(self._train_bar, title, total, trainer.state.batch)

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (now := time.monotonic()) < self._due or batch_idx + 1 < self._count + self.refresh_rate:
            return
        self._count = batch_idx + 1
        if self._train_bar is not None:
            self._due = now + self.refresh_seconds
            self._show_training(trainer, module, batch_idx + 1)
        else:
            self._due = now + self.line_seconds
            self._write_line(trainer, module, batch_idx + 1)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        if self._train_bar is not None:
            self._show_training(trainer, module, trainer.state.batch)
            self._train_bar.refresh()
            if self.leave:
                self._train_bar.close()
                self._train_bar = None
        elif self._is_shown:
            self._write_line(trainer, module, trainer.state.batch)

    def _show_training(self, trainer: Trainer, module: Module, batches: int) -> None:
        self._show_metrics(trainer, module)
        self._train_bar.update(batches - self._train_bar.n)

    def _show_metrics(self, trainer: Trainer, module: Module) -> None:
        """Show the metrics next to the bar, which keeps a minimum width: a line that is too long is cut off."""
        bar = self._train_bar
        bar.set_postfix(rounded(self.get_metrics(trainer, module), digits=3), refresh=False)
        if sys.stderr.isatty():  # a notebook has its own
            bar.bar_format = None
            parts = str(bar).split("|")
            if len(parts) > 2 and len(parts[1]) < BAR_WIDTH:
                bar.bar_format = NARROW

    def _write_line(self, trainer: Trainer, module: Module, batches: int) -> None:
        metrics = rounded(self.get_metrics(trainer, module))
        text = "".join(f", {name} {value}" for name, value in metrics.items() if name != "v_num")
        self._write(
            f"epoch {trainer.current_epoch}", batches, _known(trainer.num_training_batches), self._started, text
        )

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        if trainer.sanity_checking:
            self._begin("Sanity check", trainer.num_sanity_val_batches, leave=False)
            return
        if self._train_bar is not None:
            self._train_bar.update(trainer.state.batch - self._train_bar.n)
            self._train_bar.refresh()
        self._begin("Validation", trainer.num_val_batches, leave=self._train_bar is None)

    def on_test_start(self, trainer: Trainer, module: Module) -> None:
        self._begin("Test", trainer.num_test_batches, leave=True)

    def on_predict_start(self, trainer: Trainer, module: Module) -> None:
        self._begin("Predict", trainer.num_predict_batches, leave=True)

    def on_validation_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._is_shown:
            numbers = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
            self._advance(numbers, batch_idx + 1, dataloader_idx)

    def on_test_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._is_shown:
            self._advance(trainer.num_test_batches, batch_idx + 1, dataloader_idx)

    def on_predict_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._is_shown:
            self._advance(trainer.num_predict_batches, batch_idx + 1, dataloader_idx)

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        self._finish()
        if self._train_bar is not None and not trainer.sanity_checking:
            self._show_metrics(trainer, module)

    def on_test_end(self, trainer: Trainer, module: Module) -> None:
        self._finish()

    def on_predict_end(self, trainer: Trainer, module: Module) -> None:
        self._finish()

    def _begin(self, title: str, numbers: list[int | float], *, leave: bool) -> None:
        """Start an evaluation of loaders with these numbers of batches."""
        if not self._is_shown:
            return
        self._title, self._loader, self._eval_count, self._eval_shown = title, 0, 0, 0
        self._eval_started = time.monotonic()
        self._eval_due = self._eval_started + (self.refresh_seconds if self._is_live else self.line_seconds)
        if self._is_live:
            below = 0 if self._train_bar is None else 1
            self._eval_bar = self._open(self._evaluated(numbers), _total(numbers, 0), below, leave=leave)

    def _advance(self, numbers: list[int | float], batches: int, loader: int) -> None:
        if loader != self._loader:
            if self._eval_bar is not None:
                self._eval_bar.update(self._eval_count - self._eval_bar.n)
            self._loader, self._eval_shown = loader, 0
            if self._eval_bar is not None:
                _restart(self._eval_bar, self._evaluated(numbers), _total(numbers, loader), 0)
        self._eval_count = batches
        if (now := time.monotonic()) < self._eval_due or batches < self._eval_shown + self.refresh_rate:
            return
        self._eval_shown = batches
        if self._eval_bar is not None:
            self._eval_due = now + self.refresh_seconds
            self._eval_bar.update(batches - self._eval_bar.n)
        else:
            self._eval_due = now + self.line_seconds
            self._write(self._evaluated(numbers).lower(), batches, _total(numbers, loader), self._eval_started, "")

    def _finish(self) -> None:
        self._eval_due = NEVER
        if self._eval_bar is not None:
            self._eval_bar.update(self._eval_count - self._eval_bar.n)
            self._eval_bar.close()
            self._eval_bar = None

    def _evaluated(self, numbers: list[int | float]) -> str:
        return f"{self._title} DataLoader {self._loader}" if len(numbers) > 1 else self._title

    def _open(self, title: str, total: int | None, below: int, *, leave: bool, initial: int = 0) -> Any:
        return tqdm(
            desc=title,
            total=total,
            initial=initial,
            leave=leave,
            position=2 * self.process_position + below,
            **_size(sys.stderr),
            mininterval=0.0,  # this class decides when an update is due
            miniters=1,
            unit="it",
        )

    def _close(self) -> None:
        for bar in (self._eval_bar, self._train_bar):
            if bar is not None:
                bar.close()
        self._eval_bar = self._train_bar = None

    def _write(self, what: str, batches: int, total: int | None, started: float, metrics: str) -> None:
        of = f"/{total}" if total is not None else ""
        seconds = time.monotonic() - started
        print(f"{what}: {batches}{of} batches in {seconds:.1f} s{metrics}", file=sys.stderr, flush=True)


def _size(stream: Any) -> dict[str, Any]:
    """Return the size of the bars: the terminal's, or 80 columns if it reports none."""
    with suppress(AttributeError, OSError, ValueError):
        if 0 in os.get_terminal_size(stream.fileno()):  # a pseudo-terminal without a size
            return {"ncols": 80, "nrows": 24}
    return {"dynamic_ncols": True}


def _restart(bar: Any, title: str, total: int | None, count: int) -> None:
    bar.set_description_str(title, refresh=False)  # reset shows it
    bar.total = total  # reset keeps a known total if the new one is None
    bar.reset(total)
    bar.n = bar.initial = bar.last_print_n = count


def _known(number: int | float | None) -> int | None:
    return None if number is None or math.isinf(number) else int(number)


def _total(numbers: list[int | float], loader: int) -> int | None:
    return _known(numbers[loader]) if loader < len(numbers) else None


def rounded(metrics: dict[str, Any], digits: int = 4) -> dict[str, str]:
    """Return the numbers as short text with this many significant digits; large ones keep all digits before the point."""
    values = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
    return {name: _short(value, digits) if isinstance(value, float) else str(value) for name, value in values.items()}


def _short(value: float, digits: int) -> str:
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.{digits}g}"
