"""The logger contract, the logger that does nothing, and how loggers convert values."""

from __future__ import annotations

import argparse
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, Protocol, Self

from trainwright.distributed.environment import Environment
from trainwright.errors import a_type_of

Params = Mapping[str, Any] | argparse.Namespace
"""The hyper-parameters that a logger takes."""
RunResult = Literal["success", "failed", "interrupted"]
"""Lightning's words, which `finalize` gets. Users read them as the states finished, failed and stopped (run_record.py)."""


class KeptCheckpoints(Protocol):
    """What a logger may read of a ModelCheckpoint: the paths that it keeps."""

    best_model_path: str
    last_model_path: str
    best_k_models: dict[str, Any]


class Logger:
    """The base of loggers: override what yours can record; the rest does nothing.

    The trainer calls `start` on every rank at the start of a run, then on rank 0: `log_hyperparams` and `log_graph` once,
    `log_metrics` for each row, `state_dict` at each checkpoint, `flush` at each epoch's end, `finalize` and `close` at the end.
    Calls from user code on other ranks have to do nothing. An Accelerator calls `start` on a rank that does not write before it
    has chosen where rank 0 writes, or never.

    A remote logger resumes its run with three methods. `state_dict` returns the remote run's id and the step up to which rows
    have arrived; with an empty state the next run is a new one. `load_state_dict` keeps the state of the logger of the same
    class (of several, in order). `start` then opens the run of that id, on the rank that writes. The resumed run logs the rows
    after that step again: overwrite them, or skip them. Without a `log_dir`, checkpoints go to default_root_dir.

    >>> class Printed(tw.Logger):
    ...     def log_metrics(self, metrics, step=None):
    ...         print(step, sorted(metrics))
    >>> trainer = tw.Trainer(logger=Printed(), log_every_n_steps=4, max_epochs=1, enable_model_summary=False)
    >>> trainer.fit(module, loader)
    3 ['epoch', 'loss']
    7 ['epoch', 'loss']
    """

    log_dir: str | None = None
    """The folder of this run; None before `start`, or without a folder."""
    save_dir: str | None = None
    """The folder of all runs; None without a folder."""
    root_dir: str | None = None
    """The folder of the runs of this name; None without a folder."""
    name: str | None = None
    """The common name of this logger's runs."""
    version: int | str | None = None
    """The version of this run among them."""
    experiment: Any = None
    """The underlying writer, for anything beyond this contract."""
    _has_warned_of_images = False
    _has_trained = _is_continued = False
    """Whether a fit has used this logger, and whether the next fit resumes its run."""

    @classmethod
    def of_project(cls, project: str, save_dir: str | None, /, **options: Any) -> Self:
        """Return a logger for a raw loop that chose it by name; override it if the constructor has other arguments."""
        return cls(**options)

    def begin_fit(self) -> None:
        """Called on every rank before the `start` of a fit: a new run, unless it resumes the run of this logger."""
        if self._has_trained and not self._is_continued:
            self._leave_run()
        self._has_trained, self._is_continued = True, False

    def _leave_run(self) -> None:
        """Leave the run, so that the next `start` begins another one."""

    def start(self, agreed: Callable[[str], str], *, is_writer: bool) -> None:
        """Choose where this run logs. Collective: called at the start of each run, on every rank.

        `agreed(text)` returns rank 0's text on every rank.
        """

    def log_hyperparams(self, params: Params, metrics: Mapping[str, Any] | float | None = None) -> None:
        """Record the hyper-parameters of the run, with metrics where the logger has both; called once by the trainer."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write one row; the step defaults to that of the previous row."""

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Write images by name: each an array, a tensor or a list of images; warn once if this logger stores none."""
        if not self._has_warned_of_images:
            self._has_warned_of_images = True
            warnings.warn(
                f"{type(self).__name__}.log_images({', '.join(map(repr, values))}) stores nothing, since this logger takes no "
                "images. Pass a TensorBoardLogger too, as in logger=[tw.CSVLogger(), tw.TensorBoardLogger()].",
                stacklevel=2,
            )

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Record the graph of the model; called once by the trainer."""

    def state_dict(self) -> dict[str, Any]:
        """Return this logger's position as plain data for a checkpoint, once everything before it is written; on rank 0."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the position in a checkpoint; called on every rank before `start`, if the checkpoint has one."""

    def save(self) -> None:
        """Write what is buffered; `flush` calls it by default."""

    def flush(self) -> None:
        """Make what was logged durable; called at the end of each epoch."""
        self.save()

    def plot(self, path: str | os.PathLike[str] | None = None, metrics: Sequence[str] | None = None) -> str:
        """Draw the curves of this run, and return the path of the file."""
        raise NotImplementedError(
            f"{type(self).__name__}.plot() was called, but it writes no files to draw from; CSVLogger and TensorBoardLogger "
            "can draw theirs. Pass the Trainer one of them too."
        )

    def after_save_checkpoint(self, checkpoint_callback: KeptCheckpoints) -> None:
        """Called on rank 0 once a checkpoint of a ModelCheckpoint is complete; with async_save, at the next save or the end."""

    def finalize(self, status: RunResult) -> None:
        """Called at the end of a run, before `close`, with the run's result."""

    def close(self) -> None:
        """Flush and close; called at the end of a run, also after a failure."""
        self.flush()


def rank_zero_experiment(experiment: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a getter for `experiment` that gives an object which does nothing on all ranks but 0.

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
    """Has every attribute, accepts every call, is a context manager and an empty collection, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look up protocols that this object does not have
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
    """Replaces the loggers in a trial run (`fast_dev_run`): every call does nothing, and as a list of loggers it is empty."""

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
    """Return the metrics as Python numbers; the items of a dict become name/key. TypeError if a value is not one number."""
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
        f"the metric {name!r} was given to a logger as {a_type_of(value)}; expected numbers, tensors or arrays of "
        "one element, or dicts of them."
    )


def to_dict(params: Params) -> dict[str, Any]:
    """Return hyper-parameters as a dict; raise TypeError unless they are a Mapping or a Namespace."""
    if isinstance(params, argparse.Namespace):
        return dict(vars(params))
    if not isinstance(params, Mapping):
        raise TypeError(f"log_hyperparams got {params!r:.80}, {a_type_of(params)}; expected a dict or a Namespace.")
    return dict(params)


def to_json(value: Any) -> Any:
    """Return the value as JSON data; other types become lists or text."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Enum):
        return to_json(value.value)
    if isinstance(value, str):  # yaml refuses subclasses, such as numpy's
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
