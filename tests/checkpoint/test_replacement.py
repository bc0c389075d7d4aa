"""Overwriting: a save that was asked to takes the place of a complete checkpoint, and of nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from trainwright.checkpoint import discovery
from trainwright.checkpoint.discovery import find_checkpoints, is_checkpoint, is_replaceable, replace_checkpoint
from trainwright.checkpoint.filesystem import LocalFiles
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.errors import CheckpointError


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", ["final.ckpt", "loss=0.5"])
def test_a_whole_one_is_replaced(world_size: int, name: str, tmp_path: Path, save: Any, check: Any) -> None:
    path = tmp_path / name
    for step in (1, 2, 3):
        assert save(path, step, world_size, overwrite=True) == [None] * world_size
        check(open_checkpoint(str(path)), step)
        assert os.listdir(tmp_path) == [name]


def test_the_place_beside_is_one_that_nothing_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Any, check: Any
) -> None:
    places = []

    def noted(place: str, path: str) -> None:
        places.append((is_checkpoint(place), is_checkpoint(path), Path(place).name))
        replace_checkpoint(place, path)

    monkeypatch.setattr("trainwright.checkpoint.store.replace_checkpoint", noted)
    save(tmp_path / "a.ckpt", 1)
    save(tmp_path / "a-v1.ckpt", 5)
    save(tmp_path / "a.ckpt", 2, overwrite=True)
    assert places == [(True, True, "a-v2.ckpt")]
    check(open_checkpoint(str(tmp_path / "a-v1.ckpt")), 5)
    assert sorted(os.listdir(tmp_path)) == ["a-v1.ckpt", "a.ckpt"]


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def a_file(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.touch()


OTHERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "link": (linked, "it is a symbolic link"),
    "file": (a_file, "is not a checkpoint: it is a file"),
    "damaged": (lambda path: (path / "manifest.json").write_text("{}"), "a.ckpt: "),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "it has no manifest.json"),
    "more in it": (
        lambda path: (path / "notes.txt").touch(),
        r"it also holds notes\.txt, which is not the checkpoint's",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_anything_else_is_refused_and_stays(kind: str, tmp_path: Path, save: Any) -> None:
    change, text = OTHERS[kind]
    path = tmp_path / "a.ckpt"
    save(path, 1)
    change(path)
    before = sorted(str(each) for each in tmp_path.rglob("*"))
    match = (
        rf"a\.ckpt exists already, and overwrite=True only replaces a complete checkpoint: .*{text}.*\. Remove it, or"
    )
    errors = save(path, 2, world_size=2, overwrite=True)
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    with pytest.raises(CheckpointError, match=match):
        save(path, 2, overwrite=True)
    assert not is_replaceable(str(path))
    assert sorted(str(each) for each in tmp_path.rglob("*")) == before


def test_without_a_rename_a_path_that_is_taken_is_refused(save: Any, check: Any) -> None:
    files = fsspec.filesystem("memory")
    try:
        save("memory://over/a.ckpt", 1, overwrite=True)
        with pytest.raises(CheckpointError, match="its file system has no rename, by which one replaces"):
            save("memory://over/a.ckpt", 2, overwrite=True)
        check(open_checkpoint("memory://over/a.ckpt"), 1)
        assert len(find_checkpoints("memory://over")) == 1
    finally:
        files.rm("/over", recursive=True)


@pytest.mark.parametrize("failing", ["second rename", "sync", "old one's removal"])
def test_a_replacement_that_fails_is_taken_back(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Any, check: Any
) -> None:
    path = str(tmp_path / "a.ckpt")
    save(path, 1)

    class Failing(LocalFiles):
        def rename(self, source: str, target: str) -> None:
            if failing == "second rename" and source.endswith("a-v1.ckpt"):
                raise OSError("no")
            super().rename(source, target)

        def sync_directory(self, path: str) -> None:
            if failing == "sync":
                raise OSError("no")
            super().sync_directory(path)

        def remove_tree(self, path: str) -> None:
            raise OSError("no")

    monkeypatch.setattr(discovery, "resolve", lambda path: (Failing(), str(path)))
    if failing == "old one's removal":
        with pytest.warns(UserWarning, match=r"a\.ckpt was replaced, but not all of it could be removed: no"):
            save(path, 2, overwrite=True)
        check(open_checkpoint(path), 2)
        return
    with pytest.raises(
        CheckpointError, match=r"a-v1\.ckpt is complete, but could not be renamed to .*a\.ckpt: OSError: no"
    ):
        save(path, 2, overwrite=True)
    check(open_checkpoint(path), 1)
    check(open_checkpoint(str(tmp_path / "a-v1.ckpt")), 2)
    assert sorted(os.listdir(tmp_path)) == ["a-v1.ckpt", "a.ckpt"]
