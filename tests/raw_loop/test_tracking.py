"""Loggers of a raw loop: by name or instance, on rank 0, resumed with the checkpoint."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from small import ON_HOST, make_net

import trainwright as tw
from trainwright.loggers import LOGGERS, available_loggers


class Recording(tw.Logger):
    """Records all calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start(self, agreed: Any, *, is_writer: bool) -> None:
        self.calls.append(("start", is_writer))

    def log_metrics(self, metrics: Any, step: int | None = None, **options: Any) -> None:
        self.calls.append((dict(metrics), step, options))

    def log_hyperparams(self, params: Any) -> None:
        self.calls.append(params)

    def log_images(self, values: Any, step: int | None = None, **options: Any) -> None:
        self.calls.append((list(values), step))

    def finalize(self, status: str) -> None:
        self.calls.append(status)

    def close(self) -> None:
        self.calls.append("close")


def make(**settings: Any) -> tw.Accelerator:
    return tw.Accelerator(cpu=ON_HOST, **settings)


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_is_tracked(tmp_path: Path) -> None:
    own = Recording()
    accelerator = make(log_with=["csv", own], project_dir=tmp_path)
    accelerator.init_trackers("digits", config={"lr": 0.1}, init_kwargs={"csv": {"version": "first"}})
    assert not (tmp_path / "digits").exists()  # nothing was written yet
    accelerator.log({"loss": torch.tensor(0.5), "accuracy": 1}, step=3)
    accelerator.log({"val_loss": numpy.float32(0.25)}, step=3, log_kwargs={"Recording": {"note": "x"}})
    accelerator.log({"loss": 2.0})
    accelerator.log_images({"digit": torch.zeros(1, 2, 2)}, step=4)
    assert [each.name for each in accelerator.trackers] == ["csv", "Recording"]
    assert accelerator.get_tracker("Recording").logger is own
    assert accelerator.get_tracker("csv").metrics_path.endswith("digits/first/metrics.csv")
    accelerator.end_training()
    folder = tmp_path / "digits" / "first"
    assert rows(folder) == [
        {"step": "3", "loss": "0.5", "accuracy": "1", "val_loss": ""},
        {"step": "3", "loss": "", "accuracy": "", "val_loss": "0.25"},
        {"step": "0", "loss": "2.0", "accuracy": "", "val_loss": ""},
    ]
    assert json.loads((folder / "hparams.json").read_text()) == {"lr": 0.1}
    assert own.calls == [
        ("start", True),
        {"lr": 0.1},
        ({"loss": torch.tensor(0.5), "accuracy": 1}, 3, {}),
        ({"val_loss": numpy.float32(0.25)}, 3, {"note": "x"}),
        ({"loss": 2.0}, 0, {}),
        (["digit"], 4),
        "success",
        "close",
    ]
    with pytest.raises(RuntimeError, match="log was called after end_training"):
        accelerator.log({"loss": 1.0})
    accelerator.init_trackers("second")
    accelerator.log({"loss": 1.0})
    accelerator.end_training()
    assert (tmp_path / "second" / "version_0" / "metrics.csv").exists()


def test_the_loggers_continue_in_the_checkpoints_run(tmp_path: Path) -> None:
    def begin() -> tw.Accelerator:
        accelerator = make(log_with="csv", project_dir=tmp_path)
        net = make_net()
        accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        accelerator.init_trackers("run", config={"lr": 0.1})
        return accelerator

    first = begin()
    for step in range(5):
        first.log({"loss": float(step)}, step)
        if step == 2:
            first.save_state()
    first.end_training()
    again = begin()
    again.load_state()
    for step in range(3, 6):
        again.log({"loss": 10.0 * step}, step)
    again.end_training()
    assert [each["loss"] for each in rows(tmp_path / "run" / "version_0")] == [
        "0.0", "1.0", "2.0", "30.0", "40.0", "50.0",
    ]  # fmt: skip
    again = begin()
    again.log({"loss": 0.0}, 0)  # another run, which has begun to write
    again.save_state()
    again.load_state()
    again.end_training()
    assert sorted(each.name for each in (tmp_path / "run").iterdir()) == ["version_0", "version_1"]
    branch = begin()
    branch.load_state(tmp_path / "checkpoints" / "checkpoint_0")  # not the newest: a branch
    branch.log({"loss": 0.0}, 3)
    branch.end_training()
    assert len(rows(tmp_path / "run" / "version_0")) == 6
    assert len(rows(tmp_path / "run" / "version_2")) == 1


def test_rows_are_written_without_end_training(tmp_path: Path) -> None:
    from forked import run_python

    program = f"""
import trainwright as tw
accelerator = tw.Accelerator(cpu=True, log_with="csv", project_dir={str(tmp_path)!r})
accelerator.init_trackers("run")
accelerator.log({{"loss": 1.0}})
"""
    done = run_python("-c", program, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "run" / "version_0") == [{"step": "0", "loss": "1.0"}]


