"""Reading tables and event files of runs: whole, damaged, resumed and missing ones. `logger.plot` draws them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import QUIET, Classifier, loss_of, make_loader

import trainwright as tw
from trainwright.loggers import SilentLogger
from trainwright.loggers.run_files import find_runs, read_history
from trainwright.tools.plot import check_run, is_run


class Scored(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = loss_of(self.net, batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).square().mean())


def table(folder: Path, text: str | bytes) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder)


def test_both_kinds_of_files_say_the_same(tmp_path: Path) -> None:
    loggers = [tw.CSVLogger(tmp_path), tw.TensorBoardLogger(tmp_path, sub_dir="board")]
    options = {**QUIET, "logger": loggers, "log_every_n_steps": 3, "enable_checkpointing": True}
    tw.Trainer(**options, max_epochs=2).fit(Scored(), make_loader(), make_loader(8))
    folder = str(tmp_path / "trainwright_logs/version_0")
    by_table, by_events = (read_history(folder, kind=kind) for kind in ("csv", "tensorboard"))
    assert set(by_table.series) == {"train_loss", "val_loss"} == set(by_events.series) - {"hp_metric"}
    for name, series in by_table.series.items():
        other = by_events.series[name]
        assert (series.steps == other.steps).all()
        np.testing.assert_allclose(series.values, other.values, rtol=1e-6)
    assert (by_table.last_step, by_table.last_epoch) == (by_events.last_step, by_events.last_epoch) == (21, 1)
    assert by_table.x_of(by_table.series["val_loss"], "epoch").tolist() == [1, 2]
    assert find_runs(str(tmp_path)) == [folder]

    assert loggers[0].plot() == f"{folder}/curves.html"
    assert loggers[1].plot(metrics=["val_loss"]) == f"{folder}/board/curves.html"
    page, one = (Path(each.log_dir or "", "curves.html").read_text() for each in loggers)
    assert "train_loss" in page
    assert "val_loss" in one
    assert "train_loss" not in one
    loggers[0].plot(tmp_path / "new" / "page.html")
    assert os.listdir(tmp_path / "new") == ["page.html"]
    with pytest.raises(ValueError, match=r"curves\.png' is not accepted, .*Pass a name that ends in \.html\. For"):
        loggers[0].plot("curves.png")
    with pytest.raises(ValueError, match="the metric 'nothing' was not logged"):
        loggers[0].plot(metrics=["nothing"])


def test_a_resumed_run_replaces_the_later_events(tmp_path: Path) -> None:
    """A file whose writer was told of a start at a step takes the place of the rows from there on."""
    logger = tw.TensorBoardLogger(tmp_path, name=None, version=0)
    for step in range(6):
        logger.log_metrics({"loss": 1.0}, step=step)
    logger.close()
    resumed = tw.TensorBoardLogger(tmp_path, name=None, version=0, purge_step=4)
    for step in range(4, 7):
        resumed.log_metrics({"loss": 2.0}, step=step)
    resumed.close()
    series = read_history(str(tmp_path / "version_0")).series["loss"]
    assert series.steps.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert series.values.tolist() == [1, 1, 1, 1, 2, 2, 2]
    # A killed process leaves half of a record. A file may be damaged.
    newest = max((tmp_path / "version_0").glob("events*"), key=lambda each: each.stat().st_mtime_ns)
    data = newest.read_bytes()
    newest.write_bytes(data[:-5])
    assert read_history(str(tmp_path / "version_0")).series["loss"].steps.tolist() == [0, 1, 2, 3, 4, 5]
    newest.write_bytes(data[:60] + b"\xff" * (len(data) - 60))
    damaged = read_history(str(tmp_path / "version_0"))
    assert damaged.series["loss"].steps[0] == 0


def test_writers_of_one_run_are_apart(tmp_path: Path) -> None:
    for name, value in (("train", 1.0), ("eval", 50.0)):
        logger = tw.TensorBoardLogger(tmp_path, name=None, version=0, sub_dir=name)
        for step in range(2):
            logger.log_metrics({"loss": value}, step=step)
        if name == "eval":
            logger.experiment.add_scalars("parts", {"left": 3.0}, 0)
        logger.finalize("success")
        logger.close()
    series = read_history(str(tmp_path / "version_0")).series
    assert {name: each.values.tolist() for name, each in series.items()} == {
        "eval/loss": [50, 50],
        "eval/parts_left/parts": [3],
        "train/loss": [1, 1],
    }
    page = Path(logger.plot()).read_text()  # only of its log_dir
    assert "last 50, min 50, max 50" in page
    assert "last 1," not in page
    inner = tw.TensorBoardLogger(tmp_path / "version_0", name="fold")
    inner.log_metrics({"loss": 9.0}, step=0)
    inner.finalize("success")
    inner.close()
    assert set(read_history(str(tmp_path / "version_0")).series) == set(series)
    assert find_runs(str(tmp_path)) == [f"{tmp_path}/version_0", f"{tmp_path}/version_0/fold/version_0"]


def test_reading_events_needs_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = tw.TensorBoardLogger(tmp_path, name=None)
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.close()
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(ImportError, match=r'pip install "trainwright\[tensorboard\]", or log with a CSVLogger'):
        read_history(str(tmp_path / "version_0"))


def test_tables_are_read_without_damaged_rows(tmp_path: Path) -> None:
    text = (
        'step,epoch,loss,"odd, ""name""",note,flag\r\n5,1,2.5,,text,True\n0,0,nan,1,,\n,,7,,,\n3,0,inf,2,,False\n4,0,1'
    )
    history = read_history(table(tmp_path / "run", text))
    assert set(history.series) == {"loss", 'odd, "name"', "flag"}
    loss = history.series["loss"]
    assert loss.steps.tolist() == [0, 3, 5]  # in order, without the row that ends within a value
    assert [str(each) for each in loss.values] == ["nan", "inf", "2.5"]
    assert history.series["flag"].values.tolist() == [0, 1]
    assert history.epochs.tolist() == [[5, 1], [0, 0], [3, 0]]
    assert "1 rows without a step were skipped" in history.problems[0]
    assert "1 damaged rows" in read_history(table(tmp_path / "run", "step,a\n1,2\n3,4,5\n")).problems[0]
    for empty in ("", "step", "step,epoch\n", "step,epoch,loss\n"):
        found = read_history(table(tmp_path / "empty", empty))
        assert (found.series, found.last_step, found.last_epoch) == ({}, None, None)
    for data in ("a,b\n1,2\n", b"\xff\xfe\x00step\n", 'step,"a\n' + "x" * 200_000 + "\n"):
        with pytest.raises(
            ValueError, match=r"metrics\.csv is not a table of a CSVLogger: .* Pass the folder of another run\."
        ):
            read_history(table(tmp_path / "foreign", data))


