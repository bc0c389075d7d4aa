"""The logger of Weights & Biases, through its client."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from trainwright.errors import a_type_of
from trainwright.loggers.base import RunResult, SilentExperiment
from trainwright.loggers.remote import RemoteLogger, Row, names_of

STEP = "trainer/global_step"
"""The x axis of all curves."""


class WandbLogger(RemoteLogger):
    """Writes to a run of Weights & Biases (extra `wandb`).

    Without an API key the run is offline, and a warning says how to upload it. A run that resumes from a checkpoint continues
    the service's run of the same id.

    If the script has opened a run with `wandb.init`, as in a sweep, the logger uses that run and never finishes it.

    After a successful call the run stays open, for `wandb.log` and the Trainer's next call. It is finished by
    `wandb.finish()`, by another run of a WandbLogger, or by the end of the process. After a failed call it is finished at once.

    Args:
        name: the run's name. With None the service chooses one.
        save_dir: the folder of the client's files, a local path.
        version: the run's id, or None for a new run.
        offline: only write files, which `wandb sync` uploads.
        dir: the same as save_dir.
        id: the same as version.
        project: the project, by default WANDB_PROJECT or the client's default.
        experiment: a run of `wandb.init`, which the logger uses and does not finish.
        log_model: True uploads the checkpoints of every ModelCheckpoint as artifacts at the end of the run, "all" as soon as
            they are complete.
        prefix: put before the name of every metric, with a dash.
        checkpoint_name: the name of the artifacts of checkpoints, by default model- and the run's id.
        add_file_policy: "immutable" uploads checkpoints without copying them first.
        kwargs: other arguments of wandb.init, such as entity=, group=, tags= and mode=.

    Raises:
        ModuleNotFoundError: wandb is not installed.
        ValueError: log_model is unknown.

    >>> logger = tw.WandbLogger(project="digits", offline=True, tags=["first"])
    >>> trainer = tw.Trainer(logger=logger, max_epochs=1)
    >>> logger.name
    'digits'
    """

    _idle: ClassVar[list[WandbLogger]] = []
    """The loggers whose runs are still open after a call."""
    _opened: ClassVar[set[str]] = set()
    """The ids of the runs that loggers have opened."""

    loggable = object
    """The type of values for `log_texts`: the client also accepts types such as wandb.Image."""

    shown_in = "the run's page (experiment.url; of an offline run after `wandb sync`)"

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | os.PathLike[str] = ".",
        version: str | None = None,
        offline: bool = False,
        dir: str | os.PathLike[str] | None = None,
        id: str | None = None,
        project: str | None = None,
        log_model: bool | str = False,
        experiment: Any = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        add_file_policy: str = "mutable",
        **kwargs: Any,
    ) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise ModuleNotFoundError("WandbLogger needs wandb: pip install wandb, or use CSVLogger.")
        super().__init__(prefix, log_model, version or id or (experiment.id if experiment is not None else None))
        self._name, self._group, self._offline, self._options = name, project, offline, kwargs
        self.project = project or "wandb"
        self.save_dir: str = os.path.abspath(os.fspath(dir if dir is not None else save_dir))
        self._artifact_name, self._policy = checkpoint_name, add_file_policy
        self._run: Any = experiment
        self._is_own = experiment is None
        """Whether this logger has to finish the run."""
        self._has_warned_of_steps = False

    @property
    def name(self) -> str | None:  # type: ignore[override]
        """Return the project."""
        return self._run.project if self._run is not None else self._group

    @property
    def experiment(self) -> Any:
        """Return wandb's run, opened if necessary, or on other ranks than 0 an object that does nothing."""
        return self._run if self._begin() else SilentExperiment()

    def start(self, agreed: Callable[[str], str], *, is_writer: bool) -> None:
        self._is_open = False  # the user may have finished a run that was opened by hand
        super().start(agreed, is_writer=is_writer)
        self._leave_idle()

    def _open(self, run_id: str | None) -> str:
        if self._is_own and self._run is not None and run_id != self._run.id:
            self._finish()  # it is idle, and the checkpoint is of another run
        if self._run is not None:
            try:
                self._define_axis()
            except _client().errors.UsageError:  # the user has finished it
                self._run = None
        if self._run is None:
            for logger in [*self._idle]:
                logger.end_run()
            run = _client().run
            self._is_own = run is None or run.id in self._opened or self.given_id not in (None, run.id)
            self._run = self._begun(run_id) if self._is_own else run
            self._opened.update([self._run.id] if self._is_own else [])
            self._define_axis()
        if not getattr(self._run, "disabled", False):
            self._group = self._run.project or self._group
        return str(self._run.id)

    def _define_axis(self) -> None:
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP, step_sync=True)

    def _begun(self, run_id: str | None) -> Any:
        wandb = _client()
        os.makedirs(self.save_dir, exist_ok=True)
        options: dict[str, Any] = {"name": self._name, "project": self._group, "dir": self.save_dir, "id": run_id}
        options |= {"resume": "allow", "mode": "offline" if self._offline else None}
        if getattr(wandb.setup(), "most_recent_active_run", wandb.run) is not None:
            options["reinit"] = "create_new"  # otherwise init returns that run; wandb.log works only without it
        options |= self._options
        try:
            return wandb.init(**options)
        except wandb.errors.UsageError as error:
            warnings.warn(
                f"wandb: {error} The run is stored in {self.save_dir}/wandb. Upload it with `wandb sync` once you are logged "
                "in. Set WANDB_MODE=offline to avoid this warning.",
                stacklevel=2,
            )
            return wandb.init(**{**options, "mode": "offline"})

    @property
    def _steps(self) -> Path | None:
        """Return the file of the written rows, next to the run's folder, or None for a disabled run."""
        folder = None if getattr(self._run, "disabled", False) else getattr(self._run, "dir", None)
        return Path(folder).parent.with_name(f"trainwright-{self._run.id}.steps") if folder else None

    def _rows_there(self) -> Iterator[tuple[int, int, str]]:
        try:
            lines = self._steps.read_text().splitlines() if self._steps is not None else []
        except OSError:  # for example if the checkpoint was moved without the file
            lines = []
        for line in lines:
            with suppress(ValueError, TypeError):  # half a line of a killed run
                step, time, names = json.loads(line)
                yield step, time, names_of(dict.fromkeys(names))

    def _record_row(self, row: Row) -> None:
        """Add a written row to the file, since the client cannot read rows back. A failure is a warning."""
        if self._steps is None:
            return
        try:
            self._steps.parent.mkdir(parents=True, exist_ok=True)
            with open(self._steps, "a") as file:  # which may end in half a line
                file.write("\n" + json.dumps([row.step, row.time, sorted(row.values)]))
        except OSError as error:
            if not self._has_warned_of_steps:
                self._has_warned_of_steps = True
                warnings.warn(
                    f"WandbLogger could not write {self._steps}: {error}. A resumed run would repeat the rows after its "
                    "checkpoint.",
                    stacklevel=2,
                )

    def _write(self, rows: deque[Row]) -> None:
        while rows:
            row = rows[0]
            self._run.log({**row.values, STEP: row.step})
            rows.popleft()
            self._record_row(row)

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        self._run.config.update(params, allow_val_change=True)

    def _upload(self, path: str, is_best: bool) -> None:
        self.log_model(path, aliases=["latest", "best"] if is_best else ["latest"])

    def _close(self, status: RunResult) -> None:
        self._leave_idle()
        if self._is_own and status == "success":
            self._idle.append(self)  # wandb.log and the Trainer's next call may use the run
        elif self._is_own:
            self._finish(exit_code=1)

    def _leave_idle(self) -> None:
        self._idle[:] = (logger for logger in self._idle if logger is not self)

    def _finish(self, exit_code: int = 0) -> None:
        if self._is_own and self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=exit_code)

    def end_run(self) -> None:
        super().end_run()
        self._leave_idle()
        self._finish()

    # -- beyond numbers ----------------------------------------------------------------------------------------------------

    def watch(self, model: Any, log: str = "gradients", log_freq: int = 100, log_graph: bool = True) -> None:
        """Record the gradients of a model, as `wandb.watch` does."""
        if self._begin():
            self._run.watch(model, log=log, log_freq=log_freq, log_graph=log_graph)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Write images by name: arrays, tensors or lists of images."""
        for key, images in values.items():
            self.log_image(key, list(images) if isinstance(images, (list, tuple)) else [images], step, **options)

    def log_image(self, key: str, images: list[Any], step: int | None = None, **kwargs: Sequence[Any]) -> None:
        """Write a list of images. Lists in kwargs, such as caption=, have an entry for every image."""
        self._log_media("Image", key, images, step, kwargs)

    def log_audio(self, key: str, audios: list[Any], step: int | None = None, **kwargs: Sequence[Any]) -> None:
        """Write a list of sounds. Lists in kwargs, such as sample_rate=, have an entry for every sound."""
        self._log_media("Audio", key, audios, step, kwargs)

    def log_video(self, key: str, videos: list[Any], step: int | None = None, **kwargs: Sequence[Any]) -> None:
        """Write a list of videos. Lists in kwargs, such as fps=, have an entry for every video."""
        self._log_media("Video", key, videos, step, kwargs)

    def _log_media(self, kind: str, key: str, items: list[Any], step: int | None, options: Mapping[str, Any]) -> None:
        if not isinstance(items, list):
            raise TypeError(f"log_{kind.lower()}({key!r}) got {a_type_of(items)}; expected a list.")
        for name, values in options.items():
            if len(values) != len(items):
                raise ValueError(
                    f"log_{kind.lower()}({key!r}): {len(items)} items, but {name} has {len(values)} entries."
                )
        if not self._begin():
            return
        make = getattr(_client(), kind)
        media = [make(item, **{name: values[at] for name, values in options.items()}) for at, item in enumerate(items)]
        self._log_value(key, media, step)

    def log_table(
        self,
        key: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Write a table of values or texts: columns and rows, or a data frame."""
        if self._begin():
            self._log_value(key, _client().Table(columns=columns, data=data, dataframe=dataframe), step)

    log_text = log_table
    """Lightning's name for a table of texts."""

    def log_texts(self, values: Mapping[str, Any], step: int | None = None) -> bool:
        """Write texts, and other values that the client accepts, by name."""
        if self._begin():
            for key, value in values.items():
                self._log_value(key, value, step)
        return True

    def _log_value(self, key: str, value: Any, step: int | None) -> None:
        name = f"{self.prefix}-{key}" if self.prefix else key
        at = self._step if step is None else step
        if self._unseen(at, {name: value}):
            self._run.log({name: value, STEP: at})
            self._record_row(Row(at, self._next_time(), {name: value}))

    def log_model(self, path: str | os.PathLike[str], name: str | None = None, aliases: Sequence[str] = ()) -> None:
        """Upload a checkpoint, or another folder or file, as an artifact of type "model"."""
        if self._begin():
            artifact = _client().Artifact(name or self._artifact_name or f"model-{self._run.id}", type="model")
            (artifact.add_dir if os.path.isdir(path) else artifact.add_file)(os.fspath(path), policy=self._policy)
            self._run.log_artifact(artifact, aliases=list(aliases) or None)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_run": None}


def _client() -> Any:
    return importlib.import_module("wandb")
