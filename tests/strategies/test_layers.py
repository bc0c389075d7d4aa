"""Mixed precision under every strategy: kinds of layers on two ranks beside one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jobs import run_job
from layers_job import NETS, PRECISIONS, STRATEGIES, alone, layers
from torch import nn

from trainwright.strategies.fsdp2.wrap_policy import SMALL, find_float32, is_low

TOLERANCE = {"bf16-mixed": 0.1, "16-mixed": 0.03}
"""The allowed difference, relative to the change of the weights."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run_job(layers, 2, tmp_path_factory.mktemp("layers"), seconds=600.0)


@pytest.mark.slow
def test_layers_of_every_kind_are_trained_as_on_one_process(job: Any) -> None:
    expected = alone()
    for strategy in STRATEGIES:
        for (name, precision), (wanted, loss) in expected.items():
            saved, (got, *_) = job[0][strategy, name, precision]
            told = f"{strategy} {precision} {name}"
            assert {key: value.dtype for key, value in saved.items()} == {k: v.dtype for k, v in wanted.items()}, told
            if name == "batch norms":  # their statistics differ between ranks
                continue
            first = torch.cat([value.flatten() for value in wanted.values()])
            off = (torch.cat([value.flatten() for value in saved.values()]) - first).norm()
            assert off <= TOLERANCE[precision] * _moved(name, wanted), told
            assert got == pytest.approx(loss, rel=TOLERANCE[precision] / 5), told


def _moved(name: str, now: dict[str, torch.Tensor]) -> torch.Tensor:
    from layers_job import Net

    start = Net(name).state_dict()
    return torch.cat([(now[key] - value).flatten() for key, value in start.items()]).norm()


@pytest.mark.slow
def test_a_checkpoint_is_scored_as_in_the_run_that_saved_it(job: Any) -> None:
    for rank in job:
        for strategy in STRATEGIES:
            for name in NETS:
                for precision in PRECISIONS:
                    _, (in_fit, after, read) = rank[strategy, name, precision]
                    assert after == read, f"{strategy} {precision} {name}"
                    # The metrics of a fit are float32 tensors.
                    assert in_fit == pytest.approx(after, rel=1e-6), f"{strategy} {precision} {name}"


@pytest.mark.slow
def test_frozen_weights_and_averages_stay_float32(job: Any) -> None:
    expected = alone()["follows", "bf16-mixed"][0]
    for strategy in STRATEGIES:
        saved, _ = job[0][strategy, "follows", "bf16-mixed"]
        assert torch.equal(saved["body.frozen.weight"], expected["body.frozen.weight"]), strategy
        assert torch.equal(saved["body.mean"], expected["body.mean"]), strategy


def test_layers_that_autocast_computes_in_the_low_dtype() -> None:
    assert all(map(is_low, (nn.Linear(2, 2), nn.Conv2d(1, 1, 1), nn.MultiheadAttention(2, 1))))
    normed = nn.utils.parametrizations.orthogonal(nn.Linear(2, 2))
    assert not any(map(is_low, (normed, nn.LayerNorm(2), nn.Embedding(2, 2), nn.GRU(2, 2), nn.Bilinear(2, 2, 2))))


def test_float32_layers_are_found() -> None:
    large, tied = nn.Embedding(SMALL, 2), nn.Embedding(3, 2)
    head = nn.Linear(2, 3)
    head.weight = tied.weight
    module = nn.Sequential(large, tied, nn.LayerNorm(2), head)
    found = find_float32(module)
    assert found.groups == {large}
    assert set(found.parameters(module)) == {module[2].weight, module[2].bias}
