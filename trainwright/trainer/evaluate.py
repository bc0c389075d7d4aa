"""Evaluate: validation, test and prediction, with every sample counted once on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import islice
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import RandomSampler, SubsetRandomSampler

from trainwright.callbacks.base import Callback
from trainwright.checkpoint.codec import decode, encode
from trainwright.data.combined import ShardedCombination, evaluation_loaders
from trainwright.data.combined_loader import is_read_once
from trainwright.data.first_draws import compare_first_draws
from trainwright.data.loaders import ShardedLoader, refuse_length
from trainwright.data.seeding import isolate_rng
from trainwright.data.transfer import to_device
from trainwright.distributed.collectives import gather_nests
from trainwright.module import Module, hook_of, is_overridden
from trainwright.profilers.base import is_measuring
from trainwright.rank_zero import rank_zero_info, rank_zero_warn
from trainwright.trainer.epoch_batches import Batch
from trainwright.trainer.metrics import MetricCollector
from trainwright.trainer.run import Run
from trainwright.trainer.run_position import VALIDATION_LOADERS, Phase
from trainwright.trainer.sources import (
    BatchTransfer,
    LoaderSource,
    Shard,
    Stage,
    find_transfer,
    limited,
    num_step_arguments,
    parts_of,
)
from trainwright.trainer.stop import EvaluationAbandoned
from trainwright.trainer.uneven_round import Communication, UnevenRound


@dataclass
class Evaluation:
    """One stage of evaluation ("validation", "test" or "predict"): its step and its loaders, loaded when first needed."""

    run: Run
    module: Module
    stage: str
    source: LoaderSource
    transfer: BatchTransfer | None = field(init=False)
    shown: Stage = field(init=False)
    """The stage's data as the Trainer shows it."""
    limit: int | float | None = field(init=False)
    """The Trainer's limit on the batches of a loader."""
    num_arguments: int = 2
    """How many of the batch, its index and the loader's index the step takes."""
    loaders: list[tuple[str | None, Shard]] = field(default_factory=list)
    """The user's names of the loaders, and this rank's shards of them."""
    is_loaded: bool = False
    has_iterators: bool = False
    """Whether a loader can be read only once."""

    def __post_init__(self) -> None:
        self.transfer = find_transfer(self.run.engine, self.module, self.run.datamodule, self.run.profiler)
        self.shown = getattr(self.run.stages, self.stage)
        self.limit = getattr(self.run.settings, f"limit_{'val' if self.stage == 'validation' else self.stage}_batches")
        self.run.close_at_end(self.close)

    def load(self) -> None:
        """Load and shard the loaders, if not loaded yet. Collective."""
        if self.is_loaded:
            return
        engine = self.run.engine
        if VALIDATION_LOADERS in self.run.state.rng and self.stage == "validation":
            with isolate_rng():
                self.run.state.restore_rng(VALIDATION_LOADERS)
                loaders = self.source.load()
        else:
            loaders = self.source.load()
        self.close()
        self.loaders = []
        self.loaders = evaluation_loaders(
            loaders, rank=engine.data_rank, world_size=engine.num_data_ranks, mode="padded", **self.run.loader_options
        )
        # Before any batch: ranks with a batch would wait in its forward for ranks without.
        for index, (_, loader) in enumerate(self.loaders):
            is_alone = self.is_alone(loader)
            if isinstance(loader, ShardedLoader) and not is_alone:
                self.refuse_empty(index, loader.shard.source_length == 0)
            compare_first_draws(loader, engine.ranks, self.stage)
            if engine.strategy.capabilities.forward_is_collective:
                if is_alone:
                    self._refuse_unequal(loader)
                if isinstance(loader, ShardedCombination):
                    loader.refuse_parted_rounds(self.limit_of(loader))
        self.is_loaded, self.has_iterators = True, any(map(is_read_once, parts_of(loaders)))
        are_named = all(name is not None for name, _ in self.loaders)
        self.num_arguments = num_step_arguments(self.module, f"{self.stage}_step", len(self.loaders), are_named)
        if self.stage != "predict" and not self.run.in_order:
            warn_of_shuffling(loaders, self.stage)
        self.shown.note(loaders, [self.limit_of(loader) for _, loader in self.loaders])

    def _refuse_unequal(self, loader: Shard) -> None:
        """Reject loaders of which each belongs to one rank, unless they have equal numbers of batches (ValueError)."""
        counts = self.run.engine.ranks.exchange(self.limit_of(loader), f"the start of a {self.stage}")
        if len(set(counts)) > 1:
            raise ValueError(
                f"the ranks have {', '.join(map(str, counts))} batches of their own to evaluate, but under this strategy a "
                "forward needs every rank. Give each as many, or let the loader be sharded (use_distributed_sampler=True)."
            )

    def close(self) -> None:
        """End the loaders' workers."""
        for _, loader in self.loaders:
            loader.close()

    def is_alone(self, loader: Shard) -> bool:
        """Return whether every rank has a separate loader."""
        return self.run.engine.num_data_ranks > 1 and not loader.is_sharded

    def refuse_empty(self, index: int, is_empty: bool) -> None:
        """Reject a loader of the call that has no batch on any rank (RuntimeError). A hook may return an empty loader."""
        # A shard is empty on every rank or on none: a rank without samples has a dummy batch.
        if self.is_alone(self.loaders[index][1]):
            call = f"the end of its {self.stage} loader (each rank needs as many batches if a step communicates)"
            is_empty = all(self.run.engine.ranks.exchange(is_empty, call))
        if is_empty and self.source.owner is None:
            name = self.loaders[index][0]
            which = f" {index if name is None else name!r}" if len(self.loaders) > 1 else ""
            raise RuntimeError(
                f"the {self.stage} loader{which} yielded no batches (its dataset yields nothing, drop_last dropped all, or its "
                "__iter__ does not start again for another pass). Give it data, or leave it out."
            )

    def renew(self) -> None:
        """Let the next evaluation call the loaders' hook again, if there is one, with the present RNG state."""
        if self.source.owner is not None:
            self.is_loaded = False
            self.run.state.mark_rng(VALIDATION_LOADERS)

    def limit_of(self, loader: Shard, most: int | None = None) -> int | None:
        """Return the number of a loader's batches to run, at most `most`. None for all until its end."""
        count = limited(loader.length, self.limit)
        return count if most is None else limited(count, most)


