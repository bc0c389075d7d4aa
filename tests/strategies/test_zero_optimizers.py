"""Optimizers under DeepSpeed: the weights and the resumes of one process, or a refusal by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import zero_job
from everyday_job import assert_same_weights
from jobs import run_job
from zero_job import MAKERS, STAGES


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[Any, Any]], Path]:
    folder = tmp_path_factory.mktemp("zero")
    zero_job.alone(folder)
    return run_job(zero_job.zero, 2, folder), folder


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", MAKERS)
def test_any_optimizer_resumes_and_matches_one_process_under_zero(job: Any, stage: int, name: str) -> None:
    """With a frozen group, a parameter that no step uses, and state in numbers."""
    own, one = job[1] / str(stage) / name, job[1] / "alone" / name
    assert_same_weights(own.with_suffix(".resumed"), own.with_suffix(".whole"), 0.0)
    assert_same_weights(own.with_suffix(".whole"), one.with_suffix(".whole"))
    assert_same_weights(own.with_suffix(".across"), one.with_suffix(".whole"))
    if name != "Counts":
        low = own.with_name(f"low {name}")
        assert_same_weights(low.with_suffix(".resumed"), low.with_suffix(".whole"), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_one_process_can_resume_what_two_ranks_saved(job: Any, stage: int, tmp_path: Path) -> None:
    """One process resumes from the checkpoint of two ranks."""
    for name in MAKERS:
        path = tmp_path / f"{name}.ckpt"
        half = (job[1] / str(stage) / name).with_suffix(".half")
        zero_job.fit("single_device", zero_job.Grouped(MAKERS[name]), 2, path, half)
        assert_same_weights(path, (job[1] / "alone" / name).with_suffix(".whole"))


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_each_parameter_has_its_own_count_of_steps(job: Any, stage: int) -> None:
    assert_same_weights(job[1] / str(stage) / "thawed.ckpt", job[1] / "thaws-3.ckpt")


@pytest.mark.slow
def test_windows_are_summed_in_float32(job: Any) -> None:
    for rank in job[0]:
        for stage in (1, 2):
            assert rank[stage] == [-1.0, -1.0, pytest.approx(-0.5, abs=0.1)]  # the config may have it otherwise


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_offloaded_gradients_are_rescaled_and_clipped_by_norm(job: Any, stage: int) -> None:
    assert_same_weights(job[1] / str(stage) / "stream.ckpt", job[1] / "stream.ckpt")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "ddp_sharded"])
def test_steps_by_tensor_where_tensors_are_whole_or_add_up(job: Any, strategy: str) -> None:
    assert_same_weights(job[1] / f"layers.{strategy}", job[1] / "layers.ddp")
