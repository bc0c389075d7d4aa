"""The logger contract. A logger is called on rank 0 only, apart from `log_dir`, which every rank knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class Logger:
    """Override what the logger can keep; the rest does nothing."""

    log_dir: str | None = None
    """The folder of this run; None before `start`, or where the logger has none."""

    def start(self, agreed: Callable[[str], str], *, is_writer: bool) -> None:
        """Choose the place of this run. Collective: called at each run's beginning, on every rank.

        `agreed(text)` returns rank 0's text on every rank.
        """

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one row."""

    def flush(self) -> None:
        """Make what was logged durable; called at the end of each epoch."""

    def close(self) -> None:
        """Flush and close; called at the end of a run, after a failure too."""
