"""jsonargparse: a command line out of the Trainer's and the module's arguments, with callbacks and loggers by their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small import Classifier
from started import Started, python

import trainwright as tw

jsonargparse = pytest.importorskip("jsonargparse")
pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, pathlib
from jsonargparse import ArgumentParser
import trainwright as tw
from small import Classifier, make_loader

parser = ArgumentParser()
parser.add_class_arguments(tw.Trainer, "trainer")
parser.add_class_arguments(Classifier, "model")
parser.add_argument("--told")
if __name__ == "__main__":
    made = parser.instantiate_classes(parser.parse_args())
    made.trainer.fit(made.model, make_loader(24), make_loader(12))
    told = {
        "world": made.trainer.world_size, "lr": made.model.lr, "epochs": made.trainer.current_epoch,
        "callbacks": sorted(type(each).__name__ for each in made.trainer.callbacks),
        "logger": type(made.trainer.logger).__name__, "log_dir": made.trainer.log_dir,
    }
    pathlib.Path(made.told, f"{made.trainer.global_rank}.json").write_text(json.dumps(told))
"""


def parser() -> Any:
    made = jsonargparse.ArgumentParser(exit_on_error=False)
    made.add_class_arguments(tw.Trainer, "trainer")
    made.add_class_arguments(Classifier, "model")
    return made


def test_arguments_are_typed_and_explained(tmp_path: Path) -> None:
    text = parser().format_help()
    for name in ("--trainer.max_epochs", "--trainer.callbacks", "--trainer.precision", "--model.dropout"):
        assert name in text
    read = parser().parse_args(
        ["--trainer.max_epochs", "3", "--trainer.val_check_interval", "0.5", "--model.lr", "0.1"]
    )
    assert (read.trainer.max_epochs, read.trainer.val_check_interval, read.model.lr) == (3, 0.5, 0.1)
    with pytest.raises(jsonargparse.ArgumentError, match="max_epochs"):
        parser().parse_args(["--trainer.max_epochs", "many"])
    config = tmp_path / "config.yaml"
    made = parser()
    made.add_argument("--config", action="config")
    made.save(read, config)
    assert made.parse_args(["--config", str(config)]).trainer == read.trainer


@pytest.mark.launch
def test_a_command_starts_two_processes(tmp_path: Path) -> None:
    folder = tmp_path / "my work"
    folder.mkdir()
    (folder / "train it.py").write_text(SCRIPT)
    arguments = [
        "--trainer.devices=2", "--trainer.accelerator=cpu", "--trainer.max_epochs=2", "--trainer.strategy=ddp",
        "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false",
        "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val_loss",
        "--trainer.callbacks+=trainwright.ModelCheckpoint", "--trainer.callbacks.dirpath=kept",
        "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logged", "--model.lr=0.02", f"--told={tmp_path}",
    ]  # fmt: skip
    started = Started(python("train it.py", *arguments), folder)
    try:
        assert started.wait() == 0, started.stdout + started.stderr
    finally:
        started.close()
    for rank in range(2):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (told["world"], told["lr"], told["epochs"], told["logger"]) == (2, 0.02, 2, "CSVLogger")
        assert {"EarlyStopping", "ModelCheckpoint"} <= set(told["callbacks"])
        assert Path(told["log_dir"]).is_relative_to(folder / "logged")
    assert list((folder / "kept").glob("*.ckpt"))
