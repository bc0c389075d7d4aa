"""The Accelerator: the Engine's parts in a training loop of one's own."""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.reader import Verify
from trainwright.data.seeding import set_rng_state
from trainwright.engine import gathering
from trainwright.engine.between_ranks import portion
from trainwright.engine.divided_loss import in_float32
from trainwright.engine.engine import Engine
from trainwright.engine.iterations import Iterations
from trainwright.engine.preparations import Preparations, kind_of
from trainwright.engine.prepared import PreparedModule, PreparedOptimizer, PreparedScheduler
from trainwright.engine.prepared_loader import PreparedLoader
from trainwright.engine.window import AccumulationWindows
from trainwright.errors import CheckpointError
from trainwright.precision import Precision
from trainwright.rank_zero import rank_zero_warn
from trainwright.strategies import Strategy
from trainwright.strategies.base import Optimization, StepResult

MIXED = {"no": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed"}


class Accelerator:
    """Strategy, precision, data sharding and checkpoints for a loop of one's own. Collective: every rank makes it.

    Args:
        mixed_precision: "no", "fp16" or "bf16".
        gradient_accumulation_steps: batches of one optimizer step, inside `accumulate`.
        cpu: the same as accelerator="cpu".
        accelerator: the kind of device, as for the Trainer: "auto" (the accelerator that torch has here, else the CPU),
            "gpu", "cpu", "cuda", "mps", "xpu", or the name of a backend that another package registers.
        devices: processes on this node, one a device; a list of devices; "auto" is what was launched, else every device of
            the accelerator, else one.
        strategy: a name or a Strategy.
        precision: in place of mixed_precision, any precision that the Trainer takes.
        num_nodes: nodes of the job, as for the Trainer.

    Raises:
        ValueError, TypeError: a setting is wrong; said before any process is started.
        RuntimeError: the accelerator is not here.
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
        self.engine = Engine(
            devices=devices,
            strategy=strategy,
            precision=MIXED[mixed_precision] if mixed_precision is not None else precision,
            accelerator="cpu" if cpu else accelerator,
            num_nodes=num_nodes,
        )
        self._settled = self.engine.strategy.resolve(Optimization(accumulate=gradient_accumulation_steps))
        """How it is optimized: a strategy's own configuration may say otherwise than was asked for."""
        self.step_count = 0
        """Optimizer steps made, those of every optimizer, the skipped ones among them."""
        self._has_told = False
        self._weighs_rounds = self.engine.world_size > 1
        self._preparations = Preparations()
        self._iterations = Iterations()
        self._windows = AccumulationWindows(
            self.engine, self._settled.accumulate, self._iterations, self._drop_gradients
        )

    # -- preparing ---------------------------------------------------------------------------------------------------

    def prepare(self, *objects: Any) -> Any:
        """Return the models, optimizers, loaders and schedulers as the strategy has prepared them, in the same order.

        Give the models and their optimizers in one call. What is prepared already comes back as it is. Collective: call on
        every rank.

        Raises:
            TypeError: an object that is none of these.
            ValueError: an optimizer of parameters that would be trained in vain, or apart on each rank.
        """
        objects = tuple(self._preparations.to_prepare(each) for each in objects)
        unknown = [each for each in objects if kind_of(each) is None]
        if unknown:
            raise TypeError(
                f"prepare was given a {type(unknown[0]).__name__}; accepted are torch modules, optimizers "
                "(subclasses of torch.optim.Optimizer), DataLoaders and LR schedulers."
            )
        if not self._preparations.loaders:
            self.engine.take_seed()
        new: dict[str, list[Any]] = {"module": [], "optimizer": [], "loader": [], "scheduler": []}
        for each in objects:
            kind = kind_of(each)
            assert kind is not None
            if self._preparations.of(each) is None and each not in new[kind]:
                new[kind].append(each)
        self._preparations.models.extend(self._prepare_module(each) for each in new["module"])
        if new["optimizer"]:
            self._prepare_optimizers(new["optimizer"])
        self._preparations.loaders.extend(PreparedLoader(self.engine, each, self._iterations) for each in new["loader"])
        for each in new["scheduler"]:
            own = self._preparations.of(getattr(each, "optimizer", None))
            optimizers = self._preparations.optimizers if own is None else [own]
            self._preparations.schedulers.append(PreparedScheduler(each, optimizers, self._windows))
        results = tuple(self._preparations.of(each) for each in objects)
        return results[0] if len(results) == 1 else results

    def _prepare_module(self, module: nn.Module) -> nn.Module:
        stepped = {
            id(p) for each in self._preparations.optimizers for group in each.param_groups for p in group["params"]
        }
        before = [each for each in module.parameters() if id(each) in stepped]
        self.engine.prepare_module(module, self._settled)
        if any(self.engine.replaced.current(each) is not each for each in before):
            raise ValueError(
                f"the optimizer of {type(module).__name__} was prepared before it, and the strategy has replaced its "
                "parameters; prepare the model before its optimizer, or in the same call."
            )
        is_mixed = self.engine.precision.forward_context() is not None
        if not is_mixed and module not in self.engine.strategy.wrapped:
            return module
        return PreparedModule(self.engine, module, to_float32=is_mixed)

    def _prepare_optimizers(self, optimizers: list[Optimizer]) -> None:
        self.engine.replaced.update(optimizers)
        for each in optimizers:
            self._refuse_strangers(each, each.param_groups)
        earlier = len(self.engine.optimizers)
        inner = self.engine.prepare_optimizers([*self.engine.optimizers, *optimizers])[earlier:]
        for given, optimizer in zip(optimizers, inner, strict=True):
            self._preparations.optimizers.append(
                PreparedOptimizer(
                    self.engine,
                    optimizer,
                    self._windows,
                    self._count_step,
                    given=given,
                    clip_norm=self._settled.clip_norm,
                    admit=self._admit,
                )
            )

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Return the module that was given to `prepare`."""
        return model.module if isinstance(model, PreparedModule) else model

    # -- a step ------------------------------------------------------------------------------------------------------

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return the context of one batch of an accumulation window: in it, optimizers and schedulers step when it is due.

        A window ends after `gradient_accumulation_steps` batches, and at the end of the loader; where the loader is left
        before, its gradients are dropped and the next batch begins a new one. Each set of models that is named here has its
        own windows.
        """
        return self._windows.of(models)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Send a loss backward, divided by the length of its window, and weighted by its samples in an uneven last round.

        The keyword arguments are those of Tensor.backward.
        """
        if not isinstance(loss, Tensor):
            raise TypeError(f"backward was given a {type(loss).__name__}; accepted is a loss tensor.")
        loss = self._windows.divide(loss)
        if self._weighs_rounds:
            iteration, _ = self._iterations.at_hand()
            if iteration is not None and (weight := iteration.loader.weight) != 1.0:
                loss = in_float32(loss) * weight
        self.engine.backward(loss, **options)

    def step(
        self, optimizer: Optimizer, *, max_norm: float | None = None, clip_value: float | None = None
    ) -> StepResult | None:
        """Clip where asked and step a prepared optimizer; None where its window has not ended."""
        prepared = self._preparations.of(optimizer)
        if not isinstance(prepared, PreparedOptimizer):
            raise ValueError("this optimizer was not prepared; pass one that accelerator.prepare returned.")
        self._tell_norm(max_norm)
        return prepared.step_clipped(max_norm, clip_value)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor | None:
        """Clip the total norm of a prepared optimizer's gradients; return it, or None before the window's end.

        Raises:
            ValueError: the parameters are not those of one prepared optimizer.
        """
        return self._clip(parameters, max_norm, None)

    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clip each element of a prepared optimizer's gradients, at the window's end."""
        self._clip(parameters, None, clip_value)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context that forwards run in, for code beside the model."""
        return self.engine.precision.forward_context() or nullcontext()

    @property
    def sync_gradients(self) -> bool:
        """Return whether the batch at hand ends its accumulation window."""
        return self._windows.at_hand.is_at_end

    @property
    def gradient_accumulation_steps(self) -> int:
        """Return how many batches an optimizer step takes, inside `accumulate`; set, it counts from the next window on."""
        return self._windows.usual_length

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, length: int) -> None:
        _check_length(length)
        self._windows.set_length(self.engine.strategy.resolve(Optimization(accumulate=length)).accumulate)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Return whether an optimizer's latest step was left out because its gradients were not finite."""
        return any(optimizer.step_was_skipped for optimizer in self._preparations.optimizers)

    # -- between ranks -----------------------------------------------------------------------------------------------

    def gather(self, tensors: Any) -> Any:
        """Return what all ranks have in each place of a nested structure, rank by rank. Collective: call on every rank.

        Tensors are joined along their first dimension, lists of plain data item by item (a tuple of numbers and texts too),
        and a number or a text becomes a list with one item a rank. None stays None.

        Raises:
            TypeError: something else stands there.
        """
        return gathering.gather(tensors, self.engine.gather, None, self._exchange)

    def gather_for_metrics(self, tensors: Any) -> Any:
        """Gather, and leave out the samples that fill up the last round: each sample of the loader is there once.

        Of tensors, and of lists, the first items of each rank are taken, as many as it has samples. Collective: call on
        every rank, for each batch of the loader that is being iterated.

        Raises:
            TypeError: see `gather`.
        """
        iteration, _ = self._iterations.at_hand()
        sizes = iteration.loader.last_sizes if iteration is not None and iteration.loader.is_at_end else None
        return gathering.gather(tensors, lambda tensor: self.engine.gather(tensor, sizes), sizes, self._exchange)

    def reduce(self, tensors: Any, reduction: str = "sum") -> Any:
        """Return the sum, mean, min or max over the ranks of each number, and of each tensor's elements, in a structure.

        Collective: call on every rank.

        Raises:
            TypeError: something else than tensors and numbers stands there.
        """
        return gathering.reduce(
            tensors, reduction, lambda tensor: self.engine.reduce(tensor, reduction), self._exchange
        )

    def wait_for_everyone(self) -> None:
        """Wait until every rank has come here. Collective: call on every rank."""
        self.engine.barrier()

    def broadcast(self, obj: Any, from_process: int = 0) -> Any:
        """Return one process's plain data and tensors on every process. Collective: call on every rank."""
        return self.engine.broadcast(obj, from_process)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context that rank 0 goes through before the others begin it. Collective: enter it on every rank."""
        return self.engine.rank_zero_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Return a context that each node's first process goes through before the others begin it. Collective."""
        return self.engine.rank_zero_first(local=True)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give this process its part of a list, a tuple, a tensor, or a dict of these; nothing is communicated.

        The parts are contiguous and differ by one item at most; with apply_padding the last item fills the shorter ones up.
        """
        yield portion(inputs, self.process_index, self.num_processes, apply_padding)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only."""
        if self.is_main_process:
            builtins.print(*args, **kwargs)

    # -- state -------------------------------------------------------------------------------------------------------

    def save_state(self, output_dir: str, blocking: bool = True, overwrite: bool = False) -> str:
        """Write a checkpoint of everything that was prepared, in the Trainer's format; return its path. Collective.

        With blocking=False training goes on once all is copied to host memory, and a thread writes: see `finish_save`.
        With overwrite=True it takes the place of a whole checkpoint at that path, once it is committed itself.

        Raises:
            CheckpointError: on every rank alike, where the path exists too (with overwrite, where anything else is there).
            RuntimeError: within an accumulation window, whose gradients no checkpoint holds.
        """
        if self._windows.is_open and self.gradient_accumulation_steps > 1:
            raise RuntimeError(
                "save_state was called within an accumulation window, whose gradients a checkpoint does not hold; call it when "
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
        """Wait for a `save_state(..., blocking=False)`; the next save, a load and the program's end wait too. Collective.

        Raises:
            CheckpointError: that save failed, on every rank alike; earlier checkpoints are unchanged.
        """
        self.engine.finish_save()

    def load_state(self, input_dir: str, verify: Verify = "full", *, weights_only: bool = False) -> None:
        """Go on from a checkpoint: of `save_state`, or of a Trainer with the same model, optimizers and schedulers.

        The next iteration of each loader goes on where it was; after a Trainer's checkpoint that is the first loader.
        `verify` says how the files are looked at first: "full" (every digest), "size", or "off". Collective: call on every
        rank.

        Args:
            input_dir: the checkpoint, of whatever strategy and number of processes.
            weights_only: take the model's weights and nothing else, whatever trained them; also of an imported checkpoint.

        Raises:
            CheckpointError: no checkpoint, a damaged one, or one of another model or optimizer.
        """

        def check(state: dict[str, Any]) -> None:
            saved, present = len(state.get("lr_schedulers", [])), len(self._preparations.schedulers)
            if saved != present:
                raise CheckpointError(
                    f"{input_dir}: it was saved with {saved} schedulers, but {present} were prepared. Prepare the same ones."
                )

        if weights_only:
            self.engine.load(self.engine.open(str(input_dir), verify=verify), weights_only=True)
            return
        restored = self.engine.load(self.engine.open(str(input_dir), verify=verify), check=check)
        for scheduler, saved in zip(
            self._preparations.schedulers, restored.state.get("lr_schedulers", []), strict=True
        ):
            scheduler.load_state_dict(saved)
        for scheduler, since in zip(
            self._preparations.schedulers, restored.state.get("steps_of_schedulers", []), strict=False
        ):
            scheduler.take_steps(*since)
        position = restored.state["position"]
        self.step_count = int(position["step"])
        self._windows.reset()
        if position.get("epoch_ended"):
            position = {"epoch": position["epoch"] + 1, "batch": 0}
        states = restored.state.get("loaders", [position])
        sources = chain(restored.nearest_rank_state.get("sources", ()), repeat(()))
        for loader, state, source in zip(self._preparations.loaders, states, sources, strict=False):
            loader.load_state_dict({**state, "sources": source})
        if restored.rng is not None:
            set_rng_state(restored.rng)

    # -- where this process is ---------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Return the device of this process."""
        return self.engine.device

    @property
    def process_index(self) -> int:
        """Return this process's number in the job, from 0."""
        return self.engine.rank

    @property
    def local_process_index(self) -> int:
        """Return this process's number on its node, from 0."""
        return self.engine.local_rank

    @property
    def num_processes(self) -> int:
        """Return how many processes the job has."""
        return self.engine.world_size

    @property
    def is_main_process(self) -> bool:
        """Return whether this is the first process of the job."""
        return self.engine.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Return whether this is the first process of its node."""
        return self.engine.local_rank == 0

    # -- what the prepared objects ask -------------------------------------------------------------------------------

    def _exchange(self, value: Any) -> list[Any]:
        return self.engine.ranks.exchange(value, "gather or reduce of plain data")

    def _count_step(self, result: StepResult) -> None:
        self.step_count += 1

    def _drop_gradients(self, models: tuple[nn.Module, ...]) -> None:
        """Clear what waits for a step of these models; of all where none is given."""
        own = {id(parameter) for model in models for parameter in model.parameters()}
        for each in self._preparations.optimizers:
            if not models or any(id(p) in own for group in each.param_groups for p in group["params"]):
                each.drop_gradients()
        self._windows.has_gradients = False

    def _refuse_strangers(self, optimizer: Optimizer, groups: Iterable[dict[str, Any]]) -> None:
        """Refuse parameters of a module that is not prepared (ValueError): its ranks would drift apart."""
        if self.num_processes == 1:
            return
        own = {id(parameter) for module in self.engine.modules for parameter in module.parameters()}
        if not all(id(parameter) in own for group in groups for parameter in group["params"]):
            raise ValueError(
                f"the {type(optimizer).__name__} has parameters of no prepared model, which {self.num_processes} ranks would "
                "train apart; give the models and their optimizers to prepare in one call."
            )

    def _admit(self, optimizer: Optimizer) -> None:
        """Let a group that was added to a prepared optimizer be trained on all ranks alike. Collective."""
        self._refuse_strangers(optimizer, optimizer.param_groups)
        self.engine.refresh_trainable(if_changed=True)

    def _tell_norm(self, norm: float | None) -> None:
        settled = self._settled.clip_norm
        if settled is not None and norm is not None and norm != settled and not self._has_told:
            self._has_told = True
            rank_zero_warn(
                f"the strategy's own configuration clips at a norm of {settled}, and this loop at {norm}: the configuration's "
                "is used.",
                stacklevel=4,
            )

    def _clip(self, parameters: Iterable[Tensor], norm: float | None, value: float | None) -> Tensor | None:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        wanted = {id(parameter) for parameter in given}
        if not self.sync_gradients:
            return None
        for prepared in self._preparations.optimizers:
            own = {id(parameter) for group in prepared.param_groups for parameter in group["params"]}
            if own <= wanted and not any(p.grad is not None for p in given if id(p) not in own):
                self._tell_norm(norm)
                return prepared.clip(norm, value)
        raise ValueError(
            "the parameters to clip are not those of one prepared optimizer; pass those that one optimizer steps, such as "
            "model.parameters() of a model whose only optimizer was prepared."
        )


def _check_length(length: Any) -> None:
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ValueError(f"gradient_accumulation_steps={length!r} is not accepted; pass a whole number from 1.")
