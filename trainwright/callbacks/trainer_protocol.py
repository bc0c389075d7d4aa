"""TrainerProtocol: the members of the Trainer that a callback may use, and all that the built-in callbacks use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from trainwright.callbacks.base import Callback
    from trainwright.checkpoint.store import CheckpointWriter
    from trainwright.distributed.connection import Connection
    from trainwright.distributed.ranks import Ranks
    from trainwright.engine.optimizers import SchedulerConfig
    from trainwright.loggers.base import Logger
    from trainwright.profilers import Profiler
    from trainwright.strategies import Strategy
    from trainwright.trainer.timeline import Timeline

Batches = int | float
"""A number of batches, or math.inf if it is unknown until the loader ends."""


class Counters(Protocol):
    """The counters of a run that a checkpoint stores."""

    @property
    def batch(self) -> int:
        """Batches that this rank has finished in the epoch."""

    @property
    def batches_that_stepped(self) -> int:
        """Batches after which an optimizer stepped."""

    @property
    def logged_step(self) -> int:
        """The x value of the loggers' rows: during fit, the number of steps before the latest batch."""

    @property
    def total_batches(self) -> int:
        """Batches that this rank has finished in the run."""

    @property
    def validations(self) -> int:
        """Validations of the run."""

    @property
    def epoch_ended(self) -> bool:
        """True in on_train_epoch_end of a whole epoch, False if the run stops within it."""

    @property
    def progress(self) -> RunProgress:
        """The current phase of the run."""

    @property
    def timeline(self) -> Timeline:
        """How long the fit has waited for data, trained, validated and saved, in seconds by phase."""

    def is_where(self, saved: dict[str, Any]) -> bool:
        """Return whether a run resumed from a checkpoint with these counters would continue from here."""


class RunProgress(Protocol):
    """The current phase of the run."""

    @property
    def obstacle(self) -> str:
        """Why the failed run cannot be resumed exactly from here, or "" if it can."""

    @property
    def is_in_batch(self) -> bool:
        """True from a training batch's start to the end of its hooks."""

    @property
    def is_leaving(self) -> bool:
        """True in on_train_epoch_end if the run stops within the epoch."""

    @property
    def is_mid_epoch_validation(self) -> bool:
        """True during a validation within a training epoch."""

    @property
    def is_within_window(self) -> bool:
        """True while a window of several batches is open, or gradients of manual optimization wait: a save is put off."""


class Metrics(Protocol):
    """The members of a run's metrics that a callback may use."""

    def monitored(self, name: str, asker: str) -> float:
        """Return a metric that `asker` follows. A ValueError names the logged metrics if it is missing."""

    def record(self, values: Mapping[str, float]) -> None:
        """Add values to callback_metrics. They must be the same on every rank."""

    def is_outdated(self, name: str) -> bool:
        """Return whether a metric is stale: from earlier weights or an earlier epoch."""


class SavingEngine(Protocol):
    """The members of the Engine that a callback may use."""

    @property
    def seed(self) -> int:
        """The seed of the data's order."""

    @property
    def num_data_ranks(self) -> int:
        """The number of parts of the data."""

    @property
    def ranks(self) -> Ranks:
        """The agreement of the ranks on small values, such as a decision of rank 0."""

    @property
    def connection(self) -> Connection:
        """The connection to the job. All ranks meet at the same step of a `sync_point(name)`."""

    @property
    def writer(self) -> CheckpointWriter:
        """The writer of checkpoints, with the save in flight."""

    def reduce(self, tensor: Tensor, op: str = "mean") -> Tensor:
        """Return the elementwise mean, sum, min or max over the ranks. Collective."""

    def note_base(self) -> None:
        """Take the digests of the frozen parameters. Collective (see `Engine.note_base`)."""

    def find_fault(self) -> str:
        """Return a text that names weights that are not finite, or "" if all are. Collective."""

    def finish_save(self) -> None:
        """Wait for the save in flight and raise its error. Collective."""


class TrialTrainer(Protocol):
    """The Trainer of a trial run, as far as a callback uses it."""

    @property
    def world_size(self) -> int:
        """The number of processes of the job."""

    @property
    def fit(self) -> Callable[..., None]:
        """Train a module."""


