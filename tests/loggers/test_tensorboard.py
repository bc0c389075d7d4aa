"""Event files as TensorBoard reads them, and several loggers in one run."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from small import QUIET, Classifier, began, make_loader
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from tensorboard.summary.writer import event_file_writer
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import trainwright as tw
from trainwright.loggers import CSVLogger, Logger, SilentLogger, TensorBoardLogger, start_loggers


def started(folder: Path, **kwargs: Any) -> TensorBoardLogger:
    return began(TensorBoardLogger(folder, **kwargs))


def events(logger: TensorBoardLogger) -> EventAccumulator:
    accumulator = EventAccumulator(str(logger.log_dir), size_guidance={"scalars": 0})
    accumulator.Reload()
    return accumulator


def values(logger: TensorBoardLogger, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(logger).Scalars(name)]


def test_scalars_come_back_with_their_steps_and_times(tmp_path: Path) -> None:
    logger = started(tmp_path, prefix="p", sub_dir="part")
    for step in range(250):
        logger.log_metrics({"epoch": 0, "loss": step / 4}, step)
    logger.flush()
    assert values(logger, "p-loss") == [(step, step / 4) for step in range(250)]
    logger.log_metrics({"acc": torch.tensor(0.5), "of": {"x": 1}})
    logger.close()
    logger.log_metrics({"test": 2.0}, 300)  # a test after fit goes on in the folder
    logger.close()
    assert values(logger, "p-acc") == [(249, 0.5)]
    assert values(logger, "p-test") == [(300, 2.0)]
    assert values(logger, "epoch")[0] == (0, 0.0)
    times = [event.wall_time for event in events(logger).Scalars("p-loss")]
    assert times == sorted(times)
    assert len(set(times)) > 100  # of the moment of the call, not of the writing
    assert logger.log_dir == f"{tmp_path}/trainwright_logs/version_0/part"


def test_event_files_sort_by_their_age(tmp_path: Path) -> None:
    """Readers sort the names, which end in a process's number of files. 10 comes before 9 in one second."""
    first = started(tmp_path, version=0)
    first.log_metrics({"loss": 1.0}, 3)
    first.close()
    (earlier,) = Path(str(first.log_dir)).glob("events*")
    earlier.rename(earlier.with_name(f"events.out.tfevents.{int(time.time()):010d}.~.trainwright"))
    again = started(tmp_path, version=0)
    again.log_metrics({"loss": 2.0}, 2)
    again.close()
    assert values(again, "loss") == [(2, 2.0)]


def test_hyper_parameters_can_have_a_metric(tmp_path: Path) -> None:
    logger = started(tmp_path)
    logger.log_hyperparams({"lr": 0.1, "net": {"act": "relu", "sizes": [1, 2]}, "flag": True, "none": None})
    logger.log_hyperparams({"lr": 0.1})  # nothing new: not written again
    logger.flush()
    assert values(logger, "hp_metric") == [(0, -1.0)]
    content = events(logger).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    start = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert start["lr"].number_value == pytest.approx(0.1)
    assert start["net/act"].string_value == "relu"
    assert start["net/sizes"].string_value == "[1, 2]"
    assert start["flag"].number_value == 1
    assert json.loads(Path(f"{logger.log_dir}/hparams.json").read_text())["net"]["sizes"] == [1, 2]
    logger.log_hyperparams({"lr": 0.2}, {"best": 0.9}, step=3)
    logger.close()
    assert values(logger, "best") == [(3, pytest.approx(0.9))]
    silent = started(tmp_path, default_hp_metric=False)
    silent.log_hyperparams({"lr": 0.1})
    silent.close()
    assert "hp_metric" not in events(silent).Tags()["scalars"]


