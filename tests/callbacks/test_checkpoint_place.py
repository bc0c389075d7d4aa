"""ModelCheckpoint: checkpoints that take the name of another, and the kept ones while no metric is finite."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from jobs import run_job
from small import QUIET, SAVING, Classifier, Scored, make_loader

import trainwright as tw
from trainwright.callbacks.checkpoint_files import is_taken, remove_replaced
from trainwright.checkpoint.discovery import (
    find_checkpoints,
    is_checkpoint,
    is_replaceable,
    remove_checkpoint,
    replace_checkpoint,
)

NAN = math.nan


def run(folder: Path, scores: list[float], ckpt_path: str | None = None, **kwargs: Any) -> tw.ModelCheckpoint:
    callback = tw.ModelCheckpoint(str(folder), **{"monitor": "score", **kwargs})
    trainer = tw.Trainer(max_epochs=len(scores), callbacks=[callback], **SAVING)
    trainer.fit(Scored(scores), make_loader(), make_loader(4), ckpt_path=ckpt_path)
    return callback


def found(folder: Path) -> dict[str, int]:
    """Return the checkpoints of a folder with their numbers of epochs. There is nothing else in it."""
    entries = {Path(entry.path).name: entry.epoch + 1 for entry in find_checkpoints(str(folder))}
    assert {*entries, "last.ckpt"} == {*os.listdir(folder), "last.ckpt"}
    return entries


def test_the_newest_is_kept_while_the_metric_is_not_finite(tmp_path: Path) -> None:
    scores = [NAN, math.inf, NAN]
    with pytest.warns(UserWarning, match=r"monitors 'score', which is nan, not finite\. .* the newest") as caught:
        callback = run(tmp_path, scores)
    assert len(caught) == 1
    assert found(tmp_path) == {"epoch=2-step=33.ckpt": 3}
    assert (callback.best_model_path, callback.best_k_models, callback.best_model_score) == ("", {}, None)
    assert callback.last_model_path == f"{tmp_path}/epoch=2-step=33.ckpt"
    # A resumed run knows it. It stays for the run that resumes from it, and that run removes its counterpart.
    with pytest.warns(UserWarning, match="not finite"):
        callback = run(tmp_path, [*scores, NAN, 2.0, NAN, 3.0], "last")
    assert found(tmp_path) == {"epoch=2-step=33.ckpt": 3, "epoch=4-step=55.ckpt": 5}
    assert callback.best_model_path == callback.last_model_path == f"{tmp_path}/epoch=4-step=55.ckpt"


@pytest.mark.parametrize(
    ("kwargs", "kept"),
    [({"save_top_k": -1}, [1, 3]), ({"save_top_k": 2, "save_last": True}, [1, 3, 4]), ({"filename": "best"}, [3])],
)
def test_a_finite_metric_ends_that(tmp_path: Path, kwargs: dict[str, Any], kept: list[int]) -> None:
    with pytest.warns(UserWarning, match="not finite") as caught:
        run(tmp_path, [NAN, 2.0, NAN, 1.0, NAN], **kwargs)
    assert len(caught) == 1
    assert sorted(found(tmp_path).values()) == [epoch + 1 for epoch in kept]


def test_nothing_is_kept_where_nothing_is_wanted(tmp_path: Path) -> None:
    run(tmp_path / "none", [NAN, NAN], save_top_k=0)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("saves", [1, 2, 3, 4])
def test_one_name_for_all_is_the_plain_one(tmp_path: Path, saves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it was saved, a complete checkpoint exists at every moment."""
    seen = []

    def watched(place: str, path: str) -> None:
        seen.append((is_checkpoint(place), is_checkpoint(path)))
        replace_checkpoint(place, path)

    monkeypatch.setattr("trainwright.callbacks.checkpoint_files.replace_checkpoint", watched)
    callback = run(tmp_path, [float(-save) for save in range(saves)], filename="best")
    assert found(tmp_path) == {"best.ckpt": saves}
    assert seen == [(True, True)] * (saves - 1)
    path = f"{tmp_path}/best.ckpt"
    assert callback.best_model_path == callback.last_model_path == callback.kth_best_model_path == path
    assert list(callback.best_k_models) == [path]
    # A resumed run finds it, and does not touch it.
    again = run(tmp_path, [*[0.0] * saves, -9.0, -10.0, -11.0], "last", filename="best")
    assert found(tmp_path) == {"best-v1.ckpt": saves + 3, "best.ckpt": saves}
    assert again.best_model_path == f"{tmp_path}/best-v1.ckpt"
    assert again.best_model_score == -11.0


