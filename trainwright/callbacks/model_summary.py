"""ModelSummary: the module's children, their kinds and their parameters, printed before training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from trainwright.callbacks.base import Callback

if TYPE_CHECKING:
    from trainwright.module import Module
    from trainwright.trainer.trainer import Trainer


class ModelSummary(Callback):
    """Prints a table of the module's children on rank 0.

    Args:
        max_depth: how many levels of children to show; 0 shows the totals only.
    """

    def __init__(self, max_depth: int = 1) -> None:
        if max_depth < 0:
            raise ValueError(f"max_depth={max_depth} is below 0; pass how many levels of children to show.")
        self.max_depth = max_depth

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        trainer.print(summarize(module, self.max_depth))


def summarize(module: nn.Module, max_depth: int = 1) -> str:
    """Return the table: name, type and number of parameters of each child, and the totals."""
    rows = [
        (name, type(child).__name__, _count(child))
        for name, child in module.named_modules()
        if name and name.count(".") < max_depth
    ]
    widths = [max([len(str(row[column])) for row in rows] + [4]) for column in (0, 1)]
    lines = [f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {count:>11,}" for name, kind, count in rows]
    header = f"{'Name':<{widths[0]}}  {'Type':<{widths[1]}}  {'Parameters':>11}"
    total = _count(module)
    trainable = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    size = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    footer = f"{total:,} parameters, {trainable:,} of them trained, {size / 2**20:.3f} MiB"
    return "\n".join([header, *lines, footer] if rows else [footer])


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
