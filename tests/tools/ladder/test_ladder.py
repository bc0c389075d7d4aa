"""The `ladder` command: options, runs and files, with a fake interpreter and with real scripts, and rejected options."""

from __future__ import annotations

import errno
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from deadlines import deadline
from rungs import record
from started import Started, python

from trainwright.tools.ladder import ladder
from trainwright.tools.ladder.attempt import Attempt
from trainwright.tools.ladder.climb import Climb
from trainwright.tools.ladder.ladder import ladder_command
from trainwright.tools.ladder.rung import Rung

FAKE = """#!/bin/sh
folder=$(dirname "$TRAINWRIGHT_RUNG")
case $(basename "$folder") in
  bf16-mixed) echo first line; echo ValueError: it broke >&2; exit 3 ;;
  compile) exec sleep 600 ;;
  ddp) kill -INT $PPID; exec sleep 600 ;;
esac
echo "$@" > "$folder/arguments"
cp "$RECORD" "$folder/rank0.json"
"""
"""A stand-in for the interpreter, under which some rungs do not finish."""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    interpreter = tmp_path / "interpreter"
    interpreter.write_text(FAKE)
    interpreter.chmod(0o755)
    monkeypatch.setenv("RECORD", str(tmp_path / "record.json"))
    (tmp_path / "record.json").write_text(json.dumps(vars(record())))
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(sys, "executable", str(interpreter))
    monkeypatch.setattr(ladder, "why_missing", lambda name: "Run: pip install it" if name == "fsdp" else "")
    return tmp_path


