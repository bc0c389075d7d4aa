"""Scripts of the kind that people have written for Accelerate run after a change of their import lines, with the same metrics.

The first line of a script in `wild/` describes it. Some scripts use features of Accelerate's documentation. The others
are rewritten from public training scripts, and stop within an epoch and resume there. All run on one process and on two.

A DeepSpeedPlugin and a FullyShardedDataParallelPlugin, with which Accelerate trains on GPUs, are in test_two_ranks.py, and
optimizers that are told when to train, as schedule-free ones are, in tests/engine/test_prepared.py.

`wild/recorded.json` has Accelerate's results. To record it again, in an environment that has accelerate:

    python tests/raw_loop/test_wild.py
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import re
import runpy
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from interpreters import run_command, search_path
from jobs import run_job
from small import ON_HOST

from trainwright.tools.migrate import migrate

FOLDER = Path(__file__).with_name("wild")
RECORDED = FOLDER / "recorded.json"
RUNS: dict[str, list[list[str]]] = {
    "gradient_accumulation": [[]],
    "autoregressive": [[]],
    "memory": [[]],
    "early_stopping": [[]],
    "cross_validation": [[]],
    "communication": [["--name", "hooked", "--ddp_comm_hook", "fp16"]],
    "diffusion": [
        [],
        ["--output_dir", "out", "--checkpointing_steps", "5", "--stop_after", "11"],
        ["--output_dir", "out", "--checkpointing_steps", "5", "--resume_from_checkpoint", "latest"],
    ],
    "lora": [
        [],
        ["--resume_from_checkpoint", "checkpoint-5"],  # into the folders of the first run
        ["--resume_from_checkpoint", "latest"],
    ],
    "glue": [[], ["--checkpointing_steps", "5", "--stop_after", "7"], ["--resume_from_checkpoint", "glue/step_5"]],
    "causal_lm": [
        [],
        ["--checkpointing_steps", "5", "--stop_after", "8", "--output_dir", "stopped"],
        ["--resume_from_checkpoint", "stopped/step_5", "--checkpointing_steps", "epoch", "--output_dir", "stopped"],
        ["--resume_from_checkpoint", "stopped/epoch_0", "--output_dir", "again"],
    ],
    "gan": [[], ["--save_every", "4", "--stop_after", "15"], ["--save_every", "4", "--resume"]],
}
"""The arguments of the scripts' runs, one after another in one folder."""
ON_TWO = RUNS | {
    "diffusion": [
        [],
        ["--output_dir", "out", "--checkpointing_steps", "3", "--stop_after", "5"],
        ["--output_dir", "out", "--checkpointing_steps", "3", "--resume_from_checkpoint", "latest"],
    ],
    "gan": [[], ["--save_every", "4", "--stop_after", "7"], ["--save_every", "4", "--resume"]],
}
"""The same on two processes, on which an epoch has half as many steps."""
TWO = " on 2 processes"
EXACT = 5e-5


def metrics_of(output: str, folder: Path) -> dict[str, float]:
    """Return the printed lines "name: number" of a script, and the scalars in TensorBoard's files."""
    found = {name: float(value) for name, value in re.findall(r"^([\w ]+): (-?\d[\d.e+-]*)$", output, re.MULTILINE)}
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.tensor.float_val and value.tag != "hp_metric":  # ours adds that for the table of settings
                    found[f"{value.tag} at {event.step}"] = value.tensor.float_val[0]
    return found


def converted(name: str) -> str:
    """Return a script for our library, as `trainwright migrate` rewrites it."""
    migrated, remarks = migrate(source(name))
    assert remarks == []
    return migrated


def source(name: str) -> str:
    return (FOLDER / f"{name}.py").read_text()


def run_script(program: str, runs: list[list[str]], folder: Path) -> dict[str, float]:
    (folder / "script.py").write_text(program)
    return metrics_of("".join(start(["script.py", *arguments], folder) for arguments in runs), folder)


def start(command: list[str], folder: Path) -> str:
    """Return the output of an interpreter."""
    variables = {"PYTHONPATH": search_path(*sys.path), "LOGLEVEL": "ERROR"}
    done = run_command([sys.executable, *command], folder=folder, seconds=600, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(ours: dict[str, float], theirs: dict[str, float]) -> None:
    assert sorted(ours) == sorted(theirs)
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, rel=EXACT, abs=EXACT), name


def recorded(name: str) -> dict[str, float]:
    found: dict[str, float] = json.loads(RECORDED.read_text())[name]
    return found


@pytest.mark.parametrize("name", RUNS)
def test_only_import_lines_change(name: str) -> None:
    before, after = source(name).splitlines(), converted(name).splitlines()
    changed = [line for line, other in zip(before, after, strict=True) if line != other]
    assert changed
    assert all(re.match(r"from accelerate(\.\w+)? import ", line) for line in changed)
    assert "accelerate " not in "\n".join(after).replace("for Accelerate", "")


