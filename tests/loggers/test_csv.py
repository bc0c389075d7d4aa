"""The CSV logger's folders, rows and hyper-parameters."""

from __future__ import annotations

import csv
import json
import os
import pickle
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import fsspec
import numpy
import pytest
import torch
import yaml
from deadlines import wait_until
from small import QUIET, SAVING, Classifier, began, make_loader

import trainwright as tw
from trainwright.loggers.csv import MetricsFile
from trainwright.loggers.files import claim_folder


def rows(logger: tw.CSVLogger) -> list[dict[str, str]]:
    with fsspec.open(logger.metrics_path, "r", newline="") as file:
        return list(csv.DictReader(file))


def hyper_parameters(logger: tw.CSVLogger) -> Any:
    with fsspec.open(f"{logger.log_dir}/hparams.json", "r") as file:
        return json.load(file)


def started(folder: Any, **kwargs: Any) -> tw.CSVLogger:
    return began(tw.CSVLogger(str(folder), **kwargs))


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A local folder and one in memory."""
    yield str(tmp_path) if request.param == "local" else "memory://csv"
    if request.param == "memory":
        fsspec.filesystem("memory").rm("/", recursive=True)


def test_a_folder_stays_where_it_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given, following, alone = tw.CSVLogger("given"), tw.CSVLogger(), tw.CSVLogger()
    trainer = tw.Trainer(logger=[given, following], default_root_dir="root", accelerator="cpu")
    monkeypatch.chdir("/")
    assert trainer.default_root_dir == f"{tmp_path}/root"
    assert [each.save_dir for each in (given, following, alone)] == [
        f"{tmp_path}/given",
        f"{tmp_path}/root",
        str(tmp_path),
    ]
    assert tw.CSVLogger("~/logs").save_dir == os.path.expanduser("~/logs")


def test_each_run_has_a_folder_of_its_own(place: str) -> None:
    runs = [started(place) for _ in range(3)]
    assert [logger.log_dir for logger in runs] == [f"{place}/trainwright_logs/version_{n}" for n in range(3)]
    assert [logger.version for logger in runs] == [0, 1, 2]
    named = started(place, name="runs", version="mine")
    assert (named.log_dir, named.version, named.name) == (f"{place}/runs/mine", "mine", "runs")
    assert started(place, name="", version=7).log_dir == f"{place}/version_7"
    assert started(place, name=None).log_dir == f"{place}/version_8"


def test_a_run_in_a_given_folder_begins_a_table_of_its_own(place: str) -> None:
    for number in range(3):
        logger = started(place, version="baseline")
        with pytest.warns(UserWarning, match=r"metrics\.csv is from an earlier run") if number else nullcontext():
            logger.log_metrics({"a": float(number)}, 1)
            logger.flush()
        logger.log_metrics({"a": float(number)}, 2)
        logger.close()
        assert [row["a"] for row in rows(logger)] == [str(float(number))] * 2
    folder = f"{place}/trainwright_logs/baseline"
    for number in range(2):
        with fsspec.open(f"{folder}/metrics-{number}.csv", "r", newline="") as file:
            assert [row["a"] for row in csv.DictReader(file)] == [str(float(number))] * 2


def test_other_ranks_know_the_folder_and_write_nothing(tmp_path: Path) -> None:
    writer = started(tmp_path)
    writer.flush()  # its record of the run is written in a thread
    other = tw.CSVLogger(str(tmp_path))
    other.start(lambda text: writer.save_dir if text else str(writer.log_dir), is_writer=False)
    other.log_metrics({"a": 1.0}, 1)
    other.log_hyperparams({"lr": 1})
    other.close()
    assert (other.log_dir, other.version) == (writer.log_dir, 0)
    assert os.listdir(tmp_path / "trainwright_logs/version_0") == ["trainwright_run.json"]


def test_new_columns_keep_the_earlier_rows(place: str) -> None:
    logger = started(place)
    logger.log_metrics({"epoch": 0, "a": 1.5}, 1)
    logger.flush()
    logger.log_metrics({"epoch": 0, "a": 2.5}, 2)
    logger.flush()
    logger.log_metrics({"epoch": 1, "b": 3.5}, 3)
    logger.log_metrics({"epoch": 1, "b": 4.5}, 3)  # another row of the same step
    logger.close()
    logger.log_metrics({"epoch": 2, "b": 0.1 + 0.2}, 4)  # a test after fit goes on
    logger.close()
    assert rows(logger) == [
        {"step": "1", "epoch": "0", "a": "1.5", "b": ""},
        {"step": "2", "epoch": "0", "a": "2.5", "b": ""},
        {"step": "3", "epoch": "1", "a": "", "b": "3.5"},
        {"step": "3", "epoch": "1", "a": "", "b": "4.5"},
        {"step": "4", "epoch": "2", "a": "", "b": "0.30000000000000004"},
    ]
    assert not [
        name for name in fsspec.open(str(logger.log_dir)).fs.ls(str(logger.log_dir), False) if "tmp" in name[-6:]
    ]


def test_rows_are_written_while_a_long_epoch_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = started(tmp_path)
    for step in range(450):
        logger.log_metrics({"a": 0.1}, step)
    wait_until(lambda: os.path.exists(logger.metrics_path) and len(rows(logger)) == 404)
    assert rows(logger)[0]["a"] == "0.1"
    monkeypatch.setattr("trainwright.loggers.folder.LONGEST_WAIT_SECONDS", 0.0)
    logger.log_metrics({"a": 0.1}, 450)  # few rows are written too after ten seconds
    wait_until(lambda: len(rows(logger)) == 451)


def test_values_are_logged_as_numbers(tmp_path: Path) -> None:
    logger = tw.CSVLogger(tmp_path, prefix="p")
    value = torch.tensor(2.0, requires_grad=True)
    logger.log_metrics({"a": value, "of": {"x": 1, "y": True}}, step=5)  # before the run: it waits
    began(logger)
    with torch.no_grad():
        value += 1
    logger.log_metrics({"b": torch.tensor([3])})  # of the step before
    logger.close()
    assert [row["step"] for row in rows(logger)] == ["5", "5"]
    assert rows(logger)[0] == {"step": "5", "p-a": "2.0", "p-of/x": "1", "p-of/y": "True", "p-b": ""}
    assert rows(logger)[1]["p-b"] == "3"
    with pytest.raises(TypeError, match=r"a logger got the metric 'p-x' as a Tensor; expected numbers"):
        logger.log_metrics({"x": torch.ones(2)})
    with pytest.raises(AttributeError, match=r"experiment of a CSVLogger has no 'add_text'.*TensorBoardLogger"):
        logger.experiment.add_text("note", "hello")


class Mode(str, Enum):  # noqa: UP042  # as scripts for Python 3.10 write it
    FAST = "fast"


class Size(IntEnum):
    SMALL = 3


def test_hyper_parameters_become_json(place: str) -> None:
    logger = started(place)
    logger.log_hyperparams()
    logger.log_hyperparams(
        {"lr": 0.1, "layers": (1, 2), "t": torch.ones(2), "path": Path("a"), "type": torch.float16, "in": {3: {4}}}
    )
    derived = {
        "a": numpy.float64(0.5),
        "b": numpy.str_("b"),
        "c": Mode.FAST,
        "d": [Size.SMALL, numpy.int64(2)],
        "e": True,
    }
    logger.log_hyperparams(derived)
    logger.flush()
    expected = {"lr": 0.1, "layers": [1, 2], "t": [1.0, 1.0], "path": "a", "type": "torch.float16", "in": {"3": [4]}}
    expected |= {"a": 0.5, "b": "b", "c": "fast", "d": [3, 2], "e": True}
    assert hyper_parameters(logger) == expected
    with fsspec.open(f"{logger.log_dir}/hparams.yaml", "r") as file:
        assert yaml.safe_load(file) == expected
    logger.log_hyperparams({"lr": 0.2})
    logger.close()
    assert hyper_parameters(logger) == {**expected, "lr": 0.2}
    with pytest.raises(TypeError, match="log_hyperparams got 3, an int"):
        logger.log_hyperparams(3)  # type: ignore[arg-type]


def test_a_resumed_run_goes_on_in_the_folder_of_a_given_version(place: str) -> None:
    logger = started(place, version="mine")
    logger.log_metrics({"epoch": 0, "a": 1.0}, 1)
    logger.flush()
    state = logger.state_dict()
    logger.log_metrics({"epoch": 0, "a": 2.0}, 1)
    logger.close()
    with fsspec.open(logger.metrics_path, "r") as file:
        text = file.read()
    with fsspec.open(logger.metrics_path, "w") as file:
        file.write(text[:-3])  # the writer was killed amid a line: nobody knows which number it was to be
    logger = began(tw.CSVLogger(place, version="mine"), state)
    logger.log_metrics({"epoch": 0, "a": 3.0}, 1)
    logger.close()
    assert [row["a"] for row in rows(logger)] == ["1.0", "3.0"]


def test_a_failed_write_is_raised_by_the_next_flush_and_loses_no_row(tmp_path: Path, monkeypatch: Any) -> None:
    logger = started(tmp_path)
    logger.log_metrics({"a": 1.0}, 1)
    logger.flush()

    def fails(file: MetricsFile, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(MetricsFile, "_append", fails)
        logger.log_metrics({"a": 2.0}, 2)
        with pytest.raises(
            OSError, match=r"CSVLogger could not write to .*version_0: OSError: .*No space left.*Free space"
        ):
            logger.flush()
    logger.log_metrics({"a": 3.0}, 3)
    logger.close()
    assert [row["a"] for row in rows(logger)] == ["1.0", "2.0", "3.0"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # newer Pythons warn of threads
def test_half_a_row_is_taken_back_when_the_disk_is_full(tmp_path: Path) -> None:
    """In a separate process, a file may not grow beyond a size."""
    read, write = os.pipe()
    logger = started(tmp_path, flush_logs_every_n_steps=1000)
    logger.log_metrics({"a": 1.0}, 0)
    logger.flush()
    state = logger.state_dict()
    child = os.fork()
    if child == 0:
        import resource
        import signal

        warnings.simplefilter("ignore")  # a logger that fails warns
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
        again = began(tw.CSVLogger(tmp_path, version=0), state)
        outcome = "written"
        for step in range(1, 100):
            again.log_metrics({"a": 1.0}, step)
        try:
            again.flush()
        except OSError as error:
            outcome = str(error)
        os.write(write, outcome.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert "File too large" in os.read(read, 1000).decode()
    os.close(read)
    os.close(write)
    assert len(rows(logger)) == 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # newer Pythons warn of threads
def test_a_forked_child_and_a_copy_do_not_write_the_file(tmp_path: Path) -> None:
    logger = started(tmp_path)
    logger.log_metrics({"a": 1.0}, 1)
    child = os.fork()
    if child == 0:
        logger.log_metrics({"a": 9.0}, 2)
        logger.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    logger.close()
    assert [row["a"] for row in rows(logger)] == ["1.0"]
    copied = pickle.loads(pickle.dumps(logger))
    copied.log_metrics({"a": 2.0}, 2)
    copied.close()
    assert [row["a"] for row in rows(logger)] == ["1.0", "2.0"]


@pytest.mark.parametrize(("settings", "error", "message"), [
    ({"save_dir": 3}, TypeError, r"CSVLogger\(save_dir=3\) is an int; expected a path"),
    ({"version": 1.5}, TypeError, r"version=1\.5\) is a float; expected int, str or None"),
    ({"flush_logs_every_n_steps": 0}, ValueError, "must be at least 1"),
    ({"flush_logs_every_n_steps": "1"}, TypeError, "is not an int"),
])  # fmt: skip
def test_a_csv_logger_rejects_wrong_settings(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tw.CSVLogger(**settings)


def test_a_run_goes_on_after_the_rows_that_a_checkpoint_knows_of(place: str) -> None:
    """The file is the same as of an uninterrupted run, also if the latest row was incomplete."""

    def log(logger: Any, first: int, last: int) -> None:
        for step in range(first, last):
            logger.log_metrics({"epoch": 0, "a": step / 8}, step)
            if step % 3 == 0:
                logger.log_metrics({"epoch": 0, "val": step / 4}, step)

    def text(logger: Any) -> str:
        with fsspec.open(logger.metrics_path, "r", newline="") as file:
            return str(file.read())

    whole = started(place, name="whole")
    log(whole, 0, 12)
    whole.close()
    for end, taken in ((0, "before"), (5, "between"), (6, "between"), (7, "amid")):
        name = f"part-{end}"
        killed = started(place, name=name)
        log(killed, 0, end)
        if taken == "amid":
            killed.log_metrics({"epoch": 0, "a": end / 8}, end)  # which gets another number
        state = json.loads(json.dumps(killed.state_dict()))
        assert state["rows"] == end + len(range(0, end, 3)) + (taken == "amid")
        killed.log_metrics({"epoch": 0, "later": 1.0}, end) if end else None
        log(killed, end + 1, 9)
        killed.flush()
        with fsspec.open(killed.metrics_path, "a") as file:
            file.write("9,0,1.1")  # amid a line
        resumed = began(tw.CSVLogger(place, name=name), state)
        assert (resumed.version, resumed.log_dir) == (0, killed.log_dir)
        before = text(resumed)
        resumed.flush()
        assert text(resumed) == before  # nothing is cut before the run has been restored
        resumed.drop_later_rows()
        assert resumed.state_dict()["rows"] == state["rows"]
        if taken == "amid":
            if end % 3 == 0:
                resumed.log_metrics({"epoch": 0, "val": end / 4}, end)
            end += 1
        log(resumed, end, 12)
        resumed.close()
        assert text(resumed) == text(whole)  # without the column `later` of the dropped rows


def test_a_stop_within_an_epoch_leaves_no_trace_in_the_table(tmp_path: Path) -> None:
    class Logging(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("train", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", 2.0)

    def table(folder: str, every: int, *ends: int) -> str:
        tw.seed_everything(1)
        newest = None
        for end in ends:
            logger = tw.CSVLogger(tmp_path / folder)
            settings = {**SAVING, "logger": logger, "log_every_n_steps": every}
            trainer = tw.Trainer(max_steps=end, **settings)
            trainer.fit(Logging(), make_loader(), make_loader(), ckpt_path=newest)
            newest = trainer.checkpoint_callback.last_model_path
        return Path(logger.metrics_path).read_text()

    assert table("stopped", 2, 4, 27) == table("whole", 2, 27)
    short = table("short", 50, 27)
    # Without a 50th step each epoch of 11 batches has the row of its last step.
    assert [row["step"] for row in csv.DictReader(short.splitlines()) if row["train_step"]] == ["10", "21", "26"]
    assert table("short and stopped", 50, 4, 11, 11, 27, 27) == short


def test_an_impossible_folder_is_an_error(tmp_path: Path) -> None:
    """The error says which argument to change."""
    (tmp_path / "file").touch()
    trainer = tw.Trainer(**QUIET | {"logger": True}, max_steps=1, default_root_dir=str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"file/trainwright_logs \(Not a directory\)\. Set another default_root_dir"):
        trainer.fit(Classifier(), make_loader())


def test_runs_that_start_at_once_claim_different_folders(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda number: claim_folder(str(tmp_path / "runs"), None), range(12)))
    assert sorted(folders) == sorted(f"{tmp_path}/runs/version_{number}" for number in range(12))
