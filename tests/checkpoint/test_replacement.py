"""Overwriting: a save that was asked to takes the place of a complete checkpoint, and of nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from trainwright.checkpoint import discovery
from trainwright.checkpoint.discovery import find_checkpoints, is_checkpoint, is_replaceable
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


@pytest.mark.parametrize("exchanges", [True, False])
def test_the_path_has_a_checkpoint_at_each_rename_where_directories_can_be_exchanged(
    exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Any, check: Any
) -> None:
    seen = []

    def noted(call: str) -> None:
        function = getattr(LocalFiles, call)

        def watched(files: LocalFiles, source: str, target: str) -> Any:
            seen.append(sorted(each.name for each in tmp_path.glob("[!.]*") if is_checkpoint(str(each))))
            return (
                exchanges and function(files, source, target) if call == "exchange" else function(files, source, target)
            )

        monkeypatch.setattr(LocalFiles, call, watched)

    save(tmp_path / "a.ckpt", 1)
    save(tmp_path / "a-v1.ckpt", 5)
    noted("rename")
    noted("exchange")
    save(tmp_path / "a.ckpt", 2, overwrite=True)
    both = ["a-v1.ckpt", "a.ckpt"]
    beside = [both, ["a-v1.ckpt", "a-v2.ckpt", "a.ckpt"], ["a-v1.ckpt", "a-v2.ckpt"]]
    assert seen == [both, *([] if exchanges else beside)]
    check(open_checkpoint(str(tmp_path / "a-v1.ckpt")), 5)
    check(open_checkpoint(str(tmp_path / "a.ckpt")), 2)
    assert sorted(os.listdir(tmp_path)) == both


def test_a_replacement_keeps_other_files_of_the_folder(tmp_path: Path, save: Any, check: Any) -> None:
    path = tmp_path / "out"
    (path / "logs").mkdir(parents=True)  # as a script makes its folder before it saves there
    (path / "logs" / "events").write_text("one")
    (path / "link").symlink_to("logs")
    (path / "empty").mkdir()
    (path / "private" / "inner").mkdir(parents=True)
    (path / "private").chmod(0o700)
    with open(path / "logs" / "events", "a") as log:
        for step in (1, 2):
            save(path, step, overwrite=True)
            check(open_checkpoint(str(path)), step)
            log.write(f" {step}")
    assert (path / "logs" / "events").read_text() == "one 1 2"
    assert ((path / "link").readlink(), (path / "empty").is_dir()) == (Path("logs"), True)
    assert ((path / "private" / "inner").is_dir(), (path / "private").stat().st_mode & 0o777) == (True, 0o700)
    assert os.listdir(tmp_path) == ["out"]


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
    "the working directory": (os.chdir, "the working directory is in it"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_anything_else_is_refused_and_stays(kind: str, tmp_path: Path, save: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)  # and back
    change, text = OTHERS[kind]
    path = tmp_path / "a.ckpt"
    save(path, 1)
    change(path)
    before = sorted(str(each) for each in tmp_path.rglob("*"))
    match = rf"a\.ckpt exists already and cannot be replaced by a checkpoint: .*{text}.*\. Remove it, or"
    errors = save(path, 2, world_size=2, overwrite=True)
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    with pytest.raises(CheckpointError, match=match):
        save(path, 2, overwrite=True)
    monkeypatch.chdir(tmp_path)
    assert is_replaceable(str(path)) is (kind == "the working directory")
    assert sorted(str(each) for each in tmp_path.rglob("*")) == before


def test_without_a_rename_a_path_that_is_taken_is_refused(save: Any, check: Any) -> None:
    files = fsspec.filesystem("memory")
    try:
        save("memory://over/a.ckpt", 1, overwrite=True)
        with pytest.raises(CheckpointError, match="its file system has no rename, which a replacement needs"):
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
        def exchange(self, left: str, right: str) -> bool:
            return failing != "second rename" and super().exchange(left, right)

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
    is_beside = failing == "second rename"
    text = (
        "v1.ckpt is complete, but could not be renamed to .*a.ckpt" if is_beside else "could not be renamed to .*a.ckpt"
    )
    with pytest.raises(CheckpointError, match=f"{text}: OSError: no"):
        save(path, 2, overwrite=True)
    check(open_checkpoint(path), 1)
    if is_beside:
        check(open_checkpoint(str(tmp_path / "a-v1.ckpt")), 2)
    assert sorted(os.listdir(tmp_path)) == [*(["a-v1.ckpt"] if is_beside else []), "a.ckpt"]
