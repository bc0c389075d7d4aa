"""Jobs of SLURM and of Open MPI, started as docs/slurm.md and docs/launching.md show."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from deadlines import wait_until
from interpreters import run_command
from slurm_daemons import UNFINISHED, VARIABLES, Slurm, require, running_slurm
from small import assert_equal
from started import ROOT

pytestmark = pytest.mark.cluster
BATCH, SCRIPT, ARRAY = re.findall(
    r"^```\w*\n(.*?)^```$", (ROOT / "docs/slurm.md").read_text(), re.MULTILINE | re.DOTALL
)
SRUN = BATCH.splitlines()[-1]
FIT = "\ntrainer.fit(module, train_loader)"
FAILING = "trainer = tw.Trainer()\nif trainer.global_rank == 1: {}" + FIT
BEFORE = """
import os, psutil, sys, time
import torch
import trainwright as tw
from small import Classifier, make_loader

class Slow(Classifier):
    def training_step(self, batch, batch_idx):
        if "STEP_SECONDS" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:
            print("trains", flush=True)
            time.sleep(float(os.environ["STEP_SECONDS"]))
        return super().training_step(batch, batch_idx)

folder = sys.argv[-1]
module, train_loader = Slow(dropout=0.2), make_loader(shuffle=True)
"""
AFTER = """
print({each.laddr.ip for each in psutil.Process().net_connections() if each.status == "LISTEN"})
torch.save(module.state_dict(), f"rank{trainer.global_rank}-of-{trainer.world_size}.pt")
"""


def changed(text: str, **values: object) -> str:
    """Replace the values of options in a batch file."""
    for name, value in values.items():
        option = "--" + name.replace("_", "-")
        text, number = re.subn(rf"^(#SBATCH {option})=.*$", rf"\1={value}", text, flags=re.MULTILINE)
        assert number == 1, option
    return text


def project(folder: Path, script: str = SCRIPT) -> Path:
    """Make the folder of a user."""
    (folder / "logs").mkdir(parents=True)
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").write_text(f'export PATH="{Path(sys.executable).parent}:$PATH"\n')
    (folder / "train.py").write_text(BEFORE + script + AFTER)
    return folder


def weights(folder: Path, world_size: int) -> dict[str, torch.Tensor]:
    """Return the weights at the end of a run, the same on all ranks."""
    first, *others = (torch.load(folder / f"rank{rank}-of-{world_size}.pt") for rank in range(world_size))
    for other in others:
        assert_equal(first, other)
    return first


def output(folder: Path, job: str) -> str:
    return "".join(file.read_text() for file in folder.glob(f"logs/*{job}.out"))


def wait_until_it_trains(slurm: Slurm, folder: Path, job: str) -> None:
    wait_until(lambda: slurm.state(job)["JobState"] not in UNFINISHED or "trains\n" in output(folder, job), 120)


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with running_slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def limited_job(daemons: Slurm, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Submit a job longer than its time limit, which runs during the other tests. SLURM signals it after 60 to 90 s."""
    folder = project(tmp_path_factory.mktemp("limited") / "project")
    file = changed(BATCH, ntasks_per_node=2, cpus_per_task=1, time="00:02:00", signal="USR1@30")
    return daemons.submit(folder, file, STEP_SECONDS="2"), folder


@pytest.fixture(scope="module")
def slurm(daemons: Slurm, limited_job: tuple[str, Path]) -> Slurm:
    return daemons


def test_sigterm_saves_and_ends_the_job(slurm: Slurm, tmp_path: Path) -> None:
    file = changed(BATCH, ntasks_per_node=1, cpus_per_task=1)
    ends = {"CANCELLED": ["scancel"], "FAILED": ["scancel", "--signal=TERM"]}
    jobs = {name: slurm.submit(project(tmp_path / name), file, STEP_SECONDS="1") for name in ends}
    for name, command in ends.items():
        wait_until_it_trains(slurm, tmp_path / name, jobs[name])
        assert slurm.run(*command, jobs[name]).returncode == 0
    for name, job in jobs.items():
        state, said = slurm.wait(job), output(tmp_path / name, job)
        assert (state["JobState"], state["Restarts"]) == (name, "0"), said
        assert "SIGTERM has stopped the run" in said
        assert "Exited with exit code 75" in said
        assert "requeued" not in said


def test_each_task_of_an_array_is_saved_and_requeued_in_its_own_folder(slurm: Slurm, tmp_path: Path) -> None:
    folder = project(tmp_path / "a", SCRIPT.replace('"runs/mine"', "folder"))
    option, _, command = ARRAY.partition("\n\n")
    file = BATCH.replace("\n\n", f"\n{option}\n\n", 1).replace(SRUN, command)
    file = changed(file, nodes=1, ntasks_per_node=1, cpus_per_task=1, array="0-1", output="logs/%A_%a.out")
    array = slurm.submit(folder, file, STEP_SECONDS="1")
    jobs = [f"{array}_0", f"{array}_1"]
    for job in jobs:
        wait_until_it_trains(slurm, folder, job)
    assert slurm.run("scancel", "--signal=USR1", array).returncode == 0
    for job in jobs:
        state, said = slurm.wait(job), output(folder, job)
        assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), said
        assert f"SLURM's job {job} was requeued." in said
        assert re.search(rf"resuming from \S+/runs/{job.replace('_', '-')}/stop-\S+: epoch", said)


