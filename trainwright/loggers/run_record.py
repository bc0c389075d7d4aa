"""The record of a run in its folder: its result, its times, and the process that wrote it.

A folder logger writes `trainwright_run.json` at the start and end of a run. A killed run leaves "running" and its process, so
that a reader on the same machine can see whether the process is alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import warnings
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple, get_args

import fsspec

from trainwright.faults.failing_loggers import Work
from trainwright.loggers.base import RunResult
from trainwright.loggers.files import filesystem_of, is_local, write_file
from trainwright.paths import absolute, is_process_alive, machine, process_start_time

__all__ = ["RECORD_NAME", "RunRecord", "RunState", "find_record"]

RECORD_NAME = "trainwright_run.json"
RUNNING = "running"
FIT, LOOP = "fit", "loop"
"""The call of a run: a Trainer's fit (other calls have their names), or a loop that logs by hand."""
RESULTS: dict[str, str] = {"success": "finished", "interrupted": "stopped", "failed": "failed"}
"""The states that `trainwright runs` shows, by the result in the record's file."""
LONGEST_RECORD = 1 << 20


class RunState(NamedTuple):
    """A run's state (finished, stopped, failed, running, ended or unknown), and a remark or ""."""

    word: str
    remark: str = ""


@dataclass(frozen=True)
class RunRecord:
    """The content of the file. Times are in UTC, in ISO's format."""

    call: str
    status: str
    began: str
    ended: str | None = None
    resumed: str | None = None
    """The latest time at which another call or process continued the run."""
    step: int | None = None
    """The step of the latest row at the run's end."""
    epoch: int | None = None
    """The latest trained epoch, counted from 0."""
    folder: str = ""
    """The run's folder at the time of writing."""
    checkpoints: tuple[str, ...] = ()
    """The folders of its checkpoints. Folders inside the run's folder are relative to it."""
    host: str = ""
    machine: str = ""
    pid: int = 0
    process_start: str = ""

    @classmethod
    def parse(cls, data: bytes) -> RunRecord | None:
        """Return the record in a file's bytes, or None if they contain no record."""
        try:
            content = json.loads(data)
            values = {field.name: content[field.name] for field in fields(cls) if field.name in content}
            record = cls(**{**values, "checkpoints": tuple(values.get("checkpoints", ()))})
            times = [time for time in (record.began, record.ended, record.resumed) if time is not None]
            texts = [record.call, record.folder, record.host, record.machine, record.process_start, *record.checkpoints]
            numbers = [record.pid, *(number for number in (record.step, record.epoch) if number is not None)]
            has_types = {str} == {type(text) for text in (*texts, *times)} and {int} == {type(each) for each in numbers}
            for time in times:
                datetime.fromisoformat(time)
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        return record if has_types and record.status in (RUNNING, *get_args(RunResult)) else None

    @property
    def state(self) -> RunState:
        """Return the run's state. If it was running on this machine, the state depends on its process."""
        if self.status != RUNNING:
            return RunState(RESULTS[self.status])
        if self.machine != machine():
            return RunState(RUNNING, f"on {self.host or 'another machine'}, as far as this one can see")
        if is_process_alive(self.pid, self.process_start):
            return RunState(RUNNING)
        if self.call == LOOP:  # a loop need not report its result
            return RunState("ended", "its process is gone, and did not report a result")
        return RunState("failed", "its process is gone")

    def checkpoint_folders(self, folder: str) -> tuple[str, ...]:
        """Return the folders of its checkpoints, if the run is in `folder` now."""
        places = ((place, f"{folder}/{place}".removesuffix("/.")) for place in self.checkpoints)
        return tuple(place if absolute(place) == place else inside for place, inside in places)

    def to_bytes(self) -> bytes:
        return f"{json.dumps(asdict(self), indent=2)}\n".encode()


class FoundRecord(NamedTuple):
    """The record in a run folder, the bytes of its file, and a problem of the file or ""."""

    record: RunRecord | None = None
    data: bytes | None = None
    problem: str = ""


def find_record(folder: str) -> FoundRecord:
    """Look for the record of a run folder."""
    path = f"{folder}/{RECORD_NAME}"
    try:
        filesystem, inside = filesystem_of(path)
        if not filesystem.exists(inside):
            return FoundRecord()
        if not filesystem.isfile(inside):  # a pipe would block
            return FoundRecord(problem=f"{path} is not a file")
        with filesystem.open(inside, "rb") as file:
            data = bytes(file.read(LONGEST_RECORD))
    except OSError as error:
        return FoundRecord(problem=f"{path} cannot be read ({error})")
    record = RunRecord.parse(data)
    problem = "is empty" if not data.strip() else "is not the record of a run"
    return FoundRecord(record, data, f"{path} {problem}" if record is None else "")