class TrainerProtocol(Protocol):
    """The `trainer` of a hook. A callback that uses nothing else keeps working when the Trainer's internals change.

    Annotate the parameter with this class or with `tw.Trainer`, which has all of its members: `Callback` accepts both.
    """

    should_stop: bool
    """Set it to True to end the run (see `Trainer.should_stop`)."""
    accumulate_grad_batches: int
    """Batches of one optimizer step. It may be changed at the start of an epoch."""

    @property
    def global_rank(self) -> int:
        """The number of this process in the job, from 0."""

    @property
    def world_size(self) -> int:
        """The number of processes of the job."""

    @property
    def is_global_zero(self) -> bool:
        """True on rank 0."""

    @property
    def strategy(self) -> Strategy:
        """The strategy: it runs the steps of a prepared module."""

    @property
    def callbacks(self) -> Sequence[Callback]:
        """All callbacks of the run."""

    @property
    def loggers(self) -> Sequence[Logger]:
        """The loggers. Write to them on rank 0 only."""

    @property
    def profiler(self) -> Profiler:
        """The profiler, which by default measures nothing."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers of configure_optimizers."""

    @property
    def lr_scheduler_configs(self) -> Sequence[SchedulerConfig]:
        """The schedulers and when they step."""

    @property
    def max_epochs(self) -> int | None:
        """The number of epochs to train, or -1 for no limit."""

    @property
    def max_steps(self) -> int:
        """The number of optimizer steps to make, or -1 for no limit."""

    @property
    def fast_dev_run(self) -> bool | int:
        """The batches of a trial run, which writes nothing. False in a real run."""

    @property
    def log_every_n_steps(self) -> int:
        """Steps between two rows of step values, or 0 for none."""

    @property
    def current_epoch(self) -> int:
        """The number of the epoch, from 0."""

    @property
    def state(self) -> Counters:
        """The counters of the run."""

    @property
    def enable_validation(self) -> bool:
        """True if this fit validates."""

    @property
    def sanity_checking(self) -> bool:
        """True during the sanity check."""

    @property
    def is_dummy_batch(self) -> bool:
        """True if the batch only keeps collectives in step with other ranks: discard its results."""

    @property
    def batch_indices(self) -> list[Any] | None:
        """In predict, the dataset's indices of the batch's samples, or None if the loader has none."""

    @property
    def num_training_batches(self) -> Batches:
        """Training batches of an epoch on this rank."""

    @property
    def num_val_batches(self) -> list[Batches]:
        """Batches of every validation loader."""

    @property
    def num_sanity_val_batches(self) -> list[Batches]:
        """Batches of every validation loader in the sanity check."""

    @property
    def num_test_batches(self) -> list[Batches]:
        """Batches of every test loader."""

    @property
    def num_predict_batches(self) -> list[Batches]:
        """Batches of every prediction loader."""

    @property
    def global_step(self) -> int:
        """Optimizer steps of the run."""

    @property
    def metrics(self) -> Metrics:
        """The metrics, to read one or to record another."""

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The latest value of every metric: over all ranks for an epoch, this rank's for a step."""

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The metrics logged with prog_bar=True. Reading them waits for the device."""

    @property
    def engine(self) -> SavingEngine:
        """The Engine, as far as a callback may use it."""

    @property
    def default_root_dir(self) -> str:
        """Where logs and checkpoints go unless a logger or a callback has its folder."""

    @property
    def log_dir(self) -> str | None:
        """The first logger's folder of this run, or None if it has none."""

    @property
    def train_dataloader(self) -> Any:
        """The training loaders, as they were given."""

    @property
    def resume_source(self) -> str | None:
        """The checkpoint that this fit was resumed from."""

    def save_checkpoint(
        self,
        filepath: str,
        weights_only: bool = False,
        *,
        blocking: bool = True,
        overwrite: bool = False,
        trained_only: bool = False,
        export: str | None = None,
    ) -> bool:
        """Write a checkpoint. Collective (see `Trainer.save_checkpoint`)."""

    def trial(self, **changes: Any) -> TrialTrainer:
        """Return a Trainer with the same arguments for a trial run (see `Trainer.trial`)."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0, above a progress bar."""

    def stop_soon(self) -> None:
        """Stop all ranks at the same optimizer step. Call it on any rank and from any thread."""