def test_a_batch_script_without_srun_is_one_process_and_warns_once(slurm: Slurm, tmp_path: Path) -> None:
    file = changed(BATCH, nodes=1, ntasks_per_node=2, cpus_per_task=1).replace(SRUN, "python train.py")
    job = slurm.submit(project(tmp_path / "a", "trainer = tw.Trainer()\ntrainer = tw.Trainer()"), file)
    assert slurm.wait(job)["JobState"] == "COMPLETED"
    assert weights(tmp_path / "a", 1)
    warning = "1 process(es), and its SLURM allocation 2 tasks: start the script with srun"
    assert output(tmp_path / "a", job).count(warning) == 1


@pytest.mark.parametrize("command", [["salloc"], ["srun", "--pty"]], ids=" ".join)
def test_an_interactive_shell_starts_its_own_processes(slurm: Slurm, tmp_path: Path, command: list[str]) -> None:
    project(tmp_path / "a", f"trainer = tw.Trainer(devices=2, max_epochs=1){FIT}")
    done = slurm.run(*command, "bash", "-c", f"{sys.executable} train.py", folder=tmp_path / "a")
    assert done.returncode == 0, done.stdout
    assert weights(tmp_path / "a", 2)


def test_devices_that_contradict_the_tasks_are_rejected(slurm: Slurm, tmp_path: Path) -> None:
    project(tmp_path / "a", "trainer = tw.Trainer(devices=3)")
    done = slurm.run("srun", "--nodes=1", "--ntasks-per-node=2", sys.executable, "train.py", folder=tmp_path / "a")
    assert done.returncode == 1
    assert "devices=3 was passed, but this job was launched with 2 processes on this node; pass dev" in done.stderr


@pytest.mark.parametrize(("statement", "code", "text"), [
    ("raise ArithmeticError('no luck')", 1, "1: [rank1]: ArithmeticError: no luck"),
    ("sys.exit(3)", 3, "rank 1 has exited while rank 0 waits for it"),
])  # fmt: skip
def test_a_failing_rank_is_named_and_srun_returns_its_exit_code(
    slurm: Slurm, tmp_path: Path, statement: str, code: int, text: str
) -> None:
    project(tmp_path / "a", FAILING.format(statement))
    done = slurm.run("srun", "-n2", "--label", sys.executable, "train.py", folder=tmp_path / "a")
    assert done.returncode == code
    assert text in done.stderr


def test_mpirun_starts_the_ranks_of_a_job(tmp_path: Path) -> None:
    require("mpirun")
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe")
    command = ["mpirun", "-n", 2, "--map-by", "ppr:2:node", "-x", "MASTER_ADDR=127.0.0.1", sys.executable, "train.py"]
    for script, code, addresses in ((SCRIPT, 0, ["{'127.0.0.1'}"] * 2), (FAILING.format("sys.exit(3)"), 3, [])):
        folder = project(tmp_path / str(code), script)
        done = run_command(command, folder=folder, **VARIABLES | dict.fromkeys(names, "1"))
        assert done.returncode == code, done.stderr
        assert re.findall(r"\{.*\}", done.stdout) == addresses
    assert weights(tmp_path / "0", 2)


def test_the_file_that_launch_prints_starts_the_ranks(slurm: Slurm, tmp_path: Path) -> None:
    folder = project(tmp_path / "a")
    flags = ["--emit", "slurm", "--devices", "2", "--num-nodes", "2", "--cpus", "1", "--time", "5", "--logs", "logs"]
    command = [sys.executable, "-m", "trainwright", "launch", *flags, "train.py"]
    job = slurm.submit(folder, run_command(command, folder=folder, **VARIABLES).stdout)
    assert slurm.wait(job)["JobState"] == "COMPLETED", output(folder, job)
    assert weights(folder, 4)


def test_a_job_near_its_time_limit_is_requeued_and_ends_as_if_uninterrupted(
    slurm: Slurm, limited_job: tuple[str, Path], tmp_path: Path
) -> None:
    command = ["srun", "--nodes", "2", "--ntasks-per-node", "2", sys.executable, "train.py"]
    done = slurm.run(*command, folder=project(tmp_path / "a"))
    assert done.returncode == 0, done.stderr
    job, folder = limited_job
    state, said = slurm.wait(job), output(folder, job)
    assert (state["JobState"], state["Restarts"], state["ExitCode"]) == ("COMPLETED", "1", "0:0"), said
    assert "SIGUSR1 has stopped the run in epoch" in said
    assert f"SLURM's job {job} was requeued." in said  # --open-mode=append
    assert_equal(weights(folder, 4), weights(tmp_path / "a", 4))
