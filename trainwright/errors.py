"""The exceptions that a caller may want to catch.

    Exception
    +-- ValueError, TypeError, RuntimeError, ImportError    a bad setting, a wrong kind, a wrong moment, a missing package
    +-- TrainwrightError (RuntimeError)
        +-- CheckpointError     a checkpoint could not be written, found, verified or read
        +-- LaunchError         the processes of a job could not be started
        +-- WorkerFailed        a process to which work was handed over has failed

Settings are refused with the built-in exceptions above, in the constructor that received them.
"""


class TrainwrightError(RuntimeError):
    """Base of the errors that are this library's own."""


class CheckpointError(TrainwrightError):
    """A checkpoint could not be written, found, verified or read."""


class LaunchError(TrainwrightError):
    """The processes of a job could not be started."""


class WorkerFailed(TrainwrightError):
    """A process to which work was handed over has failed; the message names the rank and the cause."""
