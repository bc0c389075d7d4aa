"""ClassificationReport: equal to scikit-learn's, on one process and on two."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from jobs import run_job
from small import QUIET, Classifier, make_data, make_loader
from torch.utils.data import DataLoader

import trainwright as tw
from trainwright.callbacks import ClassificationScores

NAMES = ["cat", "dog", "a bird of prey"]
SAMPLES = 45  # two ranks have batches of other sizes in the last round


class Reports(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"preds": self.net(batch[0]), "target": batch[1]}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return {"label": batch[1], "guess": self.net(batch[0]).argmax(1)}


class Images(tw.Logger):
    def __init__(self) -> None:
        self.shapes: dict[str, Any] = {}

    def log_images(self, values: Any, step: int | None = None, **options: Any) -> None:
        self.shapes |= {name: (value.shape[2], value.min() < value.max()) for name, value in values.items()}


def expected(module: Classifier) -> tuple[Any, Any]:
    x, y = (torch.stack(part) for part in zip(*make_data(SAMPLES), strict=True))
    return y.numpy(), module.net(x).argmax(1).detach().numpy()


def report(folder: Path) -> Any:
    seen = tw.ClassificationReport(NAMES, log_classes=True, verbose=False, stages="validation")
    tested = tw.ClassificationReport(predictions="guess", targets="label", stages=["test"])
    trainer = tw.Trainer(**{**QUIET, "devices": "auto"}, max_epochs=2, callbacks=[seen, tested])
    module = Reports()
    trainer.fit(module, make_loader(8), DataLoader(make_data(SAMPLES), 4))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.test(module, DataLoader(make_data(SAMPLES), 4), verbose=False)
    scores = {stage: each for callback in (seen, tested) for stage, each in callback.scores.items()}
    return {
        "weights": dict(module.state_dict()),
        "logged": logged,
        "tables": {stage: each.as_dict() for stage, each in scores.items()},
        "texts": {stage: each.text(3) for stage, each in scores.items()},
        "confusion": scores["test"].confusion,
    }


def check(found: Any) -> None:
    from sklearn.metrics import classification_report, confusion_matrix  # which takes a second

    module = Reports()
    module.load_state_dict(found["weights"])
    actual, predicted = expected(module)
    options = {"labels": range(3), "zero_division": 0.0}
    table = classification_report(actual, predicted, target_names=NAMES, output_dict=True, **options)
    assert found["tables"]["validation"] == table
    assert found["texts"]["validation"] == classification_report(
        actual, predicted, target_names=NAMES, digits=3, **options
    )
    assert found["texts"]["test"] == classification_report(actual, predicted, digits=3, **options)
    assert found["confusion"].tolist() == confusion_matrix(actual, predicted, labels=range(3)).tolist()
    assert found["logged"]["val_report/accuracy"] == pytest.approx(table["accuracy"])
    assert found["logged"]["val_report/macro avg/f1-score"] == pytest.approx(table["macro avg"]["f1-score"])
    assert found["logged"]["val_report/dog/recall"] == pytest.approx(table["dog"]["recall"])


def test_report_equals_scikit_learn_on_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(tmp_path)
    check(found)
    assert "test:\n              precision    recall" in capsys.readouterr().out


def test_report_counts_every_sample_once_on_two_ranks(tmp_path: Path) -> None:
    first, second = run_job(report, 2, tmp_path)
    assert (first["tables"], first["texts"]) == (second["tables"], second["texts"])
    check(first)


@pytest.mark.parametrize("seed", range(5))
def test_scores_are_scikit_learns_to_the_last_digit(seed: int) -> None:
    from sklearn.metrics import classification_report, confusion_matrix

    random = numpy.random.default_rng(seed)
    count = int(random.integers(1, 9))
    actual, predicted = random.integers(0, count, (2, int(random.integers(1, 60))))
    confusion = torch.from_numpy(confusion_matrix(actual, predicted, labels=range(count)))
    options = {"labels": range(count), "zero_division": 0.0}
    scores = ClassificationScores(confusion)
    table = classification_report(actual, predicted, output_dict=True, **options)
    # Without labels=, the averages are over the classes that occur.
    occurring = classification_report(actual, predicted, output_dict=True, zero_division=0.0)
    assert scores.as_dict() == {**table, "macro avg": occurring["macro avg"]}
    text = classification_report(actual, predicted, digits=5, **options)
    assert (
        scores.text(5).split() == re.sub(r"(\d+)\.0$", r"\1", text, flags=re.MULTILINE).split()
    )  # some supports are floats


def test_a_picture_goes_to_loggers_that_take_one() -> None:
    images = Images()
    callback = tw.ClassificationReport(NAMES, verbose=False, stages="validation")
    trainer = tw.Trainer(**{**QUIET, "logger": [images, tw.Logger()]}, max_epochs=1, callbacks=callback)
    trainer.fit(Reports(), make_loader(8), make_loader(12))
    assert images.shapes == {"val_report/confusion": (3, True)}
    figure = callback.scores["validation"].plot()
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == NAMES


@pytest.mark.parametrize(("settings", "text"), [
    ({"stages": "train"}, "stages has 'train'; choose from validation, test"),
    ({"class_names": ["a", "b"], "num_classes": 3}, "num_classes=3, but class_names has 2"),
])  # fmt: skip
def test_report_rejects_wrong_settings(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        tw.ClassificationReport(**settings)


class Returns(Classifier):
    """Its test step returns a given value."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.output


