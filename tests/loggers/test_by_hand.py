"""Loggers before a run and outside of one: their messages and their files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import yaml
from deadlines import wait_until
from jobs import run_job
from small import QUIET, Classifier, be_rank, make_loader

import trainwright as tw
from trainwright.loggers import rank_zero_experiment
from trainwright.loggers.run_files import read_history
from trainwright.tools.plot import is_run

Kinds = pytest.mark.parametrize("kind", [tw.CSVLogger, tw.TensorBoardLogger])


@Kinds
def test_version_and_folder_are_known_before_a_run(tmp_path: Path, kind: Any) -> None:
    (tmp_path / "runs" / "version_3").mkdir(parents=True)
    logger = kind(tmp_path, name="runs")
    trainer = tw.Trainer(**{**QUIET, "logger": logger}, max_epochs=1)
    promised = f"{tmp_path}/runs/version_4"
    assert (logger.version, logger.log_dir, trainer.log_dir) == (4, promised, promised)
    assert (logger.name, logger.root_dir, logger.save_dir) == ("runs", f"{tmp_path}/runs", str(tmp_path))
    assert sorted(os.listdir(tmp_path / "runs")) == ["version_3"]
    trainer.fit(Classifier(), make_loader())
    assert (logger.version, logger.log_dir) == (4, promised)
    assert os.path.isdir(promised)
    assert kind(tmp_path, name="runs", version="mine").log_dir == f"{tmp_path}/runs/mine"
    assert kind(tmp_path, name=None, version=2).log_dir == f"{tmp_path}/version_2"


def test_a_trainer_without_loggers_has_no_folder(tmp_path: Path) -> None:
    assert tw.Trainer(**QUIET, default_root_dir=tmp_path).log_dir == str(tmp_path)
    logger = tw.CSVLogger()
    assert tw.Trainer(**{**QUIET, "logger": logger}, default_root_dir=tmp_path).log_dir == logger.log_dir
    assert logger.log_dir == f"{tmp_path}/trainwright_logs/version_0"


def test_rows_by_hand_are_written_to_a_run_folder(tmp_path: Path) -> None:
    logger = tw.CSVLogger(tmp_path, name="hand", version=3)
    logger.log_hyperparams({"lr": 0.1, "layers": [1, 2]}, {"ignored": 1.0})
    logger.log_metrics({"a": 1.0}, step=0)
    logger.log_metrics({"a": 2.0, "b": torch.tensor(3.0)}, step=1)
    logger.finalize("success")
    logger.save()
    folder = tmp_path / "hand" / "version_3"
    assert (folder / "metrics.csv").read_text() == "step,a,b\n0,1.0,\n1,2.0,3.0\n"
    assert (folder / "hparams.yaml").read_text() == "lr: 0.1\nlayers:\n- 1\n- 2\n"
    assert json.loads((folder / "hparams.json").read_text()) == yaml.safe_load((folder / "hparams.yaml").read_text())
    unused = tw.CSVLogger(tmp_path, name="unused")
    unused.close()
    assert not (tmp_path / "unused").exists()


def test_the_experiment_of_a_table_writes_rows_and_names_its_limits(tmp_path: Path) -> None:
    logger = tw.CSVLogger(tmp_path, name="hand")
    experiment = logger.experiment
    assert (experiment.log_dir, os.listdir(tmp_path)) == (f"{tmp_path}/hand/version_0", [])
    experiment.log_metrics({"a": torch.tensor(1.0)}, step=2)
    experiment.log_hparams({"lr": 0.1})
    experiment.save()
    assert Path(experiment.metrics_file_path).read_text() == "step,a\n2,1.0\n"
    assert yaml.safe_load((tmp_path / "hand" / "version_0" / "hparams.yaml").read_text()) == {"lr": 0.1}
    tw.Trainer(**{**QUIET, "logger": logger}, max_epochs=1, log_every_n_steps=1).fit(Classifier(), make_loader(8))
    experiment.log_metrics({"a": 3.0}, step=9)
    experiment.save()
    lines = Path(experiment.metrics_file_path).read_text().splitlines()
    assert (lines[0][:6], lines[-1][:5], len(lines)) == ("step,a", "9,3.0", 6)


def two_ranks(folder: Path) -> Any:
    found = []
    for kind in (tw.CSVLogger, tw.TensorBoardLogger):
        logger = kind(folder, name=kind.__name__)
        logger.log_hyperparams({"by": "hand"})
        logger.log_metrics({"before": 1.0}, step=0)
        logger.save()
        experiment = logger.experiment
        trainer = tw.Trainer(**{**QUIET, "logger": logger, "devices": "auto"}, max_epochs=1, log_every_n_steps=1)
        trainer.fit(Classifier(), make_loader())
        found.append((logger.log_dir, logger.version, type(experiment).__name__))
    return found


def test_two_ranks_share_the_folder_of_rank_zero(tmp_path: Path) -> None:
    first, second = run_job(two_ranks, 2, tmp_path)
    for own, other in zip(first, second, strict=True):
        assert own[:2] == other[:2]
    assert [each[2] for each in first] == ["CSVExperiment", "SummaryWriter"]
    assert [each[2] for each in second] == ["SilentExperiment", "SilentExperiment"]
    assert os.listdir(tmp_path / "CSVLogger") == os.listdir(tmp_path / "TensorBoardLogger") == ["version_0"]
    text = (tmp_path / "CSVLogger" / "version_0" / "metrics.csv").read_text()
    assert text.splitlines()[0].split(",")[:2] == ["step", "before"]
    assert len(text.splitlines()) > 5


@Kinds
def test_rows_by_hand_are_in_the_file_soon_and_all_at_the_end_of_the_process(tmp_path: Path, kind: Any) -> None:
    logger = kind(tmp_path, name="hand")
    logger.log_metrics({"a": 1.0}, step=0)
    wait_until(lambda: is_run(str(logger.log_dir)) and logger.history().series)
    program = f"""
