"""Every form that configure_optimizers may return, and what it may not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from trainwright.engine.optimizers import SchedulerConfig, read_optimizers

SGD = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
STEP = StepLR(SGD, 1)
PLATEAU = ReduceLROnPlateau(SGD)


@pytest.mark.parametrize(
    ("returned", "optimizers", "schedulers"),
    [
        (SGD, [SGD], []),
        ([SGD], [SGD], []),
        ((SGD, SGD), [SGD, SGD], []),
        (([SGD], [STEP]), [SGD], [SchedulerConfig(STEP)]),
        ({"optimizer": SGD}, [SGD], []),
        ({"optimizer": SGD, "lr_scheduler": STEP}, [SGD], [SchedulerConfig(STEP)]),
        (
            {"optimizer": SGD, "lr_scheduler": PLATEAU, "monitor": "loss"},
            [SGD],
            [SchedulerConfig(PLATEAU, "epoch", 1, "loss")],
        ),
        (
            {"optimizer": SGD, "lr_scheduler": {"scheduler": STEP, "interval": "step", "frequency": 3, "name": "x"}},
            [SGD],
            [SchedulerConfig(STEP, "step", 3)],
        ),
        (
            ({"optimizer": SGD}, {"optimizer": SGD, "lr_scheduler": {"scheduler": STEP}}),
            [SGD, SGD],
            [SchedulerConfig(STEP)],
        ),
    ],
)
def test_forms(returned: Any, optimizers: list[Any], schedulers: list[Any]) -> None:
    assert read_optimizers(returned) == (optimizers, schedulers)


@pytest.mark.parametrize(
    ("returned", "error", "match"),
    [
        (None, TypeError, "a NoneType; accepted are an Optimizer.*forget the return"),
        ([], TypeError, "a list of"),
        ("adam", TypeError, "a str"),
        ([SGD, STEP], TypeError, r"\['SGD', 'StepLR'\]"),
        ({"lr_scheduler": STEP}, ValueError, "accepted are 'optimizer'"),
        ({"optimizer": SGD, "scheduler": STEP}, ValueError, "'lr_scheduler' and 'monitor'"),
        ({"optimizer": SGD, "lr_scheduler": {"schedule": STEP}}, ValueError, "a scheduler's dict has the keys"),
        (
            {"optimizer": SGD, "lr_scheduler": {"scheduler": STEP, "interval": "batch"}},
            ValueError,
            "choose from epoch, step",
        ),
        ({"optimizer": SGD, "lr_scheduler": {"scheduler": STEP, "frequency": 0}}, ValueError, "below 1"),
        ({"optimizer": SGD, "lr_scheduler": PLATEAU}, ValueError, "needs the metric to follow"),
        ({"optimizer": SGD, "lr_scheduler": 3}, TypeError, "a scheduler was expected, got a int"),
    ],
)
def test_refusals(returned: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        read_optimizers(returned)
