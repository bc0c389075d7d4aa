"""The strategy contract; the base class is one process.

A strategy owns what the ranks of a job do together around one model: wrap it, run a step through the wrapper, run backward,
clip, step, and return this rank's shard of the state as checkpoint pieces. A new strategy overrides what its engine does
differently; nothing outside this folder asks for its name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainwright.checkpoint.contents import describe_optimizer
from trainwright.checkpoint.tensors import Piece, TensorEntry
from trainwright.distributed.collectives import Exchange, gather_object
from trainwright.precision.base import Closure, Precision, Sender
from trainwright.strategies.job_view import JobView
from trainwright.strategies.left_shards import refuse_left
from trainwright.strategies.optimizer_proxy import unwrap_optimizer
from trainwright.strategies.placement import materialize, move
from trainwright.strategies.synced_buffers import SyncedBuffers
from trainwright.strategies.synced_buffers import broadcast_tensors as broadcast_tensors
from trainwright.tensor_names import state_entries
from trainwright.value_kinds import is_dtensor

UNSAVED_KEYS = frozenset({"params", "param_names", "fused", "foreach", "capturable", "differentiable"})
"""Keys of a parameter group that no checkpoint stores: its tensors, and the kernels chosen on this machine."""


@dataclass(frozen=True)
class Optimization:
    """How the model will be optimized: by the framework (`automatic`) or in training_step.

    `clip_norm` and `clip_value` limit gradients (None: not at all); `accumulate` is the usual number of batches per step.
    """

    automatic: bool = True
    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1


class Clipping(NamedTuple):
    """Gradients are multiplied by `scale`, clipped by `value`, then by their total `norm` (None: not at all)."""

    norm: float | None = None
    value: float | None = None
    scale: float = 1.0

    @classmethod
    def needed(cls, norm: float | None, value: float | None, scale: float = 1.0) -> Clipping | None:
        """Return the clipping, or None where it would change nothing."""
        return None if norm is None and value is None and scale == 1.0 else cls(norm, value, scale)


class StepResult(NamedTuple):
    """`norm` is the total gradient norm before clipping by norm (0-dim); `skipped` is True after an inf or a NaN."""

    norm: Tensor | None
    skipped: bool


PLAIN_STEP = StepResult(None, False)


class StepForward(nn.Module):
    """A module whose forward is the named step of another, for wrappers that watch one forward (DDP, DeepSpeed)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        return call_step(self.module, name, args, kwargs)


