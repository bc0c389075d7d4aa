"""`trainwright runs` and `trainwright plot`: lists, pages and rejected arguments."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from small import QUIET, Classifier, make_loader

import trainwright as tw
from trainwright.__main__ import check_names
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.tools import runs
from trainwright.tools.plot import plot_command
from trainwright.tools.runs import runs_command


class Scored(Classifier):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_acc", float(self.current_epoch != 1))
        self.log("val_loss", 1.0 / (1 + self.current_epoch))

    def on_train_epoch_start(self) -> None:
        if self.fails and self.current_epoch == 1:
            raise ValueError("a bad epoch")


def fit(folder: Path, *, fails: bool = False, ckpt_path: str | None = None, **options: Any) -> tw.Trainer:
    logger = tw.CSVLogger(folder, name="mine")
    saves = tw.ModelCheckpoint(**{"monitor": "val_acc", "mode": "max", "save_top_k": -1, **options})
    settings = {**QUIET, "logger": logger, "enable_checkpointing": True, "num_sanity_val_steps": 0}
    trainer = tw.Trainer(**settings, max_epochs=3, callbacks=saves)
    try:
        trainer.fit(Scored(fails), make_loader(), make_loader(8), ckpt_path=ckpt_path)
    except ValueError:
        assert fails
    return trainer


def listed(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    capsys.readouterr()  # fits print the path of their report
    assert runs_command([*map(str, arguments), "--json"], check_names) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def refused(command: Any, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        command([*map(str, arguments)], check_names)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[0]


def test_runs_and_their_curves(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    logs, shared = tmp_path / "logs", tmp_path / "shared"
    fit(logs)
    fit(logs, fails=True, dirpath=shared, monitor="val_loss", mode="min")
    fit(logs, dirpath=shared, monitor="val_loss", mode="min", save_weights_only=False)
    by_hand = logs / "by_hand"
    by_hand.mkdir()
    (by_hand / "metrics.csv").write_text("step,train_loss,f1\n3,0.5,0.2\n4,nan,0.9\n")
    broken = logs / "broken"
    broken.mkdir()
    (broken / "metrics.csv").write_text("no,table\n")
    (broken / "trainwright_run.json").write_text("{")
    by_name = {each["run"]: each for each in listed(capsys, logs)}
    assert list(by_name) == ["broken", "by_hand", "mine/version_0", "mine/version_1", "mine/version_2"]
    first, failed, other = (by_name[f"mine/version_{number}"] for number in range(3))
    assert (first["state"], first["epoch"], first["step"], first["call"]) == ("finished", 2, 33, "fit")
    assert first["best"] == {"val_acc": {"value": 1.0, "mode": "max", "step": 10}}
    assert first["checkpoint"]["path"].startswith(f"{logs}/mine/version_0/checkpoints/epoch=2-step=33")
    assert (first["age_seconds"] < 3600, first["problems"]) == (True, [])
    assert (failed["state"], failed["epoch"], failed["best"]["val_loss"]["value"]) == ("failed", 0, 1.0)
    fit(tmp_path / "ended", ckpt_path="auto", every_n_epochs=2)
    capsys.readouterr()
    (ended,) = listed(capsys, tmp_path / "ended")
    assert ended["checkpoint"]["path"].endswith("end-step=33.ckpt")
    assert ended["epoch"] == 2
    # Two runs have saved into one folder. Both are shown with their checkpoints.
    assert (failed["checkpoint"]["step"], other["checkpoint"]["step"]) == (11, 33)
    assert failed["checkpoint"]["path"].startswith(str(shared))
    assert other["best"] == {"val_loss": {"value": pytest.approx(1 / 3), "mode": "min", "step": 32}}
    assert by_name["by_hand"]["state"] == by_name["broken"]["state"] == "unknown"
    assert by_name["by_hand"]["best"] == {"train_loss": {"value": 0.5, "mode": "min", "step": 3}}
    assert by_name["by_hand"]["checkpoint"] is None
    assert "is not a table of a CSVLogger" in by_name["broken"]["problems"][1]

    order = [each["run"] for each in listed(capsys, logs, "--sort", "val_loss")]
    assert order == ["mine/version_0", "mine/version_2", "mine/version_1", "broken", "by_hand"]
    best = listed(capsys, logs, "--sort", "f1")[0]
    assert (best["run"], best["best"]["f1"]["value"]) == ("by_hand", 0.9)
    assert [each["run"] for each in listed(capsys, by_hand)] == ["."]
    assert "Did you mean 'val_acc'?" in refused(runs_command, capsys, logs, "--sort", "val_ac")

    assert runs_command([str(logs)], check_names) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "epoch", "step", "best", "newest", "checkpoint", "written"]
    assert lines[2].split()[:8] == ["mine/version_0", "finished", "2", "33", "val_acc", "1", "at", "logged"]
    assert "mine/version_0/checkpoints/epoch=2-step=33.ckpt" in lines[2]
    assert lines[-1].startswith("broken: ")

    monkeypatch.chdir(tmp_path)
    names = [str(logs / name) for name in ("mine/version_0", "mine/version_2", "by_hand", "mine/version_0/")]
    assert plot_command([*names, "--metrics", "val_loss,train_loss"], check_names) == 0
    assert capsys.readouterr().out == "curves.html: 1 panels of 3 runs, 3 curves\n"
    page = (tmp_path / "curves.html").read_text()
    for label in ("mine/version_0: val_loss", "mine/version_2: val_loss", "by_hand: train_loss (1 not finite)"):
        assert label in page
    assert plot_command([names[0], "--x", "epoch"], check_names) == 0
    assert capsys.readouterr().out.startswith(f"{logs}/mine/version_0/curves.html: ")
    (logs / "empty").mkdir()
    (logs / "empty/metrics.csv").write_text("step,epoch\n")
    assert plot_command([names[0], str(logs / "empty"), "--out", "one.html"], check_names) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("one.html: ")
    assert f"{logs}/empty has no rows yet, so it is skipped." in shown.err

    assert "contains 6 of them" in refused(plot_command, capsys, logs)
    assert "it does not exist" in refused(plot_command, capsys, tmp_path / "nowhere")
    assert "no rows of numbers yet" in refused(plot_command, capsys, logs / "empty")
    assert "is not a table of a CSVLogger" in refused(plot_command, capsys, broken)
    assert "Did you mean 'val_loss'?" in refused(plot_command, capsys, names[0], "--metrics", "val_los")
    assert "Pass a name that ends in .html." in refused(plot_command, capsys, names[0], "--out", "curves.pdf")
    (tmp_path / "folder.html").mkdir()
    assert "is a folder" in refused(plot_command, capsys, names[0], "--out", "folder.html")
    assert "invalid choice: 'hour'" in refused(plot_command, capsys, names[0], "--x", "hour")

    shutil.rmtree(shared)  # the checkpoints were moved away
    assert listed(capsys, logs)[-1]["checkpoint"] is None


@pytest.mark.parametrize("name", ["val_nll", "val_mape", "bpb", "test/eer", "fid", "kl", "wer"])
def test_runs_are_sorted_by_a_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    for run, value in (("a", 9), ("b", 1), ("c", 5)):
        (tmp_path / run).mkdir()
        (tmp_path / run / "metrics.csv").write_text(f"step,{name},{name}:max\n1,{value},{value}\n")

    def order(sort: str) -> str:
        return "".join(each["run"] for each in listed(capsys, tmp_path, "--sort", sort))

    assert (order(name), order(f"{name}:min"), order(f"{name}:max:min")) == ("bca", "bca", "bca")
    assert runs_command([str(tmp_path), "--sort", name], check_names) == 0
    assert f"Sorted by {name}, smallest first. --sort {name}:max reverses the order." in capsys.readouterr().out
    (tmp_path / "a/metrics.csv").write_text(f"step,{name}\n1,9\n")
    for run in "bc":
        (tmp_path / run / "metrics.csv").write_text(f"step,{name}\n1,1\n")
    assert order(f"{name}:max") == "abc"
    assert f"'up' is not a mode; write {name}:min" in refused(runs_command, capsys, tmp_path, "--sort", f"{name}:up")
    assert "no run has this metric" in refused(runs_command, capsys, tmp_path, "--sort", f"{name}s:max")


def test_runs_that_were_moved_and_damaged(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = {"monitor": "val_loss", "mode": "min", "save_top_k": 1}
    for number in range(3):
        fit(tmp_path / "old", **saves, dirpath=tmp_path / "shared", filename=f"run-{number}")
    fit(tmp_path / "old", **saves)
    shutil.move(tmp_path / "old", tmp_path / "new")
    opened: list[str] = []
    monkeypatch.setattr(
        runs, "open_checkpoint", lambda path, verify: opened.append(path) or open_checkpoint(path, verify)
    )
    found = listed(capsys, tmp_path / "new")
    assert [Path(each["checkpoint"]["path"]).name for each in found[:3]] == [
        f"run-{number}.ckpt" for number in range(3)
    ]
    assert found[3]["checkpoint"]["path"].startswith(f"{tmp_path}/new/mine/version_3/checkpoints/")
    assert [each["problems"] for each in found] == [[]] * 4
    assert len(opened) == len(set(opened)) == 4

    (tmp_path / "shared/run-0.ckpt/manifest.json").write_text("")
    (tmp_path / "new/mine/version_1/trainwright_run.json").write_text("")
    shutil.rmtree(tmp_path / "new/mine/version_3/checkpoints")
    first, second, _, last = (each["problems"] for each in listed(capsys, tmp_path / "new"))
    assert "run-0.ckpt was skipped: " in first[0]
    assert first[1:] == [f"{tmp_path}/shared no longer contains a complete checkpoint of this run."]
    assert second == [f"{tmp_path}/new/mine/version_1/trainwright_run.json is empty."]
    assert last == [f"{tmp_path}/new/mine/version_3/checkpoints no longer contains a complete checkpoint of this run."]


def test_curves_of_several_runs_are_put_here(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for run, rows in (("a", ""), ("b", "1,2\n")):
        (tmp_path / run).mkdir()
        (tmp_path / run / "metrics.csv").write_text(f"step,loss\n{rows}")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert plot_command([str(tmp_path / "a"), str(tmp_path / "b")], check_names) == 0
    assert capsys.readouterr().out.startswith("curves.html: ")
    assert (tmp_path / "here/curves.html").is_file()


def test_folders_without_runs_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys, tmp_path) == []
    assert runs_command([str(tmp_path)], check_names) == 0
    assert "contains no runs" in capsys.readouterr().out
    assert "does not exist; pass a folder with runs" in refused(runs_command, capsys, tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert "is a file" in refused(runs_command, capsys, tmp_path / "file")
