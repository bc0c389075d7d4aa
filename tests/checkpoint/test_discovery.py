"""Checkpoints are found by step and removed whole. Directories of dead writers are removed."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainwright.checkpoint import filesystem
from trainwright.checkpoint.discovery import find_candidates, find_checkpoints, remove_checkpoint, same_path
from trainwright.checkpoint.filesystem import sweep_temporaries
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.errors import CheckpointError


def test_order_is_by_step_and_strangers_are_passed_over(tmp_path: Path, save: Any, check: Any) -> None:
    assert find_checkpoints(str(tmp_path / "absent")) == []
    for step in (10, 9, 100):
        save(tmp_path / f"step={step}.ckpt", step)
        os.utime(tmp_path / f"step={step}.ckpt", (step % 7, step % 7))
    shutil.copytree(tmp_path / "step=100.ckpt", tmp_path / ".step=101.ckpt.tmp-0-0")
    shutil.copytree(tmp_path / "step=100.ckpt", tmp_path / "half")
    (tmp_path / "half" / "manifest.json").unlink()
    (tmp_path / "last").symlink_to("step=100.ckpt")
    (tmp_path / "notes.txt").touch()
    (tmp_path / "dataset").mkdir()
    found = find_checkpoints(f"{tmp_path}/")
    assert [(entry.step, entry.epoch) for entry in found] == [(9, 0), (10, 1), (100, 10)]
    check(open_checkpoint(found[-1].path), 100)


def test_step_of_a_damaged_checkpoint_is_read_from_its_files(tmp_path: Path, save: Any) -> None:
    for step, name in ((1, "old"), (2, "older-name"), (3, "newest")):
        save(tmp_path / f"{name}.ckpt", step)
    os.truncate(tmp_path / "old.ckpt" / "manifest.json", os.path.getsize(tmp_path / "old.ckpt" / "manifest.json") - 2)
    (tmp_path / "older-name.ckpt" / "manifest.json").unlink()
    (tmp_path / "older-name.ckpt" / "state.json").write_text('{"position": {"step": 2}}')
    (tmp_path / "unknown.ckpt").mkdir()
    found = find_candidates(str(tmp_path))
    assert [(entry.step, bool(entry.damage)) for entry in found] == [(1, True), (2, True), (3, False), (math.inf, True)]


def test_links_lead_to_the_same_place(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "real" / "a.ckpt")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "newest").symlink_to("a.ckpt")
    place = f"{tmp_path}/real/a.ckpt"
    for other in ("real/newest", f"{tmp_path}/link/a.ckpt", f"file://{tmp_path}/link/newest", "real/../link/a.ckpt"):
        assert same_path(place, other)
        assert same_path(other, place)
    assert same_path(f"{tmp_path}/link/absent", f"{tmp_path}/real/absent/")
    assert not same_path(place, f"{tmp_path}/real")
    assert not same_path(place, f"memory://{place}")
    assert not same_path("", "")


def test_removal_takes_a_checkpoint_and_nothing_else(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "a.ckpt")
    save(tmp_path / "b.ckpt")
    (tmp_path / "b.ckpt" / "notes.txt").write_text("mine")
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("a.ckpt")
    assert open_checkpoint(str(tmp_path / "b.ckpt")).extra_files == ["notes.txt"]
    with pytest.raises(CheckpointError, match="is a symbolic link and was not removed"):
        remove_checkpoint(str(tmp_path / "link"))
    for name in ("data", "absent"):
        with pytest.raises(CheckpointError, match="is not a checkpoint"):
            remove_checkpoint(str(tmp_path / name))
    remove_checkpoint(str(tmp_path / "a.ckpt"))
    remove_checkpoint(str(tmp_path / "b.ckpt"))
    assert sorted(os.listdir(tmp_path)) == ["b.ckpt", "data", "link"]
    assert os.listdir(tmp_path / "b.ckpt") == ["notes.txt"]


def test_only_temporaries_of_dead_writers_are_swept(tmp_path: Path) -> None:
    assert sweep_temporaries(str(tmp_path / "absent")) == []
    mine = filesystem.temporary_path(str(tmp_path / "a.ckpt"))
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    ).stdout.strip()
    host, pid, start, unique = os.path.basename(mine).rpartition(".tmp-")[2].split("-")
    assert pid == str(os.getpid())
    left = [
        os.path.basename(mine),
        f".a.ckpt.tmp-00000000-{gone}-{start}-{unique}",
        ".a.ckpt.tmp-mine",
        f"a.ckpt.tmp-{host}-{gone}-{start}-{unique}",
    ]
    swept = [f".a.ckpt.tmp-{host}-{gone}-{start}-{unique}", f".b.tmp-{host}-{pid}-{int(start) + 1}-{unique}"]
    for name in left + swept:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model-00000.safetensors").touch()
    assert sweep_temporaries(str(tmp_path)) == sorted(swept)
    assert sorted(os.listdir(tmp_path)) == sorted(left)
    # The writer may run on another machine. A directory without changes for a day is removed.
    for name in left:
        for path in (tmp_path / name / "model-00000.safetensors", tmp_path / name):
            os.utime(path, (0.0, 0.0))
    assert sweep_temporaries(str(tmp_path)) == left[1:2]
