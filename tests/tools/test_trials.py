"""`trainwright test`: its table of working, failing and missing strategies, and a session in a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import torch
from deadlines import deadline
from interpreters import search_path
from started import ROOT, python

from trainwright.__main__ import check_names
from trainwright.tools import trials
from trainwright.tools.trials import trials_command

FAKE = """#!/bin/sh
words="$*"
while [ "$1" != trainwright.tools.trials ]; do shift; done
weight=0.0
case "$2 $words" in
  "ddp "*launch*) weight=0.25 ;;
  "fsdp "*) echo first line; echo it broke >&2; exit 3 ;;
  "deepspeed_stage_1 "*) exec sleep 600 ;;
  "deepspeed_stage_2 "*) weight=nan ;;
esac
echo $weight > "$3"
"""
"""A stand-in for the interpreter, under which some strategies fail."""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    interpreter = tmp_path / "interpreter"
    interpreter.write_text(FAKE)
    interpreter.chmod(0o755)
    monkeypatch.setattr(trials, "load_file", lambda path: {"weight": torch.tensor(float(path.read_text()))})
    monkeypatch.setattr(sys, "executable", str(interpreter))
    monkeypatch.setattr(trials, "why_missing", lambda name: "Run: pip install it" if name == "ddp_sharded" else "")


@pytest.mark.slow
def test_each_way_to_fail_has_its_words(fake: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert trials_command(["--cpu", "--timeout", "2"], check_names) == 1
    said = capsys.readouterr().out
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in said.splitlines()[2:9]}
    assert rows["single_device"].startswith("works, 0e+00")
    assert "differs by 2.5e-01" in rows["ddp"]
    assert rows["ddp_sharded"] == "not installed"
    assert rows["deepspeed_stage_2"].count("differs by nan") == 2
    assert rows["deepspeed_stage_1"].count("no end in") == 2
    assert "fsdp on 1 process(es): failed (exit code 3)\n  first line\n  it broke" in said
    assert "ddp_sharded: Run: pip install it" in said
    assert said.endswith("7 run(s) failed.\n")


def test_a_strategy_that_is_missing_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(trials, "why_missing", lambda name: "Run: pip install it")
    expected = trials.TrialResult(True, "works, 0e+00 (1 s)")
    monkeypatch.setattr(trials.Trials, "_trial", lambda *_: expected)
    assert trials_command(["--strategies", "ddp"], check_names) == 0
    assert "ddp: Run: pip install it\nEverything that is installed works." in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "said"), [
    (["--strategies", "dpd"], "--strategies dpd: choose from single_device, ddp,"),
    (["--strategies", "ddp,fdsp"], "Did you mean 'fsdp'?"),
    (["--timeout", "soon"], "--timeout soon: expected an integer of at least 1, in seconds."),
    (["--config-file", "none.yaml"], "none.yaml: [Errno 2] No such file"),
])  # fmt: skip
def test_trials_reject_wrong_options(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        trials_command(arguments, check_names)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


class Terminal:
    """A command in a new terminal, and its output."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.own, other = pty.openpty()
        variables = {**os.environ, "TRAINWRIGHT_CONFIG": str(folder / "config.yaml"), "PYTHONPATH": search_path(ROOT)}
        command = python("-m", "trainwright", *arguments)
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C reaches it
        )
        os.close(other)
        self.shown = ""
        self.end = time.monotonic() + deadline(300)

    def read(self, until: str | None = None) -> str:
        """Read up to a text, or to the end."""
        while until is None or until not in self.shown:
            ready, _, _ = select.select([self.own], [], [], max(0.0, self.end - time.monotonic()))
            assert ready, f"nothing more came after: {self.shown}"
            try:
                new = os.read(self.own, 4096)
            except OSError:  # the other end is closed
                new = b""
            if not new:
                assert until is None, f"{until!r} never came: {self.shown}"
                break
            self.shown += new.decode().replace("\r\n", "\n")
        return self.shown

    def wait(self, seconds: float) -> None:
        """Read the output of a period."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and "written" not in self.shown:
            if select.select([self.own], [], [], left)[0]:
                self.shown += os.read(self.own, 4096).decode()

    def answer(self, question: str, text: str) -> None:
        self.read(question)
        self.shown = self.shown.partition(question)[2]
        os.write(self.own, f"{text}\n".encode())

    def close(self) -> int:
        self.read()
        os.close(self.own)
        return self.process.wait(deadline(60))


SCRIPT = """
import trainwright as tw
accelerator = tw.Accelerator()
accelerator.wait_for_everyone()
engine = accelerator.engine
said = f"rank {engine.rank} of {engine.world_size} {engine.strategy.name} {accelerator.gradient_accumulation_steps}"
print(said, flush=True)
"""


@pytest.mark.launch
@pytest.mark.slow
def test_a_session_in_a_terminal_works(tmp_path: Path) -> None:
    """Answer `config`, with a wrong answer, interrupt a second one, launch with that config, and test."""
    config = Terminal(tmp_path, "config")
    for question, text in (
        ("devices [auto]: ", "two"),
        ("devices [auto]: ", "2"),
        ("strategy [auto]: ", "ddp"),
        ("precision [32-true]: ", ""),
        ("gradient_accumulation_steps [1]: ", "3"),
        ("num_nodes [1]: ", ""),
        ("env [none]: ", "GREETING='good day'"),
    ):
        if question.startswith("precision"):
            config.read("]: ")
            question = "]: "  # as the machine has it
        config.answer(question, text)
    assert config.close() == 0
    written = (tmp_path / "config.yaml").read_text()
    assert 'GREETING: "good day"' in written
    left = Terminal(tmp_path, "config")
    left.answer("Replace it? (yes or no) [no] ", "yes")
    left.read("devices [auto]: ")
    while "Nothing was written." not in left.shown:
        os.write(left.own, b"\x03")
        left.wait(3.0)  # Python notices a signal that arrives just before it waits for a key at the next one
    assert left.close() == 130
    assert (tmp_path / "config.yaml").read_text() == written
    (tmp_path / "train.py").write_text(SCRIPT)
    launch = Terminal(tmp_path, "launch", "--cpu", "train.py")
    assert launch.close() == 0, launch.shown
    assert launch.shown.count("of 2 ddp 3") == 2, launch.shown  # the lines of the ranks may be mixed
    test = Terminal(tmp_path, "test", "--cpu", "--strategies", "ddp")
    assert test.close() == 0, test.shown
    assert "Everything that is installed works." in test.shown