def test_long_event_files_are_read_in_part(tmp_path: Path) -> None:
    logger = tw.TensorBoardLogger(tmp_path, name=None, version=0)
    for step in range(300):
        logger.log_metrics({"loss": float(step)}, step=step)
    logger.close()
    resumed = tw.TensorBoardLogger(tmp_path, name=None, version=0, purge_step=200)
    for step in range(200, 400):
        resumed.log_metrics({"loss": -float(step)}, step=step)
    resumed.experiment.add_image("picture", np.zeros((3, 800, 800), np.float32) + np.random.rand(3, 800, 800), 1)
    resumed.close()
    (tmp_path / "version_0" / "events.out.tfevents.0").touch()
    history = read_history(str(tmp_path / "version_0"), most_bytes=4000)
    loss = history.series["loss"]
    assert 20 < len(loss.steps) < 200
    assert (np.diff(loss.steps) > 0).all()  # the resumed run has replaced rows
    assert (loss.values == np.where(loss.steps < 200, loss.steps, -loss.steps)).all()
    assert "values was read" in history.problems[0]
    assert set(history.series) == {"loss"}


def test_other_folders_are_rejected_with_a_hint(tmp_path: Path) -> None:
    for number in (2, 10):
        table(tmp_path / f"logs/version_{number}", "step,loss\n1,2\n")
    (tmp_path / "logs/version_10/checkpoints/step=1.ckpt").mkdir(parents=True)
    (tmp_path / "logs/.hidden").mkdir()
    table(tmp_path / "logs/.hidden/version_0", "step,loss\n")
    (tmp_path / "logs/link").symlink_to(tmp_path / "logs/version_2")
    assert find_runs(str(tmp_path)) == [f"{tmp_path}/logs/version_2", f"{tmp_path}/logs/version_10"]
    assert find_runs(str(tmp_path / "logs/version_2")) == [f"{tmp_path}/logs/version_2"]
    assert not is_run(str(tmp_path))
    for path, text in (
        ("nowhere", r"nowhere is not a run folder: it does not exist\. A run folder is one that CSVLogger or"),
        ("logs", r"logs is not a run folder: it contains 2 of them\. .* Did you mean .*/logs/version_10\?"),
        (
            "logs/version_10/checkpoints",
            r"it has no metrics\.csv and no event files\. .* Did you mean .*/version_10\?",
        ),
        ("logs/version_2/metrics.csv", r"it is a file\. .* Did you mean .*/logs/version_2\?"),
    ):
        with pytest.raises(ValueError, match=text):
            check_run(f"{tmp_path}/{path}")


