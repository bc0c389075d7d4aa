"""The Engine: one strategy, one precision and the data of one job, behind one interface.

The Trainer and the Accelerator are both written on it, so that a loop of one's own has the same parts and checkpoints.
What a method does on several ranks is the strategy's; the Engine itself asks for nothing but its contract.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.contents import (
    extra_states,
)
from trainwright.checkpoint.editing import Edit, check_model, edit_for_load, edit_for_save, fill
from trainwright.checkpoint.filesystem import describe
from trainwright.checkpoint.reader import Checkpoint, Verify, open_checkpoint
from trainwright.checkpoint.store import SAVE, CheckpointWriter
from trainwright.checkpoint.tensors import Piece
from trainwright.data.generator_states import is_generator_state
from trainwright.data.index_stream import Mode
from trainwright.data.loaders import ShardedLoader
from trainwright.data.seeding import rng_state
from trainwright.devices.accelerator import resolve_device_type, use, using
from trainwright.devices.generators import owned
from trainwright.distributed import collectives
from trainwright.distributed.connection import open_process_group, pick_backend
from trainwright.distributed.environment import Environment
from trainwright.distributed.ranks import Ranks
from trainwright.engine.between_ranks import broadcast
from trainwright.engine.command_line import fill_open
from trainwright.engine.devices import check_nodes, device_index, resolve_num_processes
from trainwright.engine.finiteness import Finiteness
from trainwright.engine.joined_state import describe_optimizers
from trainwright.engine.lazy_tensors import (
    LazyTensor,
    check_lazy_shapes,
    give_shapes,
    lazy_tensors,
    refuse_lazy_tensors,
)
from trainwright.engine.model_layout import refuse_unlike_models, trained_names
from trainwright.engine.module_state import ModuleLoads
from trainwright.engine.named_state import model_pieces, named_optimizers, optimizer_pieces, stray_pieces
from trainwright.engine.optimizer_state import check_optimizers, load_optimizers
from trainwright.engine.replaced import ReplacedParameters
from trainwright.engine.replica_settings import refuse_unlike_optimizers
from trainwright.engine.restored import Restored, restored
from trainwright.engine.worker_calls import start_job
from trainwright.precision import Precision, resolve_precision
from trainwright.precision.base import Closure, Sender
from trainwright.strategies import Strategy, resolve_strategy
from trainwright.strategies.base import Clipping, Optimization, StepResult
from trainwright.strategies.state_entries import computed_entries

_holders: WeakKeyDictionary[nn.Module, ref[Strategy]] = WeakKeyDictionary()
"""The strategy that a module was set up by last, in this process."""


class OpenCheckpoint(NamedTuple):
    """A checkpoint that has been verified: its state, and the model's tensors where hooks have changed them (see `open`)."""

    checkpoint: Checkpoint
    state: dict[str, Any]
    tensors: dict[str, Tensor] | None


