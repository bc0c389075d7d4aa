"""Loggers of a tracking service: rows go to its client in a thread, and a resumed run continues its run there."""

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
from typing import Any, NamedTuple

from trainwright.distributed.environment import Environment
from trainwright.loggers.background import BackgroundWriter, flush_at_exit
from trainwright.loggers.base import KeptCheckpoints, Logger, Params, RunResult, SilentExperiment, to_dict, to_numbers

RETRY_SECONDS = 5.0
"""After a failed write the next rows wait that long, since a client may block for as long at each attempt."""


@contextmanager
def unseeded() -> Iterator[None]:
    """Let a client draw names from Python's generator, which then are others in each process, and keep its state.

    Comet names an archive so: that of a resumed run with the same seed would replace the one before.
    """
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


class Arrived:
    """What a service already has of the rows that a resumed run logs again; each is left out once, so later rows are not."""

    def __init__(self) -> None:
        self._left: Counter[tuple[int, str]] = Counter()

    def expect(self, rows: Iterable[tuple[int, int, str]], step: int, time: int) -> None:
        """Take the rows (step, time, name) after the checkpoint's last row, whose step and time are given.

        A run that was resumed twice has later steps with earlier times.
        """
        self._left = Counter((row[0], row[2]) for row in rows if row[0] > step or row[1] > time)

    def takes(self, step: int, name: str) -> bool:
        """Return whether the service has this row already."""
        if self._left[step, name] <= 0:
            return False
        self._left[step, name] -= 1
        return True

    def clear(self) -> None:
        self._left.clear()


