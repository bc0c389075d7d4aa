"""The CSV logger: a folder per run, with metrics.csv and hparams.json."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import warnings
from itertools import count
from typing import Any

import fsspec

from trainwright.arguments import refuses_unknown
from trainwright.distributed.environment import Environment
from trainwright.faults.failing_loggers import outlived
from trainwright.loggers.base import SilentExperiment
from trainwright.loggers.files import TABLE_NAME, filesystem_of, is_local, write_file
from trainwright.loggers.folder import FolderLogger, Row


class CSVLogger(FolderLogger):
    """Writes `<save_dir>/<name>/version_<n>/metrics.csv` and `hparams.json`.

    The columns are step, epoch, then the metrics in order of appearance. A new metric adds a column. Rows are buffered and
    written by a thread: every 100 rows, about every ten seconds, at an epoch's end, and at the end of the run.

    Args:
        save_dir: a path or an fsspec URL, by default the trainer's default_root_dir.
        name: the folder of all runs.
        version: the run's folder, by default version_<n> with the next free n.
        prefix: put before the name of every metric, with a dash.
        flush_logs_every_n_steps: the number of rows that are written together.

    Raises:
        TypeError, ValueError: a path, a version or a number of rows is not accepted.

    >>> logger = tw.CSVLogger("runs", name="digits")
    >>> tw.Trainer(logger=logger, max_epochs=1, enable_model_summary=False).fit(module, loader)
    >>> logger.metrics_path
    '...runs/digits/version_0/metrics.csv'
    """

    kind = "csv"

    @refuses_unknown
    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = "trainwright_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        if isinstance(flush_logs_every_n_steps, bool) or not isinstance(flush_logs_every_n_steps, int):
            raise TypeError(
                f"flush_logs_every_n_steps={flush_logs_every_n_steps!r} is not an int; pass the number of rows."
            )
        if flush_logs_every_n_steps < 1:
            raise ValueError(f"flush_logs_every_n_steps={flush_logs_every_n_steps} must be at least 1.")
        super().__init__(save_dir, name, version, prefix, flush_logs_every_n_steps)
        self._file: MetricsFile | None = None

    @property
    def metrics_path(self) -> str:
        """Return the path of metrics.csv."""
        return f"{self.log_dir}/{TABLE_NAME}"

    @property
    def experiment(self) -> Any:
        """Return the writer of rows and hyper-parameters, or on other ranks than 0 an object that does nothing."""
        is_writer = self._is_writer and Environment.detect().rank == 0
        return CSVExperiment(self) if is_writer else SilentExperiment()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._file = None  # the next one starts at that position

    def _leave_run(self) -> None:
        super()._leave_run()
        self._file = None

    def _written(self) -> dict[str, Any]:
        outlived(self, "flush")
        if self._file is None and self._writer.is_late:  # it may be about to open the file
            return {}
        file = self._open()
        file.sync()
        return {"rows": file.num_rows}

    @property
    def num_missing(self) -> int:  # type: ignore[override]
        return len(self._rows) + (self._file.num_failed if self._file is not None else 0)

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            with contextlib.suppress(FileNotFoundError):  # its folder was moved away since
                self._file.sync()

    def drop_later_rows(self) -> None:
        self._open().cut()

    def _add_row(self, row: Row) -> None:
        self._rows.append(row)

    def _write_rows(self, rows: list[Row]) -> None:
        self._open().append(rows)

    def _open(self) -> MetricsFile:
        if self._file is None:
            position, self._position = self._position, {}
            if self._is_first_here and "rows" not in position:
                set_aside(self.metrics_path)
            self._is_first_here = False
            self._file = MetricsFile(self.metrics_path, position.get("rows"))
        return self._file


class CSVExperiment:
    """Writes rows and hyper-parameters to the files of a CSVLogger, under Lightning's names."""

    NAMES = {"log_hparams": "log_hyperparams", "metrics_file_path": "metrics_path"} | {
        name: name for name in ("log_dir", "log_metrics", "save")
    }
    """The names, and the logger's attributes."""

    def __init__(self, logger: CSVLogger) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        if name in self.NAMES:
            return getattr(self._logger, self.NAMES[name])
        raise AttributeError(
            f"the experiment of a CSVLogger has no {name!r}: it only writes numbers. For images, texts and histograms pass "
            "logger=TensorBoardLogger(...), or a list of both with the TensorBoardLogger first."
        )


