"""The exceptions that callers may want to catch.

    Exception
    +-- ValueError, TypeError, RuntimeError, ImportError    a bad value, a wrong type, a wrong time, a missing package
    +-- TrainwrightError (RuntimeError)
        +-- CheckpointError     a checkpoint could not be written, found, verified or read
        |   +-- MissingCheckpoint (FileNotFoundError)    nothing is at its path
        +-- LaunchError         the processes of a job could not be started
        +-- WorkerFailed        a worker process of a call has failed
    SystemExit (BaseException)
    +-- RunStopped              a signal has stopped fit, and the run was saved if it could be

Settings are refused with the built-in exceptions, in the constructor that receives them.
"""


class TrainwrightError(RuntimeError):
    """Base class of this library's errors."""


class CheckpointError(TrainwrightError):
    """A checkpoint could not be written, found, verified or read."""


class MissingCheckpoint(CheckpointError, FileNotFoundError):
    """Nothing is at the path of a checkpoint."""


class LaunchError(TrainwrightError):
    """The processes of a job could not be started."""


class WorkerFailed(TrainwrightError):
    """A worker process of a call has failed; the message has the rank, the cause and its traceback."""


class RunStopped(SystemExit):
    """A signal has stopped `trainer.fit`; uncaught, it ends the process with `code`, without a traceback.

    Exit code: 75 if the run was saved and can be resumed, 130 after Ctrl-C, 128 + the signal's number if nothing was saved.
    """
