"""Evaluate: validation, test and prediction, each sample counted once on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from trainwright.data.combined import ShardedCombination, evaluation_loaders
from trainwright.data.first_draws import compare_first_draws
from trainwright.data.loaders import ShardedLoader, refuse_length, with_last
from trainwright.data.seeding import isolate_rng, set_rng_state
from trainwright.distributed import collectives
from trainwright.distributed.sync_points import SyncPoint
from trainwright.module import Module, hook_of, is_overridden
from trainwright.profilers.base import is_measuring
from trainwright.rank_zero import rank_zero_info, rank_zero_warn
from trainwright.trainer.inputs import iterators_of
from trainwright.trainer.metrics import MetricCollector
from trainwright.trainer.oversights import warn_of_monitors, warn_of_shuffling
from trainwright.trainer.phase import Phase
from trainwright.trainer.run import Run
from trainwright.trainer.sources import BatchTransfer, LoaderSource, PulledBatches, find_transfer
from trainwright.trainer.stage import Shard, Stage, limited
from trainwright.trainer.steps import StepArguments, read_step
from trainwright.trainer.stop import EvaluationAbandoned
from trainwright.trainer.uneven_round import Communication, OwnRounds, UnevenRound

LIMITS = {
    "validation": "limit_val_batches",
    "test": "limit_test_batches",
    "predict": "limit_predict_batches",
}


@dataclass
class Evaluation:
    """One stage of evaluation ("validation", "test" or "predict"): its step and its loaders, loaded when first needed."""

    run: Run
    module: Module
    stage: str
    source: LoaderSource
    transfer: BatchTransfer | None = field(init=False)
    shown: Stage = field(init=False)
    """What the Trainer shows of its data."""
    arguments: StepArguments = field(default_factory=StepArguments)
    loaders: list[tuple[str | None, Shard]] = field(default_factory=list)
    """The user's name of each loader, and this rank's shard of it."""
    is_loaded: bool = False
    has_iterators: bool = False
    """Whether a loader can be read only once."""
    communication: Communication = field(default_factory=Communication)
    generators: dict[str, Any] | None = None
    """What the loaders' hook draws from where fit calls it first, in a sanity check or later: those of fit's start."""

    def __post_init__(self) -> None:
        self.transfer = find_transfer(self.run.engine, self.module, self.run.datamodule, self.run.profiler)
        self.shown = getattr(self.run.stages, self.stage)
        self.run.close_at_end(self.close)

    def begin_communication(self) -> Communication:
        """Start over: what the step communicated with one loader says nothing about the next one."""
        self.communication = Communication(in_hooks=self.stage != "predict")
        return self.communication

    def draw_from(self, generators: dict[str, Any]) -> None:
        """Let the loaders' hook draw from these generators when it is called first."""
        self.generators = generators

    def load(self) -> None:
        """Load and shard the loaders, unless that is done. Collective."""
        if self.is_loaded:
            return
        engine = self.run.engine
        loaders = self._made()
        self.close()
        self.loaders = []
        self.loaders = evaluation_loaders(
            loaders,
            rank=engine.rank,
            world_size=engine.world_size,
            mode="padded",
            **self.run.loader_options,
        )
        if self.source.owner is None:
            self._refuse_empty()
        # Before any batch: the ranks with a batch would wait in its forward for those without.
        for _, loader in self.loaders:
            compare_first_draws(loader, engine.ranks, self.stage)
            if engine.strategy.capabilities.forward_is_collective and isinstance(loader, ShardedCombination):
                loader.refuse_parted_rounds(self.limit_of(loader))
        self.is_loaded, self.has_iterators = True, bool(iterators_of(loaders))
        are_named = all(name is not None for name, _ in self.loaders)
        self.arguments = read_step(self.module, f"{self.stage}_step", len(self.loaders), are_named)
        if self.stage != "predict" and not self.run.in_order:
            warn_of_shuffling(loaders, self.stage)
        self.shown.note(loaders, [self.limit_of(loader) for _, loader in self.loaders])

    def close(self) -> None:
        """End the loaders' workers."""
        for _, loader in self.loaders:
            loader.close()

    def _made(self) -> Any:
        is_read_once = self.run.call != "fit" or self.run.settings.validates_once(self.source.owner is not None)
        if self.generators is None:
            return self.source.load(is_read_once)
        with isolate_rng():
            set_rng_state(self.generators)
            self.generators = None
            return self.source.load(is_read_once)

    def _refuse_empty(self) -> None:
        """Refuse a loader that was given and whose length is 0 (ValueError); a hook may return an empty one."""
        for index, (name, loader) in enumerate(self.loaders):
            if not isinstance(loader, ShardedLoader) or (loader.world_size > 1 and not loader.is_sharded):
                continue
            if loader.shard.source_length == 0:
                raise ValueError(
                    f"{self._named(index, name)} has no batches (its dataset is empty, or drop_last dropped all); give it "
                    "data, or leave it out."
                )

    def refuse_none(self, index: int, source: Shard | OwnRounds, has_batch: bool) -> None:
        """Refuse a loader that was given and yielded no batch on any rank (RuntimeError); a hook may return an empty one.

        Only reading shows that of one without a length. All ranks know it without another exchange: a sharded loader gives a
        rank without a batch a dummy of another rank's, and OwnRounds has exchanged what each rank has.
        """
        is_empty = source.is_empty if isinstance(source, OwnRounds) else not has_batch
        if is_empty and self.source.owner is None:
            raise RuntimeError(
                f"{self._named(index, self.loaders[index][0])} yielded no batches (its dataset yields nothing, drop_last "
                "dropped all, or its __iter__ does not start again for another pass); give it data, or leave it out."
            )

    def _named(self, index: int, name: str | None) -> str:
        which = f" {index if name is None else name!r}" if len(self.loaders) > 1 else ""
        return f"the {self.stage} loader{which}"

    def renew(self, generators: dict[str, Any]) -> None:
        """Let the next evaluation call the loaders' hook again, if there is one, with these generators."""
        if self.source.owner is not None:
            self.is_loaded, self.generators = False, generators

    def limit_of(self, loader: Shard, most: int | None = None) -> int | None:
        """Return the number of a loader's batches to run, at most `most`; None for all until its end."""
        limit = getattr(self.run.settings, LIMITS[self.stage])
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
        most: batches of each loader at most; None for all.
        before_end: called once the metrics are known, before the stage's last hook.
        keep: given (loader's index, batch's index, outputs) of each step, for a prediction.
    """
    run, module, stage = evaluation.run, evaluation.module, evaluation.stage
    engine, hooks, logbook = run.engine, run.hooks, run.logbook
    evaluation.load()
    if getattr(run.settings, LIMITS[stage]) == 0:
        return []
    engine.strategy.broadcast_buffers(engine.modules)
    abandonment = run.stop.begin_evaluation(run.state.progress.is_within_window)
    with (
        run.state.progress.during(phase),
        evaluation_mode(module, stage),
        gradients_off(run.uses_inference_mode),
    ):
        collector = logbook.start(module, stage)
        hooks.call(f"on_{stage}_start")
        hooks.call(f"on_{stage}_epoch_start")
        for index, (name, _) in enumerate(evaluation.loaders):
            collector.begin_loader((index, name) if len(evaluation.loaders) > 1 else None)
            run_loader(evaluation, collector, index, most, keep, abandonment)
            collector.end_batches()
            if abandonment is not None:
                run.stop.after_loader()
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
    loader_index: int,
    most: int | None,
    keep: Callable[[int, int, Any], None] | None,
    abandonment: SyncPoint | None,
) -> None:
    """Run the stage's step on each batch of this rank's shard of one loader, until all ranks abandon it."""
    run, stage, module = evaluation.run, evaluation.stage, evaluation.module
    engine, hooks, loader = run.engine, run.hooks, evaluation.loaders[loader_index][1]
    step, transfer = f"{stage}_step", evaluation.transfer
    # Epoch 0 each time, so that every evaluation has the same batches in the same order.
    loader.set_epoch(engine.seed, 0)
    length = loader.exact_length
    is_limited = most is not None or getattr(run.settings, LIMITS[stage]) is not None
    count = evaluation.limit_of(loader, most) if is_limited else None  # without a limit its length does not matter
    evaluation.shown.note_indices(None)
    communication = evaluation.begin_communication()
    is_own = engine.world_size > 1 and not loader.is_sharded
    source = (
        OwnRounds(loader, count, communication, engine.strategy.capabilities.forward_is_collective)
        if is_own
        else loader
    )
    if evaluation.arguments.pulls:
        run_pulled(evaluation, collector, loader_index, source, count, keep, abandonment)
        return
    several = (loader_index,) if len(evaluation.loaders) > 1 else ()
    noted = loader.note_indices() if stage == "predict" and isinstance(loader, ShardedLoader) else None
    # OwnRounds counts by itself, since dummy batches come after this rank's own.
    batches: Iterator[Any] = islice(source, None if is_own else count)
    if is_measuring(run.profiler):
        batches = run.profiler.timed_iterator(batches, f"{stage}_dataloader_next")
    index = -1
    for index, batch in enumerate(batches):
        is_dummy = source.real_length is not None and index >= source.real_length
        if length is not None and index >= length and not is_own:
            refuse_length(length)
        if abandonment is not None and abandonment.is_pending and run.stop.is_left(loader_index, index):
            break
        if noted:
            evaluation.shown.note_indices(noted.popleft())
        if transfer is not None:
            batch = transfer(batch, loader_index)
        if batch is None:
            skip_none(engine.world_size, stage)
            continue
        # Only in a last round may the ranks have unequal numbers of samples; without a length each may be the last.
        collector.begin_batch(batch, step, is_own or length is None or index == length - 1)
        arguments = evaluation.arguments.of(batch, index, loader_index)
        if is_dummy:
            run_dummy(evaluation, collector, batch, arguments, (index, *several))
            continue
        # The first batch shows what communicates, and so what a dummy batch has to run for the other ranks.
        is_first = index == 0
        counts = [collectives.count_issued()] if is_first else []
        hooks.call(f"on_{stage}_batch_start", batch, index, *several)
        counts += [collectives.count_issued()] if is_first else []
        outputs = engine.run(module, step, *arguments)
        counts += [collectives.count_issued()] if is_first else []
        if keep is not None:
            keep(loader_index, index, outputs)
        hooks.call(f"on_{stage}_batch_end", outputs, batch, index, *several)
        if is_first:
            communication.learn(
                [*counts, collectives.count_issued()], engine.strategy.capabilities.forward_is_collective
            )
        run.logbook.log_evaluation_step(index)
    evaluation.refuse_none(loader_index, source, index >= 0)
    evaluation.shown.note_indices(None)


def skip_none(world_size: int, stage: str = "training") -> Any:
    """Return None for a batch that is None, with a warning; RuntimeError on several ranks, which would wait for this one."""
    if world_size > 1:
        raise RuntimeError(
            f"the {stage} loader yielded None on one of {world_size} ranks: the others would wait for a batch. Let "
            "collate_fn return other samples, or leave bad ones out of the dataset; only a single process skips such a batch."
        )
    rank_zero_warn(f"the {stage} loader yielded None (from collate_fn?), so this batch is skipped.", stacklevel=4)


def run_dummy(
    evaluation: Evaluation,
    collector: MetricCollector,
    batch: Any,
    arguments: tuple[Any, ...],
    indices: tuple[int, ...] = (),
    pulled: PulledBatches | None = None,
) -> None:
    """Run what communicates of a batch that is not this rank's own, because other ranks wait for it. Its results are dropped.

    `pulled` is the iterator from which the step takes its batches itself.
    """
    run, stage, communication = evaluation.run, evaluation.stage, evaluation.communication
    uneven = UnevenRound(collector, evaluation.module, run.callbacks, is_dummy=True)
    if communication.in_hooks and indices:
        run.hooks.call(f"on_{stage}_batch_start", batch, *indices)
    outputs = None
    if communication.in_step or communication.in_hooks:
        outputs = run.engine.run(evaluation.module, f"{stage}_step", *arguments)
    if communication.in_hooks and pulled is not None and pulled.count:
        batch, indices = pulled.latest, (pulled.count - 1, *indices[1:])
    if communication.in_hooks and indices:
        run.hooks.call(f"on_{stage}_batch_end", outputs, batch, *indices)
    uneven.end()


def run_pulled(
    evaluation: Evaluation,
    collector: MetricCollector,
    loader_index: int,
    loader: Shard | OwnRounds,
    count: int | None,
    keep: Callable[[int, int, Any], None] | None,
    abandonment: SyncPoint | None,
) -> None:
    """Let the stage's step take its batches from an iterator until none is left."""
    run, stage = evaluation.run, evaluation.stage
    engine, step, length = run.engine, f"{stage}_step", loader.exact_length
    several = (loader_index,) if len(evaluation.loaders) > 1 else ()
    is_own = isinstance(loader, OwnRounds)
    pairs = with_last(loader, 0, None if is_own else length if count is None else count)

    def is_dummy(number: int) -> bool:
        return loader.real_length is not None and number >= loader.real_length

    batches = PulledBatches(
        pairs, evaluation.transfer, 0, run.logbook, engine.precision.step_context, is_dummy, loader_index
    )
    evaluation.refuse_none(loader_index, loader, not batches.is_at_end)
    while not batches.is_at_end:
        taken = batches.begin_step()
        if abandonment is not None and abandonment.is_pending and run.stop.is_left(loader_index, taken):
            break
        collector.begin_batch(collector.batch, step, length is None or taken >= length - 1)
        if is_dummy(taken):
            run_dummy(evaluation, collector, None, (batches,), (taken, *several), batches)
            if batches.count == taken:
                break
            continue
        counts = [collectives.count_issued()]
        run.hooks.call(f"on_{stage}_batch_start", None, taken, *several)
        counts.append(collectives.count_issued())
        outputs = engine.run(evaluation.module, step, batches)
        counts.append(collectives.count_issued())
        if batches.count == taken:
            raise RuntimeError(f"{step} took no batch from its dataloader_iter; call next(dataloader_iter) in it.")
        if keep is not None:
            keep(loader_index, batches.count - 1, outputs)
        run.hooks.call(f"on_{stage}_batch_end", outputs, batches.latest, batches.count - 1, *several)
        if taken == 0:
            evaluation.communication.learn(
                [*counts, collectives.count_issued()], engine.strategy.capabilities.forward_is_collective
            )
        run.logbook.log_evaluation_step(batches.count - 1)


