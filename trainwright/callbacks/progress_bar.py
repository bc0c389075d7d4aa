"""The progress bar: tqdm in a terminal or a notebook, occasional plain lines elsewhere; on rank 0 only."""

from __future__ import annotations

import builtins
import math
import os
import sys
import time
from contextlib import suppress
from itertools import zip_longest
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
        self._training, self._evaluation = Progress(), Progress()
        self._loaders: list[tuple[str, int | None]] = []
        """The title and the number of batches of each loader of an evaluation."""
        self._loader = self._evaluated = 0

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
        if self._training.bar is not None or self._evaluation.bar is not None:
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
        self._close()

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._close()

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        title, total = f"Epoch {trainer.current_epoch}", _known(trainer.num_training_batches)
        self._begin(self._training, title, total, trainer.state.batch, leave=True)

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._training.is_due(batch_idx + 1):
            self._show_training(trainer, module, batch_idx + 1)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        if not self._is_shown:
            return
        self._show_training(trainer, module, trainer.state.batch)
        if self._training.bar is not None:
            self._training.bar.refresh()
            if self.leave:
                self._training.close()

    def _show_training(self, trainer: Trainer, module: Module, batches: int) -> None:
        if self._training.bar is not None:
            self._show_metrics(trainer, module)
            self._training.move_to(batches)
        else:
            metrics = rounded(self.get_metrics(trainer, module))
            text = "".join(f", {name} {value}" for name, value in metrics.items() if name != "v_num")
            self._training.write_line(batches, text)

    def _show_metrics(self, trainer: Trainer, module: Module) -> None:
        """Show the metrics next to the bar, which keeps a minimum width: a line that is too long is cut off."""
        bar = self._training.bar
        bar.set_postfix(rounded(self.get_metrics(trainer, module), digits=3), refresh=False)
        if sys.stderr.isatty():  # a notebook has its own
            bar.bar_format = None
            # tqdm draws the bar between the first two "|".
            parts = str(bar).split("|")
            if len(parts) > 2 and len(parts[1]) < BAR_WIDTH:
                bar.bar_format = NARROW

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        if trainer.sanity_checking:
            self._begin_evaluation("Sanity check", trainer.num_sanity_val_batches, leave=False)
            return
        if self._training.bar is not None:
            self._training.move_to(trainer.state.batch)
            self._training.bar.refresh()
        self._begin_evaluation("Validation", trainer.num_val_batches, leave=self._training.bar is None)

    def on_test_start(self, trainer: Trainer, module: Module) -> None:
        self._begin_evaluation("Test", trainer.num_test_batches, leave=True)

    def on_predict_start(self, trainer: Trainer, module: Module) -> None:
        self._begin_evaluation("Predict", trainer.num_predict_batches, leave=True)

    def on_validation_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._is_shown:
            self._advance(batch_idx + 1, dataloader_idx)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        self._finish()
        if self._training.bar is not None and not trainer.sanity_checking:
            self._show_metrics(trainer, module)

    def on_test_end(self, trainer: Trainer, module: Module) -> None:
        self._finish()

    on_predict_end = on_test_end

    def _begin_evaluation(self, stage: str, numbers: list[int | float], *, leave: bool) -> None:
        """Show an evaluation of loaders with these numbers of batches."""
        titles = [f"{stage} DataLoader {loader}" for loader in range(len(numbers))] if len(numbers) > 1 else [stage]
        self._loaders = list(zip_longest(titles, map(_known, numbers)))
        self._loader = self._evaluated = 0
        self._begin(self._evaluation, *self._loaders[0], leave=leave, below=0 if self._training.bar is None else 1)

    def _advance(self, batches: int, loader: int) -> None:
        if loader != self._loader:
            self._evaluation.move_to(self._evaluated)
            self._loader = loader
            self._evaluation.restart(*self._loaders[loader])
        self._evaluated = batches
        if self._evaluation.is_due(batches):
            if self._evaluation.bar is not None:
                self._evaluation.move_to(batches)
            else:
                self._evaluation.write_line(batches)

    def _finish(self) -> None:
        self._evaluation.move_to(self._evaluated)
        self._evaluation.close()

    def _begin(
        self, progress: Progress, title: str, total: int | None, count: int = 0, *, leave: bool, below: int = 0
    ) -> None:
        """Show a loop that starts at batch `count`, in a new bar unless the one of its previous epoch is still open."""
        if not self._is_shown:
            return
        progress.schedule(self.refresh_seconds if self._is_live else self.line_seconds, self.refresh_rate)
        progress.restart(title, total, count)
        if self._is_live and progress.bar is None:
            progress.bar = tqdm(
                desc=title,
                total=total,
                initial=count,
                leave=leave,
                # Two lines for each process: its training's bar and its evaluation's.
                position=2 * self.process_position + below,
                **_size(sys.stderr),
                mininterval=0.0,  # this class decides when an update is due
                miniters=1,
                unit="it",
            )

    def _close(self) -> None:
        self._evaluation.close()
        self._training.close()


class Progress:
    """What is shown of one loop: a bar in a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self.bar: Any = None
        self._title = ""
        self._total: int | None = None
        self._shown = self._every_batches = 0
        self._started = self._seconds = 0.0
        self._due = NEVER  # so that a batch costs one comparison where nothing is shown

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "bar": None}

    def schedule(self, seconds: float, every_batches: int) -> None:
        """Start the clock; updates are at least that far apart from here on."""
        self._started, self._seconds, self._every_batches = time.monotonic(), seconds, every_batches
        self._due = self._started + seconds

    def restart(self, title: str, total: int | None, count: int = 0) -> None:
        """Show another epoch or loader; a bar that is open is used again."""
        self._title, self._total, self._shown = title, total, count
        if self.bar is not None:
            self.bar.set_description_str(title, refresh=False)  # reset shows it
            self.bar.total = total  # reset keeps a known total if the new one is None
            self.bar.reset(total)
            self.bar.n = self.bar.initial = self.bar.last_print_n = count

    def is_due(self, batches: int) -> bool:
        """Return whether to show this number of batches, and if so count it as shown."""
        if (now := time.monotonic()) < self._due or batches < self._shown + self._every_batches:
            return False
        self._due, self._shown = now + self._seconds, batches
        return True

    def move_to(self, batches: int) -> None:
        """Move the bar, if any."""
        if self.bar is not None:
            self.bar.update(batches - self.bar.n)

    def write_line(self, batches: int, metrics: str = "") -> None:
        """Write a plain line."""
        of = "" if self._total is None else f"/{self._total}"
        line = f"{self._title.lower()}: {batches}{of} batches in {time.monotonic() - self._started:.1f} s{metrics}"
        print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Close the bar; nothing is due until the next `schedule`."""
        self._due = NEVER
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def _size(stream: Any) -> dict[str, Any]:
    """Return the size of the bars: the terminal's, or 80 columns if it reports none."""
    with suppress(AttributeError, OSError, ValueError):
        if 0 in os.get_terminal_size(stream.fileno()):  # a pseudo-terminal without a size
            return {"ncols": 80, "nrows": 24}
    return {"dynamic_ncols": True}


def _known(number: int | float | None) -> int | None:
    return None if number is None or math.isinf(number) else int(number)


def rounded(metrics: dict[str, Any], digits: int = 4) -> dict[str, str]:
    """Return the numbers as short text with this many significant digits; large ones keep all digits before the point."""

    def short(value: Any) -> str:
        if not isinstance(value, float):
            return str(value)
        return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.{digits}g}"

    return {name: short(value.item() if isinstance(value, Tensor) else value) for name, value in metrics.items()}
