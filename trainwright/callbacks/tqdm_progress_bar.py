"""TQDMProgressBar: the default progress bar, tqdm in a terminal or a notebook."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import std
from tqdm.auto import tqdm

from trainwright.arguments import refuses_unknown
from trainwright.callbacks.base import check_integers
from trainwright.callbacks.progress_bar import LiveProgressBar, LoopDisplay, rounded

LOOPS = {
    "train": ("init_train_tqdm", "train_progress_bar"),
    "sanity": ("init_sanity_tqdm", "val_progress_bar"),
    "validation": ("init_validation_tqdm", "val_progress_bar"),
    "test": ("init_test_tqdm", "test_progress_bar"),
    "predict": ("init_predict_tqdm", "predict_progress_bar"),
}
"""The method that makes the bar of a loop, and the attribute that has it."""


class TQDMProgressBar(LiveProgressBar):
    """Shows batches, rate, time left and the metrics logged with prog_bar=True.

    Override `init_train_tqdm`, `init_sanity_tqdm`, `init_validation_tqdm`, `init_test_tqdm` or `init_predict_tqdm` for another
    bar: each is called when its bar is to be shown in a terminal or a notebook, and returns a tqdm. The callback sets its
    description, total, count and metrics. Hooks of a subclass reach the bars as `train_progress_bar`, `val_progress_bar`,
    `test_progress_bar` and `predict_progress_bar`. Where nothing is shown these are tqdms that show nothing.

    >>> class Green(tw.TQDMProgressBar):
    ...     def init_train_tqdm(self):
    ...         bar = super().init_train_tqdm()
    ...         bar.colour = "green"
    ...         return bar

    Args:
        refresh_rate: minimum number of batches between two updates. 0 shows nothing.
        process_position: pairs of lines above the bars that are left to other processes.
        leave: keep the bar of every epoch. False uses one bar for the whole training.
        refresh_seconds: minimum time between two updates. Metrics are only read from the device then.
        line_seconds: outside of a terminal, minimum time between two plain lines within an epoch.
    """

    BAR_FORMAT: str | None = None
    """The format of the bars, as tqdm takes it, or None for tqdm's default."""

    @refuses_unknown
    def __init__(
        self,
        refresh_rate: int = 1,
        process_position: int = 0,
        leave: bool = False,
        *,
        refresh_seconds: float = 0.1,
        line_seconds: float = 30.0,
    ) -> None:
        check_integers(0, process_position=process_position)
        super().__init__(refresh_rate, leave, refresh_seconds, line_seconds)
        self.process_position = process_position
        self._options: dict[str, Any] = {}
        """The arguments of the next bar."""
        self.train_progress_bar: std.tqdm[Any] = UnshownTqdm()
        """The bar of the training. It shows nothing before it has begun, as do the others."""
        self.val_progress_bar: std.tqdm[Any] = UnshownTqdm()
        """The bar of the latest validation or sanity check."""
        self.test_progress_bar: std.tqdm[Any] = UnshownTqdm()
        """The bar of the latest test."""
        self.predict_progress_bar: std.tqdm[Any] = UnshownTqdm()
        """The bar of the latest prediction."""

    def _begin(
        self, progress: LoopDisplay, title: str, total: int | None, count: int = 0, *, leave: bool, below: int = 0
    ) -> None:
        super()._begin(progress, title, total, count, leave=leave, below=below)
        if progress.bar is None:
            setattr(self, LOOPS[self._stage][1], UnshownTqdm(desc=title, total=total, initial=count))
        if self._stage == "sanity":
            self.train_progress_bar = UnshownTqdm(desc=self.train_description)

    def init_train_tqdm(self) -> tqdm[Any]:
        """Return the bar of the training."""
        return tqdm(**self._options)

    def init_sanity_tqdm(self) -> tqdm[Any]:
        """Return the bar of the sanity check."""
        return tqdm(**self._options)

    def init_validation_tqdm(self) -> tqdm[Any]:
        """Return the bar of a validation."""
        return tqdm(**self._options)

    def init_test_tqdm(self) -> tqdm[Any]:
        """Return the bar of a test."""
        return tqdm(**self._options)

    def init_predict_tqdm(self) -> tqdm[Any]:
        """Return the bar of a prediction."""
        return tqdm(**self._options)

    def _can_be_live(self) -> bool:
        return sys.stderr is not None and (sys.stderr.isatty() or _in_notebook())

    def _make_bar(self, title: str, total: int | None, count: int, *, leave: bool, below: int) -> TQDMBar:
        place = {"leave": leave, "position": 2 * self.process_position + below, "dynamic_ncols": True}
        look = {"unit": "it", "bar_format": self.BAR_FORMAT, "mininterval": 0.0, "miniters": 1}  # updates come when due
        self._options = {"desc": title, "total": total, "initial": count, **place, **look}
        maker, attribute = LOOPS[self._stage]
        bar: std.tqdm[Any] = getattr(self, maker)()
        setattr(self, attribute, bar)
        return TQDMBar(bar, title, total, count)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{attribute: UnshownTqdm() for _, attribute in LOOPS.values()}}


class UnshownTqdm(std.tqdm):  # type: ignore[type-arg]  # the class takes no parameter at run time
    """Shows nothing, and starts no thread."""

    monitor_interval = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, disable=True)
        self.desc = options.get("desc", "")  # which tqdm omits here


class TQDMBar:
    """A bar of tqdm, perhaps a subclass's."""

    def __init__(self, bar: std.tqdm[Any], title: str, total: int | None, count: int) -> None:
        self._bar: Any = bar
        if getattr(bar, "desc", None) != title:
            self.restart(title, total, count)

    def restart(self, title: str, total: int | None, count: int) -> None:
        bar = self._bar
        bar.set_description_str(title, refresh=False)  # reset shows it
        bar.total = total  # reset keeps a known total if the new one is None
        bar.reset(total)
        bar.n = bar.initial = bar.last_print_n = count

    def show(self, metrics: dict[str, Any]) -> None:
        self._bar.set_postfix(rounded(metrics, digits=3), refresh=False)

    def move_to(self, batches: int) -> None:
        self._bar.update(batches - self._bar.n)

    def refresh(self) -> None:
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()


def _in_notebook() -> bool:
    """Return whether this process runs a notebook's cells: other packages may import ipykernel too."""
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    return getattr(shell, "kernel", None) is not None
