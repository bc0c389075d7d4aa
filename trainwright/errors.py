"""The exceptions that a caller may want to catch.

    Exception
    +-- ValueError, TypeError, RuntimeError, ImportError    a bad setting, a wrong kind, a wrong moment, a missing package
    +-- TrainwrightError (RuntimeError)
        +-- CheckpointError     a checkpoint could not be written, found, verified or read
        +-- LaunchError         the processes of a job could not be started
        +-- WorkerFailed        a worker process of a call has failed
    SystemExit (BaseException)
    +-- RunStopped              a signal has stopped fit, and what there is to save is saved

Settings are refused with the built-in exceptions above, in the constructor that received them.
"""


class TrainwrightError(RuntimeError):
    """Base of the errors that are this library's own."""


class CheckpointError(TrainwrightError):
    """A checkpoint could not be written, found, verified or read."""


class LaunchError(TrainwrightError):
    """The processes of a job could not be started."""


class WorkerFailed(TrainwrightError):
    """A worker process of a call has failed; the message has the rank, the cause and its traceback."""


class RunStopped(SystemExit):
    """A signal has stopped `trainer.fit`; uncaught, it ends the process with `code`, without a traceback.

    The code is 75 where the run was saved, to be gone on with, 130 after Ctrl-C, and 128 + the signal's number where
    nothing was saved.
    """
