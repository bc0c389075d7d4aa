"""The logger contract, the logger that does nothing, and the conversion of values."""

from __future__ import annotations

import argparse
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, Protocol, Self

from trainwright.distributed.environment import Environment
from trainwright.distributed.masking import shown
from trainwright.errors import a_type_of

Params = Mapping[str, Any] | argparse.Namespace
"""The hyper-parameters that a logger accepts."""
RunResult = Literal["success", "failed", "interrupted"]
"""Lightning's words for `finalize`. Users see the states finished, failed and stopped (run_record.py)."""


class KeptCheckpoints(Protocol):
    """The attributes of a ModelCheckpoint that a logger may read."""

    best_model_path: str
    last_model_path: str
    best_k_models: dict[str, Any]


class Logger:
    """The base of loggers: override the methods that yours supports. The others do nothing.

    The trainer calls `start` on every rank at the start of a run. It calls the other methods on rank 0. `log_hyperparams` and
    `log_graph` are called once, `log_metrics` for every row, and `state_dict` at checkpoints. `flush` is called at the end of
    an epoch, and `finalize` and `close` at the end of the run. Calls from user code on other ranks must do nothing. An
    Accelerator calls `start` on the other ranks before it has chosen rank 0's folder, or never.

    A remote logger resumes its run with three methods. `state_dict` returns the remote run's id and the step up to which rows
    have arrived. With an empty state the next run is a new one. `load_state_dict` gets the state of the logger of the same
    class, and several loggers of a class in order. `start` then opens the run of that id on rank 0. The resumed run logs the
    rows after that step again: overwrite or skip them. If a logger has no `log_dir`, checkpoints go to default_root_dir.

    >>> class Printed(tw.Logger):
    ...     def log_metrics(self, metrics, step=None):
    ...         print(step, sorted(metrics))
    >>> trainer = tw.Trainer(logger=Printed(), log_every_n_steps=4, max_epochs=1, enable_model_summary=False)
    >>> trainer.fit(module, loader)
    3 ['epoch', 'loss']
    7 ['epoch', 'loss']
    """

    log_dir: str | None = None
    """The folder of this run, or None before `start` or if there is no folder."""
    save_dir: str | None = None
    """The folder of all runs, or None."""
    root_dir: str | None = None
    """The folder of the runs of this name, or None."""
    name: str | None = None
    """The common name of the runs of this logger."""
    version: int | str | None = None
    """The version of this run."""
    experiment: Any = None
    """The underlying writer, for its other methods."""
    _has_warned_of_images = False
    _has_trained = _is_continued = False
    """Whether a fit has used this logger, and whether the next fit resumes its run."""

    @classmethod
    def of_project(cls, project: str, save_dir: str | None, /, **options: Any) -> Self:
        """Return a logger that a raw loop chose by name. Override it if the constructor has other arguments."""
        return cls(**options)

    def begin_fit(self) -> None:
        """Called on every rank before the `start` of a fit. It begins a new run, or resumes this logger's run."""
        if self._has_trained and not self._is_continued:
            self._leave_run()
        self._has_trained, self._is_continued = True, False

    def _leave_run(self) -> None:
        """Leave the run, so that the next `start` begins another one."""

    def start(self, agreed: Callable[[str], str], *, is_writer: bool) -> None:
        """Choose the place of this run, at its start.

        `agreed(text)` returns rank 0's text on every rank. Collective: called on every rank.
        """

    def log_hyperparams(self, params: Params, metrics: Mapping[str, Any] | float | None = None) -> None:
        """Record the hyper-parameters of the run, and metrics if the logger supports it. The trainer calls it once."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write one row. The default step is the step of the previous row."""

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Write images by name: arrays, tensors or lists of images. Warn once if this logger cannot."""
        if not self._has_warned_of_images:
            self._has_warned_of_images = True
            warnings.warn(
                f"{type(self).__name__}.log_images({', '.join(map(repr, values))}) stores nothing, since this logger stores no "
                "images. Pass a TensorBoardLogger too, as in logger=[tw.CSVLogger(), tw.TensorBoardLogger()].",
                stacklevel=2,
            )

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Record the graph of the model. The trainer calls it once."""

    def state_dict(self) -> dict[str, Any]:
        """Write all rows, and return the position as plain data for a checkpoint. Called on rank 0."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the position in a checkpoint. Called on every rank before `start`."""

    def save(self) -> None:
        """Write the buffered rows. `flush` calls it by default."""

    def flush(self) -> None:
        """Make all rows durable. Called at the end of every epoch."""
        self.save()

    def plot(self, path: str | os.PathLike[str] | None = None, metrics: Sequence[str] | None = None) -> str:
        """Draw the curves of this run, and return the path of the file."""
        raise NotImplementedError(
            f"{type(self).__name__}.plot() was called, but it writes no files to draw from. CSVLogger and TensorBoardLogger "
            "do. Pass the Trainer one of them too."
        )

    def after_save_checkpoint(self, checkpoint_callback: KeptCheckpoints) -> None:
        """Called on rank 0 after a complete save of a ModelCheckpoint. An async save may complete at the next one."""

    def finalize(self, status: RunResult) -> None:
        """Called with the run's result at its end, before `close`."""

    def close(self) -> None:
        """Flush and close. Called at the end of a run, also after a failure."""
        self.flush()


