"""The link to the newest checkpoint, and the parts of names that a subclass may change."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
import small
from small import SAVING, Classifier, make_loader

import trainwright as tw
from trainwright.checkpoint.discovery import find_candidates, find_checkpoints
from trainwright.checkpoint.last_link import POINTER_NAME, pointed
from trainwright.checkpoint.reader import open_checkpoint

BATCHES = len(make_loader())


def fit(callback: tw.ModelCheckpoint, epochs: int = 2, **kwargs: Any) -> tw.Trainer:
    trainer = tw.Trainer(max_epochs=epochs, callbacks=[callback], **SAVING)
    trainer.fit(Classifier(), make_loader(), **kwargs)
    return trainer


@pytest.mark.parametrize("has_links", [True, False])
def test_a_link_leads_to_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool) -> None:
    if not has_links:

        def refuse(*args: Any) -> None:
            raise OSError("no symbolic links here")

        monkeypatch.setattr(os, "symlink", refuse)
    fit(tw.ModelCheckpoint(tmp_path, save_last=True))
    link = tmp_path / "last.ckpt"
    assert link.is_symlink() == has_links
    assert pointed(str(link)) == f"{tmp_path}/epoch=1-step={2 * BATCHES}.ckpt"
    assert open_checkpoint(str(link)).step == 2 * BATCHES
    assert [Path(entry.path).name for entry in find_candidates(str(tmp_path))] == [f"epoch=1-step={2 * BATCHES}.ckpt"]
    assert isinstance(Classifier.load_from_checkpoint(link), Classifier)

    trainer = fit(tw.ModelCheckpoint(tmp_path, save_last=True), 4, ckpt_path=str(link))
    # The source stays, wherever the link leads by now.
    assert trainer.resume_source == f"{tmp_path}/epoch=1-step={2 * BATCHES}.ckpt"
    assert trainer.global_step == 4 * BATCHES
    assert sorted(os.listdir(tmp_path)) == [f"epoch={n - 1}-step={n * BATCHES}.ckpt" for n in (2, 4)] + ["last.ckpt"]
    assert open_checkpoint(str(link)).step == 4 * BATCHES
    trainer.test(Classifier(), make_loader(), ckpt_path=link, verbose=False)


def test_an_object_store_has_a_pointer() -> None:
    fit(tw.ModelCheckpoint("memory://linked", save_last="link"))
    assert fsspec.filesystem("memory").exists(f"/linked/last.ckpt/{POINTER_NAME}")
    assert [entry.step for entry in find_candidates("memory://linked")] == [2 * BATCHES]
    assert (
        fit(tw.ModelCheckpoint("memory://other"), 3, ckpt_path="memory://linked/last.ckpt").global_step == 3 * BATCHES
    )


def test_a_link_of_another_name_goes(tmp_path: Path) -> None:
    class Named(tw.ModelCheckpoint):
        CHECKPOINT_NAME_LAST = "newest-{epoch}"
        CHECKPOINT_EQUALS_CHAR = "_"
        CHECKPOINT_JOIN_CHAR = "+"
        FILE_EXTENSION = ".pt"

    fit(Named(tmp_path, save_last=True))
    assert sorted(os.listdir(tmp_path)) == [f"epoch_1+step_{2 * BATCHES}.pt", "newest-epoch_1.pt"]
    fit(Named(tmp_path, save_last=True), 3, ckpt_path=tmp_path / "newest-epoch_1.pt")
    assert "newest-epoch_1.pt" not in os.listdir(tmp_path)
    assert pointed(f"{tmp_path}/newest-epoch_2.pt") == f"{tmp_path}/epoch_2+step_{3 * BATCHES}.pt"
    assert fit(Named(tmp_path, save_last=True), 4, ckpt_path="last").global_step == 4 * BATCHES


def test_a_link_stays_in_its_folder(tmp_path: Path) -> None:
    """A run that resumes elsewhere keeps the link there. A run that resumes through a symbolic link has one."""
    source = fit(tw.ModelCheckpoint(tmp_path / "first", save_last=True)).checkpoint_callback.last_model_path
    fit(tw.ModelCheckpoint(tmp_path / "second", save_last=True), 3, ckpt_path=source)
    assert pointed(f"{tmp_path}/first/last.ckpt") == source
    (tmp_path / "alias").symlink_to(tmp_path / "first")
    fit(tw.ModelCheckpoint(tmp_path / "alias", save_last=True), 3, ckpt_path="auto")
    assert pointed(f"{tmp_path}/first/last.ckpt") == f"{tmp_path}/first/epoch=2-step={3 * BATCHES}.ckpt"


def test_what_is_no_link_stays(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").mkdir()
    (tmp_path / "last.ckpt" / "notes").write_text("mine")
    fit(tw.ModelCheckpoint(tmp_path, save_last=True))
    assert (tmp_path / "last.ckpt" / "notes").read_text() == "mine"
    assert pointed(f"{tmp_path}/last-v1.ckpt") == f"{tmp_path}/epoch=1-step={2 * BATCHES}.ckpt"


def test_epochs_and_steps_are_monitored_without_a_log(tmp_path: Path) -> None:
    for monitor in ("epoch", "step"):
        fit(tw.ModelCheckpoint(tmp_path / monitor, monitor=monitor, mode="max", save_top_k=2), 3)
        found = [entry.step for entry in find_checkpoints(str(tmp_path / monitor))]
        assert found == [2 * BATCHES, 3 * BATCHES]


def test_a_stop_moves_the_link(tmp_path: Path) -> None:
    class Stops(tw.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == BATCHES + 2:
                trainer.stop_soon()

    callback = tw.ModelCheckpoint(tmp_path, save_last=True)
    small.fit(Classifier(), max_epochs=3, callbacks=[callback, Stops()], enable_checkpointing=True)
    assert open_checkpoint(f"{tmp_path}/last.ckpt").step == BATCHES + 2


@pytest.mark.parametrize("options", [
    {"every_n_epochs": 10},
    {"every_n_train_steps": 1000, "save_weights_only": True},
    {"save_on_train_epoch_end": False},
])  # fmt: skip
def test_a_fit_that_ends_before_the_first_save_leaves_the_link(tmp_path: Path, options: dict[str, Any]) -> None:
    callback = tw.ModelCheckpoint(tmp_path, save_last=True, **options)
    fit(callback)
    saved = open_checkpoint(f"{tmp_path}/last.ckpt")
    assert (saved.step, saved.header["weights_only"]) == (2 * BATCHES, "save_weights_only" in options)
    assert callback.last_model_path == saved.path == f"{tmp_path}/end-step={2 * BATCHES}.ckpt"
    assert sorted(os.listdir(tmp_path)) == [Path(saved.path).name, "last.ckpt"]
    if not saved.header["weights_only"]:
        again = tw.ModelCheckpoint(tmp_path, save_last=True, **options)
        assert fit(again, 3, ckpt_path=tmp_path / "last.ckpt").global_step == 3 * BATCHES
        assert open_checkpoint(f"{tmp_path}/last.ckpt").step == 3 * BATCHES


def test_a_link_follows_a_background_save_at_once(tmp_path: Path) -> None:
    class Waits(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step == 4:  # the save has begun, and the link follows at the end of this batch
                self.trainer.engine.finish_save()
            elif self.trainer.global_step == 5:
                self.led_to = pointed(str(tmp_path / "last.ckpt"))
            return super().training_step(batch, batch_idx)

    options = {"every_n_train_steps": 4, "save_top_k": -1, "save_last": True, "async_save": True}
    module, callback = Waits(), tw.ModelCheckpoint(tmp_path, "{step}", **options)
    tw.Trainer(max_steps=6, callbacks=[callback], **SAVING).fit(module, make_loader())
    assert module.led_to == f"{tmp_path}/step=4.ckpt"
