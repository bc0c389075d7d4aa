"""Optimization: the losses and gradients of a window, and the steps of the optimizer and the schedulers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright.engine.optimizers import SchedulerConfig, clear_gradients
from trainwright.errors import a_type_of
from trainwright.rank_zero import rank_zero_warn
from trainwright.strategies.base import Clipping
from trainwright.strategies.divided_optimizers import parameters_of
from trainwright.trainer.epoch_batches import Batch
from trainwright.trainer.evaluate import skip_none
from trainwright.trainer.training_run import TrainingRun
from trainwright.trainer.uneven_round import discarded


def run_training_step(run: TrainingRun, batch: Batch) -> Any:
    """Return the outputs of training_step on a batch, or None for a batch that is None, which is skipped."""
    if not batch.arguments:
        return skip_none(run.engine.num_data_ranks)
    return run.engine.run(run.module, "training_step", *batch.arguments)


def read_loss(outputs: Any, world_size: int, by_tokens: bool = False) -> Tensor | None:
    """Return the loss in training_step's outputs, or None to skip the batch."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, dict) and isinstance(outputs.get("loss"), Tensor):
        loss: Tensor = outputs["loss"]
        if "num_tokens" in outputs and not by_tokens:
            rank_zero_warn(
                "training_step returned 'num_tokens', which has no effect: the loss is trained as it is. Pass "
                "accumulate_by='tokens' to the Trainer, or return the number under another key."
            )
        return loss
    if outputs is None and world_size == 1:
        return None
    if outputs is None:
        raise RuntimeError(
            f"training_step returned None on one of {world_size} ranks, which skips the batch only there. Return a loss on "
            "every rank (0.0 * the loss, to let it count for nothing)."
        )
    types = {name: type(value).__name__ for name, value in outputs.items()} if isinstance(outputs, dict) else {}
    raise TypeError(
        f"training_step returned {f'a dict of {types}' if types else a_type_of(outputs)}. Expected a loss tensor, a dict with "
        "one under 'loss', or None to skip the batch."
    )


def clear_with_hooks(run: TrainingRun, batch: Batch) -> None:
    """Clear the gradients at a window's start by the hooks and the module's optimizer_zero_grad."""
    optimizer = run.optimizer
    if optimizer is None:
        return
    run.hooks.call("on_before_zero_grad", optimizer)
    if "optimizer_zero_grad" in run.plan.overrides:
        run.plan.overrides["optimizer_zero_grad"](run.state.epoch, batch.index, optimizer)
    else:
        clear_gradients(optimizer)


def send_backward(run: TrainingRun, batch: Batch, outputs: Any) -> Tensor | None:
    """Send the loss in training_step's outputs backward, scaled for its window and its round, and return it.

    After a dummy batch, restore the state that it has changed.
    """
    plan, loss = (
        run.plan,
        outputs
        if type(outputs) is Tensor
        else read_loss(outputs, run.engine.num_data_ranks, run.window.tokens is not None),
    )
    if loss is not None and run.optimizer is not None:
        if loss.numel() != 1:
            raise RuntimeError(
                f"training_step returned a loss of shape {tuple(loss.shape)}. Expected one element. Reduce it, for example "
                "with .mean()."
            )
        if not loss.requires_grad:
            raise RuntimeError(
                "training_step returned a loss that no parameter requiring a gradient led to. Compute it from the module's "
                "parameters, outside of torch.no_grad and without .detach() or .item()."
            )
        scaled = loss
        if batch.is_uneven or run.scales_losses:
            num_tokens = outputs.get("num_tokens") if isinstance(outputs, dict) else None
            scaled = run.window.scale(loss, batch.weight, num_tokens)
        if run.accumulate > 1:
            run.window.hold_gradients()
        if plan.before_backward:
            run.hooks.call("on_before_backward", scaled)
        try:
            run.engine.backward(scaled, plan.overrides.get("backward"))
        except RuntimeError as error:
            if "backward through the graph a second time" in str(error):
                error.add_note(
                    "If training_step calls loss.backward() itself, leave that out. If it keeps a tensor of an earlier batch "
                    "(a hidden state), detach it."
                )
            raise
        if plan.after_backward:
            run.hooks.call("on_after_backward")
    if run.uneven_round is not None:
        run.uneven_round.put_back()  # before the step, whose changes stay on a rank without a sample too
    return loss


def keep_unstepped_gradients(run: TrainingRun) -> None:
    """Store gradients of manual optimization that wait for a step over an epoch's end, where a strategy can checkpoint them."""
    if run.window.is_open and run.engine.strategy.capabilities.gradients_are_parameters:
        run.state.keep_gradients(run.window)
    run.window.drop()


def step(run: TrainingRun, batch: Batch, loss: Tensor | None) -> None:
    """Step the optimizer at a window's end, and the step-wise schedulers unless that step was skipped."""
    state, plan, optimizer = run.state, run.plan, run.optimizer
    if optimizer is None:  # training without an optimizer still counts its steps
        state.count_steps(1, 0)
        return
    if loss is None and not run.window.has_gradients:  # training_step has returned None for the window's batches
        return
    # The window ended early, or half precision rounded what its losses were divided by (engine/window.py). Hooks and
    # clipping are to see the gradients of the window's mean.
    if run.scales_losses and (correction := run.window.correction) != 1.0:
        run.engine.strategy.clip_gradients(optimizer, Clipping(scale=correction))
    if plan.before_step:
        run.engine.strategy.finalize(optimizer)
        run.hooks.call("on_before_optimizer_step", optimizer)
    if plan.has_own_step:
        run.step_results.clear()
        step_by_module(run, optimizer, batch, loss)
        made, skipped = len(run.step_results), sum(result.skipped for result in run.step_results)
    else:
        made, skipped = 1, run.engine.step(optimizer, plan.clipping).skipped
    state.count_steps(made, skipped)
    if made > skipped and run.trained.schedulers:
        step_schedulers(run, "step", state.step, plateau=False)


