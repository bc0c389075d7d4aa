"""self.log: names, reductions, defaults and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small import QUIET, Classifier, loss_of, make_loader
from torch import Tensor
from torchmetrics import MeanMetric

import trainwright as tw


def fit(log: Callable[[Any, Any, int, Tensor], None], **settings: Any) -> tw.Trainer:
    class Logging(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.metric = MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = loss_of(self.net, batch)
            log(self, batch, batch_idx, loss)
            return loss

    trainer = tw.Trainer(**{"max_epochs": 1, **QUIET, **settings})
    trainer.fit(Logging(), make_loader(42, 4))
    return trainer


def test_the_epoch_mean_is_weighted_by_the_batch_size() -> None:
    values: list[tuple[float, int]] = []

    def log(module: Any, batch: Any, index: int, loss: Tensor) -> None:
        values.append((loss.item(), len(batch[0])))
        module.log("mean", loss, on_epoch=True, on_step=False)
        module.log("total", len(batch[0]), on_epoch=True, on_step=False, reduce_fx="sum")
        module.log("least", loss, on_epoch=True, on_step=False, reduce_fx="min")
        module.log("most", loss, on_epoch=True, on_step=False, reduce_fx="max")
        module.log("unweighted", float(index), on_epoch=True, on_step=False, batch_size=1)

    trainer = fit(log)
    metrics = {name: trainer.run.logbook.monitored(name, "the test") for name in trainer.callback_metrics}
    assert [size for _, size in values] == [4] * 10 + [2]
    assert metrics["mean"] == pytest.approx(sum(value * size for value, size in values) / 42, rel=1e-12)
    assert (metrics["least"], metrics["most"]) == (min(values)[0], max(values)[0])
    assert metrics["total"] == 42
    assert metrics["unweighted"] == pytest.approx(5.0)


def test_metrics_have_the_precision_that_was_logged() -> None:
    """Users compare them with their tensors, so values for comparisons and files are not rounded."""

    def log(module: Any, batch: Any, index: int, loss: Tensor) -> None:
        for name, value in (("single", loss), ("half", loss.bfloat16()), ("double", loss.double()), ("number", 0.1)):
            module.log(name, value, on_step=name != "number", on_epoch=name != "half")

    trainer = fit(log)
    for metrics in (trainer.callback_metrics, trainer.logged_metrics):
        kinds = {name: value.dtype for name, value in metrics.items()}
        assert {name: kind for name, kind in kinds.items() if kind != torch.float32} == {
            name: torch.float64 for name in kinds if name.startswith("double")
        }
    assert trainer.run.logbook.monitored("number", "the test") == pytest.approx(0.1, rel=1e-12)
    assert torch.allclose(trainer.callback_metrics["single"], trainer.callback_metrics["double"].float())


def test_unequal_leading_sizes_warn_and_name_the_remedy() -> None:
    class Odd(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("x", 1.0)

    with pytest.warns(UserWarning, match=r"leading sizes \[3, 5\].*batch_size="):
        tw.Trainer(**QUIET).validate(Odd(), [(torch.zeros(3, 8), torch.zeros(5))])


def test_numbers_of_other_kinds_are_logged() -> None:
    def log(module: Any, batch: Any, index: int, loss: Tensor) -> None:
        module.log("numpy", np.float32(2.0))
        module.log("flag", True)

    assert fit(log).callback_metrics["numpy"] == 2.0

    class Opaque(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("x", 1.0)

    with pytest.warns(UserWarning, match="found no tensor in this batch .an object"):
        tw.Trainer(**QUIET).validate(Opaque(), [object()])
