"""The CSV logger: one folder a run, one row a moment in metrics.csv, the hyper-parameters in hparams.json."""

from __future__ import annotations

import csv
import io
import os
import warnings
from typing import Any, NoReturn

import fsspec

from trainwright.loggers.folder import FolderLogger, Row, is_local, write_file
from trainwright.paths import open_no_link


class CSVLogger(FolderLogger):
    """Writes `<save_dir>/<name>/version_<n>/metrics.csv` and `hparams.json`.

    The columns are step, epoch, then the metrics as they come; a new metric adds a column. Rows wait in memory and are
    written by a thread: when 100 wait, every ten seconds or so, at an epoch's end, and at the end of the run.

    Args:
        save_dir: a path or an fsspec URL; by default the trainer's default_root_dir.
        name: the folder of all runs.
        version: the run's own folder; by default version_<n> with the next n that is free.
        prefix: stands before the name of every metric, with a dash.
        flush_logs_every_n_steps: how many rows are written together.

    >>> logger = tw.CSVLogger("runs", name="digits")
    >>> tw.Trainer(logger=logger, max_epochs=1, enable_model_summary=False).fit(module, loader)
    >>> logger.metrics_path
    '...runs/digits/version_0/metrics.csv'
    """

    kind = "csv"

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
                f"flush_logs_every_n_steps={flush_logs_every_n_steps!r} is no int; give the number of rows."
            )
        if flush_logs_every_n_steps < 1:
            raise ValueError(f"flush_logs_every_n_steps={flush_logs_every_n_steps} must be at least 1.")
        super().__init__(save_dir, name, version, prefix, flush_logs_every_n_steps)
        self._file: MetricsFile | None = None

    @property
    def metrics_path(self) -> str:
        """Return the path of metrics.csv; RuntimeError before the run has begun."""
        if self.log_dir is None:
            raise RuntimeError("the CSV logger has no folder before trainer.fit, validate or test has begun.")
        return f"{self.log_dir}/metrics.csv"

    @property
    def experiment(self) -> NoReturn:
        """Not there: a table of numbers is all that this logger writes."""
        raise AttributeError(
            "CSVLogger has no experiment object: it keeps numbers only. For images, texts and histograms pass "
            "logger=TensorBoardLogger(...), or both in a list with that one first."
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._file = None  # the next one begins at that position

    def _written(self) -> dict[str, Any]:
        """Write what waits but the latest row, which may still get more: it goes into the checkpoint as it is."""
        self._take_open_row()
        self._flush(all_but=1)
        file = self._open()
        file.sync()
        return {"rows": file.num_rows, "open_row": dict(self._rows[-1]) if self._rows else {}}

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.sync()

    def drop_later_rows(self) -> None:
        self._take_open_row()
        self._open().cut()

    def _take_open_row(self) -> None:
        row = self._position.pop("open_row", None)
        if row:
            self._rows.insert(0, dict(row))

    def _add_row(self, row: Row) -> None:
        self._take_open_row()
        latest = self._rows[-1] if self._rows else {}
        is_same_moment = all(latest.get(name) == row.get(name) for name in ("step", "epoch"))
        if is_same_moment and not latest.keys() & (row.keys() - {"step", "epoch"}):
            latest.update(row)  # what training and validation say of one moment is one row
        else:
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


def set_aside(path: str) -> None:
    """Give the table of an earlier run another name: its rows are none of the run that begins."""
    filesystem, inside = fsspec.core.url_to_fs(path)
    if not filesystem.exists(inside):
        return
    number, stem = 0, inside.removesuffix(".csv")
    while filesystem.exists(f"{stem}-{number}.csv"):
        number += 1
    filesystem.mv(inside, f"{stem}-{number}.csv")
    warnings.warn(
        f"{path} is of an earlier run; it is kept as {stem}-{number}.csv, and this run begins a table of its own. Leave out "
        "version= for a folder of each run's own.",
        stacklevel=2,
    )


class MetricsFile:
    """A CSV file to which rows with any columns are added; it goes on with one that is there.

    Args:
        path: the file.
        keep: go on after so many rows: the first write drops what lies behind them, and leaves the columns. None keeps all.
    """

    def __init__(self, path: str, keep: int | None = None) -> None:
        self._path = path
        self._is_local = is_local(path)
        self._failed: list[Row] = []
        self._columns: list[str] = []
        self._text = ""
        """All that was written, where the place cannot append (object stores)."""
        text = self._read()
        self._is_whole = text.endswith("\n")
        """False where there is no file, its writer was killed amid a line, or rows are to go: write it anew."""
        rows: list[list[str]] = []
        if "\n" in text:
            self._columns, *rows = csv.reader(io.StringIO(text[: text.rindex("\n") + 1], newline=""))
            self._text = "" if self._is_local else text
        self.num_rows = len(rows)
        if keep is not None and keep != self.num_rows:
            if keep > self.num_rows:
                warnings.warn(
                    f"{path} has {self.num_rows} rows, but the checkpoint knows of {keep}; those that are missing cannot be "
                    "written again. Look for what has changed the file.",
                    stacklevel=2,
                )
            self.num_rows, self._is_whole = min(keep, self.num_rows), False

    def append(self, rows: list[Row]) -> None:
        """Append rows; where they bring new columns, write the file anew. Rows that fail come with the next ones."""
        rows = self._failed = self._failed + rows
        known = len(self._columns)
        columns = list(dict.fromkeys([*self._columns, *(name for row in rows for name in row)]))
        is_new = not self._is_whole or len(columns) > known
        earlier = list(csv.DictReader(io.StringIO(self._read(), newline="")))[: self.num_rows] if is_new else []
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore")
        if is_new:
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
        """Drop the rows behind those that were to be kept, if there are any."""
        if self._columns and not self._is_whole:
            self.append([])

    def sync(self) -> None:
        """Have a local file on the disk, not in the system's memory."""
        if self._is_local and self._is_whole:
            with open(self._local_path(), "rb") as file:
                os.fsync(file.fileno())

    def _append(self, data: bytes) -> None:
        with open(self._local_path(), "ab", buffering=0, opener=open_no_link) as file:
            end = file.tell()
            try:
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
            except OSError:
                file.truncate(end)  # half a row is none
                raise

    def _read(self) -> str:
        if self._text:
            return self._text
        try:
            with fsspec.open(self._path, "r", newline="", encoding="utf-8") as file:
                text: str = file.read()
                return text
        except FileNotFoundError:
            return ""

    def _local_path(self) -> str:
        path: str = fsspec.core.url_to_fs(self._path)[1]
        return path