def call_step(module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module's method by name; "forward" runs as `module(...)`, with its hooks."""
    if name == "forward":
        return module(*args, **kwargs)
    return getattr(module, name)(*args, **kwargs)


class Strategy(JobView):
    """The base of strategies, which is one process on one device. Every method is called on every rank, in the same order.

    Override what your engine does differently, and pass the instance as `strategy=`.

    >>> class ChannelsLast(tw.Strategy):
    ...     def setup_module(self, module, optimization):
    ...         super().setup_module(module, optimization)
    ...         module.to(memory_format=torch.channels_last)
    >>> tw.Trainer(strategy=ChannelsLast(), max_epochs=1, enable_model_summary=False).fit(module, loader)
    """

    name = "single_device"
    distributed_type: str | None = None
    """The member of `DistributedType` that it is; None if that follows from the device and the number of processes."""
    is_parallel = False
    """True if it runs on several processes."""
    forward_is_collective = False
    """True if a forward is collective, so that a rank without evaluation batches runs dummy batches."""
    takes_closure = True
    """True if an optimizer's step may rerun forward and backward through a closure; otherwise `step` gets none."""
    makes_optimizer = False
    """True if the engine's configuration defines the optimizer, so that the module returns none."""
    takes_compile = True
    """True if torch.compile can trace the engine's hooks."""
    holds_modules = True
    """True if the module's own tensors are trained, whole on each rank."""
    keeps_optimizers = True
    """True if optimizers keep their state after `close`; otherwise an evaluation leaves the strategy open."""
    divides_optimizers = False
    """True if each rank holds optimizer state only for its own shard."""
    trains_prepared_only = False
    """True if only an optimizer that `setup_optimizers` returned can train on several ranks."""
    gradients_are_parameters = True
    """True if gradients are the parameters' `.grad`, where a checkpoint finds them."""
    takes_param_groups = True
    """True if a parameter group may be added to an optimizer during training."""
    needs_group = False
    """True if the engine needs a process group even on one process."""
    communicates_on_host = False
    """True if collectives run on host tensors too, although the engine computes on GPUs."""
    timeout_seconds: float | None = None
    """How long a rank waits for the others; None leaves it to the Engine."""

    def __init__(self) -> None:
        self.rank = 0
        self.world_size = 1
        self.device = torch.device("cpu")
        self.precision = Precision()
        self.wrapped: dict[nn.Module, Any] = {}
        """The modules whose forward must go through `run`, because a plain call would miss the wrapper."""
        self.buffers = SyncedBuffers()
        """Broadcasts rank 0's buffers before training steps."""
        self.ends_window = True
        """Whether the backward that follows ends an accumulation window."""
        self.finalized: dict[Optimizer, bool] = {}
        """Optimizers with finalized gradients that wait for a step; False once a further backward has added to them."""

    def connect(self, rank: int, world_size: int, device: torch.device, precision: Precision) -> None:
        """Set this process's rank and device; an engine that scales losses itself replaces the given precision."""
        self.rank, self.world_size, self.device, self.precision = rank, world_size, device, precision

    def check(self, device_type: str, num_processes: int, precision: Precision) -> None:
        """Raise ValueError, before any process starts, for what this strategy cannot run."""
        if num_processes > 1 and not self.is_parallel:
            raise ValueError(
                f"strategy={self.name!r} runs on one process, but {num_processes} were asked for; pass devices=1, or a "
                "strategy for several such as 'ddp'."
            )

    def resolve(self, optimization: Optimization) -> Optimization:
        """Return the optimization after the engine's own configuration, which wins over the arguments."""
        return optimization

    def setup_module(self, module: nn.Module, optimization: Optimization | None) -> None:
        """Move a module to the device, and wrap or shard it, before its optimizers exist.

        Collective: every rank gets rank 0's weights and buffers. `optimization` is None for a module that is only evaluated;
        no `setup_optimizers` follows then. A sharded module may come back after `close`, still sharded. This may replace
        parameters, so take their names afterwards.
        """
        self.move_to_device(module)

    def move_to_device(self, module: nn.Module) -> None:
        """Move a module to the device, and initialise its meta tensors."""
        refuse_sharded(module, self.name)
        if materialize(module):
            self.precision.convert_module(module)  # again, for what had no values the first time
        move(module, self.device)

    def make_whole(self, optimizers: Sequence[Optimizer]) -> None:
        """Give optimizers of which an earlier run has left each rank its shard all their parameters again.

        Raises:
            ValueError: another strategy has divided the state of one among the ranks.
        """
        refuse_left(optimizers, self.name)

    def setup_optimizers(
        self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], optimization: Optimization
    ) -> list[Optimizer]:
        """Return the optimizers to step, one for each given one; a further call lists those already returned first.

        Schedulers stay bound to the given optimizers, so what they set in a group must reach the step. Whatever the engine
        steps, the returned groups hold the module's own parameters in the same order (checkpoints name state by them),
        `zero_grad` discards every gradient, and the class keeps its name.
        """
        return list(optimizers)

    def refresh_toggled(self) -> None:
        """Adapt to `toggle_optimizer`, which froze or unfroze parameters within a manual step."""

    def refresh_trainable(self, modules: Sequence[nn.Module]) -> None:
        """Adapt to which parameters require gradients now, at the start of each training epoch.

        Collective if they changed: freeze and unfreeze the same parameters on every rank.
        """

    def has_replaced(self, modules: Sequence[nn.Module]) -> bool:
        """Return whether a trained parameter was replaced under its name since the strategy last saw the modules."""
        return False

    def run(self, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a named step of the module (or its "forward") through the wrapper and in the precision's context."""
        with self.precision.forward_context() or nullcontext():
            return call_step(module, name, args, kwargs)

    def backward(self, loss: Tensor, send: Sender | None = None, **options: Any) -> None:
        """Run backward, and average gradients over the ranks unless `sync_gradients(False)` was called.

        If given, `send(loss, **options)` runs instead of `loss.backward(**options)`, with the scaled loss.
        """
        if self.finalized:
            self.finalized = dict.fromkeys(self.finalized, False)
        self.precision.backward(loss, send, **options)
        if self.is_parallel and self.ends_window:  # a window's forwards share its buffers
            self.buffers.end_window()

    def sync_gradients(self, enabled: bool) -> None:
        """Set, before a forward, whether its backward ends an accumulation window."""
        self.ends_window = enabled

    def finalize(self, optimizer: Optimizer) -> None:
        """Average and unscale the optimizer's gradients, unless that was done since the latest backward. Collective."""
        if not self.finalized.get(optimizer):
            self.finalized[optimizer] = True
            self.finalize_gradients(optimizer)

    def release(self, optimizer: Optimizer) -> None:
        """Note that an optimizer's finalized gradients were discarded without a step."""
        self.finalized.pop(optimizer, None)
        self.precision.release(unwrap_optimizer(optimizer))

    def finalize_gradients(self, optimizer: Optimizer) -> None:
        """Do the work of `finalize`; override it if the engine leaves gradients unreduced. Collective."""
        self.precision.unscale(optimizer)

    def step(
        self, optimizer: Optimizer, clipping: Clipping | None = None, closure: Closure | None = None
    ) -> StepResult:
        """Clip and step; a closure reruns forward and backward inside the step, and clips what it computes itself."""
        norm = None
        if clipping is not None:
            with self.precision.step_context():
                norm = self.clip_gradients(optimizer, clipping)
        skipped = self.precision.step(optimizer, closure)
        if self.finalized:
            self.finalized.pop(optimizer, None)
        return StepResult(norm, skipped) if skipped or norm is not None else PLAIN_STEP

    def clip_gradients(self, optimizer: Optimizer, clipping: Clipping) -> Tensor | None:
        """Finalize and clip the gradients in place; return their total norm before clipping by norm. Collective."""
        self.finalize(optimizer)
        parameters = with_gradients(optimizer)
        scale_and_clip_value(parameters, clipping)
        return None if clipping.norm is None else torch.nn.utils.clip_grad_norm_(parameters, clipping.norm)

    def check_gradients(self, exchange: Exchange = gather_object) -> None:
        """Raise RuntimeError on every rank if the gradients of the ranks cannot have been combined. Collective."""

    def before_evaluation(self, modules: Iterable[nn.Module]) -> None:
        """Broadcast rank 0's buffers, so that all ranks evaluate one model. Collective."""
        broadcast_tensors(each for module in modules for each in replicated(module, module.named_buffers()))

    def gathered_groups(self, module: nn.Module) -> Sequence[nn.Module] | None:
        """Return the submodules of a prepared module that are gathered for their own calls; None without such groups."""
        return None

    def model_pieces(self, module: nn.Module) -> list[Piece]:
        """Return this rank's shard of the module's state_dict, as views that a load writes into."""
        # Buffers such as running statistics may differ from rank to rank; rank 0's are stored.
        return [
            self.piece(name, value, None if isinstance(value, nn.Parameter) else 0)
            for name, value, _ in state_entries(module)
        ]

    def optimizer_pieces(self, optimizer: Optimizer, names: Mapping[Tensor, str]) -> list[Piece]:
        """Return this rank's shard of the optimizer's per-parameter tensors, as "parameter/key"."""
        writer = self.rank if self.divides_optimizers else None  # None: any rank, because all hold the same
        return [
            self.piece(f"{names[parameter]}/{key}", value, writer)
            for parameter in self._local_parameters(optimizer)
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        ]

    def allocate_optimizer_state(
        self, optimizer: Optimizer, names: Mapping[Tensor, str], entries: Mapping[str, TensorEntry]
    ) -> None:
        """Replace the optimizer's state by empty tensors for a load to fill; earlier views of it are stale afterwards.

        `entries` are the stored tensors by name ("parameter/key"), with whole shapes.
        """
        by_name, optimizer = by_parameter(entries), unwrap_optimizer(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                stored = by_name.get(names[parameter])
                if not stored:
                    optimizer.state.pop(parameter, None)  # some optimizers take an empty dict for initialised state
                    continue
                state = optimizer.state[parameter]
                state.clear()
                for key, entry in stored.items():
                    is_part = tuple(parameter.shape) == tuple(entry.shape) and key != "step"
                    state[key] = new_state(parameter, key, entry, group, is_part)

    def piece(self, name: str, value: Tensor, writer: int | None) -> Piece:
        """Return one state tensor as a piece, a sharded one as the range that this rank holds."""
        return Piece(name, tuple(value.shape), 0, value.detach(), writer)

    def annotate(self, error: BaseException) -> None:
        """Add to an error of the user's code what it means under this strategy."""

    def describe_optimizer(self, optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
        """Return the optimizer's groups and the non-tensor state that this rank holds."""
        described = describe_optimizer(optimizer, names, UNSAVED_KEYS)
        if self.divides_optimizers:
            # A load gives each rank the other ranks' state too, which goes stale.
            local = {names[parameter] for parameter in self._local_parameters(optimizer)}
            described["plain"] = {name: state for name, state in described["plain"].items() if name in local}
        return described

    def _local_parameters(self, optimizer: Optimizer) -> Iterable[Tensor]:
        """Return the parameters whose optimizer state this rank holds."""
        return parameters_of(unwrap_optimizer(optimizer))

    @property
    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs besides the pieces, as plain data that is equal on every rank."""
        return {}

    def after_load(
        self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], state: Mapping[str, Any]
    ) -> None:
        """Update derived state after a load has written all pieces. Collective.

        `state` is the saved `state` if the checkpoint is from this strategy and the same number of ranks, otherwise empty.
        """

    def refresh_weights(self, modules: Sequence[nn.Module]) -> None:
        """Update what the engine derives from weights, after values were written into the model's pieces. Collective."""

    def after_run(self) -> None:
        """Take the engine off the modules, whatever ended the run; their state can be read until `close`.

        Not collective, because a rank may be gone. Sharded modules stay sharded.
        """

    def close(self) -> None:
        """Release everything but the process group; a sharded module stays sharded, because whole it might not fit."""
        self.ends_window = True
        self.note_module(None)
        for each in (self.wrapped, self.finalized, self.buffers):
            each.clear()


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def with_gradients(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for parameter in parameters_of(optimizer) if parameter.grad is not None]


def refuse_unaveraged(strategy: str, modules: Iterable[nn.Module], unknown: Collection[Tensor]) -> None:
    """Raise RuntimeError if one of the modules trains a parameter that the strategy does not know; others are the user's."""
    for module in modules if unknown else ():
        for name, parameter in trained(module).items():
            if any(parameter is each for each in unknown):
                raise RuntimeError(
                    f"{name!r} of {type(module).__name__} was replaced, added or unfrozen within an epoch, so {strategy} "
                    "has not averaged its gradient over the ranks. Do that between epochs: in on_train_epoch_start, or before "
                    "a pass over a prepared loader."
                )


def scale_and_clip_value(parameters: list[nn.Parameter], clipping: Clipping) -> None:
    """Multiply gradients and clip them by value, in place."""
    if clipping.scale != 1.0:
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], clipping.scale)
    if clipping.value is not None:
        torch.nn.utils.clip_grad_value_(parameters, clipping.value)


def by_parameter(entries: Mapping[str, TensorEntry]) -> dict[str, dict[str, TensorEntry]]:
    """Return stored entries ("parameter/key") by parameter and key."""
    found: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        parameter_name, key = name.rsplit("/", 1)
        found.setdefault(parameter_name, {})[key] = entry
    return found


def new_state(parameter: Tensor, key: str, entry: TensorEntry, group: Mapping[str, Any], is_part: bool) -> Tensor:
    """Return a state tensor for a load to fill; `is_part` if it has one element for each of the parameter's."""
    if is_part:
        return torch.zeros_like(parameter, dtype=entry.dtype, requires_grad=False)
    device, dtype = state_location(parameter, key, entry.dtype, group)
    return torch.zeros(entry.shape, dtype=dtype, device=device)


def state_location(
    parameter: Tensor, key: str, dtype: torch.dtype, group: Mapping[str, Any]
) -> tuple[torch.device, torch.dtype]:
    """Return the device and dtype that a step expects for state that is not shaped like its parameter."""
    if key != "step":
        return parameter.device, dtype
    if group.get("fused") or group.get("capturable"):
        # The kernel reads the step count on the parameter's device, as float32; a float64 run may have stored a wider one.
        return parameter.device, torch.float32
    return torch.device("cpu"), dtype


def refuse_sharded(module: nn.Module, name: str) -> None:
    """Raise ValueError for a module that another strategy's engine has sharded."""
    for parameter_name, parameter in module.named_parameters():
        if is_dtensor(parameter) or hasattr(parameter, "ds_id"):
            raise ValueError(
                f"parameter {parameter_name!r} of {type(module).__name__} is sharded, as fsdp or ZeRO stage 3 has left it, and "
                f"strategy={name!r} needs it whole. Continue with the strategy that sharded it, take the whole copy that "
                "tw.gather_module(module) gives on all ranks, or create the module again and load a checkpoint."
            )


def refuse_lazy(module: nn.Module, name: str) -> None:
    """Raise ValueError for parameters whose shape is unknown before the first forward, so that they cannot be sharded."""
    for parameter_name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {parameter_name!r} of {type(module).__name__} is lazy: its shape is not known before a forward, "
                f"and strategy={name!r} needs it before. Run a forward on a sample in the module's __init__, or give the "
                "layer its size."
            )


