"""Loggers of services through their real clients, W&B offline and MLflow on a local store, and failing clients."""

from __future__ import annotations

import importlib.util
import json
import struct
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deadlines import wait_until
from jobs import run_job
from small import QUIET, SAVING, Classifier, began, make_loader

import trainwright as tw
from trainwright.loggers.remote import RemoteLogger, Row, names_of


class Trained(Classifier):
    """Saves its hyper-parameters, and fails at a step."""

    def __init__(self, dies_at: int = -1) -> None:
        super().__init__(dropout=0.2)
        self.save_hyperparameters()
        self.dies_at = dies_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == self.dies_at:
            raise KeyError("killed")
        return super().training_step(batch, batch_idx)  # logs loss_step


def fit(logger: tw.Logger, folder: Path, dies_at: int = -1, ckpt_path: Any = None, save_top_k: int = -1) -> tw.Trainer:
    torch.manual_seed(1)
    saves = tw.ModelCheckpoint(folder, "{step}", every_n_train_steps=5, save_top_k=save_top_k)
    settings = {**SAVING, "logger": logger, "devices": "auto", "callbacks": [saves]}
    trainer = tw.Trainer(**settings, max_epochs=2, log_every_n_steps=1)
    try:
        trainer.fit(Trained(dies_at), make_loader(), ckpt_path=ckpt_path)
    except KeyError:
        assert dies_at >= 0
    return trainer


class Service(RemoteLogger):
    """A service whose network is gone from one write to another."""

    def __init__(
        self, fails: range = range(0), log_model: bool | str = False, run_id: str | None = None, new_id: str = "first"
    ) -> None:
        super().__init__("p", log_model, run_id)
        self.new_id = new_id
        self.uploads: list[tuple[str, bool]] = []
        self.fails, self.calls, self.ends = fails, 0, []  # type: ignore[var-annotated]
        self.rows: list[Row] = []
        self.params: dict[str, Any] = {}

    def _open(self, run_id: str | None) -> str:
        self._group = "project"
        return run_id or self.new_id

    def _write(self, rows: deque[Row]) -> None:
        self.calls += 1
        if self.calls in self.fails:
            raise ConnectionError("no network")
        self.rows += rows

    def _rows_there(self) -> Iterable[tuple[int, int, str]]:
        return [(row.step, row.time, names_of(row.values)) for row in self.rows]

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        self.params |= params

    def _upload(self, path: str, is_best: bool) -> None:
        if not (Path(path) / "manifest.json").exists():
            raise FileNotFoundError(path)
        self.uploads.append((Path(path).name, is_best))

    def _close(self, status: str) -> None:
        self.ends.append(status)


def test_checkpoints_are_uploaded_once_they_are_complete(tmp_path: Path) -> None:
    at_end, each, resumed = Service(log_model=True), Service(log_model="all"), Service(log_model="all")
    fit(at_end, tmp_path / "a", save_top_k=1)
    assert at_end.uploads == [("step=20.ckpt", True)]
    fit(each, tmp_path / "b", save_top_k=1, dies_at=17)
    assert each.uploads == [("step=5.ckpt", True), ("step=10.ckpt", True), ("step=15.ckpt", True)]
    fit(resumed, tmp_path / "b", save_top_k=1, ckpt_path=f"{tmp_path}/b/step=15.ckpt")
    assert resumed.uploads == [("step=20.ckpt", True)]
    with pytest.raises(ValueError, match="log_model='some' is not accepted; choose from True, False and 'all'"):
        Service(log_model="some")


class Full(Service):
    def _upload(self, path: str, is_best: bool) -> None:
        raise OSError("no space left")


def test_a_failed_upload_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"Full could not upload .*step=20\.ckpt: OSError: no space left\. The checkpoint"
    ):
        trainer = fit(Full(log_model=True), tmp_path, save_top_k=1)
    assert trainer.global_step == 22


def steps(service: Service, name: str = "p-loss_step") -> list[int]:
    return [row.step for row in service.rows if name in row.values]


def test_rows_wait_for_the_network(tmp_path: Path) -> None:
    plain, service = Service(), Service(range(3, 6))
    fit(plain, tmp_path / "a")
    with pytest.warns(UserWarning, match="Service could not write: ConnectionError: no network") as caught:
        fit(service, tmp_path / "b")
    assert len(caught) == 1
    assert [(row.step, row.values) for row in service.rows] == [(row.step, row.values) for row in plain.rows]
    assert steps(plain) == list(range(22))
    assert service.ends == ["success"]
    assert service.params == {"dies_at": -1}


def test_rows_that_never_arrive_are_counted(tmp_path: Path) -> None:
    service = Service(range(3, 1000))
    with (
        pytest.warns(UserWarning, match="could not write: "),
        pytest.warns(UserWarning, match=r"write its last \d+ rows"),
    ):
        fit(service, tmp_path)


def log_steps(service: Service, *numbers: int) -> None:
    for step in numbers:
        service.log_metrics({"a": float(step)}, step)
    service.flush()


