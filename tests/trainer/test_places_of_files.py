"""Files of a run lie where they were asked for, whatever the working directory is later, and are written through no link."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small import QUIET, Classifier, loss_of, make_loader

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
    settings = {**QUIET, "enable_checkpointing": True, "max_epochs": 3}
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
        lambda: tw.TensorPredictionWriter("a::b"),
        lambda: tw.Trainer(default_root_dir="a::b", **QUIET),
    ):
        with pytest.raises(
            ValueError, match=r"'::', which fsspec reads as a chain of file systems. Choose a name without it"
        ):
            make()
    assert tw.ModelCheckpoint("simplecache::memory://kept").dirpath == "simplecache::memory://kept"


def test_the_lock_of_a_folder_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / ".lock").symlink_to(tmp_path / "precious")
    trainer = tw.Trainer(callbacks=[tw.ModelCheckpoint(tmp_path / "kept")], **{**QUIET, "enable_checkpointing": True})
    with pytest.raises(
        tw.CheckpointError, match=r"cannot be written: .*it is a symbolic link, which is never written through"
    ):
        trainer.fit(Classifier(), make_loader(4))
    assert (tmp_path / "precious").read_text() == "precious"


def test_loggers_write_through_no_link(tmp_path: Path) -> None:
    table, board = tw.CSVLogger(tmp_path, "", "table"), tw.TensorBoardLogger(tmp_path, "", "board")
    for logger in (table, board):
        logger.start(lambda text: text, is_writer=True)
        logger.log_metrics({"loss": 1.0}, 1)
        logger.flush()
    board.close()
    files = [tmp_path / "table" / "metrics.csv", *(tmp_path / "board").glob("events*")]
    for path in files:
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    before = [(tmp_path / path.name).read_bytes() for path in files]

    table.log_metrics({"loss": 2.0}, 2)
    with pytest.raises(OSError, match="it is a symbolic link, which is never written through"):
        table.flush()
    again = tw.TensorBoardLogger(tmp_path, "", "board")
    again.load_state_dict({"version": "board", "files": {files[1].name: 3}})
    again.start(lambda text: text, is_writer=True)
    again.drop_later_rows()
    again.close()
    assert [(tmp_path / path.name).read_bytes() for path in files] == before


def test_manual_backward_works_before_the_first_run() -> None:
    class Manual(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    module = Manual()
    module.trainer = tw.Trainer(**QUIET)
    batch = next(iter(make_loader(4)))
    module.manual_backward(loss_of(module.net, batch))
    wanted = torch.autograd.grad(loss_of(module.net, batch), module.net[0].weight)[0]
    assert torch.equal(module.net[0].weight.grad, wanted)
