"""The config under `trainwright launch`: the order of overrides, the shown sources, and the errors."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from trainwright.__main__ import check_names
from trainwright.launch import cli
from trainwright.launch.cli import launch_command
from trainwright.launch.config import KEYS, config_path

CONFIG = """\
devices: 2   # of this machine
cpu: true
strategy: fsdp
precision: 16-mixed
gradient_accumulation_steps: 4
num_nodes: ~
grace_seconds: 7
env:
  FIRST: one two
  SECOND: no
  MY_TOKEN: sesame
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The jobs that launch would have started."""
    for name in ("RANK", *(entry.variable for entry in KEYS.values())):
        monkeypatch.delenv(name, raising=False)
    for name in ("FIRST", "SECOND", "MY_TOKEN"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    started: list[Any] = []
    monkeypatch.setattr(cli, "supervise", lambda job: started.append(job) or 0)
    Path("train.py").touch()
    return started


def launch(text: str, *arguments: str) -> int:
    Path("mine.yaml").write_text(text)
    return launch_command(["--config-file", "mine.yaml", *arguments, "train.py"], check_names)


def rows(text: str) -> set[str]:
    return {" ".join(line.split()) for line in text.splitlines()}


def test_a_config_fills_what_flags_leave_open(started: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(CONFIG) == 0
    (job,) = started
    assert (job.num_processes, job.grace_seconds, job.nodes.count) == (2, 7, 1)
    assert job.defaults == {
        "strategy": "fsdp",
        "precision": "16-mixed",
        "gradient_accumulation_steps": 4,
        "accelerator": "cpu",
    }
    assert (os.environ["FIRST"], os.environ["SECOND"], os.environ["MY_TOKEN"]) == ("one two", "no", "sesame")
    said = capsys.readouterr().err
    shown = [
        "config mine.yaml --config-file", "devices 2 mine.yaml", "accelerator cpu mine.yaml",
        "gradient_accumulation_steps 4 mine.yaml", "num_nodes 1 default", "grace_seconds 7 mine.yaml",
        "env FIRST one two mine.yaml", "env MY_TOKEN (not shown) mine.yaml",
    ]  # fmt: skip
    assert not set(shown) - rows(said)
    assert "sesame" not in said


def test_flags_override_the_environment_which_overrides_the_config(
    started: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINWRIGHT_GRACE_SECONDS", "8")
    monkeypatch.setenv("TRAINWRIGHT_LOGS", "kept")
    monkeypatch.setenv("TRAINWRIGHT_JOB_ID", "overridden")
    monkeypatch.setenv("FIRST", "mine")
    flags = ["--devices", "3", "--precision=32", "--strategy", "fsdp", "--gradient-accumulation-steps", "1", "--no-cpu"]
    assert launch(CONFIG + "job_id: overridden\n", *flags, "--job-id", "mine") == 0
    (job,) = started
    assert (job.num_processes, job.grace_seconds, os.environ["FIRST"]) == (3, 8, "mine")
    assert (job.logs, job.job_id) == ("kept", "mine")
    assert job.defaults == {
        "strategy": "fsdp",
        "precision": "32-true",
        "gradient_accumulation_steps": 1,
        "accelerator": None,
    }
    said = rows(capsys.readouterr().err)
    assert said > {
        "devices 3 --devices",
        "precision 32-true --precision",
        "gradient_accumulation_steps 1 --gradient-accumulation-steps",
        "grace_seconds 8 TRAINWRIGHT_GRACE_SECONDS",
    }


@pytest.mark.parametrize(("word", "name"), [("no", "32-true"), ("fp16", "16-mixed"), ("BF16", "bf16-mixed")])
def test_the_accelerators_names_of_precisions_are_accepted(word: str, name: str, started: list[Any]) -> None:
    assert launch(f"precision: {word}\n") == 0
    assert launch("", "--precision", word) == 0
    assert [job.defaults["precision"] for job in started] == [name, name]


def test_a_flag_makes_one_node_of_a_config_of_several(started: list[Any]) -> None:
    several = "num_nodes: 2\nnode_rank: 1\nmain_address: 10.0.0.1\nmain_port: 1234\n"
    assert launch(several) == 0
    assert launch(several, "--num-nodes", "1") == 0
    nodes = [job.nodes for job in started]
    assert [(each.count, each.rank, each.address, each.port) for each in nodes] == [
        (2, 1, "10.0.0.1", 1234),
        (1, 0, "127.0.0.1", 0),
    ]


def test_a_dry_run_starts_nothing(started: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(CONFIG + "logs: kept\n", "--dry-run") == 0
    assert not started
    assert not Path("kept").exists()
    said = capsys.readouterr()
    assert said.out == f"would run {sys.executable} train.py\n"
    assert {"devices 2 mine.yaml", "strategy fsdp mine.yaml", "env MY_TOKEN (not shown) mine.yaml"} < rows(said.err)


def test_where_the_config_is(started: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINWRIGHT_CONFIG", "b.yaml")
    assert config_path("a.yaml") == ("a.yaml", "--config-file")
    assert config_path(None)[0] == "b.yaml"
    monkeypatch.delenv("TRAINWRIGHT_CONFIG")
    monkeypatch.setenv("HOME", "/home/one")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert config_path(None) == ("/home/one/.config/trainwright/config.yaml", "default")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert launch_command(["train.py"], check_names) == 0  # the user's config need not exist
    (tmp_path / "trainwright").mkdir()
    (tmp_path / "trainwright/config.yaml").write_text("devices: 3")
    assert launch_command(["train.py"], check_names) == 0
    assert [job.num_processes for job in started] == [1, 3]


@pytest.mark.parametrize(("text", "said"), [
    ("# one\ndevcies: 2", "mine.yaml: 'devcies' is not a key of a config. Expected one of devices, cpu,"),
    ("mixed_precision: fp16", "Did you mean 'precision'?"),
    ("devices: two", "mine.yaml: devices: two: expected an integer of at least 1, -1 for all, or auto."),
    ("cpu: yes", "mine.yaml: cpu: yes: expected true or false."),
    ("strategy: dpd", "mine.yaml: strategy='dpd' is unknown; choose from auto"),
    ("\nprecision: half", "mine.yaml: precision='half' is unknown; choose from"),
    (
        "gradient_accumulation_steps: 0",
        "mine.yaml: gradient_accumulation_steps: 0: expected an integer of at least 1",
    ),
    ("a: [1", "mine.yaml: while parsing a flow sequence"),
    ("- devices", "mine.yaml: expected lines of `name: value`, also under env."),
    ("devices: [1, 2]", "mine.yaml: devices is ['1', '2']. Expected a single value."),
    ("env: 3", "mine.yaml: expected lines of `name: value`, also under env."),
    (
        "env:\n  MASTER_PORT: 1",
        "mine.yaml: env has MASTER_PORT, which trainwright launch sets itself. Remove it, or set its",
    ),
    ("env:\n  RANK: 1", "mine.yaml: env has RANK, which trainwright launch sets itself. Remove it"),
])  # fmt: skip
def test_a_wrong_config_is_rejected_with_its_path(text: str, said: str, started: list[Any], capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        launch(text)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
    assert not started


def test_a_config_that_cannot_be_read_is_reported(started: list[Any], capsys: Any, monkeypatch: Any) -> None:
    Path("bytes.yaml").write_bytes(b"devices: \xff")
    for name, said in (
        ("none.yaml", "none.yaml: [Errno 2] No such file"),
        (".", ".: [Errno 21] Is a directory"),
        ("bytes.yaml", "bytes.yaml: 'utf-8' codec can't decode byte 0xff"),
    ):
        monkeypatch.setenv("TRAINWRIGHT_CONFIG", name)
        with pytest.raises(SystemExit):
            launch_command(["train.py"], check_names)
        assert said in capsys.readouterr().err


def test_what_a_config_may_hold_are_flags() -> None:
    assert set(KEYS) - {"env"} <= set(vars(cli.launch_parser().parse_args([])))