class RunRecorder:
    """Updates the record of a logger's run. Its methods return the work of writing it, for the logger's thread.

    A failed write is one warning, since no run depends on the record.
    """

    def __init__(self) -> None:
        self._folder = ""
        self._record: RunRecord | None = None
        self._finished: RunRecord | None = None
        """The record of the finished fit that this call continues."""
        self._before: bytes | None = None
        """The file before the latest call that has changed it."""
        self._may_withdraw = False
        self._has_warned = False

    def begin(self, folder: str, call: str, *, continues: bool) -> Work | None:
        """Begin the record of a call, or return None if the record of a training stays.

        If the run `continues` the run in the folder, the record keeps its start and its checkpoints.
        """
        self._folder, self._record, self._finished = folder, None, None
        earlier, data, problem = find_record(folder)
        if problem and (data is None or data.strip()):
            self._warn(f"{problem}, and stays as it is. Move it away")
            return None
        is_training = call in (FIT, LOOP)
        was_training = earlier is not None and earlier.call in (FIT, LOOP)
        if earlier is not None and earlier.call == FIT and not is_training:
            return None  # a test after a training does not change its result
        self._before = data
        pid, now = os.getpid(), _now()
        host, place, start = socket.gethostname(), machine(), process_start_time(pid)
        record = RunRecord(
            call, RUNNING, began=now, folder=folder, host=host, machine=place, pid=pid, process_start=start
        )
        if earlier is not None and continues and (was_training or not is_training):
            kept = {name: getattr(earlier, name) for name in ("began", "step", "epoch", "checkpoints")}
            record = replace(record, resumed=now, **kept)
            self._finished = earlier if (earlier.call, earlier.status) == (FIT, "success") else None
        self._record = record
        return self._writing()

    def note_checkpoints(self, folder: str) -> Work | None:
        """Record a folder of checkpoints, or return None if the record has it."""
        folder = "." if folder == self._folder else folder.removeprefix(f"{self._folder}/")
        if self._record is None or not folder or folder in self._record.checkpoints:
            return None
        self._record = replace(self._record, checkpoints=(*self._record.checkpoints, folder))
        return self._writing()

    def end(self, status: RunResult, step: int | None, epoch: int | None) -> Work | None:
        """Record the result, the latest step and epoch, or return None if no record was begun."""
        self._may_withdraw = self._record is not None and status != "success"
        if self._record is None:
            return None
        step, epoch = self._record.step if step is None else step, self._record.epoch if epoch is None else epoch
        record, before = replace(self._record, status=status, ended=_now(), step=step, epoch=epoch), self._finished
        if before is not None and (status, step, epoch) == ("success", before.step, before.epoch):
            # Nothing was left to train.
            record = replace(record, ended=before.ended, resumed=before.resumed)
        self._record = record
        work, self._record = self._writing(), None
        return work

    def withdraw(self) -> None:
        """Restore the file after a rejected call."""
        if not self._may_withdraw:
            return
        self._may_withdraw = False
        if self._before is not None:
            self._write(self._folder, self._before)
        else:
            filesystem, inside = filesystem_of(f"{self._folder}/{RECORD_NAME}")
            with contextlib.suppress(OSError):  # it was perhaps never written
                filesystem.rm_file(inside)

    def _writing(self) -> Work:
        assert self._record is not None
        folder, data = self._folder, self._record.to_bytes()
        return lambda: self._write(folder, data)

    def _write(self, folder: str, data: bytes) -> None:
        if is_local(folder) and not os.path.isdir(fsspec.core.url_to_fs(folder)[1]):
            return  # it was moved away, and is not created again for a record
        try:
            write_file(f"{folder}/{RECORD_NAME}", data)
        except Exception as error:  # file systems raise errors of any type
            self._warn(f"{folder}/{RECORD_NAME} cannot be written ({type(error).__name__}: {error})")

    def _warn(self, problem: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{problem}. `trainwright runs` will not know the result of this run.", stacklevel=2)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_record": None, "_may_withdraw": False}  # a copy has not begun anything


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
