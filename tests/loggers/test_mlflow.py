"""The MLflow logger with a store in memory, which refuses the names that MLflow refuses."""

from __future__ import annotations

import importlib.machinery
import posixpath
import re
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from small import began

import trainwright as tw


class MlflowError(Exception):
    """As mlflow.exceptions.MlflowException."""

    def __init__(self, message: str, error_code: str = "INVALID_PARAMETER_VALUE") -> None:
        super().__init__(message)
        self.error_code = error_code


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class Param(NamedTuple):
    key: str
    value: str


class Store:
    """The client and its store."""

    def __init__(self) -> None:
        self.metrics: dict[str, list[Metric]] = {}
        self.params: dict[str, dict[str, str]] = {}
        self.batches: list[int] = []
        self.is_down = False
        self.images: list[str] = []
        self.statuses: list[str] = []
        self.has_experiment = True

    def log_image(self, run_id: str, image: Any, key: str, step: int, timestamp: int) -> None:
        for end in ("0b.png", "0b+compressed.webp"):
            self.images.append(f"images/{key.replace('/', '~')}+step+{step}+timestamp+{timestamp}+{end}")

    def list_artifacts(self, run_id: str, path: str) -> list[Any]:
        assert path == "images"
        return [types.SimpleNamespace(path=each) for each in self.images]

    def create_experiment(self, name: str, artifact_location: str | None) -> str:
        self.has_experiment = True  # by another job, in between
        raise MlflowError(f"Experiment(name={name}) already exists.", "RESOURCE_ALREADY_EXISTS")

    def get_experiment_by_name(self, name: str) -> Any:
        return types.SimpleNamespace(experiment_id="e7") if self.has_experiment else None

    def create_run(self, experiment_id: str, **options: Any) -> Any:
        run_id = f"r{len(self.metrics)}"
        self.metrics[run_id], self.params[run_id] = [], {}
        return self.get_run(run_id)

    def get_run(self, run_id: str) -> Any:
        data = types.SimpleNamespace(metrics={each.key for each in self.metrics[run_id]}, params=self.params[run_id])
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id, experiment_id="e7"), data=data)

    def get_metric_history(self, run_id: str, key: str) -> list[Metric]:
        return [each for each in self.metrics[run_id] if each.key == key]

    def update_run(self, run_id: str, status: str) -> None:
        self.statuses.append(status)

    set_terminated = update_run

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        if self.is_down:
            raise MlflowError("no network", "INTERNAL_ERROR")
        for name in (each.key for each in [*metrics, *params]):
            is_short = posixpath.normpath(name) == name != "." and not name.startswith(("..", "/"))
            if not re.fullmatch(r"[/\w.\- :]+", name) or not is_short or len(name) > 250:
                raise MlflowError(f"invalid name {name[:10]!r}")
        self.batches.append(len(metrics))
        self.metrics[run_id] += [each for each in metrics if each not in self.metrics[run_id]]
        self.params[run_id].update(params)

    def steps(self, run_id: str | None, key: str) -> list[int]:
        return [each.step for each in self.get_metric_history(run_id or "", key)]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    parts: dict[str, dict[str, Any]] = {
        "": {},
        ".entities": {"Metric": Metric, "Param": Param,
            "RunStatus": types.SimpleNamespace(RUNNING=1, to_string=lambda status: "RUNNING")},
        ".exceptions": {"MlflowException": MlflowError},
        ".tracking": {"MlflowClient": lambda uri: store, "get_tracking_uri": lambda: "",
            "is_tracking_uri_set": lambda: False},
    }  # fmt: skip
    for name, members in parts.items():
        module = types.ModuleType(f"mlflow{name}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return store


def log_steps(logger: tw.MLFlowLogger, name: str, *steps: int) -> None:
    for step in steps:
        logger.log_metrics({"epoch": 0, name: 0.5}, step)
    logger.flush()


@pytest.mark.parametrize("given", [False, True])
def test_only_rows_that_come_again_are_left_out(store: Store, tmp_path: Path, given: bool) -> None:
    logger = began(tw.MLFlowLogger(save_dir=tmp_path))
    log_steps(logger, "loss", 1, 2)
    state = logger.state_dict()
    log_steps(logger, "loss", 3, 4)
    logger.finalize("failed")
    run_id = logger.version
    if given:
        logger = tw.MLFlowLogger(save_dir=tmp_path, run_id=run_id)
    began(logger, state)
    log_steps(logger, "loss", 3, 4)
    log_steps(logger, "val", 4)  # a training row has an epoch at the same step
    log_steps(logger, "loss", 5)
    assert logger.version == run_id
    assert store.steps(run_id, "loss") == [1, 2, 3, 4, 5]
    assert store.steps(run_id, "epoch") == [1, 2, 3, 4, 4, 5]
    logger.finalize("success")
    log_steps(began(logger), "val", 4)
    assert store.steps(run_id, "val") == [4, 4]


def test_values_that_mlflow_refuses(store: Store, tmp_path: Path) -> None:
    logger = began(tw.MLFlowLogger(save_dir=tmp_path))
    logger.log_metrics({"/odd": 1, "a//b": 2, "..": 3, "": 4, "..c/./d": 5, "e@/": 6, "...": 7, "a.b/c d": 8}, 1)
    logger.flush()
    names = {each.key: each.value for each in store.metrics["r0"]}
    assert names == {"odd": 1, "a/b": 2, "_": 4, "__": 3, "__c/_/d": 5, "e_": 6, "__.": 7, "a.b/c d": 8}
    with pytest.warns(UserWarning, match="MLflow rejects 'nnn.*It is skipped, like all other values") as caught:
        log_steps(logger, "n" * 300, 2, 3)
    log_steps(logger, "loss", 3)
    assert len(caught) == 1
    assert store.steps("r0", "epoch") == [2, 3, 3]
    assert store.steps("r0", "loss") == [3]
    logger.log_hyperparams({"": 3, "net": {"": {"/": 4}}})
    assert store.params["r0"] == {"_": "3", "net": "4"}


def test_rows_wait_for_the_service_in_batches(store: Store, tmp_path: Path) -> None:
    logger = began(tw.MLFlowLogger(save_dir=tmp_path))
    store.is_down = True
    with pytest.warns(UserWarning, match="MLFlowLogger could not write: MlflowError: no network"):
        log_steps(logger, "loss", *range(600))
    store.is_down = False
    logger.flush()
    assert store.steps("r0", "loss") == list(range(600))
    assert store.batches == [500, 500, 200]


def test_other_ranks_know_the_experiment(store: Store, tmp_path: Path) -> None:
    texts: list[str] = []

    def told(text: str) -> str:
        texts.append(text)
        return texts[0]

    first, second = tw.MLFlowLogger(save_dir=tmp_path), tw.MLFlowLogger(save_dir=tmp_path)
    first.start(told, is_writer=True)
    second.start(told, is_writer=False)
    assert (second.name, second.version) == (first.name, first.version) == ("e7", "r0")
