"""Evaluate: validation, test and prediction, each sample counted once on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from trainwright.data.combined import ShardedCombination, evaluation_loaders
from trainwright.data.loaders import ShardedLoader, refuse_length, with_last
from trainwright.data.seeding import isolate_rng, set_rng_state
from trainwright.distributed import collectives
from trainwright.distributed.sync_points import SyncPoint
from trainwright.module import Module, is_overridden
from trainwright.profilers.instrumentation import is_measuring
from trainwright.trainer.metrics import MetricCollector
from trainwright.trainer.own_rounds import OwnRounds
from trainwright.trainer.phase import Phase
from trainwright.trainer.sources import BatchTransfer, LoaderSource, PulledBatches
from trainwright.trainer.stage import Stage
from trainwright.trainer.steps import StepArguments, read_step
from trainwright.trainer.stop import EvaluationAbandoned
from trainwright.trainer.uneven_round import Communication, UnevenRound

if TYPE_CHECKING:
    from trainwright.trainer.trainer import Trainer

Share = ShardedLoader | ShardedCombination
LIMITS = {
    "validation": "limit_val_batches",
    "test": "limit_test_batches",
    "predict": "limit_predict_batches",
}


@dataclass
class Evaluation:
    """One stage of evaluation ("validation", "test" or "predict"): its step and its loaders, loaded when first needed."""

    trainer: Trainer
    module: Module
    stage: str
    source: LoaderSource
    transfer: BatchTransfer | None
    shown: Stage
    """What the trainer shows of its data."""
    arguments: StepArguments = field(default_factory=StepArguments)
    loaders: list[tuple[str | None, Share]] = field(default_factory=list)
    """This rank's share of each loader, and the name that the user gave it."""
    is_loaded: bool = False
    communication: Communication = field(default_factory=Communication)
    generators: dict[str, Any] | None = None
    """What the loaders' hook draws from where fit calls it first, in a sanity check or later: those of fit's start."""

    def load(self) -> None:
        """Load and share out the loaders, unless they are there already. Collective."""
        if self.is_loaded:
            return
        engine = self.trainer.engine
        loaders = self._made()
        self.close()
        self.loaders = []
        self.loaders = evaluation_loaders(
            loaders,
            rank=engine.rank,
            world_size=engine.world_size,
            mode="padded",
            **self.trainer.loader_options,
        )
        if self.source.owner is None:
            self._refuse_empty()
        for _, loader in self.loaders:
            if engine.strategy.forward_is_collective and isinstance(loader, ShardedCombination):
                loader.refuse_parted_rounds(self.limit_of(loader))
        self.is_loaded = True
        are_named = all(name is not None for name, _ in self.loaders)
        self.arguments = read_step(self.module, f"{self.stage}_step", len(self.loaders), are_named)
        self.shown.note(loaders, [self.limit_of(loader) for _, loader in self.loaders])

    def close(self) -> None:
        """End the loaders' workers."""
        for _, loader in self.loaders:
            loader.close()

    def _made(self) -> Any:
        trainer, are_made = self.trainer, self.source.owner is not None
        is_read_once = trainer.stage != "fit" or trainer.settings.validates_once(are_made)
        if self.generators is None:
            return self.source.load(is_read_once)
        with isolate_rng():
            set_rng_state(self.generators)
            self.generators = None
            return self.source.load(is_read_once)

    def _refuse_empty(self) -> None:
        """Refuse a loader that was given and has no batch on any rank (ValueError); a hook may return one."""
        for place, (name, loader) in enumerate(self.loaders):
            if not isinstance(loader, ShardedLoader) or (loader.world_size > 1 and not loader.is_sharded):
                continue
            if loader.shard.source_length == 0:
                which = f" {place if name is None else name!r}" if len(self.loaders) > 1 else ""
                raise ValueError(
                    f"the {self.stage} loader{which} has no batch (its dataset is empty, or drop_last dropped all); give it "
                    "data, or leave it out."
                )

    def reload(self) -> None:
        """Call the hook that makes the loaders again, where there is one. Collective."""
        if self.source.owner is not None:
            self.is_loaded, self.generators = False, None
            self.load()

    def limit_of(self, loader: Share, most: int | None = None) -> int | None:
        """Return how many of a loader's batches are run, `most` of them at most; None to the loader's end."""
        limit = getattr(self.trainer.settings, LIMITS[self.stage])
        count = limited(loader.length, limit)
        return count if most is None else limited(count, most)


