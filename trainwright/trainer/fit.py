"""Fit: the training loop, top to bottom.

    fit:         check a few validation batches
                 for each epoch: fit_epoch
    fit_epoch:   for each batch of this rank's share, in the order of (seed, epoch):
                     train_batch; log every n steps
                 step the epoch-wise schedulers; validate, where due
                 reduce the epoch's metrics over the ranks; save a checkpoint (callbacks)
    train_batch: zero_grad         at a window's start
                 training_step
                 backward          the loss divided by the window's own length
                 clip, step        at a window's end
                 step the step-wise schedulers, unless the step was skipped

A window is the batches of one optimizer step (`accumulate_grad_batches`); the last one of an epoch may be shorter. Under
manual optimization training_step does all of train_batch itself. When which hook is called stands in hooks.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from trainwright.data.loaders import ShardedLoader, with_last
from trainwright.data.seeding import set_rng_state
from trainwright.data.transfer import to_device
from trainwright.engine.engine import Engine
from trainwright.engine.optimizers import SchedulerConfig
from trainwright.module import Module
from trainwright.precision.base import Clipper
from trainwright.trainer.evaluate import discarded, evaluate, sanity_check
from trainwright.trainer.hooks import JUDGED, HookTable
from trainwright.trainer.state import TrainerState

if TYPE_CHECKING:
    from trainwright.trainer.trainer import Trainer


@dataclass
class TrainingRun:
    """What the loop reads at every batch, looked up once."""

    trainer: Trainer
    engine: Engine
    module: Module
    hooks: HookTable
    state: TrainerState
    loader: ShardedLoader
    optimizer: Optimizer | None
    """The one to step; None under manual optimization."""
    schedulers: list[SchedulerConfig]
    num_batches: int | None
    """Batches of this rank in an epoch, limits included; None where that shows only when the loader ends."""
    most_batches: int | None
    """A limit of the batches; None for none."""
    accumulate: int
    clip: Clipper | None
    window_has_gradients: bool = False
    is_within_window: bool = False
    """True while gradients wait for further batches of their window."""
    waiting_saves: list[tuple[str, bool]] = field(default_factory=list)
    """Checkpoints that were asked for within a window, and are written when it ends."""

    def __post_init__(self) -> None:
        hooks = self.hooks
        self.before_zero_grad, self.before_backward = hooks["on_before_zero_grad"], hooks["on_before_backward"]
        self.after_backward, self.before_step = hooks["on_after_backward"], hooks["on_before_optimizer_step"]


def fit(run: TrainingRun, val_loader: ShardedLoader | None, generators: dict[str, Any] | None) -> None:
    """Train until the trainer's limits are reached; `run.state` says where to begin. Collective.

    `generators` are this rank's, of the checkpoint that the run goes on from; None in a fresh run.
    """
    trainer, state, hooks = run.trainer, run.state, run.hooks
    if val_loader is not None and trainer.resume_source is None:
        sanity_check(trainer, run.module, val_loader)
    if generators is not None:
        set_rng_state(generators)
    hooks.call("on_train_start")
    while not trainer.is_done:
        fit_epoch(run, val_loader)
        if not state.epoch_ended:
            break  # stopped within the epoch: it is where a resumed run goes on
        state.next_epoch()
    hooks.call("on_train_end")


def fit_epoch(run: TrainingRun, val_loader: ShardedLoader | None) -> None:
    """Train one epoch, or what is left of it. Collective."""
    trainer, state, hooks, device = run.trainer, run.state, run.hooks, run.engine.device
    collector = trainer.logbook.start(run.module, training=True)
    run.loader.set_epoch(run.engine.seed, state.epoch, state.batch)
    hooks.call("on_train_epoch_start")
    batch_start, batch_end = hooks["on_train_batch_start"], hooks["on_train_batch_end"]
    on_host, log_every = device.type == "cpu", trainer.settings.log_every_n_steps
    is_last = run.num_batches is not None and state.batch >= run.num_batches
    for batch, is_last in with_last(run.loader, state.batch, run.num_batches, run.most_batches):
        batch = batch if on_host else to_device(batch, device)
        collector.batch = batch
        index = state.batch
        if batch_start and -1 in [hook(batch, index) for hook in batch_start]:
            is_last = True
            leave_window(run)
            break
        steps_before = state.step
        outputs = train_batch(run, batch, index, is_last)
        state.batch = index + 1
        stepped = state.step != steps_before
        state.batches_that_stepped += stepped
        for hook in batch_end:
            hook(outputs, batch, index)
        if stepped and state.batches_that_stepped % log_every == 0:
            trainer.logbook.log_step()
        if run.waiting_saves and not run.is_within_window:
            trainer.save_waiting()
        if (stepped or run.optimizer is None) and trainer.wants_to_stop:
            break
    else:
        refuse_short_epoch(run, is_last)
    collector.batch = None
    finish_epoch(run, val_loader, is_complete=is_last)


def finish_epoch(run: TrainingRun, val_loader: ShardedLoader | None, is_complete: bool) -> None:
    """Step the epoch-wise schedulers, validate where due, reduce the metrics, and let callbacks judge them. Collective."""
    trainer, state, hooks = run.trainer, run.state, run.hooks
    collector = trainer.logbook.collector
    if is_complete:
        step_schedulers(run, "epoch", state.epoch + 1, plateau=False)
    if val_loader is not None and (state.epoch + 1) % trainer.settings.check_val_every_n_epoch == 0:
        evaluate(trainer, run.module, val_loader, "validation", trainer.settings.limit_val_batches)
    trainer.logbook.collector = collector
    hooks.call("on_train_epoch_end")
    trainer.logbook.finish(run.module)
    if is_complete:
        step_schedulers(run, "epoch", state.epoch + 1, plateau=True)
    state.epoch_ended = is_complete
    hooks.call(JUDGED)
    trainer.logbook.flush()


def train_batch(run: TrainingRun, batch: Any, index: int, is_last: bool) -> Any:
    """Run one batch through training_step, backward and, at its window's end, the optimizer; return its outputs."""
    engine, optimizer = run.engine, run.optimizer
    if optimizer is None:
        return engine.run(run.module, "training_step", batch, index)
    run.is_within_window = True
    place = index % run.accumulate
    if place == 0:
        for hook in run.before_zero_grad:
            hook(optimizer)
        optimizer.zero_grad()
        run.window_has_gradients = False
    at_end = is_last or place == run.accumulate - 1
    if run.accumulate > 1:
        engine.sync_gradients(at_end)
    weight = round_weight(run, index) if is_last else 1.0
    if weight == 0.0:  # this rank has no sample of its own in the last round
        with discarded(run.module, run.trainer.logbook.collector):
            outputs = engine.run(run.module, "training_step", batch, index)
    else:
        outputs = engine.run(run.module, "training_step", batch, index)
    loss = outputs if type(outputs) is Tensor else read_loss(outputs, engine.world_size)
    if loss is not None:
        weighted = weigh(run, loss, index, place, weight)
        for hook in run.before_backward:
            hook(weighted)
        engine.backward(weighted)
        for hook in run.after_backward:
            hook()
        run.window_has_gradients = True
    if at_end and run.window_has_gradients:
        step(run, optimizer, place + 1)
    run.is_within_window = not at_end
    return outputs


