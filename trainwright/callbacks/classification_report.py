"""ClassificationReport: the scores of every class after a validation or a test, as text, logged values and a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor, nn

from trainwright.arguments import refuses_unknown
from trainwright.callbacks.base import Callback
from trainwright.faults.failing_loggers import outlived
from trainwright.loggers.base import Logger

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import TrainerProtocol
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer

STAGES = {"validation": "val_report", "test": "test_report"}
"""The stages, and the prefix of their logged values."""
COLUMNS = ("precision", "recall", "f1-score", "support")
ROWS = ("accuracy", "macro avg", "weighted avg")
"""The rows of the table below the classes."""
EMPTY = torch.zeros(0, 0, dtype=torch.long)


class ClassificationScores:
    """The scores of a confusion matrix, equal to scikit-learn's `classification_report` to the last digit.

    A score without samples to divide by is 0.

    Args:
        confusion: how often a sample of class i was predicted as class j, as integers of shape (classes, classes).
        class_names: the names of the classes, or None for their numbers.
    """

    def __init__(self, confusion: Tensor, class_names: Sequence[str] | None = None) -> None:
        self.confusion = confusion
        self.class_names = [str(name) for name in (class_names or range(len(confusion)))]
        hits, predicted, actual = confusion.diagonal().double(), confusion.sum(0).double(), confusion.sum(1).double()
        self.precision = hits / predicted.clamp(min=1)
        """Of the samples predicted as a class, the fraction that belongs to it, in float64 of shape (classes,)."""
        self.recall = hits / actual.clamp(min=1)
        """Of the samples of a class, the fraction that was predicted as it, in float64 of shape (classes,)."""
        self.f1 = 2 * hits / (predicted + actual).clamp(min=1)
        """The harmonic mean of precision and recall, in float64 of shape (classes,)."""
        self.support = confusion.sum(1)
        """The number of samples by class, integers of shape (classes,)."""
        self.accuracy = float(hits.sum() / actual.sum().clamp(min=1))

    def as_dict(self) -> dict[str, Any]:
        """Return the scores as scikit-learn's `output_dict` has them."""
        columns = [scores.tolist() for scores in (self.precision, self.recall, self.f1, self.support.double())]
        rows = zip(self.class_names, zip(*columns, strict=True), strict=True)
        table: dict[str, Any] = {name: dict(zip(COLUMNS, row, strict=True)) for name, row in rows}
        weights = self.support.double().numpy()
        arrays = [scores.numpy() for scores in (self.precision, self.recall, self.f1)]  # whose sums are scikit-learn's
        # A class without samples and predictions does not count, as in scikit-learn and torchmetrics.
        occurs = (self.confusion.sum(0) + self.support > 0).numpy()
        total = float(weights.sum())
        macro = [float(scores[occurs].mean()) for scores in arrays]
        weighted = [float((scores * weights).sum() / total) for scores in arrays]
        averages = [dict(zip(COLUMNS, [*scores, total], strict=True)) for scores in (macro, weighted)]
        return table | dict(zip(ROWS, [self.accuracy, *averages], strict=True))

    def text(self, digits: int = 2) -> str:
        """Return the table as scikit-learn prints it, with this number of digits."""
        table = self.as_dict()
        width = max(len(name) for name in (*self.class_names, "weighted avg"))

        def row(name: str) -> str:
            *scores, support = table[name].values()
            return f"{name:>{width}} " + "".join(f" {score:>9.{digits}f}" for score in scores) + f" {int(support):>9}"

        header = " " * width + " " + "".join(f" {column:>9}" for column in COLUMNS)
        accuracy = f"{'accuracy':>{width}}  {'':>9} {'':>9} {self.accuracy:>9.{digits}f} {int(self.support.sum()):>9}"
        lines = [header, "", *map(row, self.class_names), "", accuracy, row("macro avg"), row("weighted avg")]
        return "\n".join(lines) + "\n"

    def plot(self, ax: Any = None) -> Any:
        """Draw the confusion matrix with matplotlib and return the figure. A cell's shade is its fraction of its class.

        Args:
            ax: the matplotlib Axes to draw on, or None for a new figure.
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
        for row, column in product(range(count), repeat=2) if count <= 30 else ():
            color = "white" if shades[row, column] > 0.5 else "black"
            ax.text(column, row, int(self.confusion[row, column]), ha="center", va="center", color=color)
        return ax.figure


class ClassificationReport(Callback):
    """Reports precision, recall, F1 and support of every class, over all ranks and with each sample counted once.

    The step returns its predictions and targets in a dict. The callback logs the accuracy and the macro and weighted averages,
    such as `val_report/macro avg/f1-score`, which a ModelCheckpoint may monitor. Loggers that take images get the confusion
    matrix, if matplotlib is installed.

    Args:
        class_names: the names of the classes in the order of their numbers, or None for the numbers.
        num_classes: the number of classes, by default from class_names, from the scores' last dimension, or from the highest
            number seen.
        predictions: the key of the predictions in the step's output: class numbers of shape (samples,), or scores (logits or
            probabilities) of shape (samples, classes), of which the highest counts. Two classes need two columns.
        targets: the key of the targets: class numbers of shape (samples,).
        stages: the loops to report: "validation", "test" or both.
        verbose: print the table on rank 0: after every test, and after a fit the last validation's.
        log_classes: also log the scores of every class, such as `val_report/cat/recall`.

    `scores["validation"]` and `scores["test"]` contain the latest ClassificationScores, on every rank. Their `plot()` draws the
    confusion matrix.

    Raises:
        TypeError: at the first batch, if the step returns something else.
        ValueError: labels that are not of the classes.

    >>> class Reported(Classifier):
    ...     def test_step(self, batch, batch_idx):
    ...         inputs, targets = batch
    ...         return {"preds": self(inputs), "target": targets}
    >>> report = tw.ClassificationReport(class_names=["cat", "dog", "bird"], verbose=False)
    >>> metrics = tw.Trainer(callbacks=report).test(Reported(), test_loader, verbose=False)
    >>> int(report.scores["test"].support.sum())
    32
    """

    @refuses_unknown
    def __init__(
        self,
        class_names: Sequence[str] | None = None,
        num_classes: int | None = None,
        predictions: str = "preds",
        targets: str = "target",
        stages: str | Sequence[str] = tuple(STAGES),
        verbose: bool = True,
        log_classes: bool = False,
    ) -> None:
        self.stages = (stages,) if isinstance(stages, str) else tuple(stages)
        if unknown := [stage for stage in self.stages if stage not in STAGES]:
            raise ValueError(f"stages has {unknown[0]!r}; choose from {', '.join(STAGES)}.")
        self.class_names = None if class_names is None else [str(name) for name in class_names]
        if self.class_names is not None:
            if num_classes not in (None, len(self.class_names)):
                raise ValueError(f"num_classes={num_classes}, but class_names has {len(self.class_names)}; pass one.")
            num_classes = len(self.class_names)
        self.num_classes, self.predictions, self.targets = num_classes, predictions, targets
        self.verbose, self.log_classes = verbose, log_classes
        self.scores: dict[str, ClassificationScores] = {}
        self._confusion = EMPTY

    def setup(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        if stage != "predict":
            self.scores.pop("test" if stage == "test" else "validation", None)
        self._confusion = EMPTY  # an evaluation that failed may have left some

    def on_validation_batch_end(
        self, trainer: AnyTrainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._count(trainer, "validation", outputs)

    def on_test_batch_end(
        self, trainer: AnyTrainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._count(trainer, "test", outputs)

    def on_validation_epoch_end(self, trainer: AnyTrainer, module: Module) -> None:
        self._report(trainer, "validation")

    def on_test_epoch_end(self, trainer: AnyTrainer, module: Module) -> None:
        self._report(trainer, "test")
        self._print(trainer, "test")

    def on_train_end(self, trainer: AnyTrainer, module: Module) -> None:
        if "validation" in self.scores:
            self._print(trainer, "validation")

    def _print(self, trainer: TrainerProtocol, stage: str) -> None:
        if self.verbose and stage in self.stages:
            scores = self.scores.get(stage)
            trainer.print(f"{stage}: no samples" if scores is None else f"{stage}:\n{scores.text()}")

    def _count(self, trainer: TrainerProtocol, stage: str, outputs: Any) -> None:
        """Add a batch to the confusion matrix, on the device."""
        if stage not in self.stages or trainer.is_dummy_batch:
            return
        step = f"{stage}_step"
        predicted, actual = self._labels(step, outputs)
        if predicted.shape != actual.shape:
            raise ValueError(
                f"ClassificationReport: {step} returned {len(predicted)} predictions ({self.predictions!r}) and {len(actual)} "
                f"targets ({self.targets!r}). Return one of each for a sample."
            )
        if not len(actual):
            return
        # NOTE: waits for the device at every batch, so that the error names a class out of range.
        lowest, highest = (int(label) for label in torch.stack([actual, predicted]).aminmax())
        count = self.num_classes or max(len(self._confusion), highest + 1)
        if lowest < 0 or highest >= count:
            raise ValueError(
                f"ClassificationReport: {step} returned class {lowest if lowest < 0 else highest}, but the classes are 0 to "
                f"{count - 1}; leave out ignored samples, or pass num_classes=."
            )
        batch = torch.bincount(actual * count + predicted, minlength=count * count).view(count, count)
        self._confusion = batch + _padded(self._confusion.to(batch.device), count)

    def _labels(self, step: str, outputs: Any) -> tuple[Tensor, Tensor]:
        """Return the numbers of the predicted and the actual classes in a step's output."""
        keys = self.predictions, self.targets
        if not isinstance(outputs, Mapping) or not all(isinstance(outputs.get(key), Tensor) for key in keys):
            found = list(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
            raise TypeError(
                f"ClassificationReport needs a dict with the tensors {keys[0]!r} and {keys[1]!r} from {step}, which returned "
                f"{found}. Return {{'preds': scores, 'target': labels}}, or name other keys by predictions= and targets=."
            )
        predicted, actual = (outputs[key].detach() for key in keys)
        has_scores = predicted.dim() == 2 and predicted.shape[1] > 1 and actual.dim() == 1
        if actual.is_floating_point() or not (
            has_scores or (predicted.dim() == actual.dim() and not predicted.is_floating_point())
        ):
            kinds = [f"{tensor.dtype} of shape {tuple(tensor.shape)}" for tensor in (predicted, actual)]
            raise TypeError(
                f"ClassificationReport: {step} returned predictions ({self.predictions!r}) of {kinds[0]} and targets "
                f"({self.targets!r}) of {kinds[1]}; expected class numbers (integers) of shape (samples,), and as predictions "
                "also scores of shape (samples, classes) with two classes or more. Turn one probability or logit for each "
                "sample into (scores > threshold).long(), one-hot targets into target.argmax(1), and float targets into "
                "target.long()."
            )
        if has_scores:
            if self.num_classes is None:
                self._confusion = _padded(self._confusion, predicted.shape[1])
            predicted = predicted.argmax(1)
        return predicted.flatten().long(), actual.flatten().long()

    def _report(self, trainer: TrainerProtocol, stage: str) -> None:
        """Sum over the ranks, and log. Collective."""
        if stage not in self.stages:
            return
        confusion, self._confusion = self._confusion.cpu(), EMPTY
        if trainer.sanity_checking:
            return
        count = self.num_classes or max(trainer.engine.ranks.exchange(len(confusion), "ClassificationReport"))
        total = trainer.engine.reduce(_padded(confusion, count), "sum")
        if not total.any():
            return
        scores = self.scores[stage] = ClassificationScores(total, self.class_names)
        table, prefix = scores.as_dict(), STAGES[stage]
        self.log(f"{prefix}/accuracy", scores.accuracy)
        for name in [*(scores.class_names if self.log_classes else ()), "macro avg", "weighted avg"]:
            self.log_dict({f"{prefix}/{name}/{column}": table[name][column] for column in COLUMNS[:3]})
        loggers = [logger for logger in trainer.loggers if type(logger).log_images is not Logger.log_images]
        if loggers and trainer.is_global_zero and importlib.util.find_spec("matplotlib"):
            from matplotlib.backends.backend_agg import FigureCanvasAgg

            canvas: Any = FigureCanvasAgg(scores.plot())
            canvas.draw()
            pixels = numpy.asarray(canvas.buffer_rgba())[..., :3].copy()
            for logger in loggers:
                outlived(logger, "log_images", {f"{prefix}/confusion": pixels}, trainer.state.logged_step)


def _padded(matrix: Tensor, size: int) -> Tensor:
    """Return a square matrix with zeros up to a size, at least its own."""
    missing = max(size - len(matrix), 0)
    return nn.functional.pad(matrix, (0, missing, 0, missing))
