"""The Engine: one strategy, one precision and the data of one job, behind one interface for Trainer and Accelerator.

`job.py` joins the job, and `engine_checkpoints.py` saves and loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainwright.checkpoint.store import CheckpointWriter
from trainwright.data.index_stream import Mode
from trainwright.data.loaders import ShardedLoader
from trainwright.data.seeding import host_digest, seed_rank
from trainwright.devices.hardware import use
from trainwright.distributed import collectives
from trainwright.distributed.environment import keep_freed_memory
from trainwright.distributed.ranks import Ranks
from trainwright.engine.engine_checkpoints import EngineCheckpoints
from trainwright.engine.job import join_job
from trainwright.engine.named_state import ReplacedParameters, refuse_unlike_models
from trainwright.engine.nests import broadcast, gather_tensor
from trainwright.engine.script_settings import ScriptSettings, refuse_unlike_optimizers
from trainwright.faults.hangs import HangWatch
from trainwright.precision import Precision
from trainwright.precision.base import Closure, Sender
from trainwright.strategies import Strategy
from trainwright.strategies.base import Clipping, Optimization, StepResult
from trainwright.strategies.divided_optimizers import refuse_divided
from trainwright.strategies.module_checks import changed

_holders: WeakKeyDictionary[nn.Module, ref[Strategy]] = WeakKeyDictionary()
"""The strategy that last set up each module, in this process."""


class Engine(EngineCheckpoints):
    """Joins or starts the job's processes and contains its parts. Collective: create it on every rank.

    The Trainer and the Accelerator are built on it. Use it directly where neither fits: prepare the module, the optimizers and
    the loaders, then run, backward and step.

    Args:
        devices: number of processes on this node, one per device, or a list of GPUs. "auto": the launcher's count if
            launched, otherwise all GPUs, otherwise 1.
        strategy: a name or a Strategy.
        precision: a name, 16 or 32, or a Precision.
        accelerator: "auto", "gpu", "cpu", or the name of an accelerator that torch has here.
        timeout_seconds: how long a rank waits for the others in a collective, by default the strategy's choice or half an hour.
        num_nodes: machines of the job, if this process starts it. Each machine runs the script.
        can_call_workers: whether the caller can make its calls in worker processes. If the script cannot be run again, this
            engine then has one process, and `num_workers` is how many workers to start for a call.

    Raises:
        ValueError, TypeError: a setting is wrong, which is checked before any process is started.
        LaunchError: the processes of the job could not be started.

    >>> engine = tw.Engine(precision="bf16-mixed")
    >>> engine.prepare_module(model, engine.optimization)
    >>> [optimizer] = engine.prepare_optimizers([optimizer])
    >>> for inputs, targets in engine.prepare_loader(loader, "train"):
    ...     optimizer.zero_grad()
    ...     engine.backward(loss_fn(engine.run(model, "forward", inputs), targets))
    ...     norm, skipped = engine.step(optimizer)
    >>> engine.close()
    """

    def __init__(
        self,
        *,
        devices: int | str | list[int] = "auto",
        strategy: str | Strategy = "auto",
        precision: str | int | Precision | None = None,
        accelerator: str = "auto",
        timeout_seconds: float | None = None,
        num_nodes: int = 1,
        can_call_workers: bool = False,
    ) -> None:
        environment, self.strategy, joined, self.device, self.connection, seconds, self.num_workers = join_job(
            devices, strategy, precision, accelerator, timeout_seconds, num_nodes, can_call_workers
        )
        """Number of processes to start for each call; 0 if this process does the work."""
        self.environment = environment
        self.rank, self.world_size = environment.rank, environment.world_size
        """This process's number in the job, from 0, and the number of processes."""
        self.local_rank = environment.local_rank
        """This process's number on its node, from 0."""
        self.ranks = Ranks(self.connection.channel, seconds)
        # A single process may rightly wait for long, for example for a download.
        self.hangs = HangWatch(self.connection, seconds, ends=timeout_seconds is not None or self.world_size > 1)
        self.writer = CheckpointWriter(self.ranks, lambda: self.connection.has_failed)
        self.strategy.connect(environment.rank, environment.world_size, self.device, joined)
        collectives.use_data_group(self.strategy.data_group)
        self.data_rank, self.num_data_ranks = self.strategy.data_rank, self.strategy.num_data_ranks
        """This process's part of the data, from 0, and the number of parts: fewer than the processes if some share a part."""
        self.strategy.join_job(self)
        if self.precision is not joined:  # the strategy has replaced it
            self.precision.check(self.device)
        self.seed = 0
        """The seed of the data's order, the same on every rank: see `take_seed`."""
        self.modules: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.optimization, self.script = Optimization(), ScriptSettings()
        self.replaced = ReplacedParameters()
        self._is_known_finite = False
        self._base = self._base_names = None
        self._trained: dict[str, nn.Parameter] = {}
        """Which parameters of each module required gradients at the strategy's last setup or refresh."""

    def use(self) -> None:
        """Select this engine's device and data group, settings of the process that another engine may have changed."""
        use(self.device)
        collectives.use_data_group(self.strategy.data_group)

    def prepare_module(self, module: nn.Module, optimization: Optimization | None) -> None:
        """Wrap a module by the strategy and move it to the device. Collective: call on every rank.

        `optimization` describes the training, or is None if the module will only be evaluated.

        Raises:
            ValueError: on every rank, if the ranks have different models.
        """
        self.use()
        refuse_unlike_models(module, self.ranks)  # before the strategy sends weights
        if optimization is not None:
            self.optimization = optimization
            if self.device.type == "cpu":
                # Groups that a large model gathers leave gaps of freed memory, in all three times as large as the model.
                gathers = self.strategy.capabilities.forward_is_collective and self.ranks.world_size > 1
                sizes = (parameter.numel() for parameter in module.parameters() if not is_lazy(parameter))
                is_large = sum(sizes) > 100_000_000
                keep_freed_memory(4 << 20 if gathers and is_large else 1 << 30)
        holder = _holders.get(module)
        if holder is not None and (earlier := holder()) not in (None, self.strategy):
            earlier.close()  # of another Trainer, whose engine's hooks on the module would still run
        _holders[module] = ref(self.strategy)
        with self.replaced.followed(module):
            self.precision.convert_module(module)
            self.strategy.setup_module(module, optimization)
        self.strategy.note_module(module)
        self.modules.append(module)
        self._trained = _trained(self.modules)
        self._base = self._base_names = None

    def refresh_trainable(self, *, if_changed: bool = False) -> None:
        """Update the strategy to the parameters that require gradients now. Collective: call at every epoch's start.

        With `if_changed` it does nothing, and communicates nothing, while these are unchanged.

        Raises:
            ValueError: on every rank, if the ranks froze or unfroze different parameters.
        """
        if if_changed and not changed(self._trained, _trained(self.modules)):
            return
        for module in self.modules:
            refuse_unlike_models(module, self.ranks)
        self.strategy.refresh_trainable(self.modules)
        self._trained = _trained(self.modules)

    def prepare_optimizers(self, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Prepare the optimizers of the prepared modules. Return the optimizers to step, in the same order. Collective.

        Raises:
            ValueError: an optimizer would train nothing, or has stepped parameters that the strategy has replaced. On every
                rank, if the ranks have optimizers of different kinds or options.
        """
        self.replaced.update(optimizer for optimizer in optimizers if optimizer not in self.optimizers)
        refuse_divided(optimizers)
        refuse_unlike_optimizers(optimizers, self.ranks)
        self.script.note_optimizers(optimizers, is_first=not self.optimizers)
        self.optimizers = self.strategy.setup_optimizers(self.modules, optimizers, self.optimization)
        self.precision.track(self.optimizers)
        self._base = None  # parameters of an earlier optimizer may be frozen now
        return self.optimizers

    def prepare_loader(self, loader: Iterable[Any], mode: Mode, *, splits: bool = False) -> ShardedLoader:
        """Return this rank's part of a loader. Pass `seed` to its `set_epoch` in every epoch, since a load may change it.

        With `splits`, all ranks together get one batch of the loader.
        """
        parts = self.num_data_ranks if splits else 1
        return ShardedLoader(loader, rank=self.data_rank, world_size=self.num_data_ranks, mode=mode, batch_parts=parts)

    def take_seed(self, seed: int | None = None) -> None:
        """Seed the data's order with rank 0's seed, by default its current torch seed. Collective: call on every rank.

        Ranks that share a part of the data are seeded like the first of them, if their generators differ.
        """
        local = torch.initial_seed() if seed is None else seed
        self.seed = self.ranks.broadcast(local % 2**63, "the choice of a seed")
        if self.num_data_ranks < self.world_size:
            generators = self.ranks.exchange([host_digest(), torch.initial_seed()], "the comparison of RNG states")
            size = self.world_size // self.num_data_ranks
            alike = generators[self.data_rank * size :][:size]
            if any(digest != alike[0][0] for digest, _ in alike):
                seed_rank(alike[0][1] % 2**32, 0, verbose=False)

    def run(self, module: nn.Module, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a named step of a prepared module, or its "forward", in the precision's context."""
        return self.strategy.run(module, name, args, kwargs)

    def backward(self, loss: Tensor, send: Sender | None = None, **options: Any) -> None:
        """Run backward on a loss, by `send` if passed. The strategy scales it and averages gradients over ranks as needed."""
        self.strategy.backward(loss, send, **options)

    def sync_gradients(self, enabled: bool) -> None:
        """Set, before a forward, whether its backward averages gradients over ranks, as at a window's end."""
        self.strategy.sync_gradients(enabled)

    def step(
        self, optimizer: Optimizer, clipping: Clipping | None = None, closure: Closure | None = None
    ) -> StepResult:
        """Clip, if there is a limit, and step. Return the gradient norm, if computed, and whether the step was skipped."""
        return self.strategy.step(optimizer, clipping, closure)

    def gather(self, tensor: Tensor, keep: Sequence[bool] | None = None) -> Tensor:
        """Return the tensors of all ranks joined along their first dimension, rank by rank; a 0-dim one becomes a row.

        `keep` says which ranks' tensors to keep, by default all. Collective: call on every rank.
        """
        return gather_tensor(tensor, keep)

    def reduce(self, tensor: Tensor, op: str = "mean") -> Tensor:
        """Return the elementwise mean, sum, min or max over the ranks. Collective: call on every rank."""
        return collectives.all_reduce(tensor, op)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s object on every rank: plain data, tensors (received on this rank's device), and nests of them.

        Collective: call on every rank. Rank `src` gets the object itself.
        """
        return broadcast(obj, src, self.ranks, self.device)

    def barrier(self, call: str = "Engine.barrier") -> None:
        """Wait until every rank has made this call. Collective: call on every rank."""
        self.ranks.wait(call)

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[None]:
        """Return a context whose block rank 0 runs before the other ranks, such as a download.

        With `local`, the first rank of every node runs it first. Collective: enter it on every rank.
        """
        return self.ranks.first((self.local_rank if local else self.rank) == 0)

    def close(self) -> None:
        """Release the modules and optimizers, but not the process group. Collective: call on every rank.

        Raises:
            CheckpointError: on every rank, if a save in flight, which this call awaits, failed.
        """
        self.finish_save()
        self.writer.release()
        self.strategy.close()
        for module in self.modules:
            self.precision.restore_module(module)
        self.modules, self.optimizers, self._trained = [], [], {}


def _trained(modules: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    return {
        f"{number}.{name}": parameter
        for number, module in enumerate(modules)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
