"""RichModelSummary: the table of ModelSummary, drawn by rich."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.arguments import refuses_unknown
from trainwright.callbacks.model_summary import ALIGNED, ModelSummary, Summary
from trainwright.callbacks.rich_progress_bar import require_rich

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import TrainerProtocol

UNLIMITED = 10_000
"""The columns of a file, so that a table has the width that it needs."""


class RichModelSummary(ModelSummary):
    """Prints what ModelSummary prints, as a table of rich.

    Args:
        max_depth: levels of children to show: -1 for all, 0 for the totals only.

    Raises:
        ImportError: rich is not installed.

    >>> trainer = tw.Trainer(callbacks=tw.RichModelSummary(max_depth=2), max_epochs=1)
    """

    @refuses_unknown
    def __init__(self, max_depth: int = 1) -> None:
        require_rich("RichModelSummary")
        super().__init__(max_depth)

    def _print(self, trainer: TrainerProtocol, summary: Summary) -> None:
        if not trainer.is_global_zero:
            return
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(header_style="bold")
        for title, align in zip(summary.header, ALIGNED, strict=False):
            table.add_column(title, justify="right" if align == ">" else "left", overflow="fold")
        for row in summary.rows:
            table.add_row(*map(Text, row))  # not markup, even in brackets
        console = Console()
        if not console.is_terminal and not console.is_jupyter:
            console = Console(width=UNLIMITED)
        if summary.rows:
            console.print(table)
        console.print(*summary.totals, sep="\n", markup=False, highlight=False, soft_wrap=True)
