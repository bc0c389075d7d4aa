"""The Accelerator: the Engine's parts for a training loop that the user writes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, repeat
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.reader import Verify
from trainwright.data.seeding import set_rng_state
from trainwright.engine import gathering
from trainwright.engine.command_line import fill_accumulation
from trainwright.engine.engine import Engine
from trainwright.engine.prepared import (
    Preparations,
    PreparedModule,
    PreparedOptimizer,
    PreparedScheduler,
    kind_of,
    stepped_by,
)
from trainwright.engine.prepared_loader import Iterations, PreparedLoader
from trainwright.engine.window import AccumulationWindows, in_float32
from trainwright.errors import CheckpointError
from trainwright.precision import Precision
from trainwright.rank_zero import rank_zero_warn
from trainwright.raw_loop.processes import Processes
from trainwright.strategies import Strategy
from trainwright.strategies.base import Optimization, StepResult

MIXED = {"no": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed"}


class Accelerator(Processes):
    """Strategy, precision, data sharding and checkpoints for a training loop that you write.

    Collective: create it on every rank.

    Args:
        mixed_precision: "no", "fp16" or "bf16".
        gradient_accumulation_steps: batches per optimizer step, inside `accumulate`.
        cpu: the same as accelerator="cpu".
        accelerator: the kind of device, as for the Trainer: "auto" (the accelerator that torch finds, else the CPU), "gpu",
            "cpu", "cuda", "mps", "xpu", or the name of a backend that another package registers.
        devices: number of processes on this node, one per device, or a list of devices. "auto": the launcher's count if
            launched, otherwise every device of the accelerator, otherwise 1.
        strategy: a name or a Strategy.
        precision: any precision of the Trainer, instead of mixed_precision.
        num_nodes: nodes of the job, as for the Trainer.

    Raises:
        ValueError, TypeError: a setting is wrong; raised before any process is started.
        RuntimeError: this machine does not have the accelerator.
        LaunchError: the processes of the job could not be started.

    >>> accelerator = tw.Accelerator(gradient_accumulation_steps=2)
    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    >>> for inputs, targets in loader:
    ...     with accelerator.accumulate(model):
    ...         accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    """

    def __init__(
        self,
        *,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        accelerator: str = "auto",
        devices: int | str | list[int] = "auto",
        strategy: str | Strategy = "auto",
        precision: str | int | Precision | None = None,
        num_nodes: int = 1,
    ) -> None:
        if mixed_precision is not None and precision is not None:
            raise ValueError(
                f"mixed_precision={mixed_precision!r} and precision={precision!r} were both given; pass one."
            )
        if mixed_precision is not None and mixed_precision not in MIXED:
            of_trainer = next((word for word, name in MIXED.items() if name == mixed_precision), None)
            hint = f" precision={mixed_precision!r} means mixed_precision={of_trainer!r}." if of_trainer else ""
            hint = hint or " precision= takes every precision of the Trainer."
            raise ValueError(f"mixed_precision={mixed_precision!r} is unknown; choose from {', '.join(MIXED)}.{hint}")
        if cpu and accelerator not in ("auto", "cpu"):
            raise ValueError(f"cpu=True and accelerator={accelerator!r} were both given; pass one.")
        _check_length(gradient_accumulation_steps)
        engine = Engine(
            devices=devices,
            strategy=strategy,
            precision=MIXED[mixed_precision] if mixed_precision is not None else precision,
            accelerator="cpu" if cpu else accelerator,
            num_nodes=num_nodes,
        )
        super().__init__(engine)
        steps = fill_accumulation(engine.environment, "gradient_accumulation_steps", gradient_accumulation_steps)
        self._optimization = engine.strategy.resolve(Optimization(accumulate=steps))
        """Accumulation and clipping; a strategy's own configuration overrides the arguments."""
        self.step_count = 0
        """Number of optimizer steps, summed over the optimizers; skipped steps count."""
        self._has_warned_of_norm = False
        self._weighs_rounds = self.engine.world_size > 1  # one process has no uneven rounds
        self._preparations = Preparations()
        self._iterations = Iterations()
        self._windows = AccumulationWindows(
            self.engine, self._optimization.accumulate, self._iterations, self._drop_gradients
        )

    def prepare(self, *objects: Any) -> Any:
        """Return the models, optimizers, loaders and schedulers, prepared by the strategy, in the same order.

        Pass the models and their optimizers in one call. An object that is already prepared is returned unchanged.
        Collective: call on every rank.

        Raises:
            TypeError: an object of another kind.
            ValueError: an optimizer whose parameters belong to no prepared model, or were replaced before it was prepared.
        """
        done = self._preparations
        objects = tuple(done.to_prepare(each) for each in objects)
        new: dict[str, list[Any]] = {"module": [], "optimizer": [], "loader": [], "scheduler": []}
        for each in objects:
            kind = kind_of(each)
            if kind is None:
                raise TypeError(
                    f"prepare was given an object of type {type(each).__name__}; accepted are torch modules, optimizers "
                    "(subclasses of torch.optim.Optimizer), DataLoaders and LR schedulers."
                )
            if done.of(each) is None and each not in new[kind]:
                new[kind].append(each)
        if not done.loaders:
            self.engine.take_seed()  # once: the loaders of a loop are shuffled from one seed
        # The strategy may replace parameters, so the models come before the optimizers that step them.
        done.models.extend(self._prepare_module(each) for each in new["module"])
        if new["optimizer"]:
            self._prepare_optimizers(new["optimizer"])
        done.loaders.extend(PreparedLoader(self.engine, each, self._iterations) for each in new["loader"])
        for each in new["scheduler"]:
            own = done.of(getattr(each, "optimizer", None))
            optimizers = done.optimizers if own is None else [own]
            done.schedulers.append(PreparedScheduler(each, optimizers, self._windows))
        results = tuple(done.of(each) for each in objects)
        return results[0] if len(results) == 1 else results

    def _prepare_module(self, module: nn.Module) -> nn.Module:
        before = stepped_by(*self._preparations.optimizers).intersection(module.parameters())
        self.engine.prepare_module(module, self._optimization)
        if any(self.engine.replaced.current(each) is not each for each in before):
            raise ValueError(
                f"the optimizer of {type(module).__name__} was prepared before it, and the strategy has replaced its "
                "parameters; prepare the model before its optimizer, or in the same call."
            )
        is_mixed = self.engine.precision.forward_context() is not None
        if not is_mixed and module not in self.engine.strategy.wrapped:
            return module  # its own forward does all that a wrapper would
        return PreparedModule(self.engine, module, to_float32=is_mixed)

    def _prepare_optimizers(self, optimizers: list[Optimizer]) -> None:
        self.engine.replaced.update(optimizers)
        for each in optimizers:
            self._refuse_strangers(each)
        earlier = len(self.engine.optimizers)
        # The strategies expect those that an earlier call returned first in the list.
        inner = self.engine.prepare_optimizers([*self.engine.optimizers, *optimizers])[earlier:]
        norm = self._optimization.clip_norm
        for given, each in zip(optimizers, inner, strict=True):
            prepared = PreparedOptimizer(
                self.engine, each, self._windows, self._count_step, given=given, clip_norm=norm, admit=self._admit
            )
            self._preparations.optimizers.append(prepared)

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Return the module that was given to `prepare`."""
        return model.module if isinstance(model, PreparedModule) else model

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return the context of one batch, in which optimizers and schedulers step only at the end of a window.

        A window ends after `gradient_accumulation_steps` batches, and at the end of the loader. If the loop leaves the loader
        before that, the window's gradients are dropped and the next batch begins a new one. Each set of models passed here
        has its own windows.
        """
        return self._windows.of(models)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward on a loss, divided by the length of its window, and weighted by its samples in an uneven last round.

        The keyword arguments are those of Tensor.backward.
        """
        if not isinstance(loss, Tensor):
            raise TypeError(f"backward was given a {type(loss).__name__}; accepted is a loss tensor.")
        loss = self._windows.divide(loss)
        if self._weighs_rounds:
            iteration, _ = self._iterations.current()
            if iteration is not None and (weight := iteration.loader.weight) != 1.0:
                loss = in_float32(loss) * weight
        self.engine.backward(loss, **options)

    def step(
        self, optimizer: Optimizer, *, max_norm: float | None = None, clip_value: float | None = None
    ) -> StepResult | None:
        """Step a prepared optimizer, and clip before, if given a limit; return None before the end of its window."""
        prepared = self._preparations.of(optimizer)
        if not isinstance(prepared, PreparedOptimizer):
            raise ValueError("this optimizer was not prepared; pass one that accelerator.prepare returned.")
        self._warn_of_norm(max_norm)
        return prepared.step_clipped(max_norm, clip_value)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor | None:
        """Clip the total norm of a prepared optimizer's gradients; return the norm, or None before the window's end.

        Raises:
            ValueError: the parameters are not those of one prepared optimizer.
        """
        return self._clip(parameters, max_norm, None)

    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clip each element of a prepared optimizer's gradients, at the window's end."""
        self._clip(parameters, None, clip_value)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context that forwards run in, for code outside the model."""
        return self.engine.precision.forward_context() or nullcontext()

    @property
    def sync_gradients(self) -> bool:
        """Return whether the current batch ends its accumulation window."""
        return self._windows.current.is_at_end

    @property
    def gradient_accumulation_steps(self) -> int:
        """Return the batches per optimizer step, inside `accumulate`; a new value applies from the next window on."""
        return self._windows.usual_length

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, length: int) -> None:
        _check_length(length)
        self._windows.set_length(self.engine.strategy.resolve(Optimization(accumulate=length)).accumulate)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Return whether an optimizer's latest step was skipped because its gradients were not finite."""
        return any(optimizer.step_was_skipped for optimizer in self._preparations.optimizers)

    def gather(self, tensors: Any) -> Any:
        """Return a nested structure with the values of all ranks, rank by rank. Collective: call on every rank.

        Tensors are joined along their first dimension; lists of plain data, and tuples of numbers and texts, item by item. A
        number or a text becomes a list with one item per rank. None stays None.

        Raises:
            TypeError: the structure holds something else.
        """
        return gathering.gather(tensors, self.engine.gather, None, self._exchange)

    def gather_for_metrics(self, tensors: Any) -> Any:
        """Gather without the samples that pad the last round, so that each sample of the loader is there once.

        Of each rank's tensors and lists, the first items are taken, as many as it has samples. Collective: call on every
        rank, for each batch of the loader that is being iterated.

        Raises:
            TypeError: see `gather`.
        """
        iteration, _ = self._iterations.current()
        sizes = iteration.loader.last_sizes if iteration is not None and iteration.loader.is_at_end else None
        return gathering.gather(tensors, lambda tensor: self.engine.gather(tensor, sizes), sizes, self._exchange)

    def reduce(self, tensors: Any, reduction: str = "sum") -> Any:
        """Return a nested structure with the sum, mean, min or max over the ranks of each number and each tensor element.

        Collective: call on every rank.

        Raises:
            TypeError: the structure holds something else.
        """
        return gathering.reduce(tensors, reduction, lambda each: self.engine.reduce(each, reduction), self._exchange)

    def broadcast(self, obj: Any, from_process: int = 0) -> Any:
        """Return one process's plain data and tensors on every process. Collective: call on every rank."""
        return self.engine.broadcast(obj, from_process)

    def save_state(self, output_dir: str, blocking: bool = True, overwrite: bool = False) -> str:
        """Write a checkpoint of everything that was prepared, in the Trainer's format; return its path.

        Collective: call on every rank.

        Args:
            blocking: False returns once all is copied to host memory, and a thread writes: see `finish_save`.
            overwrite: replace a whole checkpoint at that path, once the new one is committed.

        Raises:
            CheckpointError: on every rank, if it was not written or the path exists (with overwrite, as something else).
            RuntimeError: within an accumulation window, since checkpoints hold no gradients.
        """
        if self._windows.is_open and self.gradient_accumulation_steps > 1:
            raise RuntimeError(
                "save_state was called within an accumulation window, and checkpoints hold no gradients; call it when "
                "accelerator.sync_gradients is True and the optimizer has stepped."
            )
        loaders = [loader.state_dict() for loader in self._preparations.loaders]
        sources = [loader.pop("sources") for loader in loaders]
        position = loaders[0] if loaders else {"epoch": 0, "batch": 0}
        state = {
            "position": {**position, "step": self.step_count},
            "loaders": loaders,
            "lr_schedulers": [scheduler.state_dict() for scheduler in self._preparations.schedulers],
            "steps_of_schedulers": [scheduler.steps_since() for scheduler in self._preparations.schedulers],
        }
        self.engine.save(
            str(output_dir),
            step=self.step_count,
            epoch=position["epoch"],
            state=state,
            rank_state={"sources": sources},
            blocking=blocking,
            overwrite=overwrite,
        )
        return str(output_dir)

    def finish_save(self) -> None:
        """Wait for a `save_state(..., blocking=False)`, as later saves and loads do too. Collective: call on every rank.

        Raises:
            CheckpointError: on every rank, if that save failed; earlier checkpoints are unchanged.
        """
        self.engine.finish_save()

    def load_state(self, input_dir: str, verify: Verify = "full", *, weights_only: bool = False) -> None:
        """Resume from a checkpoint of `save_state`, or of a Trainer with the same model, optimizers and schedulers.

        The next iteration of each loader resumes at its saved position; a Trainer's checkpoint has one for the first loader
        only. Collective: call on every rank.

        Args:
            input_dir: the checkpoint, of any strategy and number of processes.
            verify: how the files are checked first: "full" (every digest), "size", or "off".
            weights_only: load the model's weights and nothing else, also from an imported checkpoint.

        Raises:
            CheckpointError: no checkpoint, a damaged one, or one of another model or optimizer.
        """

        schedulers = self._preparations.schedulers

        def check(state: dict[str, Any]) -> None:
            if (saved := len(state.get("lr_schedulers", []))) != len(schedulers):
                raise CheckpointError(
                    f"{input_dir}: it was saved with {saved} schedulers, but {len(schedulers)} were prepared. Prepare the "
                    "same ones."
                )

        opened = self.engine.open(str(input_dir), verify=verify)
        if weights_only:
            self.engine.load(opened, weights_only=True)
            return
        restored = self.engine.load(opened, check=check)
        for scheduler, saved in zip(schedulers, restored.state.get("lr_schedulers", []), strict=True):
            scheduler.load_state_dict(saved)
        for scheduler, since in zip(schedulers, restored.state.get("steps_of_schedulers", []), strict=False):
            scheduler.take_steps(*since)
        position = restored.state["position"]
        self.step_count = int(position["step"])
        self._windows.reset()
        if position.get("epoch_ended"):  # a Trainer's, saved between two epochs
            position = {"epoch": position["epoch"] + 1, "batch": 0}
        states = restored.state.get("loaders", [position])
        sources = chain(restored.nearest_rank_state.get("sources", ()), repeat(()))
        for loader, state, source in zip(self._preparations.loaders, states, sources, strict=False):
            loader.load_state_dict({**state, "sources": source})
        if restored.rng is not None:
            set_rng_state(restored.rng)

    def _exchange(self, value: Any) -> list[Any]:
        return self.engine.ranks.exchange(value, "gather or reduce of plain data")

    def _count_step(self, result: StepResult) -> None:
        self.step_count += 1

    def _drop_gradients(self, models: tuple[nn.Module, ...]) -> None:
        """Clear the gradients of these models; of all if none is given."""
        own = {parameter for model in models for parameter in model.parameters()}
        for each in self._preparations.optimizers:
            if not models or not own.isdisjoint(stepped_by(each)):
                each.drop_gradients()
        self._windows.clear()

    def _refuse_strangers(self, optimizer: Optimizer) -> None:
        """Refuse parameters of a module that is not prepared (ValueError), since its replicas would drift apart."""
        if self.num_processes == 1:
            return
        own = {parameter for module in self.engine.modules for parameter in module.parameters()}
        if not stepped_by(optimizer) <= own:
            raise ValueError(
                f"the {type(optimizer).__name__} has parameters of no prepared model, which each of the {self.num_processes} "
                "ranks would train by itself; pass the models and their optimizers to prepare in one call."
            )

    def _admit(self, optimizer: Optimizer) -> None:
        """Check a group that was added to a prepared optimizer, and let the strategy train it. Collective."""
        self._refuse_strangers(optimizer)
        self.engine.refresh_trainable(if_changed=True)

    def _warn_of_norm(self, norm: float | None) -> None:
        used = self._optimization.clip_norm
        if norm is None or used in (None, norm) or self._has_warned_of_norm:
            return
        self._has_warned_of_norm = True
        rank_zero_warn(
            f"the strategy's own configuration clips at a norm of {used}, and this loop at {norm}: the configuration's is "
            "used.",
            stacklevel=4,
        )

    def _clip(self, parameters: Iterable[Tensor], norm: float | None, value: float | None) -> Tensor | None:
        if not self.sync_gradients:
            return None
        given = {parameters} if isinstance(parameters, Tensor) else set(parameters)
        for prepared in self._preparations.optimizers:
            own = stepped_by(prepared)
            # Parameters that no optimizer steps may be among them, if they have no gradient that the norm would miss.
            if own <= given and not any(each.grad is not None for each in given - own):
                self._warn_of_norm(norm)
                return prepared.clip(norm, value)
        raise ValueError(
            "the parameters to clip are not those of one prepared optimizer; pass those that one optimizer steps, such as "
            "model.parameters() of a model whose only optimizer was prepared."
        )


def _check_length(length: Any) -> None:
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ValueError(f"gradient_accumulation_steps={length!r} is not accepted; pass a whole number from 1.")
