"""The record of a run in its folder: what became of it, when, and which process wrote it.

A folder logger writes `trainwright_run.json` at the start and at the end of a run. A run that was killed leaves "running" with
the process that wrote it, so that a reader on the same machine can see whether it still lives.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple, get_args

import fsspec

from trainwright.loggers.base import RunResult
from trainwright.loggers.files import is_local, write_file
from trainwright.paths import absolute, is_process_alive, machine, process_start_time

__all__ = ["RunRecord", "RunState", "find_record", "read_record"]

RECORD_NAME = "trainwright_run.json"
RUNNING = "running"
FIT, LOOP = "fit", "loop"
"""What made a run: a Trainer's fit (other calls of it have their own names), or a loop that logs by itself."""
RESULTS: dict[str, str] = {"success": "finished", "interrupted": "stopped", "failed": "failed"}
"""The words in which users read how a run ended, by the result that its logger got: the record's file holds the result,
`trainwright runs` shows the state."""
LONGEST_RECORD = 1 << 20
Work = Callable[[], None]


class RunState(NamedTuple):
    """A run's state in a word (finished, stopped, failed, running, ended or unknown), and a remark or ""."""

    word: str
    remark: str = ""


@dataclass(frozen=True)
class RunRecord:
    """What the file holds; times are those of UTC, in ISO's format."""

    call: str
    status: str
    began: str
    ended: str | None = None
    resumed: str | None = None
    """When a later call, or another process, last continued the run."""
    step: int | None = None
    """The step of the latest row at the run's end."""
    epoch: int | None = None
    """The latest epoch that was trained, which counts from 0."""
    folder: str = ""
    """The run's folder when it wrote this."""
    checkpoints: tuple[str, ...] = ()
    """The folders that its checkpoints were saved to; those within the run's are relative to it."""
    host: str = ""
    machine: str = ""
    pid: int = 0
    process_start: str = ""

    @classmethod
    def parse(cls, data: bytes) -> RunRecord | None:
        """Return the record in a file's bytes; None if they are none."""
        try:
            found = json.loads(data)
            values = {each.name: found[each.name] for each in fields(cls) if each.name in found}
            made = cls(**{**values, "checkpoints": tuple(values.get("checkpoints", ()))})
            texts = (made.call, made.status, made.began, made.folder, made.host, made.machine, made.process_start)
            optional = [each for each in (made.ended, made.resumed) if each is not None]
            numbers = [made.pid, *(each for each in (made.step, made.epoch) if each is not None)]
            is_ours = all(type(each) is str for each in (*texts, *optional, *made.checkpoints)) and all(
                type(each) is int for each in numbers
            )
            for moment in (made.began, *optional):
                datetime.fromisoformat(moment)
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        return made if is_ours and made.status in (RUNNING, *get_args(RunResult)) else None

    @property
    def state(self) -> RunState:
        """Return the run's state; for one that says it is running, that of its process, if it was started on this machine."""
        if self.status != RUNNING:
            return RunState(RESULTS[self.status])
        if self.machine != machine():
            return RunState(RUNNING, f"on {self.host or 'another machine'}, as far as this one can see")
        if is_process_alive(self.pid, self.process_start):
            return RunState(RUNNING)
        if self.call == LOOP:  # which need not say how it ended
            return RunState("ended", "its process is gone, and did not say how the run ended")
        return RunState("failed", "its process is gone")

    def checkpoint_folders(self, folder: str) -> tuple[str, ...]:
        """Return the folders of its checkpoints, for a run that is in `folder` by now."""
        return tuple(
            each if absolute(each) == each else f"{folder}/{each}".removesuffix("/.") for each in self.checkpoints
        )

    def to_bytes(self) -> bytes:
        return f"{json.dumps(asdict(self), indent=2)}\n".encode()


class FoundRecord(NamedTuple):
    """What a run folder has under the name of its record: the record, the bytes of a file, and why they are not a record."""

    record: RunRecord | None = None
    data: bytes | None = None
    problem: str = ""


