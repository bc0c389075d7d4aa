"""TQDMProgressBar: the default progress bar, tqdm in a terminal or a notebook."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

from tqdm.auto import tqdm

from trainwright.callbacks.live_progress_bar import LiveProgressBar, refuse_negative
from trainwright.callbacks.progress_bar import rounded

BAR_WIDTH = 10
"""The columns that the metrics leave to the bar."""
NARROW = f"{{l_bar}}{{bar:{BAR_WIDTH}}}| {{n_fmt}}/{{total_fmt}} [{{remaining}}, {{rate_fmt}}{{postfix}}]"
"""The format of a line whose metrics would leave less."""


class TQDMProgressBar(LiveProgressBar):
    """Shows batches, rate, time left and the metrics logged with prog_bar=True.

    Args:
        refresh_rate: minimum number of batches between two updates; 0 shows nothing.
        process_position: pairs of lines above the bars that are left to other processes.
        leave: keep each epoch's bar; False uses one bar for the whole training.
        refresh_seconds: minimum time between two updates. Metrics are only read from the device then.
        line_seconds: outside of a terminal, minimum time between two plain lines within an epoch.
    """

    def __init__(
        self,
        refresh_rate: int = 1,
        process_position: int = 0,
        leave: bool = False,
        *,
        refresh_seconds: float = 0.1,
        line_seconds: float = 30.0,
    ) -> None:
        refuse_negative("process_position", process_position)
        super().__init__(refresh_rate, leave, refresh_seconds, line_seconds)
        self.process_position = process_position

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self.has_bars:
            with tqdm.external_write_mode(file=kwargs.get("file")):
                print(*args, **kwargs)
        else:
            super().print(*args, **kwargs)

    def _can_be_live(self) -> bool:
        return sys.stderr.isatty() or _in_notebook()

    def _make_bar(self, title: str, total: int | None, count: int, *, leave: bool, below: int) -> TQDMBar:
        return TQDMBar(title, total, count, leave, 2 * self.process_position + below)


class TQDMBar:
    """A bar of tqdm."""

    def __init__(self, title: str, total: int | None, count: int, leave: bool, position: int) -> None:
        self._bar: Any = tqdm(
            desc=title,
            total=total,
            initial=count,
            leave=leave,
            position=position,
            **_size(sys.stderr),
            mininterval=0.0,  # the callback decides when an update is due
            miniters=1,
            unit="it",
        )

    def restart(self, title: str, total: int | None, count: int) -> None:
        bar = self._bar
        bar.set_description_str(title, refresh=False)  # reset shows it
        bar.total = total  # reset keeps a known total if the new one is None
        bar.reset(total)
        bar.n = bar.initial = bar.last_print_n = count

    def show(self, metrics: dict[str, Any]) -> None:
        """Show the metrics next to the bar, which keeps a minimum width: a line that is too long is cut off."""
        self._bar.set_postfix(rounded(metrics, digits=3), refresh=False)
        if sys.stderr.isatty():  # a notebook has its own
            self._bar.bar_format = None
            parts = str(self._bar).split("|")
            if len(parts) > 2 and len(parts[1]) < BAR_WIDTH:
                self._bar.bar_format = NARROW

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


def _size(stream: Any) -> dict[str, Any]:
    """Return the size of the bars: the terminal's, or 80 columns if it reports none."""
    with suppress(AttributeError, OSError, ValueError):
        if 0 in os.get_terminal_size(stream.fileno()):  # a pseudo-terminal without a size
            return {"ncols": 80, "nrows": 24}
    return {"dynamic_ncols": True}