@pytest.mark.parametrize("name", RUNS)
def test_the_metrics_are_those_that_accelerate_computed(tmp_path: Path, name: str) -> None:
    from forked import run_python

    (tmp_path / "script.py").write_text(converted(name))
    output = ""
    for arguments in RUNS[name]:
        done = run_python("script.py", *arguments, folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        output += done.stdout
    check(metrics_of(output, tmp_path), recorded(name))


RESUMED = {"diffusion": "latest", "lora": "latest", "glue": "resumed", "causal_lm": "step_5", "gan": "resumed"}
"""The names that the scripts print for their resumed runs, beside "whole"."""


@pytest.mark.parametrize("name", [*RESUMED, *(name + TWO for name in RESUMED)])
def test_a_resumed_run_ends_as_a_whole_one(name: str) -> None:
    """Both libraries compute the recorded results."""
    metrics, resumed = recorded(name), RESUMED[name.removesuffix(TWO)]
    pairs = {each: value for each, value in metrics.items() if each.startswith("whole")}
    assert len(pairs) > 1
    for each, value in pairs.items():
        assert metrics[each.replace("whole", resumed)] == pytest.approx(value, rel=EXACT, abs=EXACT)


@pytest.mark.slow
def test_what_is_recorded_is_what_accelerate_computes(tmp_path: Path) -> None:
    """All scripts run in one interpreter, since importing Accelerate takes seconds."""
    pytest.importorskip("accelerate")
    folder = write_programs(tmp_path, source, RUNS)
    for name, metrics in metrics_by_script(start([__file__, str(folder)], folder), folder).items():
        check(metrics, recorded(name))


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """The metrics of the scripts on two processes, all in one job."""
    folder = write_programs(tmp_path_factory.mktemp("two"), converted, ON_TWO)
    printed, nothing = run_job(captured, 2, folder)
    assert not nothing
    return metrics_by_script(printed, folder)


@pytest.mark.slow
@pytest.mark.skipif(not ON_HOST, reason="computes on the CPU")
@pytest.mark.parametrize("name", ON_TWO)
def test_two_processes_compute_what_accelerate_computed(on_two: dict[str, dict[str, float]], name: str) -> None:
    check(on_two[name], recorded(name + TWO))


@pytest.mark.slow
def test_accelerate_computes_the_same_metrics_on_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    for name, metrics in accelerates_on_two(tmp_path).items():
        check(metrics, recorded(name + TWO))


def write_programs(folder: Path, program: Callable[[str], str], names: Iterable[str]) -> Path:
    for name in names:
        (folder / name).mkdir()
        (folder / name / "script.py").write_text(program(name))
    return folder


def run_in_turn(folder: Path, all_runs: dict[str, list[list[str]]]) -> None:
    """Run all scripts on this rank, as if they ran in separate processes."""
    for name, runs in all_runs.items():
        os.chdir(folder / name)
        for arguments in runs:
            if os.environ.get("RANK", "0") == "0":
                print("==", name, flush=True)
            sys.argv[:] = ["script.py", *arguments]
            runpy.run_path("script.py", run_name="__main__")
            if "accelerate" in sys.modules:
                from accelerate.state import AcceleratorState, GradientState

                AcceleratorState._reset_state(reset_partial_state=True)
                GradientState._reset_state()


def captured(folder: Path) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run_in_turn(folder, ON_TWO)
    return printed.getvalue()


def metrics_by_script(printed: str, folder: Path) -> dict[str, dict[str, float]]:
    outputs: defaultdict[str, str] = defaultdict(str)
    for part in re.split(r"^== ", printed, flags=re.MULTILINE)[1:]:
        name, _, output = part.partition("\n")
        outputs[name] += output
    return {name: metrics_of(output, folder / name) for name, output in outputs.items()}


def accelerates_on_two(folder: Path) -> dict[str, dict[str, float]]:
    write_programs(folder, source, ON_TWO)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = start([*torchrun, __file__, str(folder)], folder)
    return metrics_by_script(printed, folder)


def record() -> None:
    """Run all scripts under Accelerate and write their metrics."""
    figures: dict[str, Any] = {"versions": {name: importlib.metadata.version(name) for name in ("accelerate", "torch")}}
    for name, runs in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            figures[name] = run_script(source(name), runs, Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        figures |= {name + TWO: metrics for name, metrics in accelerates_on_two(Path(folder)).items()}
    RECORDED.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    if sys.argv[1:]:
        with mock.patch("torch.distributed.destroy_process_group"):  # the next script needs it
            run_in_turn(Path(sys.argv[1]), ON_TWO if "RANK" in os.environ else RUNS)
        if "RANK" in os.environ:
            # Accelerate leaves models that hold the process group. A thread of gloo that releases a tensor while the
            # interpreter ends would abort the process, so the interpreter does not end.
            sys.stdout.flush()
            os._exit(0)
    else:
        record()