def step(run: TrainingRun, optimizer: Optimizer, window_length: int) -> None:
    """Step the optimizer at a window's end, and the step-wise schedulers unless that step was skipped."""
    state = run.state
    clip = run.clip
    if run.num_batches is None and window_length < run.accumulate:
        # The window ended early, which was not known when its losses were divided: it weighs by its own length.
        settings = run.trainer.settings
        clip = run.engine.clipper(settings.clip_norm, settings.clip_value, scale=run.accumulate / window_length)
    if run.before_step:
        run.engine.strategy.unscale(optimizer)
        for hook in run.before_step:
            hook(optimizer)
    result = run.engine.step(optimizer, clip)
    state.step += 1
    if result.skipped:
        state.skipped_steps += 1
    elif run.schedulers:
        step_schedulers(run, "step", state.step, plateau=False)
        step_schedulers(run, "step", state.step, plateau=True)


def leave_window(run: TrainingRun) -> None:
    """Drop the gradients of a window that will not be ended."""
    if run.optimizer is not None and run.is_within_window:
        run.optimizer.zero_grad()
        run.is_within_window = False
        run.trainer.save_waiting()


def refuse_short_epoch(run: TrainingRun, is_last: bool) -> None:
    """Raise where the loader gave no batch, or fewer than its length (RuntimeError)."""
    if run.num_batches is None and run.state.batch == 0:
        raise RuntimeError("the training loader gave no batch; give it data.")
    if run.num_batches is not None and not is_last:
        raise RuntimeError(
            f"the training loader gave {run.state.batch} batches, but its length is {run.num_batches}; let the __len__ of its "
            "sampler tell how many it yields."
        )


def round_weight(run: TrainingRun, index: int) -> float:
    """Return this rank's weight in the round of a batch: not 1 in a re-split last round, unless a limit came before it."""
    return run.loader.last_weight if run.loader.length in (None, index + 1) else 1.0


def weigh(run: TrainingRun, loss: Tensor, index: int, place: int, weight: float) -> Tensor:
    """Return the loss as it goes backward: divided by its window's length, and by its share of a re-split last round."""
    if loss.numel() != 1:
        raise RuntimeError(
            f"training_step returned a loss of shape {tuple(loss.shape)}; accepted is one element. Reduce it, for example with "
            ".mean()."
        )
    if not loss.requires_grad:
        raise RuntimeError(
            "training_step returned a loss that no parameter requiring a gradient led to; compute it from the module's "
            "parameters, outside of torch.no_grad and without .detach() or .item()."
        )
    if weight != 1.0:
        loss = loss * weight
    if run.accumulate == 1:
        return loss
    length = run.accumulate
    if run.num_batches is not None:
        length = min(length, run.num_batches - (index - place))
    return loss / length


def read_loss(outputs: Any, world_size: int) -> Tensor | None:
    """Return the loss in what training_step returned; None where the batch is to be skipped."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, dict) and isinstance(outputs.get("loss"), Tensor):
        loss: Tensor = outputs["loss"]
        return loss
    if outputs is None and world_size == 1:
        return None
    if outputs is None:
        raise RuntimeError(
            f"training_step returned None on one of {world_size} ranks, which skips the batch there alone; return a loss on "
            "every rank (0.0 * the loss, to let it count for nothing)."
        )
    raise TypeError(
        f"training_step returned a {type(outputs).__name__}; accepted are a loss tensor, a dict with the key 'loss', or None "
        "to skip the batch."
    )


def step_schedulers(run: TrainingRun, interval: str, count: int, *, plateau: bool) -> None:
    """Step the schedulers of an interval whose frequency divides the count."""
    if run.optimizer is None:
        return
    for config in run.schedulers:
        if config.interval != interval or config.is_plateau != plateau or count % config.frequency:
            continue
        if plateau:
            config.scheduler.step(run.trainer.monitored(config.monitor or "", "ReduceLROnPlateau"))
        else:
            config.scheduler.step()
