"""The W&B logger with a client in memory, which keeps W&B's rules about several runs in one process."""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from small import began

import trainwright as tw


class UsageError(Exception):
    """As wandb.errors.UsageError."""


class Run:
    """A run of the fake client. Its rows stay in `client.rows`."""

    def __init__(self, client: Client, options: dict[str, Any]) -> None:
        self.client, self.options = client, options
        self.id = options.get("id") or f"new{len(client.runs)}"
        self.project = options.get("project") or "uncategorized"
        self.dir = f"{options['dir']}/wandb/run-{len(client.runs)}-{self.id}/files"
        self.disabled = options.get("mode") == "disabled"
        self.is_finished, self.exit_code = False, -1
        self.config: dict[str, Any] = {}

    def define_metric(self, *args: Any, **kwargs: Any) -> None:
        self.check()

    def log(self, row: dict[str, Any]) -> None:
        self.check()
        self.client.rows.setdefault(self.id, []).append(row)

    def check(self) -> None:
        if self.is_finished:
            raise UsageError(f"Run ({self.id}) is finished.")

    def finish(self, exit_code: int = 0) -> None:
        if not self.is_finished:
            self.is_finished, self.exit_code = True, exit_code
            self.client.active.remove(self)


class Client(types.ModuleType):
    """The module `wandb`."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.errors = types.SimpleNamespace(UsageError=UsageError)
        self.runs: list[Run] = []
        self.active: list[Run] = []
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.run: Run | None = None

    def setup(self) -> Any:
        return types.SimpleNamespace(most_recent_active_run=self.active[-1] if self.active else None)

    def init(self, **options: Any) -> Run:
        if self.active and options.get("reinit") != "create_new":
            return self.active[-1]
        run = Run(self, options)
        self.runs.append(run)
        self.active.append(run)
        return run

    def steps(self, run_id: str, name: str = "loss") -> list[int]:
        return [row["trainer/global_step"] for row in self.rows.get(run_id, []) if name in row]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    client = Client()
    monkeypatch.setitem(sys.modules, "wandb", client)
    monkeypatch.setattr(tw.WandbLogger, "_idle", [])  # runs of other tests
    monkeypatch.setattr(tw.WandbLogger, "_opened", set())
    return client


def log_steps(logger: tw.WandbLogger, *steps: int, **more: float) -> None:
    for step in steps:
        logger.log_metrics({"loss": 0.5, **more}, step)
    logger.flush()


def test_a_resumed_run_may_log_at_another_rate(client: Client, tmp_path: Path) -> None:
    first = began(tw.WandbLogger(save_dir=tmp_path, id="a"))
    log_steps(first, *range(1, 6))
    state = json.loads(json.dumps(first.state_dict()))
    log_steps(first, *range(6, 13))
    first.finalize("failed")
    with open(tmp_path / "wandb/trainwright-a.steps", "a") as file:
        file.write("[13, 17")  # the process was killed
    resumed = began(tw.WandbLogger(save_dir=tmp_path), state)
    log_steps(resumed, 10, 15, 20)
    log_steps(resumed, 12, accuracy=1.0)
    assert client.steps("a") == [*range(1, 13), 15, 20, 12]
    assert client.steps("a", "accuracy") == [12]
    resumed.finalize("failed")
    again = began(tw.WandbLogger(save_dir=tmp_path), state)
    log_steps(again, 15, 20, 25)
    assert client.steps("a")[-4:] == [15, 20, 12, 25]


def test_a_failed_write_repeats_no_row(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = began(tw.WandbLogger(save_dir=tmp_path, id="a"))
    log = Run.log

    def fails(run: Run, row: dict[str, Any]) -> None:
        if row["trainer/global_step"] == 2:
            raise ConnectionError("no network")
        log(run, row)

    monkeypatch.setattr(Run, "log", fails)
    with pytest.warns(UserWarning, match="WandbLogger could not write: ConnectionError: no network"):
        log_steps(logger, 1, 2, 3)
    monkeypatch.setattr(Run, "log", log)
    logger.flush()
    assert client.steps("a") == [1, 2, 3]


def test_a_run_of_the_user_is_used_and_not_finished(client: Client, tmp_path: Path) -> None:
    run = client.init(dir=str(tmp_path / "theirs"), project="p", mode=None)
    logger = began(tw.WandbLogger(save_dir=tmp_path / "ours", experiment=run))
    log_steps(logger, 1)
    state = logger.state_dict()
    log_steps(logger, 2)
    logger.finalize("failed")
    assert not run.is_finished
    assert [path.name for path in tmp_path.rglob("*.steps")] == ["trainwright-new0.steps"]
    assert (tmp_path / "theirs/wandb/trainwright-new0.steps").exists()
    began(logger, state)
    log_steps(logger, 2, 3)
    assert client.steps("new0") == [1, 2, 3]
    assert (client.runs, logger.experiment) == ([run], run)
    logger.finalize("success")
    run.finish()
    log_steps(began(logger), 4)  # their run was finished, so the logger opens it again and finishes it
    logger.finalize("success")
    assert client.steps("new0") == [1, 2, 3, 4]
    assert (client.runs[1].options["id"], client.runs[1].options["project"]) == ("new0", "p")
    assert client.active == [logger.experiment]


def test_the_run_stays_open_after_a_call(client: Client, tmp_path: Path) -> None:
    logger = began(tw.WandbLogger(save_dir=tmp_path, id="a"))
    log_steps(logger, 1)
    logger.finalize("success")
    client.active[-1].log({"by hand": 1.0})  # as wandb.log does
    assert logger.experiment is client.runs[0]
    log_steps(began(logger), 2)  # the Trainer's test, say
    logger.finalize("success")
    assert (len(client.runs), client.steps("a"), client.runs[0].is_finished) == (1, [1, 2], False)
    second = began(tw.WandbLogger(save_dir=tmp_path, id="b"))
    assert (client.runs[0].exit_code, "reinit" in client.runs[1].options, client.active) == (0, False, client.runs[1:])
    second.finalize("failed")
    assert (client.runs[1].exit_code, client.active) == (1, [])
    log_steps(began(logger), 3)
    assert [each.id for each in client.runs] == ["a", "b", "a"]
    logger.finalize("success")
    logger.end_run()
    assert (client.runs[2].exit_code, client.steps("a"), client.active) == (0, [1, 2, 3], [])
    logger.end_run()


def test_a_run_can_be_used_by_hand_after_a_call(client: Client, tmp_path: Path) -> None:
    first = began(tw.WandbLogger(save_dir=tmp_path, id="a"))
    log_steps(first, 1)
    first.finalize("success")
    first.experiment.log({"by hand": 1.0})
    first.log_metrics({"loss": 0.5}, 2)
    second = began(tw.WandbLogger(save_dir=tmp_path, id="b"))
    assert (client.runs[0].exit_code, client.steps("a"), client.active) == (0, [1, 2], client.runs[1:])
    assert "reinit" not in client.runs[1].options  # so that wandb.log writes into it
    second.finalize("success")
    second.experiment.log({"by hand": 1.0})
    client.runs[1].finish()  # as wandb.finish does
    log_steps(began(second), 3)
    second.finalize("success")
    log_steps(began(first), 4)
    assert [each.id for each in client.runs] == ["a", "b", "b", "a"]
    assert (client.steps("a"), client.steps("b"), client.active) == ([1, 2, 4], [3], client.runs[3:])


def test_artifacts_have_a_name_and_a_policy(client: Client, tmp_path: Path) -> None:
    made: list[Any] = []

    class Artifact:
        def __init__(self, name: str, type: str) -> None:
            self.name = name

        def add_dir(self, path: str, policy: str) -> None:
            made.append((self.name, path, policy))

    client.Artifact = Artifact  # type: ignore[attr-defined]
    Run.log_artifact = lambda self, artifact, aliases: None  # type: ignore[attr-defined]
    named = began(tw.WandbLogger(save_dir=tmp_path, id="a", checkpoint_name="best", add_file_policy="immutable"))
    named.log_model(tmp_path)
    named.log_model(tmp_path, "other")
    began(tw.WandbLogger(save_dir=tmp_path, id="b")).log_model(tmp_path)
    path = str(tmp_path)
    assert made == [("best", path, "immutable"), ("other", path, "immutable"), ("model-b", path, "mutable")]


def test_end_training_finishes_the_run(client: Client, tmp_path: Path) -> None:
    accelerator = tw.Accelerator(cpu=True, log_with=tw.WandbLogger(save_dir=tmp_path, id="a"))
    accelerator.init_trackers("loop")
    accelerator.log({"loss": 1.0}, step=3)
    accelerator.end_training()
    assert (client.steps("a"), client.runs[0].exit_code, client.active) == ([3], 0, [])


@pytest.mark.parametrize("is_loop", [True, False])
def test_a_logger_uses_the_run_that_the_script_has_opened(client: Client, tmp_path: Path, is_loop: bool) -> None:
    own = client.run = client.init(dir=tmp_path, project="sweep")  # as wandb.agent and wandb.init do
    if is_loop:
        accelerator = tw.Accelerator(cpu=True, log_with="wandb", project_dir=tmp_path)
        accelerator.init_trackers("loop", config={"lr": 0.1})
        picture = object()  # as wandb.Image
        accelerator.log({"loss": 1.0, "validation": [picture], "ema": None}, step=3)
        accelerator.get_tracker("wandb").log({"validation": picture}, step=4)
        accelerator.end_training()
        shown = [row["validation"] for row in client.rows[own.id] if "validation" in row]
        assert (shown, own.config["lr"]) == ([[picture], picture], 0.1)
        assert [row["ema"] for row in client.rows[own.id] if "ema" in row] == [None]
    else:
        logger = began(tw.WandbLogger(save_dir=tmp_path))
        log_steps(logger, 3)
        logger.finalize("failed")
        assert logger.name == "sweep"
        log_steps(began(logger), 3)
        logger.end_run()
    assert client.steps(own.id) == ([3] if is_loop else [3, 3])
    assert (client.runs, own.is_finished) == ([own], False)
    log_steps(began(tw.WandbLogger(save_dir=tmp_path, id="another")), 5)
    assert (client.steps(own.id)[1:], client.steps("another")) == ([] if is_loop else [3], [5])


def test_each_logger_has_a_run_of_its_own(client: Client, tmp_path: Path) -> None:
    first, second = (began(tw.WandbLogger(save_dir=tmp_path, id=name)) for name in ("a", "b"))
    log_steps(first, 1)
    log_steps(second, 2)
    assert (client.steps("a"), client.steps("b")) == ([1], [2])
    assert "reinit" not in client.runs[0].options  # with it, wandb.log would not write into the run
    began(tw.WandbLogger(save_dir=tmp_path, id="c", reinit="return_previous"))
    assert len(client.runs) == 2


def test_modes_are_passed_to_the_client(client: Client, tmp_path: Path) -> None:
    disabled = began(tw.WandbLogger(save_dir=tmp_path, mode="disabled", id="a"))
    log_steps(disabled, 1, 2)
    disabled.finalize("success")
    assert client.steps("a") == [1, 2]
    assert not list(tmp_path.rglob("*.steps"))
    began(tw.WandbLogger(save_dir=tmp_path, offline=True))
    assert client.runs[-1].options["mode"] == "offline"
