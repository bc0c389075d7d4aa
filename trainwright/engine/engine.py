"""The Engine: one strategy, one precision and the data of one job, behind one interface for Trainer and Accelerator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.contents import MODEL, TRAINING, extra_states, with_parts
from trainwright.checkpoint.editing import Edit, check_model, edit_for_load, edit_for_save, fill
from trainwright.checkpoint.filesystem import describe
from trainwright.checkpoint.reader import StoredCheckpoint, Verify, open_checkpoint
from trainwright.checkpoint.store import SAVE, CheckpointWriter
from trainwright.checkpoint.tensors import Piece
from trainwright.data.dispatched import DispatchedLoader
from trainwright.data.index_stream import Mode
from trainwright.data.loaders import ShardedLoader
from trainwright.data.seeding import rng_state
from trainwright.devices.accelerator import resolve_device_type, use, using
from trainwright.devices.generators import is_generator_state, owned
from trainwright.distributed import collectives
from trainwright.distributed.connection import open_process_group, pick_backend
from trainwright.distributed.environment import Environment
from trainwright.distributed.ranks import Ranks
from trainwright.engine.devices import check_nodes, device_index, resolve_num_processes, warn_of_missing_srun
from trainwright.engine.finiteness import Finiteness
from trainwright.engine.lazy_tensors import (
    LazyTensor,
    check_lazy_shapes,
    give_shapes,
    lazy_tensors,
    refuse_lazy_tensors,
)
from trainwright.engine.module_state import ModuleLoads
from trainwright.engine.named_state import computed_keys, model_pieces, named_optimizers, optimizer_pieces, stray_pieces
from trainwright.engine.nests import broadcast, gather_tensor
from trainwright.engine.optimizer_state import check_optimizers, describe_optimizers, load_optimizers
from trainwright.engine.replaced import ReplacedParameters
from trainwright.engine.replicas import refuse_groups, refuse_unlike_models, refuse_unlike_optimizers
from trainwright.engine.restored import Restored, restored
from trainwright.engine.script_settings import ScriptSettings
from trainwright.engine.worker_calls import start_job
from trainwright.overrides import overridden
from trainwright.precision import Precision, is_spelling_of, resolve_precision
from trainwright.precision.base import Closure, Sender
from trainwright.strategies import Strategy, is_variant_of, resolve_strategy
from trainwright.strategies.base import Clipping, Optimization, StepResult
from trainwright.strategies.divided_optimizers import make_whole
from trainwright.strategies.module_checks import changed

_holders: WeakKeyDictionary[nn.Module, ref[Strategy]] = WeakKeyDictionary()
"""The strategy that last set up each module, in this process."""


class OpenCheckpoint(NamedTuple):
    """A verified checkpoint with its state."""

    checkpoint: StoredCheckpoint
    state: dict[str, Any]
    tensors: dict[str, Tensor] | None
    """The model's tensors, if hooks may have changed them."""


