"""The logger of Comet, through its client."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainwright.loggers.base import RunResult, SilentExperiment
from trainwright.loggers.remote import RemoteLogger, Row, RowJournal, channels_last, unseeded

MODES = ("get_or_create", "get", "create")
QUIET = {"log_code": False, "log_graph": False, "auto_output_logging": False, "display_summary_level": 0}
"""Records of the client that are off by default."""


class CometLogger(RemoteLogger):
    """Writes to an experiment of Comet (extra `comet`).

    Without an API key it is offline, and a warning says how to upload it. A run that resumes from a checkpoint continues the
    experiment of the same key. The client has one experiment per process, and another one ends it.

    Offline, every process writes an archive into `save_dir` at its end. `comet upload` joins the archives of an experiment.
    The rows of a killed process stay in the client's temporary folder.

    Args:
        api_key: the key, by default from the client's configuration, such as COMET_API_KEY.
        workspace: the workspace, by default the client's default.
        project: the project, by default from the client's configuration.
        experiment_key: the key of an experiment to continue or to make, of 32 to 50 letters and digits. None makes a new one.
        mode: "get_or_create" (the default), "get" or "create".
        online: False only writes archives. With None this depends on the API key.
        prefix: put before the name of every metric, with a dash.
        save_dir: the folder of archives, a local path.
        name: the experiment's name. With None the service chooses one.
        log_model: True uploads the checkpoints of every ModelCheckpoint as models at the end of the run, "all" as soon as they
            are complete.
        kwargs: other arguments of comet_ml.ExperimentConfig, such as tags= and log_code=.

    Raises:
        ImportError: comet_ml is not installed.
        ValueError: the mode or log_model is unknown.

    >>> logger = tw.CometLogger(project="digits", online=False, save_dir="comet")
    >>> trainer = tw.Trainer(logger=logger, max_epochs=1)
    >>> logger.name
    'digits'
    """

    def __init__(
        self,
        *,
        api_key: str | None = None,
        workspace: str | None = None,
        project: str | None = None,
        experiment_key: str | None = None,
        mode: str | None = None,
        online: bool | None = None,
        prefix: str | None = None,
        save_dir: str | os.PathLike[str] = ".",
        name: str | None = None,
        log_model: bool | str = False,
        **kwargs: Any,
    ) -> None:
        if importlib.util.find_spec("comet_ml") is None:
            raise ImportError('CometLogger needs comet_ml: pip install "trainwright[comet]", or use CSVLogger.')
        if mode not in (None, *MODES):
            raise ValueError(f"mode={mode!r} is not accepted; choose from {', '.join(map(repr, MODES))}.")
        super().__init__(prefix or "", log_model, experiment_key)
        self._api_key, self._workspace, self._group = api_key, workspace, project
        self.project = project or "comet"
        self._mode, self._online, self._name, self._options = mode or MODES[0], online, name, kwargs
        self.save_dir: str = os.path.abspath(os.fspath(save_dir))
        self._experiment: Any = None
        self._is_offline = False
        self._has_begun = False
        """Whether the experiment was opened before, so that it exists."""
        self._journal = RowJournal("CometLogger")

    @property
    def experiment(self) -> Any:
        """Return the client's experiment, opened if necessary, or on other ranks than 0 an object that does nothing."""
        return self._current() if self._begin() else SilentExperiment()

    def start(self, agreed: Callable[[str], str], *, is_writer: bool) -> None:
        self._is_open = self._is_open and not self._experiment.ended
        super().start(agreed, is_writer=is_writer)

    def _current(self) -> Any:
        """Return the experiment, reopened if another one has ended it."""
        if self._experiment.ended:
            with unseeded():
                self._open(self._id)
        return self._experiment

    def _open(self, run_id: str | None) -> str:
        comet = _client()
        self._is_offline = self._online is False
        if self._online is None and not (self._api_key or comet.get_api_key(None, comet.get_config())):
            self._is_offline = True
            warnings.warn(
                f"Comet has no API key, so the experiment is written to an archive in {self.save_dir}. Upload it with `comet "
                "upload`. Pass online=False to avoid this warning, or set COMET_API_KEY.",
                stacklevel=2,
            )
        os.makedirs(self.save_dir, exist_ok=True)
        options = {**QUIET, "offline_directory": self.save_dir, "name": self._name, **self._options}
        is_continued = self._has_begun or (run_id is not None and run_id != self.given_id)
        self._experiment = comet.start(
            api_key=self._api_key,
            workspace=self._workspace,
            project_name=self._group,
            experiment_key=run_id or comet.generate_guid(),
            mode=MODES[0] if is_continued else self._mode,
            online=not self._is_offline,
            experiment_config=comet.ExperimentConfig(**options),
        )
        self._has_begun = True
        self._group = getattr(self._experiment, "project_name", None) or self._group
        return str(self._experiment.get_key())

    @property
    def _rows_file(self) -> Path:
        """Return the file of the written rows."""
        return Path(self.save_dir, f"trainwright-{self._id}.steps")

    def _rows_there(self) -> Iterator[tuple[int, int, str]]:
        return self._journal.read(self._rows_file, ended=self._is_offline)

    def _write(self, rows: deque[Row]) -> None:
        while rows:
            if self._experiment.ended:  # it would drop the rows
                raise RuntimeError("another experiment was opened, which ended this one: the client has one at a time")
            row = rows[0]
            self._experiment.log_metrics(row.values, step=row.step)
            rows.popleft()
            self._journal.add(self._rows_file, row)

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        self._current().log_parameters(params)

    def _upload(self, path: str, is_best: bool) -> None:
        self.log_model(path)

    def _close(self, status: RunResult) -> None:
        experiment, self._experiment = self._experiment, None
        experiment.log_other("trainwright_status", status)
        experiment.end()
        self._journal.end(self._rows_file)

    # -- beyond numbers ----------------------------------------------------------------------------------------------------

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Write images by name: arrays, tensors or lists of images. The client's log_image gets the options."""
        for key, images in values.items():
            for image in list(images) if isinstance(images, (list, tuple)) else [images]:
                at = self._step if step is None else step
                if self._begin() and self._unseen(at, {f"image {key}": None}):
                    value = channels_last(image) if "image_channels" not in options else image
                    name = f"{self.prefix}-{key}" if self.prefix else key
                    self._current().log_image(value, name=name, step=at, **options)
                    self._journal.add(self._rows_file, Row(at, self._next_time(), {f"image {key}": None}))

    def log_model(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        """Upload a checkpoint, or another folder or file, as a model of the experiment."""
        if self._begin():
            source = os.fspath(path).rstrip("/")
            self._current().log_model(name or os.path.basename(source), source)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_experiment": None}


def _client() -> Any:
    return importlib.import_module("comet_ml")