def step_by_module(run: TrainingRun, optimizer: Optimizer, batch: Batch, loss: Tensor | None) -> None:
    """Clip and step as the module says, or with a closure that the optimizer asks for."""
    overrides = run.plan.overrides
    prepared = run.trained.prepared_optimizers[0]
    run.engine.strategy.finalize(optimizer)
    clip_gradients(run, optimizer)
    # After the clipping: the closure notes the current gradients, to see later changes.
    closure = StepClosure(run, optimizer, batch, loss)
    if "optimizer_step" in overrides:
        overrides["optimizer_step"](run.state.epoch, run.state.batch, prepared, closure)
    elif run.plan.gives_closure:
        prepared.step(closure)
    else:
        prepared.step()
    if optimizer in run.engine.strategy.finalized:  # the module left the step out, and with it these gradients
        run.engine.strategy.release(optimizer)


def clip_gradients(run: TrainingRun, optimizer: Optimizer) -> None:
    """Clip the gradients as the module or the settings say."""
    settings, plan = run.settings, run.plan
    if "configure_gradient_clipping" in plan.overrides:
        algorithm = settings.gradient_clip_algorithm
        plan.overrides["configure_gradient_clipping"](optimizer, settings.gradient_clip_val, algorithm)
    elif plan.clipping is not None:
        run.engine.strategy.clip_gradients(optimizer, plan.clipping)


class StepClosure:
    """What an optimizer's step may call to know the loss and its gradients.

    The first call returns the loss that is computed already, and leaves its gradients. Each later call, or a first call after
    parameters or gradients have changed (other than through `.data`, which torch does not count), repeats training_step and
    backward without logging or counting. On several ranks it returns the mean, weighted by each rank's samples.
    """

    def __init__(self, run: TrainingRun, optimizer: Optimizer, batch: Batch, loss: Tensor | None) -> None:
        self._run, self._optimizer, self._batch = run, optimizer, batch
        self._loss = None if loss is None else loss.detach() * batch.weight
        self._seen = self._fingerprint()
        self._is_first = True

    def _fingerprint(self) -> list[tuple[int, int] | None]:
        """Return the identity and the version of every parameter and gradient."""
        tensors = [tensor for parameter in parameters_of(self._optimizer) for tensor in (parameter, parameter.grad)]
        return [None if tensor is None else (id(tensor), tensor._version) for tensor in tensors]

    def __call__(self) -> Tensor | None:
        is_unchanged = self._is_first and self._fingerprint() == self._seen
        self._is_first = False
        if not is_unchanged:
            return self._recompute()
        return None if self._loss is None else self._mean(self._loss)

    def _recompute(self) -> Tensor:
        run = self._run
        if (
            run.accumulate > 1
            or not run.engine.precision.takes_closure
            or not run.engine.strategy.capabilities.takes_closure
        ):
            raise RuntimeError(
                f"{type(self._optimizer).__name__} calls for the loss again within its step, which cannot be recomputed under "
                "accumulate_grad_batches > 1, a loss scale (16-mixed) or a strategy that steps by itself. Leave that "
                "setting at its default, or choose an optimizer that looks at the gradients once."
            )
        self._optimizer.zero_grad()
        # Optimizers step under no_grad.
        with torch.enable_grad(), discarded(run.module, run.logbook.collector):
            loss = read_loss(run_training_step(run, self._batch), run.engine.num_data_ranks)
            if loss is None:
                raise RuntimeError("training_step returned None when the optimizer called for the loss again.")
            loss = loss * self._batch.weight
            run.engine.backward(loss, run.plan.overrides.get("backward"))
            clip_gradients(run, self._optimizer)
        return self._mean(loss.detach())

    def _mean(self, loss: Tensor) -> Tensor:
        """Return the mean over the ranks, so that all of them take the same step. Collective."""
        return loss if self._run.engine.num_data_ranks == 1 else self._run.engine.reduce(loss, "mean")


def step_schedulers(run: TrainingRun, interval: str, count: int, *, plateau: bool) -> None:
    """Step the schedulers of an interval whose frequency divides the count."""
    if run.plan.is_manual:
        return
    overrides = run.plan.overrides
    for config in run.trained.schedulers:
        if config.interval != interval or bool(config.reduce_on_plateau) != plateau or count % config.frequency:
            continue
        metric = _monitored(run, config) if plateau else None
        if plateau and metric is None:
            continue
        if "lr_scheduler_step" in overrides:
            overrides["lr_scheduler_step"](config.scheduler, metric)
        elif metric is None:
            config.scheduler.step()
        else:
            config.scheduler.step(metric)


def _monitored(run: TrainingRun, config: SchedulerConfig) -> float | None:
    """Return rank 0's value of the metric that a scheduler follows, or None, with a warning, if it is optional and missing.

    Collective: call on every rank, whatever it has logged itself.
    """
    logbook, name, asker = run.logbook, config.monitor or "", type(config.scheduler).__name__

    def value() -> float | None:
        return logbook.monitored(name, asker) if config.strict or name in logbook.callback_metrics else None

    ranks = run.engine.ranks
    # Rank 0's, because a step's value differs on each rank, and so would the learning rates.
    found = value() if ranks.world_size == 1 else ranks.decide(value, "the score that a scheduler follows")
    if found is None:
        rank_zero_warn(
            f"{asker} follows {name!r}, which was not logged; the scheduler does not step here.", stacklevel=2
        )
    return found