import trainwright as tw
def log(name, **values):
    logger = tw.{kind.__name__}({str(tmp_path)!r}, name=name)
    logger.log_hyperparams({{"lr": 0.1}})
    for step, value in values.items():
        logger.log_metrics({{"a": value}}, step=int(step[1:]))
    return logger
log("table", **{{f"n{{number}}": number for number in range(300)}})
log("parameters")
logger = log("trainer")
tw.Trainer(logger=logger)
logger.log_metrics({{"a": 1.0}}, step=0)
"""
    assert forked.run_python("-c", program, folder=tmp_path).returncode == 0
    assert len(read_history(f"{tmp_path}/table/version_0").series["a"].steps) == 300
    assert len(read_history(f"{tmp_path}/trainer/version_0").series["a"].steps) == 1
    for name in ("table", "parameters", "trainer"):
        assert json.loads((tmp_path / name / "version_0" / "hparams.json").read_text()) == {"lr": 0.1}


def test_a_resumed_run_continues_in_its_folder_after_rows_by_hand(tmp_path: Path) -> None:
    def fit(epochs: int, **options: Any) -> list[str]:
        logger = tw.CSVLogger(tmp_path, name=None)
        logger.log_metrics({"parameters": 3.0}, step=0)
        settings = {"logger": logger, "log_every_n_steps": 1, "enable_checkpointing": True}
        tw.Trainer(**{**QUIET, **settings}, max_epochs=epochs).fit(Classifier(), make_loader(16), **options)
        return Path(logger.metrics_path).read_text().splitlines()

    first = fit(1)
    assert fit(2, ckpt_path="last")[: len(first)] == first
    assert (tmp_path / "version_1" / "metrics.csv").read_text() == "step,parameters\n0,3.0\n"


def test_an_experiment_does_nothing_on_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(tw.Logger):
        @property
        @rank_zero_experiment
        def experiment(self) -> Any:
            return "client"

    assert Mine().experiment == "client"
    be_rank(monkeypatch, 1)
    assert type(Mine().experiment).__name__ == "SilentExperiment"
