"""RunReport: the contents of the page for every way in which a run ends, and no run depends on it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deadlines import deadline
from html_page import Page
from jobs import run_job
from small import QUIET, Classifier, make_loader

import trainwright as tw
from trainwright.callbacks import run_report
from trainwright.callbacks.run_report import describe_work_tree
from trainwright.errors import RunStopped
from trainwright.loggers.run_record import RECORD_NAME, find_record

FOLDER = "version_0"
ODD = "<img src=x onerror=alert(1)>"


class Scored(Classifier):
    """Has hyper-parameters, some of them secret or odd, and may raise or be stopped at a batch."""

    def __init__(self, width: int = 8, api_key: str = "key-of-a-service", odd: str = ODD, key_dim: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.error: BaseException | None = None
        self.number = 0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log(ODD, 1.0)
        if self.error is not None and batch_idx == 4:
            raise self.error
        if self.number and batch_idx == 4:
            os.kill(os.getpid(), self.number)


def trainer_in(folder: Path, **options: Any) -> tw.Trainer:
    logger = tw.CSVLogger(folder, name=None)
    settings = {"logger": logger, "max_epochs": 2, "log_every_n_steps": 1, "enable_checkpointing": True}
    return tw.Trainer(**{**QUIET, **settings, **options})


def page_in(folder: Path, run: str = FOLDER) -> Page:
    text = (folder / run / "report.html").read_text("utf-8")
    assert "default-src 'none'" in text
    assert "url(" not in text
    page = Page(text)
    assert page.is_self_contained()
    return page


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--api-token", "secret-token", "--lr=0.1", f"name={ODD}"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)


@pytest.mark.usefixtures("command")
def test_what_it_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saves = tw.ModelCheckpoint(monitor="val_loss", save_top_k=2)
    trainer = trainer_in(tmp_path, callbacks=saves, profiler="simple", max_epochs=3)
    module = Scored()
    module.scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    trainer.fit(module, make_loader(), make_loader(8))
    page = page_in(tmp_path)
    assert capsys.readouterr().out.splitlines()[-1] == f"report: {tmp_path}/{FOLDER}/report.html"
    assert page.headings == [
        f"Run {tmp_path.name}/{FOLDER}", "Checkpoints", "Loss", "Metrics", "Model and data", "Hyper-parameters",
        "Time", "Profile", "Environment",
        "Command",
    ]  # fmt: skip
    assert "finished after 3 epochs and 33 steps, in " in page.text
    best, second = ([f"checkpoints/{Path(path).name}", f"val_loss = {float(score):.6g}"] for path, score in sorted(
        saves.best_k_models.items(), key=lambda each: float(each[1])))  # fmt: skip
    assert [*best, "best, newest"] in page.cells
    assert [*second, ""] in page.cells
    facts = page.facts()
    assert (facts["width"], facts["api_key"], facts["odd"], facts["key_dim"]) == ("8", "(not shown)", ODD, "64")
    assert facts["parameters"] == "160, of which 159 are trained"
    assert facts["batch size"] == "4 in each process"
    assert facts["seed"] == str(trainer.engine.seed)
    assert " GiB of the host" in facts["peak memory"]
    assert facts["steps"].startswith("33, ")
    assert all(facts[name].endswith(" s") for name in ("waits for data", "training steps", "validation", "checkpoints"))
    assert facts["began"].endswith(" UTC")
    assert "resumed from" not in facts
    assert (facts["strategy"], facts["precision"], facts["processes"]) == (
        "single_device", "32-true", "1 on 1 machine(s)",
    )  # fmt: skip
    assert (facts["trainwright"], facts["module"]) == (tw.__version__, "Scored")
    assert "Profile of fit" in page.text
    assert "training_step" in page.text
    assert f"python train.py --api-token (not shown) --lr=0.1 'name={ODD}'" in page.text
    assert "secret" not in page.text
    assert "val_loss" in page.text
    assert f"{ODD} last 1," in page.text.replace("  ", " ")


@pytest.mark.parametrize("name", ["advanced", "pytorch"])
def test_report_has_the_tables_of_other_profilers(tmp_path: Path, name: str) -> None:
    kinds = {"advanced": tw.AdvancedProfiler, "pytorch": tw.PyTorchProfiler}
    options = {"schedule": None, "export_to_chrome": False} if name == "pytorch" else {}  # which records until the end
    profiler = kinds[name](dirpath=tmp_path / "profiles", **options)
    trainer_in(tmp_path, profiler=profiler, enable_checkpointing=False, max_epochs=1).fit(Scored(), make_loader())
    page = page_in(tmp_path)
    assert "Profile of fit" in page.text
    assert "recorded nothing" not in page.text


def test_no_part_of_a_page_runs_what_a_name_holds(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path / ODD.replace("/", ""), enable_checkpointing=False)
    trainer.fit(Scored(), make_loader())
    text = (tmp_path / ODD / FOLDER / "report.html").read_text()
    assert "<img" not in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text


@pytest.mark.usefixtures("command")
def test_report_shows_the_error_of_a_failed_run(tmp_path: Path) -> None:
    module = Scored()
    module.error = ValueError(f"{ODD}\nsecret-token of http://me:pass@host")
    trainer = trainer_in(tmp_path)
    with pytest.raises(ValueError, match="secret-token"):
        trainer.fit(module, make_loader())
    page = page_in(tmp_path)
    assert "failed at step 5, after " in page.text
    assert page.headings[1] == "Error"
    assert f"ValueError: {ODD}\n(not shown) of http://(not shown)@host" in page.text
    assert f'File "{__file__}"' in page.text  # the line that raised
    assert "in on_train_batch_end\n    raise self.error" in page.text
    assert page.facts()["steps"].startswith("5, ")
    assert "loss_step last " in page.text.replace("  ", " ")


def test_a_run_that_ends_with_nan_is_not_shown_as_finished(tmp_path: Path) -> None:
    class Diverges(Scored):
        def on_train_end(self) -> None:
            with torch.no_grad():
                self.net[0].weight[0, 0] = float("nan")

    class Undefined(Scored):
        def on_train_epoch_end(self) -> None:
            self.log("score", float("nan"))

    for module, fault in ((Diverges(), "weights are not finite (NaN or infinity in net.0.weight)"), (
        Undefined(), "latest metrics are not finite (NaN or infinity in score)"
    )):  # fmt: skip
        trainer = trainer_in(tmp_path, enable_checkpointing=False, max_epochs=1)
        with warnings.catch_warnings(action="ignore"):
            trainer.fit(module, make_loader())
        page = Path(f"{trainer.log_dir}/report.html").read_text()
        assert '<span class="state NaN">finished with NaN</span>' in page
        assert f"the {fault}" in page


@pytest.mark.parametrize(
    ("error", "number"), [(KeyboardInterrupt(), 0), (None, signal.SIGTERM)], ids=["ctrl-c", "signal"]
)
def test_stopped_and_resumed_run_has_a_report(tmp_path: Path, error: BaseException | None, number: int) -> None:
    module = Scored()
    module.error, module.number = error, number
    trainer = trainer_in(tmp_path, callbacks=tw.ModelCheckpoint(every_n_train_steps=2), max_epochs=1)
    with pytest.raises((KeyboardInterrupt, RunStopped)):
        trainer.fit(module, make_loader())
    page = page_in(tmp_path)
    assert "stopped at step 5, after " in page.text
    assert ("Ended by" in page.headings) == (error is not None)
    again = trainer_in(tmp_path, callbacks=tw.ModelCheckpoint(every_n_train_steps=2), max_epochs=1)
    again.fit(Scored(), make_loader(), ckpt_path="last")
    page = page_in(tmp_path)
    assert os.listdir(tmp_path) == [FOLDER]
    assert "finished after 1 epochs and 11 steps" in page.text
    assert page.facts()["resumed from"] == again.resume_source
    assert page.facts()["steps"].startswith("6, " if number else "7, ")  # in this process
    # The curve has the rows of both processes.
    assert "loss_step = " in page.text
    assert "at step 0\n" in f"{page.text}\n"
    assert trainer.callbacks[-2].path == again.callbacks[-2].path == f"{tmp_path}/{FOLDER}/report.html"


def test_a_finished_run_that_is_started_again_keeps_its_report(tmp_path: Path) -> None:
    trainer_in(tmp_path, max_epochs=1).fit(Scored(), make_loader())
    page, record = Path(tmp_path, FOLDER, "report.html").read_bytes(), find_record(f"{tmp_path}/{FOLDER}").record
    assert record is not None
    record = replace(record, began="2026-01-01T00:00:00+00:00", ended="2026-01-01T00:00:09+00:00")
    Path(tmp_path, FOLDER, RECORD_NAME).write_bytes(record.to_bytes())
    trainer_in(tmp_path, max_epochs=1).fit(Scored(), make_loader(), ckpt_path="auto")
    assert Path(tmp_path, FOLDER, "report.html").read_bytes() == page
    assert find_record(f"{tmp_path}/{FOLDER}").record == record


def test_some_runs_write_no_report(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path / "tested")
    trainer.validate(Scored(), make_loader(), verbose=False)
    trainer.test(Scored(), make_loader(), verbose=False)
    trainer_in(tmp_path / "trial", fast_dev_run=True, callbacks=tw.RunReport()).fit(Scored(), make_loader())
    trainer_in(tmp_path / "off", enable_report=False).fit(Scored(), make_loader())
    bare = tw.Trainer(max_epochs=1, barebones=True, default_root_dir=tmp_path / "bare")
    bare.fit(Classifier(), make_loader())
    tw.Trainer(**QUIET, max_epochs=1, callbacks=tw.RunReport(), default_root_dir=tmp_path / "none").fit(
        Classifier(), make_loader()
    )
    assert not list(tmp_path.rglob("report.html"))

    class Refused(Scored):
        def configure_optimizers(self) -> Any:
            raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        trainer_in(tmp_path / "refused").fit(Refused(), make_loader())
    assert os.listdir(tmp_path / "refused") == []


def test_enable_report_switches_the_report(tmp_path: Path) -> None:
    def count(**options: Any) -> int:
        callbacks = tw.Trainer(**{**QUIET, "logger": True, **options}).callbacks
        return sum(isinstance(each, tw.RunReport) for each in callbacks)

    assert [count(), count(enable_report=True), count(enable_report=False), count(logger=False)] == [1, 1, 0, 0]
    assert [count(fast_dev_run=True), count(callbacks=tw.RunReport()), count(logger=tw.Logger())] == [0, 1, 0]
    assert count(logger=[tw.Logger(), tw.TensorBoardLogger(tmp_path)]) == 1
    with pytest.raises(ValueError, match=r"enable_report=False, but callbacks= holds a RunReport. Omit one"):
        count(callbacks=tw.RunReport(), enable_report=False)
    with pytest.raises(ValueError, match=r"enable_report='no': expected True, False or None"):
        count(enable_report="no")
    with pytest.raises(ValueError, match="barebones=True omits what costs time, but enable_report=True"):
        tw.Trainer(barebones=True, enable_report=True)
    with pytest.warns(UserWarning, match=r"enable_report=True, but no logger in logger= writes a folder"):
        assert count(logger=False, enable_report=True) == 1


def test_report_reads_a_tensorboard_logger(tmp_path: Path) -> None:
    logger = tw.TensorBoardLogger(tmp_path, name=None, sub_dir="board")
    trainer_in(tmp_path, logger=logger).fit(Scored(), make_loader(), make_loader(8))
    page = page_in(tmp_path, f"{FOLDER}/board")
    assert "val_loss last " in page.text.replace("  ", " ")
    assert page.facts()["width"] == "8"
    both = [tw.TensorBoardLogger(tmp_path, name="both"), tw.CSVLogger(tmp_path, name="both")]
    trainer_in(tmp_path, logger=both).fit(Scored(), make_loader())
    assert "epoch" not in page_in(tmp_path / "both").facts()
    assert len(list(tmp_path.rglob("report.html"))) == 2


def fails(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def refuses(path: str, flags: Any, *_: Any, **__: Any) -> Any:
    raise PermissionError(13, "Permission denied", path)


def test_training_is_never_lost_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every failure is one warning."""

    def fitted(name: str, match: str) -> Path:
        trainer = trainer_in(tmp_path / name, max_epochs=1)
        with pytest.warns(UserWarning, match=match) as caught:
            trainer.fit(Scored(), make_loader())
        assert len(caught) == 1
        assert trainer.global_step == 11
        return tmp_path / name / FOLDER

    with monkeypatch.context() as patch:
        patch.setattr(run_report, "write_file", fails)
        folder = fitted(
            "full", r"report\.html cannot be written \(OSError: .*No space left.*The run itself is not affected"
        )
        assert not (folder / "report.html").exists()
        patch.setattr(run_report, "write_file", refuses)
        fitted("closed", r"report\.html cannot be written \(PermissionError: .*Permission denied")

    class Breaks(tw.Callback):
        def teardown(self, trainer: tw.Trainer, module: tw.Module, stage: str) -> None:
            trainer.loggers[0].flush()
            path = Path(f"{trainer.log_dir}/metrics.csv")
            path.write_bytes(path.read_bytes() + b"\xff\xfe\n")

    trainer = trainer_in(tmp_path / "broken", max_epochs=1, callbacks=Breaks())
    with pytest.warns(UserWarning, match=r"cannot be written \(ValueError: .*metrics\.csv is not a table"):
        trainer.fit(Scored(), make_loader())