def sanity_check(evaluation: Evaluation) -> None:
    """Run a few validation batches before training, so that an error in validation_step costs no epoch. Collective."""
    run = evaluation.run
    steps = run.settings.sanity_steps
    if steps == 0:
        return
    # Training draws the same numbers with the check and without it.
    with isolate_rng(), run.logbook.silent(), run.state.progress.during(Phase.SANITY_CHECK):
        run.hooks.call("on_sanity_check_start")
        evaluation.load()
        if evaluation.has_iterators:
            rank_zero_info("the sanity check is left out: the validation data can be read only once.")
            run.hooks.call("on_sanity_check_end")
            return
        most = None if steps == -1 else steps
        run.stages.sanity_check.note(None, [evaluation.limit_of(loader, most) for _, loader in evaluation.loaders])
        try:
            evaluate(evaluation, Phase.SANITY_CHECK, most=most)
            run.hooks.call("on_sanity_check_end")
            warn_of_monitors(set(run.logbook.callback_metrics), run.callbacks, run.trained.schedulers, run.settings)
        except EvaluationAbandoned:  # nothing was trained, so the run is saved as it begins
            run.logbook.end_evaluation()


@contextmanager
def evaluation_mode(module: Module, stage: str = "") -> Iterator[None]:
    """Put every submodule into evaluation mode, and back to the mode that it was in, unless the module's hooks do it."""
    # Each by itself, since users keep some in evaluation mode while they train (a frozen batch norm).
    was_training = {child: child.training for child in module.modules()}
    (hook_of(module, f"on_{stage}_model_eval", Module) if stage else module.eval)()
    try:
        yield
    finally:
        if stage and is_overridden(f"on_{stage}_model_train", module, Module):
            getattr(module, f"on_{stage}_model_train")()
        else:
            for child, training in was_training.items():
                child.training = training


def gradients_off(inference_mode: bool) -> Any:
    """Return the context of an evaluation. Tensors made under inference_mode would break a training that follows."""
    return torch.inference_mode() if inference_mode else torch.no_grad()
