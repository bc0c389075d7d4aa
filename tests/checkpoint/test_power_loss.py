"""After a power loss at any moment of a save or a removal, a new search finds the last committed checkpoint complete.

The calls are recorded and repeated on a model of a disk that keeps only synced data. These are the bytes of a file up to
its last fsync, and the names in a directory up to the directory's last fsync.
"""

from __future__ import annotations

import builtins
import copy
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trainwright.checkpoint import filesystem
from trainwright.checkpoint.discovery import find_checkpoints, remove_checkpoint
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.errors import CheckpointError


class Journal:
    """Makes the calls that change the file system, and records them in the order in which they take effect."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries: list[tuple[Any, ...]] = []
        self.lock = threading.Lock()  # a call and its line are one, whichever rank makes it
        monkeypatch.setattr(filesystem, "os", self)
        monkeypatch.setattr(filesystem, "open", self.open_file, raising=False)
        monkeypatch.setattr(filesystem.shutil, "rmtree", self.noted("rmtree", filesystem.shutil.rmtree))
        exchange = filesystem.LocalFiles().exchange
        monkeypatch.setattr(
            filesystem.LocalFiles, "exchange", lambda _, *paths: self.noted("exchange", exchange)(*paths)
        )

    def __getattr__(self, name: str) -> Any:
        value = getattr(os, name)
        if name == "fsync":
            return self.fsync
        return self.noted(name, value) if name in ("mkdir", "rename", "unlink", "rmdir") else value

    def noted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*paths: str) -> Any:
            with self.lock:
                answer = function(*paths)
                if answer is not False:
                    self.entries.append((name, *paths))
            return answer

        return call

    def fsync(self, descriptor: int) -> None:
        with self.lock:
            os.fsync(descriptor)
            self.entries.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))

    def open_file(self, path: str, mode: str, **named: Any) -> Any:
        with self.lock:
            stream = builtins.open(path, mode, **named)  # noqa: SIM115 - whoever asked for it closes it
            if "x" not in mode:
                return stream
            self.entries.append(("create", path))
        return _NotedStream(stream, self)


class _NotedStream:
    def __init__(self, stream: Any, journal: Journal) -> None:
        self.stream, self.journal = stream, journal

    def write(self, data: memoryview) -> int:
        with self.journal.lock:
            count = int(self.stream.write(data))
            self.journal.entries.append(("write", self.stream.name, bytes(data[:count])))
        return count

    def fileno(self) -> int:
        return int(self.stream.fileno())

    def __enter__(self) -> _NotedStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.stream.close()


@dataclass
class File:
    """A file: its data, and the part that is certainly on the disk."""

    data: bytes = b""
    synced: bytes = b""


@dataclass
class Directory:
    """A directory: its names, and the names that are certainly on the disk."""

    names: dict[str, File | Directory] = field(default_factory=dict)
    synced: dict[str, File | Directory] = field(default_factory=dict)


class Disk:
    """What the calls of a journal have done to a disk, under a root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = self._taken_in(root)

    def _taken_in(self, path: Path) -> Directory:
        """Return a directory of the real disk, all of it synced."""
        found: dict[str, File | Directory] = {}
        for each in path.iterdir():
            found[each.name] = self._taken_in(each) if each.is_dir() else File(each.read_bytes(), each.read_bytes())
        return Directory(dict(found), dict(found))

    def find(self, path: str) -> Any:
        place: Any = self.top
        for part in Path(path).relative_to(self.root).parts:
            place = place.names[part]
        return place

    def play(self, name: str, path: str, *rest: Any) -> None:
        parent, own = os.path.split(path)
        if name in ("mkdir", "create"):
            self.find(parent).names[own] = Directory() if name == "mkdir" else File()
        elif name == "write":
            self.find(path).data += rest[0]
        elif name == "fsync":
            place = self.find(path)
            place.synced = place.data if isinstance(place, File) else dict(place.names)
        elif name == "exchange":
            names, other = self.find(parent).names, os.path.basename(rest[0])
            names[own], names[other] = names[other], names[own]
        elif name == "rename":
            place = self.find(parent).names.pop(own)
            self.find(os.path.dirname(rest[0])).names[os.path.basename(rest[0])] = place
        else:
            del self.find(parent).names[own]

    def after_power_loss(self, target: Path, *, keeps_names: bool, fills_holes: bool) -> None:
        """Write the files that a machine finds after its restart.

        A disk may keep more than the synced data. With keeps_names it keeps every name, also of files without bytes. With
        fills_holes these files have their length, and zeros for data that was not synced.
        """

        def write(place: File | Directory, path: Path) -> None:
            if isinstance(place, File):
                hole = len(place.data) - len(place.synced)
                path.write_bytes(place.synced + bytes(hole) * fills_holes)
                return
            path.mkdir()
            for name, each in (place.names if keeps_names else place.synced).items():
                write(each, path / name)

        write(self.top, target)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_was_committed_outlives_a_power_loss_at_any_call(
    world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Any, check: Any
) -> None:
    runs = tmp_path / "runs"
    save(runs / "old.ckpt", 1, world_size)
    disk = Disk(runs)
    with monkeypatch.context() as patch:
        journal = Journal(patch)
        assert save(runs / "new.ckpt", 2, world_size) == [None] * world_size
        committed = len(journal.entries)
        remove_checkpoint(str(runs / "old.ckpt"))
    calls = [name for name, *_ in journal.entries]
    assert calls.count("create") == 4 + world_size + (world_size == 2)
    assert calls.count("fsync") >= calls.count("create") + 2
    assert calls.count("rename") == 2
    seen = []
    for played in range(len(journal.entries) + 1):
        for keeps_names, fills_holes in ((False, False), (True, False), (True, True)):
            came_up = tmp_path / f"{played}-{keeps_names}-{fills_holes}"
            disk.after_power_loss(came_up, keeps_names=keeps_names, fills_holes=fills_holes)
            found = find_checkpoints(str(came_up))
            for entry in found:
                check(open_checkpoint(entry.path), entry.step)
            steps = [entry.step for entry in found]
            assert steps in ([1], [1, 2], [2])
            assert 2 in steps or played < committed, "a save that has returned is durable"
            assert 1 in steps or played > committed, "the old one goes after the commit alone"
            seen.append(tuple(steps))
        if played < len(journal.entries):
            disk.play(*journal.entries[played])
    assert set(seen) == {(1,), (1, 2), (2,)}


