"""ClassificationReport: the scores of every class after a validation or a test, as text, logged values and a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainwright.arguments import refuses_unknown
from trainwright.callbacks.base import Callback
from trainwright.loggers.base import Logger

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import TrainerProtocol
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer

STAGES = ("validation", "test")


COLUMNS = ("precision", "recall", "f1-score", "support")
ROWS = ("accuracy", "macro avg", "weighted avg")
"""The rows of the table below the classes."""


class ClassificationScores:
    """The scores of a confusion matrix, equal to scikit-learn's `classification_report` to the last digit.

    Args:
        confusion: how often a sample of class i was predicted as class j, as integers of shape (classes, classes).
        class_names: the names of the classes, or None for their numbers.
        zero_division: the score of a class without predictions (precision), without samples (recall), or without both (F1).
    """

    def __init__(self, confusion: Tensor, class_names: Sequence[str] | None = None, zero_division: float = 0.0) -> None:
        self.confusion = confusion
        self.class_names = [str(each) for each in (class_names or range(len(confusion)))]
        hits, predicted, actual = confusion.diagonal().double(), confusion.sum(0).double(), confusion.sum(1).double()
        self.precision = _ratio(hits, predicted, zero_division)
        """Of the samples predicted as a class, the fraction that belongs to it, in float64 of shape (classes,)."""
        self.recall = _ratio(hits, actual, zero_division)
        """Of the samples of a class, the fraction that was predicted as it, in float64 of shape (classes,)."""
        self.f1 = _ratio(2 * hits, predicted + actual, zero_division)
        """The harmonic mean of precision and recall, in float64 of shape (classes,)."""
        self.support = confusion.sum(1)
        """The number of samples by class, integers of shape (classes,)."""
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
        arrays = [score.numpy() for score in (self.precision, self.recall, self.f1)]  # whose sums are scikit-learn's
        # A class without samples and predictions does not count, as in scikit-learn and torchmetrics.
        occurs = (self.confusion.sum(0) + self.support > 0).numpy()
        averages = {
            "macro avg": [float(score[occurs].mean()) if occurs.any() else self.zero_division for score in arrays],
            "weighted avg": [float((score * weights).sum() / max(total, 1.0)) for score in arrays],
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
        if count <= 30:
            for row in range(count):
                for column in range(count):
                    color = "white" if shades[row, column] > 0.5 else "black"
                    ax.text(column, row, int(self.confusion[row, column]), ha="center", va="center", color=color)
        return ax.figure


def _ratio(above: Tensor, below: Tensor, otherwise: float) -> Tensor:
    return torch.where(below > 0, above / below.clamp(min=1), otherwise)


class ClassificationReport(Callback):
    """Reports precision, recall, F1 and support of every class, over all ranks and with each sample counted once.

    The step returns its predictions and targets in a dict.

    Args:
        class_names: the names of the classes in the order of their numbers, or None for the numbers.
        num_classes: the number of classes, by default from class_names, from the scores' last dimension, or from the highest
            number seen.
        predictions: the key of the predictions in the step's output: class numbers of shape (samples,), or scores (logits or
            probabilities) of shape (samples, classes), of which the highest counts. Two classes need two columns.
        targets: the key of the targets: class numbers of shape (samples,).
        stages: the loops to report: "validation", "test" or both.
        digits: digits of the printed table.
        verbose: print the table on rank 0: after every test, and after a fit the last validation's.
        log: log accuracy and the macro and weighted averages, such as `val_report/macro avg/f1-score`, which a ModelCheckpoint
            may monitor.
        log_classes: also log the scores of every class, such as `val_report/cat/recall`.
        picture: give the confusion matrix to loggers that take images, where matplotlib is installed.
        zero_division: the score of a class without predictions (precision), without samples (recall), or without both (F1).

    `scores["validation"]` and `scores["test"]` contain the latest ClassificationScores, on every rank. Their `plot()` draws the
    confusion matrix.

    Raises:
        TypeError: at the first batch, if the step returns something else.
        ValueError: labels that are not of the classes, scores that are NaN, or a class with the name of a row of the table.

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
        stages: str | Sequence[str] = STAGES,
        digits: int = 2,
        verbose: bool = True,
        log: bool = True,
        log_classes: bool = False,
        picture: bool = True,
        zero_division: float = 0.0,
    ) -> None:
        self.stages = (stages,) if isinstance(stages, str) else tuple(stages)
        if unknown := [each for each in self.stages if each not in STAGES]:
            raise ValueError(f"stages has {unknown[0]!r}; choose from {', '.join(STAGES)}.")
        if class_names is not None and num_classes not in (None, len(class_names)):
            raise ValueError(f"num_classes={num_classes}, but class_names has {len(class_names)} names; leave one out.")
        if class_names is not None and len(set(map(str, class_names))) < len(class_names):
            raise ValueError(f"class_names={list(class_names)!r} has a name twice; give each class its own.")
        if rows := [str(each) for each in class_names or () if str(each) in ROWS]:
            raise ValueError(
                f"class_names has {rows[0]!r}, the name of another row of the table; give the class another."
            )
        self.class_names = None if class_names is None else [str(each) for each in class_names]
        self.num_classes = num_classes if class_names is None else len(class_names)
        self.predictions, self.targets, self.digits = predictions, targets, digits
        self.verbose, self.log_values, self.log_classes, self.picture = verbose, log, log_classes, picture
        self.zero_division = zero_division
        self.scores: dict[str, ClassificationScores] = {}
        self._confusion: Tensor | None = None

    def setup(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        if stage != "predict":
            self.scores.pop("test" if stage == "test" else "validation", None)

    def on_validation_epoch_start(self, trainer: AnyTrainer, module: Module) -> None:
        self._confusion = None

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_batch_end(
        self,
        trainer: AnyTrainer,
        module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if "validation" in self.stages and not trainer.is_dummy_batch:
            self._count("validation_step", outputs)

    def on_test_batch_end(
        self,
        trainer: AnyTrainer,
        module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if "test" in self.stages and not trainer.is_dummy_batch:
            self._count("test_step", outputs)

    def on_validation_epoch_end(self, trainer: AnyTrainer, module: Module) -> None:
        if "validation" in self.stages and not trainer.sanity_checking:
            self._report(trainer, "validation", "val_report")

    def on_test_epoch_end(self, trainer: AnyTrainer, module: Module) -> None:
        if "test" in self.stages:
            self._report(trainer, "test", "test_report")
            self._show(trainer, "test")

    def on_train_end(self, trainer: AnyTrainer, module: Module) -> None:
        if "validation" in self.scores:
            self._show(trainer, "validation")

    def _count(self, step: str, outputs: Any) -> None:
        """Add a batch to the confusion matrix, on the device."""
        predicted, actual = (_labels_of(step, outputs, key) for key in (self.predictions, self.targets))
        highest = 0
        self._check_kinds(step, predicted, actual)
        if predicted.dim() == actual.dim() + 1:
            if predicted.isnan().any():
                raise ValueError(
                    f"ClassificationReport: {step} returned scores ({self.predictions!r}) that are NaN, so no class is the "
                    "highest; has the training diverged?"
                )
            highest, predicted = predicted.shape[-1], predicted.argmax(-1)
        predicted, actual = predicted.flatten().long(), actual.flatten().long()
        if predicted.shape != actual.shape:
            raise ValueError(
                f"ClassificationReport: {step} returned {len(predicted)} predictions ({self.predictions!r}) and {len(actual)} "
                f"targets ({self.targets!r}). Return one of each for a sample."
            )
        if not len(actual):
            return
        # NOTE: waits for the device at every batch, so that the error names a class out of range.
        lowest, seen = (int(each) for each in torch.stack([actual, predicted]).aminmax())
        count = self.num_classes or max(highest, seen + 1)
        if lowest < 0 or seen >= count:
            raise ValueError(
                f"ClassificationReport: {step} returned class {lowest if lowest < 0 else seen}, but the classes are 0 to "
                f"{count - 1}; leave out ignored samples, or pass num_classes=."
            )
        matrix = torch.bincount(actual * count + predicted, minlength=count * count).view(count, count)
        self._confusion = matrix if self._confusion is None else _sum(self._confusion, matrix)

    def _check_kinds(self, step: str, predicted: Tensor, actual: Tensor) -> None:
        """Refuse tensors of other kinds and shapes than scores or class numbers (TypeError)."""
        are_scores = predicted.dim() == actual.dim() + 1
        if are_scores:
            is_accepted = predicted.dim() == 2 and predicted.shape[1] > 1 and not predicted.is_complex()
        else:
            is_accepted = _holds_numbers(predicted)
        if is_accepted and _holds_numbers(actual):
            return
        kinds = [
            f"{str(each.dtype).removeprefix('torch.')} of shape {tuple(each.shape)}" for each in (predicted, actual)
        ]
        raise TypeError(
            f"ClassificationReport: {step} returned predictions ({self.predictions!r}) of {kinds[0]} and targets "
            f"({self.targets!r}) of {kinds[1]}; expected class numbers (integers) of shape (samples,), and as predictions "
            "also scores of shape (samples, classes) with two classes or more. Turn one probability or logit for each sample "
            "into (scores > threshold).long(), one-hot targets into target.argmax(1), float targets into target.long(), and "
            "scores of further dimensions into scores.argmax(1)."
        )

    def _report(self, trainer: TrainerProtocol, stage: str, prefix: str) -> None:
        """Sum over the ranks, and log. Collective."""
        confusion = self._sum_of_ranks(trainer)
        if not len(confusion):
            self.scores.pop(stage, None)
            return
        scores = self.scores[stage] = ClassificationScores(confusion, self.class_names, self.zero_division)
        if self.log_values:
            table = scores.as_dict()
            self.log(f"{prefix}/accuracy", table["accuracy"])
            names = [*(scores.class_names if self.log_classes else ()), "macro avg", "weighted avg"]
            for name in names:
                for column in ("precision", "recall", "f1-score"):
                    self.log(f"{prefix}/{name}/{column}", table[name][column])
        takers = [each for each in trainer.loggers if type(each).log_images is not Logger.log_images]
        if self.picture and takers and trainer.is_global_zero and importlib.util.find_spec("matplotlib"):
            pixels = _pixels(scores.plot())
            for logger in takers:
                logger.log_images({f"{prefix}/confusion": pixels}, trainer.state.logged_step)

    def _sum_of_ranks(self, trainer: TrainerProtocol) -> Tensor:
        """Return the confusion matrix of all ranks. Collective."""
        confusion = torch.zeros(0, 0, dtype=torch.long) if self._confusion is None else self._confusion.cpu()
        # Only cells with samples are sent: with many classes most are empty.
        cells = confusion.nonzero()
        entries = torch.cat([cells, confusion[cells[:, 0], cells[:, 1]].unsqueeze(1)], 1).tolist()
        parts = trainer.engine.ranks.exchange([len(confusion), entries], "ClassificationReport")
        count = self.num_classes or max(size for size, _ in parts)
        total = torch.zeros(count, count, dtype=torch.long)
        for actual, predicted, number in chain.from_iterable(entries for _, entries in parts):
            total[actual, predicted] += number
        return total

    def _show(self, trainer: TrainerProtocol, stage: str) -> None:
        if self.verbose:
            scores = self.scores.get(stage)
            trainer.print(f"{stage}: no samples" if scores is None else f"{stage}:\n{scores.text(self.digits)}")


def _holds_numbers(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _labels_of(step: str, outputs: Any, key: str) -> Tensor:
    if not isinstance(outputs, Mapping) or not isinstance(outputs.get(key), Tensor):
        found = (
            f"a dict with {', '.join(map(repr, outputs))}" if isinstance(outputs, Mapping) else type(outputs).__name__
        )
        raise TypeError(
            f"ClassificationReport needs the tensor {key!r} in what {step} returns, which is {found}. Return {{'preds': "
            "scores, 'target': labels}, or name other keys by predictions= and targets=."
        )
    value: Tensor = outputs[key].detach()
    return value


def _sum(left: Tensor, right: Tensor) -> Tensor:
    """Add two square matrices, the smaller one padded with zeros."""
    small, large = sorted((left, right), key=len)
    total = large.clone()
    total[: len(small), : len(small)] += small
    return total


def _pixels(figure: Any) -> Any:
    """Return a figure as an array of (height, width, 3)."""
    import numpy
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return numpy.asarray(canvas.buffer_rgba())[..., :3].copy()
