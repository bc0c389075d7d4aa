"""Loggers of a tracking service: rows go to its client in a thread, and a resumed run continues its run there."""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from trainwright.distributed.environment import Environment
from trainwright.loggers.background import BackgroundWriter
from trainwright.loggers.base import KeptCheckpoints, Logger, RunResult, SilentExperiment, to_dict, to_numbers

Row = dict[str, Any]


class RemoteLogger(Logger):
    """Base of the loggers of a service; rank 0 alone has a run there.

    A subclass opens the run (`_open`, which returns its id), writes rows to it (`_write`), uploads checkpoints (`_upload`) and
    closes it (`_close`). If a write fails, it warns once, training continues, and the rows are kept and tried again with the
    next ones. A checkpoint that cannot be uploaded is a warning, too.

    A resumed run continues the service's run: rows that arrived there before the kill are left out when they come again.
    """

    def __init__(self, prefix: str = "", log_model: bool | str = False) -> None:
        if log_model not in (True, False, "all"):
            raise ValueError(f"log_model={log_model!r} is not accepted; choose from True, False and 'all'.")
        self.prefix, self._log_model = prefix, log_model
        self._checkpoints: list[KeptCheckpoints] = []
        """The callbacks whose checkpoints the end of the run uploads."""
        self._uploaded: list[str] = []
        self._id: str | None = None
        self._is_writer = True
        self._is_open = self._has_warned = False
        self._rows: list[Row] = []
        """Rows that have not been written; the thread's."""
        self._step = self._count = 0
        """The latest step, and the number of rows up to now, before a resume too."""
        self._is_resumed = False
        self._arrived = 0
        """How many rows the service has of the run that was resumed; those up to it come again."""
        self._writer = BackgroundWriter()

    # -- what a subclass defines -----------------------------------------------------------------------------------------

    def _open(self, run_id: str | None) -> str:
        """Open a new run, or the one of this id; return the id. Sets `_arrived` for a resumed one."""
        raise NotImplementedError

    def _write(self, rows: list[Row]) -> None:
        """Write rows of numbers, each with its step."""
        raise NotImplementedError

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        raise NotImplementedError

    def _upload(self, path: str, is_best: bool) -> None:
        """Upload a checkpoint."""
        raise NotImplementedError

    def _close(self, status: RunResult) -> None:
        """Close the run; it may be opened again."""

    # -- Logger ------------------------------------------------------------------------------------------------------------

    def start(self, agreed: Callable[[str], str], *, is_writer: bool) -> None:
        self._is_writer = is_writer
        reply: dict[str, str] = {}
        if is_writer:
            try:
                self._open_once()
                reply["id"] = self._id or ""
            except Exception as error:  # the other ranks wait for this rank's text
                reply["error"] = f"{type(error).__name__}: {error}"
        reply = json.loads(agreed(json.dumps(reply)) or "{}")
        if "error" in reply:
            raise RuntimeError(f"{type(self).__name__} could not open its run: {reply['error']}")
        self._id = self._id or reply.get("id")

    def _open_once(self) -> None:
        if not self._is_open:
            self._id = self._open(self._id)
            self._is_open = True

    def _begin(self) -> bool:
        """Open the run if it is not open yet, for what is logged before a Trainer's run; return whether this rank has it."""
        self._is_writer = self._is_writer and Environment.detect().rank == 0
        if self._is_writer:
            self._open_once()
        return self._is_writer

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write a row, in a thread."""
        if not self._begin():
            return
        self._step = step = self._step if step is None else step
        self._count += 1
        row = {"step": step, **to_numbers(metrics, self.prefix)}
        if self._count > self._arrived:
            self._writer.submit(lambda: self._deliver([row]))

    def _deliver(self, rows: list[Row]) -> None:
        self._rows += rows
        try:
            self._write(self._rows)
        except Exception as error:  # clients raise errors of any type
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{type(self).__name__} could not write: {type(error).__name__}: {error}. Training continues; the rows are "
                    "kept and tried again with the next ones.",
                    stacklevel=2,
                )
        else:
            self._rows, self._has_warned = [], False

    def log_hyperparams(
        self, params: Mapping[str, Any] | argparse.Namespace, metrics: Mapping[str, Any] | float | None = None
    ) -> None:
        """Write the hyper-parameters."""
        if self._begin():
            self._write_hyperparams(to_dict(params))

    def after_save_checkpoint(self, checkpoint_callback: KeptCheckpoints) -> None:
        """Upload the checkpoint if all are to be uploaded; otherwise note whose checkpoints to upload at the end."""
        if self._log_model == "all":
            self._upload_new(checkpoint_callback)
        elif self._log_model and all(each is not checkpoint_callback for each in self._checkpoints):
            self._checkpoints.append(checkpoint_callback)

    def _upload_new(self, kept: KeptCheckpoints) -> None:
        for path in dict.fromkeys([*kept.best_k_models, kept.last_model_path]):
            if not path or path in self._uploaded or not self._begin():
                continue
            try:
                if not os.path.isdir(path):
                    raise FileNotFoundError(f"{path} is not a local folder")
                self._upload(path, path == kept.best_model_path)
            except Exception as error:  # clients raise errors of any type
                warnings.warn(
                    f"{type(self).__name__} could not upload {path}: {type(error).__name__}: {error}. The checkpoint itself is "
                    "complete, and training continues.",
                    stacklevel=2,
                )
            else:
                self._uploaded.append(path)

    def state_dict(self) -> dict[str, Any]:
        self.flush()
        state = {"id": self._id, "step": self._step, "rows": self._count, "uploaded": self._uploaded}
        return state if self._id is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._id is None:
            self._uploaded = list(state.get("uploaded", ()))
            self._id, self._step, self._count = str(state["id"]), int(state["step"]), int(state["rows"])
            self._is_resumed = True

    def flush(self) -> None:
        """Wait until all rows are written, or could not be."""
        if self._is_open:
            self._writer.submit(lambda: self._deliver([]) if self._rows else None)
            self._writer.wait()

    def save(self) -> None:
        self.flush()

    def finalize(self, status: RunResult) -> None:
        if not self._is_open:
            return
        self.flush()
        if self._rows:
            warnings.warn(
                f"{type(self).__name__} could not write its last {len(self._rows)} rows; they are lost.", stacklevel=2
            )
            self._rows = []
        for each in self._checkpoints:
            self._upload_new(each)
        self._checkpoints = []
        self._close(status)
        self._is_open = False

    def close(self) -> None:
        self.flush()

    def _silent(self) -> Any:
        return SilentExperiment()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_is_open": False, "_checkpoints": []}
