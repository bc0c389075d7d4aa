"""The logger of MLflow, through its client."""

from __future__ import annotations

import importlib.util
import os
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainwright.arguments import refuses_unknown
from trainwright.loggers.base import RunResult, SilentExperiment, flattened
from trainwright.loggers.remote import RemoteLogger, Row, channels_last

STATUS = {"success": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
LONGEST_PARAM = 6000
"""Characters of a parameter's value that MLflow stores."""
IMAGE_FILE = re.compile(r"images/(?P<key>.+)[%+]step[%+](?P<step>\d+)[%+]timestamp[%+](?P<time>\d+)[%+][^%+]*\.png")
"""The file name of an image in MLflow, with % in 2.x and + in 3.x. A small copy (.webp) lies beside it."""
METRICS_AT_ONCE, PARAMS_AT_ONCE = 500, 100


class MLFlowLogger(RemoteLogger):
    """Writes to a run of MLflow (extra `mlflow`).

    A run that resumes from a checkpoint continues the service's run of the same id.

    Args:
        experiment_name: the experiment, which is created if necessary.
        run_name: the run's name. With None MLflow chooses one.
        tracking_uri: a server's address or a store, such as "sqlite:///mlruns.db". The default is MLFLOW_TRACKING_URI, or a
            SQLite store in save_dir.
        tags: tags of the run.
        save_dir: the folder of a local store.
        log_model: True uploads the checkpoints of every ModelCheckpoint as artifacts at the end of the run, "all" as soon as
            they are complete.
        prefix: put before the name of every metric, with a dash.
        artifact_location: the place for the files of a new experiment.
        run_id: a run to continue.

    Raises:
        ModuleNotFoundError: mlflow is not installed.
        ValueError: log_model is unknown.

    >>> logger = tw.MLFlowLogger("digits", tracking_uri="sqlite:///mlruns.db", tags={"stage": "first"})
    >>> trainer = tw.Trainer(logger=logger, max_epochs=1)
    """

    project_argument, default_save_dir = "experiment_name", None
    shown_in = "the pages of MLflow (`mlflow ui --backend-store-uri STORE` shows a local store)"

    @refuses_unknown
    def __init__(
        self,
        experiment_name: str = "trainwright_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, Any] | None = None,
        save_dir: str | os.PathLike[str] | None = "./mlruns",
        log_model: bool | str = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
    ) -> None:
        if importlib.util.find_spec("mlflow") is None:
            raise ModuleNotFoundError("MLFlowLogger needs mlflow: pip install mlflow, or use CSVLogger.")
        super().__init__(prefix, log_model, run_id)
        self.save_dir = os.path.abspath(os.fspath(save_dir if save_dir is not None else "./mlruns"))
        self._uri = tracking_uri
        self._experiment_name, self._run_name, self._tags = experiment_name, run_name, dict(tags or {})
        self.project = experiment_name
        self._artifacts = artifact_location
        self._client: Any = None
        self._has_refused = False
        self._has_ended = False
        """Whether the run has ended. Reading or logging by hand afterwards does not restart it."""

    @property
    def run_id(self) -> str | None:
        """Return the run's id, opening the run on rank 0."""
        self._begin()
        return self._id

    @property
    def experiment_id(self) -> str | None:
        """Return the experiment's id, opening the run on rank 0."""
        self._begin()
        return self._group

    @property
    def experiment(self) -> Any:
        """Return the MlflowClient with an open run, or on other ranks than 0 an object that does nothing."""
        return self._client if self._begin() else SilentExperiment()

    def start(self, agreed: Callable[[str], str], *, is_writer: bool) -> None:
        if self._has_ended:
            self._has_ended = self._is_open = False  # it may have been opened by hand since
        super().start(agreed, is_writer=is_writer)

    def _open(self, run_id: str | None) -> str:
        from mlflow.entities import RunStatus
        from mlflow.tracking import MlflowClient, get_tracking_uri, is_tracking_uri_set

        if self._uri is None:
            is_set = is_tracking_uri_set()  # type: ignore[no-untyped-call]
            self._uri = get_tracking_uri() if is_set else f"sqlite:///{self.save_dir}/mlflow.db"
        if self._uri.startswith("sqlite:///"):
            os.makedirs(os.path.dirname(self._uri.removeprefix("sqlite:///")) or ".", exist_ok=True)
        self._client = client = MlflowClient(self._uri)
        if run_id is not None:
            self._group = client.get_run(run_id).info.experiment_id
            if not self._has_ended:
                client.update_run(run_id, status=RunStatus.to_string(RunStatus.RUNNING))
            return run_id
        self._group = self._experiment(client)
        run = client.create_run(self._group, run_name=self._run_name, tags=self._tags)
        return str(run.info.run_id)

    def _experiment(self, client: Any) -> str:
        from mlflow.exceptions import MlflowException

        if (experiment := client.get_experiment_by_name(self._experiment_name)) is not None:
            return str(experiment.experiment_id)
        is_local = str(self._uri).startswith("sqlite:")
        artifacts = self._artifacts or (f"{self.save_dir}/artifacts" if is_local else None)
        try:
            return str(client.create_experiment(self._experiment_name, artifact_location=artifacts))
        except MlflowException as error:
            # Another job may have just made it.
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            return str(client.get_experiment_by_name(self._experiment_name).experiment_id)

    def _rows_there(self) -> Iterator[tuple[int, int, str]]:
        for name in self._client.get_run(self._id).data.metrics:
            for metric in self._client.get_metric_history(self._id, name):
                yield metric.step, metric.timestamp, name
        for file in self._client.list_artifacts(self._id, "images"):
            if match := IMAGE_FILE.fullmatch(file.path):
                yield int(match["step"]), int(match["time"]), _image_name(match["key"])

    def _unseen(self, step: int, values: dict[str, Any]) -> dict[str, Any]:
        # Value by value, since the service does not store which values formed a row.
        return {name: value for name, value in values.items() if not self._has_arrived(step, _allowed(name))}

    def _write(self, rows: deque[Row]) -> None:
        from mlflow.entities import Metric

        while rows:
            values: list[Metric] = []
            count = 0
            for row in rows:
                values += [Metric(_allowed(name), float(x), row.time, row.step) for name, x in row.values.items()]
                count += 1
                if len(values) >= METRICS_AT_ONCE:
                    break
            for start in range(0, len(values), METRICS_AT_ONCE):
                self._log("metrics", values[start : start + METRICS_AT_ONCE])
            for _ in range(count):
                rows.popleft()

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        from mlflow.entities import Param

        flat = {_allowed(name): value for name, value in flattened(params)}
        known = self._client.get_run(self._id).data.params
        new = [Param(key, str(value)[:LONGEST_PARAM]) for key, value in flat.items() if key not in known]
        for start in range(0, len(new), PARAMS_AT_ONCE):
            self._log("params", new[start : start + PARAMS_AT_ONCE])

    def _log(self, kind: str, values: list[Any]) -> None:
        """Write values. MLflow rejects a whole batch for one bad value, so they are then written one by one."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.log_batch(self._id, **{kind: values})
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            if len(values) > 1:
                for value in values:
                    self._log(kind, [value])
            elif not self._has_refused:
                self._has_refused = True
                warnings.warn(
                    f"MLflow rejects {values[0].key[:80]!r}: {error} It is skipped, like all other values that MLflow rejects.",
                    stacklevel=2,
                )

    def _upload(self, path: str, is_best: bool) -> None:
        self.log_model(path)

    def _close(self, status: RunResult) -> None:
        self._client.set_terminated(self._id, STATUS[status])
        self._has_ended = True

    # -- beyond numbers ----------------------------------------------------------------------------------------------------

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Write images by name: arrays or tensors with channels last or first, or lists of images."""
        for key, images in values.items():
            several = list(images) if isinstance(images, (list, tuple)) else [images]
            for index, image in enumerate(several):
                self.log_image(f"{key}/{index}" if len(several) > 1 else key, image, step)

    def log_image(self, key: str, image: Any, step: int | None = None) -> None:
        """Write an image: an array, a tensor or a PIL image."""
        if self._begin():
            value = channels_last(image)
            at = self._step if step is None else step
            if not self._has_arrived(at, _image_name(key)):
                self._client.log_image(self._id, value, key=key, step=at, timestamp=self._next_time())

    def log_text(self, text: str, artifact_file: str) -> None:
        """Write a text as a file of the run."""
        if self._begin():
            self._client.log_text(self._id, text, artifact_file)

    def log_texts(self, values: Mapping[str, str], step: int | None = None) -> bool:
        """Write texts as files of the run, `<name>/step_<step>.txt`."""
        for key, text in values.items():
            self.log_text(text, f"{key}/step_{self._step if step is None else step}.txt")
        return True

    def log_table(self, data: Any, artifact_file: str) -> None:
        """Write a table, a dict of columns or a data frame, as a JSON file of the run."""
        if self._begin():
            self._client.log_table(self._id, data, artifact_file)

    def log_model(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        """Upload a checkpoint, or another folder or file, as an artifact of the run."""
        if self._begin():
            target = name or f"model/checkpoints/{os.path.basename(os.fspath(path).rstrip('/'))}"
            upload = self._client.log_artifacts if os.path.isdir(path) else self._client.log_artifact
            upload(self._id, os.fspath(path), target)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_client": None}


def _allowed(name: str) -> str:
    """Return a metric's name with the characters that MLflow accepts, as a normalized path."""
    allowed = "".join(letter if letter.isalnum() or letter in "_-./ :" else "_" for letter in name)
    parts = ["_" * len(part) if part in (".", "..") else part for part in allowed.split("/") if part]
    path = "/".join(parts) or "_"
    return f"__{path[2:]}" if path.startswith("..") else path


def _image_name(key: str) -> str:
    return f"image {re.sub('[/#~]', '~', key)}"
