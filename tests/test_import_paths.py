"""Scripts in which only the package's name was changed find their imports."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from small import QUIET, Classifier, make_loader
from torch import nn

import trainwright as tw
from trainwright.data.transfer import to_device
from trainwright.engine.prepared import PreparedOptimizer
from trainwright.gradient_norms import grad_norm
from trainwright.import_paths import PATHS
from trainwright.step_types import STEP_OUTPUT


def test_each_path_finds_the_public_names() -> None:
    for path in PATHS.split():
        assert importlib.import_module(f"trainwright.{path}").Module is tw.Module, path
    assert tw.utilities is importlib.import_module("trainwright.utilities")
    assert tw.pytorch.callbacks.EarlyStopping is tw.EarlyStopping


def test_names_that_are_found_there_alone() -> None:
    def found(path: str, name: str) -> object:
        return getattr(importlib.import_module(f"trainwright.{path}"), name)

    assert found("core.optimizer", "LightningOptimizer") is PreparedOptimizer
    assert found("trainer", "Trainer") is tw.Trainer
    assert found("utilities", "grad_norm") is grad_norm
    assert found("utilities", "move_data_to_device") is to_device
    assert found("utilities.types", "STEP_OUTPUT") is STEP_OUTPUT


def test_a_name_that_is_missing() -> None:
    message = r"no 'Nonsense', as in trainwright\.utilities\.Nonsense; docs/migrating\.md lists"
    with pytest.raises(ImportError, match=message):
        from trainwright.utilities import Nonsense  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"trainwright\.nothing"):
        importlib.import_module("trainwright.nothing")


def test_norms_of_gradients() -> None:
    net = nn.Linear(2, 1)
    assert grad_norm(net, 2) == {}
    net.weight.grad, net.bias.grad = torch.tensor([[3.0, 0.0]]), torch.tensor([-4.0])
    assert grad_norm(net, 2) == {"grad_2.0_norm/weight": 3.0, "grad_2.0_norm/bias": 4.0, "grad_2.0_norm_total": 5.0}
    assert grad_norm(net, "inf")["grad_inf_norm_total"] == 4.0
    assert grad_norm(net, 1, ".")["grad_1.0_norm.bias"] == 4.0
    for wrong in (0, -1, math.nan):
        with pytest.raises(ValueError, match="pass a number above 0"):
            grad_norm(net, wrong)


def test_norms_are_logged() -> None:
    class Logs(Classifier):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.log_dict(grad_norm(self, 2))

    trainer = tw.Trainer(**QUIET, max_epochs=1)
    trainer.fit(Logs(), make_loader())
    assert {f"grad_2.0_norm/{name}" for name, _ in Classifier().named_parameters()} < set(trainer.callback_metrics)
