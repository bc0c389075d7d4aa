"""The place of a process in a job, from the variables of SLURM and MPI."""

from __future__ import annotations

import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from started import Started, python

from trainwright.distributed.clusters import expand_hosts, read_slurm_job, requeue
from trainwright.distributed.environment import Environment

SLURM = {
    "SLURM_JOB_ID": "100", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_NTASKS": "7", "SLURM_STEP_NODELIST": "node[01-03,7]", "SLURM_TASKS_PER_NODE": "2(x3),1",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "node01",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
Changes = dict[str, "str | None"]


def changed(variables: dict[str, str], changes: Changes) -> dict[str, str]:
    return {name: value for name, value in (variables | changes).items() if value is not None}


def test_srun_gives_a_task_its_place() -> None:
    found = Environment.detect(SLURM)
    assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == (5, 1, 7, 2)
    assert (found.node_rank, found.num_nodes, found.launched_by, found.main_address) == (2, 4, "slurm", "node01")
    last = Environment.detect(SLURM | {"SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"})
    assert (last.local_world_size, last.main_port) == (1, found.main_port)  # nodes may run unequally many


def test_jobs_and_steps_have_ports_of_their_own() -> None:
    changes: list[Changes] = [{}, {"SLURM_JOB_ID": "101"}, {"SLURM_STEP_ID": "1"}]
    ports = {Environment.detect(changed(SLURM, each)).main_port for each in changes}
    assert len(ports) == 3
    assert all(port is not None and 1024 < port < 32768 for port in ports)
    chosen = Environment.detect(SLURM | {"MASTER_PORT": "31000", "MASTER_ADDR": "10.0.0.9"})
    assert (chosen.main_address, chosen.main_port) == ("10.0.0.9", 31000)


@pytest.mark.parametrize("variables", [
    {"SLURM_JOB_ID": "100", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NODELIST": "a"},  # a batch script
    SLURM | {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"},  # the shell of salloc
    SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun --pty bash, in a job of seven
    OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
    PMI | {"PMI_SIZE": "1"},
])  # fmt: skip
def test_one_task_is_one_process(variables: dict[str, str]) -> None:
    assert replace(Environment.detect(variables), waiting_tasks=0) == Environment()


def test_mpi_gives_a_process_its_place() -> None:
    found = Environment.detect(OPEN_MPI)
    assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == (3, 1, 4, 2)
    assert (found.node_rank, found.num_nodes, found.launched_by, found.main_address) == (1, 2, "mpi", "node01")
    one = Environment.detect(PMI)
    assert (one.rank, one.num_nodes, one.node_rank, one.main_address) == (1, 1, 0, "127.0.0.1")
    other = {"PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2", "MPI_LOCALRANKID": None}
    assert Environment.detect(changed(PMI, other)) == one


def test_the_inner_of_two_launchers_is_used() -> None:
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    assert Environment.detect(SLURM | torchrun).launched_by == "torchrun"
    assert Environment.detect(SLURM | OPEN_MPI).launched_by == "mpi"
    # srun started one proxy per node for Intel MPI's mpirun, which started two processes per node.
    proxy = SLURM | PMI | {"SLURM_NTASKS": "4", "PMI_SIZE": "4", "PMI_RANK": "1", "MASTER_ADDR": "a"}
    assert Environment.detect(proxy | {"PMI_SIZE": "8", "MPI_LOCALNRANKS": "2"}).world_size == 8
    assert Environment.detect(SLURM | {"PMI_RANK": "5", "PMI_SIZE": "7"}).launched_by == "slurm"  # srun --mpi=pmi2


@pytest.mark.parametrize(("variables", "changes", "text"), [
    (SLURM, {"SLURM_LOCALID": None}, "has variables of srun, but no SLURM_LOCALID"),
    (SLURM, {"SLURM_NTASKS": None}, "no SLURM_STEP_NUM_TASKS or SLURM_NTASKS"),
    (SLURM, {"SLURM_PROCID": "five"}, "SLURM_PROCID='five'; expected an integer"),
    (SLURM, {"SLURM_PROCID": "7"}, "SLURM_PROCID=7.*these are inconsistent"),
    (SLURM, {"SLURM_LOCALID": "2"}, "SLURM_LOCALID=2.*these are inconsistent"),
    (SLURM, {"SLURM_TASKS_PER_NODE": "2(x3)"}, "these are inconsistent"),
    (SLURM, {"SLURM_STEP_NODELIST": "node[01-03"}, "these are inconsistent"),
    (SLURM, {"MASTER_PORT": "70000"}, "MASTER_PORT=70000; ports from 1 to 65535"),
    (OPEN_MPI, {"MASTER_ADDR": None}, "2 nodes, but not MASTER_ADDR"),
    (OPEN_MPI, {"OMPI_COMM_WORLD_LOCAL_RANK": None}, "no OMPI_COMM_WORLD_LOCAL_RANK"),
    (OPEN_MPI, {"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4.*below their world size"),
    (OPEN_MPI, {"OMPI_COMM_WORLD_SIZE": "5"}, "the same number of processes"),
    (PMI, {"MPI_LOCALRANKID": None}, "no MPI_LOCALRANKID"),
])  # fmt: skip
def test_what_is_missing_or_contradicts_itself_is_refused(
    variables: dict[str, str], changes: Changes, text: str
) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        Environment.detect(changed(variables, changes))
    assert (
        "unset" in str(caught.value)
        or "Set" in str(caught.value)
        or "-x" in str(caught.value)
        or "Start" in str(caught.value)
    )


@pytest.mark.parametrize(("text", "hosts"), [
    ("node[01-03,7],gpu5", ["node01", "node02", "node03", "node7", "gpu5"]),
    ("a", ["a"]),
    ("r[1-2]n[08-10]", [f"r{rack}n{node}" for rack in (1, 2) for node in ("08", "09", "10")]),
    ("n[1,3]-ib", ["n1-ib", "n3-ib"]),
])  # fmt: skip
def test_node_lists_are_written_out(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.launch
def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import trainwright as tw\ntw.Engine()")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        job = Started(
            python("train.py"), tmp_path, **(PMI | {"PMI_RANK": "0", "MPI_LOCALRANKID": "0", "MASTER_PORT": port})
        )
        assert job.wait() == 1
    assert f"LaunchError: port {port} of 127.0.0.1 cannot be listened on (Address already in use)" in job.stderr
    assert "MASTER_PORT" in job.stderr


@pytest.mark.parametrize(("variables", "job"), [
    ({}, ""),
    ({"SLURM_JOB_ID": "7"}, "7"),
    ({"SLURM_JOBID": "8"}, "8"),
    ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}, "5_2"),
    ({"SLURM_JOB_ID": "7; rm"}, ""),
    ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "--all"}, ""),
])  # fmt: skip
def test_the_number_of_a_slurm_job_is_read(variables: dict[str, str], job: str) -> None:
    assert read_slurm_job(variables) == job


def test_a_requeue_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert re.fullmatch(r"SLURM's job 7 could not be requeued \(.*scontrol.*\); restart it by hand\.", requeue("7"))
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho no such job >&2\nexit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    assert requeue("7") == "SLURM's job 7 could not be requeued (exit code 1: no such job); restart it by hand."
