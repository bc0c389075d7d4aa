"""FairScale's OSS on two ranks: torch's optimizers and a user's match one process."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import everyday_job
import pytest
import sharded_job
import torch
from everyday_job import Regresses, assert_everyday, assert_same_weights, loader, trainer
from jobs import run_job
from sharded_job import OPTIMIZERS, sharded, sharded_everyday

from trainwright.strategies.oss.strategy import ShardedDDPStrategy


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("sharded")
    return run_job(sharded, 2, folder), folder


@pytest.mark.slow
def test_everyday_calls_match_one_process_under_ddp_sharded(tmp_path: Path) -> None:
    folder, alone = tmp_path / "ranks", tmp_path / "alone"
    assert_everyday(run_job(sharded_everyday, 2, folder), everyday_job.alone(alone), folder, alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_matches_one_process_under_ddp_sharded(job: Any, name: str, tmp_path: Path) -> None:
    """Groups, schedulers, accumulation and clipping, with state of every kind."""
    ranks, folder = job
    expected = sharded_job.steps("single_device", 2, name, tmp_path / f"{name}.ckpt")
    for rank in ranks:
        assert rank["lr"][name] == pytest.approx(expected)
    assert_same_weights(folder / f"{name}.ckpt", tmp_path / f"{name}.ckpt")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "adam", "signs"])
def test_resume_is_exact_under_ddp_sharded(job: Any, name: str) -> None:
    folder = job[1]
    assert_same_weights(folder / f"{name}-resumed.ckpt", folder / f"{name}-whole.ckpt", 0.0)


@pytest.mark.slow
def test_unused_and_frozen_parameters_are_stepped_as_on_one_process(job: Any, tmp_path: Path) -> None:
    sharded_job.leaves("single_device", 2, tmp_path)
    for name in ("Leaves", "Freezes"):
        assert_same_weights(job[1] / f"{name}.ckpt", tmp_path / f"{name}.ckpt")


@pytest.mark.slow
def test_ranks_stay_alike(job: Any) -> None:
    """They agree in weights, running statistics and evaluations. Float16 gradients differ slightly."""
    one, other = job[0]
    for left, right in zip(one["half"], other["half"], strict=True):
        assert torch.equal(left, right)
    whole, half = one["half"]
    assert 0.0 < float((whole - half).abs().max()) < 0.01
    assert torch.equal(one["norms"]["mean"], other["norms"]["mean"])
    assert one["norms"]["val_loss"] == other["norms"]["val_loss"]
    assert 0 < one["held"] < 6
    assert one["held"] + other["held"] == 6  # a tensor of the model is on one rank


def test_one_process_says_so(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.INFO):
        sharded_job.steps("ddp_sharded", 2, "adam", tmp_path / "one.ckpt")
    assert "has nothing to shard on one process; it runs as 'single_device'" in caplog.text
    sharded_job.steps("single_device", 2, "adam", tmp_path / "plain.ckpt")
    assert_same_weights(tmp_path / "one.ckpt", tmp_path / "plain.ckpt", 0.0)
    trainer("ddp_sharded").validate(Regresses(), loader(4, 1), verbose=False)


@pytest.mark.parametrize("given", [-1, True, 1.5])
def test_buffer_size_is_checked(given: Any) -> None:
    with pytest.raises(ValueError, match=r"reduce_buffer_size=.* is not accepted; pass an integer of at least 0"):
        ShardedDDPStrategy(reduce_buffer_size=given)


def test_missing_fairscale_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs FairScale.*pip install 'trainwright\[fairscale\]'"):
        ShardedDDPStrategy()