class Drawn(tw.Module):
    """Draws numbers in forward, so that a trace that touches the generators is noticed."""

    def __init__(self, example: Any) -> None:
        super().__init__()
        self.first, self.frozen = nn.Linear(4, 3), nn.Dropout().eval()
        self.example_input_array = example

    def forward(self, inputs: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.frozen(self.first(inputs)) * scale + torch.randn(3)


def test_hyper_parameters_are_written_into_the_sub_dir(tmp_path: Path) -> None:
    logger = started(tmp_path, sub_dir="s")
    logger.log_hyperparams({"lr": 0.1})
    logger.close()
    assert json.loads((tmp_path / "trainwright_logs/version_0/s/hparams.json").read_text()) == {"lr": 0.1}


def test_the_graph_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    logger, module = started(tmp_path, log_graph=True), Drawn((torch.ones(2, 4),))
    before = torch.get_rng_state()
    logger.log_graph(module)
    logger.close()
    assert torch.equal(torch.get_rng_state(), before)
    assert (module.training, module.first.training, module.frozen.training) == (True, True, False)
    names = [node.name for node in events(logger).Graph().node]
    assert any("Drawn/Linear[first]" in name for name in names), names
    for example, message in (
        (None, r"is a NoneType\. Set it to a tensor"),
        (torch.ones(2, 5), "not logged: RuntimeError"),
    ):
        with pytest.warns(UserWarning, match=message):
            logger.log_graph(Drawn(example))
    started(tmp_path).log_graph(Drawn(None))  # was not asked for: no word


def test_the_experiment_is_the_summary_writer_on_one_rank(tmp_path: Path) -> None:
    logger = started(tmp_path)
    logger.experiment.add_text("note", "hello", 1)
    logger.experiment.add_histogram("weights", torch.ones(5), 1)
    logger.close()
    assert events(logger).Tags()["histograms"] == ["weights"]
    other = TensorBoardLogger(tmp_path)
    other.start(lambda text: logger.save_dir if text else str(logger.log_dir), is_writer=False)
    files = os.listdir(str(logger.log_dir))
    other.experiment.add_text("note", "hello", 1)
    with other.experiment.anything[3].deeper() as chained:
        assert list(chained) == []
    other.log_metrics({"a": 1.0}, 1)
    other.log_hyperparams({"lr": 1})
    other.log_graph(Drawn(None))
    other.close()
    assert os.listdir(str(logger.log_dir)) == files
    assert pickle.loads(pickle.dumps(logger)).log_dir == logger.log_dir


def test_a_full_disk_is_told_with_the_folder_and_does_not_end_the_run(tmp_path: Path, monkeypatch: Any) -> None:
    def fill(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    class Fills(tw.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch > 0:  # a callback's own call would raise
                return
            trainer.logger.log_metrics({"a": 1.0}, trainer.global_step)
            trainer.logger.flush()
            for name in ("flush", "close"):
                monkeypatch.setattr(event_file_writer.EventFileWriter, name, fill)

    trainer = tw.Trainer(max_epochs=2, callbacks=Fills(), **{**QUIET, "logger": TensorBoardLogger(tmp_path)})
    says = r"TensorBoardLogger could not write to .*version_0: OSError: .*No space left.*Free space"
    with pytest.warns(UserWarning, match="TensorBoardLogger") as warned:
        trainer.fit(Classifier(), make_loader())
    first, last = (str(warning.message) for warning in warned)
    assert re.search(rf"TensorBoardLogger\.\w+ failed: OSError: {says}", first)
    assert re.search(r"was closed before it worked again; \d+ rows lost", last)


def test_loggers_of_one_run_can_share_a_folder(tmp_path: Path) -> None:
    def start(*loggers: Logger) -> list[str | None]:
        start_loggers(loggers, lambda text: text, is_writer=True)
        return [each.log_dir and os.path.relpath(each.log_dir, tmp_path) for each in loggers]

    root = str(tmp_path)
    shared: list[Any] = [CSVLogger(root), TensorBoardLogger(root)]
    assert start(*shared) == ["trainwright_logs/version_0"] * 2
    assert start(*shared) == ["trainwright_logs/version_0"] * 2  # the next run of the same trainer
    for each in shared:
        each.log_hyperparams({"lr": 0.1})
        each.log_metrics({"a": 1.0}, 1)
        each.close()
    assert shared[1].version == 0
    kinds = {name.partition(".")[0] for name in os.listdir(tmp_path / "trainwright_logs/version_0")}
    assert kinds == {"metrics", "events", "hparams", "trainwright_run"}
    assert start(TensorBoardLogger(root), Logger(), CSVLogger(root), CSVLogger(root)) == [
        "trainwright_logs/version_1",
        None,
        "trainwright_logs/version_1",
        "trainwright_logs/version_2",
    ]
    assert start(CSVLogger(root, version="mine"), TensorBoardLogger(root)) == ["trainwright_logs/mine"] * 2
    assert start(CSVLogger(root), TensorBoardLogger(root, name="other")) == [
        "trainwright_logs/version_3",
        "other/version_0",
    ]
    with pytest.raises(ValueError, match=r"two CSVLogger that write to .*mine\. Remove one"):
        start(CSVLogger(root, version="mine"), CSVLogger(root, version="mine"))


def test_a_missing_tensorboard_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install tensorboard, or use CSVLogger"):
        TensorBoardLogger()


def test_the_silent_logger_takes_everything(tmp_path: Path) -> None:
    logger = tw.loggers.DummyLogger()
    assert type(logger) is SilentLogger
    assert logger[0].experiment.add(1).anything["x"](2) is not None
    assert [*logger] == []
    assert logger
    start_loggers([logger], lambda text: text, is_writer=True)
    logger.log_metrics({"a": 1.0})
    logger.log_hyperparams({"lr": 0.1})
    logger.log_image(key="x", images=[1])
    logger.experiment.add_scalar("a", 1.0)
    logger.experiment.config.update({"a": 1})
    logger.experiment["x"] = logger.experiment[0]
    logger.flush()
    logger.finalize("success")
    logger.close()
    pickle.loads(pickle.dumps(logger))
    assert (logger.name, logger.version, logger.log_dir, logger.save_dir) == ("", "", None, None)
    assert os.listdir(tmp_path) == []


def test_a_logger_for_lightning_works(tmp_path: Path) -> None:
    class Own(Logger):
        """Overrides the methods of Lightning's contract."""

        def __init__(self) -> None:
            self.calls: list[str] = []

        @property
        def name(self) -> str:  # type: ignore[override]
            return "own"

        @property
        def version(self) -> str:  # type: ignore[override]
            return "1"

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self.calls.append("metrics")

        def save(self) -> None:
            self.calls.append("save")

        def finalize(self, status: str) -> None:
            self.calls.append(status)

    own = Own()
    start_loggers([own], lambda text: text, is_writer=True)
    own.log_hyperparams({})
    own.log_metrics({"a": 1.0}, 1)
    own.flush()
    own.finalize("success")
    own.close()
    assert own.calls == ["metrics", "save", "success", "save"]


@pytest.mark.parametrize("kwargs", [{}, {"filename_suffix": ""}, {"filename_suffix": ".mine"}])
def test_a_run_goes_on_where_a_checkpoint_stood(tmp_path: Path, kwargs: dict[str, str]) -> None:
    """Every number is there once, also at the step of the checkpoint. Files of other writers do not change."""

    def resume(logger: TensorBoardLogger, last: int) -> TensorBoardLogger:
        began(logger, state)
        logger.log_hyperparams({"lr": 0.1, "epochs": last})  # others: they are written before the run is restored
        logger.drop_later_rows()
        logger.log_metrics({"val_loss": 1.0}, 4)
        for step in range(5, last):
            logger.log_metrics({"loss": step / 4 if step != 6 else 9.0}, step)
        logger.flush()
        assert sorted(values(logger, "loss")) == [(step, step / 4 if step != 6 else 9.0) for step in range(1, last)]
        assert values(logger, "val_loss") == [(4, 1.0)]
        return logger

    killed = started(tmp_path, **kwargs)
    killed.log_hyperparams({"lr": 0.1})
    for step in range(1, 8):
        killed.log_metrics({"loss": step / 4}, step)
        if step == 4:
            state = json.loads(json.dumps(killed.state_dict()))
            killed.log_metrics({"val_loss": 1.0}, 4)
    killed.flush()
    folder = Path(str(killed.log_dir))
    other = SummaryWriter(folder, **kwargs)
    other.add_scalar("mine", 3.0, 20)
    other.close()
    (foreign,) = {each.name for each in folder.glob("events*")} - state["files"].keys()
    content = (folder / foreign).read_bytes()
    again = resume(TensorBoardLogger(tmp_path, **kwargs), 9)  # and it is killed in its turn
    last = resume(TensorBoardLogger(tmp_path, **kwargs), 11)
    assert last.log_dir == again.log_dir == killed.log_dir
    assert values(last, "hp_metric") == [(0, -1.0)]
    assert (folder / foreign).read_bytes() == content
    assert len(list(folder.glob("events*"))) == 3
    assert last.state_dict()["purge_step"] == 11
    resume(last, 12)  # the same trainer's next run
    assert last.state_dict()["files"].keys() & {foreign} == set()
    last.close()