def evaluate(
    evaluation: Evaluation,
    phase: Phase = Phase.EVALUATION,
    *,
    most: int | None = None,
    before_end: Callable[[], None] | None = None,
    keep: Callable[[int, int, Any], None] | None = None,
) -> list[dict[str, float]]:
    """Run one evaluation and return its metrics over all ranks, a dict for each loader.

    Each submodule is in evaluation mode meanwhile, and as it was afterwards. Collective: call on every rank.

    Args:
        evaluation: what to run.
        phase: what the run is doing with it.
        most: batches of each loader at most; None for all.
        before_end: called once the metrics are known, before the stage's last hook.
        keep: given (loader's index, batch's index, outputs) of each step, for a prediction.
    """
    trainer, module, stage = evaluation.trainer, evaluation.module, evaluation.stage
    engine, hooks, logbook = trainer.engine, trainer.hooks, trainer.logbook
    evaluation.load()
    if getattr(trainer.settings, LIMITS[stage]) == 0:
        return []
    engine.strategy.before_evaluation(engine.modules)
    asked = trainer.stop.begin_evaluation(trainer.is_within_window)
    with (
        trainer.state.progress.during(phase),
        evaluation_mode(module, stage),
        gradients_off(trainer.uses_inference_mode),
    ):
        collector = logbook.start(module, stage)
        hooks.call(f"on_{stage}_start")
        hooks.call(f"on_{stage}_epoch_start")
        for place, (name, loader) in enumerate(evaluation.loaders):
            collector.begin_loader((place, name) if len(evaluation.loaders) > 1 or name is not None else None)
            run_loader(evaluation, collector, place, loader, most, keep, asked)
            collector.end_batches()
            if asked is not None:
                trainer.stop.after_loader()
            if len(evaluation.loaders) > 1:
                logbook.end_loader(module)
        collector.begin_loader(None)
        if f"on_{stage}_epoch_end" in hooks.reduced_early:
            logbook.reduce(module)  # so that they see the epoch's values
        hooks.call(f"on_{stage}_epoch_end")
        metrics = logbook.finish(module, num_loaders=len(evaluation.loaders)) if stage != "predict" else []
        logbook.stop_collecting()
        if before_end is not None:
            before_end()
        hooks.call(f"on_{stage}_end")
    logbook.end_evaluation()
    return metrics


def run_loader(
    evaluation: Evaluation,
    collector: MetricCollector,
    place: int,
    loader: Share,
    most: int | None,
    keep: Callable[[int, int, Any], None] | None,
    asked: SyncPoint | None,
) -> None:
    """Run the stage's step on each batch of this rank's share of one loader, unless it is `asked` to leave them."""
    engine, hooks, stage = evaluation.trainer.engine, evaluation.trainer.hooks, evaluation.stage
    step, transfer, module = f"{stage}_step", evaluation.transfer, evaluation.module
    several = (place,) if len(evaluation.loaders) > 1 else ()
    loader.set_epoch(engine.seed, 0)
    length = loader.exact_length
    is_limited = most is not None or getattr(evaluation.trainer.settings, LIMITS[stage]) is not None
    count = evaluation.limit_of(loader, most) if is_limited else None  # else to its end, whatever it says of its length
    evaluation.shown.note_indices(None)
    # What the step does with the loader before says nothing of this one.
    told = evaluation.communication = Communication(in_hooks=stage != "predict")
    is_own = engine.world_size > 1 and not loader.is_sharded
    source = OwnRounds(loader, count, told, engine.strategy.forward_is_collective) if is_own else loader
    if evaluation.arguments.pulls:
        run_pulled(evaluation, collector, place, source, count, keep, asked)
        return
    noted = loader.note_indices() if stage == "predict" and isinstance(loader, ShardedLoader) else None
    batches: Iterator[Any] = islice(source, None if is_own else count)
    if is_measuring(evaluation.trainer.profiler):
        batches = evaluation.trainer.profiler.timed_iterator(batches, f"{stage}_dataloader_next")
    for index, batch in enumerate(batches):
        is_ghost = source.real_length is not None and index >= source.real_length
        if length is not None and index >= length and not is_own:
            refuse_length(length)
        if asked is not None and asked.is_pending and evaluation.trainer.stop.is_left(place, index):
            break
        if noted:
            evaluation.shown.note_indices(noted.popleft())
        if transfer is not None:
            batch = transfer(batch, place)
        collector.begin_batch(batch, step, is_own or length is None or index == length - 1)
        arguments = evaluation.arguments.of(batch, index, place)
        if is_ghost:
            run_ghost(evaluation, collector, batch, arguments, (index, *several))
            continue
        counts = [collectives.count_issued()] if index == 0 else []
        hooks.call(f"on_{stage}_batch_start", batch, index, *several)
        counts += [collectives.count_issued()] if index == 0 else []
        outputs = engine.run(module, step, *arguments)
        counts += [collectives.count_issued()] if index == 0 else []
        if keep is not None:
            keep(place, index, outputs)
        hooks.call(f"on_{stage}_batch_end", outputs, batch, index, *several)
        if index == 0:
            counts.append(collectives.count_issued())
            evaluation.communication.learn(counts, engine.strategy.forward_is_collective)
        evaluation.trainer.logbook.log_evaluation_step(index)
    evaluation.shown.note_indices(None)