def test_runs_that_do_not_finish(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One fails, one hangs, one lacks its package, and Ctrl-C ends the last. The table has all of them."""
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    names = "bf16-mixed,compile,fsdp,ddp,ddp_sharded"
    options = ["--cpu", "--rungs", names, "--timeout", "1", "--steps", "20", "--devices", "2"]
    assert ladder_command([*options, "train.py", "--", "--lr", "1"], None) == 130
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    said = capsys.readouterr().out
    folder = Path("ladder/train-1")
    states = {row["rung"]["name"]: row["state"] for row in json.loads((folder / "ladder.json").read_text())}
    assert states == {
        "unchanged": "finished", "bf16-mixed": "failed", "compile": "timed out", "fsdp": "skipped", "ddp": "interrupted",
    }  # fmt: skip
    assert "bf16-mixed failed: exit code 3: ValueError: it broke. Its output is in" in said
    assert "compile timed out: it had not ended after 1 s." in said
    assert "fsdp was skipped: Run: pip install it." in said
    assert "The strategies run in 2 processes on the CPU." in said
    assert "The ladder was interrupted. Its results so far:" in said
    assert "Keep the script unchanged: no other rung has finished." in said
    assert (folder / "bf16-mixed/output.log").read_text().startswith("first line\n")
    assert (folder / "unchanged/arguments").read_text() == "train.py --lr 1\n"
    rung = Rung.read(str(folder / "unchanged/rung.json"))
    assert rung == Rung("unchanged", str(folder.absolute() / "unchanged"), accelerator="cpu", steps=20)


@pytest.mark.parametrize("arguments", [["--rungs", "ddp", "--steps=5"], ["--lr", "1", "-m", "x", "--help"]])
def test_options_after_the_script_are_passed_to_it(arguments: list[str], fake: Path) -> None:
    assert ladder_command(["--cpu", "--rungs", "unchanged", "train.py", *arguments], None) == 0
    assert Path("ladder/train-1/unchanged/arguments").read_text().split()[-len(arguments) :] == arguments


def test_a_script_that_is_too_short_is_named_at_once(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (fake / "record.json").write_text(json.dumps(vars(record(steps_per_second=100.0))))
    assert ladder_command(["--cpu", "--rungs", "bf16-mixed", "--steps", "20", "train.py"], None) == 0
    said = capsys.readouterr().out
    assert said.index("No rung will be chosen: its steps took less than 2 s") < said.index("bf16-mixed  failed")
    assert "compare rungs; pass a higher --steps." in said


def test_unwritable_files_do_not_hide_the_table(fake: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is printed all the same."""

    def fill_the_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def run(self: Climb, name: str, *given: Any) -> Attempt:
        if name == "16-mixed":
            fill_the_disk()
        return whole(self, name, *given)

    whole = Climb.run
    monkeypatch.setattr(Climb, "run", run)
    monkeypatch.setattr(ladder, "write_files", fill_the_disk)
    assert ladder_command(["--rungs", "16-mixed", "train.py"], None) == 0
    said = capsys.readouterr().out
    assert "16-mixed failed: [Errno 28] No space left on device. Its output is in" in said
    assert "Keep the script unchanged" in said
    assert "The files could not be written: [Errno 28] No space left on device." in said


@pytest.mark.parametrize(("flags", "kind"), [([], "cpu"), (["--no-cpu"], "auto")])
def test_the_config_says_cpu(flags: list[str], kind: str, fake: Path, monkeypatch: Any, capsys: Any) -> None:
    (fake / "config.yaml").write_text("cpu: true\n")
    seen = []

    def resolve(name: str) -> str:
        seen.append(name)
        return "cpu"

    monkeypatch.setattr(ladder, "resolve_device_type", resolve)
    options = ["--config-file", str(fake / "config.yaml"), "--rungs", "unchanged", *flags]
    assert ladder_command([*options, "-m", "json.tool", "--", "--indent"], None) == 0
    assert seen == [kind]
    rung = json.loads(Path("ladder/json_tool-1/unchanged/rung.json").read_text())
    assert rung["accelerator"] == (None if flags else "cpu")
    assert Path("ladder/json_tool-1/unchanged/arguments").read_text() == "-m json.tool --indent\n"


@pytest.mark.parametrize(("program", "code", "said"), [
    ("exit 0", 1, "the script made neither a Trainer nor an Accelerator of trainwright"),
    ("echo KeyError: 1; exit 1", 1,
     "The ladder ends at its first rung, the unchanged script: exit code 1: KeyError: 1."),
    (f"{FAKE}", 2, "--metric test_ac: the script has no such metric; it has test_loss, test_acc. Did you mean"),
])  # fmt: skip
def test_a_first_rung_that_nothing_can_be_compared_with(
    program: str, code: int, said: str, fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fake / "interpreter").write_text(f"#!/bin/sh\n{program}\n")
    assert ladder_command(["--rungs", "16-mixed", "--metric", "test_ac", "train.py"], None) == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "said"), [
    ([], "no script was given. Pass one, or -m and a module, after the options."),
    (["none.py"], "file 'none.py' does not exist. Pass the path of a script"),
    (["--rungs", "fdsp", "train.py"], "--rungs fdsp: choose from unchanged, "),
    (["--rungs", "unchanged,fdsp", "train.py"], "Did you mean 'fsdp'?"),
    (["--cpu", "--devices", "none", "train.py"],
     "--devices none: expected an integer of at least 1, -1 for all, or auto."),
    (["--steps", "0", "train.py"], "--steps 0: expected an integer of at least 1."),
    (["--lower", "--higher", "train.py"], "--higher and --lower exclude each other. Pass one."),
    (["--out", "full", "train.py"], "--out full exists already; pass a new folder"),
    (["--out", "train.py/results", "train.py"], "the folder train.py/results cannot be made ("),
    (["--bogus", "train.py"], "'--bogus' is not an option of trainwright ladder. Put options"),
    (["--step", "3", "train.py"], "'--step' is not an option of trainwright ladder. Did you mean '--steps'?"),
])  # fmt: skip
def test_the_ladder_rejects_wrong_options(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").touch()
    Path("full").mkdir()
    Path("full/result").touch()
    with pytest.raises(SystemExit) as caught:
        ladder_command(arguments, None)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
    assert not Path("ladder").exists()


@pytest.mark.parametrize(("line", "hint"), [
    ("import lightning as L", "; it imports lightning: import trainwright instead, most names are the same."),
    ("    from accelerate import Accelerator", "; it imports accelerate: import trainwright instead"),
    ("import torch  # import lightning", "can be changed."),
])  # fmt: skip
def test_a_script_of_another_framework_is_named(line: str, hint: str, fake: Path, capsys: Any) -> None:
    (fake / "interpreter").write_text("#!/bin/sh\n")
    Path("train.py").write_text(f"import os\n{line}\n")
    assert ladder_command(["--cpu", "--rungs", "bf16-mixed", "train.py"], None) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert f"so no setting of it can be changed{hint.removeprefix('can be changed')}" in said
    assert "The strategies run" not in said


def test_a_rank_of_a_job_has_no_ladder(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Path("train.py").touch()
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        ladder_command(["train.py"], None)
    assert "this process is rank 0 of a job of 1 process(es)" in capsys.readouterr().err


DATA = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

inputs = torch.randn(320, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
loader, test = DataLoader(data, 16, shuffle=True), DataLoader(data, 64)
"""
TRAINER = f"""{DATA}
import trainwright as L
from trainwright.callbacks import ModelCheckpoint


class LitNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.trainer.precision == "64-true":
            raise TypeError("this layer takes no float64")
        return nn.functional.cross_entropy(self.net(x), y)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_acc", (self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


if __name__ == "__main__":
    L.seed_everything(7)
    module = LitNet()
    trainer = L.Trainer(
        max_epochs=4, devices=1, logger=False, callbacks=[ModelCheckpoint("saved")], enable_progress_bar=False
    )
    trainer.fit(module, loader, ckpt_path="auto")
    trainer.test(module, test)
    print("processes", trainer.world_size)
"""
LOOP = f"""{DATA}
import trainwright as tw

accelerator = tw.Accelerator(cpu=True, devices=1)
net = nn.Linear(8, 2)
net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
for epoch in range(9):
    for x, y in loader:
        accelerator.backward(nn.functional.cross_entropy(net(x), y))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"val_acc {{0.5 + epoch / 100}}", sys.argv[1:])
print("never reached")
"""


@pytest.mark.launch
@pytest.mark.slow
def test_real_scripts_are_run_and_compared(tmp_path: Path) -> None:
    """A script in Lightning's vocabulary: bf16, one rung that fails, two processes. Then a loop that --steps ends on two."""
    (tmp_path / "train.py").write_text(TRAINER)
    (tmp_path / "loop.py").write_text(LOOP)
    options = ["--cpu", "--steps", "30", "--timeout", str(int(deadline(120)))]
    options_of = [["--rungs", "bf16-mixed,64-true,ddp", "train.py"], ["--rungs", "ddp", "loop.py", "here"]]
    for own in options_of:
        started = Started(python("-W", "error", "-m", "trainwright", "ladder", *options, *own), tmp_path)
        try:
            assert started.wait(600) == 0, f"{started.stdout}\n{started.stderr}"
            assert re.search(r"^(Choose|Keep)", started.stdout, re.MULTILINE), started.stdout
            started.check_nothing_left()
        finally:
            started.close()
    of_trainer, of_loop = tmp_path / "ladder/train-1", tmp_path / "ladder/loop-1"
    rows = {row["rung"]["name"]: row for row in json.loads((of_trainer / "ladder.json").read_text())}
    assert [row["state"] for row in rows.values()] == ["finished", "finished", "failed", "finished"]
    assert rows["64-true"]["reason"] == "exit code 1: TypeError: this layer takes no float64"
    facts = {name: row["record"]["facts"] for name, row in rows.items() if row["record"] is not None}
    assert [facts[name]["precision"] for name in ("unchanged", "bf16-mixed")] == ["32-true", "bf16-mixed"]
    assert (facts["ddp"]["strategy"], facts["ddp"]["processes"], rows["ddp"]["record"]["steps"]) == ("ddp", 2, 30)
    assert all(rows[name]["value"] > 0.8 for name in ("unchanged", "bf16-mixed", "ddp"))
    log = (of_trainer / "ddp/output.log").read_text()
    assert log.count("processes 2") == 2
    assert "sets strategy='ddp'; the script has 'auto'" in log
    assert "sets ckpt_path=None; the script has 'auto'" in log
    rows = {row["rung"]["name"]: row for row in json.loads((of_loop / "ladder.json").read_text())}
    records = [row["record"] for row in rows.values()]
    assert [(record["steps"], record["facts"]["processes"]) for record in records] == [(30, 1), (30, 2)]
    assert rows["unchanged"]["metric"] == "val_acc"
    log = (of_loop / "ddp/output.log").read_text()
    assert "never reached" not in log
    assert log.count("this loop after 30 steps") == 1
    assert "['here']" in log