def rank_zero_experiment(experiment: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a getter for `experiment` whose value does nothing on other ranks than 0.

    >>> class Mine(tw.Logger):
    ...     @property
    ...     @tw.loggers.rank_zero_experiment
    ...     def experiment(self):
    ...         return client_of_a_service()
    """

    @functools.wraps(experiment)
    def on_rank_zero(logger: Any) -> Any:
        return experiment(logger) if Environment.detect().rank == 0 else SilentExperiment()

    return on_rank_zero


class SilentExperiment:
    """Does nothing: it has every attribute, accepts every call, and is a context manager and an empty collection."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols of copy and pickle, which it lacks
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> SilentExperiment:
        return self

    __getitem__ = __enter__ = __call__

    def __exit__(self, *args: Any) -> None:
        pass

    __setattr__ = __setitem__ = __exit__

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class SilentLogger(Logger):
    """Replaces the loggers under `fast_dev_run`: its calls do nothing, and as a list of loggers it is empty."""

    name = ""
    version = ""
    _has_warned_of_images = True

    def plot(self, path: str | os.PathLike[str] | None = None, metrics: Sequence[str] | None = None) -> str:
        return ""

    def __init__(self) -> None:
        self.experiment = SilentExperiment()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return SilentExperiment()

    def __getitem__(self, index: Any) -> SilentLogger:
        return self  # in the position of a list of loggers

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def to_numbers(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the metrics as Python numbers. Items of a dict become name/key. TypeError if a value is not one number."""
    numbers: dict[str, Any] = {}
    for name, value in metrics.items():
        if prefix and name not in ("step", "epoch"):
            name = f"{prefix}-{name}"
        if type(value) is float or type(value) is int:
            numbers[name] = value
        elif isinstance(value, Mapping):
            numbers.update(to_numbers({f"{name}/{key}": item for key, item in value.items()}))
        else:
            numbers[name] = _number(name, value)
    return numbers


def _number(name: str, value: Any) -> float:
    if isinstance(value, (bool, int, float)):
        return value
    size = getattr(value, "numel", getattr(value, "size", None))
    if hasattr(value, "item") and (size() if callable(size) else size) == 1:
        return value.detach().item() if hasattr(value, "detach") else value.item()  # type: ignore[no-any-return]
    raise TypeError(
        f"a logger got the metric {name!r} as {a_type_of(value)}; expected numbers, tensors or arrays of one element, or "
        "dicts of them."
    )


def to_dict(params: Params) -> dict[str, Any]:
    """Return hyper-parameters as a dict without secrets, or raise TypeError if they are not a Mapping or a Namespace."""
    params = vars(params) if isinstance(params, argparse.Namespace) else params
    if not isinstance(params, Mapping):
        raise TypeError(f"log_hyperparams got {params!r:.80}, {a_type_of(params)}; expected a dict or a Namespace.")
    return {name: shown(str(name), value) for name, value in params.items()}


def flattened(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested hyper-parameters as name/key and value."""
    for key, value in params.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def to_json(value: Any) -> Any:
    """Return the value as JSON data. Other types become lists or text."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Enum):
        return to_json(value.value)
    if isinstance(value, str):  # yaml rejects subclasses, such as the ones of numpy
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((to_json(item) for item in value), key=str)
    if type(value).__module__.partition(".")[0] in ("torch", "numpy") and hasattr(value, "tolist"):
        return to_json(value.tolist())
    return str(value)
