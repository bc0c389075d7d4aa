"""Loggers that write into a folder per run: how they claim and share it, and its files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import fsspec
import yaml

from trainwright.distributed.environment import Environment
from trainwright.errors import a_type_of
from trainwright.faults.failing_loggers import END_SECONDS, FLUSH_SECONDS, BackgroundWriter, outlived
from trainwright.faults.remote_calls import is_outage
from trainwright.history import CURVES_NAME, History
from trainwright.loggers.base import Logger, Params, RunResult, to_dict, to_json, to_numbers
from trainwright.loggers.files import (
    HPARAMS_NAME,
    HPARAMS_YAML,
    claim_folder,
    filesystem_of,
    flush_at_exit,
    is_local,
    next_number,
    run_numbers,
    write_file,
)
from trainwright.loggers.run_record import LOOP, RunRecorder
from trainwright.paths import absolute

LONGEST_WAIT_SECONDS = 10.0
"""The longest time for which a row is buffered."""
Row = dict[str, Any]


class FolderLogger(Logger):
    """Base of the loggers that write into `<save_dir>/<name>/version_<n>`. The name may be empty.

    Up to `rows_at_once` rows are buffered, and a thread writes them. `flush` waits for the thread. Without a Trainer or an
    Accelerator, which call `flush`, the thread gets every row at once. The remaining rows are written when the process ends.
    A subclass writes the rows (`_write_rows`) and names its kind of file (`kind`). Loggers of different kinds may share a
    folder.
    """

    kind = ""
    num_missing = 0
    """The rows that are lost, or not written yet after a failure."""

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None,
        name: str | None,
        version: int | str | None,
        prefix: str,
        rows_at_once: int,
    ) -> None:
        kind = type(self).__name__
        if not isinstance(save_dir, (str, os.PathLike, type(None))):
            raise TypeError(f"{kind}(save_dir={save_dir!r}) is {a_type_of(save_dir)}; expected a path, a URL or None.")
        if version is not None and (isinstance(version, bool) or not isinstance(version, (int, str))):
            raise TypeError(f"{kind}(version={version!r}) is {a_type_of(version)}; expected int, str or None.")
        self.save_dir: str = absolute(save_dir or ".")
        self._follows_root = save_dir is None
        self.name: str = name or ""
        self._version = version
        absolute(f"{self.name}/{version}")  # ValueError for an impossible name
        self._is_given = version is not None
        self.prefix = prefix
        self._rows_at_once = rows_at_once
        self._folder: str | None = None
        self._has_started = False
        self._has_owner = False
        """Whether a Trainer or an Accelerator has this logger, and flushes it at the end of an epoch or run."""
        self._rows: list[Row] = []
        self._hparams: dict[str, Any] = {}
        self._hparams_digest = ""
        """The digest of the hyper-parameters that this run has written, also before a resume."""
        self._writes_hparams = True
        self._is_writer = True
        self._is_new = False
        self._is_first_here = False
        """Whether this is the logger's first run in a folder that an earlier run may have written to."""
        self._step, self._has_rows = 0, False
        self._epoch: int | None = None
        self._written_at = 0.0
        self._writer = BackgroundWriter()
        self._record = RunRecorder()
        flush_at_exit(self)
        self._is_resumed = False
        self._position: dict[str, Any] = {}
        """The position in the checkpoint of a resumed run. It is empty once the first row is written."""

    @classmethod
    def of_project(cls, project: str, save_dir: str | None, /, **options: Any) -> Self:
        return cls(**{"save_dir": save_dir, "name": project, **options})

    @property
    def root_dir(self) -> str:  # type: ignore[override]
        """Return the folder of all runs, including the name."""
        root = self.save_dir if self.save_dir.endswith("/") else f"{self.save_dir}/"
        return f"{root}{self.name}".rstrip("/") if self.name else root.removesuffix("/")

    def use_root(self, root: str) -> None:
        """Belong to a trainer from now on, and write into its default_root_dir if there is no save_dir."""
        self._has_owner = True
        if self._follows_root and self._folder is None:
            self.save_dir = root

    @property
    def version(self) -> int | str | None:  # type: ignore[override]
        """Return the version of this run, or of the next one unless another run comes first."""
        if self._version is not None or self._has_started:
            return self._version
        return next_number(*filesystem_of(self.root_dir))

    @property
    def log_dir(self) -> str | None:  # type: ignore[override]
        """Return the folder of this run, or of the next one unless another run comes first."""
        if self._folder is not None:
            return self.log_dir_in(self._folder)
        version = self.version
        return None if self._has_started or version is None else self.log_dir_in(self.folder_of(version))

    def folder_of(self, version: int | str) -> str:
        return f"{self.root_dir}/{f'version_{version}' if isinstance(version, int) else version}"

    @property
    def has_version(self) -> bool:
        """Return whether the version is known, from the constructor or from a run that has begun."""
        return self._version is not None

    def run_folders(self) -> list[str]:
        """Return the folders of the runs that this one may resume: its current folder, then the highest number first.

        Rows may have been logged before the fit, into a folder that has no checkpoint yet.
        """
        current = self._folder or (None if self._version is None else self.folder_of(self._version))
        if current is not None and self._is_given:
            return [current]
        filesystem, inside = filesystem_of(self.root_dir)
        others = [self.folder_of(number) for number in sorted(run_numbers(filesystem, inside), reverse=True)]
        return others if current is None else list(dict.fromkeys([current, *others]))

    def log_dir_in(self, folder: str) -> str:
        """Return the `log_dir` of a run in this folder."""
        return folder

    def state_dict(self) -> dict[str, Any]:
        """Write the buffered rows, and return the run's folder and the position in its files."""
        if self._folder is None or not self._is_writer:
            return {}
        inside = fsspec.core.url_to_fs(self._folder)[1]
        return {"folder": inside, "version": self._version, "hparams": self._hparams_digest, **self._written()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._folder is not None and not self._is_given and self._version != state["version"]:
            self._leave_run()  # it has another run, or rows that were logged by hand
        if self._folder is None and self._version is None:
            self._version, self._is_resumed = state["version"], True
        self._position, self._hparams_digest = dict(state), str(state.get("hparams", ""))
        self._is_continued = True

    def _leave_run(self) -> None:
        self.flush()
        self._folder, self._has_started, self._is_resumed = None, False, False
        self._version = self._version if self._is_given else None
        self._position, self._hparams, self._hparams_digest = {}, {}, ""
        self._step, self._has_rows, self._epoch = 0, False, None

    def drop_later_rows(self) -> None:
        """Drop all rows after the checkpoint that the run resumes from, since the run writes them again."""

    def _written(self) -> dict[str, Any]:
        """Write the buffered rows, and return the position in the files."""
        outlived(self, "flush")
        return {}

    def start(self, agreed: Callable[[str], str], *, is_writer: bool) -> None:
        self.save_dir = agreed(self.save_dir)  # working directories may differ by rank
        self._adopt(agreed)
        self._start(agreed, is_writer, None)
        self._begin_record(LOOP)

    def _start_alone(self) -> None:
        """Begin a run folder for logging by hand, without a Trainer's run."""
        if self._folder is None and not self._has_started:
            self._start(str, Environment.detect().rank == 0, None)
            self._begin_record(LOOP)

    def _adopt(self, agreed: Callable[[str], str]) -> None:
        """Belong to the caller from now on, and use a folder that rank 0 has begun by hand. Collective."""
        self._has_owner = True
        if (folder := agreed(self._folder or "")) and self._folder is None:
            self._set_folder(folder)

    def _set_folder(self, folder: str) -> None:
        self._folder = folder
        if self._version is None:
            folder = folder[len(self.root_dir) + 1 :]
            number = re.fullmatch(r"version_(\d+)", folder)
            self._version = int(number[1]) if number else folder
        self._written_at = time.monotonic()

    def _start(self, agreed: Callable[[str], str], is_writer: bool, shared: str | None) -> None:
        """Continue in this logger's folder, join the `shared` folder, or claim a new one. Collective."""
        self._has_started = True
        self._is_writer = is_writer
        if self._folder is not None:
            self._is_resumed = self._is_new = False
            return  # a test after a fit continues in its folder
        self._is_new = self._version is None
        self._is_first_here = self._version is not None and not self._is_resumed
        folder = shared or agreed(claim_folder(self.root_dir, self._version) if is_writer else "")
        if not folder:
            return  # a rank of a raw loop that does not write, and does not know rank 0's folder
        self._writes_hparams = shared is None  # of a shared folder, only the first logger
        self._set_folder(folder)

    def _begin_record(self, call: str) -> None:
        if self._is_writer and self._folder is not None and self._writes_hparams:
            continues = not self._is_first_here or bool(self._position)
            if work := self._record.begin(self._folder, call, continues=continues):
                self._writer.submit(work)

    def log_texts(self, values: Mapping[str, str], step: int | None = None) -> bool:
        """Write texts by name, and return whether this logger can. A raw loop calls it on rank 0."""
        return False

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add a row, which is written soon or by the next `flush`."""
        if not self._is_writer:
            return
        self._step, self._has_rows = self._step if step is None else step, True
        step, epoch = self._step, metrics.get("epoch")
        self._epoch = epoch if type(epoch) is int else self._epoch
        self._add_row({"step": step, **to_numbers(metrics, self.prefix)})
        is_due = len(self._rows) > self._rows_at_once or time.monotonic() - self._written_at > LONGEST_WAIT_SECONDS
        if not self._has_owner:
            self._start_alone()
            is_due = is_due or is_local(str(self._folder))  # an object store takes whole files only
        elif self._folder is None:
            flush_at_exit(self, keep=True)
        if is_due:
            self._submit_rows()
        if self._writer.has_failed and self._has_owner:
            outlived(self, "flush")

    def _add_row(self, row: Row) -> None:
        self._rows.append(row)

    def log_hyperparams(self, params: Params | None = None, metrics: Mapping[str, Any] | float | None = None) -> None:
        """Add hyper-parameters to `hparams.json` and `hparams.yaml`."""
        if self._is_writer:
            self._hparams.update(to_dict(params or {}))
            self._submit_hparams()
            if self._folder is None:
                flush_at_exit(self, keep=True)

    def save(self) -> None:
        """Write the buffered rows."""
        self.flush()

    def flush(self, seconds: float = FLUSH_SECONDS) -> None:
        """Write the buffered rows and wait for the thread; OSError if it cannot write, or not within this time."""
        if self._is_writer and (self._rows or self._hparams):
            self._start_alone()
        if self._folder is None or not self._is_writer:
            return
        self._submit_hparams()
        self._submit_rows()
        self._submit_flush()
        self._wait(seconds)

    def _wait(self, seconds: float = FLUSH_SECONDS) -> None:
        try:
            self._writer.wait(seconds)
        except Exception as error:  # the writers of other libraries raise other types
            self._hparams_digest = ""  # written again by the next flush
            if not is_outage(error):
                raise
            raise OSError(
                f"{type(self).__name__} could not write to {self.log_dir}: {type(error).__name__}: {error}. Free space "
                "there, or pass the logger another save_dir."
            ) from error

    def history(self, most_bytes: int | None = None) -> History:
        """Return the rows of this run so far. Longer files than `most_bytes` are skipped or thinned evenly."""
        from trainwright.loggers.run_files import read_history

        if self._folder is None:
            return History("", {})
        return read_history(self._folder, kind=self.kind, log_dir=self.log_dir, most_bytes=most_bytes)

    def plot(self, path: str | os.PathLike[str] | None = None, metrics: Sequence[str] | None = None) -> str:
        """Draw the curves of this run so far on rank 0, and return the path of the file.

        The path ends in `.html`, and the page is self-contained. The default is `curves.html` in `log_dir`. `metrics` chooses
        some of the run's metrics by name.
        """
        self.flush()
        if self._is_writer and self._folder is None:
            raise RuntimeError(f"{type(self).__name__}.plot() was called before anything was logged. Call it later.")
        target = absolute(path) if path is not None else f"{self.log_dir or self.root_dir}/{CURVES_NAME}"
        if self._is_writer and self._folder is not None:
            write_file(target, self.history().draw(target, metrics))
        return target

    def note_checkpoint(self, path: str) -> None:
        """Add the folder of a checkpoint to the run's record, by which a resumed run knows it."""
        if work := self._record.note_checkpoints(path.rstrip("/").rpartition("/")[0]):
            self._writer.submit(work)

    def finalize(self, status: RunResult) -> None:
        """Write the buffered rows, and the result into the run's record."""
        try:
            self.flush(END_SECONDS)
        finally:
            self._has_owner = False
            step = self._step if self._has_rows else None
            if self._is_writer and (work := self._record.end(status, step, self._epoch)):
                self._writer.submit(work)
                self._wait()

    def _submit_rows(self) -> None:
        if self._rows and self._folder is not None:
            rows, self._rows = self._rows, []
            self._written_at = time.monotonic()
            self._writer.submit(lambda: self._write_rows(rows))
            if not self._has_owner:
                self._submit_flush()

    def _submit_hparams(self) -> None:
        if not self._hparams or self._folder is None:
            return
        plain = to_json(self._hparams)
        data, path = f"{json.dumps(plain, indent=2)}\n".encode(), f"{self.log_dir}/{HPARAMS_NAME}"
        text, text_path = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), f"{self.log_dir}/{HPARAMS_YAML}"
        if (digest := hashlib.sha256(data).hexdigest()) != self._hparams_digest:
            self._hparams_digest = digest
            if self._writes_hparams:
                self._writer.submit(lambda: write_file(path, data))
                self._writer.submit(lambda: write_file(text_path, text.encode()))
            self._on_hparams(dict(self._hparams))

    def _submit_flush(self) -> None:
        pass

    def _on_hparams(self, params: dict[str, Any]) -> None:
        pass

    def _write_rows(self, rows: list[Row]) -> None:
        raise NotImplementedError


