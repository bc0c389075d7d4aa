"""On a file system without a rename the manifest is the commit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fsspec
import pytest

from trainwright.checkpoint.discovery import find_checkpoints, is_checkpoint, remove_checkpoint
from trainwright.checkpoint.filesystem import sweep_temporaries
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.errors import CheckpointError
from trainwright.faults import remote_calls


class Death(BaseException):
    """Ends a simulated process at once."""


@pytest.fixture
def memory() -> Iterator[Any]:
    """The in-memory file system, empty before and after."""
    files = fsspec.filesystem("memory")
    yield files
    for path in ("/runs",):
        if files.exists(path):
            files.rm(path, recursive=True)


def test_a_remote_checkpoint_comes_back(memory: Any, save: Any, check: Any) -> None:
    for step, world_size in ((3, 2), (12, 1)):
        assert save(f"memory://runs/step={step}.ckpt", step, world_size) == [None] * world_size
    memory.makedirs("/runs/half")
    found = find_checkpoints("memory://runs")
    assert [entry.step for entry in found] == [3, 12]
    for entry in found:
        check(open_checkpoint(entry.path), entry.step)
    with pytest.raises(CheckpointError, match="exists already"):
        save("memory://runs/step=3.ckpt", 4)
    memory.pipe_file("/runs/step=3.ckpt/state.json", b"{}")
    with pytest.raises(CheckpointError, match=r"state\.json has 2 bytes"):
        open_checkpoint(found[0].path)
    remove_checkpoint(found[0].path)
    assert [entry.step for entry in find_checkpoints("memory://runs")] == [12]
    assert sweep_temporaries("memory://runs") == []


@pytest.mark.parametrize("failing", ["model-00000", "rank-00001", "manifest"])
@pytest.mark.parametrize("kind", [OSError, Death, ValueError])
def test_an_interrupted_remote_write_is_no_checkpoint(
    failing: str, kind: type[BaseException], memory: Any, monkeypatch: pytest.MonkeyPatch, save: Any, check: Any
) -> None:
    save("memory://runs/old.ckpt", 1)
    monkeypatch.setattr(remote_calls, "DELAYS_SECONDS", ())
    opener, putter = type(memory).open, type(memory).pipe_file

    def open_file(self: Any, path: str, mode: str = "rb", **named: Any) -> Any:
        if failing in path and "w" in mode:
            raise kind("connection lost")
        return opener(self, path, mode, **named)

    def put(self: Any, path: str, data: bytes, **named: Any) -> None:
        if failing in path:
            putter(self, path, data[: len(data) // 2], **named)
            raise kind("connection lost")
        putter(self, path, data, **named)

    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "open", open_file)
        patch.setattr(type(memory), "pipe_file", put)
        if kind is Death and "1" not in failing:
            with pytest.raises(Death):
                save("memory://runs/new.ckpt", 2)
        elif kind is not Death:
            errors = save("memory://runs/new.ckpt", 2, world_size=2)
            assert len({str(error) for error in errors}) == 1
            assert "connection lost" in str(errors[0])
            assert not [name for name in memory.find("/runs") if "new" in name]
    assert not is_checkpoint("memory://runs/new.ckpt")
    assert [entry.step for entry in find_checkpoints("memory://runs")] == [1]
    # The files of an earlier attempt do not prevent a later attempt at the same name.
    assert save("memory://runs/new.ckpt", 2) == [None]
    check(open_checkpoint("memory://runs/new.ckpt"), 2)


def test_a_transient_remote_failure_is_retried(memory: Any, monkeypatch: Any, save: Any, check: Any) -> None:
    monkeypatch.setattr(remote_calls, "DELAYS_SECONDS", (0.0, 0.0))
    putter, failures = type(memory).pipe_file, [1, 1]

    def put(self: Any, path: str, data: bytes, **named: Any) -> None:
        if failures:
            failures.pop()
            raise OSError("503 slow down")
        putter(self, path, data, **named)

    monkeypatch.setattr(type(memory), "pipe_file", put)
    save("memory://runs/a.ckpt", 5)
    check(open_checkpoint("memory://runs/a.ckpt"), 5)