class RemoteLogger(Logger):
    """Base of the loggers of a service; rank 0 alone has a run there.

    A subclass opens the run (`_open`, which returns its id), writes rows to it (`_write`), uploads checkpoints (`_upload`) and
    closes it (`_close`). If a write fails, it warns once, training continues, and the rows are kept and tried again after
    RETRY_SECONDS and at each flush. A checkpoint that cannot be uploaded is a warning, too.

    A resumed run continues the checkpoint's run of the service, unless its logger was given the id of another. Rows that
    arrived there before the kill are left out when they come again.
    """

    project = "runs"
    """The name of the folder that has the checkpoints of all runs of this project."""
    shown_in = "the pages of its service"
    """Where users see the curves."""

    def __init__(self, prefix: str = "", log_model: bool | str = False, run_id: str | None = None) -> None:
        if log_model not in (True, False, "all"):
            raise ValueError(f"log_model={log_model!r} is not accepted; choose from True, False and 'all'.")
        self.prefix, self._log_model = prefix, log_model
        self._checkpoints: list[KeptCheckpoints] = []
        """The callbacks whose checkpoints the end of the run uploads."""
        self._uploaded: list[str] = []
        self._id = self._given_id = run_id
        self._group: str | None = None
        """What the service's run belongs to, such as a project; every rank knows it once the run is open."""
        self._is_writer = True
        self._is_open = self._has_warned = self._flushes_at_exit = False
        self._queued: deque[Row] = deque()
        """Rows for the thread's next delivery."""
        self._has_delivery = False
        """Whether the thread has a delivery to do; one takes all rows."""
        self._rows: deque[Row] = deque()
        """Rows that have not been written; the thread's."""
        self._retry_at = 0.0
        self._step = self._time = 0
        """The latest row's."""
        self._position: tuple[int, int] | None = None
        """The step and time of the checkpoint that the run resumes from, until `_arrived` knows what follows it."""
        self._arrived = Arrived()
        self._writer = BackgroundWriter()

    def run_folder(self, root: str) -> str:
        """Return the folder of the run's checkpoints under a root: by its project, then by its id."""
        return f"{root.rstrip('/')}/{re.sub('[/:]', '_', self.project)}/{self._id}"

    # -- what a subclass defines -----------------------------------------------------------------------------------------

    def _open(self, run_id: str | None) -> str:
        """Open a new run, or the one of this id; return the id. Sets `_group`."""
        raise NotImplementedError

    def _write(self, rows: deque[Row]) -> None:
        """Write rows. After a failure those that it has not removed from the left are written again."""
        raise NotImplementedError

    def _rows_there(self) -> Iterable[tuple[int, int, str]]:
        """Return the rows and images that the service has of the open run: step, time and what `_unseen` names them."""
        return ()

    def _unseen(self, step: int, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values of a row that did not arrive before the run was resumed."""
        return {} if self._arrived.takes(step, names_of(values)) else values

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        raise NotImplementedError

    def _upload(self, path: str, is_best: bool) -> None:
        """Upload a checkpoint."""
        raise NotImplementedError

    def _close(self, status: RunResult) -> None:
        """Close the run, or leave it open for the next call; `_open` gets its id again."""

    @property
    def name(self) -> str | None:  # type: ignore[override]
        """Return what the run belongs to: the project, or MLflow's experiment id; None before it is known."""
        return self._group

    @property
    def version(self) -> str | None:  # type: ignore[override]
        """Return the run's id; None before the run is open if none was given."""
        return self._id

    @property
    def given_id(self) -> str | None:
        """Return the id of the run that this logger was made for, if it was given one."""
        return self._given_id

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
        self._id, self._step, self._time, self._uploaded = self._given_id, 0, 0, []

    def _open_once(self) -> None:
        if not self._is_open:
            with unseeded():
                self._id = self._open(self._id)
            self._is_open = True
            if not self._flushes_at_exit:  # after the client has registered what it does then, so before that
                self._flushes_at_exit = True
                flush_at_exit(self)
        if self._position is not None:
            self._arrived.expect(self._rows_there(), *self._position)
            self._position = None

    def _begin(self) -> bool:
        """Open the run if it is not open yet, for what is logged before a Trainer's run; return whether this rank has it."""
        self._is_writer = self._is_writer and Environment.detect().rank == 0
        if self._is_writer:
            self._open_once()
        return self._is_writer

    def log_texts(self, values: Mapping[str, str], step: int | None = None) -> bool:
        """Write texts by name, if this logger can; return whether it did. A raw loop calls it on rank 0."""
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
        """Return the time of a new row."""
        self._time = max(self._time + 1, int(time.time() * 1000))
        return self._time

    def _deliver(self, at_once: bool = False) -> None:
        """Write what is queued, in the thread; after a failure not before RETRY_SECONDS, except `at_once`."""
        self._has_delivery = False  # before the rows are taken, so that a row that comes too late asks for another
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
                    f"{type(self).__name__} could not write: {type(error).__name__}: {error}. Training continues; the rows are "
                    "kept and tried again with later ones.",
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

    def plot(self, path: str | os.PathLike[str] | None = None, metrics: Sequence[str] | None = None) -> str:
        """Refuse: the rows are with the service, which draws them."""
        raise NotImplementedError(
            f"{type(self).__name__}.plot() was called, but its rows are with its service; look at {self.shown_in}, or pass the "
            "Trainer a CSVLogger too, which can plot."
        )

    def state_dict(self) -> dict[str, Any]:
        self.flush()
        state = {"id": self._id, "step": self._step, "time": self._time, "uploaded": self._uploaded}
        return state if self._id is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        run_id = str(state["id"])
        if self._given_id not in (None, run_id):
            return  # the user has chosen another run
        self._is_continued = True
        if self._is_open:
            self.flush()  # rows of this process that come again have to be there before `_rows_there`
            if self._id != run_id:
                warnings.warn(
                    f"{type(self).__name__} was used before the fit, which began the run {self._id}. The resumed fit continues "
                    f"the checkpoint's run {run_id}; what was logged so far stays in {self._id}. Give the logger the id "
                    f"{run_id!r} to log all of it there.",
                    stacklevel=2,
                )
                self._end("success")
        self._uploaded = list(state.get("uploaded", ()))
        self._id, self._step = run_id, int(state["step"])
        self._position = self._step, int(state.get("time", 0))
        self._time = max(self._time, self._position[1])

    def flush(self) -> None:
        """Wait until all rows are written, or could not be."""
        if self._is_open:
            self._writer.submit(lambda: self._deliver(at_once=True))
            self._writer.wait()

    def save(self) -> None:
        self.flush()

    def finalize(self, status: RunResult) -> None:
        if not self._is_open:
            return
        try:
            self.flush()
            for each in self._checkpoints:
                self._upload_new(each)
        finally:
            self._checkpoints = []
            self._end(status)

    def _end(self, status: RunResult) -> None:
        """Close the run, after a flush; a failure is a warning, since training is complete."""
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
            warnings.warn(f"{type(self).__name__} could not write its last {lost} rows; they are lost.", stacklevel=2)

    def close(self) -> None:
        self.flush()

    def end_run(self) -> None:
        """End the service's run, also one that `finalize` leaves open; what is logged later opens it again."""
        self.finalize("success")

    def _silent(self) -> Any:
        return SilentExperiment()

    def __getstate__(self) -> dict[str, Any]:
        rows = {"_queued": deque(), "_rows": deque(), "_has_delivery": False}  # the original writes them
        return {**self.__dict__, **rows, "_is_open": False, "_checkpoints": [], "_flushes_at_exit": False}


def channels_last(image: Any) -> Any:
    """Return an image as its client takes it: a tensor as an array, and the channels last."""
    value = image.detach().cpu().numpy() if hasattr(image, "detach") else image
    if getattr(value, "ndim", 0) == 3 and value.shape[0] in (1, 3, 4) and value.shape[2] not in (1, 3, 4):
        value = value.transpose(1, 2, 0)
    return value


def names_of(values: Mapping[str, Any]) -> str:
    """Return the names of a row's values as one text."""
    return json.dumps(sorted(values))
