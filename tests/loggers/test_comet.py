"""CometLogger, with a client in memory and with the real one offline."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import random
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from small import QUIET, Classifier, make_loader

import trainwright as tw


class Experiment:
    """An experiment of the client in memory."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.alive = options, True
        self.project_name = options["project_name"] or "general"
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.logged: list[Any] = []

    def get_key(self) -> str:
        return str(self.options["experiment_key"])

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        assert self.alive
        self.rows.append((step, values))

    def log_parameters(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def log_model(self, name: str, path: str) -> None:
        self.logged.append((name, path))

    def log_image(self, image: Any, name: str, step: int, **options: Any) -> None:
        self.logged.append((name, step, tuple(image.shape), options))

    def log_other(self, key: str, value: Any) -> None:
        self.logged.append((key, value))

    @property
    def ended(self) -> bool:
        return not self.alive

    def end(self) -> None:
        self.alive = False


class Client(types.ModuleType):
    """The module `comet_ml`."""

    def __init__(self) -> None:
        super().__init__("comet_ml")
        self.__spec__ = importlib.machinery.ModuleSpec("comet_ml", None)
        self.experiments: list[Experiment] = []
        self.key: str | None = "k"

    def get_config(self) -> None:
        return None

    def get_api_key(self, key: str | None, config: Any) -> str | None:
        return key or self.key

    def generate_guid(self) -> str:
        return f"new{len(self.experiments)}"

    def ExperimentConfig(self, **options: Any) -> dict[str, Any]:
        return options

    def start(self, **options: Any) -> Experiment:
        for each in self.experiments:  # the client has one at a time
            each.end()
        self.experiments.append(Experiment(options))
        return self.experiments[-1]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    client = Client()
    monkeypatch.setitem(sys.modules, "comet_ml", client)
    return client


def began(logger: tw.CometLogger, state: dict[str, Any] | None = None) -> tw.CometLogger:
    if state is not None:
        logger.load_state_dict(json.loads(json.dumps(state)))
    logger.start(lambda text: text, is_writer=True)
    return logger


def log_steps(logger: tw.CometLogger, *steps: int) -> None:
    for step in steps:
        logger.log_metrics({"loss": 0.5}, step)
    logger.flush()


@pytest.mark.parametrize("online", [True, False])
@pytest.mark.parametrize("is_killed", [True, False])
def test_a_resumed_run_continues_its_experiment(client: Client, tmp_path: Path, online: bool, is_killed: bool) -> None:
    first = began(tw.CometLogger(save_dir=tmp_path, online=online, project="p"))
    log_steps(first, 1, 2)
    state = first.state_dict()
    log_steps(first, 3)
    if not is_killed:
        first.finalize("failed")
    resumed = began(tw.CometLogger(save_dir=tmp_path, online=online, project="p", mode="create"), state)
    log_steps(resumed, 3, 4)
    resumed.finalize("success")
    # Offline a killed process leaves no archive, so its rows are written again.
    expected = [3, 4] if is_killed and not online else [4]
    assert [step for step, _ in client.experiments[1].rows] == expected
    assert [(each.options["experiment_key"], each.options["mode"]) for each in client.experiments] == [
        ("new0", "get_or_create"),
        ("new0", "get_or_create"),
    ]
    assert client.experiments[1].logged == [("trainwright_status", "success")]
    assert (resumed.name, resumed.version) == ("p", "new0")


def test_what_else_it_logs(client: Client, tmp_path: Path) -> None:
    logger = tw.CometLogger(save_dir=tmp_path, prefix="a", experiment_key="mine", mode="create", tags=["t"], name="n")
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"x": torch.tensor(2.0)}, 5)
    logger.log_images({"seen": [torch.zeros(2, 3)]}, image_channels="first")
    logger.log_images({"color": torch.zeros(3, 8, 6)})
    (tmp_path / "file").write_text("x")
    logger.log_model(tmp_path / "file")
    logger.flush()
    (experiment,) = client.experiments
    assert experiment.rows == [(5, {"a-x": 2.0})]
    assert experiment.logged == [
        {"lr": 0.1},
        ("a-seen", 5, (2, 3), {"image_channels": "first"}),
        ("a-color", 5, (8, 6, 3), {}),
        ("file", str(tmp_path / "file")),
    ]
    assert (experiment.options["mode"], experiment.options["online"]) == ("create", True)
    assert experiment.options["experiment_config"]["tags"] == ["t"]
    assert logger.experiment is experiment
    logger.finalize("success")


def test_without_a_key_it_is_offline(client: Client, tmp_path: Path) -> None:
    client.key = None
    with pytest.warns(UserWarning, match="Comet has no API key.*`comet upload`"):
        began(tw.CometLogger(save_dir=tmp_path))
    assert client.experiments[0].options["online"] is False
    began(tw.CometLogger(save_dir=tmp_path, api_key="given"))
    assert client.experiments[1].options["online"] is True


def test_comet_rejects_wrong_settings(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="mode='append' is not accepted; choose from 'get_or_create'"):
        tw.CometLogger(mode="append")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "trainwright\[comet\]"'):
        tw.CometLogger()


class Fails(Classifier):
    """Fails at a step."""

    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.fails_at = fails_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == self.fails_at:
            raise KeyError("failed")
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning")
def test_the_real_client_writes_an_archive(tmp_path: Path) -> None:
    pytest.importorskip("comet_ml")

    def fit(fails_at: int, ckpt_path: str | None) -> tw.CometLogger:
        random.seed(1)  # as each process of a seeded script
        logger = tw.CometLogger(project="tests", save_dir=tmp_path / "comet", online=False)
        saves = tw.ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=5, save_top_k=-1)
        settings = {**QUIET, "logger": logger, "enable_checkpointing": True, "callbacks": [saves]}
        trainer = tw.Trainer(**settings, max_epochs=2, log_every_n_steps=1)
        try:
            trainer.fit(Fails(fails_at), make_loader(), ckpt_path=ckpt_path)
        except KeyError:
            assert fails_at >= 0
        return logger

    first = fit(13, None)
    resumed = fit(-1, f"{tmp_path}/saved/step=10.ckpt")
    assert resumed.version == first.version
    found = []
    for path in (tmp_path / "comet").glob("*.zip"):
        with zipfile.ZipFile(path) as archive:
            experiment = json.loads(archive.read("experiment.json"))
            assert (experiment["offline_id"], experiment["resume_strategy"]) == (first.version, "get_or_create")
            for line in archive.read("messages.json").decode().splitlines():
                metric = json.loads(line)["payload"].get("metric", {})
                if metric.get("metricName") == "loss_step":
                    found.append(metric["step"])
    assert sorted(found) == list(range(22))
