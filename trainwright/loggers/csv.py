"""The CSV logger: one folder a run, one row a moment in metrics.csv."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from typing import Any

import fsspec

from trainwright.loggers.base import Logger

BUFFERED_ROWS = 200


class CSVLogger(Logger):
    """Writes `<save_dir>/<name>/version_<n>/metrics.csv`.

    The columns are step, epoch, then the metrics as they come; a new metric adds a column. Rows wait in memory and are
    written at an epoch's end, every 200 rows, and at the end of the run.

    Args:
        save_dir: a path or an fsspec URL.
        name: the folder of all runs.
        version: the run's own folder; by default version_<n> with the first n that is free.
    """

    def __init__(self, save_dir: str = ".", name: str = "trainwright_logs", version: int | str | None = None) -> None:
        self.save_dir, self.name, self.version = str(save_dir), name, version
        self._rows: list[dict[str, float]] = []
        self._columns: list[str] = []
        self._filesystem: Any = None

    @property
    def metrics_path(self) -> str:
        """Return the path of metrics.csv; RuntimeError before the run has begun."""
        if self.log_dir is None:
            raise RuntimeError("the CSV logger has no folder before trainer.fit, validate or test has begun.")
        return f"{self.log_dir}/metrics.csv"

    def start(self, agreed: Callable[[str], str], *, is_writer: bool) -> None:
        if self.log_dir is not None:
            return
        root = f"{self.save_dir.rstrip('/')}/{self.name}"
        self._filesystem, _ = fsspec.core.url_to_fs(root)
        self.log_dir = agreed(self._claim(root) if is_writer else "")
        if is_writer and self._filesystem.exists(self._filesystem._strip_protocol(self.metrics_path)):
            with fsspec.open(self.metrics_path, "r", newline="") as file:
                self._columns = list(csv.DictReader(file).fieldnames or [])  # a run that goes on in its folder

    def _claim(self, root: str) -> str:
        """Make the run's folder and return its path; one that exists is another run's, unless its version was given."""
        self._filesystem.makedirs(self._filesystem._strip_protocol(root), exist_ok=True)
        if self.version is not None:
            folder = f"version_{self.version}" if isinstance(self.version, int) else self.version
            self._filesystem.makedirs(self._filesystem._strip_protocol(f"{root}/{folder}"), exist_ok=True)
            return f"{root}/{folder}"
        number = 0
        while True:
            path = f"{root}/version_{number}"
            try:
                self._filesystem.mkdir(self._filesystem._strip_protocol(path), create_parents=False)
                return path
            except FileExistsError:
                number += 1

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        row = {"step": step, **metrics}
        latest = self._rows[-1] if self._rows else {}
        is_same_moment = all(latest.get(name) == row.get(name) for name in ("step", "epoch"))
        if is_same_moment and not latest.keys() & (metrics.keys() - {"epoch"}):
            latest.update(row)  # what training and validation say of one moment is one row
            return
        self._rows.append(row)
        if len(self._rows) >= BUFFERED_ROWS:
            self.flush()

    def flush(self) -> None:
        """Append the waiting rows; where they bring new columns, write the file anew."""
        if not self._rows:
            return
        known = len(self._columns)
        self._columns += [
            name for name in dict.fromkeys(key for row in self._rows for key in row) if name not in self._columns
        ]
        earlier: list[dict[str, Any]] = []
        if known and known < len(self._columns):
            with fsspec.open(self.metrics_path, "r", newline="") as file:
                earlier = list(csv.DictReader(file))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, restval="")
        if known < len(self._columns):
            writer.writeheader()
        writer.writerows([*earlier, *self._rows])
        self._rows.clear()
        with fsspec.open(self.metrics_path, "w" if known < len(self._columns) else "a", newline="") as file:
            file.write(text.getvalue())

    def close(self) -> None:
        self.flush()