def test_names_of_loggers_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for wrong, match in (
        ("tensorbord", "unknown; .* Did you mean 'tensorboard'?"),
        ("clearml", "choose from csv, tensorboard, wandb, mlflow, or pass a Logger instance"),
    ):
        with pytest.raises(ValueError, match=match):
            make(log_with=wrong)
    for other in (3, tw.CSVLogger, [None]):
        with pytest.raises(TypeError, match="Expected names, Logger instances"):
            make(log_with=other)
    for name in ("csv", "wandb", "mlflow"):
        monkeypatch.setitem(LOGGERS, name, (tw.CSVLogger, "not_installed_here"))
    with pytest.raises(ImportError, match="pip install not_installed_here"):
        make(log_with="csv")
    assert available_loggers() == ["tensorboard"]
    accelerator = make(log_with=["all", "tensorboard"])
    accelerator.init_trackers("run")
    assert [each.name for each in accelerator.trackers] == ["tensorboard"]
    accelerator.end_training()


def test_wrong_uses_of_trackers_are_rejected(tmp_path: Path) -> None:
    accelerator = make(log_with="csv", project_dir=tmp_path)
    for call in (
        lambda: accelerator.log({}),
        lambda: accelerator.log_images({}),
        lambda: accelerator.get_tracker("csv"),
    ):
        with pytest.raises(RuntimeError, match=r"was called before init_trackers. Call accelerator\.init_trackers"):
            call()
    for wrong in (("loss", 1), ({"loss": 1.0}, "x")):
        with pytest.raises(TypeError, match="expected a dict of numbers, and an integer as step"):
            accelerator.log(*wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="project_name='' is not accepted"):
        accelerator.init_trackers("")
    with pytest.raises(TypeError, match="a dict or a Namespace"):
        accelerator.init_trackers("run", config=[1])
    with pytest.raises(ValueError, match=r"init_kwargs is for 'cvs', which is not in log_with.* Did you mean 'csv'?"):
        accelerator.init_trackers("run", init_kwargs={"cvs": {}})
    accelerator.init_trackers("run")
    with pytest.raises(RuntimeError, match="init_trackers was called before"):
        accelerator.init_trackers("run")
    with pytest.raises(ValueError, match="get_tracker: 'tensorboard', which is not in log_with"):
        accelerator.get_tracker("tensorboard")
    with pytest.raises(AttributeError, match="the experiment of a CSVLogger has no 'add_image'"):
        accelerator.get_tracker("csv", unwrap=True).add_image()
    with pytest.warns(
        UserWarning, match=r"CSVLogger cannot write 'ema' \(a NoneType\), 'list' \(a list\), and leaves it out"
    ):
        accelerator.log({"list": [1], "ema": None, "loss": 0.5})
    accelerator.end_training()
    for late in (lambda: accelerator.log({}), lambda: accelerator.get_tracker("csv")):
        with pytest.raises(RuntimeError, match="was called after end_training, which ended the run"):
            late()
    without = make()
    without.init_trackers("run")
    without.log({"loss": 1.0})
    assert without.trackers == []


def test_images_are_logged(tmp_path: Path) -> None:
    accelerator = make(log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run")
    images = {
        "channels first": torch.rand(2, 3, 5, 4),
        "channels last": numpy.zeros((5, 4, 3), dtype=numpy.uint8),
        "list": [torch.zeros(5, 4), torch.ones(5, 4)],
    }
    accelerator.log_images(images, step=2)
    assert accelerator.get_tracker("tensorboard", unwrap=True) is accelerator.trackers[0].writer
    with pytest.raises(ValueError, match=r"an array of shape \(7,\)"):
        accelerator.log_images({"row": torch.zeros(7)})
    accelerator.end_training()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "version_0"))
    events.Reload()
    found = {tag: (events.Images(tag)[0].width, events.Images(tag)[0].height) for tag in events.Tags()["images"]}
    assert set(found.values()) == {(4, 5), (8, 5)}  # several are side by side
    assert {tag.split("/")[0] for tag in found} == {"channels first", "channels last", "list"}


def test_texts_are_logged(tmp_path: Path) -> None:
    own = Recording()
    accelerator = make(log_with=["tensorboard", "csv", own], project_dir=tmp_path)
    accelerator.init_trackers("run", init_kwargs={"csv": {"version": "c"}, "tensorboard": {"version": "t"}})
    row = {"note": "a text", "loss": 0.5}
    with pytest.warns(UserWarning, match=r"log: CSVLogger cannot write 'note' \(a str\), and leaves") as told:
        accelerator.log(row, step=1)
    assert [each.filename for each in told] == [__file__]
    accelerator.log(row, step=2)  # warned once
    accelerator.log({"note": "alone"}, step=3)
    accelerator.end_training()
    assert (row, 2, {}) in own.calls
    assert rows(tmp_path / "run" / "c") == [{"step": "1", "loss": "0.5"}, {"step": "2", "loss": "0.5"}]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "t"))
    events.Reload()
    (tag,) = events.Tags()["tensors"]
    found = [(each.step, each.tensor_proto.string_val[0]) for each in events.Tensors(tag) if "note" in tag]
    assert found == [(1, b"a text"), (2, b"a text"), (3, b"alone")]


def test_init_kwargs_replace_the_projects_folder_and_name(tmp_path: Path) -> None:
    accelerator = make(log_with=["csv", "tensorboard"], project_dir=tmp_path)
    options = {"csv": {"save_dir": tmp_path / "mine", "name": "own"}, "tensorboard": {"save_dir": tmp_path / "theirs"}}
    accelerator.init_trackers("run", init_kwargs=options)
    accelerator.log({"loss": 0.5}, step=1)
    accelerator.end_training()
    assert rows(tmp_path / "mine" / "own" / "version_0") == [{"step": "1", "loss": "0.5"}]
    assert [each.name for each in (tmp_path / "theirs").iterdir()] == ["run"]
