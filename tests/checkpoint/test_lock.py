"""The lock of a folder: one process has it, whoever dies gives it back, and nothing of it stays."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from deadlines import deadline, wait_until

from trainwright.checkpoint import lock
from trainwright.checkpoint.lock import LOCK_NAME, lock_folder
from trainwright.errors import CheckpointError
from trainwright.paths import process_start_time


def forked(work: Callable[[], object]) -> int:
    """Start a process that does the work. It ends with 0, with 3 if the lock is refused, or with 1 for other errors."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except CheckpointError:
        code = 3
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def holding(folder: Path, seconds: float = 600.0) -> Callable[[], None]:
    """Return work that takes the lock, says so in a file beside the folder, and keeps it."""

    def work() -> None:
        lock = lock_folder(str(folder))
        Path(f"{folder}-{os.getpid()}").touch()
        time.sleep(seconds)
        lock.release()

    return work


def wait_for(path: Path) -> None:
    wait_until(path.exists)


def test_the_same_process_may_hold_it_several_times(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    first, second = lock_folder(str(folder)), lock_folder(f"{tmp_path}/run/../run/checkpoints/")
    holder = json.loads(subprocess.check_output(["cat", folder / ".lock"]))  # this process would lose the lock
    assert (holder["pid"], holder["host"]) == (os.getpid(), socket.gethostname())
    first.release()
    first.release()
    assert ended(forked(lambda: lock_folder(str(folder)))) == 3  # the second one holds it still
    assert ended(forked(second.release)) == 0
    assert ended(forked(lambda: lock_folder(str(folder)))) == 3  # a forked child gives nothing back
    second.release()
    assert os.listdir(tmp_path) == []  # with the directories that were made for it
    folder.mkdir(parents=True)
    (folder / "a.ckpt").mkdir()
    lock_folder(str(folder)).release()
    assert os.listdir(folder) == ["a.ckpt"]


def test_who_is_refused_learns_who_holds_it_and_a_dead_one_gives_it_back(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    pid = forked(holding(folder))
    wait_for(Path(f"{folder}-{pid}"))
    said = (
        rf"{folder} is in use by another run: process {pid} on {socket.gethostname()}, since 20\S+ \S+ UTC\. Wait until"
    )
    for _ in range(2):
        with pytest.raises(CheckpointError, match=said):
            lock_folder(str(folder))
    os.kill(pid, signal.SIGKILL)
    assert ended(pid) == -signal.SIGKILL
    lock = lock_folder(str(folder))  # at once
    assert ended(forked(lambda: lock_folder(str(folder)))) == 3
    lock.release()
    assert not folder.exists() or os.listdir(folder) == []


@pytest.mark.parametrize("pairs", [12, pytest.param(40, marks=pytest.mark.slow)])
def test_of_two_that_start_together_one_has_it(tmp_path: Path, pairs: int) -> None:
    """Pairs start 0 to 200 ms apart. Then the holder is killed."""
    draw = random.Random(1)
    folder = tmp_path / "kept"
    for attempt in range(pairs):
        pids = [forked(holding(folder))]
        time.sleep(draw.choice([0.0, 0.001, 0.01, 0.2]))
        pids.append(forked(holding(folder)))
        pid, status = os.waitpid(-1, 0)
        assert (pid in pids, os.waitstatus_to_exitcode(status)) == (True, 3), attempt
        (winner,) = (each for each in pids if each != pid)
        wait_for(Path(f"{folder}-{winner}"))
        assert not Path(f"{folder}-{pid}").exists()
        assert ended(forked(lambda: lock_folder(str(folder)))) == 3
        os.kill(winner, signal.SIGKILL)
        assert ended(winner) == -signal.SIGKILL
    lock_folder(str(folder)).release()
    assert not folder.exists() or os.listdir(folder) == []


def test_an_unwritable_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file cannot be written: .*Give ModelCheckpoint a dirpath"):
        lock_folder(str(tmp_path / "file"))


def test_a_remote_folder_names_its_holder() -> None:
    files = fsspec.filesystem("memory")
    locks = [lock_folder("memory://lock/checkpoints") for _ in range(2)]
    holder = json.loads(files.cat_file("/lock/checkpoints/.lock"))
    for each in locks:
        assert files.exists("/lock/checkpoints/.lock")
        each.release()
    assert not files.exists("/lock/checkpoints/.lock")
    files.pipe_file("/lock/checkpoints/.lock", json.dumps({**holder, "machine": "other", "host": "far"}).encode())
    with pytest.warns(
        UserWarning, match=rf"has not been released by process {os.getpid()} on far, since .* stop one of"
    ):
        lock_folder("memory://lock/checkpoints").release()
    files.pipe_file(
        "/lock/checkpoints/.lock", json.dumps({**holder, "pid": 1, "start": process_start_time(1)}).encode()
    )
    with pytest.raises(CheckpointError, match="in use by another run: process 1 on"):
        lock_folder("memory://lock/checkpoints")
    files.pipe_file("/lock/checkpoints/.lock", json.dumps({**holder, "start": "1"}).encode())
    lock_folder("memory://lock/checkpoints").release()


def test_a_holder_that_has_just_begun_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is written right after the lock is acquired. A process that comes between waits for it."""
    code = """
import fcntl, os, sys, time
from trainwright.checkpoint import lock
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.lockf(descriptor, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.readline()
time.sleep(0.05)
lock._write(descriptor)
sys.stdin.readline()
"""
    monkeypatch.setattr(lock, "NAMED_SECONDS", deadline(60.0))
    monkeypatch.setattr(lock, "ATTEMPTS", 10_000)
    command = [sys.executable, "-c", code, str(tmp_path / LOCK_NAME)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        holder.stdin.write("\n")
        holder.stdin.flush()
        with pytest.raises(CheckpointError, match=f"in use by another run: process {holder.pid} on "):
            lock_folder(str(tmp_path))
        holder.stdin.write("\n")
