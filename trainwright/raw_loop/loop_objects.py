"""Preparation: the models, optimizers, loaders and schedulers of a raw loop, prepared by the Engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.engine.engine import Engine
from trainwright.engine.optimizers import use_fused
from trainwright.engine.prepared import (
    Preparations,
    PreparedModule,
    PreparedOptimizer,
    PreparedScheduler,
    kind_of,
    stepped_by,
)
from trainwright.engine.prepared_loader import Iterations, PreparedLoader
from trainwright.engine.window import AccumulationWindows
from trainwright.errors import a_type_of
from trainwright.memory.activation_checkpointing import ActivationCheckpointing
from trainwright.overrides import active_observer
from trainwright.raw_loop.dataloaders import LoaderOptions
from trainwright.raw_loop.plugins import GradientAccumulationPlugin
from trainwright.strategies.base import Optimization, StepResult

NAMES = {"module": "model", "optimizer": "optimizer", "loader": "data_loader", "scheduler": "scheduler"}
"""The ends of the names of the Accelerator's methods for kinds of objects."""


class PreparationOptions(NamedTuple):
    """How objects are prepared."""

    fuses: bool = True
    """Whether optimizers run fused if torch can and nothing else was chosen."""
    compiler: str | None = None
    """The backend that compiles models."""
    by_tokens: bool = False
    """Whether the tokens of a window have equal weight, and not its batches."""
    checkpointing: ActivationCheckpointing | None = None
    """How trained models recompute their activations."""
    steps_with_optimizer: bool = True
    """Whether schedulers step only where their optimizer has."""
    scheduler_steps: int = 1
    """Steps of a user's scheduler per step of the prepared one."""
    loaders: LoaderOptions = LoaderOptions()