def git(folder: Path, *arguments: str) -> None:
    command = ["git", "-C", str(folder), "-c", "user.name=me", "-c", "user.email=me@host", *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=deadline(30))


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_report_names_the_commit_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("one\n")
    assert describe_work_tree(tmp_path) == []
    git(tmp_path, "init", "--quiet", "--initial-branch", "mine")
    assert describe_work_tree(tmp_path) == []  # without a commit
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    rows = dict(describe_work_tree(tmp_path))
    assert (len(rows["git commit"]), rows["branch"], rows["files that differ from it"]) == (40, "mine", "none")
    script.write_text("one\ntwo\n")
    assert dict(describe_work_tree(tmp_path))["files that differ from it"] == "1 file changed, 1 insertion(+)"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_work_tree(tmp_path) == []  # without git


def test_slow_git_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "git").write_text('#!/bin/sh\ncase "$*" in *diff*) exec sleep 600;; *) echo abc;; esac\n')
    (tmp_path / "git").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(run_report, "MOST_SECONDS", 0.5)
    rows = dict(describe_work_tree(tmp_path))
    assert rows["files that differ from it"] == "unknown: git did not answer within 0.5 seconds"


def fit_on_ranks(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, failing in (("whole", None), ("failed", 1)):
        module = Scored()
        trainer = trainer_in(folder / name, max_epochs=1, strategy="ddp", devices=2)
        module.error = ValueError("broken here") if failing == trainer.global_rank else None
        try:
            trainer.fit(module, make_loader(), make_loader(8))
        except Exception as error:
            found[name] = type(error).__name__
    return found


def test_one_rank_writes_the_report_of_two(tmp_path: Path) -> None:
    results = run_job(fit_on_ranks, 2, tmp_path)
    page = page_in(tmp_path / "whole")
    facts = page.facts()
    assert (facts["strategy"], facts["processes"]) == ("ddp", "2 on 1 machine(s)")
    assert "finished after 1 epochs and 6 steps" in page.text
    assert len(list((tmp_path / "whole").rglob("report.html*"))) == 1
    assert results[1] == {"failed": "ValueError"}
    assert "failed" in results[0]
    page = page_in(tmp_path / "failed")
    assert page.headings[1] == "Error"
    assert "rank 1: ValueError: broken here" in page.text
