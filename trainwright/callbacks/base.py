"""The callback contract: hooks to override, and state to keep. trainer/hooks.py lists the hooks in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from trainwright.callbacks.checkpoint_policy import are_similar

if TYPE_CHECKING:
    from trainwright.checkpoint.reader import StoredCheckpoint
    from trainwright.loggers.base import RunResult
    from trainwright.module import Module
    from trainwright.trainer.trainer import Trainer


class Callback:
    """The base of callbacks: override the hooks you need. Each is called on every rank.

    `trainwright.callbacks.TrainerProtocol` lists what a hook may use of `trainer`. Annotate the parameter with it or with
    `tw.Trainer`: type checkers accept both.

    >>> class PrintSteps(tw.Callback):
    ...     def on_train_epoch_end(self, trainer, module):
    ...         print(f"epoch {trainer.current_epoch}: {trainer.global_step} steps so far")
    >>> trainer = tw.Trainer(callbacks=PrintSteps(), max_epochs=2, enable_model_summary=False)
    >>> trainer.fit(module, loader)
    epoch 0: 8 steps so far
    epoch 1: 16 steps so far
    """

    runs_last = False
    """True: called after the others; in on_train_batch_end, on_validation_end and on_train_epoch_end after the module too,
    because it reads or saves what they have done there."""

    reads_outputs = True
    """False: on_train_batch_end ignores the outputs, so they are not prepared for it."""

    counts_rounds = False
    """True: its state counts steps, not samples, and is kept when its rank has no sample in a round."""

    @property
    def state_key(self) -> str:
        """Return the key of this callback's state in a checkpoint; it differs for different settings."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain data and tensors. Rank 0's is stored and loaded on every rank.

        Gather first what differs between ranks (`full_tensor()` of a sharded tensor, say).
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""

    def _on_restored(self, trainer: Trainer) -> None:
        """Called once the state of a resumed run is loaded: a callback that had stopped it sets should_stop again."""

    def _make_up(self, trainer: Trainer) -> None:
        """Called after on_train_start of a resumed run, with the checkpoint's generators: do what the killed run did not."""

    def _parts_to_save(self, trainer: Trainer, module: Module) -> Mapping[str, Mapping[str, Tensor]]:
        """Return what a checkpoint holds in pieces as the weights: the `parts` of `Engine.save`. Called on every rank."""
        return {}

    def _load_parts(
        self, trainer: Trainer, module: Module, checkpoint: StoredCheckpoint, edited: Mapping[str, Tensor] | None
    ) -> None:
        """Load, into a resumed run with its weights, what `_parts_to_save` returned.

        `edited` is the checkpoint's model, if hooks have changed it. It must not communicate.
        """

    def _after_training(self, trainer: Trainer, module: Module, pass_over: Callable[[], bool]) -> None:
        """Called after the last epoch of a fit that no signal has stopped, before on_train_end.

        `pass_over` runs training_step on each batch of an epoch, without gradients, and returns whether it could. Collective.
        """

    def _make_scheduler(self, optimizer: Optimizer) -> Any:
        """Return the scheduler of the optimizer that replaces the module's from this epoch on; None to leave them.

        Called after on_fit_start and each on_train_epoch_start.
        """

    def _tune(self, make_trial: Callable[..., Any], module: Module, data: Mapping[str, Any]) -> None:
        """Called before a fit that resumes nothing: search a setting in trial runs, with Trainers that `make_trial` returns."""

    def _report_run(self, trainer: Trainer, module: Module, result: RunResult, error: BaseException | None) -> None:
        """Called on every rank once a fit, validate or test that has begun is over, with its loggers closed. Not collective."""

    @property
    def _has_asked_to_stop(self) -> bool:
        """Whether this callback has set should_stop, and sets it again in a resumed run."""
        return False

    def on_save_checkpoint(self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is written, with its contents; keys may be added or removed (see Module's)."""

    def on_load_checkpoint(self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]) -> None:
        """Called with the contents of the checkpoint that a run resumes from, before they are loaded."""

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a number, as `Module.log` does; in a hook of a run only."""
        self._module().log(name, value, *args, **kwargs)

    def log_dict(self, values: Any, *args: Any, **kwargs: Any) -> None:
        """Log each value of a flat dict, as `Module.log_dict` does; in a hook of a run only."""
        self._module().log_dict(values, *args, **kwargs)

    def _module(self) -> Module:
        module: Module | None = self.__dict__.get("_running_module")
        if module is None:
            raise RuntimeError(f"{type(self).__name__}.log works in the hooks of a run only.")
        return module

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_running_module"}

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Called first, after the datamodule's; stage is "fit", "validate", "test" or "predict"."""

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Called last, also after a failure."""

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        """Called when an exception ends the run, on the rank that raised it; a signal that stops a fit raises none."""

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        """Called once the model and the optimizers are prepared, before a checkpoint's state is loaded."""

    def on_fit_end(self, trainer: Trainer, module: Module) -> None:
        """Called after on_train_end."""

    def on_sanity_check_start(self, trainer: Trainer, module: Module) -> None:
        """Called before the few validation batches that check validation before training."""

    def on_sanity_check_end(self, trainer: Trainer, module: Module) -> None:
        """Called after these batches."""

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        """Called after the sanity check, before the first epoch."""

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """Called before the first batch of an epoch."""

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Called after the last batch of an epoch and the validation that follows it."""

    def on_train_batch_start(self, trainer: Trainer, module: Module, batch: Any, batch_idx: int) -> int | None:
        """Called with the batch on its device, before training_step; return -1, on every rank, to end the epoch here."""

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after the steps of optimizer and schedulers, with training_step's outputs as a dict, its loss as "loss"."""

    def on_before_zero_grad(self, trainer: Trainer, module: Module, optimizer: Optimizer) -> None:
        """Called before the gradients of a new accumulation window are cleared."""

    def on_before_backward(self, trainer: Trainer, module: Module, loss: Tensor) -> None:
        """Called before backward, with the loss divided by the window's length, before any loss scale."""

    def on_after_backward(self, trainer: Trainer, module: Module) -> None:
        """Called after backward; gradients may still be multiplied by the loss scale."""

    def on_before_optimizer_step(self, trainer: Trainer, module: Module, optimizer: Optimizer) -> None:
        """Called before the gradients are clipped and the optimizer steps; the loss scale is divided out."""

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        """Called before validation, with the module in evaluation mode."""

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        """Called after validation, with its metrics in trainer.callback_metrics."""

    def on_validation_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Called after the last validation batch."""

    def on_validation_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before validation_step."""

    def on_validation_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after validation_step."""

    def on_test_start(self, trainer: Trainer, module: Module) -> None:
        """Called before a test, with the module in evaluation mode."""

    def on_test_end(self, trainer: Trainer, module: Module) -> None:
        """Called after a test, with its metrics in trainer.callback_metrics."""

    def on_test_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Called after the last test batch."""

    def on_test_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before test_step."""

    def on_test_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after test_step."""

    def on_predict_start(self, trainer: Trainer, module: Module) -> None:
        """Called before a prediction, with the module in evaluation mode."""

    def on_predict_end(self, trainer: Trainer, module: Module) -> None:
        """Called after a prediction."""

    def on_predict_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """Called before the first batch to predict."""

    def on_predict_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Called after the last batch to predict."""

    def on_predict_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before predict_step."""

    def on_predict_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after predict_step, with what it returned."""


def attach(callbacks: Iterable[Callback], module: Module) -> None:
    """Let callbacks log to a module's run, until `detach`."""
    for callback in callbacks:
        callback.__dict__["_running_module"] = module


def detach(callbacks: Iterable[Callback]) -> None:
    """Undo `attach`."""
    for callback in callbacks:
        callback.__dict__.pop("_running_module", None)


def load_states(callbacks: Sequence[Callback], states: Mapping[str, Any]) -> list[str]:
    """Let callbacks load their states, a ModelCheckpoint also under a similar key; return the keys of the others."""
    left, own = dict(states), [each.state_key for each in callbacks]
    for callback, key in zip(callbacks, own, strict=True):
        others = (each for each in left if each not in own and are_similar(key, each))
        if (found := key if key in left else next(others, None)) is not None:
            callback.load_state_dict(left.pop(found))
    return list(left)


def note_restored(callbacks: Iterable[Callback], trainer: Trainer) -> None:
    """Tell callbacks that the state of a resumed run is loaded."""
    for callback in callbacks:
        callback._on_restored(trainer)


def make_up(callbacks: Iterable[Callback], trainer: Trainer) -> None:
    """Let callbacks do what the killed run did not, after on_train_start of a resumed run."""
    for callback in callbacks:
        callback._make_up(trainer)


def parts_to_save(
    callbacks: Iterable[Callback], trainer: Trainer, module: Module | None
) -> dict[str, Mapping[str, Tensor]]:
    """Return what the callbacks store in pieces: the `parts` of `Engine.save`."""
    parts: dict[str, Mapping[str, Tensor]] = {}
    for callback in callbacks:
        if module is not None:
            parts |= callback._parts_to_save(trainer, module)
    return parts


def load_parts(
    callbacks: Iterable[Callback],
    trainer: Trainer,
    module: Module,
    checkpoint: StoredCheckpoint,
    edited: Mapping[str, Tensor] | None,
) -> None:
    """Let callbacks load what they have stored in pieces."""
    for callback in callbacks:
        callback._load_parts(trainer, module, checkpoint, edited)


def after_training(
    callbacks: Iterable[Callback], trainer: Trainer, module: Module, pass_over: Callable[[], bool]
) -> None:
    """Let callbacks finish a fit, with passes over its training data. Collective."""
    for callback in callbacks:
        callback._after_training(trainer, module, pass_over)


def make_scheduler(callbacks: Iterable[Callback], optimizer: Optimizer) -> Any:
    """Return the scheduler of the optimizer with which a callback replaces the module's; None without."""
    made = (callback._make_scheduler(optimizer) for callback in callbacks)
    return next((each for each in made if each is not None), None)


def tune(
    callbacks: Iterable[Callback], make_trial: Callable[..., Any], module: Module, data: Mapping[str, Any]
) -> None:
    """Let callbacks search settings before a fit. Collective."""
    for callback in callbacks:
        callback._tune(make_trial, module, data)


def report(
    callbacks: Iterable[Callback], trainer: Trainer, module: Module, result: RunResult, error: BaseException | None
) -> None:
    """Let callbacks report on a fit or an evaluation that has ended, with an error or without."""
    for callback in callbacks:
        callback._report_run(trainer, module, result, error)


def stop_themselves(callbacks: Iterable[Callback]) -> bool:
    """Return whether one of the callbacks has set should_stop, and sets it again in a resumed run."""
    return any(callback._has_asked_to_stop for callback in callbacks)


class Checkpoint(Callback):
    """The base of callbacks that save checkpoints."""

    runs_last = True
