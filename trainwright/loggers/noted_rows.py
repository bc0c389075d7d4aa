"""NotedRows: which rows were written, in a file of ours, for a service whose client cannot read them back."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

from trainwright.loggers.remote import Row, names_of


class NotedRows:
    """Notes rows in a file, and reads them in a resumed run. `owner` is the logger's name, for a warning."""

    def __init__(self, owner: str) -> None:
        self._owner, self._has_warned = owner, False

    def read(self, path: Path | None, *, ended: bool = False) -> Iterator[tuple[int, int, str]]:
        """Yield step, time and names of each row; with `ended` only of those that `end` follows."""
        try:
            lines = path.read_text().splitlines() if path is not None else []
        except OSError:  # the checkpoint was moved without it, say
            lines = []
        if ended:
            last = max((number for number, line in enumerate(lines) if line == "[]"), default=0)
            lines = lines[:last]
        for line in lines:
            try:
                step, time, names = json.loads(line)
                yield step, time, names_of(dict.fromkeys(names))
            except (ValueError, TypeError):  # half a line, of a run that was killed
                continue

    def note(self, path: Path | None, row: Row) -> None:
        """Note a row that was written."""
        self._append(path, json.dumps([row.step, row.time, sorted(row.values)]))

    def end(self, path: Path | None) -> None:
        """Note that the rows so far have left this process."""
        self._append(path, "[]\n")

    def _append(self, path: Path | None, line: str) -> None:
        """Append a line. A failure is a warning: the row itself is written."""
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a") as file:
                file.write(f"\n{line}")  # after half a line, too
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{self._owner} could not write {path}: {error}. A resumed run would repeat the rows after its checkpoint.",
                    stacklevel=2,
                )
