"""Whole files of loggers, and leftovers of killed writers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from trainwright.loggers.files import write_file
from trainwright.paths import process_start_time


def test_the_next_write_removes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    path = tmp_path / "run[1].json"
    child = os.fork()
    if not child:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda _: os.kill(os.getpid(), signal.SIGKILL))
            write_file(str(path), b"half")
        os._exit(1)
    os.waitpid(child, 0)
    (left,) = tmp_path.iterdir()
    parent, (*_, start, _) = os.getppid(), left.name.split("-")
    of_living = left.with_name(left.name.replace(f"{child}-{start}", f"{parent}-{process_start_time(parent)}"))
    other = left.with_name(f"other.json.{left.name.removeprefix(f'{path.name}.')}")
    of_living.touch()
    other.touch()
    write_file(str(path), b"whole")
    assert not left.exists()
    assert set(tmp_path.iterdir()) == {path, of_living, other}
    assert path.read_bytes() == b"whole"
