"""Every form that configure_optimizers may return, and the errors for others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from trainwright.engine.optimizers import SchedulerConfig, may_use_closure, needs_closure, read_optimizers

SGD = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
STEP = StepLR(SGD, 1)
PLATEAU = ReduceLROnPlateau(SGD)


@pytest.mark.parametrize(("returned", "optimizers", "schedulers"), [
    (SGD, [SGD], []),
    ([SGD], [SGD], []),
    ((SGD, SGD), [SGD, SGD], []),
    (([SGD], [STEP]), [SGD], [SchedulerConfig(STEP)]),
    (((SGD,), (STEP,)), [SGD], [SchedulerConfig(STEP)]),
    ({"optimizer": SGD}, [SGD], []),
    ({"optimizer": SGD, "lr_scheduler": STEP}, [SGD], [SchedulerConfig(STEP)]),
    ({"optimizer": SGD, "lr_scheduler": PLATEAU, "monitor": "loss"}, [SGD],
     [SchedulerConfig(PLATEAU, "epoch", 1, "loss")]),
    ({"optimizer": SGD, "lr_scheduler": {"scheduler": STEP, "interval": "step", "frequency": 3, "name": "x"}}, [SGD],
     [SchedulerConfig(STEP, "step", 3, name="x")]),
    ({"optimizer": SGD, "lr_scheduler": {"scheduler": STEP, "interval": "validation", "strict": False,
      "reduce_on_plateau": True}, "monitor": "loss"}, [SGD],
     [SchedulerConfig(STEP, "validation", 1, "loss", strict=False, reduce_on_plateau=True)]),
    ([[SGD], [STEP, {"scheduler": PLATEAU, "monitor": "a"}]], [SGD],
     [SchedulerConfig(STEP), SchedulerConfig(PLATEAU, monitor="a")]),
    (({"optimizer": SGD}, {"optimizer": SGD, "lr_scheduler": {"scheduler": STEP}}), [SGD, SGD],
     [SchedulerConfig(STEP)]),
])  # fmt: skip
def test_every_accepted_form_is_read(returned: Any, optimizers: list[Any], schedulers: list[Any]) -> None:
    assert read_optimizers(returned) == (optimizers, schedulers)


@pytest.mark.parametrize(("returned", "error", "match"), [
    ([], TypeError, "a list of"),
    ("adam", TypeError, "a str"),
    (([], [STEP]), ValueError, "schedules an optimizer that it did not return"),
    (([SGD, 3], [STEP]), TypeError, "item 1 of .* is an int"),
    ([{"optimizer": SGD}, {"optimizer": None}], TypeError, "item 1 of .* is a NoneType"),
    ({"lr_scheduler": STEP}, ValueError, "expected 'optimizer'"),
    ({"optimizer": SGD, "lr_scheduler": {"schedule": STEP}}, ValueError,
     "'scheduler' is required.*Did you mean 'scheduler'"),
    ({"optimizer": SGD, "lr_scheduler": {"scheduler": STEP, "reduce_on_plateau": True}}, ValueError,
     "StepLR needs the"),
])  # fmt: skip
def test_wrong_configure_optimizers_results_raise(returned: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        read_optimizers(returned)


def test_manual_optimization_takes_any_schedule() -> None:
    schedule = object()
    returned = {"optimizer": SGD, "lr_scheduler": {"scheduler": schedule, "monitor": "loss", "frequency": 2}}
    assert read_optimizers(returned, is_manual=True)[1][0].scheduler is schedule
    with pytest.raises(TypeError, match=r"pass a torch LRScheduler, or an object with step\(\)"):
        read_optimizers(returned)


class Sharpness(torch.optim.SGD):
    """Calls its closure a second time, as SAM does."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        closure()
        super().step()
        return loss


class Strict(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        return closure()


class Renamed(torch.optim.AdamW):
    pass


@pytest.mark.parametrize("stepped_before", [False, True])
@pytest.mark.parametrize(("make", "needs", "may"), [
    (torch.optim.SGD, False, False),
    (torch.optim.AdamW, False, False),
    (torch.optim.LBFGS, True, True),
    (Sharpness, False, True),
    (lambda parameters: Strict(parameters, {"lr": 0.1}), True, True),
    (Renamed, False, False),
])  # fmt: skip
def test_closure_optimizers_are_recognised(make: Any, needs: bool, may: bool, stepped_before: bool) -> None:
    optimizer = make([nn.Parameter(torch.zeros(1))])
    if stepped_before:
        StepLR(optimizer, 1)  # it wraps the step of this one instance
        optimizer.register_step_pre_hook(lambda *_: None)
        optimizer.step(lambda: torch.zeros(()))
    assert (needs_closure(optimizer), may_use_closure(optimizer)) == (needs, may)