class Engine:
    """Joins or starts the job's processes and holds its parts. Collective: create it on every rank.

    The Trainer and the Accelerator are built on it. Use it directly where neither fits: prepare the module, the optimizers and
    the loaders, then run, backward and step.

    Args:
        devices: number of processes on this node, one per device, or a list of GPUs. "auto": the launcher's count if
            launched, otherwise all GPUs, otherwise 1.
        strategy: a name or a Strategy.
        precision: a name, 16 or 32, or a Precision.
        accelerator: "auto", "gpu", "cpu", or the name of an accelerator that torch has here.
        timeout_seconds: how long a rank waits for the others in a collective; by default the strategy's own, or half an hour.
        num_nodes: machines of the job, if this process starts it; each machine runs the script.
        can_call_workers: whether the caller can make its calls in worker processes. If the script cannot be run again, this
            engine then has one process, and `num_workers` is how many workers each call starts.

    Raises:
        ValueError, TypeError: a setting is wrong; raised before any process is started.
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
        environment = Environment.detect()
        devices = overridden("Engine", "devices", devices)
        num_nodes = overridden("Engine", "num_nodes", num_nodes)
        accelerator = overridden("Engine", "accelerator", accelerator)
        strategy = overridden("Engine", "strategy", strategy, is_like=is_variant_of)
        precision = overridden("Engine", "precision", precision, is_like=is_spelling_of)
        check_nodes(num_nodes, environment)
        device_type = resolve_device_type(accelerator)
        num_processes = resolve_num_processes(devices, device_type, environment)
        alone = environment.launched_by == "single"
        # Of the job that is about to be started, if this process was not launched in one.
        world_size = num_processes * max(num_nodes, 1) if alone else environment.world_size
        warn_of_missing_srun(world_size, environment.waiting_tasks)
        self.strategy = resolve_strategy(strategy, world_size)
        chosen_precision = resolve_precision(precision, device_type)
        self.strategy.check(device_type, world_size, chosen_precision)
        self.num_workers = 0
        """Number of processes to start for each call; 0 if this process does the work."""
        needs_group = world_size > 1 or self.strategy.capabilities.needs_group
        on_host_too = self.strategy.capabilities.communicates_on_host
        backend = pick_backend(device_type, on_host_too=on_host_too) if needs_group else ""
        if alone and (num_processes > 1 or num_nodes != 1):
            # It returns only where workers do each call; then this process computes nothing, and touches no GPU.
            self.num_workers = start_job(num_processes, num_nodes, strategy, can_call_workers)
            self.strategy, device_type, backend = Strategy(), "cpu", "gloo"
        self.environment = environment
        self.rank, self.world_size = environment.rank, environment.world_size
        """This process's number in the job, from 0, and how many there are."""
        self.local_rank = environment.local_rank
        """This process's number on its node, from 0."""
        self.device = torch.device("cpu")
        if device_type != "cpu":
            self.device = torch.device(device_type, device_index(devices, device_type, environment))
            use(self.device)
        chosen_precision.check(self.device)
        chosen_seconds = timeout_seconds if timeout_seconds is not None else self.strategy.timeout_seconds
        seconds = 1800.0 if chosen_seconds is None else chosen_seconds
        device_types = [device_type, "cpu"] if on_host_too and device_type != "cpu" else [device_type]
        self.connection = open_process_group(
            environment, backend, seconds, needs_group=self.strategy.capabilities.needs_group, device_types=device_types
        )
        if chosen_seconds is not None or self.connection.owns_group:
            collectives.set_timeout(seconds)  # the group may have been opened before, with a different timeout
        self.connection.before_close(self.strategy.close)
        self.ranks = Ranks(self.connection.channel, seconds)
        self.writer = CheckpointWriter(self.ranks, lambda: self.connection.has_failed)
        self.strategy.connect(environment.rank, environment.world_size, self.device, chosen_precision)
        self.strategy.join_job(self)
        if self.precision is not chosen_precision:  # the strategy has replaced it
            self.precision.check(self.device)
        self.seed = 0
        """The seed of the data's order, the same on every rank: see `take_seed`."""
        self.modules: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.optimization, self.script = Optimization(), ScriptSettings()
        self.finiteness = Finiteness(self.ranks, lambda: (self.modules, model_pieces(self.strategy, self.modules)))
        self.replaced = ReplacedParameters()
        self._trains_apart = False
        self._trained: dict[str, nn.Parameter] = {}
        """Which parameters of each module required gradients at the strategy's last setup or refresh."""

    @property
    def precision(self) -> Precision:
        """Return the precision in use; a strategy whose engine has its own loss scale may have replaced the chosen one."""
        return self.strategy.precision

    def prepare_module(self, module: nn.Module, optimization: Optimization | None) -> None:
        """Let the strategy wrap a module and move it to the device. Collective: call on every rank.

        `optimization` says how it will be trained; None if it will only be evaluated.

        Raises:
            TypeError: its parameters() does not return tensors.
            ValueError: on every rank, if the ranks have different models.
        """
        use(self.device)  # a setting of the thread, which another engine may have changed since
        refuse_groups(module)
        refuse_unlike_models(module, self.ranks)  # before the strategy sends weights
        if optimization is not None:
            self.optimization = optimization
        holder = _holders.get(module)
        if holder is not None and (earlier := holder()) not in (None, self.strategy):
            earlier.close()  # of another Trainer: the hooks that its engine has left on the module would still run
        _holders[module] = ref(self.strategy)
        with self.replaced.followed(module):
            self.precision.convert_module(module)
            self.strategy.setup_module(module, optimization)
        self.strategy.note_module(module)
        self.modules.append(module)
        self._trained = _trained(self.modules)

    def refresh_trainable(self, *, if_changed: bool = False) -> None:
        """Let the strategy see which parameters require gradients now. Collective: call at each epoch's start.

        With `if_changed` it does nothing, and communicates nothing, while they are the same as before.

        Raises:
            ValueError: on every rank, if the ranks froze or unfroze different parameters.
        """
        is_same = not changed(self._trained, _trained(self.modules))
        if if_changed and is_same:
            return
        for module in self.modules:
            refuse_unlike_models(module, self.ranks)
        self.strategy.refresh_trainable(self.modules)
        self._trained = _trained(self.modules)

    def prepare_optimizers(self, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Prepare the optimizers of the prepared modules; return those to step, in the same order. Collective.

        Raises:
            ValueError: one would train nothing, or has stepped parameters that the strategy has replaced; on every rank, if
                the ranks have optimizers of different kinds or options.
        """
        self.replaced.update(each for each in optimizers if each not in self.optimizers)
        make_whole(optimizers, self.strategy.name)
        refuse_unlike_optimizers(optimizers, self.ranks)
        self.script.note_optimizers(optimizers, is_first=not self.optimizers)
        self.optimizers = self.strategy.setup_optimizers(self.modules, optimizers, self.optimization)
        self.precision.track(self.optimizers)
        self.finiteness.begin()
        return self.optimizers

    def prepare_loader(
        self, loader: Iterable[Any], mode: Mode, *, splits: bool = False, dispatches: bool = False
    ) -> ShardedLoader | DispatchedLoader:
        """Return this rank's part of a loader; pass `seed` to its `set_epoch` in each epoch, since a load may change it.

        With `splits`, a batch of the loader is that of all ranks together. With `dispatches`, rank 0 reads the data and sends
        it, and this call is collective.
        """
        parts = self.world_size if splits else 1
        if dispatches and self.world_size > 1:
            return DispatchedLoader(loader, self.ranks, batch_parts=parts)
        return ShardedLoader(loader, rank=self.rank, world_size=self.world_size, mode=mode, batch_parts=parts)

    def take_seed(self, seed: int | None = None) -> None:
        """Seed the data's order with rank 0's seed, by default its current torch seed. Collective: call on every rank."""
        self.seed = self.ranks.broadcast(
            (torch.initial_seed() if seed is None else seed) % 2**63, "the choice of a seed"
        )

    def run(self, module: nn.Module, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a named step of a prepared module, or its "forward", in the precision's context."""
        return self.strategy.run(module, name, args, kwargs)

    def backward(self, loss: Tensor, send: Sender | None = None, **options: Any) -> None:
        """Run backward on a loss (by `send`, if given); the strategy scales it and averages gradients over ranks as needed."""
        self.strategy.backward(loss, send, **options)

    def sync_gradients(self, enabled: bool) -> None:
        """Set, before a forward, whether its backward averages gradients over ranks, as at a window's end."""
        self.strategy.sync_gradients(enabled and not self._trains_apart)

    def train_apart(self, apart: bool) -> None:
        """Set whether each rank steps its own copy of the model with its own gradients; the caller unites them afterwards."""
        self._trains_apart = apart
        self.sync_gradients(True)

    def step(
        self, optimizer: Optimizer, clipping: Clipping | None = None, closure: Closure | None = None
    ) -> StepResult:
        """Clip, if given a limit, and step; return the gradient norm, if it was computed, and whether the step was skipped."""
        return self.strategy.step(optimizer, clipping, closure)

    def gather(self, tensor: Tensor, keep: Sequence[bool] | None = None) -> Tensor:
        """Return the tensors of all ranks joined along their first dimension, rank by rank; a 0-dim one becomes a row.

        `keep` is whether to keep each rank's; None keeps all. Collective: call on every rank.
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

        With `local`, the first rank of each node does. Collective: enter it on every rank.
        """
        return self.ranks.first((self.local_rank if local else self.rank) == 0)

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
        directory: str | None = None,
        parts: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Write a checkpoint of the modules, the optimizers and the caller's state. Collective: call on every rank.

        Weights that are not finite are stored with a warning, but never replace another checkpoint.

        Args:
            state: plain data and tensors; rank 0's is stored.
            rank_state: each rank's own is stored, unless weights_only.
            weights_only: store no optimizers, and nothing else that only a resumed run needs.
            edit: may change the checkpoint's contents: see checkpoint/editing.py.
            blocking: False returns once all is copied to host memory; a thread writes, and the next save waits for it.
            number: orders several saves of one step.
            overwrite: replace a complete checkpoint at the path, once the new one is committed.
            parts: tensors of the shapes of this rank's pieces, by section and name: those of "model" are stored as the
                model's, other sections beside it, unless weights_only.
            directory: what the writer's `stage` returned for this path, with files that become part of the checkpoint.

        Raises:
            CheckpointError: on every rank; of this save, which leaves nothing at the path, or of the one in flight before.
        """
        with using(self.device):
            # First, so that no collective of a save is paired with another one of ranks that do not save here.
            self.ranks.wait(f"a save of step {step}")
            self.strategy.check_gradients(partial(self.ranks.exchange, call=f"a save of step {step}"))
            self.finish_save()
            refuse_lazy_tensors(path, self.modules)
            if self._trains_apart:
                raise RuntimeError(
                    f"checkpoint {path} was requested within LocalSGD, where each rank has other weights; save after the block."
                )
            for module in self.modules:
                computed_keys(self.strategy, module)  # raises for entries that cannot be stored
            sections = with_parts(model_pieces(self.strategy, self.modules), parts or {})
            pieces = sections.pop(MODEL)
            self.finiteness.look(path, overwrite, self.modules, pieces, are_others=bool(parts))
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
            extra = {str(number): extra_states(module) for number, module in enumerate(self.modules)}
            contents: dict[str, Any] = {"seed": self.seed, "extra": extra, **state}
            sections = {MODEL: pieces} if weights_only else {MODEL: pieces, **sections}
            if not weights_only:
                named = named_optimizers(self.modules, self.optimizers)
                sections["optimizer"] = optimizer_pieces(self.strategy, named)
                if strays := stray_pieces(self.strategy, self.modules, self.optimizers):
                    sections["parameters"] = strays
                contents |= {"precision": self.precision.state_dict(), "strategy": self.strategy.state}
                contents["settings"] = self.script.stored
                contents["optimizers"] = describe_optimizers(self.strategy, named, self.ranks)
                # A generator's state belongs to this rank's device, whichever device was current when it was taken.
                rank_state = {
                    key: owned(value, self.device) if is_generator_state(value) else value
                    for key, value in {"rng": rng_state(), **(rank_state or {})}.items()
                }
            self.writer.save(
                path,
                sections=sections,
                state=contents,
                rank_state=None if weights_only else rank_state,
                header={
                    "step": step,
                    "epoch": epoch,
                    "world_size": self.ranks.world_size,  # 1 if this rank saves alone
                    "strategy": self.strategy.name,
                    "weights_only": weights_only,
                    "number": number,
                },
                blocking=blocking,
                overwrite=overwrite,
                directory=directory,
            )

    def finish_save(self) -> None:
        """Wait until a save with blocking=False has committed. Collective: call on every rank.

        Raises:
            CheckpointError: on every rank, if it failed; earlier checkpoints are unchanged.
        """
        self.writer.finish()

    def verified(self, path: str, verify: Verify = "full") -> StoredCheckpoint:
        """Return a checkpoint, its files verified by all ranks, each some of them. Collective: call on every rank.

        Raises:
            CheckpointError: no checkpoint, or a damaged one.
        """
        self.finish_save()  # which may be writing this one
        return open_checkpoint(path, verify, ranks=self.ranks)

    def open(
        self, source: str | StoredCheckpoint, *, edit: Edit | None = None, verify: Verify = "full"
    ) -> OpenCheckpoint:
        """Verify a checkpoint given by its path, and let `edit` change its contents before a load. Collective.

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
        check: Callable[[dict[str, Any]], None] = lambda _: None,
        fresh: Collection[str] = (),
    ) -> Restored:
        """Load the state of the modules and the optimizers from a checkpoint of any strategy and number of ranks.

        Nothing is changed unless all of it has been verified and fits. Collective: call on every rank.

        Args:
            source: a path, which is verified first, or what `open` returned.
            weights_only: load the model's weights and nothing else.
            strict: False skips tensors of the model that only one side has.
            check: called with the checkpoint's state; raises if the caller cannot use it.
            fresh: "optimizer_settings" keeps those that the optimizers have now, "schedulers" their learning rates.

        Raises:
            CheckpointError: no checkpoint, a damaged one, or one of another model or optimizer.
        """
        use(self.device)
        checkpoint, state, tensors = source if isinstance(source, OpenCheckpoint) else self.open(source)
        lazy: dict[str, LazyTensor] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        pieces: list[Piece] = []
        trained: list[Piece] = []
        there = {} if weights_only else _shapes(checkpoint, TRAINING)
        strays = [] if weights_only else stray_pieces(self.strategy, self.modules, self.optimizers)
        loads = ModuleLoads(self.strategy, self.modules, state, checkpoint.path)
        seed = int(state.get("seed", self.seed))
        result = Restored(state, None, None, {})

        def fits() -> None:
            nonlocal result
            stored = checkpoint.tensors("model") if tensors is None else tensors
            loads.check(strict)
            shapes.update((name, tuple(each.shape)) for name, each in stored.items() if loads.is_filled(name))
            lazy.update({name: each for name, each in lazy_tensors(self.modules).items() if loads.is_filled(name)})
            lazy.update(loads.resized({**there, **shapes}))
            present = model_pieces(self.strategy, self.modules)
            filled = [each for each in present if loads.is_filled(each.name)]
            pieces.extend(check_model(checkpoint.path, shapes, filled, strict, filter(loads.is_filled, lazy)))
            check_lazy_shapes(checkpoint.path, lazy, shapes)
            trained.extend(check_model(checkpoint.path, there, present, False, lazy))
            if not weights_only:
                check_optimizers(checkpoint, state, named_optimizers(self.modules, self.optimizers))
                check_model(checkpoint.path, _shapes(checkpoint, "parameters"), strays, strict=True)
                result = restored(checkpoint, state, seed, self.rank, self.world_size, self.device)
            check(state)

        # A checkpoint that one rank refuses is refused on all of them, before any changes anything.
        run_on_all = partial(
            self.ranks.run_on_all, call="the load of a checkpoint", describe=partial(describe, path=checkpoint.path)
        )
        run_on_all(fits)
        run_on_all(lambda: loads.load_wholes(checkpoint, tensors, strict, {piece.name for piece in trained}))
        if lazy:  # only now, since a refused load must not change the model
            give_shapes(lazy, shapes)
            present = model_pieces(self.strategy, self.modules)
            pieces = [piece for piece in present if piece.name in shapes]
            trained = [piece for piece in present if piece.name in there]
        if not weights_only:
            load_optimizers(checkpoint, state, self.strategy, named_optimizers(self.modules, self.optimizers), fresh)
        if tensors is None:
            checkpoint.read_into("model", pieces)
        else:
            fill(pieces, tensors)
        if trained:
            checkpoint.read_into(TRAINING, trained)
        if strays:
            checkpoint.read_into("parameters", strays)
        same_job = (checkpoint.header.get("strategy"), checkpoint.world_size) == (self.strategy.name, self.world_size)
        kept = {} if weights_only or fresh or not same_job else state.get("strategy", {})
        self.strategy.refresh_weights(self.modules, kept)
        run_on_all(loads.finish)  # a module's own hooks see the loaded tensors
        if not weights_only:
            self.precision.load_state_dict(state.get("precision", {}))
            self.seed = seed  # the data continues in the saved run's order
        return result

    def close(self) -> None:
        """Release the modules and optimizers, but not the process group. Collective: call on every rank.

        Raises:
            CheckpointError: on every rank, if a save in flight failed, which is waited for.
        """
        self.finish_save()
        self.writer.release()
        self.strategy.close()
        self.modules, self.optimizers, self._trained = [], [], {}


def _shapes(checkpoint: StoredCheckpoint, section: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a section's tensors by name; nothing if the checkpoint has no such section."""
    stored = checkpoint.tensors(section) if section in checkpoint.sections else {}
    return {name: each.shape for name, each in stored.items()}


def _trained(modules: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    return {
        f"{number}.{name}": parameter
        for number, module in enumerate(modules)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