class Engine:
    """Joins, or starts, the job's processes and holds its parts. Collective: every rank makes it.

    Args:
        devices: processes on this node, one a device; a list of GPUs; "auto" is what was launched, else every GPU, else one.
        strategy: a name or a Strategy.
        precision: a name, 16 or 32, or a Precision.
        accelerator: "auto", "gpu", "cpu", or the name of an accelerator that torch has here.
        timeout_seconds: how long a rank waits for the others in a collective; None is the strategy's own, else half an hour.
        num_nodes: machines of the job that this process would start, each by its own start of the script.
        can_call_workers: whether the caller can make its calls in worker processes. If the script cannot be run again, this
            engine is then that of one process, and `num_workers` is how many workers each call starts.

    Raises:
        ValueError, TypeError: a setting is wrong; said before any process is started.
        LaunchError: the processes of the job could not be started.
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
        environment = Environment.detect()
        accelerator, strategy, precision = fill_open(environment, accelerator, strategy, precision)
        check_nodes(num_nodes, environment)
        device_type = resolve_device_type(accelerator)
        num_processes = resolve_num_processes(devices, device_type, environment)
        alone = environment.launched_by == "single"
        world_size = num_processes * max(num_nodes, 1) if alone else environment.world_size
        self.strategy = resolve_strategy(strategy, world_size)
        asked = resolve_precision(precision, device_type)
        self.strategy.check(device_type, world_size, asked)
        self.num_workers = 0
        """The processes that are to be started for each piece of work; 0 where this process does it."""
        needs_group = world_size > 1 or self.strategy.needs_group
        on_host_too = self.strategy.communicates_on_host
        backend = pick_backend(device_type, on_host_too=on_host_too) if needs_group else ""
        if alone and (num_processes > 1 or num_nodes != 1):
            self.num_workers = start_job(num_processes, num_nodes, strategy, can_call_workers)
            self.strategy, device_type, backend = Strategy(), "cpu", "gloo"
        self.environment = environment
        self.device = torch.device("cpu")
        if device_type != "cpu":
            self.device = torch.device(device_type, device_index(devices, device_type, environment))
            use(self.device)
        asked.check(self.device)
        asked_seconds = timeout_seconds if timeout_seconds is not None else self.strategy.timeout_seconds
        seconds = 1800.0 if asked_seconds is None else asked_seconds
        self.connection = open_process_group(
            environment,
            backend,
            seconds,
            needs_group=self.strategy.needs_group,
            device_types=[*dict.fromkeys([device_type, "cpu"] if on_host_too else [device_type])],
        )
        if asked_seconds is not None or self.connection.owns_group:
            collectives.set_timeout(seconds)  # the group may have been opened before, with another
        self.connection.before_close(self.strategy.close)
        self.ranks = Ranks(self.connection.channel, seconds)
        self.writer = CheckpointWriter(self.ranks, lambda: self.connection.has_failed)
        self.strategy.connect(environment.rank, environment.world_size, self.device, asked)
        if self.precision is not asked:
            self.precision.check(self.device)
        self.seed = 0
        """What the order of the data starts from, alike on every rank: see `take_seed`."""
        self.modules: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.optimization = Optimization()
        self.finiteness = Finiteness(
            self.ranks,
            lambda: (self.modules, model_pieces(self.strategy, self.modules)),
        )
        self.replaced = ReplacedParameters()
        self._trained: list[list[str]] = []
        """Which parameters required gradients when the strategy was told last, of each module."""

    @property
    def precision(self) -> Precision:
        """Return the precision in use; a strategy whose engine has its own scale may have replaced the one asked for."""
        return self.strategy.precision

    # -- where this process is ---------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Return this process's number in the job, from 0."""
        return self.environment.rank

    @property
    def local_rank(self) -> int:
        """Return this process's number on its node, from 0."""
        return self.environment.local_rank

    @property
    def world_size(self) -> int:
        """Return how many processes the job has."""
        return self.environment.world_size

    # -- preparing ---------------------------------------------------------------------------------------------------

    def prepare_module(self, module: nn.Module, optimization: Optimization | None) -> None:
        """Let the strategy place and wrap a module. Collective: call on every rank.

        `optimization` says how it will be trained; None where it will be evaluated only.

        Raises:
            ValueError: on every rank alike, where the ranks have different models.
        """
        use(self.device)  # of this thread: another engine, or another thread, may have used another since
        refuse_unlike_models(module, self.ranks)
        if optimization is not None:
            self.optimization = optimization
        holder = _holders.get(module)
        if holder is not None and (earlier := holder()) not in (None, self.strategy):
            earlier.close()  # of another Trainer; what its engine has hung on the module would work on
        _holders[module] = ref(self.strategy)
        with self.replaced.followed(module):
            self.precision.convert_module(module)
            self.strategy.setup_module(module, optimization)
        self.modules.append(module)
        self._trained = trained_names(self.modules)

    def refresh_trainable(self, *, if_changed: bool = False) -> None:
        """Let the strategy know which parameters there are and require gradients now. Collective: call at each epoch's start.

        With `if_changed` nothing is done, and nothing communicated, unless others require gradients than before.

        Raises:
            ValueError: on every rank alike, where they were not frozen or unfrozen alike.
        """
        if if_changed and trained_names(self.modules) == self._trained:
            return
        for module in self.modules:
            refuse_unlike_models(module, self.ranks)
        self.strategy.refresh_trainable(self.modules)
        self._trained = trained_names(self.modules)

    def prepare_optimizers(self, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Let the strategy prepare the optimizers of the prepared modules; return those to step, in the same order. Collective.

        Raises:
            ValueError: one would train nothing, or has stepped parameters that the strategy has replaced; on every rank alike,
                where the ranks have optimizers of different kinds or options.
        """
        self.replaced.update(each for each in optimizers if each not in self.optimizers)
        refuse_unlike_optimizers(optimizers, self.ranks)
        self.optimizers = self.strategy.setup_optimizers(self.modules, optimizers, self.optimization)
        self.precision.track(self.optimizers)
        self.finiteness.begin()
        return self.optimizers

    def prepare_loader(self, loader: Iterable[Any], mode: Mode) -> ShardedLoader:
        """Return this rank's share of a loader; `set_epoch` wants `seed`, which a load may still change."""
        return ShardedLoader(loader, rank=self.rank, world_size=self.world_size, mode=mode)

    def take_seed(self) -> None:
        """Let the order of the data start from rank 0's torch seed as it is now. Collective: call on every rank."""
        self.seed = self.ranks.broadcast(torch.initial_seed() % 2**63, "the choice of a seed")

    # -- a step ------------------------------------------------------------------------------------------------------

    def run(self, module: nn.Module, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a named step of a prepared module, or its "forward", in the precision's context."""
        return self.strategy.run(module, name, args, kwargs)

    def backward(self, loss: Tensor, send: Sender | None = None, **options: Any) -> None:
        """Send a loss backward (by `send` where given), scaled and averaged over the ranks where that is due."""
        self.strategy.backward(loss, send, **options)

    def sync_gradients(self, enabled: bool) -> None:
        """Say, before a forward, whether its backward ends an accumulation window (else the ranks stay apart)."""
        self.strategy.sync_gradients(enabled)

    def step(
        self, optimizer: Optimizer, clipping: Clipping | None = None, closure: Closure | None = None
    ) -> StepResult:
        """Clip where asked and step; return the gradient norm where it was taken, and whether the step was skipped."""
        return self.strategy.step(optimizer, clipping, closure)

    # -- between ranks -----------------------------------------------------------------------------------------------

    def gather(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Return the tensors of all ranks joined along their first dimension, rank by rank; a 0-dim one becomes a row.

        `sizes` is how many rows to take of each rank's; None is all of them. Collective: call on every rank.
        """
        parts = collectives.gather_uneven(tensor.reshape(1) if tensor.dim() == 0 else tensor)
        if sizes is not None and tensor.dim() > 0:
            parts = [part[:size] for part, size in zip(parts, sizes, strict=True)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def reduce(self, tensor: Tensor, op: str = "mean") -> Tensor:
        """Return the elementwise mean, sum, min or max over the ranks. Collective: call on every rank."""
        return collectives.all_reduce(tensor, op)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s object on every rank: plain data, tensors (which come on this rank's device), and nests of them.

        Collective: call on every rank. One process gets it back as it is, and so does `src`.
        """
        return broadcast(obj, src, self.ranks, self.device)

    def barrier(self) -> None:
        """Wait until every rank has come here. Collective: call on every rank."""
        collectives.barrier()

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[None]:
        """Return a context that rank 0 goes through before the others begin it, such as around a download.

        With `local` it is the first rank of each node. Collective: enter it on every rank.
        """
        return self.ranks.first((self.local_rank if local else self.rank) == 0)

    # -- state -------------------------------------------------------------------------------------------------------

    def save(
        self,
        path: str,
        *,
        step: int,
        epoch: int,
        state: dict[str, Any],
        rank_state: dict[str, Any] | None = None,
        weights_only: bool = False,
        edit: Edit | None = None,
        blocking: bool = True,
        number: int = 0,
        overwrite: bool = False,
    ) -> None:
        """Write a checkpoint of the modules, the optimizers and the caller's state. Collective: call on every rank.

        Of `state` rank 0's is stored, of `rank_state` (not with weights_only) each rank's own. `edit` may change the
        checkpoint's contents: see checkpoint/editing.py. With blocking False it returns once all is copied to host memory,
        and a thread writes and commits; one is in flight at a time, so a save first waits for the one before. `number` tells
        which of several saves of one step is the later. With overwrite a whole checkpoint at the path is replaced, once the
        new one is there.

        Weights that are not finite are stored with a warning, but take the place of no other checkpoint.

        Raises:
            CheckpointError: on every rank alike, for the one in flight before too; nothing is left at the path then.
        """
        with using(self.device):
            # First of all, so that no collective of a save is paired with another one of ranks that do not save here.
            self.ranks.wait(f"a save of step {step}")
            self.finish_save()
            refuse_lazy_tensors(path, self.modules)
            for module in self.modules:
                computed_entries(self.strategy, module)  # refuses what it cannot store
            pieces = model_pieces(self.strategy, self.modules)
            self.finiteness.look(path, overwrite, self.modules, pieces)
            if edit is not None:
                edited: list[Piece] = []
                state, left = edit_for_save(state, pieces, {"epoch": epoch, "global_step": step}, edit)
                self.ranks.run_on_all(
                    lambda: edited.extend(left()),
                    SAVE,
                    subject=f"checkpoint {path} was not written",
                    describe=partial(describe, path=path),
                )
                pieces = edited
            sections = {"model": pieces}
            extra = {str(number): extra_states(module) for number, module in enumerate(self.modules)}
            contents: dict[str, Any] = {"seed": self.seed, "extra": extra, **state}
            if not weights_only:
                named = named_optimizers(self.modules, self.optimizers)
                sections["optimizer"] = optimizer_pieces(self.strategy, named)
                if strays := stray_pieces(self.strategy, self.modules, self.optimizers):
                    sections["parameters"] = strays
                contents["precision"] = self.precision.state_dict()
                contents["strategy"] = self.strategy.state
                contents["optimizers"] = describe_optimizers(self.strategy, named, self.ranks)
            self.writer.save(
                path,
                sections=sections,
                state=contents,
                rank_state=None if weights_only else self._owned({"rng": rng_state(), **(rank_state or {})}),
                header={
                    "step": step,
                    "epoch": epoch,
                    "world_size": self.world_size,
                    "strategy": self.strategy.name,
                    "weights_only": weights_only,
                    "number": number,
                },
                blocking=blocking,
                overwrite=overwrite,
            )

    def _owned(self, rank_state: dict[str, Any]) -> dict[str, Any]:
        """Return a rank's state with the generator of its own device as such, whichever device was current."""
        return {
            key: owned(value, self.device) if is_generator_state(value) else value for key, value in rank_state.items()
        }

    def finish_save(self) -> None:
        """Wait until a save that was begun with blocking=False has committed. Collective: call on every rank.

        Raises:
            CheckpointError: it failed, on every rank alike; earlier checkpoints are unchanged.
        """
        self.writer.finish()

    def verified(self, path: str, verify: Verify = "full") -> Checkpoint:
        """Verify a checkpoint, its files shared out over the ranks, and return it. Collective: call on every rank.

        Raises:
            CheckpointError: no checkpoint, or a damaged one.
        """
        self.finish_save()  # it may be the one
        return open_checkpoint(path, verify, ranks=self.ranks)

    def open(self, source: str | Checkpoint, *, edit: Edit | None = None, verify: Verify = "full") -> OpenCheckpoint:
        """Verify a checkpoint that is not yet, and let `edit` change its contents before they are taken. Collective.

        Raises:
            CheckpointError: no checkpoint, or a damaged one.
        """
        checkpoint = self.verified(source, verify) if isinstance(source, str) else source
        state = checkpoint.run_state()
        if edit is None:
            return OpenCheckpoint(checkpoint, state, None)
        header = {"epoch": int(checkpoint.header["epoch"]), "global_step": int(checkpoint.header["step"])}
        return OpenCheckpoint(checkpoint, *edit_for_load(checkpoint, state, header, edit))

    def load(
        self,
        source: str | OpenCheckpoint,
        *,
        weights_only: bool = False,
        strict: bool = True,
        check: Callable[[dict[str, Any]], None] | None = None,
    ) -> Restored:
        """Take the state of the modules and the optimizers from a checkpoint, which is verified first.

        It may come from any strategy and any number of ranks. Nothing is changed unless all of it has been verified and
        fits; `check` may refuse the caller's own state in it. With strict False, tensors of the model that only one side has
        are left out. Collective: call on every rank.

        Args:
            source: a path, or what `open` returned.

        Raises:
            CheckpointError: no checkpoint, a damaged one, or one of another model or optimizer.
        """
        use(self.device)
        checkpoint, state, tensors = source if isinstance(source, OpenCheckpoint) else self.open(source)
        lazy: dict[str, LazyTensor] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        pieces: list[Piece] = []
        strays = [] if weights_only else stray_pieces(self.strategy, self.modules, self.optimizers)
        loads = ModuleLoads(self.strategy, self.modules, state, checkpoint.path)
        seed = int(state.get("seed", self.seed))
        told = Restored(state, None, None, {})

        def fits() -> None:
            nonlocal told
            if check is not None:
                check(state)
            stored = checkpoint.tensors("model") if tensors is None else tensors
            loads.check(strict)
            shapes.update((name, tuple(each.shape)) for name, each in stored.items() if loads.is_filled(name))
            lazy.update({name: each for name, each in lazy_tensors(self.modules).items() if loads.is_filled(name)})
            present = [each for each in model_pieces(self.strategy, self.modules) if loads.is_filled(each.name)]
            pieces.extend(check_model(checkpoint.path, shapes, present, strict, lazy))
            check_lazy_shapes(checkpoint.path, lazy, shapes)
            if not weights_only:
                check_optimizers(checkpoint, state, named_optimizers(self.modules, self.optimizers))
                there = checkpoint.tensors("parameters") if "parameters" in checkpoint.sections else {}
                check_model(checkpoint.path, {name: each.shape for name, each in there.items()}, strays, strict=True)
                told = restored(checkpoint, state, seed, self.rank, self.world_size, self.device)

        # One rank's refusal is every rank's, in the words of the lowest.
        run_on_all = partial(
            self.ranks.run_on_all,
            call="the load of a checkpoint",
            describe=partial(describe, path=checkpoint.path),
        )
        run_on_all(fits)
        run_on_all(lambda: loads.load_wholes(checkpoint, tensors, strict))
        if lazy:
            give_shapes(lazy, shapes)
            pieces = [piece for piece in model_pieces(self.strategy, self.modules) if piece.name in shapes]
        if not weights_only:
            load_optimizers(checkpoint, state, self.strategy, named_optimizers(self.modules, self.optimizers))
        if tensors is not None:
            fill(pieces, tensors)
        else:
            checkpoint.read_into("model", pieces)
        if strays:
            checkpoint.read_into("parameters", strays)
        same_job = (checkpoint.header.get("strategy"), checkpoint.world_size) == (self.strategy.name, self.world_size)
        kept = {} if weights_only or not same_job else state.get("strategy", {})
        self.strategy.after_load(self.modules, self.optimizers, kept)
        run_on_all(loads.finish)
        if not weights_only:
            self.precision.load_state_dict(state.get("precision", {}))
            self.seed = seed
        return told

    def close(self) -> None:
        """Give back the modules and optimizers; the process group stays open for the next run of this process.

        Collective: a save in flight is waited for first.

        Raises:
            CheckpointError: that save failed, on every rank alike.
        """
        self.finish_save()
        self.writer.release()
        self.strategy.close()
        self.modules, self.optimizers = [], []
