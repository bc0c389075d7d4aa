"""A checkpoint exists whole or not at all: crashes at every call, failing ranks, failing disks."""

from __future__ import annotations

import builtins
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainwright.checkpoint import filesystem
from trainwright.checkpoint.contents import collect
from trainwright.checkpoint.discovery import find_checkpoints, remove_checkpoint
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.checkpoint.store import write_checkpoint
from trainwright.distributed.ranks import Ranks
from trainwright.errors import CheckpointError

FILES = ["manifest.json", "model-00000.safetensors", "rank-00000.json", "state.json", "state.safetensors"]


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_checkpoint_comes_back(world_size: int, tmp_path: Path, save: Any, check: Any) -> None:
    path = tmp_path / "deep" / "er" / "epoch=0-step=7.ckpt"
    assert save(path, 7, world_size) == [None] * world_size
    checkpoint = open_checkpoint(str(path))
    check(checkpoint, 7)
    assert checkpoint.rank_state(world_size) is None
    assert checkpoint.world_size == world_size
    assert checkpoint.sections == ["model"]
    assert checkpoint.extra_files == []
    assert os.listdir(path.parent) == [path.name]
    if world_size == 1:
        assert sorted(os.listdir(path)) == FILES


def test_an_existing_target_is_refused_on_all_ranks(tmp_path: Path, save: Any, check: Any) -> None:
    save(tmp_path / "a.ckpt", 1)
    errors = save(tmp_path / "a.ckpt", 2, world_size=2)
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    with pytest.raises(CheckpointError, match=r"a\.ckpt exists already, and overwrite=False was given; leave that out"):
        save(tmp_path / "a.ckpt", 2)
    check(open_checkpoint(str(tmp_path / "a.ckpt")), 1)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="exists already"):
        save(tmp_path / "file")


def test_bad_arguments_are_refused_and_leave_nothing(tmp_path: Path, seats: Any) -> None:
    def attempt(sections: Any = {}, state: Any = None, header: Any = {"step": 1, "epoch": 0}) -> None:  # noqa: B006
        write_checkpoint(str(tmp_path / "a"), lambda: collect(sections, state, None, 0, 1), header, seats(1)[0])

    for section in ("../model", "state", "rank", "Model", ""):
        with pytest.raises(CheckpointError, match="section name"):
            attempt(sections={section: []})
    with pytest.raises(CheckpointError, match=r"state\.callbacks\.best is a builtins\.object; expected None"):
        attempt(state={"callbacks": {"best": object()}})
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        attempt(header={"step": 1, "epoch": 0, "x": object()})
    assert os.listdir(tmp_path) == []


class Death(BaseException):
    """Ends a simulated process at once. No cleanup may have an effect after it."""


class Calls:
    """Counts the calls that change or read the file system, records them, and dies at the k-th."""

    COUNTED = ("mkdir", "open", "close", "fsync", "rename", "unlink", "rmdir", "scandir")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, str]] = []
        self.dies_at: int | None = None
        monkeypatch.setattr(filesystem, "os", self)
        monkeypatch.setattr(filesystem, "open", self.open_file, raising=False)
        monkeypatch.setattr(filesystem.shutil, "rmtree", self.counted("rmtree", shutil.rmtree))
        exchange = filesystem.LocalFiles().exchange
        monkeypatch.setattr(
            filesystem.LocalFiles, "exchange", lambda _, *paths: self.counted("exchange", exchange)(*paths)
        )

    def __getattr__(self, name: str) -> Any:
        value = getattr(os, name)
        return self.counted(name, value) if name in self.COUNTED else value

    def tick(self, name: str, subject: Any) -> None:
        if self.dies_at is not None and len(self.log) >= self.dies_at:
            raise Death
        if name == "fsync" and isinstance(subject, int):
            subject = os.readlink(f"/proc/self/fd/{subject}")
        self.log.append((name, os.path.basename(str(subject))))

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.tick(name, arguments[0])
            return function(*arguments, **named)

        return call

    def open_file(self, path: str, mode: str, **named: Any) -> Any:
        self.tick("open_file", path)
        stream = builtins.open(path, mode, **named)  # noqa: SIM115 - whoever asked for it closes it
        return _CountedStream(stream, self) if "x" in mode else stream


