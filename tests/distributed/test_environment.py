"""Who this process is, and the one owner of the process group."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from deadlines import deadline
from interpreters import search_path

from trainwright.distributed.connection import open_process_group, pick_backend
from trainwright.distributed.environment import Environment, announce_local_rank, prepare_deterministic
from trainwright.distributed.job_store import open_store, post, serve_store
from trainwright.distributed.network import LOOPBACK, listen_at
from trainwright.distributed.ranks import Ranks
from trainwright.errors import LaunchError

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip

# Rank 0 hosts the store and ends first. Rank 1 goes on for a while and must not consider that a failure.
PLAIN_SCRIPT = """
import sys, time
from unittest import mock
import pytest, torch, torch.distributed as dist
from trainwright.distributed.connection import make_mesh, open_process_group
from trainwright.distributed.environment import Environment
from trainwright.distributed.collectives import all_reduce

environment = Environment.detect()
if sys.argv[1] == "joined":
    dist.init_process_group("cpu:gloo")
    with pytest.raises(RuntimeError, match="opened with 'cpu:gloo', which has no backend for 'cuda'; .* 'cuda:nccl,cpu:gloo'"):
        open_process_group(environment, "nccl", device_types=["cuda", "cpu"])
    assert make_mesh("cpu", {"shard": 2}).size() == 2
    with mock.patch.object(dist, "get_backend_config", lambda: "cpu:gloo,cuda:gloo"):
        with pytest.raises(ValueError, match="fsdp does not run over gloo on 'cuda': .* group with 'nccl', or"):
            make_mesh("cuda", {"shard": 2})
connection = open_process_group(environment, "gloo")
assert connection.owns_group == (sys.argv[1] != "joined")
assert all_reduce(torch.ones(1)).item() == 2
assert connection.channel.exchange(b"%d" % environment.rank, call="a test", timeout_seconds=120) == [b"0", b"1"]
if sys.argv[1] == "reopened":
    connection.close()
    assert not dist.is_initialized()
    connection = open_process_group(environment, "gloo")
    assert all_reduce(torch.ones(1)).item() == 2
    assert connection.channel.exchange(b"x", call="a test", timeout_seconds=120) == [b"x", b"x"]
if sys.argv[1] == "joined":
    connection.close()
    assert dist.is_initialized()
    dist.barrier()
    dist.destroy_process_group()
if environment.rank == 1:
    time.sleep(1)
print("done")
"""


def test_one_process_opens_nothing() -> None:
    environment = Environment.detect({})
    assert environment == Environment(rank=0, world_size=1, launched_by="single")
    connection = open_process_group(environment, "gloo")
    assert connection.store is None
    assert not dist.is_initialized()
    assert Ranks(connection.channel).exchange("alone", "a test") == ["alone"]
    connection.close()


def test_torchrun_variables_are_read() -> None:
    found = Environment.detect(TORCHRUN)
    assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == (3, 1, 4, 2)
    assert (found.node_rank, found.launched_by, found.restart_count) == (1, "torchrun", 2)
    assert (found.main_address, found.main_port, found.has_agent_store) == ("10.0.0.1", 29500, True)
    assert (found.num_nodes, Environment().num_nodes) == (2, 1)
    ours = Environment.detect({**TORCHRUN, "TRAINWRIGHT_JOB": "{}"})
    assert ours.launched_by == "trainwright"


@pytest.mark.parametrize(("changes", "text"), [
    ({"WORLD_SIZE": None}, "but not WORLD_SIZE"),
    ({"MASTER_ADDR": None, "MASTER_PORT": None}, "but not MASTER_ADDR, MASTER_PORT"),
    ({"RANK": "one"}, "RANK='one'; expected an integer"),
    ({"RANK": "4"}, "RANK=4, WORLD_SIZE=4"),
    ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "4"}, "stay below their world size"),
])  # fmt: skip
def test_bad_variables_are_refused(changes: dict[str, str | None], text: str) -> None:
    variables = {name: value for name, value in {**TORCHRUN, **changes}.items() if value is not None}
    with pytest.raises(ValueError, match=text) as caught:
        Environment.detect(variables)
    assert "torchrun" in str(caught.value)


def test_a_pod_of_kubeflow_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
    found = Environment.detect(pod)
    assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == (2, 0, 3, 1)
    assert (found.node_rank, found.num_nodes, found.main_address, found.main_port) == (2, 3, "job-master-0", 23456)
    with pytest.raises(ValueError, match=r"LOCAL_RANK=0, .* but not LOCAL_WORLD_SIZE"):
        Environment.detect(pod | {"LOCAL_RANK": "0"})
    with pytest.raises(ValueError, match="RANK=2, WORLD_SIZE=3 but not"):
        Environment.detect({"RANK": "2", "WORLD_SIZE": "3"})
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "0")  # so that it is removed afterwards
        monkeypatch.delenv(name)
    for name, value in pod.items():
        monkeypatch.setenv(name, value)
    announce_local_rank(Environment.detect())
    assert Environment.detect() == found


def test_a_backend_is_picked_for_the_device() -> None:
    assert pick_backend("cpu") == "gloo"
    assert pick_backend("cuda") == "nccl"
    with pytest.raises(ValueError, match=r"torch .* has no process group for 'mps', so .*; pass devices=1"):
        pick_backend("mps")
    assert pick_backend("cuda", on_host_too=True) == "cpu:gloo,cuda:nccl"
    assert pick_backend("cpu", on_host_too=True) == "gloo"


def test_the_cublas_setting_of_a_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    prepare_deterministic()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"  # the user's choice stays
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    prepare_deterministic()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.launch
@pytest.mark.parametrize("mode", ["joined", "reopened"])
def test_a_job_without_an_agent_ends_quietly(tmp_path: Path, mode: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(PLAIN_SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    processes = []
    for rank in ("0", "1"):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        variables |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "PYTHONPATH": search_path(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script), mode],
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=deadline(60))[0] for process in processes]
    assert [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)] == [
        (0, "done\n"),
        (0, "done\n"),
    ]


def test_a_rank_of_another_job_is_rejected() -> None:
    listener = listen_at(LOOPBACK, 0)
    port = int(listener.getsockname()[1])
    store = serve_store(listener, LOOPBACK)
    post(store, "job", "cluster 7.0")
    rank = Environment(1, 1, 2, 2, main_address=LOOPBACK, main_port=port, job="cluster 8.0")
    with pytest.raises(
        LaunchError, match=r"rank 0 of the job 'cluster 7.0' answers at .* this is rank 1 of 'cluster 8.0'"
    ):
        open_store(rank, timedelta(seconds=30), is_joined=False)