def start_loggers(loggers: Sequence[Logger], agreed: Callable[..., str], *, is_writer: bool, call: str = LOOP) -> None:
    """Start the loggers of a trainer. Collective.

    Loggers of different kinds with the same save_dir and name share a folder. The runs' records contain `call`, such as "fit".

    Raises:
        ValueError: two loggers of the same kind would write into one folder.
    """
    started: list[FolderLogger] = []
    for logger in loggers:
        if not isinstance(logger, FolderLogger):
            logger.start(agreed, is_writer=is_writer)
            continue
        logger.save_dir = agreed(logger.save_dir)  # before folders are compared: working directories may differ by rank
        logger._adopt(agreed)
        taken = {other._folder for other in started if other.kind == logger.kind}
        free = [other._folder for other in started if other.root_dir == logger.root_dir and other._folder not in taken]
        if logger._is_resumed and logger._version is not None:
            free = [folder for folder in free if folder == logger.folder_of(logger._version)]
        joins = free and (logger._version is None or logger._is_resumed)
        logger._start(agreed, is_writer, free[0] if joins else None)
        if logger._folder is not None and logger._folder in taken:
            raise ValueError(
                f"logger= contains two {type(logger).__name__} that write to {logger._folder}. Remove one of them, or pass "
                "different names or versions."
            )
        started.append(logger)
    for logger in started:
        logger._begin_record(call)