class Slow(Service):
    """A service whose first write waits until it is let go."""

    def __init__(self, fails: range = range(0)) -> None:
        super().__init__(fails)
        self.goes = threading.Event()

    def _write(self, rows: deque[Row]) -> None:
        assert self.goes.wait(60)
        super()._write(rows)


def test_rows_that_come_during_a_write_are_written_at_once() -> None:
    service = began(Slow())
    for step in range(100):
        service.log_metrics({"a": 1.0}, step)
    assert isinstance(service, Slow)
    service.goes.set()
    service.flush()
    assert steps(service, "p-a") == list(range(100))
    assert service.calls <= 2


class Unclosable(Service):
    def _close(self, status: str) -> None:
        raise ConnectionError("no network")


def test_a_run_that_cannot_be_closed_is_a_warning(tmp_path: Path) -> None:
    service = Unclosable()
    with pytest.warns(UserWarning, match="Unclosable could not close its run first: ConnectionError: no network"):
        trainer = fit(service, tmp_path)
    assert trainer.global_step == 22
    assert not service._is_open


@pytest.mark.parametrize("new", [False, True])
def test_rows_that_had_arrived_are_left_out(new: bool) -> None:
    service = began(Service())
    log_steps(service, 1, 2)
    state = json.loads(json.dumps(service.state_dict()))
    log_steps(service, 3, 4)
    service.finalize("failed")
    if new:  # by an id that was given, and with its run open before the fit
        service, earlier = Service(run_id="first"), service
        service.rows = earlier.rows
        service.log_hyperparams({"lr": 1})
    began(service, state)
    log_steps(service, 3, 4, 5)
    assert steps(service, "p-a") == [1, 2, 3, 4, 5]
    service.finalize("success")
    began(service)
    log_steps(service, 4)  # of another run
    assert steps(service, "p-a") == [1, 2, 3, 4, 5, 4]


def test_a_fit_from_an_older_checkpoint_of_a_given_run_is_refused(tmp_path: Path) -> None:
    fit(Service(run_id="mine"), tmp_path, dies_at=13)
    older, newest = (f"{tmp_path}/step={step}.ckpt" for step in (5, 10))
    again = Service(run_id="mine")
    with pytest.raises(
        ValueError, match=r"got the run 'mine', which saved .*step=5\.ckpt and has later rows\. .* Omit the id"
    ):
        fit(again, tmp_path, ckpt_path=older)
    assert (again.rows, again.ends) == ([], [])
    others = Service(run_id="another"), Service(new_id="own")
    for service in others:
        fit(service, tmp_path / service.new_id, ckpt_path=older)
        assert steps(service) == list(range(5, 22))
    fit(again, tmp_path, ckpt_path=newest)
    assert steps(again) == list(range(10, 22))


def test_a_run_can_be_resumed_twice() -> None:
    service = began(Service())
    log_steps(service, 1)
    state = service.state_dict()
    log_steps(service, 2, 3)
    service.finalize("failed")
    began(service, state)
    log_steps(service, 2)
    state = service.state_dict()
    service.finalize("failed")
    began(service, state)
    log_steps(service, 3, 4)
    assert steps(service, "p-a") == [1, 2, 3, 4]


def test_a_logger_used_before_the_fit_continues_the_checkpoints_run() -> None:
    first = began(Service())
    log_steps(first, 1)
    state = first.state_dict()
    service = Service(new_id="second")
    service.log_hyperparams({"lr": 1})
    with pytest.warns(
        UserWarning, match="which began the run second. The resumed fit continues the checkpoint's run first"
    ):
        began(service, state)
    assert (service._id, service.ends, service._step) == ("first", ["success"], 1)
    chosen = began(Service(run_id="mine"), state)
    assert (chosen._id, chosen._step) == ("mine", 0)


class Unreachable(Service):
    def _open(self, run_id: str | None) -> str:
        raise ConnectionError("no such host")


def two_ranks(folder: Path) -> Any:
    service = Service()
    trainer = fit(service, folder)
    try:
        fit(Unreachable(), folder / "other")
    except RuntimeError as error:
        return trainer.global_step, service.version, service._id, len(service.rows), str(error)
    return None


@pytest.mark.slow  # a refused run waits for the others
def test_one_rank_has_the_run(tmp_path: Path) -> None:
    first, second = run_job(two_ranks, 2, tmp_path)
    assert first[2] == second[2] == "first"
    assert first[3] >= first[0] > second[3] == 0
    assert first[4] == second[4] == "Unreachable could not open its run: ConnectionError: no such host"


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the rows that W&B's client has put into its files, the oldest run's first."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda each: each.stat().st_mtime):
        for data in log_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({"/".join(each.nested_key) or each.key: json.loads(each.value_json) for each in items})
    return rows