def evaluate(
    evaluation: Evaluation,
    phase: Phase = Phase.EVALUATION,
    *,
    most: int | None = None,
    before_end: Callable[[], None] | None = None,
    keep: Callable[[int, int, Any], None] | None = None,
) -> list[dict[str, float]]:
    """Run one evaluation and return its metrics over all ranks, one dict per loader.

    All submodules are in evaluation mode meanwhile, and in their earlier mode afterwards. Collective: call on every rank.

    Args:
        most: the largest number of batches of a loader. None for all.
        before_end: called once the metrics are known, before the stage's last hook.
        keep: called with (loader's index, batch's index, outputs) after every step of a prediction.
    """
    run, module, stage = evaluation.run, evaluation.module, evaluation.stage
    engine, hooks, logbook = run.engine, run.hooks, run.logbook
    evaluation.load()
    if evaluation.limit == 0:
        return []
    engine.strategy.broadcast_buffers(engine.modules)
    with (
        run.state.progress.during(phase),
        evaluation_mode(module, stage),
        # Tensors made under inference_mode would break a training that follows.
        torch.inference_mode() if run.settings.inference_mode and run.call != "fit" else torch.no_grad(),
    ):
        collector = logbook.start(module, stage)
        hooks.call(f"on_{stage}_start")
        hooks.call(f"on_{stage}_epoch_start")
        for index, (name, _) in enumerate(evaluation.loaders):
            collector.begin_loader((index, name) if len(evaluation.loaders) > 1 else None)
            run_loader(evaluation, collector, index, most, keep)
            run.stop.after_loader()
            if len(evaluation.loaders) > 1:
                collector.end_loader()
        collector.begin_loader(None)
        if f"on_{stage}_epoch_end" in hooks.reduced_early:
            logbook.reduce()  # so that they see the epoch's values
        hooks.call(f"on_{stage}_epoch_end")
        metrics = logbook.finish(len(evaluation.loaders)) if stage != "predict" else []
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
) -> None:
    """Run the stage's step on the batches of this rank's shard of one loader."""
    run, stage, module = evaluation.run, evaluation.stage, evaluation.module
    hooks, step = run.hooks, f"{stage}_step"
    always = run.engine.strategy.capabilities.forward_is_collective
    communication = Communication(in_hooks=stage != "predict", forward_is_collective=always)
    several = (loader_index,) if len(evaluation.loaders) > 1 else ()

    for batch in batches_of(evaluation, loader_index, most):
        collector.begin_batch(batch.value, batch.index, step, batch.is_uneven)
        if batch.is_dummy:
            run_dummy(evaluation, communication, collector, batch, several)
            continue
        # The first batch shows whether hooks and step communicate, so that a dummy batch has to run them for other ranks.
        look = communication.look if batch.index == 0 else do_nothing
        look()
        hooks.call(f"on_{stage}_batch_start", batch.value, batch.index, *several)
        look()
        outputs = run.engine.run(module, step, *batch.arguments)
        look()
        if keep is not None:
            keep(loader_index, batch.index, outputs)
        hooks.call(f"on_{stage}_batch_end", outputs, batch.value, batch.index, *several)
        look()
        run.logbook.log_evaluation_step()
    evaluation.shown.note_indices(None)


