"""The record of a run in its folder, for every way in which a run can end."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forked import run_python
from jobs import run_job
from small import QUIET, Classifier, make_loader

import trainwright as tw
from trainwright.loggers import run_record
from trainwright.loggers.run_record import RunRecord, RunRecorder, find_record
from trainwright.paths import machine
from trainwright.tools.runs import list_runs


class Raises(Classifier):
    """Raises at a batch of the first epoch."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.error = error

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.error is not None and batch_idx == 2:
            raise self.error


def trainer_in(folder: Path, **options: Any) -> tw.Trainer:
    logger = tw.CSVLogger(folder, name=None)
    return tw.Trainer(**{**QUIET, "logger": logger, "max_epochs": 1, "log_every_n_steps": 1, **options})


def record_in(folder: Path, run: str = "version_0") -> RunRecord:
    found = find_record(str(folder / run)).record
    return found


def test_a_run_that_finishes_and_is_tested(tmp_path: Path) -> None:
    seen = []
    watch = tw.LambdaCallback(
        on_train_start=lambda trainer, module: trainer.loggers[0].flush() or seen.append(record_in(tmp_path))
    )
    saves = tw.ModelCheckpoint(tmp_path / "elsewhere")
    trainer = trainer_in(tmp_path, callbacks=[watch, saves], enable_checkpointing=True)
    trainer.validate(Classifier(), make_loader(), verbose=False)
    assert (record_in(tmp_path).call, record_in(tmp_path).status) == ("validate", "success")
    trainer.fit(Classifier(), make_loader())
    (running,) = seen
    assert (running.call, running.status, running.state.word, running.pid) == ("fit", "running", "running", os.getpid())
    done = record_in(tmp_path)
    assert (done.state, done.step, done.epoch, done.resumed) == (("finished", ""), 10, 0, None)
    assert done.ended is not None
    assert done.checkpoints == (f"{tmp_path}/elsewhere",)
    trainer.test(Classifier(), make_loader(), verbose=False)
    assert record_in(tmp_path) == done  # how the training ended
    assert [each.epoch for each in list_runs(str(tmp_path))] == [0]  # the epoch of the training, not of the test's row
    trainer.fit(Classifier(), make_loader())  # from step 0: another run
    again = record_in(tmp_path, "version_1")
    assert (again.resumed, again.checkpoints, again.state.word) == (None, done.checkpoints, "finished")
    assert record_in(tmp_path) == done


@pytest.mark.parametrize(("error", "word"), [(ValueError("bad batch"), "failed"), (KeyboardInterrupt(), "stopped")])
def test_a_run_that_fails_or_is_stopped_and_goes_on(tmp_path: Path, error: BaseException, word: str) -> None:
    saves = tw.ModelCheckpoint(every_n_train_steps=1)
    trainer = trainer_in(tmp_path, callbacks=saves, enable_checkpointing=True)
    with contextlib.suppress(ValueError, KeyboardInterrupt):
        trainer.fit(Raises(error), make_loader())
    ended = record_in(tmp_path)
    assert (ended.state.word, ended.step) == (word, 1)
    resumed = trainer_in(tmp_path, callbacks=tw.ModelCheckpoint(), enable_checkpointing=True)
    resumed.fit(Raises(), make_loader(), ckpt_path="auto")
    assert os.listdir(tmp_path) == ["version_0"]
    whole = record_in(tmp_path)
    assert (whole.state.word, whole.began, whole.step) == ("finished", ended.began, 10)
    assert whole.resumed is not None


class Refused(Classifier):
    def configure_optimizers(self) -> Any:
        return "none"


def test_a_run_that_is_refused_leaves_the_record_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        trainer_in(tmp_path).fit(Refused(), make_loader())
    assert os.listdir(tmp_path) == []
    trainer = trainer_in(tmp_path)
    trainer.fit(Classifier(), make_loader())
    before = (tmp_path / "version_0/trainwright_run.json").read_bytes()
    with pytest.raises(TypeError):
        trainer.fit(Refused(), make_loader())
    assert (tmp_path / "version_0/trainwright_run.json").read_bytes() == before


def test_no_run_depends_on_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_hand(version: str) -> None:
        logger = tw.CSVLogger(tmp_path, name=None, version=version)
        logger.log_metrics({"loss": 1.0}, step=4)
        logger.finalize("success")
        assert (tmp_path / version / "metrics.csv").read_text() == "step,loss\n4,1.0\n"

    for name in ("other", "folder"):
        (tmp_path / name).mkdir()
    (tmp_path / "other/trainwright_run.json").write_text('{"my": "settings"}')
    (tmp_path / "folder/trainwright_run.json").mkdir()
    for name, what in (("other", "is not the record of a run"), ("folder", "is not a file")):
        with pytest.warns(
            UserWarning, match=rf"trainwright_run\.json {what}, and stays as it is\. Move it away\."
        ) as seen:
            by_hand(name)
        assert len(seen) == 1
    assert (tmp_path / "other/trainwright_run.json").read_text() == '{"my": "settings"}'

    def full(path: str, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_record, "write_file", full)
    with pytest.warns(UserWarning, match=r"trainwright_run\.json cannot be written \(OSError: .*No space left") as seen:
        by_hand("full")
    assert len(seen) == 1


