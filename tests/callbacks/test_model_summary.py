"""ModelSummary: its table, and that a forward of the example leaves no trace."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from small import QUIET, Classifier, assert_equal, make_loader, weights
from torch import nn

import trainwright as tw
from trainwright.callbacks.model_summary import LayerSummary


def str_of(module: nn.Module, max_depth: int = 1) -> str:
    return str(LayerSummary(module, max_depth))


class Counted(nn.Module):
    """Changes a buffer in place, another one by assignment, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("latest", torch.zeros(1))
        self.norm.eval()

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        assert not self.training
        self.calls += 1
        self.latest = x + random.random() + torch.rand(1)
        return {"a": self.norm(x), "b": self.drop(x[:, :2]) * scale}


def test_the_table_counts_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    module = Classifier()
    module.net[0].requires_grad_(False)
    module.net[1].eval()
    tw.Trainer(max_epochs=1, callbacks=[tw.ModelSummary(max_depth=2)], **QUIET).fit(module, make_loader())
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["Name", "Type", "Parameters", "Mode"]
    assert lines[1:4] == [
        ["net", "Sequential", "159", "train"],
        ["net.0", "Linear", "117", "train"],
        ["net.1", "Tanh", "0", "eval"],
    ]
    assert lines[-2][:5] == ["159", "parameters,", "42", "of", "them"]


def test_summary_shows_children_to_a_depth() -> None:
    module = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(1, 1))))
    assert [len(str_of(module, depth).splitlines()) for depth in (0, 1, 2, 3, -1)] == [1, 3, 4, 5, 5]
    for depth in (-2, 1.5):
        with pytest.raises(ValueError, match=r"max_depth=.* is not accepted; pass an integer of at least -1"):
            tw.ModelSummary(max_depth=depth)  # type: ignore[arg-type]


@pytest.mark.parametrize("as_dict", [False, True])
def test_an_example_shows_sizes_and_leaves_no_trace(as_dict: bool) -> None:
    module = nn.Module()
    module.inner = Counted()
    module.forward = lambda x, scale=1.0: module.inner(x, scale=scale)  # type: ignore[method-assign,assignment]
    x = torch.randn(3, 4)
    module.example_input_array = {"x": x, "scale": 2.0} if as_dict else (x, 2.0)  # type: ignore[assignment]
    before, calls, latest = weights(module), module.inner.calls, module.inner.latest
    modes = [each.training for each in module.modules()]
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    lines = str_of(module, -1).splitlines()
    assert lines[0].split() == ["Name", "Type", "Parameters", "Mode", "In", "Out"]
    assert lines[1].split(None, 4)[4] == "([3, 4], ?)  ([3, 4], [3, 2])"
    assert lines[2].split() == ["inner.norm", "BatchNorm1d", "8", "eval", "[3,", "4]", "[3,", "4]"]
    assert_equal(weights(module), before)
    assert module.inner.calls is calls
    assert module.inner.latest is latest
    assert [each.training for each in module.modules()] == modes
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert not any(each._forward_hooks for each in module.modules())


def test_a_failed_example_is_a_note() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module.example_input_array = torch.zeros(1, 3)  # type: ignore[assignment]
    lines = str_of(module).splitlines()
    assert lines[0].split() == ["Name", "Type", "Parameters", "Mode"]
    assert lines[-1].startswith("(no sizes: the forward of example_input_array failed with RuntimeError: ")
    assert "mat1 and mat2 shapes cannot be multiplied" in lines[-1]


def test_lazy_parameters_are_not_counted() -> None:
    module: Any = nn.Sequential(nn.LazyLinear(3), nn.Linear(2, 2))
    module.example_input_array = torch.zeros(1, 3)
    text = str_of(module)
    assert "6 parameters" in text
    assert "no shape yet" in text
    assert isinstance(module[0].weight, nn.UninitializedParameter)


def test_an_example_compiles_nothing() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].compile(backend=lambda graph, inputs: pytest.fail("compiled"))
    module.example_input_array = torch.zeros(1, 2)  # type: ignore[assignment]
    assert "[1, 2]" in str_of(module)