def test_kept_checkpoints_keep_their_names(tmp_path: Path) -> None:
    callback = run(tmp_path, [3.0, 2.0, 4.0, 1.0, 0.0, 5.0], filename="best", save_top_k=2, save_last=True)
    assert found(tmp_path) == {"best-v1.ckpt": 5, "best.ckpt": 4, "epoch=5-step=66.ckpt": 6}
    assert callback.last_model_path == f"{tmp_path}/epoch=5-step=66.ckpt"
    assert {Path(path).name: score for path, score in callback.best_k_models.items()} == {
        "best.ckpt": 1.0,
        "best-v1.ckpt": 0.0,
    }


def test_the_checkpoint_of_another_run_is_left_alone(tmp_path: Path) -> None:
    run(tmp_path, [5.0], filename="best")
    callback = run(tmp_path, [3.0, 2.0, 1.0], filename="best")
    assert found(tmp_path) == {"best.ckpt": 1, "best-v1.ckpt": 3}
    assert callback.best_model_path == f"{tmp_path}/best-v1.ckpt"


def test_newer_checkpoint_replaces_older_ones(tmp_path: Path) -> None:
    """Only our complete checkpoints go, once the newer one is complete, and the resume source stays."""
    for name in ("old", "source", "damaged", "new"):
        run(tmp_path, [1.0], filename=name)
    elsewhere = run(tmp_path / "elsewhere", [1.0]).best_model_path
    (tmp_path / "link.ckpt").symlink_to(elsewhere)
    (tmp_path / "theirs.ckpt").mkdir()
    (tmp_path / "damaged.ckpt" / "manifest.json").write_text("{}")
    trainer = tw.Trainer(**QUIET)
    trainer.run.update_trained(resume_source=f"{tmp_path}/source.ckpt")
    paths = [f"{tmp_path}/{name}.ckpt" for name in ("old", "source", "damaged", "link", "theirs", "new")]
    manifest = tmp_path / "new.ckpt" / "manifest.json"
    manifest.rename(tmp_path / "kept.json")
    before = sorted(os.listdir(tmp_path))
    assert remove_replaced(paths, paths[-1], trainer) == [trainer.resume_source]
    assert sorted(os.listdir(tmp_path)) == before  # the new one is not whole
    (tmp_path / "kept.json").rename(manifest)
    assert remove_replaced(paths, paths[-1], trainer) == [trainer.resume_source]
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == [
        "damaged.ckpt", "link.ckpt", "new.ckpt", "source.ckpt", "theirs.ckpt",
    ]  # fmt: skip
    assert is_checkpoint(elsewhere)
    # A name that anything has is taken, and only a complete checkpoint makes room.
    assert [is_taken(path) for path in paths] == [False, True, True, True, True, True]
    assert [is_replaceable(path) for path in paths] == [False, True, False, False, False, True]


class Killed(BaseException):
    pass


def killed(*args: Any) -> None:
    raise Killed