def test_a_resume_with_nothing_left_to_train_keeps_the_step_and_the_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, times = RunRecorder(), iter(f"2026-01-01T00:00:0{number}" for number in range(9))
    monkeypatch.setattr(run_record, "_now", lambda: next(times))
    for step, epoch in ((5, 1), (None, None)):
        begun = recorder.begin(str(tmp_path), "fit", continues=True)
        noted = [recorder.note_checkpoints(each) for each in (f"{tmp_path}/board/saved", "/elsewhere", str(tmp_path))]
        for work in (begun, *noted, recorder.end("success", step, epoch)):
            assert work is not None or epoch is None  # the folders are known then
            if work is not None:
                work()
    record = record_in(tmp_path, "")
    assert (record.step, record.epoch) == (5, 1)
    assert (record.began, record.resumed, record.ended) == ("2026-01-01T00:00:00", None, "2026-01-01T00:00:01")
    assert record.checkpoints == ("board/saved", "/elsewhere", ".")
    assert record.checkpoint_folders("/moved") == ("/moved/board/saved", "/elsewhere", "/moved")


KILLED = """
import os, signal, sys
from small import Classifier, make_loader, QUIET
import trainwright as tw
def kill(trainer, module, batch, batch_idx):
    if batch_idx == 5:
        os.kill(os.getpid(), signal.SIGKILL)
logger = tw.CSVLogger(sys.argv[1], name=None)
callback = tw.LambdaCallback(on_train_batch_start=kill)
trainer = tw.Trainer(**{**QUIET, "logger": logger}, callbacks=callback, max_epochs=1, log_every_n_steps=1)
trainer.fit(Classifier(), make_loader())
"""


@pytest.mark.launch
def test_a_killed_run_is_shown_as_failed(tmp_path: Path) -> None:
    assert run_python("-c", KILLED, tmp_path).returncode != 0
    killed = record_in(tmp_path)
    assert (killed.status, killed.machine) == ("running", machine())
    assert killed.state == ("failed", "its process is gone")
    elsewhere = replace(killed, machine="another", host="other-host")
    assert elsewhere.state.word == "running"
    assert "on other-host" in elsewhere.state.remark


def test_loops_by_hand_have_records(tmp_path: Path) -> None:
    logger = tw.CSVLogger(tmp_path, name=None)
    logger.log_metrics({"loss": 1.0}, step=4)
    logger.finalize("success")  # writes the buffered rows
    assert (tmp_path / "version_0/metrics.csv").read_text() == "step,loss\n4,1.0\n"
    assert (record_in(tmp_path).call, record_in(tmp_path).state.word, record_in(tmp_path).step) == (
        "loop",
        "finished",
        4,
    )
    accelerator = tw.Accelerator(log_with=tw.CSVLogger(tmp_path, name=None), cpu=True)
    accelerator.init_trackers("project")
    accelerator.log({"loss": 1.0}, step=0)
    accelerator.get_tracker("csv", unwrap=False).logger.flush()
    assert record_in(tmp_path, "version_1").state.word == "running"
    accelerator.end_training()
    assert record_in(tmp_path, "version_1").state.word == "finished"


@pytest.mark.parametrize("text", [
    "",
    "[]",
    "{",
    '{"call": "fit"}',
    '{"call": "fit", "status": "odd", "began": "2026-01-01T00:00:00+00:00"}',
    '{"call": "fit", "status": "success", "began": "yesterday"}',
    '{"call": "fit", "status": "running", "began": "2026-01-01T00:00:00+00:00", "pid": "1"}',
    '{"call": "fit", "status": ["success"], "began": "2026-01-01T00:00:00+00:00"}',
    '{"call": "fit", "status": "success", "began": "2026-01-01T00:00:00+00:00", "checkpoints": [1]}',
    "[" * 10_000,
])  # fmt: skip
def test_a_damaged_record_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "trainwright_run.json").write_text(text)
    assert find_record(str(tmp_path)).record is None
    trainer = tw.Trainer(**{**QUIET, "logger": tw.CSVLogger(tmp_path, name=None, version="")}, max_steps=1)
    if not text:
        trainer.fit(Classifier(), make_loader())
        assert json.loads((tmp_path / "trainwright_run.json").read_text())["status"] == "success"


def two_ranks(folder: Path) -> str:
    logger = tw.CSVLogger(folder, name=None)
    options = {**QUIET, "logger": logger, "devices": "auto", "max_epochs": 1, "log_every_n_steps": 1}
    trainer = tw.Trainer(**options)
    trainer.fit(Classifier(), make_loader())
    plotted = logger.plot()
    before = (folder / "version_0/trainwright_run.json").read_bytes() if trainer.is_global_zero else b""
    with pytest.raises(TypeError):
        trainer.fit(Refused(), make_loader())
    if trainer.is_global_zero:
        assert (folder / "version_0/trainwright_run.json").read_bytes() == before
    return plotted


def test_two_ranks_write_one_record(tmp_path: Path) -> None:
    plotted = run_job(two_ranks, 2, tmp_path)
    assert plotted == [f"{tmp_path}/version_0/curves.html"] * 2
    assert record_in(tmp_path).state.word == "finished"
    names = ["curves.html", "metrics.csv", "report.html", "trainwright_run.json"]
    assert sorted(os.listdir(tmp_path / "version_0")) == names