def withdraw_loggers(loggers: Sequence[Logger], is_alone: bool) -> None:
    """Remove the folders of a run that was rejected before its start, unless they contain other files.

    In a job of several processes, which cannot agree after a failure, this only restores the records. The folder of a run that
    was to be resumed stays, and the logger's next run gets a new one.
    """
    folder_loggers = [logger for logger in loggers if isinstance(logger, FolderLogger)]
    for logger in folder_loggers:
        logger._record.withdraw()
    for logger in folder_loggers if is_alone else ():
        if logger._is_resumed:
            logger._folder, logger._version, logger._is_resumed, logger._position = None, None, False, {}
            logger._has_started = False
        elif logger._is_new and logger._folder is not None and _remove_unused(logger._folder, bool(logger.name)):
            logger._folder = logger._version = None
            logger._hparams_digest, logger._has_started = "", False


def _remove_unused(folder: str, has_name: bool) -> bool:
    """Remove a run's folder and the empty folder of its name; return False if it contains other files."""
    inside = fsspec.core.url_to_fs(folder)[1]
    if not is_local(folder):
        return False
    if not os.path.isdir(inside):
        return True  # it was removed for another logger
    files = set(os.listdir(inside))
    if not files <= {HPARAMS_NAME, HPARAMS_YAML}:
        return False
    for name in files:
        os.unlink(f"{inside}/{name}")
    os.rmdir(inside)
    if has_name:
        with contextlib.suppress(OSError):  # it contains other runs
            os.rmdir(os.path.dirname(inside))
    return True
