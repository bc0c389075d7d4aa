"""Damage to any file of two real ranks' checkpoints is found. Parts of two checkpoints are never mixed."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoint_format import FIXTURES

from trainwright.checkpoint.reader import examine, open_checkpoint
from trainwright.errors import CheckpointError

REAL = sorted((FIXTURES / "format-1").glob("*.ckpt"))
FILES = [(path.name, file.name) for path in REAL for file in sorted(path.iterdir())]


@pytest.fixture
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of a real checkpoint, and one of its files."""
    name, file = request.param
    path = Path(shutil.copytree(FIXTURES / "format-1" / name, tmp_path / "a.ckpt"))
    return path, path / file


def refused(path: Path, file: Path, verify: Any = "full") -> None:
    with pytest.raises(CheckpointError, match=file.name.replace(".", r"\.")):
        open_checkpoint(str(path), verify)


@pytest.mark.parametrize("copy", FILES, indirect=True, ids=["-".join(each) for each in FILES])
def test_one_flipped_bit_is_found_every_time(copy: tuple[Path, Path]) -> None:
    path, file = copy
    whole = file.read_bytes()
    draws = random.Random(file.name)
    for _ in range(20):
        damaged = bytearray(whole)
        damaged[draws.randrange(len(whole))] ^= 1 << draws.randrange(8)
        file.write_bytes(damaged)
        refused(path, file)
        assert [problem for problem in examine(str(path)).problems if file.name not in problem] == []
        assert examine(str(path)).problems
    file.write_bytes(whole)
    assert examine(str(path)).problems == []


def test_parts_of_two_checkpoints_are_never_taken_for_one(tmp_path: Path, save: Any, check: Any) -> None:
    """Files of two steps, which have the same names and the same sizes."""
    save(tmp_path / "one", 1, 2)
    save(tmp_path / "two", 2, 2)
    names = sorted(each.name for each in (tmp_path / "one").iterdir())
    assert names == sorted(each.name for each in (tmp_path / "two").iterdir())
    for name in names:
        mixed = Path(shutil.copytree(tmp_path / "one", tmp_path / f"mixed {name}"))
        shutil.copy(tmp_path / "two" / name, mixed / name)
        assert (mixed / name).stat().st_size == (tmp_path / "one" / name).stat().st_size
        is_manifest = name == "manifest.json"
        message = "does not match its digest" if not is_manifest else r"(json|safetensors) does not match its digest"
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(str(mixed))
        problems = [problem.split(" ")[0] for problem in examine(str(mixed)).problems]
        assert problems == ([each for each in names if each != name] if is_manifest else [name])
    check(open_checkpoint(str(tmp_path / "one")), 1)
