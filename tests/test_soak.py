"""Killed runs end like uninterrupted ones, and a soak that kills them finds a difference if there is one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import interpret, run_python, run_ranks
from interpreters import run_command

pytestmark = pytest.mark.timeout(600)

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
SCRIPT = FOLDER / "soak.py"
ONE_KILL = {9: "ddp_sharded", 11: "ddp", 7: "deepspeed_stage_1", 8: "deepspeed_stage_3"}
"""By the number of its run. 9: a rank in a validation, 11: the launcher in a step, 7: all in a save, 8: a rank in a save.
DeepSpeed's stage 2 saves and loads as stage 1 does."""

Soak = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def program() -> Iterator[Any]:
    """The soak in this process. Forked ranks make its uninterrupted runs, once."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("soak")
    known: dict[tuple[str, int, bool], Any] = {}

    def oracle(soak: Any, strategy: str) -> Any:
        ranks, epochs = module.RANKS.get(strategy, 2), soak.options.epochs
        key = (strategy, epochs, soak.options.without_torchmetrics)
        if key not in known:
            folder = soak.out / f"oracle-{strategy}"
            folder.mkdir(parents=True)
            settings = {"strategy": strategy, "devices": ranks, "folder": folder, "epochs": epochs}
            command = [
                str(FOLDER / "soak_job.py"),
                *(str(each) for key in settings for each in (f"--{key}", settings[key])),
                *(["--without-torchmetrics"] if soak.options.without_torchmetrics else []),
            ]
            with pytest.MonkeyPatch.context() as variables:
                variables.setenv("SOAK_EVENTS", str(folder / "events"))
                variables.setenv("DS_ACCELERATOR", "cpu")
                if ranks > 1:
                    run_ranks(interpret, (command,), ranks, folder, 180.0)
                else:
                    done = run_python(*command, folder=folder, seconds=180.0)
                    assert done.returncode == 0, done.stderr
            known[key] = module.read_outcome(folder, module.FINAL, ranks)
        return known[key]

    patch.setattr(module.Soak, "oracle", oracle)
    yield module
    patch.undo()


@pytest.fixture
def soak(program: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Soak:
    """Return the exit code and the output of a soak."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*arguments: str) -> tuple[int, str]:
        code = program.main(["--out", str(tmp_path), *arguments])
        return code, capsys.readouterr().out

    return run


@pytest.mark.launch
def test_a_killed_process_ends_as_the_one_that_nobody_killed(tmp_path: Path) -> None:
    arguments = ("--only", "0", "--strategies", "single_device", "--per-run", "1", "--epochs", "3")
    done = run_command([sys.executable, "-W", "error", SCRIPT, "--out", tmp_path, *arguments], seconds=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kill 1: rank 0" in done.stdout
    assert "1 kills in 1 runs of 1 strategies: 0 runs that differ, 0 lost checkpoints, 0 things left" in done.stdout


@pytest.mark.slow
def test_a_run_survives_three_kills(soak: Soak) -> None:
    """A rank, the launcher and all processes are killed. After a kill, nothing of the job remains."""
    settings = ("--strategies", "fsdp", "--per-run", "3", "--epochs", "4", "--without-torchmetrics")
    code, said = soak("--only", "3", *settings)
    assert code == 0, said
    assert "3 kills in 1 runs of 1 strategies: 0 runs that differ, 0 lost checkpoints, 0 things left" in said
    for victim in ("rank ", "the launcher, ", "all, "):
        assert f": {victim}" in said


@pytest.mark.slow
@pytest.mark.parametrize(("number", "strategy"), ONE_KILL.items())
def test_runs_of_other_strategies_survive_a_kill(soak: Soak, number: int, strategy: str) -> None:
    """The victim and the time follow from the run's number. `make soak` kills every strategy many times."""
    settings = ("--strategies", strategy, "--per-run", "1", "--epochs", "3", "--without-torchmetrics")
    code, said = soak("--only", str(number), *settings)
    assert code == 0, said
    assert "1 kills in 1 runs of 1 strategies: 0 runs that differ, 0 lost checkpoints, 0 things left" in said


@pytest.mark.slow
@pytest.mark.parametrize(("part", "keys"), [
    ("generators", ["rank/0/rng"]),
    ("scale", ["state/precision/", "state/position/skipped_steps"]),  # it may end at the same scale again
    ("early_stopping", ["state/callbacks/EarlyStopping"]),
])  # fmt: skip
def test_what_a_resumed_run_forgets_is_found(soak: Soak, part: str, keys: list[str]) -> None:
    settings = ("--strategies", "single_device", "--per-run", "1", "--epochs", "3", "--without-torchmetrics")
    code, said = soak("--only", "0", *settings, "--forget", part)
    assert code == 1, said
    assert "1 runs that differ" in said
    assert any(f"    {key}" in said for key in keys), said