def do_nothing() -> None: ...


def batches_of(evaluation: Evaluation, loader_index: int, most: int | None) -> Iterator[Batch]:
    """Yield the batches of one loader, until all ranks abandon the evaluation."""
    run, stage, shown = evaluation.run, evaluation.stage, evaluation.shown
    loader, transfer = evaluation.loaders[loader_index][1], evaluation.transfer
    # Epoch 0 every time, so that every evaluation has the same batches in the same order.
    loader.set_epoch(run.engine.seed, 0)
    is_limited = most is not None or evaluation.limit is not None
    count = evaluation.limit_of(loader, most) if is_limited else None  # without a limit its length does not matter
    is_alone, length = evaluation.is_alone(loader), loader.exact_length
    indices = loader.note_indices() if stage == "predict" and isinstance(loader, ShardedLoader) else None
    values: Iterator[Any] = islice(loader, count)
    if is_measuring(run.profiler):
        values = run.profiler.timed_iterator(values, f"{stage}_dataloader_next")
    index = -1
    for index, value in enumerate(values):
        is_dummy = loader.real_length is not None and index >= loader.real_length
        if length is not None and index >= length:
            refuse_length(length)
        if run.stop.is_left(loader_index, index):
            break
        shown.note_indices(indices.popleft() if indices else None)
        value = value if transfer is None else transfer(value, loader_index)
        if value is None:
            skip_none(run.engine.num_data_ranks, stage)
            continue
        # Only in a last round may the ranks have unequal numbers of samples. Without a length any round may be the last.
        is_uneven = is_alone or length in (None, index + 1)
        arguments = (value, index, loader_index)[: evaluation.num_arguments]
        yield Batch(arguments, value, index, is_uneven=is_uneven, is_dummy=is_dummy)
    evaluation.refuse_empty(loader_index, index < 0)


def skip_none(world_size: int, stage: str = "training") -> Any:
    """Return None for a batch that is None, with a warning. RuntimeError on several ranks, which would wait for this rank."""
    if world_size > 1:
        raise RuntimeError(
            f"the {stage} loader yielded None on one of {world_size} ranks: the others would wait for a batch. Let "
            "collate_fn return other samples, or remove bad samples from the dataset. Only a single process skips such a batch."
        )
    rank_zero_warn(f"the {stage} loader yielded None (from collate_fn?), so this batch is skipped.", stacklevel=4)


def run_dummy(
    evaluation: Evaluation,
    communication: Communication,
    collector: MetricCollector,
    batch: Batch,
    several: tuple[int, ...],
) -> None:
    """Run the hooks and the step that communicate on another rank's batch, and drop the results."""
    run, stage = evaluation.run, evaluation.stage
    uneven = UnevenRound(collector, evaluation.module, is_dummy=True)
    if communication.in_hooks:
        run.hooks.call(f"on_{stage}_batch_start", batch.value, batch.index, *several)
    outputs = None
    if communication.in_step or communication.in_hooks:
        outputs = run.engine.run(evaluation.module, f"{stage}_step", *batch.arguments)
    if communication.in_hooks:
        run.hooks.call(f"on_{stage}_batch_end", outputs, batch.value, batch.index, *several)
    uneven.end()


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
        most = int(steps) if isfinite(steps) else None
        limits = [evaluation.limit_of(loader, most) for _, loader in evaluation.loaders]
        evaluation.run.stages.sanity_check.note(None, limits)
        try:
            evaluate(evaluation, Phase.SANITY_CHECK, most=most)
            warn_of_misspelled_monitors(run.trainer.callbacks, run.trainer.callback_metrics)
            run.hooks.call("on_sanity_check_end")
        except EvaluationAbandoned:  # nothing was trained, so the run is saved as it begins
            run.logbook.end_evaluation()