def log_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format: blocks of 32 KiB, records with checksum, length and type."""
    at, record = 7, b""  # after the header of the file
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if left < 7 or kind == 0:
            at += left
            continue
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@pytest.mark.slow
def test_wandb_gets_every_row_once(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    logger = tw.WandbLogger(project="tests", save_dir=tmp_path, offline=True, tags=["a"])
    assert (logger.name, logger.version) == ("tests", None)
    fit(logger, tmp_path / "saved", dies_at=13)
    name = logger.version
    assert name
    resumed = tw.WandbLogger(project="tests", save_dir=tmp_path, offline=True)
    fit(resumed, tmp_path / "saved", ckpt_path=f"{tmp_path}/saved/step=10.ckpt")
    assert resumed.version == name
    wandb.log({"by_hand": 1})
    tw.Trainer(**{**QUIET, "logger": resumed}).validate(Trained(), make_loader())
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2  # of the failed run, and of this run
    wandb.finish()
    # The client's process may write the file a moment later.
    wait_until(lambda: any("val_loss" in row for row in history(tmp_path)))
    rows = history(tmp_path)
    assert [row["trainer/global_step"] for row in rows if "loss_step" in row] == list(range(22))
    assert [row["by_hand"] for row in rows if "by_hand" in row] == [1]
    assert len([row for row in rows if "val_loss" in row]) == 1
    other = tw.WandbLogger(project="tests", save_dir=tmp_path / "other", offline=True)
    other.log_image("seen", [torch.rand(3, 4, 4).numpy().transpose(1, 2, 0)], caption=["noise"])
    other.log_text("texts", ["a", "b"], [["x", "y"]])
    assert other.log_texts({"said": "hello"}, 2)
    other.log_hyperparams({"lr": 0.1})
    assert other.experiment.config["lr"] == 0.1
    with pytest.raises(ValueError, match="1 items, but caption has 2 entries"):
        other.log_image("seen", [torch.rand(4, 4).numpy()], caption=["a", "b"])
    with pytest.raises(TypeError, match="expected a list"):
        other.log_image("seen", torch.rand(4, 4))  # type: ignore[arg-type]
    other.finalize("success")
    other.end_run()

    def has_media() -> bool:
        keys = {key for row in history(tmp_path / "other") for key in row}
        return {"seen", "texts", "said"} <= {key.partition("/")[0].partition(".")[0] for key in keys}

    wait_until(has_media)  # the client's process may write the file a moment later


@pytest.mark.slow
def test_without_a_login_a_run_is_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    logger = tw.WandbLogger(project="tests", save_dir=tmp_path)
    with pytest.warns(UserWarning, match="No API key configured.*Upload it with `wandb sync`"):
        logger.log_metrics({"a": 1.0}, 3)
    assert logger.experiment.offline
    logger.end_run()
    assert list((tmp_path / "wandb").glob("offline-run-*"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_mlflow_gets_every_row_once(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")

    def make(**options: Any) -> Any:
        return tw.MLFlowLogger("digits", save_dir=tmp_path, tags={"a": "b"}, **options)

    logger = make(run_name="mine")
    fit(logger, tmp_path / "saved", dies_at=13)
    client, run_id = logger.experiment, logger.version
    assert client.get_run(run_id).info.status in ("FAILED", "RUNNING")
    resumed = make()
    fit(resumed, tmp_path / "saved", ckpt_path=f"{tmp_path}/saved/step=10.ckpt")
    assert resumed.version == run_id
    run = client.get_run(run_id)
    assert (run.info.status, run.data.tags["a"], run.info.run_name) == ("FINISHED", "b", "mine")
    assert run.data.params == {"dies_at": "13"}
    assert sorted(each.step for each in client.get_metric_history(run_id, "loss_step")) == list(range(22))
    other = make()
    other.log_hyperparams({"lr": 0.1, "net": {"width": 3}})
    other.log_images({"seen": torch.rand(3, 8, 8)}, step=2)
    other.log_text("hello", "notes.txt")
    assert other.log_texts({"said": "hello"}, 2)
    other.log_table({"x": [1, 2]}, "table.json")
    other.log_model(f"{tmp_path}/saved/step=10.ckpt")
    other.finalize("failed")
    found = client.get_run(other.version)
    assert found.data.params == {"lr": "0.1", "net/width": "3"}
    assert found.info.status == "FAILED"
    names = {each.path for each in client.list_artifacts(other.version)}
    assert {"images", "model", "notes.txt", "table.json", "said"} <= names
    assert not [each for each in client.list_artifacts(run_id) if each.path == "model"]
    uploading = make(log_model=True)
    fit(uploading, tmp_path / "uploaded", save_top_k=1)
    names = {each.path for each in client.list_artifacts(uploading.version, "model/checkpoints/step=20.ckpt")}
    assert "model/checkpoints/step=20.ckpt/manifest.json" in names


def test_a_missing_package_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install wandb"):
        tw.WandbLogger()
    with pytest.raises(ModuleNotFoundError, match="pip install mlflow"):
        tw.MLFlowLogger()
