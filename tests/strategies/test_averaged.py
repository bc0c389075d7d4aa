"""Averaged weights under every strategy match one process, resume exactly, and load under other strategies."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from averaged_job import MOVES, PARALLEL, Averaged, Normed, averaged, averaged_quickly, cut, swa, thaws_under, train
from jobs import run_job
from small import assert_close, assert_equal, make_loader, weights

from trainwright.checkpoint.reader import open_checkpoint


def check(strategy: str, ranks: list[dict[str, Any]], folder: Path, alone: Callable[..., dict[str, Any]]) -> None:
    thaws = thaws_under(strategy)
    one = alone(thaws=thaws)
    for rank in ranks:
        whole, resumed = rank["whole"], rank["resumed"]
        assert whole["scores"] == pytest.approx(one["scores"], abs=1e-6)
        assert whole["again"] == pytest.approx(one["again"], abs=1e-6)
        assert resumed["scores"] == whole["scores"][-len(resumed["scores"]) :]
        assert resumed["again"] == whole["again"]
    whole, resumed = ranks[0]["whole"], ranks[0]["resumed"]
    assert_close(whole["weights"], one["weights"])
    assert_equal(resumed["weights"], whole["weights"])
    # The best checkpoint has the averages, and a run on one process resumes from the trained weights.
    best = weights(Averaged.load_from_checkpoint(folder / strategy / "best.ckpt"))
    assert_close(best, weights(Averaged.load_from_checkpoint(one["folder"] / "best.ckpt")))
    assert_close(train(None, 1, folder / strategy / "step=10.ckpt", thaws=thaws)["weights"], one["weights"])


def check_swa(ranks: list[dict[str, Any]], one: dict[str, Any]) -> None:
    found, resumed = ranks[0]["swa"], ranks[0]["swa resumed"]
    assert_equal(resumed["weights"], found["weights"])
    assert resumed["again"] == found["again"] == pytest.approx(one["again"], abs=1e-6)
    # The statistics match one process that reads batches of the ranks' size.
    batches = torch.stack([inputs for inputs, _ in make_loader(44, 4)])
    own = {name: value for name, value in found["weights"].items() if name.startswith("norm.")}
    wanted = {
        "norm.running_mean": batches.mean((0, 1)),
        "norm.running_var": batches.var(1).mean(0),
        "norm.num_batches_tracked": torch.tensor(11),
    }
    assert_close(own, wanted, 1e-5)
    others = {name: value for name, value in one["weights"].items() if name not in own}
    assert_close({name: found["weights"][name] for name in others}, others)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    @cache
    def run(thaws: bool) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("alone")
        return {**train(folder, 1, thaws=thaws), "folder": folder}

    return run


def test_averages_of_shards_match_one_process(tmp_path: Path, alone: Any) -> None:
    check("fsdp", run_job(averaged_quickly, 2, tmp_path), tmp_path, alone)


@pytest.mark.slow
def test_averages_match_one_process_under_every_strategy(tmp_path: Path, alone: Any) -> None:
    one = train(tmp_path / "swa", 1, average=swa(), kind=Normed, samples=44, thaws=False)
    ranks = run_job(averaged, 2, tmp_path)
    for strategy in PARALLEL:
        check(strategy, [rank[strategy] for rank in ranks], tmp_path, alone)
        for rank in ranks:
            low, resumed = rank[strategy]["low"], rank[strategy]["low resumed"]
            assert resumed["again"] == low["again"] == pytest.approx(one["again"], rel=0.2)
        assert_equal(ranks[0][strategy]["low resumed"]["weights"], ranks[0][strategy]["low"]["weights"])
        check_swa([rank[strategy] for rank in ranks], one)
    for source, target in MOVES:
        paths = tmp_path / source / "step=10.ckpt", tmp_path / f"{source} as {target}"
        before, after = (open_checkpoint(str(path)) for path in paths)
        for section in ("model", "training"):
            assert_equal(after.read_tensors(section), before.read_tensors(section))


@pytest.mark.slow
def test_an_interrupted_validation_restores_training_weights(tmp_path: Path) -> None:
    for found in run_job(cut, 2, tmp_path):
        assert_equal(*found.pop("failed"))  # the weights in training are back
        for each in found.values():
            assert each["resumed"]["again"] == each["whole"]["again"]
