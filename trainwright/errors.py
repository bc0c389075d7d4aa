"""The exceptions that a caller may want to catch.

    Exception
    +-- ValueError, TypeError, RuntimeError, ImportError    a bad setting, a wrong kind, a wrong moment, a missing package
    +-- TrainwrightError (RuntimeError)
        +-- CheckpointError     a checkpoint could not be written, found, verified or read
        +-- LaunchError         the processes of a job could not be started
        +-- WorkerFailed        a process of the job failed; it carries the rank and that process's own report

Settings are refused with the built-in exceptions above, in the constructor that received them.
"""


class TrainwrightError(RuntimeError):
    """Base of the errors that are this library's own."""


class CheckpointError(TrainwrightError):
    """A checkpoint could not be written, found, verified or read."""


class LaunchError(TrainwrightError):
    """The processes of a job could not be started."""


class WorkerFailed(TrainwrightError):
    """A process of the job failed.

    Args:
        rank: the global rank that failed first.
        report: what that process said last (a traceback, or the signal that ended it).
    """

    def __init__(self, rank: int, report: str) -> None:
        super().__init__(f"rank {rank} failed: {report}")
        self.rank = rank
        self.report = report