class _CountedStream:
    """A file whose writes are counted. A death during a write leaves half of its data."""

    def __init__(self, stream: Any, calls: Calls) -> None:
        self.stream, self.calls = stream, calls

    def write(self, data: memoryview) -> int:
        try:
            self.calls.tick("write", self.stream.name)
        except Death:
            self.stream.write(data[: len(data) // 2])
            raise
        return int(self.stream.write(data))

    def fileno(self) -> int:
        return int(self.stream.fileno())

    def __enter__(self) -> _CountedStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.stream.close()
        if error[0] is None:
            self.calls.tick("close_file", self.stream.name)


@pytest.mark.parametrize("failing", ["model-00000", "model-00001", "rank-00001.json", "state.json", "manifest.json"])
def test_a_full_disk_on_one_rank_is_the_same_error_on_all(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Any, check: Any
) -> None:
    save(tmp_path / "old.ckpt", 1)

    class Full:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *error: object) -> None:
            self.stream.close()

        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open_file(path: str, mode: str, **named: Any) -> Any:
        stream = builtins.open(path, mode, **named)  # noqa: SIM115 - whoever asked for it closes it
        return Full(stream) if "x" in mode and failing in path else stream

    with monkeypatch.context() as patch:
        patch.setattr(filesystem, "open", open_file, raising=False)
        errors = save(tmp_path / "new.ckpt", 2, world_size=2)
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    rank = 1 if "00001" in failing else 0
    assert f"new.ckpt was not written: rank {rank}:" in str(errors[0])
    assert "the disk is full (OSError: [Errno 28] No space left on device; " in str(errors[0])
    assert isinstance(errors[rank].__cause__, Exception)
    assert os.listdir(tmp_path) == ["old.ckpt"]
    check(open_checkpoint(str(tmp_path / "old.ckpt")), 1)


def test_a_sync_of_the_parent_that_fails_takes_the_checkpoint_back(tmp_path: Path, monkeypatch: Any, save: Any) -> None:
    sync = filesystem.LocalFiles.sync_directory

    def sync_directory(self: filesystem.LocalFiles, path: str) -> None:
        if path == str(tmp_path):
            raise OSError(errno.EIO, "input/output error")
        sync(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(filesystem.LocalFiles, "sync_directory", sync_directory)
        with pytest.raises(CheckpointError, match="input/output error"):
            save(tmp_path / "new.ckpt")
    assert os.listdir(tmp_path) == []


def test_an_exchange_that_fails_drops_the_temporary(tmp_path: Path) -> None:
    class Lost:
        rank, world_size, calls = 0, 1, 0

        def exchange(
            self, payload: bytes, *, call: str, timeout_seconds: float, for_first: bytes | None = None
        ) -> list[bytes]:
            self.calls += 1
            if self.calls == 2:
                raise TimeoutError("rank 1 did not answer")
            return [payload + (for_first or b"")]

    with pytest.raises(TimeoutError):
        write_checkpoint(
            str(tmp_path / "a"),
            lambda: collect({}, 1, None, 0, 2),
            header={"step": 1, "epoch": 0},
            ranks=Ranks(Lost()),
        )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("extra", [False, True])
def test_a_death_in_a_removal_leaves_it_whole_or_gone(
    extra: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Any, check: Any
) -> None:
    save(tmp_path / "origin" / "old.ckpt", 1)
    if extra:
        (tmp_path / "origin" / "old.ckpt" / "notes.txt").touch()
    for dies_at in range(100):
        directory = tmp_path / str(dies_at)
        shutil.copytree(tmp_path / "origin", directory)
        with monkeypatch.context() as patch:
            calls = Calls(patch)
            calls.dies_at = dies_at
            try:
                remove_checkpoint(str(directory / "old.ckpt"))
                break
            except Death:
                pass
        for entry in find_checkpoints(str(directory)):
            check(open_checkpoint(entry.path), 1)
    assert 4 < dies_at < 99
