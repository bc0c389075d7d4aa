"""The names of a checkpoint's state: several models never share a name, and stray parameters have names too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small import ON_HOST, assert_equal, weights
from torch import nn

import trainwright as tw


def prepared() -> tuple[Any, ...]:
    """Two models some of whose names would be alike with a number before them, one optimizer over both, and strays."""
    accelerator = tw.Accelerator(cpu=ON_HOST)
    first = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    second = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 1))
    scale, shift = nn.Parameter(torch.ones(2)), torch.zeros(1, requires_grad=True)
    optimizers = [
        torch.optim.Adam([*first.parameters(), *second.parameters(), scale]),
        torch.optim.SGD([shift], 0.1, momentum=0.9),
    ]
    return accelerator, *accelerator.prepare(first, second, *optimizers), scale, shift


def test_several_models_and_stray_parameters_are_named(tmp_path: Path) -> None:
    accelerator, first, second, adam, sgd, scale, shift = prepared()
    accelerator.backward((second(first(torch.ones(1, 3)) * scale) + shift).sum())
    adam.step()
    sgd.step()
    assert scale.tolist() != [1.0, 1.0]
    assert shift.item() != 0.0
    accelerator.save_state(str(tmp_path / "state.ckpt"))
    torch.manual_seed(9)
    again, first_again, second_again, adam_again, sgd_again, scale_again, shift_again = prepared()
    again.load_state(str(tmp_path / "state.ckpt"))
    assert_equal(weights(first_again), weights(first))
    assert_equal(weights(second_again), weights(second))
    assert torch.equal(scale_again, scale)
    assert torch.equal(shift_again, shift)
    for one, other in ((adam, adam_again), (sgd, sgd_again)):
        assert len(one.state) == len(other.state)
        for a, b in zip(one.state.values(), other.state.values(), strict=True):
            assert_equal({k: torch.as_tensor(v) for k, v in a.items()}, {k: torch.as_tensor(v) for k, v in b.items()})
    again, first_again, _, _, _, scale_again, _ = prepared()
    again.load_state(str(tmp_path / "state.ckpt"), weights_only=True)
    assert_equal(weights(first_again), weights(first))
    assert scale_again.tolist() == [1.0, 1.0]  # no model's weight


def test_parameters_of_no_model_have_to_fit(tmp_path: Path) -> None:
    def with_a_stray(size: int) -> Any:
        accelerator, net = tw.Accelerator(cpu=ON_HOST), nn.Linear(2, 2)
        accelerator.prepare(net, torch.optim.SGD([*net.parameters(), nn.Parameter(torch.ones(size))], 0.1))
        return accelerator

    with_a_stray(1).save_state(str(tmp_path / "state.ckpt"))
    with pytest.raises(tw.CheckpointError, match=r"parameter 0\.2 \(1,\) there, \(3,\) here"):
        with_a_stray(3).load_state(str(tmp_path / "state.ckpt"))