def test_files_of_others_do_not_hide_runs(tmp_path: Path) -> None:
    table(tmp_path, "run,loss\na,1\n")
    (tmp_path / "run.json").write_text("{}")
    runs = ["version_0", "version_0/fold_1", "checkpoints/version_0"]
    for name in runs:
        table(tmp_path / name, "step,loss\n1,2\n")
    table(tmp_path / "version_0/checkpoints/step=1.ckpt", "step,loss\n1,2\n")
    table(tmp_path / "saved/step=1.ckpt", "step,loss\n1,2\n")  # a copy in a checkpoint
    assert find_runs(str(tmp_path)) == sorted(f"{tmp_path}/{name}" for name in runs)
    (tmp_path / "version_0/metrics.csv").unlink()
    (tmp_path / "version_0/metrics.csv").mkdir()
    (tmp_path / "version_0/trainwright_run.json").touch()
    assert read_history(str(tmp_path / "version_0")).problems == (f"{tmp_path}/version_0/metrics.csv is not a file.",)


def test_loggers_without_files_cannot_plot(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"CSVLogger\.plot\(\) was called before anything was logged"):
        tw.CSVLogger(tmp_path).plot()
    assert os.listdir(tmp_path) == []
    with pytest.raises(
        NotImplementedError, match=r"WandbLogger\.plot\(\) was called, but its service has the rows\. Look at"
    ):
        tw.WandbLogger(save_dir=tmp_path, offline=True).plot()
    with pytest.raises(NotImplementedError, match="the pages of MLflow"):
        tw.MLFlowLogger(save_dir=str(tmp_path)).plot()
    with pytest.raises(NotImplementedError, match=r"writes no files to draw from\. CSVLogger and TensorBoardLogger"):
        tw.Logger().plot()
    assert SilentLogger().plot() == ""


def test_a_long_table_is_left_to_the_command() -> None:
    logger = tw.CSVLogger("memory://long", name=None, version=0)
    for step in range(30):
        logger.log_metrics({"loss": float(step)}, step=step)
    logger.finalize("success")
    assert len(logger.history().series["loss"].steps) == 30
    history = logger.history(most_bytes=200)
    assert history.series == {}
    assert "was not read. `trainwright plot memory://long/version_0` draws its curves." in history.problems[0]
