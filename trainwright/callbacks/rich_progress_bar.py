"""RichProgressBar: a progress bar drawn by rich, and its theme."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from trainwright.arguments import refuses_unknown
from trainwright.callbacks.progress_bar import LiveProgressBar, plain, rounded

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn
    from rich.style import Style

    from trainwright.callbacks.rich_display import RichBar, RichDisplay
    from trainwright.module_hooks import AnyTrainer


@dataclass
class RichProgressBarTheme:
    """The styles of a RichProgressBar, such as "bold green" or "#6206E0", or "" for the terminal's default."""

    description: str | Style = ""
    progress_bar: str | Style = "cyan"
    progress_bar_finished: str | Style = "green"
    progress_bar_pulse: str | Style = "cyan"
    """The style of a bar whose total is unknown."""
    batch_progress: str | Style = ""
    time: str | Style = "dim"
    processing_speed: str | Style = "dim"
    metrics: str | Style = "italic"
    metrics_text_delimiter: str = " "
    """Between two metrics."""
    metrics_format: str = ""
    """The format of floats, such as ".3f", or "" for three significant digits."""

    def styles(self) -> dict[str, Any]:
        """Return the fields that are styles."""
        return {each.name: getattr(self, each.name) for each in fields(self) if not each.name.startswith("metrics_")}


class RichProgressBar(LiveProgressBar):
    """Shows batches, rate, time left and the metrics logged with prog_bar=True, drawn by rich.

    Prints and warnings are shown above the bars. Without a terminal or a notebook it
    writes the plain lines of TQDMProgressBar. Override `configure_columns` to show other columns.

    Args:
        refresh_rate: minimum number of batches between two updates. 0 shows nothing.
        leave: keep the bar of every epoch. False uses one bar for the whole training.
        theme: the styles.
        console_kwargs: arguments of rich's Console, which writes to stderr by default.
        refresh_seconds: minimum time between two updates. Metrics are only read from the device then.
        line_seconds: outside of a terminal, minimum time between two plain lines within an epoch.

    Raises:
        ImportError: rich is not installed.
        ValueError: rich does not know a style.

    >>> theme = tw.callbacks.RichProgressBarTheme(progress_bar="magenta", metrics_format=".4f")
    >>> bar = tw.RichProgressBar(theme=theme, leave=True)
    >>> tw.Trainer(callbacks=bar, max_epochs=1, enable_model_summary=False).fit(module, loader)
    """

    @refuses_unknown
    def __init__(
        self,
        refresh_rate: int = 1,
        leave: bool = False,
        theme: RichProgressBarTheme | None = None,
        console_kwargs: dict[str, Any] | None = None,
        *,
        refresh_seconds: float = 0.1,
        line_seconds: float = 30.0,
    ) -> None:
        require_rich("RichProgressBar")
        from rich import console, errors

        super().__init__(refresh_rate, leave, refresh_seconds, line_seconds)
        self.theme = RichProgressBarTheme() if theme is None else theme
        for name, style in self.theme.styles().items():
            try:
                console.Console().get_style(style)
            except errors.MissingStyle:
                raise ValueError(
                    f"{name}={style!r} of the theme is not a style, such as 'bold green' or '#6206E0'."
                ) from None
        self._console_kwargs = {"stderr": True, **(console_kwargs or {})}
        self._console: Console | None = None
        self._display: RichDisplay | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_console": None, "_display": None}

    def configure_columns(self, trainer: AnyTrainer) -> list[ProgressColumn]:
        """Return the columns, which are rich's. The metrics follow them. Override it to change them."""
        from trainwright.callbacks.rich_display import default_columns

        assert self._console is not None, "it is called during a run"
        return default_columns(self.theme.styles(), self._console.width)

    def _can_be_live(self) -> bool:
        from rich.console import Console

        console = self._console = Console(**self._console_kwargs)
        # rich takes FORCE_COLOR for a terminal, but a log with colors still has no cursor to move.
        is_terminal = getattr(console.file, "isatty", bool)() or self._console_kwargs.get("force_terminal")
        return console.is_jupyter or bool(is_terminal and console.is_interactive)

    def _lines_file(self) -> Any:
        return sys.stderr if self._console is None else self._console.file

    def _make_bar(self, title: str, total: int | None, count: int, *, leave: bool, below: int) -> RichBar:
        from trainwright.callbacks.rich_display import RichDisplay

        if self._display is None or not self._display.is_open:
            assert self._console is not None
            columns = self.configure_columns(self.trainer)
            self._display = RichDisplay(self._console, columns, self.theme.metrics, self._text)
        return self._display.add(title, total, count, leave)

    def _text(self, metrics: dict[str, Any]) -> str:
        theme, form = self.theme, self.theme.metrics_format
        shown = rounded(metrics, digits=3)
        if form:
            shown = {n: format(each, form) if isinstance(each, float) else each for n, each in plain(metrics).items()}
        return theme.metrics_text_delimiter.join(f"{name}={value}" for name, value in shown.items())


def require_rich(user: str) -> None:
    """Raise ImportError with the line to install rich, if it is missing."""
    try:
        import rich  # noqa: F401
    except ImportError as error:
        raise ImportError(f'{user} needs rich, which is not installed: pip install "trainwright[rich]".') from error
