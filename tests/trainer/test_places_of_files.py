"""Files of a run lie where they were asked for, whatever the working directory is later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small import QUIET, SAVING, Classifier, make_loader

import trainwright as tw


class Moves(tw.Callback):
    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch, self.folder = monkeypatch, folder

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        place = self.folder / f"epoch-{trainer.current_epoch}"
        place.mkdir()
        self.monkeypatch.chdir(place)


def test_a_relative_dirpath_is_that_of_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints = tw.ModelCheckpoint("kept")
    settings = {**SAVING, "max_epochs": 3}
    tw.Trainer(callbacks=[Moves(monkeypatch, tmp_path), checkpoints], **settings).fit(Classifier(), make_loader(4))
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.ckpt")] == ["kept/epoch=2-step=3.ckpt"]
    assert checkpoints.best_model_path == f"{tmp_path}/kept/epoch=2-step=3.ckpt"
    assert tw.ModelCheckpoint("memory://kept/").dirpath == "memory://kept"


def test_a_name_that_fsspec_reads_as_a_chain_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (
        lambda: tw.ModelCheckpoint(tmp_path / "a::b"),
        lambda: tw.ModelCheckpoint(filename="a::{epoch}"),
        lambda: tw.OnExceptionCheckpoint("a::b"),
        lambda: tw.CSVLogger(tmp_path / "a::b"),
        lambda: tw.CSVLogger(name="a::b"),
        lambda: tw.TensorBoardLogger(version="a::b"),
        lambda: tw.Trainer(default_root_dir="a::b", **QUIET),
    ):
        with pytest.raises(
            ValueError, match=r"'::', which fsspec reads as a chain of file systems. Choose a name without it"
        ):
            make()
    assert tw.ModelCheckpoint("simplecache::memory://kept").dirpath == "simplecache::memory://kept"
