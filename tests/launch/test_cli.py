"""`trainwright launch`: its settings, its errors, and its jobs."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from interpreters import run_command
from started import Started, python

from trainwright.__main__ import check_names
from trainwright.devices import hardware
from trainwright.launch.cli import launch_command

SCRIPT = """
import json, os, sys
import trainwright as tw

mode = sys.argv[1]
if mode == "again" and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] != sys.argv[2]:
    tw.Accelerator()  # so that it is in the job, and the other rank waits for it there
    raise RuntimeError("not yet")
accelerator = tw.Accelerator(**({"precision": 32} if mode == "has its own" else {}))
engine = accelerator.engine
print(json.dumps({
    "rank": engine.rank,
    "world": engine.world_size,
    "strategy": engine.strategy.name,
    "precision": engine.precision.name,
    "arguments": sys.argv[1:],
    "name": __name__,
    "restarts": engine.environment.restart_count,
}), flush=True)
print("to stderr", file=sys.stderr, flush=True)
accelerator.wait_for_everyone()
"""

SLURM = ["--emit", "slurm", "--devices", "2", "--time", "1"]
KUBERNETES = ["--emit", "kubernetes", "--devices", "2", "--image", "a", "--volume"]


def job(folder: Path, *arguments: str) -> Started:
    (folder / "train.py").write_text(SCRIPT)
    return Started(python("-m", "trainwright", "launch", *arguments), folder)


@pytest.fixture
def started() -> Iterator[list[Started]]:
    started: list[Started] = []
    yield started
    for each in started:
        each.close()


def seen_of(job: Started) -> list[dict[str, object]]:
    lines = [line[line.index("{") :] for line in job.stdout.splitlines() if "{" in line]
    return sorted((json.loads(line) for line in lines), key=lambda seen: seen["rank"])


@pytest.mark.launch
def test_a_module_runs_with_what_the_command_line_says(tmp_path: Path, started: list[Started]) -> None:
    options = ["--devices", "2", "--strategy=ddp", "--precision", "bf16-mixed", "--logs", "kept", "--cpu"]
    started.append(job(tmp_path, *options, "-m", "train", "run", "--devices", "7"))
    assert started[0].wait() == 0, started[0].stderr
    common = {"world": 2, "strategy": "ddp", "precision": "bf16-mixed", "name": "__main__", "restarts": 0}
    assert seen_of(started[0]) == [{"rank": rank, "arguments": ["run", "--devices", "7"], **common} for rank in (0, 1)]
    said = [" ".join(line.split()) for line in started[0].stderr.splitlines()]
    assert said[0] == "trainwright launch: 2 process(es) of train on this machine"
    shown = [
        "devices 2 --devices",
        "accelerator cpu --cpu",
        "strategy ddp --strategy",
        "precision bf16-mixed --precision",
    ]
    shown += ["num_nodes 1 default", "max_restarts 0 default", "logs kept --logs"]
    assert not set(shown) - set(said)
    for rank in (0, 1):
        log = (tmp_path / "kept" / f"rank{rank}.log").read_text()
        assert sorted(log.splitlines()) == sorted(["to stderr", json.dumps(seen_of(started[0])[rank])])
    started[0].check_nothing_left()


@pytest.mark.launch
def test_the_scripts_settings_win_with_a_warning(tmp_path: Path, started: list[Started]) -> None:
    started.append(job(tmp_path, "--devices", "2", "--precision", "16", "train.py", "has its own"))
    assert started[0].wait() == 0, started[0].stderr
    assert [seen["precision"] for seen in seen_of(started[0])] == ["32-true", "32-true"]
    text = (
        "the command line or its config says --precision 16-mixed, and the script precision=32; the script's is used."
    )
    assert started[0].stderr.count(text) == 1


@pytest.mark.launch
def test_all_ranks_restart_after_a_failure(tmp_path: Path, started: list[Started]) -> None:
    started.append(job(tmp_path, "--devices", "2", "--max-restarts", "2", "train.py", "again", "1"))
    assert started[0].wait() == 0, started[0].stderr
    # Rank 0 may also have come so far at the first start.
    assert [seen["rank"] for seen in seen_of(started[0]) if seen["restarts"] == 1] == [0, 1]
    text = "rank 1 of 2 failed first (RuntimeError: not yet); restarting all ranks, restart 1 of 2.\n"
    assert started[0].stderr.count(text) == 1
    assert "restart 2 of 2" not in started[0].stderr
    started[0].check_nothing_left()


@pytest.mark.launch
@pytest.mark.slow
def test_restarts_are_limited(tmp_path: Path, started: list[Started]) -> None:
    started.append(job(tmp_path, "--devices", "2", "--max-restarts", "1", "train.py", "again", "never"))
    assert started[0].wait() == 1
    assert "failed first (RuntimeError: not yet); restarting all ranks, restart 1 of 1.\n" in started[0].stderr
    assert "failed first (RuntimeError: not yet); the job was ended.\n" in started[0].stderr
    assert started[0].stderr.count("Traceback") == 2
    started[0].check_nothing_left()


@pytest.mark.launch
def test_a_main_port_in_use_is_reported_at_once(tmp_path: Path, started: list[Started]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        started.append(job(tmp_path, "--devices", "2", "--main-port", port, "train.py", "run"))
        assert started[0].wait() == 1
    assert f"trainwright: port {port} of 127.0.0.1 cannot be listened on (Address already in use)" in started[0].stderr
    assert "Traceback" not in started[0].stderr


@pytest.mark.parametrize(("arguments", "text"), [
    (["--device", "2", "x.py"], "'--device' is not an option of trainwright launch. Did you mean '--devices'?"),
    (["--num_processes", "2", "x.py"], "'--num_processes' is not an option of trainwright launch. Did you mean '--dev"),
    (["--main-process-port=1", "x.py"], "Did you mean '--main-port'?"),
    (["--devices=0", "x.py"], "--devices 0: expected an integer of at least 1, -1 for all, or auto."),
    (["--devices"], "argument --devices: expected one argument"),
    ([], "no script was given. Pass one, or -m and a module"),
    (["x.py"], "file 'x.py' does not exist. Pass the path of a script"),
    (["-m"], "-m needs the name of a module after it."),
    (["--module=train"], "argument -m/--module: ignored explicit argument 'train'"),
    (["--strategy", "dpd", "x.py"], "strategy='dpd' is unknown; choose from auto"),
    (["--precision", "float16", "x.py"], "precision='float16' is unknown; choose from"),
    (["--num-nodes", "2", "x.py"], "num_nodes=2 needs node_rank (this machine's number, from 0) and main_address"),
    (["--num-nodes", "2", "--node-rank", "0", "x.py"], "num_nodes=2 needs main_address (name or"),
    (["--num-nodes", "2", "--node-rank", "-1", "--main-address", "a", "x.py"],
     "--node-rank -1: expected an integer of at least 0."),
    (["--node-rank", "1", __file__], "node_rank=1 is out of range for num_nodes=1"),
    (["--num-nodes", "2", "--node-rank", "2", "--main-address", "a", __file__],
     "node_rank=2 is out of range for num_nodes=2; nodes are numbered from 0 to 1"),
    (["--main-address", "a", "x.py"], "--main-address and --rendezvous-seconds are for several machines"),
    (["--main-port", "70000", __file__], "main_port=70000 is not a port"),
    (["--rendezvous-seconds", "9", "x.py"], "are for several machines. Add --num-nodes or --nodes, or remove them."),
    (["--nodes", "1:4", "--node-rank", "0", "x.py"], "nodes=1:4 replaces --num-nodes and --node-rank. Remove"),
    (["--nodes", "1:4", "--num-nodes", "4", "x.py"], "nodes=1:4 replaces --num-nodes and --node-rank"),
    (["--nodes", "4:2", "x.py"], "nodes=4:2: expected MIN:MAX, two integers of at least 1"),
    (["--nodes", "1:", "x.py"], "--nodes 1:: expected MIN:MAX"),
    (["--nodes", "1:4", "x.py"], "nodes=1:4 needs main_address (name or address of machine 0). Set"),
    (["--nodes", "1:4", "--main-address", "a", "--main-port", "0", __file__], "main_port=0 is not a port"),
    (["--emit", "pbs", __file__], "argument --emit: invalid choice: 'pbs'"),
    (["--emit", "slurm", "--time", "1", __file__], "--emit slurm needs --devices. Add it, for example --devices 4."),
    ([*SLURM[:-2], __file__], "--emit slurm needs --time. Add it, for example --time 04:00:00."),
    ([*SLURM, "x.py"], "file 'x.py' does not exist. Pass the path of a script"),
    ([*SLURM, "--devices", "-1", __file__], "--devices -1: expected an integer of at least 1."),
    ([*SLURM, "--image", "a", __file__], "--image was given with --emit slurm, which takes --devices, --time,"),
    ([*SLURM[:-1], "soon", __file__], "--time soon: expected minutes, HH:MM:SS"),
    ([*KUBERNETES, "R_x", __file__], "--volume R_x: expected lowercase letters"),
    ([*KUBERNETES, "runs", "--job-id", "My_Run", __file__], "--job-id My_Run: expected lowercase letters"),
    (["--logs", f"{__file__}/below", __file__], "Not a directory"),
    ([*SLURM, "--strategy", "ddp", __file__], "--strategy was given with --emit slurm, which takes"),
    (["--emit", "kubernetes", "--devices", "2", "a.py"], "--emit kubernetes needs --image. Add it, for example"),
    ([*KUBERNETES, "a"], "no script was given."),
    (["--image", "a", __file__], "--image is for the files of --emit. Add --emit, or leave it out."),
])  # fmt: skip
def test_a_wrong_use_is_refused_at_once(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NODE_RANK", "MASTER_ADDR", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as caught:
        launch_command([*arguments], check_names)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert text in said
    assert said.endswith("See `trainwright launch --help`.\n")


def test_devices_that_are_not_there_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "built_for", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        launch_command(["--devices", "4", __file__], check_names)
    assert "devices=4: torch sees 2 GPU(s) here. Pass at most that many, or add --cpu." in capsys.readouterr().err


def test_a_worker_cannot_launch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit):
        launch_command([__file__], check_names)
    assert "this process is itself a rank of a job" in capsys.readouterr().err


def test_help_lists_commands_and_unknown_ones_are_rejected() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_command(python("-m", "trainwright", *arguments))

    shown = run("--help").stdout
    assert "launch      run a script in several processes" in shown
    assert "checkpoint  show, verify, export or import" in shown
    assert "--main-address ADDRESS" in run("launch", "--help").stdout
    wrong = run("lanch")
    assert wrong.returncode == 2
    text = "'lanch' is not a command. Choose from launch, config, test, ladder, estimate, env, runs, plot, migrate, "
    text += "checkpoint. Did you mean 'launch'?"
    assert text in wrong.stderr