def run_ghost(
    evaluation: Evaluation,
    collector: MetricCollector,
    batch: Any,
    arguments: tuple[Any, ...],
    indices: tuple[int, ...] = (),
    pulled: tuple[PulledBatches, tuple[int, ...]] | None = None,
) -> None:
    """Run what communicates of a batch that is no longer this rank's: other ranks wait for it. Nothing of it counts.

    Of a step that takes batches itself `pulled` says from where, and the loader's place for its hook.
    """
    engine, hooks, stage = evaluation.trainer.engine, evaluation.trainer.hooks, evaluation.stage
    told = evaluation.communication
    uneven = UnevenRound(collector, evaluation.module, evaluation.trainer.callbacks, is_ghost=True)
    if told.in_hooks and indices:
        hooks.call(f"on_{stage}_batch_start", batch, *indices)
    outputs = engine.run(evaluation.module, f"{stage}_step", *arguments) if told.in_step or told.in_hooks else None
    if told.in_hooks and pulled is not None and pulled[0].count:
        batch, indices = pulled[0].latest, (pulled[0].count - 1, *pulled[1])
    if told.in_hooks and indices:
        hooks.call(f"on_{stage}_batch_end", outputs, batch, *indices)
    uneven.end()


def run_pulled(
    evaluation: Evaluation,
    collector: MetricCollector,
    place: int,
    loader: Share | OwnRounds,
    count: int | None,
    keep: Callable[[int, int, Any], None] | None,
    asked: SyncPoint | None,
) -> None:
    """Let the stage's step take its batches from an iterator until there are none left."""
    stage = evaluation.stage
    step = f"{stage}_step"
    several = (place,) if len(evaluation.loaders) > 1 else ()
    engine, length = evaluation.trainer.engine, loader.exact_length
    is_own = isinstance(loader, OwnRounds)
    pairs = with_last(loader, 0, None if is_own else length if count is None else count)

    def is_ghost(number: int) -> bool:
        return loader.real_length is not None and number >= loader.real_length

    batches = PulledBatches(
        pairs, evaluation.transfer, 0, evaluation.trainer.logbook, engine.precision.step_context, is_ghost
    )
    while not batches.is_at_end:
        taken = batches.begin_step()
        if asked is not None and asked.is_pending and evaluation.trainer.stop.is_left(place, taken):
            break
        collector.begin_batch(collector.batch, step, length is None or taken >= length - 1)
        if is_ghost(taken):
            run_ghost(evaluation, collector, batches, (batches,), pulled=(batches, several))
            if batches.count == taken:
                break
            continue
        before = collectives.count_issued()
        outputs = engine.run(evaluation.module, step, batches)
        after = collectives.count_issued()
        if batches.count == taken:
            raise RuntimeError(f"{step} took no batch from its dataloader_iter; call next(dataloader_iter) in it.")
        if keep is not None:
            keep(place, batches.count - 1, outputs)
        evaluation.trainer.hooks.call(f"on_{stage}_batch_end", outputs, batches.latest, batches.count - 1, *several)
        if taken == 0:
            counts = [before, before, after, collectives.count_issued()]
            evaluation.communication.learn(counts, engine.strategy.forward_is_collective)
        evaluation.trainer.logbook.log_evaluation_step(batches.count - 1)


def sanity_check(evaluation: Evaluation) -> None:
    """Run a few validation batches before training, so that an error in validation_step costs no epoch. Collective."""
    trainer = evaluation.trainer
    steps = trainer.settings.sanity_steps
    if steps == 0:
        return
    # Training draws the same numbers with the check and without it.
    with isolate_rng(), trainer.logbook.silent(), trainer.state.progress.during(Phase.SANITY_CHECK):
        trainer.hooks.call("on_sanity_check_start")
        evaluation.load()
        most = None if steps == -1 else steps
        trainer.stages.sanity_check.note(None, [evaluation.limit_of(loader, most) for _, loader in evaluation.loaders])
        try:
            evaluate(evaluation, Phase.SANITY_CHECK, most=most)
            trainer.hooks.call("on_sanity_check_end")
        except EvaluationAbandoned:  # nothing was trained, so the run is saved as it begins
            trainer.logbook.end_evaluation()


def limited(length: int | None, limit: int | float | None) -> int | None:
    """Return how many batches a limit leaves: a number of them, a fraction of a known length, or all (None)."""
    if limit is None:
        return length
    if isinstance(limit, float):
        if limit == 1.0:
            return length
        if length is None:
            raise ValueError(
                f"a limit of {limit} is a fraction of the batches, but this loader has no length; pass a number of batches."
            )
        return max(int(length * limit), 1 if limit > 0 and length > 0 else 0)  # a fraction is one batch at least
    return limit if length is None else min(limit, length)


@contextmanager
def evaluation_mode(module: Module, stage: str = "") -> Iterator[None]:
    """Put every submodule into evaluation mode, and back to the mode that it was in, unless the module's hooks do it."""
    was_training = {child: child.training for child in module.modules()}
    getattr(module, f"on_{stage}_model_eval", module.eval)()
    try:
        yield
    finally:
        if stage and is_overridden(f"on_{stage}_model_train", module, Module):
            getattr(module, f"on_{stage}_model_train")()
        else:
            for child, training in was_training.items():
                child.training = training


def gradients_off(inference_mode: bool) -> Any:
    """Return the context of an evaluation.

    Not inference_mode unless asked for: what is made in it (a metric's state, a cache of the module's) breaks a training
    that follows.
    """
    return torch.inference_mode() if inference_mode else torch.no_grad()