def set_aside(path: str) -> None:
    """Rename the table of an earlier run, so that its rows stay separate."""
    filesystem, inside = filesystem_of(path)
    if filesystem.exists(inside):
        names = (f"{inside.removesuffix('.csv')}-{number}.csv" for number in count())
        free = next(name for name in names if not filesystem.exists(name))
        filesystem.mv(inside, free)
        warnings.warn(
            f"{path} is from an earlier run. It is now {free}, and this run starts a new table. Omit version= to get a folder "
            "per run.",
            stacklevel=2,
        )


class MetricsFile:
    """A CSV file to which rows with any columns are added. It may exist already.

    With `keep` the first write drops all rows after the first `keep`, and the columns without a value in these rows.
    """

    def __init__(self, path: str, keep: int | None = None) -> None:
        self._path = path
        self._is_local = is_local(path)
        self._failed: list[Row] = []
        self._columns: list[str] = []
        self._text = ""
        """Everything written so far, if the file system cannot append (object stores)."""
        text = self._read()
        self._is_whole = text.endswith("\n")
        """False if the file must be rewritten: it is missing, ends within a line, or has rows to drop."""
        rows: list[list[str]] = []
        if "\n" in text:
            self._columns, *rows = csv.reader(io.StringIO(text[: text.rindex("\n") + 1], newline=""))
            self._text = "" if self._is_local else text
        if keep is not None and keep != len(rows):
            if keep > len(rows):
                warnings.warn(
                    f"{path} has {len(rows)} rows, but the checkpoint expects {keep}. Missing rows cannot be restored. Find "
                    "out which program changed the file.",
                    stacklevel=2,
                )
            rows, self._is_whole = rows[:keep], False
            # A column of a dropped row would come before columns that the resumed run adds earlier.
            used = {at for row in rows for at, value in enumerate(row) if value}
            self._columns = [name for at, name in enumerate(self._columns) if at in used]
        self.num_rows = len(rows)

    @property
    def num_failed(self) -> int:
        """Return the number of rows that are not written yet after a failure."""
        return len(self._failed)

    def append(self, rows: list[Row]) -> None:
        """Append rows, or rewrite the file if they have new columns. Failed rows are retried with the next ones."""
        rows = self._failed = self._failed + rows
        columns = list(dict.fromkeys([*self._columns, *(name for row in rows for name in row)]))
        is_new = not self._is_whole or len(columns) > len(self._columns)
        earlier = list(csv.DictReader(io.StringIO(self._read(), newline="")))[: self.num_rows] if is_new else []
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore")
        if is_new and columns:
            writer.writeheader()
        writer.writerows(earlier)
        writer.writerows(rows)
        if is_new or not self._is_local:
            whole = text.getvalue() if is_new else self._text + text.getvalue()
            write_file(self._path, whole.encode())
            self._text = "" if self._is_local else whole
        else:
            self._append(text.getvalue().encode())
        self._columns, self._is_whole, self._failed = columns, True, []
        self.num_rows += len(rows)

    def cut(self) -> None:
        """Drop the rows after the first `keep`."""
        if not self._is_whole and self._read():
            self.append([])

    def sync(self) -> None:
        """Sync a local file to disk."""
        if self._is_local and self._is_whole:
            with open(self._local_path(), "rb") as file:
                os.fsync(file.fileno())

    def _append(self, data: bytes) -> None:
        with open(self._local_path(), "ab", buffering=0) as file:
            end = file.tell()
            try:
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
            except OSError:
                file.truncate(end)  # no partial row
                raise

    def _read(self) -> str:
        if self._text:
            return self._text
        try:
            filesystem, inside = filesystem_of(self._path)
            return str(filesystem.cat_file(inside), "utf-8")
        except FileNotFoundError:
            return ""

    def _local_path(self) -> str:
        return str(fsspec.core.url_to_fs(self._path)[1])