class Preparation(Preparations):
    """The prepared objects of a loop, the windows of its models and the passes over its loaders."""

    def __init__(
        self,
        engine: Engine,
        optimization: Optimization,
        accumulation: GradientAccumulationPlugin,
        options: PreparationOptions,
    ) -> None:
        super().__init__()
        self.step_count = 0
        """Number of optimizer steps, summed over the optimizers. Skipped steps count."""
        observer = active_observer()
        self._observer = None if observer is None else observer.loop()
        """The observer of the tool that runs the script, or None if there is none."""
        self.iterations = Iterations(self._observer)
        self.windows = AccumulationWindows(
            engine,
            optimization.accumulate,
            self.iterations,
            self._drop_gradients,
            ends_with_loader=accumulation.sync_with_dataloader,
            syncs_each_batch=accumulation.sync_each_batch,
            by_tokens=options.by_tokens,
        )
        self._engine, self._optimization, self._options = engine, optimization, options

    def prepare(self, given: Sequence[Any], placement: Sequence[bool | None] | None = None) -> tuple[Any, ...]:
        """Return the prepared objects for those given. See `Accelerator.prepare`. Collective."""
        objects = [self.to_prepare(each) for each in given]
        if placement is not None and (not isinstance(placement, (list, tuple)) or len(placement) != len(objects)):
            raise ValueError(f"device_placement={placement!r} is no list of {len(objects)} items. Pass one per object.")
        if self._observer is not None:
            strategy = self._engine.strategy
            self._observer.begin(strategy.device, strategy.name, strategy.precision.name, strategy.world_size)
        new: dict[str, list[Any]] = {kind: [] for kind in NAMES}
        for each in objects:
            if each is not None and self.of(each) is None and each not in new[_known_kind(each)]:
                new[_known_kind(each)].append(each)
        if not self.loaders:  # once: the loaders of a loop are shuffled from one seed
            self._engine.take_seed(self._options.loaders.configuration.data_seed)
        # The strategy may replace parameters, so the models come before the optimizers that step them.
        for module in new["module"]:
            self.add_module(module)
        if new["optimizer"]:
            self._add_optimizers(new["optimizer"])
        moved = {id(each): moves for each, moves in zip(objects, placement or [None] * len(objects), strict=True)}
        for each in new["loader"]:
            options = self._options.loaders
            self.loaders.append(options.prepare(self._engine, each, self.iterations, moved[id(each)]))
        for each in new["scheduler"]:
            self._add_scheduler(each)
        return tuple(self.of(each) for each in objects)

    def add_module(self, module: nn.Module, *, is_trained: bool = True) -> nn.Module:
        """Prepare a model that is new, and return it. Collective."""
        before = stepped_by(*self.optimizers).intersection(p for _, p in module.named_parameters())
        if self._options.checkpointing is not None and is_trained:
            self._recompute(module, self._options.checkpointing)
        if self._options.compiler is not None:
            module.compile(backend=self._options.compiler)
        self._engine.prepare_module(module, self._optimization if is_trained else None)
        if any(self._engine.replaced.current(each) is not each for each in before):
            raise ValueError(
                f"the optimizer of {type(module).__name__} was prepared before it, and the strategy has replaced its "
                "parameters. Prepare the model before its optimizer, or in the same call."
            )
        is_mixed = self._engine.precision.forward_context() is not None
        # Otherwise the module's forward does everything that a wrapper would. A nan_policy replaces the engine's `run`.
        is_wrapped = is_mixed or module in self._engine.strategy.wrapped or "run" in vars(self._engine)
        self.models.append(PreparedModule(self._engine, module, to_float32=is_mixed) if is_wrapped else module)
        return self.models[-1]

    def _recompute(self, module: nn.Module, checkpointing: ActivationCheckpointing) -> None:
        """Make a model recompute activations. A later model may have no such blocks, as a discriminator beside a generator."""
        try:
            checkpointing.install(module, self._engine.device.type, self._engine.strategy)
        except ValueError:
            if not self.models:
                raise

    def optimizer_of(self, given: Any) -> PreparedOptimizer:
        """Return the prepared optimizer for one (ValueError)."""
        if not isinstance(prepared := self.of(given), PreparedOptimizer):
            raise ValueError("this optimizer was not prepared. Pass one that accelerator.prepare returned.")
        return prepared

    def optimizer_that_steps(self, parameters: Iterable[Tensor]) -> PreparedOptimizer:
        """Return the prepared optimizer whose parameters are to be clipped (ValueError)."""
        given = {parameters} if isinstance(parameters, Tensor) else set(parameters)
        if not given:
            raise ValueError("no parameters to clip were passed. Pass a list: an iterator is empty once it was read.")
        for prepared in self.optimizers:
            own = {each for each in stepped_by(prepared) if each.requires_grad}
            # Parameters that no optimizer steps may be among them, if they have no gradient that the norm would miss.
            if own and own <= given and not any(each.grad is not None for each in given - own):
                return prepared
        raise ValueError(
            "the parameters to clip do not belong to one prepared optimizer. Pass the parameters of one optimizer, such as "
            "model.parameters() of a model whose only optimizer was prepared."
        )

    def ranks_with_samples(self, loader: Any = None) -> list[bool] | None:
        """Return by rank whether it has new samples in the current batch of a loader, or None if all have.

        The default loader is the one under iteration.
        """
        prepared = self.of(loader) if loader is not None else None
        if loader is not None and not isinstance(prepared, PreparedLoader):
            raise ValueError("gather_for_metrics: this loader is not prepared. Pass what accelerator.prepare returned.")
        if prepared is None:
            iteration = self.iterations.current()
            prepared = None if iteration is None else iteration.loader
        sizes = None if prepared is None else prepared.last_sizes
        return None if sizes is None else [size > 0 for size in sizes]

    def resume_at(self, step_count: int) -> None:
        """Continue with a number of optimizer steps made, at the start of a window."""
        self.step_count = step_count
        self.windows.reset()

    def _add_optimizers(self, optimizers: list[Optimizer]) -> None:
        engine = self._engine
        engine.replaced.update(optimizers)
        for each in optimizers:
            self._refuse_strangers(each)
            if self._options.fuses:
                use_fused(each, engine.modules)
        earlier = len(engine.optimizers)
        # The strategies expect the earlier optimizers first in the list.
        inner = engine.prepare_optimizers([*engine.optimizers, *optimizers])[earlier:]
        norm, refuse = self._optimization.clip_norm, self._refuse_strangers
        for given, each in zip(optimizers, inner, strict=True):
            prepared = PreparedOptimizer(
                engine, each, self.windows, self._count_step, given=given, clip_norm=norm, after_group=refuse
            )
            self.optimizers.append(prepared)

    def _add_scheduler(self, scheduler: Any) -> None:
        own = self.of(getattr(scheduler, "optimizer", None))
        prepared = PreparedScheduler(
            scheduler,
            self.optimizers if own is None else [own],
            self.windows,
            with_optimizer=self._options.steps_with_optimizer,
            repeats=self._options.scheduler_steps,
        )
        self.schedulers.append(prepared)
        self._engine.script.note_schedulers([each.scheduler for each in self.schedulers])

    def _count_step(self, result: StepResult) -> None:
        self.step_count += 1
        if self._observer is not None:
            self._observer.note_step(self.step_count)

    def _drop_gradients(self, models: tuple[nn.Module, ...]) -> None:
        own = {parameter for model in models for parameter in model.parameters()}
        for optimizer in self.optimizers:
            if not models or not own.isdisjoint(stepped_by(optimizer)):
                optimizer.drop_gradients()
        self.windows.clear()

    def _refuse_strangers(self, optimizer: Optimizer) -> None:
        """Refuse parameters of a module that is not prepared (ValueError), since its replicas would drift apart."""
        world_size = self._engine.world_size
        own = {parameter for module in self._engine.modules for parameter in module.parameters()}
        if world_size > 1 and not stepped_by(optimizer) <= own:
            raise ValueError(
                f"the {type(optimizer).__name__} has parameters of no prepared model, which each of the {world_size} "
                "ranks would train by itself. Pass the models and their optimizers to prepare in one call."
            )


def _known_kind(given: Any) -> str:
    """Return the kind of an object (TypeError if it cannot be prepared)."""
    if (kind := kind_of(given)) is not None:
        return kind
    raise TypeError(
        f"prepare was given an object of type {type(given).__name__}. Expected torch modules, optimizers (subclasses of "
        "torch.optim.Optimizer), DataLoaders or LR schedulers."
    )


def check_kind(call: str, given: Any, kind: str) -> None:
    """Raise TypeError if a call for one kind of object gets another kind."""
    found = kind_of(given)
    if found != kind:
        hint = f". It is for prepare_{NAMES[found]}" if found is not None else ""
        a_kind = f"{'an' if kind == 'optimizer' else 'a'} {kind}"
        raise TypeError(f"{call} was given {a_type_of(given)}, which is not {a_kind}{hint}.")