@pytest.mark.parametrize("exchanges", [True, False])
def test_what_is_overwritten_outlives_a_power_loss_until_the_new_one_does(
    exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Any, check: Any
) -> None:
    runs = tmp_path / "runs"
    if not exchanges:
        monkeypatch.setattr(filesystem.LocalFiles, "exchange", lambda *_: False)
    save(runs / "final.ckpt", 1)
    disk = Disk(runs)
    with monkeypatch.context() as patch:
        journal = Journal(patch)
        save(runs / "final.ckpt", 2, overwrite=True)
    calls = [name for name, *_ in journal.entries]
    assert (calls.count("exchange"), calls.count("rename")) == ((1, 0) if exchanges else (0, 3))
    seen = []
    for played in range(len(journal.entries) + 1):
        for keeps_names, fills_holes in ((False, False), (True, False), (True, True)):
            came_up = tmp_path / f"{played}-{keeps_names}-{fills_holes}"
            disk.after_power_loss(came_up, keeps_names=keeps_names, fills_holes=fills_holes)
            found = find_checkpoints(str(came_up))
            for entry in found:
                check(open_checkpoint(entry.path), entry.step)
            seen.append(sorted((Path(entry.path).name, entry.step) for entry in found))
            between = ([("final-v1.ckpt", 2), ("final.ckpt", 1)], [("final-v1.ckpt", 2)])
            assert seen[-1] in ([("final.ckpt", 1)], [("final.ckpt", 2)], *(() if exchanges else between))
        if played < len(journal.entries):
            disk.play(*journal.entries[played])
    assert seen[-3:] == [[("final.ckpt", 2)]] * 3


def test_without_any_one_of_its_syncs_a_save_would_be_lost(tmp_path: Path, monkeypatch: Any, save: Any) -> None:
    """So the test above looks at syncs that matter, and none is made in vain."""
    runs = tmp_path / "runs"
    save(runs / "old.ckpt", 1)
    before = Disk(runs)
    with monkeypatch.context() as patch:
        journal = Journal(patch)
        save(runs / "new.ckpt", 2)

    def is_there(disk: Disk, folder: Path) -> bool:
        disk.after_power_loss(folder, keeps_names=False, fills_holes=False)
        try:
            open_checkpoint(str(folder / "new.ckpt"))
        except CheckpointError:
            return False
        return True

    syncs = [index for index, (name, *_) in enumerate(journal.entries) if name == "fsync"]
    for lost in (None, *syncs):
        disk = copy.deepcopy(before)
        for index, entry in enumerate(journal.entries):
            if index != lost:
                disk.play(*entry)
        assert is_there(disk, tmp_path / str(lost)) == (lost is None), journal.entries[lost or 0]