def warn_of_misspelled_monitors(callbacks: Iterable[Callback], logged: Iterable[str]) -> None:
    """Warn of callbacks that follow a metric whose name differs a little from the metrics of the sanity check."""
    names = list(logged)
    for callback in callbacks:
        name = str(getattr(callback, "monitor", None))
        close = get_close_matches(name, names, n=1, cutoff=0.85)
        if close and name not in names and close[0][0] == name[0]:  # train_loss is not a misspelled val_loss
            rank_zero_warn(
                f"{type(callback).__name__} follows {name!r}, which the sanity check has not logged. Did you mean "
                f"{close[0]!r}?",
                stacklevel=2,
            )


def warn_of_shuffling(loaders: Any, stage: str) -> None:
    samplers = [getattr(loader, "sampler", None) for loader in parts_of(loaders)]
    if any(isinstance(sampler, (RandomSampler, SubsetRandomSampler)) for sampler in samplers):
        rank_zero_warn(
            f"the {stage} loader shuffles, so with a limit of batches each evaluation scores other samples. Pass "
            "shuffle=False.",
            stacklevel=2,
        )


@contextmanager
def evaluation_mode(module: Module, stage: str = "") -> Iterator[None]:
    """Put every submodule into evaluation mode, and back to its earlier mode, unless the module's hooks do it."""
    # One by one, since users keep some in evaluation mode while they train (a frozen batch norm).
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


def predict(evaluation: Evaluation, return_predictions: bool, *, own_only: bool = False) -> list[Any] | None:
    """Return the outputs of all batches on the host, a list per loader if there are several. None if unwanted.

    Every rank gets the outputs of all ranks, tensors of a subclass as plain tensors, and dicts of a subclass as dicts. With
    `own_only` it gets the outputs of this rank, of any kind. Collective: call on every rank.

    Raises:
        TypeError: on several ranks, at the first batch: outputs that are more than plain data and tensors.
    """
    engine = evaluation.run.engine
    gathers = engine.num_data_ranks > 1 and not own_only
    kept: dict[int, dict[int, Any]] = {}

    def keep(loader: int, index: int, outputs: Any) -> None:
        outputs = to_device(outputs, torch.device("cpu"))
        if gathers:
            outputs = plainer(outputs)
            if loader not in kept:
                encoded({index: outputs})  # raises before the work is done if it cannot be gathered
        # Batch i of this rank is batch i * num_data_ranks + data_rank of the dataset.
        kept.setdefault(loader, {})[index * engine.num_data_ranks + engine.data_rank] = outputs

    evaluate(evaluation, keep=keep if return_predictions else None)
    if not return_predictions:
        return None
    ranks = [decode(*nest) for nest in gather_nests(*encoded(kept))] if gathers else [kept]
    predictions = []
    for loader in range(len(evaluation.loaders)):
        outputs_of = {number: outputs for rank in ranks for number, outputs in rank.get(loader, {}).items()}
        predictions.append([outputs_of[number] for number in sorted(outputs_of)])
    return predictions[0] if len(predictions) == 1 else predictions


def encoded(outputs: dict[int, Any]) -> tuple[Any, dict[str, Tensor]]:
    """Return outputs as plain data and its tensors. TypeError if they contain other objects."""
    try:
        return encode(outputs, "predict_step's outputs")
    except TypeError as error:
        raise TypeError(
            f"{error} On several ranks predictions are gathered as such. Return these, or pass "
            "return_predictions='own' to keep the outputs of every rank there."
        ) from error


def plainer(value: Any) -> Any:
    if isinstance(value, Tensor):
        is_wrapped = type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__  # its memory is elsewhere
        return value if type(value) is Tensor or is_wrapped else value.as_subclass(Tensor)
    if isinstance(value, Mapping):
        return {key: plainer(each) for key, each in value.items()}
    return type(value)(map(plainer, value)) if type(value) in (list, tuple) else value
