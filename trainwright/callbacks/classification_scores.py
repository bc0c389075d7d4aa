"""ClassificationScores: precision, recall, F1 and support of each class, their averages, and the confusion matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

COLUMNS = ("precision", "recall", "f1-score", "support")
ROWS = ("accuracy", "macro avg", "weighted avg")
"""The rows of the table below those of the classes."""


class ClassificationScores:
    """The scores of a confusion matrix, equal to scikit-learn's `classification_report` to the last digit.

    Args:
        confusion: how often a sample of class i was predicted as class j; integers of shape (classes, classes).
        class_names: a name for each class; None for the numbers.
        zero_division: the score of a class without predictions (precision), without samples (recall), or without both (F1).
    """

    def __init__(self, confusion: Tensor, class_names: Sequence[str] | None = None, zero_division: float = 0.0) -> None:
        self.confusion = confusion
        self.class_names = [str(each) for each in (class_names or range(len(confusion)))]
        hits, predicted, actual = confusion.diagonal().double(), confusion.sum(0).double(), confusion.sum(1).double()
        self.precision = _ratio(hits, predicted, zero_division)
        """Of the samples predicted as a class, the fraction that is of it; float64 of shape (classes,)."""
        self.recall = _ratio(hits, actual, zero_division)
        """Of the samples of a class, the fraction that was predicted as it; float64 of shape (classes,)."""
        self.f1 = _ratio(2 * hits, predicted + actual, zero_division)
        """The harmonic mean of precision and recall; float64 of shape (classes,)."""
        self.support = confusion.sum(1)
        """The samples of each class; integers of shape (classes,)."""
        total = int(self.support.sum())
        self.zero_division = zero_division
        self.accuracy = float(hits.sum() / total) if total else zero_division

    def as_dict(self) -> dict[str, Any]:
        """Return the scores as scikit-learn's `output_dict` has them."""
        table: dict[str, Any] = {}
        for index, name in enumerate(self.class_names):
            values = self.precision[index], self.recall[index], self.f1[index], self.support[index]
            table[name] = {column: float(value) for column, value in zip(COLUMNS, values, strict=True)}
        table["accuracy"] = self.accuracy
        weights = self.support.double().numpy()
        total = float(weights.sum())
        each = [score.numpy() for score in (self.precision, self.recall, self.f1)]  # whose sums are scikit-learn's
        # A class without samples and predictions does not count, as in scikit-learn and torchmetrics.
        occurs = (self.confusion.sum(0) + self.support > 0).numpy()
        averages = {
            "macro avg": [float(score[occurs].mean()) if occurs.any() else self.zero_division for score in each],
            "weighted avg": [float((score * weights).sum() / max(total, 1.0)) for score in each],
        }
        for name, scores in averages.items():
            table[name] = dict(zip(COLUMNS, [*scores, total], strict=True))
        return table

    def text(self, digits: int = 2) -> str:
        """Return the table as scikit-learn prints it, with this number of digits."""
        table = self.as_dict()
        width = max(len(name) for name in (*self.class_names, "weighted avg"))
        lines = [" " * width + " " + "".join(f" {column:>9}" for column in COLUMNS), ""]

        def row(name: str) -> str:
            *scores, support = table[name].values()
            return f"{name:>{width}} " + "".join(f" {score:>9.{digits}f}" for score in scores) + f" {int(support):>9}"

        lines += [row(name) for name in self.class_names]
        accuracy = f" {'':>9} {'':>9} {self.accuracy:>9.{digits}f} {int(self.support.sum()):>9}"
        lines += ["", f"{'accuracy':>{width}} {accuracy}", row("macro avg"), row("weighted avg")]
        return "\n".join(lines) + "\n"

    def plot(self, ax: Any = None) -> Any:
        """Draw the confusion matrix with matplotlib and return the figure; a cell's shade is its fraction of its class.

        Args:
            ax: the matplotlib Axes to draw on; None for a new figure.
        """
        from matplotlib.figure import Figure

        count = len(self.class_names)
        if ax is None:
            side = min(3.0 + 0.45 * count, 16.0)
            ax = Figure((side, side), layout="constrained").add_subplot()
        shades = self.confusion / self.support.clamp(min=1).unsqueeze(1)
        ax.imshow(shades.tolist(), cmap="Blues", vmin=0.0, vmax=1.0)
        ax.set_xticks(range(count), self.class_names, rotation=45, ha="right", rotation_mode="anchor")
        ax.set_yticks(range(count), self.class_names)
        ax.set(xlabel="predicted", ylabel="actual", title=f"accuracy {self.accuracy:.3f}")
        # Numbers in smaller cells could not be read.
        if count <= 30:
            for row in range(count):
                for column in range(count):
                    color = "white" if shades[row, column] > 0.5 else "black"
                    ax.text(column, row, int(self.confusion[row, column]), ha="center", va="center", color=color)
        return ax.figure


def _ratio(above: Tensor, below: Tensor, otherwise: float) -> Tensor:
    return torch.where(below > 0, above / below.clamp(min=1), otherwise)
