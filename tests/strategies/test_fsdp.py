"""FSDP2 on two ranks and on one: kinds of models and steps match one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import everyday_job
import fsdp_job
import pytest
from everyday_job import assert_everyday, assert_same_weights
from fsdp_job import fsdp, fsdp_everyday, run_equal
from jobs import run_alone, run_job

import trainwright as tw


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("fsdp")
    return run_job(fsdp, 2, folder), folder


@pytest.mark.slow
def test_everyday_calls_match_one_process_under_fsdp(tmp_path: Path) -> None:
    folder, alone = tmp_path / "ranks", tmp_path / "alone"
    assert_everyday(run_job(fsdp_everyday, 2, folder), everyday_job.alone(alone), folder, alone)


@pytest.mark.slow
def test_fsdp_groups_and_options_match_one_process(job: Any, tmp_path: Path) -> None:
    """This holds for all groups, and for all times of gathering and reducing."""
    ranks, folder = job
    expected = run_equal(False, tmp_path)
    for name, metrics in expected.items():
        for rank in ranks:
            assert rank["equal"][name] == pytest.approx(metrics, rel=1e-5, abs=1e-6), name
        assert_same_weights(folder / f"{name}.ckpt", tmp_path / f"{name}.ckpt")


@pytest.mark.slow
def test_activation_checkpointing_keeps_the_losses(job: Any) -> None:
    ranks, folder = job
    for rank in ranks:
        losses, calls = rank["recomputing"]["kept"]
        assert rank["recomputing"]["by class"] == (losses, 2 * calls)
    assert_same_weights(folder / "by class.ckpt", folder / "kept.ckpt", 0.0)


@pytest.mark.slow
def test_meta_modules_match_modules_made_on_the_cpu(job: Any) -> None:
    ranks, folder = job
    for rank in ranks:
        assert rank["meta"]["meta"] == rank["meta"]["cpu"]
    assert_same_weights(folder / "meta.ckpt", folder / "cpu.ckpt", 0.0)


@pytest.mark.slow
def test_fsdp_computes_in_bfloat16(job: Any) -> None:
    for rank in job[0]:
        assert rank["low"]["seen"] == ["torch.bfloat16, torch.float32"]
        assert rank["low"]["true"] == ["torch.bfloat16, torch.bfloat16"]
        assert all(0.0 < loss < 20.0 for loss in rank["low"]["losses"])


@pytest.mark.slow
def test_offload_on_the_cpu_is_told(job: Any) -> None:
    assert ["nothing is moved" in text for text in job[0][0]["told"]] == [True]
    assert job[0][1]["told"] == []  # rank 0 speaks


def test_fsdp_on_one_process_matches_no_strategy(tmp_path: Path) -> None:
    """One process trains as without a strategy, and resumes exactly."""
    script = (
        "from pathlib import Path\n"
        "from fsdp_job import Blocks, by_blocks, fitted\n"
        "from everyday_job import resumed\n"
        "fitted(by_blocks, Blocks('methods'), 2, Path('one.ckpt'), accumulate_grad_batches=2)\n"
        "resumed('fsdp', Path('.'))\n"
    )
    run_alone(script, tmp_path)
    fsdp_job.fitted("single_device", fsdp_job.Blocks("methods"), 2, tmp_path / "two.ckpt", accumulate_grad_batches=2)
    assert_same_weights(tmp_path / "one.ckpt", tmp_path / "two.ckpt")
    assert_same_weights(tmp_path / "resumed.ckpt", tmp_path / "whole.ckpt", 0.0)


@pytest.mark.parametrize("given", [-1, True, 0.5, "many"])
def test_min_parameters_is_checked(given: Any) -> None:
    with pytest.raises(ValueError, match=r"min_parameters=.* is not accepted; pass an integer of at least 0"):
        tw.FSDPStrategy(min_parameters=given)


@pytest.mark.slow
def test_calls_outside_of_a_step(job: Any) -> None:
    ranks, _ = job
    assert all(rank["called"] < 1e-6 for rank in ranks)


@pytest.mark.slow
def test_calling_a_shard_in_a_hook_is_explained(job: Any) -> None:
    """A note on torch's error names gather_module."""
    for rank in job[0]:
        assert re.fullmatch(
            r"Under fsdp a rank holds only a part of a parameter, except in a step\. .*tw\.gather_module.*",
            *rank["in a hook"],
        )


@pytest.mark.slow
def test_reading_a_shard_as_an_array_is_explained(job: Any) -> None:
    for rank in job[0]:
        for notes in rank["drawn"]:
            assert re.search(r"a hook or a callback use its full_tensor\(\), .*before numpy\(\)", "".join(notes))


def test_a_frozen_group_trains_in_mixed_precision_once_it_is_unfrozen(tmp_path: Path) -> None:
    assert run_job(fsdp_job.unfreeze, 2, tmp_path) == [True, True]