def report_of(predictions: Any, targets: Any, **options: Any) -> tw.ClassificationReport:
    return report_on({"preds": predictions, "target": targets}, **options)


def report_on(output: Any, **options: Any) -> tw.ClassificationReport:
    report = tw.ClassificationReport(**options)
    tw.Trainer(**QUIET, callbacks=report).test(Returns(output), make_loader(4), verbose=False)
    return report


LABELS = torch.tensor([0, 1])


@pytest.mark.parametrize(("output", "options", "kind", "text"), [
    (None, {}, TypeError, "a dict with the tensors 'preds' and 'target' from test_step, which returned NoneType"),
    ({"scores": LABELS, "target": LABELS}, {}, TypeError, r"which returned \['scores', 'target'\]"),
    ({"preds": LABELS, "target": LABELS[:1]}, {}, ValueError, "returned 2 predictions .* and 1 targets"),
    ({"preds": LABELS, "target": LABELS}, {"num_classes": 1}, ValueError, "class 1, but the classes are 0 to 0"),
    ({"preds": LABELS, "target": LABELS - 100}, {}, ValueError, "returned class -100"),
])  # fmt: skip
def test_report_rejects_wrong_outputs(output: Any, options: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        report_on(output, **options)


def test_labels_may_have_narrow_types() -> None:
    labels = torch.arange(20, dtype=torch.uint8)
    scores = report_of(labels, labels, num_classes=21).scores["test"]
    assert scores.as_dict()["macro avg"]["f1-score"] == 1.0  # class 20 does not occur
    scores = report_of(labels, labels, num_classes=20).scores["test"]
    assert (scores.accuracy, scores.confusion.tolist()) == (1.0, torch.eye(20, dtype=torch.long).tolist())
    assert report_of(labels.short(), labels.int()).scores["test"].accuracy == 1.0
    assert report_of(labels > 9, labels > 9).scores["test"].support.tolist() == [10, 10]


@pytest.mark.parametrize(("predictions", "targets", "given"), [
    (torch.zeros(4, 1), torch.zeros(4).long(), r"float32 of shape \(4, 1\)"),
    (torch.zeros(4), torch.zeros(4).long(), r"float32 of shape \(4,\)"),
    (torch.zeros(4).long(), torch.zeros(4), r"targets \('target'\) of torch.float32 of shape \(4,\)"),
    (torch.zeros(4, 3), torch.zeros(4, 3).long(), r"targets \('target'\) of torch.int64 of shape \(4, 3\)"),
    (torch.zeros(4, 3, 3, 3), torch.zeros(4, 3, 3).long(), r"float32 of shape \(4, 3, 3, 3\)"),
], ids=["one column", "probabilities", "float targets", "one-hot", "pictures"])  # fmt: skip
def test_other_kinds_of_scores_are_rejected(predictions: Any, targets: Any, given: str) -> None:
    with pytest.raises(TypeError, match=given + r".*expected class numbers .* Turn one probability"):
        report_of(predictions, targets)


def test_test_without_samples_has_no_scores(capsys: pytest.CaptureFixture[str]) -> None:
    nothing = torch.zeros(0).long()
    assert report_of(nothing, nothing).scores == {}
    assert "test: no samples" in capsys.readouterr().out


def test_a_prediction_keeps_the_scores_of_a_validation() -> None:
    report = tw.ClassificationReport(verbose=False)
    trainer = tw.Trainer(**QUIET, callbacks=report)
    trainer.validate(Reports(), DataLoader(make_data(SAMPLES), 4), verbose=False)
    trainer.predict(Reports(), make_loader(4))
    assert list(report.scores) == ["validation"]