def refuse_row_norms(module: nn.Module, name: str) -> None:
    """Raise ValueError for trained embeddings whose forward rescales the rows it looks up: each rank looks up others."""
    for layer_name, layer in module.named_modules():
        is_written = isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None
        if is_written and layer.weight.requires_grad:
            raise ValueError(
                f"{layer_name!r} of {type(module).__name__} is an {type(layer).__name__} with max_norm={layer.max_norm}, which "
                f"scales the rows that a batch looks up; under strategy={name!r} each rank would scale others. Leave max_norm "
                "out and bound the rows after each step (torch.renorm under no_grad), or train on one process."
            )


def rank_local_names(module: nn.Module) -> frozenset[str]:
    """Return the parameters and buffers that the module excludes from torch's DDP, so that each rank keeps its own."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def replicated(module: nn.Module, named: Iterable[tuple[str, Tensor]]) -> list[Tensor]:
    """Return those of a module's parameters or buffers that are equal on every rank."""
    left_out = rank_local_names(module)
    return [each for name, each in named if name not in left_out]


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the replicated parameters that require gradients, by name."""
    left_out = rank_local_names(module)
    return {name: each for name, each in module.named_parameters() if each.requires_grad and name not in left_out}


def changed(before: Mapping[str, nn.Parameter], now: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the names of parameters that only one side has, or that are another parameter there."""
    return sorted(name for name in {**before, **now} if before.get(name) is not now.get(name))


def refuse_unreplicable(module: nn.Module, name: str, optimization: Optimization | None) -> None:
    """Raise ValueError for a module that cannot be replicated or sharded."""
    refuse_lazy(module, name)
    if optimization is not None:
        refuse_row_norms(module, name)
    if names := sorted(rank_local_names(module)):
        raise ValueError(
            f"{type(module).__name__}._ddp_params_and_buffers_to_ignore leaves {names[0]!r} to each rank, but "
            f"strategy={name!r} trains one model; use strategy='ddp', or delete that attribute."
        )
