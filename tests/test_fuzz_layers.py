"""The random tests of layers reach every layer and loss of torch.nn, and those for state every optimizer and scheduler."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))


def subclasses(place: object, base: type) -> set[str]:
    return {name for name, each in vars(place).items() if inspect.isclass(each) and issubclass(each, base)}


def test_each_layer_and_loss_of_torch_is_in_a_net_or_exempt_by_name() -> None:
    from fuzz import irregular_nets  # noqa: F401, adds to BODIES
    from fuzz.losses import LOSSES
    from fuzz.nets import BODIES, EXEMPT

    reached = {type(layer).__name__ for body in BODIES.values() for layer in body.make().modules()}
    reached |= {type(layer).__name__ for loss in LOSSES.values() for layer in loss.make().modules()}
    assert subclasses(nn, nn.Module) - reached == set(EXEMPT)


def test_each_optimizer_and_scheduler_of_torch_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None
    )  # the optimizers of packages take long to import
    from fuzz.optimizers import OPTIMIZERS, SCHEDULERS

    matrices = [nn.Parameter(torch.ones(3, 3))]
    reached = {type(make(matrices)).__name__ for make in OPTIMIZERS.values()}
    assert subclasses(torch.optim, torch.optim.Optimizer) - reached == {"Optimizer"}
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))]} for _ in range(3)], 0.1, momentum=0.9)
    reached = {type(make(optimizer)).__name__ for make in SCHEDULERS.values()}
    schedulers = torch.optim.lr_scheduler
    assert subclasses(schedulers, schedulers.LRScheduler) - reached == {"LRScheduler", "_LRScheduler"}
