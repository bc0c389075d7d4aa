"""`trainwright config`: its questions and its file, which is written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from trainwright.__main__ import check_names
from trainwright.devices import hardware
from trainwright.strategies import CHOICES
from trainwright.tools import choices
from trainwright.tools import config_command as command
from trainwright.tools.config_command import as_yaml, config_command

FILE = Path("folder/config.yaml")


@pytest.fixture(autouse=True)
def _answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hardware, "accelerator_type", lambda: None)
    monkeypatch.setattr(hardware, "count", lambda *_: 0)
    yield
    left = [path.name for path in FILE.parent.glob(".config-*")]
    assert not left


def answer(monkeypatch: pytest.MonkeyPatch, *answers: str | type[BaseException]) -> list[str]:
    """Answer the next questions, and return the asked ones."""
    given, asked = iter(answers), []

    def reply(prompt: str) -> str:
        asked.append(prompt)
        one = next(given, EOFError)
        if isinstance(one, type):
            raise one
        return one

    monkeypatch.setattr("builtins.input", reply)
    return asked


def run(*arguments: str) -> int:
    return config_command(["--config-file", str(FILE), *arguments], check_names)


def exit_code() -> int:
    try:
        return run()
    except SystemExit as stopped:
        return int(str(stopped.code))


def test_the_answers_are_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = answer(monkeypatch, "2", "", "bf16", "4", "1", "A=1 B='x y' MY_TOKEN=sesame")
    assert run() == 0
    assert yaml.safe_load(FILE.read_text()) == {
        **{"devices": 2, "precision": "bf16-mixed", "gradient_accumulation_steps": 4},
        **{"num_nodes": 1, "env": {"A": 1, "B": "x y", "MY_TOKEN": "sesame"}},
    }
    assert "# batches per optimizer step\ngradient_accumulation_steps: 4\n" in FILE.read_text()
    assert "\n# main_address:\n" in FILE.read_text()
    assert asked[0].rpartition("\n")[2] == "devices [auto]: "
    assert len(asked) == 6
    capsys.readouterr()
    assert run("show") == 0
    said = capsys.readouterr().out
    assert "  devices: 2\n" in said
    assert "  env B: x y\n" in said
    assert "sesame" not in said


def test_a_wrong_answer_is_asked_for_again(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = answer(
        monkeypatch, "two", "2", "fdsp", "fsdp", "", "0", "1", "2", "2", "1", "", "10.0.0.1", "", "A", "RANK=1", ""
    )
    assert run() == 0
    said = capsys.readouterr().out
    for text in (
        "  devices: two: expected an integer of at least 1, -1 for all, or auto.",
        "  strategy='fdsp' is unknown; choose from auto",
        "  gradient_accumulation_steps: 0: expected an integer of at least 1.",
        "  node_rank=2 is out of range for num_nodes=2",
        "  main_address needs a value.",
        "  A: expected NAME=VALUE pairs.",
        "  env has RANK, which trainwright launch sets itself. Remove it",
    ):
        assert f"{text}" in said
    assert "node_rank: 1\n" in FILE.read_text()
    assert "\n# main_port:\n" in FILE.read_text()
    assert len(asked) == 16


def test_a_strategy_that_is_missing_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = "it needs a package. Run: pip install 'package'"
    monkeypatch.setattr(command, "why_missing", lambda name: reason if name == "ddp_sharded" else "")
    asked = answer(monkeypatch, "", "ddp_sharded", "ddp", "", "", "", "")
    assert run() == 0
    assert reason in capsys.readouterr().out
    others = [name for name in CHOICES if name != "ddp_sharded"]
    assert f"({', '.join(others)})\n" in asked[1]


@pytest.mark.parametrize(("end", "code"), [(EOFError, 2), (KeyboardInterrupt, 130)])
def test_an_early_end_writes_nothing(
    end: type[BaseException], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, "2", "ddp", end)
    assert exit_code() == code
    assert not FILE.exists()
    said = capsys.readouterr()
    assert "othing was written" in said.out + said.err


def test_a_file_that_exists_is_replaced_on_request_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    FILE.parent.mkdir()
    FILE.write_text("devices: 3\n")
    answer(monkeypatch, "")
    assert run() == 0
    assert FILE.read_text() == "devices: 3\n"
    with pytest.raises(SystemExit):
        run("--default")
    assert f"{FILE} exists; add --force to replace it." in capsys.readouterr().err
    assert FILE.read_text() == "devices: 3\n"
    answer(monkeypatch, "yes", "4", "", "", "", "", "")
    assert run() == 0
    assert "devices: 4\n" in FILE.read_text()
    assert run("--default", "--force") == 0
    assert yaml.safe_load(FILE.read_text()) is None


def test_empty_answers_leave_the_keys_open(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer(monkeypatch, *5 * [""], "")
    assert run() == 0
    assert yaml.safe_load(FILE.read_text()) == {"env": None}
    for name in ("devices", "strategy", "precision", "gradient_accumulation_steps", "num_nodes"):
        assert f"\n# {name}:\n" in FILE.read_text()
    assert [each.rpartition("\n")[2] for each in asked[2:4]] == [
        "precision [32-true]: ",
        "gradient_accumulation_steps [1]: ",
    ]


def test_config_rejects_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("shwo")
    assert "'shwo' is not accepted; the only word is show. Did you mean 'show'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        config_command(["--config-file", os.devnull, "--default", "--force"], check_names)
    assert f"{os.devnull} is not a file; choose another path" in capsys.readouterr().err
    FILE.parent.mkdir()
    FILE.write_text("devices: 0")
    with pytest.raises(SystemExit):
        run("show")
    assert f"{FILE}: devices: 0: expected an integer of at least 1" in capsys.readouterr().err


def test_show_works_without_a_config(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TRAINWRIGHT_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", "nowhere")
    assert config_command(["show"], check_names) == 0
    assert "nowhere/trainwright/config.yaml does not exist, so launch uses its defaults" in capsys.readouterr().out


def test_the_defaults_follow_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "accelerator_type", lambda: "gpu_of_a_test")
    monkeypatch.setattr(choices.abilities, "autocasts", lambda kind, dtype: "bfloat16" not in str(dtype))
    assert command.suggested() == {"precision": "16-mixed"}
    asked = answer(monkeypatch, *7 * [""])
    assert run() == 0
    assert yaml.safe_load(FILE.read_text()) == {"env": None}
    assert "(16-mixed suits this machine)\nprecision [32-true]: " in asked[3]
    assert run("--default", "--force") == 0
    assert yaml.safe_load(FILE.read_text()) == {"precision": "16-mixed"}


@pytest.mark.parametrize("text", ["", "~", "null", "no", "a: b", "# x", "'", '"', "a\nb", "\t", "-x", "0x1", "é", "\\"])
def test_every_value_is_read_as_it_was_written(text: str) -> None:
    Path("one.yaml").write_text(as_yaml({"env": {"A": text}}))
    found = command.find_config("one.yaml")
    assert found.variables["A"] == text


def test_show_accepts_a_config_whose_machine_number_is_in_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("shared.yaml").write_text("num_nodes: 2\nmain_address: 10.0.0.1\n")
    monkeypatch.setenv("NODE_RANK", "1")
    assert config_command(["show", "--config-file", "shared.yaml"], check_names) == 0
    assert "num_nodes: 2" in capsys.readouterr().out
