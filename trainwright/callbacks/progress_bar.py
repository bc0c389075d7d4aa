"""ProgressBar, the base of all progress bars, and LiveProgressBar, the base of bars in a terminal or a notebook."""

from __future__ import annotations

import builtins
import math
import sys
import time
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from trainwright.callbacks.base import Callback, check_integers
from trainwright.module_hooks import AnyTrainer
from trainwright.rank_zero import above_bars

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import Batches, TrainerProtocol
    from trainwright.module import Module

NEVER = math.inf


class ProgressBar(Callback):
    """The base of progress bars. It shows nothing: override the hooks at which yours does, and ask it for totals and metrics.

    A Trainer that has one in its callbacks adds no other. Before a run it is disabled on all ranks but 0.

    >>> class Percent(tw.ProgressBar):
    ...     def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
    ...         if self.is_enabled:
    ...             print(f"{(batch_idx + 1) / self.total_train_batches:.0%}", end="\\r")
    """

    priority = -10  # the reduced metrics of an epoch are shown at its end

    sanity_check_description = "Sanity check"
    train_description = "Epoch"
    """The number of the epoch follows it."""
    validation_description = "Validation"
    test_description = "Test"
    predict_description = "Predict"

    # Of the class, so that a subclass need not call this constructor.
    _is_wanted = True
    _evaluated_loader: int | None = None
    """The loader that `has_dataloader_changed` was last given."""

    @property
    def is_enabled(self) -> bool:
        """Return whether anything is shown."""
        return self._is_wanted

    @property
    def is_disabled(self) -> bool:
        """Return whether nothing is shown."""
        return not self.is_enabled

    def disable(self) -> None:
        """Show nothing from now on."""
        self._is_wanted = False

    def enable(self) -> None:
        """Show progress again, from the next run on."""
        self._is_wanted = True

    @property
    def trainer(self) -> TrainerProtocol:
        """Return the Trainer of the run, in its hooks."""
        trainer: TrainerProtocol = self._module().trainer
        return trainer

    @property
    def total_train_batches(self) -> Batches:
        """Return the training batches of an epoch, or of the run up to max_steps without a limit of epochs."""
        trainer, batches = self.trainer, self.trainer.num_training_batches
        if trainer.max_steps == -1 or trainer.max_epochs != -1:
            return batches
        steps = trainer.max_steps - trainer.global_step
        return min(batches, trainer.state.batch + steps * trainer.accumulate_grad_batches)

    @property
    def total_val_batches(self) -> Batches:
        """Return the batches of a validation, of all its loaders. It is 0 in a fit that does not validate."""
        return sum(self.trainer.num_val_batches) if self.trainer.enable_validation else 0

    @property
    def total_val_batches_current_dataloader(self) -> Batches:
        """Return the batches of the running validation loader, or of its part in the sanity check."""
        trainer = self.trainer
        return self._of_loader(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)

    @property
    def total_test_batches_current_dataloader(self) -> Batches:
        """Return the batches of the test loader that runs."""
        return self._of_loader(self.trainer.num_test_batches)

    @property
    def total_predict_batches_current_dataloader(self) -> Batches:
        """Return the batches of the prediction loader that runs."""
        return self._of_loader(self.trainer.num_predict_batches)

    def _of_loader(self, numbers: list[Batches]) -> Batches:
        return numbers[self._evaluated_loader or 0]

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Return whether an evaluation has another loader than at the previous call, and note which it has."""
        has_changed = dataloader_idx != self._evaluated_loader
        self._evaluated_loader = dataloader_idx
        return has_changed

    def reset_dataloader_idx_tracker(self) -> None:
        """Let the next loader of `has_dataloader_changed` be a new one, at the start of an evaluation."""
        self._evaluated_loader = None

    def get_metrics(self, trainer: AnyTrainer, module: Module) -> dict[str, Any]:
        """Return the texts next to a bar: the run's version and the metrics. Override it to change them."""
        version = getattr(trainer.loggers[0], "version", None) if trainer.loggers else None
        items: dict[str, Any] = {} if version in (None, "") else {"v_num": version}
        return {**items, **trainer.progress_bar_metrics}

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Print, above the bars if there are any."""
        with above_bars():
            builtins.print(*args, sep=sep, **kwargs)

    def setup(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        if not trainer.is_global_zero:
            self.disable()


def rounded(metrics: dict[str, Any], digits: int = 4) -> dict[str, str]:
    """Return the numbers as short text with this many significant digits. Large ones keep all digits before the point."""

    def short(value: Any) -> str:
        if not isinstance(value, float):
            return str(value)
        return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.{digits}g}"

    return {name: short(value) for name, value in plain(metrics).items()}


def plain(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics with tensors as numbers."""
    return {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}


