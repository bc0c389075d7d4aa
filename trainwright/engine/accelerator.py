"""The Accelerator: the Engine's parts in a training loop of one's own.

accelerator = tw.Accelerator()
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for batch, target in loader:
    with accelerator.accumulate(model):
        loss = loss_fn(model(batch), target)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainwright.checkpoint.opening import Verify
from trainwright.data.seeding import set_rng_state
from trainwright.data.transfer import map_tensors
from trainwright.engine.between_ranks import portion
from trainwright.engine.engine import Engine
from trainwright.engine.prepared import PreparedModule, PreparedOptimizer, PreparedScheduler
from trainwright.engine.prepared_loader import PreparedLoader
from trainwright.engine.window import AccumulationWindow
from trainwright.errors import CheckpointError
from trainwright.precision import Precision, StepResult
from trainwright.strategies import Strategy
from trainwright.strategies.base import Optimization

MIXED = {"no": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed"}


class Accelerator:
    """Strategy, precision, data sharding and checkpoints for a loop of one's own. Collective: every rank makes it.

    Args:
        mixed_precision: "no", "fp16" or "bf16".
        gradient_accumulation_steps: batches of one optimizer step, inside `accumulate`.
        cpu: compute on the CPU though there is a GPU.
        devices: processes on this node; "auto" is what was launched, else every GPU, else one.
        strategy: a name or a Strategy.
        precision: in place of mixed_precision, any precision that the Trainer takes.
        num_nodes: nodes of the job, as for the Trainer.

    Raises:
        ValueError, TypeError: a setting is wrong; said before any process is started.
        LaunchError: the processes of the job could not be started.
    """

    def __init__(
        self,
        *,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        devices: int | str = "auto",
        strategy: str | Strategy = "auto",
        precision: str | int | Precision | None = None,
        num_nodes: int = 1,
    ) -> None:
        if mixed_precision is not None and precision is not None:
            raise ValueError(
                f"mixed_precision={mixed_precision!r} and precision={precision!r} were both given; pass one."
            )
        if mixed_precision is not None and mixed_precision not in MIXED:
            raise ValueError(f"mixed_precision={mixed_precision!r} is unknown; choose from {', '.join(MIXED)}.")
        if not isinstance(gradient_accumulation_steps, int) or gradient_accumulation_steps < 1:
            raise ValueError(
                f"gradient_accumulation_steps={gradient_accumulation_steps!r} is not accepted; pass a whole number from 1."
            )
        self.engine = Engine(
            devices=devices,
            strategy=strategy,
            precision=MIXED[mixed_precision] if mixed_precision is not None else precision,
            accelerator="cpu" if cpu else "auto",
            num_nodes=num_nodes,
        )
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.step_count = 0
        """Optimizer steps made, those of every optimizer, the skipped ones among them."""
        self._loaders: list[PreparedLoader] = []
        self._active: list[PreparedLoader] = []
        self._optimizers: list[PreparedOptimizer] = []
        self._schedulers: list[PreparedScheduler] = []
        self._window = AccumulationWindow(self.engine, gradient_accumulation_steps, self._active)
        self._parameters: set[int] = set()
        """The ids of the prepared models' parameters, as given and as the strategy has left them."""

    # -- preparing ---------------------------------------------------------------------------------------------------

    def prepare(self, *objects: Any) -> Any:
        """Return the models, optimizers, loaders and schedulers as the strategy has prepared them, in the same order.

        Give the models and their optimizers in one call. Collective: call on every rank.

        Raises:
            TypeError: an object that is none of these.
        """
        unknown = [each for each in objects if _kind(each) is None]
        if unknown:
            raise TypeError(
                f"prepare was given a {type(unknown[0]).__name__}; accepted are torch modules, optimizers, DataLoaders and LR "
                "schedulers."
            )
        if not self._loaders:
            self.engine.take_seed()
        prepared: dict[int, Any] = {}
        for module in (each for each in objects if _kind(each) == "module"):
            prepared[id(module)] = self._prepare_module(module)
        optimizers = [each for each in objects if _kind(each) == "optimizer"]
        self._refuse_strangers(optimizers)
        if optimizers:
            earlier = len(self.engine.optimizers)
            inner = self.engine.prepare_optimizers([*self.engine.optimizers, *optimizers])[earlier:]
            for given, optimizer in zip(optimizers, inner, strict=True):
                prepared[id(given)] = PreparedOptimizer(self.engine, optimizer, self._window, self._count_step)
                self._optimizers.append(prepared[id(given)])
        for each in objects:
            if _kind(each) == "loader":
                prepared[id(each)] = PreparedLoader(self.engine, each, self._active)
                self._loaders.append(prepared[id(each)])
            elif _kind(each) == "scheduler":
                prepared[id(each)] = PreparedScheduler(each, self._scheduler_is_due)
                self._schedulers.append(prepared[id(each)])
        results = tuple(prepared[id(each)] for each in objects)
        return results[0] if len(results) == 1 else results

    def _prepare_module(self, module: nn.Module) -> nn.Module:
        self._parameters.update(map(id, module.parameters()))
        self.engine.prepare_module(module, Optimization(accumulate=self.gradient_accumulation_steps))
        self._parameters.update(map(id, module.parameters()))
        is_mixed = self.engine.precision.forward_context() is not None
        if not is_mixed and module not in self.engine.strategy.wrapped:
            return module
        return PreparedModule(self.engine, module, to_float32=is_mixed)

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Return the module that was given to `prepare`."""
        return model.module if isinstance(model, PreparedModule) else model

    # -- a step ------------------------------------------------------------------------------------------------------

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return the context of one batch of an accumulation window: in it, optimizers and schedulers step when it is due.

        A window ends after `gradient_accumulation_steps` batches, and at the end of the loader.
        """
        return self._window

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Send a loss backward, divided by the length of its window, and weighted by its samples in an uneven last round.

        The keyword arguments are those of Tensor.backward.
        """
        if not isinstance(loss, Tensor):
            raise TypeError(f"backward was given a {type(loss).__name__}; accepted is a loss tensor.")
        window = self._window
        if window.length > 1:
            loss = loss / window.length
        if self._active and (weight := self._active[-1].weight) != 1.0:
            loss = loss * weight
        window.has_gradients = True
        self.engine.backward(loss, **options)

    def step(
        self, optimizer: Optimizer, *, max_norm: float | None = None, clip_value: float | None = None
    ) -> StepResult | None:
        """Clip where asked and step a prepared optimizer; None where its window has not ended."""
        prepared = self._prepared(optimizer)
        if not self.sync_gradients:
            return None
        scale = self._window.correct(prepared.optimizer)
        result = self.engine.step(prepared.optimizer, self.engine.clipper(max_norm, clip_value, scale=scale))
        prepared.step_was_skipped, prepared.is_unscaled = result.skipped, False
        self._window.has_gradients = False
        self._count_step(result)
        return result

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
        return self._window.is_at_end

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Return whether an optimizer's latest step was left out because its gradients were not finite."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    # -- between ranks -----------------------------------------------------------------------------------------------

    def gather(self, tensors: Any) -> Any:
        """Return each tensor of a nested structure joined over the ranks along its first dimension. Collective."""
        return map_tensors(self.engine.gather, tensors)

    def gather_for_metrics(self, tensors: Any) -> Any:
        """Gather, and leave out the samples that fill up the last round: each sample of the loader is there once.

        Collective: call on every rank, for each batch of the loader that is being iterated.
        """
        sizes = self._active[-1].last_sizes if self._active and self._active[-1].is_at_end else None
        return map_tensors(lambda tensor: self.engine.gather(tensor, sizes), tensors)

    def reduce(self, tensors: Any, reduction: str = "sum") -> Any:
        """Return each tensor's elementwise sum, mean, min or max over the ranks. Collective: call on every rank."""
        return map_tensors(lambda tensor: self.engine.reduce(tensor, reduction), tensors)

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
        if self._window.has_gradients and self.gradient_accumulation_steps > 1:
            raise RuntimeError(
                "save_state was called within an accumulation window, whose gradients a checkpoint does not hold; call it when "
                "accelerator.sync_gradients is True and the optimizer has stepped."
            )
        loaders = [loader.state_dict() for loader in self._loaders]
        place = loaders[0] if loaders else {"epoch": 0, "batch": 0}
        state = {
            "position": {**place, "step": self.step_count},
            "loaders": loaders,
            "lr_schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
        }
        self.engine.save(
            str(output_dir),
            step=self.step_count,
            epoch=place["epoch"],
            state=state,
            rank_state={"sources": [loader.sources() for loader in self._loaders]},
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
            saved, present = len(state.get("lr_schedulers", [])), len(self._schedulers)
            if saved != present:
                raise CheckpointError(
                    f"{input_dir}: it was saved with {saved} schedulers, but {present} were prepared. Prepare the same ones."
                )

        if weights_only:
            self.engine.load(self.engine.open(str(input_dir), verify=verify), weights_only=True)
            return
        restored = self.engine.load(self.engine.open(str(input_dir), verify=verify), check=check)
        for scheduler, saved in zip(self._schedulers, restored.state.get("lr_schedulers", []), strict=True):
            scheduler.load_state_dict(saved)
        position = restored.state["position"]
        self.step_count = int(position["step"])
        self._window.reset()
        if position.get("epoch_ended"):
            position = {"epoch": position["epoch"] + 1, "batch": 0}
        places = restored.state.get("loaders", [position])
        sources = [*restored.sources, *([] for _ in self._loaders)]
        for loader, place, states in zip(self._loaders, places, sources, strict=False):
            loader.load_state_dict(place, states)
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

    def _scheduler_is_due(self) -> bool:
        return self.sync_gradients and not self.optimizer_step_was_skipped

    def _count_step(self, result: StepResult) -> None:
        self.step_count += 1

    def _refuse_strangers(self, optimizers: Sequence[Optimizer]) -> None:
        """Refuse optimizers of a module that is not prepared (ValueError): its ranks would drift apart."""
        if self.num_processes == 1:
            return
        for optimizer in optimizers:
            if not all(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"]):
                raise ValueError(
                    f"prepare was given a {type(optimizer).__name__} with parameters of no prepared model, which "
                    f"{self.num_processes} ranks would train apart; give the models and their optimizers in one call."
                )

    def _prepared(self, optimizer: Optimizer) -> PreparedOptimizer:
        for prepared in self._optimizers:
            if optimizer is prepared or optimizer is prepared.optimizer:
                return prepared
        raise ValueError("this optimizer was not prepared; pass one that accelerator.prepare returned.")

    def _clip(self, parameters: Iterable[Tensor], norm: float | None, value: float | None) -> Tensor | None:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        wanted = {id(parameter) for parameter in given}
        if not self.sync_gradients:
            return None
        for prepared in self._optimizers:
            own = {id(parameter) for group in prepared.param_groups for parameter in group["params"]}
            if own <= wanted and not any(p.grad is not None for p in given if id(p) not in own):
                self.engine.strategy.unscale(prepared.optimizer)
                prepared.is_unscaled = True
                scale = self._window.correct(prepared.optimizer)
                return self.engine.strategy.clip_gradients(prepared.optimizer, norm, value, scale)
        raise ValueError(
            "the parameters to clip are not those of one prepared optimizer; pass those that one optimizer steps, such as "
            "model.parameters() of a model whose only optimizer was prepared."
        )


_KINDS: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("module", lambda each: isinstance(each, nn.Module)),
    ("optimizer", lambda each: isinstance(each, Optimizer)),
    ("loader", lambda each: isinstance(each, DataLoader)),
    ("scheduler", lambda each: callable(getattr(each, "step", None)) and callable(getattr(each, "state_dict", None))),
)


def _kind(each: Any) -> str | None:
    return next((name for name, fits in _KINDS if fits(each)), None)