def test_resume_removes_the_older_checkpoint_that_a_kill_has_left(tmp_path: Path) -> None:
    """The run that goes on removes it, though nothing is left to train."""

    run(tmp_path, [3.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainwright.checkpoint.discovery.remove_checkpoint", killed)
        with pytest.raises(Killed):
            run(tmp_path, [1.0, 0.5], filename="new-{epoch}")
    assert set(found(tmp_path)) == {"epoch=0-step=11.ckpt", "new-epoch=0.ckpt", "new-epoch=1.ckpt"}
    run(tmp_path, [1.0, 0.5], "auto", filename="new-{epoch}")
    assert set(found(tmp_path)) == {"epoch=0-step=11.ckpt", "new-epoch=1.ckpt"}


def test_resume_moves_the_newer_checkpoint_that_a_kill_has_left(tmp_path: Path) -> None:
    """The run that goes on from the newer one removes the older one, whose path it was to get."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainwright.callbacks.checkpoint_files.replace_checkpoint", killed)
        with pytest.raises(Killed):
            run(tmp_path, [3.0, 2.0], filename="best")
    assert found(tmp_path) == {"best.ckpt": 1, "best-v1.ckpt": 2}
    run(tmp_path, [3.0, 2.0], "auto", filename="best")
    assert found(tmp_path) == {"best-v1.ckpt": 2}
    run(tmp_path, [3.0, 2.0, 1.0, 0.5], "auto", filename="best")
    assert found(tmp_path) == {"best.ckpt": 4, "best-v1.ckpt": 2}, "what the run was resumed from stays"


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), tw.CheckpointError("is not a checkpoint")])
def test_one_that_cannot_be_removed_ends_no_run(tmp_path: Path, error: Exception, monkeypatch: Any) -> None:
    def refuses_the_first(path: str) -> None:
        if path.endswith("epoch=0-step=11.ckpt"):
            raise error
        remove_checkpoint(path)

    monkeypatch.setattr("trainwright.checkpoint.discovery.remove_checkpoint", refuses_the_first)
    with pytest.warns(
        UserWarning, match=r"epoch=0-step=11\.ckpt, which .*epoch=1-step=22\.ckpt replaces, could not"
    ) as said:
        callback = run(tmp_path, [3.0, 2.0, 1.0])
    assert len(said) == 1
    assert found(tmp_path) == {"epoch=0-step=11.ckpt": 1, "epoch=2-step=33.ckpt": 3}
    assert callback.best_model_path == callback.last_model_path == f"{tmp_path}/epoch=2-step=33.ckpt"


def test_a_source_that_a_link_leads_to_stays(tmp_path: Path) -> None:
    run(tmp_path, [2.0])
    (tmp_path / "newest").symlink_to("epoch=0-step=11.ckpt")
    callback = run(tmp_path, [2.0, 1.0], f"{tmp_path}/newest")
    assert set(callback.best_k_models) == {f"{tmp_path}/epoch=1-step=22.ckpt"}
    (tmp_path / "newest").unlink()
    assert found(tmp_path) == {"epoch=0-step=11.ckpt": 1, "epoch=1-step=22.ckpt": 2}


@pytest.mark.parametrize("first", ["real", "link"])
def test_a_folder_that_a_link_leads_to_is_the_same(tmp_path: Path, first: str) -> None:
    """A run that resumes through it keeps its best checkpoints, compares with them, and removes the replaced ones."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    other = "link" if first == "real" else "real"
    kwargs = {"save_top_k": 2, "save_last": True}
    run(tmp_path / first, [1.0, 3.0, 2.5], **kwargs)
    callback = run(tmp_path / other, [1.0, 3.0, 2.5, 2.0], "auto", **kwargs)
    assert callback.best_model_path == f"{tmp_path}/{first}/epoch=0-step=11.ckpt"
    assert [float(score) for score in callback.best_k_models.values()] == [1.0, 2.0]
    # The third is the resume source.
    assert sorted(found(tmp_path / "real").values()) == [1, 3, 4]


def two_ranks(folder: Path) -> list[Any]:
    class RankScored(Classifier):
        """Rank 1's scores are finite, and always better. Rank 0's are not finite at first."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            step = float(self.global_step)
            self.log("own", -step if self.global_rank else NAN if self.current_epoch < 2 else 100.0 - step)
            return loss

    said = []
    for epochs in (2, 4):
        callback = tw.ModelCheckpoint(str(folder / str(epochs)), monitor="own", filename="best")
        trainer = tw.Trainer(max_epochs=epochs, devices=2, callbacks=[callback], **SAVING)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("trainwright.callbacks.checkpoint_policy.warn", lambda text, **kwargs: said.append(text))
            trainer.fit(RankScored(), make_loader())
        assert is_checkpoint(callback.last_model_path)  # on every rank, after the fit
        said.append(callback.state_dict())
    return said


def test_two_ranks_keep_alike(tmp_path: Path) -> None:
    first, second = run_job(two_ranks, 2, tmp_path)
    texts = [text for text in first if isinstance(text, str)]
    assert len(texts) == 2
    assert all("not finite" in text for text in texts)
    states = [state for state in first if isinstance(state, dict)]
    scores = [state.pop("current_score") for state in states]
    assert math.isnan(scores[0])
    others = [{key: value for key, value in state.items() if key != "current_score"} for state in second]
    assert states == others
    assert found(tmp_path / "2") == {"best.ckpt": 2}
    assert found(tmp_path / "4") == {"best.ckpt": 4}
    assert (states[0]["best_model_path"], states[1]["best_model_path"]) == ("", f"{tmp_path}/4/best.ckpt")
