"""Loggers of a tracking service: a thread passes rows to its client, and a resumed run continues its run there."""

from __future__ import annotations

import json
import os
import random
import re
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

from trainwright.distributed.environment import Environment
from trainwright.faults.failing_loggers import END_SECONDS, FLUSH_SECONDS, BackgroundWriter, outlived
from trainwright.loggers.base import KeptCheckpoints, Logger, Params, RunResult, to_dict, to_numbers
from trainwright.loggers.files import flush_at_exit

RETRY_SECONDS = 5.0
"""After a failed write the next rows wait this long, since a client may block as long at every attempt."""


@contextmanager
def unseeded() -> Iterator[None]:
    """Seed Python's generator randomly for the names that a client draws, and restore its state afterwards."""
    state = random.getstate()
    random.seed()
    try:
        yield
    finally:
        random.setstate(state)


class Row(NamedTuple):
    """The numbers of one moment. The time, in ms since 1970, increases from row to row, also after a resume."""

    step: int
    time: int
    values: dict[str, Any]


class RemoteLogger(Logger):
    """Base of the loggers of a service. Only rank 0 has a run there.

    A subclass opens the run (`_open`, which returns its id), writes rows to it (`_write`), uploads checkpoints (`_upload`) and
    closes it (`_close`). If a write fails, the logger warns once, training continues, and the rows are tried again after
    RETRY_SECONDS and at every flush. A failed upload of a checkpoint is a warning too.

    A resumed run continues the checkpoint's run of the service, unless its logger has the id of another run. Rows that
    arrived there before the kill are skipped when they are logged again.
    """

    project = "runs"
    """The folder of the checkpoints of all runs of this project."""
    project_argument = "project"
    """The constructor's argument for the project of a raw loop."""
    default_save_dir: str | None = "."
    shown_in = "the pages of its service"
    """Where users see the curves."""

    def __init__(self, prefix: str = "", log_model: bool | str = False, run_id: str | None = None) -> None:
        if log_model not in (True, False, "all"):
            raise ValueError(f"log_model={log_model!r} is not accepted; choose from True, False and 'all'.")
        self.prefix, self._log_model = prefix, log_model
        self._checkpoints: list[KeptCheckpoints] = []
        """The callbacks whose checkpoints are uploaded at the end of the run."""
        self._uploaded: list[str] = []
        self._id = self.given_id = run_id
        """The run's id, and the id in the constructor's arguments."""
        self._group: str | None = None
        """The group of the service's run, such as a project. Every rank knows it once the run is open."""
        self._is_writer = True
        self._is_open = self._has_warned = self._flushes_at_exit = False
        self._queued: deque[Row] = deque()
        """Rows for the thread's next delivery."""
        self._has_delivery = False
        """Whether the thread is due to deliver rows. One delivery takes all."""
        self._rows: deque[Row] = deque()
        """Rows that the thread has not written yet."""
        self._retry_at = 0.0
        self._step = self._time = 0
        """The step and time of the latest row."""
        self._position: tuple[int, int] | None = None
        """The step and time of the checkpoint that the run resumes from, until `_arrived` has the later rows."""
        self._arrived: Counter[tuple[int, str]] = Counter()
        """The rows that the service already has when a resumed run logs them again. Every row is skipped only once."""
        self._writer = BackgroundWriter()

    @classmethod
    def of_project(cls, project: str, save_dir: str | None, /, **options: Any) -> Self:
        return cls(**{cls.project_argument: project, "save_dir": save_dir or cls.default_save_dir, **options})

    def run_folder(self, root: str) -> str:
        """Return the folder of the run's checkpoints under a root, from its project and id."""
        return f"{root.rstrip('/')}/{re.sub('[/:]', '_', self.project)}/{self._id}"

    # -- methods of a subclass -------------------------------------------------------------------------------------------

    def _open(self, run_id: str | None) -> str:
        """Open a new run, or the run of this id, set `_group`, and return the id."""
        raise NotImplementedError

    def _write(self, rows: deque[Row]) -> None:
        """Write rows, and remove them from the left. After a failure the remaining rows are written again."""
        raise NotImplementedError

    def _rows_there(self) -> Iterable[tuple[int, int, str]]:
        """Return the rows and images of the open run at the service: step, time and the name in `_unseen`."""
        return ()

    def _unseen(self, step: int, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values of a row that had not arrived before the resume."""
        return {} if self._has_arrived(step, names_of(values)) else values

    def _has_arrived(self, step: int, name: str) -> bool:
        """Return whether a row had arrived before the resume, and forget it."""
        has_arrived = self._arrived[step, name] > 0
        self._arrived[step, name] -= has_arrived
        return has_arrived

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        raise NotImplementedError

    def _upload(self, path: str, is_best: bool) -> None:
        raise NotImplementedError

    def _close(self, status: RunResult) -> None:
        """Close the run, or keep it open for the next call, which passes its id to `_open`."""

    @property
    def name(self) -> str | None:  # type: ignore[override]
        """Return the group of the run: the project, or MLflow's experiment id, or None if unknown."""
        return self._group

    @property
    def version(self) -> str | None:  # type: ignore[override]
        """Return the run's id, or None if it has none before the run is open."""
        return self._id

    # -- Logger ------------------------------------------------------------------------------------------------------------

    def start(self, agreed: Callable[[str], str], *, is_writer: bool) -> None:
        self._is_writer = is_writer
        reply: dict[str, str] = {}
        if is_writer:
            try:
                self._open_once()
                reply = {"id": self._id or "", "group": self._group or ""}
            except Exception as error:  # the other ranks wait for this rank's text
                reply["error"] = f"{type(error).__name__}: {error}"
        reply = json.loads(agreed(json.dumps(reply)) or "{}")
        if "error" in reply:
            raise RuntimeError(f"{type(self).__name__} could not open its run: {reply['error']}")
        self._id, self._group = reply.get("id") or self._id, reply.get("group") or self._group

    def _leave_run(self) -> None:
        self.end_run()
        self._id, self._step, self._time, self._uploaded = self.given_id, 0, 0, []

    def _open_once(self) -> None:
        if not self._is_open:
            with unseeded():
                self._id = self._open(self._id)
            self._is_open = True
            if not self._flushes_at_exit:  # after the client's exit function was registered, so this one runs before it
                self._flushes_at_exit = True
                flush_at_exit(self)
        if self._position is not None:
            step, time_ = self._position
            # A run that was resumed twice has later steps with earlier times.
            self._arrived = Counter((row[0], row[2]) for row in self._rows_there() if row[0] > step or row[1] > time_)
            self._position = None

    def _begin(self) -> bool:
        """Open the run if it is not open yet, and return whether this rank has it."""
        self._is_writer = self._is_writer and Environment.detect().rank == 0
        if self._is_writer:
            self._open_once()
        return self._is_writer

    def log_texts(self, values: Mapping[str, str], step: int | None = None) -> bool:
        """Write texts by name, and return whether this logger can. A raw loop calls it on rank 0."""
        return False

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write a row, in a thread."""
        if not self._begin():
            return
        values = to_numbers(metrics, self.prefix)
        self._step = step = int(values.pop("step", self._step if step is None else step))
        self._next_time()
        if values := self._unseen(step, values):
            self._queued.append(Row(step, self._time, values))
            if not self._has_delivery:
                self._has_delivery = True
                self._writer.submit(self._deliver)

    def _next_time(self) -> int:
        self._time = max(self._time + 1, int(time.time() * 1000))
        return self._time

    def _deliver(self, at_once: bool = False) -> None:
        """Write the queued rows, in the thread. After a failure it waits RETRY_SECONDS, except with `at_once`."""
        self._has_delivery = False  # before the rows are taken, so that a later row requests another delivery
        while self._queued:
            self._rows.append(self._queued.popleft())
        if not self._rows or (not at_once and time.monotonic() < self._retry_at):
            return
        try:
            self._write(self._rows)
        except Exception as error:  # clients raise errors of any type
            self._retry_at = time.monotonic() + RETRY_SECONDS
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{type(self).__name__} could not write: {type(error).__name__}: {error}. Training continues, and the rows "
                    "are tried again with later ones.",
                    stacklevel=2,
                )
        else:
            self._rows.clear()
            self._has_warned, self._retry_at = False, 0.0

    def log_hyperparams(self, params: Params, metrics: Mapping[str, Any] | float | None = None) -> None:
        """Write the hyper-parameters."""
        if self._begin():
            self._write_hyperparams(to_dict(params))

    def after_save_checkpoint(self, checkpoint_callback: KeptCheckpoints) -> None:
        """Upload the checkpoint with log_model="all". With True, remember the callback for the end of the run."""
        if self._log_model == "all":
            self._upload_new(checkpoint_callback)
        elif self._log_model and all(callback is not checkpoint_callback for callback in self._checkpoints):
            self._checkpoints.append(checkpoint_callback)

    def _upload_new(self, callback: KeptCheckpoints) -> None:
        for path in dict.fromkeys([*callback.best_k_models, callback.last_model_path]):
            if not path or path in self._uploaded or not self._begin():
                continue
            try:
                if not os.path.isdir(path):
                    raise FileNotFoundError(f"{path} is not a local folder")
                self._upload(path, path == callback.best_model_path)
            except Exception as error:  # clients raise errors of any type
                warnings.warn(
                    f"{type(self).__name__} could not upload {path}: {type(error).__name__}: {error}. The checkpoint itself is "
                    "complete, and training continues.",
                    stacklevel=2,
                )
            else:
                self._uploaded.append(path)

    def plot(self, path: str | os.PathLike[str] | None = None, metrics: Sequence[str] | None = None) -> str:
        """Raise NotImplementedError: the service has the rows and draws them."""
        raise NotImplementedError(
            f"{type(self).__name__}.plot() was called, but its service has the rows. Look at {self.shown_in}, or pass the "
            "Trainer a CSVLogger too, which can plot."
        )

    def state_dict(self) -> dict[str, Any]:
        outlived(self, "flush")
        state = {"id": self._id, "step": self._step, "time": self._time, "uploaded": self._uploaded}
        return state if self._id is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        run_id = str(state["id"])
        if self.given_id not in (None, run_id):
            return  # the user has chosen another run
        self._is_continued = True
        if self._is_open:
            self.flush()  # rows of this process that are logged again must arrive before `_rows_there`
            if self._id != run_id:
                warnings.warn(
                    f"{type(self).__name__} was used before the fit, which began the run {self._id}. The resumed fit continues "
                    f"the checkpoint's run {run_id}, and earlier rows stay in {self._id}. Pass the logger the id "
                    f"{run_id!r} to log all of them there.",
                    stacklevel=2,
                )
                self._end("success")
        self._uploaded = list(state.get("uploaded", ()))
        self._id, self._step = run_id, int(state["step"])
        self._position = self._step, int(state.get("time", 0))
        self._time = max(self._time, self._position[1])

    def flush(self, seconds: float = FLUSH_SECONDS) -> None:
        """Wait until all rows are written or have failed, or raise TimeoutError."""
        if self._is_open:
            self._writer.submit(lambda: self._deliver(at_once=True))
            self._writer.wait(seconds)

    def save(self) -> None:
        self.flush()

    def finalize(self, status: RunResult) -> None:
        if not self._is_open:
            return
        try:
            self.flush(END_SECONDS)
            for callback in self._checkpoints:
                self._upload_new(callback)
        finally:
            self._checkpoints = []
            self._end(status)

    def _end(self, status: RunResult) -> None:
        """Close the run after a flush. A failure is a warning, since training is complete."""
        lost = len(self._rows)
        try:
            with unseeded():
                self._close(status)
        except Exception as error:  # clients raise errors of any type
            warnings.warn(
                f"{type(self).__name__} could not close its run {self._id}: {type(error).__name__}: {error}.",
                stacklevel=2,
            )
        finally:
            self._is_open = False
            self._rows.clear()
            self._arrived.clear()
        if lost:
            warnings.warn(f"{type(self).__name__} could not write its last {lost} rows, which are lost.", stacklevel=2)

    def end_run(self) -> None:
        """End the service's run, also if `finalize` keeps it open. Later rows open it again."""
        self.finalize("success")

    def __getstate__(self) -> dict[str, Any]:
        rows = {"_queued": deque(), "_rows": deque(), "_has_delivery": False}  # only the original writes its rows
        return {**self.__dict__, **rows, "_is_open": False, "_checkpoints": [], "_flushes_at_exit": False}


def channels_last(image: Any) -> Any:
    """Return an image in the client's form: an array with the channels last."""
    value = image.detach().cpu().numpy() if hasattr(image, "detach") else image
    if getattr(value, "ndim", 0) == 3 and value.shape[0] in (1, 3, 4) and value.shape[2] not in (1, 3, 4):
        value = value.transpose(1, 2, 0)
    return value


def names_of(values: Mapping[str, Any]) -> str:
    """Return the names of a row's values as one text."""
    return json.dumps(sorted(values))