def find_record(folder: str) -> FoundRecord:
    """Look for the record of a run folder."""
    path = f"{folder}/{RECORD_NAME}"
    try:
        filesystem, inside = fsspec.core.url_to_fs(path)
        if not filesystem.exists(inside):
            return FoundRecord()
        if not filesystem.isfile(inside):  # a pipe would block
            return FoundRecord(problem=f"{path} is not a file")
        with filesystem.open(inside, "rb") as file:
            data = bytes(file.read(LONGEST_RECORD))
    except OSError as error:
        return FoundRecord(problem=f"{path} cannot be read ({error})")
    record = RunRecord.parse(data)
    what = "is empty" if not data.strip() else "is not the record of a run"
    return FoundRecord(record, data, f"{path} {what}" if record is None else "")


def read_record(folder: str) -> RunRecord | None:
    """Return the record of a run folder; None if it has none, or one that is damaged."""
    return find_record(folder).record


class RunRecorder:
    """Keeps the record of a logger's run; what it returns writes the file, and is run by the logger's thread.

    A record that cannot be written is one warning, since no run depends on it.
    """

    def __init__(self) -> None:
        self._folder = ""
        self._record: RunRecord | None = None
        self._before: bytes | None = None
        """The file as it was before the latest call that has changed it."""
        self._may_withdraw = False
        self._has_warned = False

    def begin(self, folder: str, call: str, *, continues: bool) -> Work | None:
        """Begin the record of a call; None if it leaves that of a training as it is.

        If the run `continues` the one in the folder, the record keeps when that began and where it saved.
        """
        self._folder, self._record = folder, None
        found = find_record(folder)
        earlier = found.record
        if found.problem and (found.data is None or found.data.strip()):
            self._warn(f"{found.problem}, and is left alone; move it away")
            return None
        is_training = call in (FIT, LOOP)
        if earlier is not None and earlier.call == FIT and not is_training:
            return None  # a test after a training does not change how that ended
        if not continues or (earlier is not None and is_training and earlier.call not in (FIT, LOOP)):
            earlier = None
        self._before = found.data
        pid, now = os.getpid(), _now()
        self._record = RunRecord(
            call,
            RUNNING,
            began=now if earlier is None else earlier.began,
            resumed=None if earlier is None else now,
            step=None if earlier is None else earlier.step,
            epoch=None if earlier is None else earlier.epoch,
            folder=folder,
            checkpoints=() if earlier is None else earlier.checkpoints,
            host=socket.gethostname(),
            machine=machine(),
            pid=pid,
            process_start=process_start_time(pid),
        )
        return self._writing()

    def note_checkpoints(self, folder: str) -> Work | None:
        """Note where checkpoints are saved; None if that is known."""
        folder = "." if folder == self._folder else folder.removeprefix(f"{self._folder}/")
        if self._record is None or not folder or folder in self._record.checkpoints:
            return None
        self._record = replace(self._record, checkpoints=(*self._record.checkpoints, folder))
        return self._writing()

    def end(self, status: RunResult, step: int | None, epoch: int | None) -> Work | None:
        """Note how the run ended, its latest row's step and its latest epoch, if any; None if nothing was begun."""
        self._may_withdraw = self._record is not None and status != "success"
        if self._record is None:
            return None
        self._record = replace(
            self._record,
            status=status,
            ended=_now(),
            step=self._record.step if step is None else step,
            epoch=self._record.epoch if epoch is None else epoch,
        )
        work, self._record = self._writing(), None
        return work

    def withdraw(self) -> None:
        """Leave the file as it was before a call that was refused, and has ended."""
        if not self._may_withdraw:
            return
        self._may_withdraw = False
        if self._before is not None:
            self._write(self._folder, self._before)
        else:
            filesystem, inside = fsspec.core.url_to_fs(f"{self._folder}/{RECORD_NAME}")
            with contextlib.suppress(OSError):  # what could not be written, perhaps
                filesystem.rm_file(inside)

    def _writing(self) -> Work:
        assert self._record is not None
        folder, data = self._folder, self._record.to_bytes()
        return lambda: self._write(folder, data)

    def _write(self, folder: str, data: bytes) -> None:
        if is_local(folder) and not os.path.isdir(fsspec.core.url_to_fs(folder)[1]):
            return  # it was moved away; the record alone does not bring it back
        try:
            write_file(f"{folder}/{RECORD_NAME}", data)
        except Exception as error:  # file systems raise errors of any type
            self._warn(f"{folder}/{RECORD_NAME} cannot be written ({type(error).__name__}: {error})")

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{what}. This run has no record of how it ends for `trainwright runs`.", stacklevel=2)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_record": None, "_may_withdraw": False}  # a copy has not begun anything


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
