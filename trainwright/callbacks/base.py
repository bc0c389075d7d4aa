"""The callback contract: hooks to override, and state to keep. trainer/hooks.py lists the hooks in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import isfunction
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from trainwright.errors import a_type_of, did_you_mean
from trainwright.module_hooks import AnyTrainer

if TYPE_CHECKING:
    from trainwright.checkpoint.reader import StoredCheckpoint
    from trainwright.loggers.base import RunResult
    from trainwright.module import Module


class Callback:
    """The base of callbacks: override the hooks you need. They are called on every rank.

    `trainwright.callbacks.TrainerProtocol` lists the members of `trainer` for hooks. Annotate the parameter with it or with
    `tw.Trainer`: type checkers accept both. In a subclass of a built-in callback, annotate it with the protocol.

    >>> class PrintSteps(tw.Callback):
    ...     def on_train_epoch_end(self, trainer, module):
    ...         print(f"epoch {trainer.current_epoch}: {trainer.global_step} steps so far")
    >>> trainer = tw.Trainer(callbacks=PrintSteps(), max_epochs=2, enable_model_summary=False)
    >>> trainer.fit(module, loader)
    epoch 0: 8 steps so far
    epoch 1: 16 steps so far
    """

    priority: int = 0
    """Callbacks of a higher priority are called first, and callbacks of equal priority in list order.

    A callback with a negative priority is called after the module in on_train_batch_end, on_validation_end and
    on_train_epoch_end, where it sees the results of the others and, at an epoch's end, the reduced metrics.
    """

    reads_outputs = True
    """False: on_train_batch_end ignores the outputs, so they are not prepared for it."""

    @property
    def state_key(self) -> str:
        """Return the key of this callback's state in a checkpoint. It differs for different settings."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run, as plain data and tensors. Rank 0's is stored, and loaded on every rank.

        First gather values that differ between ranks, for example with `full_tensor()` of a sharded tensor.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a result of `state_dict`."""

    def sharded_state_dict(self, trainer: AnyTrainer, module: Module) -> Mapping[str, Mapping[str, Tensor]]:
        """Called before a checkpoint is written: return tensors of the shapes of this rank's pieces of the module's tensors.

        They are by section and name. A section "model" replaces the module's own tensors, others are stored beside it. Called
        on every rank. `trainer.strategy.model_pieces(module)` returns the pieces.
        """
        return {}

    def load_sharded_state_dict(
        self, trainer: AnyTrainer, module: Module, checkpoint: StoredCheckpoint, edited: Mapping[str, Tensor] | None
    ) -> None:
        """Called with the weights of a resumed run: load the tensors of `sharded_state_dict` with `checkpoint.read_into`.

        `edited` is the checkpoint's model if a hook has changed it. Must not communicate.
        """

    def on_save_checkpoint(self, trainer: AnyTrainer, module: Module, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is written, with its contents. Keys may be added or removed (see Module's)."""

    def on_load_checkpoint(self, trainer: AnyTrainer, module: Module, checkpoint: dict[str, Any]) -> None:
        """Called with the contents of the checkpoint that a run resumes from, before they are loaded."""

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a number, as `Module.log` does. It works in the hooks of a run only."""
        self._module().log(name, value, *args, **kwargs)

    def log_dict(self, values: Any, *args: Any, **kwargs: Any) -> None:
        """Log the values of a flat dict, as `Module.log_dict` does. It works in the hooks of a run only."""
        self._module().log_dict(values, *args, **kwargs)

    def _module(self) -> Module:
        module: Module | None = self.__dict__.get("_running_module")
        if module is None:
            raise RuntimeError(f"{type(self).__name__}.log works in the hooks of a run only.")
        return module

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_running_module"}

    def on_tune(self, trainer: AnyTrainer, module: Module, data: Mapping[str, Any]) -> None:
        """Called before the setup of a fit that resumes nothing: search a setting, with Trainers that `trainer.trial` returns.

        `data` has the arguments train_dataloaders, val_dataloaders and datamodule of fit. Collective.
        """

    def setup(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        """Called first, after the datamodule's. `stage` is "fit", "validate", "test" or "predict"."""

    def teardown(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        """Called at the end of a run, also after a failure."""

    def on_run_end(self, trainer: AnyTrainer, module: Module, result: RunResult, error: BaseException | None) -> None:
        """Called last, after teardown and the close of the loggers, if the loop of a fit, validate or test has begun.

        `result` is "success", "failed" or "interrupted". Called on every rank. It must not communicate.
        """

    def on_exception(self, trainer: AnyTrainer, module: Module, exception: BaseException) -> None:
        """Called when an exception ends the run, on the rank that raised it. A signal that stops a fit raises none."""

    def on_fit_start(self, trainer: AnyTrainer, module: Module) -> None:
        """Called once the model and the optimizers are prepared, before a checkpoint's state is loaded."""

    def configure_lr_scheduler(self, trainer: AnyTrainer, module: Module, optimizer: Optimizer) -> Any:
        """Called after on_fit_start and after on_train_epoch_start: return a scheduler that replaces the module's, or None."""
        return None

    def on_fit_end(self, trainer: AnyTrainer, module: Module) -> None:
        """Called after on_train_end."""

    def on_sanity_check_start(self, trainer: AnyTrainer, module: Module) -> None:
        """Called before the few validation batches that check validation before training."""

    def on_sanity_check_end(self, trainer: AnyTrainer, module: Module) -> None:
        """Called after these batches."""

    def on_resume_start(self, trainer: AnyTrainer, module: Module) -> None:
        """Called after a resumed run's state is loaded, before on_train_start. A callback that had stopped it does so again."""

    def on_train_start(self, trainer: AnyTrainer, module: Module) -> None:
        """Called after the sanity check, before the first epoch."""

    def on_resume_end(self, trainer: AnyTrainer, module: Module) -> None:
        """Called after on_train_start of a resumed run, before its first epoch: do the remaining work of the killed run.

        The RNG state comes from the checkpoint, and is restored afterwards.
        """

    def has_requested_stop(self, trainer: AnyTrainer, module: Module) -> bool:
        """Called before a checkpoint is written while should_stop is set: return whether this callback has set it.

        A resumed run then leaves it to on_resume_start to set should_stop again.
        """
        return False

    def on_before_train_end(self, trainer: AnyTrainer, module: Module, run_epoch: Callable[[], bool]) -> None:
        """Called after the last epoch, before on_train_end, unless a signal has stopped the fit.

        `run_epoch` runs training_step on the batches of an epoch, without gradients, and returns whether it could. Collective.
        """

    def on_train_end(self, trainer: AnyTrainer, module: Module) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self, trainer: AnyTrainer, module: Module) -> None:
        """Called before the first batch of an epoch."""

    def on_train_epoch_end(self, trainer: AnyTrainer, module: Module) -> None:
        """Called after the last batch of an epoch and the validation that follows it."""

    def on_train_epoch_stop(self, trainer: AnyTrainer, module: Module) -> None:
        """Called before on_train_epoch_end if a limit or should_stop ends the run within the epoch.

        A checkpoint saved here is as the latest batch left the run, so that a longer run can continue the epoch from it.
        """

    def on_save_point(self, trainer: AnyTrainer, module: Module) -> None:
        """Called after on_train_batch_end, on_validation_end, on_train_epoch_stop or on_train_epoch_end of all callbacks.

        Write here the checkpoint that one of these hooks has decided on. It then records which other saves are due, so that a
        run killed between two saves makes the second one in on_resume_end. Not called at the end of an epoch that was stopped.
        """

    def on_checkpoint_saved(self, trainer: AnyTrainer, module: Module, path: str) -> None:
        """Called on every rank once the checkpoint that a ModelCheckpoint has saved at `path` is complete.

        An async save is complete by the next save, or by the end of the run. Not called after an exception has ended the run.
        """

    def on_train_batch_start(self, trainer: AnyTrainer, module: Module, batch: Any, batch_idx: int) -> int | None:
        """Called with the batch on its device, before training_step. Return -1, on every rank, to end the epoch here."""

    def on_train_batch_end(self, trainer: AnyTrainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after the steps of optimizer and schedulers, with training_step's outputs as a dict, its loss as "loss"."""

    def on_before_zero_grad(self, trainer: AnyTrainer, module: Module, optimizer: Optimizer) -> None:
        """Called before the gradients of a new accumulation window are cleared."""

    def on_before_backward(self, trainer: AnyTrainer, module: Module, loss: Tensor) -> None:
        """Called before backward, with the loss divided by the window's length, before any loss scale."""

    def on_after_backward(self, trainer: AnyTrainer, module: Module) -> None:
        """Called after backward. Gradients may still be multiplied by the loss scale."""

    def on_before_optimizer_step(self, trainer: AnyTrainer, module: Module, optimizer: Optimizer) -> None:
        """Called before the gradients are clipped and the optimizer steps. The loss scale is divided out."""

    def on_validation_start(self, trainer: AnyTrainer, module: Module) -> None:
        """Called before validation, with the module in evaluation mode."""

    def on_validation_end(self, trainer: AnyTrainer, module: Module) -> None:
        """Called after validation, with its metrics in trainer.callback_metrics."""

    def on_validation_epoch_start(self, trainer: AnyTrainer, module: Module) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self, trainer: AnyTrainer, module: Module) -> None:
        """Called after the last validation batch."""

    def on_validation_batch_start(
        self, trainer: AnyTrainer, module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before validation_step."""

    def on_validation_batch_end(
        self, trainer: AnyTrainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after validation_step."""

    def on_test_start(self, trainer: AnyTrainer, module: Module) -> None:
        """Called before a test, with the module in evaluation mode."""

    def on_test_end(self, trainer: AnyTrainer, module: Module) -> None:
        """Called after a test, with its metrics in trainer.callback_metrics."""

    def on_test_epoch_start(self, trainer: AnyTrainer, module: Module) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self, trainer: AnyTrainer, module: Module) -> None:
        """Called after the last test batch."""

    def on_test_batch_start(
        self, trainer: AnyTrainer, module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before test_step."""

    def on_test_batch_end(
        self, trainer: AnyTrainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after test_step."""

    def on_predict_start(self, trainer: AnyTrainer, module: Module) -> None:
        """Called before a prediction, with the module in evaluation mode."""

    def on_predict_end(self, trainer: AnyTrainer, module: Module) -> None:
        """Called after a prediction."""

    def on_predict_epoch_start(self, trainer: AnyTrainer, module: Module) -> None:
        """Called before the first batch to predict."""

    def on_predict_epoch_end(self, trainer: AnyTrainer, module: Module) -> None:
        """Called after the last batch to predict."""

    def on_predict_batch_start(
        self, trainer: AnyTrainer, module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before predict_step."""

    def on_predict_batch_end(
        self, trainer: AnyTrainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after predict_step, with its result."""


def attach(callbacks: Iterable[Callback], module: Module) -> None:
    """Let callbacks log to a module's run, until `detach`."""
    for callback in callbacks:
        callback.__dict__["_running_module"] = module


def detach(callbacks: Iterable[Callback]) -> None:
    """Undo `attach`."""
    for callback in callbacks:
        callback.__dict__.pop("_running_module", None)


def check_integers(least: int, **given: Any) -> None:
    """Raise ValueError for an argument that is not an integer of at least `least`."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r} is not accepted; pass an integer of at least {least}.")


def require_logger(callback: Callback, trainer: AnyTrainer) -> None:
    """Raise ValueError if a callback that only logs is in a run without a logger."""
    if not trainer.loggers and not trainer.fast_dev_run:
        raise ValueError(
            f"{type(callback).__name__} writes to the trainer's loggers, but logger=False; give the Trainer a logger, or leave "
            "the callback out."
        )


class Checkpoint(Callback):
    """The base of callbacks that save checkpoints."""

    priority = -10


HOOKS = tuple(
    name
    for name, value in vars(Callback).items()
    if isfunction(value) and name[0] != "_" and name not in ("log", "log_dict", "state_dict", "load_state_dict")
)
"""The names of the hooks of callbacks."""


class LambdaCallback(Callback):
    """Calls the given functions at their hooks.

    Args:
        hooks: functions by the name of their hook, such as on_fit_end, called with that hook's arguments. None is ignored.

    Raises:
        TypeError: a name is not the name of a hook, or a value is neither a function nor None.

    >>> announce = tw.LambdaCallback(on_fit_end=lambda trainer, module: print(trainer.global_step, "steps"))
    >>> tw.Trainer(callbacks=announce, max_epochs=1, enable_model_summary=False).fit(module, loader)
    8 steps
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        for name, function in hooks.items():
            if name not in HOOKS:
                raise TypeError(
                    f"LambdaCallback was given {name!r}, which is not a hook; expected one of {', '.join(HOOKS)}."
                    f"{did_you_mean(name, HOOKS)}"
                )
            if function is not None and not callable(function):
                raise TypeError(f"{name}={function!r} is {a_type_of(function)}; expected a function or None.")
            if function is not None:
                setattr(self, name, function)  # on the instance, so that other hooks cost nothing