class ScreenBar(Protocol):
    """A bar on the screen."""

    def restart(self, title: str, total: int | None, count: int) -> None:
        """Show another epoch or loader, at this number of batches. The total may be unknown."""

    def show(self, metrics: dict[str, Any]) -> None:
        """Have these metrics next to the bar from its next update on."""

    def move_to(self, batches: int) -> None:
        """Show this number of batches."""

    def refresh(self) -> None:
        """Update the screen."""

    def close(self) -> None:
        """End it. It stays on the screen if it was made to."""


class LiveProgressBar(ProgressBar):
    """Shows one bar for the training and one for an evaluation. A subclass makes them.

    Args:
        refresh_rate: minimum number of batches between two updates. 0 shows nothing.
        leave: keep every epoch's bar. False uses one bar for the whole training.
        refresh_seconds: minimum time between two updates. Metrics are only read from the device then.
        line_seconds: where bars are not live, minimum time between two plain lines within an epoch.
    """

    reads_outputs = False

    def __init__(self, refresh_rate: int, leave: bool, refresh_seconds: float, line_seconds: float) -> None:
        check_integers(0, refresh_rate=refresh_rate)
        self.refresh_rate, self.leave = refresh_rate, leave
        self.refresh_seconds, self.line_seconds = refresh_seconds, line_seconds
        self._is_shown = self._is_live = False
        self._training, self._evaluation = LoopDisplay(), LoopDisplay()
        self._loaders: list[tuple[str, int | None]] = []
        """The title and the number of batches of every loader of an evaluation."""
        self._loader = self._evaluated = 0
        self._stage = "train"
        """The loop whose bar is made: "train", "sanity", "validation", "test" or "predict"."""

    def _can_be_live(self) -> bool:
        """Return whether bars can be shown where this process writes."""
        raise NotImplementedError

    def _lines_file(self) -> Any:
        """Return the stream of the plain lines that are written where bars cannot be shown."""
        return sys.stderr

    def _make_bar(self, title: str, total: int | None, count: int, *, leave: bool, below: int) -> ScreenBar:
        """Show a new bar, `below` another if there is one. `leave` keeps it on the screen once it is closed."""
        raise NotImplementedError

    @property
    def is_enabled(self) -> bool:
        return self._is_wanted and self.refresh_rate > 0

    def disable(self) -> None:
        super().disable()
        self._is_shown = self._is_live = False
        self._close()

    def setup(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        super().setup(trainer, module, stage)
        self._is_shown = self.is_enabled
        self._is_live = self._is_shown and self._can_be_live()
        self._close()

    def teardown(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        self._close()

    def on_train_epoch_start(self, trainer: AnyTrainer, module: Module) -> None:
        title, total = f"{self.train_description} {trainer.current_epoch}", _known(self.total_train_batches)
        self._stage = "train"
        self._begin(self._training, title, total, trainer.state.batch, leave=True)

    on_train_start = on_train_epoch_start  # so that a subclass finds its bar here

    def on_train_batch_end(self, trainer: AnyTrainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._training.is_due(batch_idx + 1):
            self._show_training(trainer, module, batch_idx + 1)

    def on_train_epoch_end(self, trainer: AnyTrainer, module: Module) -> None:
        if not self._is_shown:
            return
        self._show_training(trainer, module, trainer.state.batch)
        if self._training.bar is not None:
            self._training.bar.refresh()
            if self.leave:
                self._training.close()

    def _show_training(self, trainer: TrainerProtocol, module: Module, batches: int) -> None:
        if self._training.bar is not None:
            self._training.bar.show(self.get_metrics(trainer, module))
            self._training.move_to(batches)
        else:
            metrics = rounded(self.get_metrics(trainer, module))
            text = "".join(f", {name} {value}" for name, value in metrics.items() if name != "v_num")
            self._training.write_line(batches, text, self._lines_file())

    def on_validation_start(self, trainer: AnyTrainer, module: Module) -> None:
        self._stage = "sanity" if trainer.sanity_checking else "validation"
        if trainer.sanity_checking:
            self._begin_evaluation(self.sanity_check_description, trainer.num_sanity_val_batches, leave=False)
            return
        if self._training.bar is not None:
            self._training.move_to(trainer.state.batch)
            self._training.bar.refresh()
        leave = self._training.bar is None
        self._begin_evaluation(self.validation_description, trainer.num_val_batches, leave=leave)

    def on_test_start(self, trainer: AnyTrainer, module: Module) -> None:
        self._stage = "test"
        self._begin_evaluation(self.test_description, trainer.num_test_batches, leave=True)

    def on_predict_start(self, trainer: AnyTrainer, module: Module) -> None:
        self._stage = "predict"
        self._begin_evaluation(self.predict_description, trainer.num_predict_batches, leave=True)

    def on_validation_batch_end(
        self, trainer: AnyTrainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._is_shown:
            self._advance(batch_idx + 1, dataloader_idx)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: AnyTrainer, module: Module) -> None:
        self._evaluation.move_to(self._evaluated)
        self._evaluation.close()
        if self._training.bar is not None and not trainer.sanity_checking:
            self._training.bar.show(self.get_metrics(trainer, module))

    on_test_end = on_predict_end = on_validation_end

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
                self._evaluation.write_line(batches, "", self._lines_file())

    def _begin(
        self, progress: LoopDisplay, title: str, total: int | None, count: int = 0, *, leave: bool, below: int = 0
    ) -> None:
        """Show a loop that starts at batch `count`, in a new bar unless the one of its previous epoch is still open."""
        if not self._is_shown:
            return
        progress.schedule(self.refresh_seconds if self._is_live else self.line_seconds, self.refresh_rate)
        progress.restart(title, total, count)
        if self._is_live and progress.bar is None:
            progress.bar = self._make_bar(title, total, count, leave=leave, below=below)

    def _close(self) -> None:
        self._evaluation.close()
        self._training.close()


class LoopDisplay:
    """The display of one loop: a bar in a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self.bar: ScreenBar | None = None
        self._title = ""
        self._total: int | None = None
        self._shown = self._every_batches = 0
        self._started = self._seconds = 0.0
        self._due = NEVER  # so that a batch costs one comparison where nothing is shown

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "bar": None}

    def schedule(self, seconds: float, every_batches: int) -> None:
        """Start the clock. Updates are at least that far apart from here on."""
        self._started, self._seconds, self._every_batches = time.monotonic(), seconds, every_batches
        self._due = self._started + seconds

    def restart(self, title: str, total: int | None, count: int = 0) -> None:
        """Show another epoch or loader. A bar that is open is used again."""
        shown = self._title, self._total, self._shown
        self._title, self._total, self._shown = title, total, count
        if self.bar is not None and shown != (title, total, count):
            self.bar.restart(title, total, count)

    def is_due(self, batches: int) -> bool:
        """Return whether to show this number of batches, and if so count it as shown."""
        if (now := time.monotonic()) < self._due or batches < self._shown + self._every_batches:
            return False
        self._due, self._shown = now + self._seconds, batches
        return True

    def move_to(self, batches: int) -> None:
        if self.bar is not None:
            self.bar.move_to(batches)

    def write_line(self, batches: int, metrics: str, file: Any) -> None:
        of = "" if self._total is None else f"/{self._total}"
        line = f"{self._title.lower()}: {batches}{of} batches in {time.monotonic() - self._started:.1f} s{metrics}"
        print(line, file=file, flush=True)

    def close(self) -> None:
        """Close the bar. Nothing is due until the next `schedule`."""
        self._due = NEVER
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def _known(number: int | float | None) -> int | None:
    return None if number is None or math.isinf(number) else int(number)
