"""How many processes a job has, and which device is whose. The GPUs are counted only, so any number may be claimed."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from trainwright.devices import num_cores
from trainwright.distributed.environment import Environment
from trainwright.engine.job import check_nodes, device_index, resolve_num_processes, warn_of_untested_torch


def task(launched_by: str, local_rank: int = 1) -> Environment:
    return Environment(
        rank=local_rank, local_rank=local_rank, world_size=4, local_world_size=4, launched_by=launched_by
    )


@pytest.fixture(autouse=True)
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_devices_are_counted() -> None:
    assert resolve_num_processes("auto", "cuda", Environment()) == 2
    assert resolve_num_processes(-1, "cuda", Environment()) == 2
    assert resolve_num_processes(-1, "cpu", Environment()) == num_cores()  # however many threads torch has
    assert resolve_num_processes("auto", "cpu", task("slurm")) == 4
    assert device_index(2, "cuda", task("torchrun")) == 1
    assert device_index([1, 0], "cuda", task("torchrun")) == 0


def test_more_processes_than_gpus_are_refused() -> None:
    with pytest.raises(
        ValueError, match="devices=3 is more than the 2 of 'cuda' that torch sees; pass or launch at most that many"
    ):
        resolve_num_processes(3, "cuda", Environment())
    for launched_by in ("torchrun", "slurm"):
        with pytest.raises(ValueError, match="devices=4 is more than the 2 of 'cuda'"):
            resolve_num_processes("auto", "cuda", task(launched_by))


def test_a_cluster_may_show_each_process_its_own_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_num_processes("auto", "cuda", task("slurm")) == 4
    assert resolve_num_processes(4, "cuda", task("mpi")) == 4
    assert device_index("auto", "cuda", task("slurm")) == 0
    with pytest.raises(ValueError, match="devices=4 is more than the 1 of 'cuda'"):
        resolve_num_processes("auto", "cuda", task("torchrun"))


def test_a_device_that_ray_assigns_is_taken() -> None:
    """Two of four workers may share one of two GPUs."""
    worker = replace(task("ray", local_rank=3), device="cuda:1")
    assert resolve_num_processes("auto", "cuda", worker) == 4
    assert device_index("auto", "cuda", worker) == 1


def test_an_accelerator_without_a_process_group_has_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    assert resolve_num_processes("auto", "mps", Environment()) == 1
    for devices, environment in ((2, Environment()), ("2", Environment()), ("auto", task("torchrun"))):
        with pytest.raises(ValueError, match=r"torch .* has no process group for 'mps', so .*; pass devices=1"):
            resolve_num_processes(devices, "mps", environment)


def test_nodes_are_those_of_the_job() -> None:
    for launched_by in ("torchrun", "slurm"):
        check_nodes(1, task(launched_by))
        with pytest.raises(ValueError, match="num_nodes=2 was passed, but this job was launched on 1; omit num_nodes"):
            check_nodes(2, task(launched_by))
    check_nodes(2, Environment())  # the launcher will ask for this node's place


def test_a_torch_newer_than_the_tested_ones_is_warned_of_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_untested_torch(newest=(2, 10))
        warn_of_untested_torch(newest=(2, 10))
    assert [f"torch {torch.__version__} is newer than 2.10" in str(warning.message) for warning in caught] == [True]
    warn_of_untested_torch(newest=(99, 0))
