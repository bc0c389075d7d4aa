"""The exceptions that callers may want to catch.

    Exception
    +-- ValueError, TypeError, RuntimeError, ImportError    a bad value, a wrong type, a wrong time, a missing package.
    +-- TrainwrightError (RuntimeError)
        +-- CheckpointError     a checkpoint could not be written, found, verified or read.
        |   +-- MissingCheckpoint (FileNotFoundError)    nothing is at its path.
        +-- LaunchError         the processes of a job could not be started.
        +-- WorkerFailed        a worker process of a call has failed.
    SystemExit (BaseException)
    +-- RunStopped              a signal has stopped fit, and the run was saved if it could be.

Settings are refused with the built-in exceptions, in the constructor that receives them.
"""

import difflib
from collections.abc import Iterable

__all__ = [
    "CheckpointError", "LaunchError", "MissingCheckpoint", "RunStopped", "TrainwrightError", "WorkerFailed",
    "a_type_of", "did_you_mean", "with_article",
]  # fmt: skip


class TrainwrightError(RuntimeError):
    """The base class of this library's errors. Wrong settings raise ValueError or TypeError.

    >>> try:
    ...     module = Classifier.load_from_checkpoint("runs/epoch=9-step=90.ckpt")
    ... except tw.TrainwrightError as error:
    ...     print(type(error).__name__)
    MissingCheckpoint
    """


class CheckpointError(TrainwrightError):
    """A checkpoint could not be written, found, verified or read.

    >>> try:
    ...     module = Classifier.load_from_checkpoint("runs/epoch=9-step=90.ckpt")
    ... except tw.CheckpointError as error:
    ...     print(error)
    runs/epoch=9-step=90.ckpt does not exist; expected ...
    """


class MissingCheckpoint(CheckpointError, FileNotFoundError):
    """Nothing is at the path of a checkpoint."""


class LaunchError(TrainwrightError):
    """The processes of a job could not be started.

    >>> try:
    ...     trainer = tw.Trainer(devices=2)
    ... except tw.LaunchError as error:
    ...     raise SystemExit(f"the job could not be started: {error}")
    """


class WorkerFailed(TrainwrightError):
    """A worker process of a call has failed. The message has the rank, the cause and its traceback.

    >>> trainer = tw.Trainer(devices=2, strategy="ddp_spawn", max_epochs=1, enable_model_summary=False)
    >>> try:
    ...     trainer.fit(module, loader)
    ... except tw.WorkerFailed as error:
    ...     print(f"no weights came back: {error}")
    """


class RunStopped(SystemExit):
    """A signal has stopped `trainer.fit`. Uncaught, it ends the process with `code`, without a traceback.

    Exit code: 75 if the run was saved and can be resumed, 130 after Ctrl-C, 128 + the signal's number if nothing was saved.

    >>> try:
    ...     tw.Trainer(max_epochs=1, enable_model_summary=False).fit(module, loader)
    ... except tw.RunStopped as stop:
    ...     print(f"the job was stopped. It ends with exit code {stop.code}")
    ...     raise
    """


def a_type_of(value: object) -> str:
    """Return the name of a value's type with its article, for the text of an error: "an int", "a Tensor"."""
    return with_article(type(value).__name__)


def with_article(name: str) -> str:
    """Return the name of a type with its article."""
    is_vowel = name.startswith(tuple("AEIOaeio")) and not name.startswith("One")  # a OneCycleLR
    return f"{'an' if is_vowel else 'a'} {name}"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return the question " Did you mean ...?" with the known name nearest to a wrong one, or "" if none is near."""
    names = {each.lower().lstrip("-"): each for each in known}  # dashes make no two flags similar
    close = difflib.get_close_matches(str(name).lower().lstrip("-"), names, n=1)
    return f" Did you mean {names[close[0]]!r}?" if close else ""
