"""The strategy contract, whose base class is one process.

A strategy owns the work that the ranks of a job share around one model. It wraps the model, runs a step through the wrapper,
runs backward, clips and steps. It returns this rank's shard of the state as checkpoint pieces. A new strategy overrides the
methods in which its engine differs. Nothing outside this folder asks for its name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.contents import describe_optimizer
from trainwright.checkpoint.tensors import Piece, TensorEntry
from trainwright.distributed.collectives import Exchange, gather_object
from trainwright.precision.base import Closure, Precision, Sender
from trainwright.strategies.divided_optimizers import parameters_of, unwrap_optimizer, with_gradients
from trainwright.strategies.job_view import JobView
from trainwright.strategies.module_checks import refuse_sharded
from trainwright.strategies.placement import materialize, move
from trainwright.strategies.replaced_options import refuse_options
from trainwright.strategies.replication import SyncedBuffers
from trainwright.tensor_names import state_entries

UNSAVED_KEYS = frozenset({"params", "param_names", "fused", "foreach", "capturable", "differentiable"})
"""Keys of a parameter group that no checkpoint stores: its tensors, and the kernels chosen on this machine."""


@dataclass(frozen=True)
class Capabilities:
    """Abilities and needs of a strategy. The defaults describe one process on one device.

    Args:
        is_parallel: it runs on several processes.
        needs_group: the engine needs a process group even on one process.
        communicates_on_host: collectives run on host tensors too, although the engine computes on GPUs.
        forward_is_collective: a forward is collective, so that a rank without evaluation batches runs dummy batches.
        holds_modules: the module's tensors are trained in place, whole on every rank.
        pieces_are_collective: `model_pieces` communicates, so that a failed run cannot call it.
        gradients_are_parameters: gradients are the parameters' `.grad`, where a checkpoint finds them.
        divides_optimizers: a rank holds optimizer state only for its shard.
        keeps_optimizers: optimizers keep their state after `close`. Otherwise an evaluation leaves the strategy open.
        makes_optimizer: the engine's configuration defines the optimizer, so that the module returns none.
        trains_prepared_only: only an optimizer that `setup_optimizers` returned can train on several ranks.
        takes_param_groups: a parameter group may be added to an optimizer during training.
        takes_closure: an optimizer's step may rerun forward and backward through a closure. Otherwise `step` gets none.
        takes_compile: torch.compile can trace the engine's hooks.
        distributed_type: the member of `DistributedType`, or None if it follows from the device and the number of processes.
    """

    is_parallel: bool = False
    needs_group: bool = False
    communicates_on_host: bool = False
    forward_is_collective: bool = False
    holds_modules: bool = True
    pieces_are_collective: bool = False
    gradients_are_parameters: bool = True
    divides_optimizers: bool = False
    keeps_optimizers: bool = True
    makes_optimizer: bool = False
    trains_prepared_only: bool = False
    takes_param_groups: bool = True
    takes_closure: bool = True
    takes_compile: bool = True
    distributed_type: str | None = None


@dataclass(frozen=True)
class Optimization:
    """How the model will be optimized: by the framework (`automatic`) or in training_step.

    `clip_norm` and `clip_value` limit gradients (None: not at all). `accumulate` is the usual number of batches per step.
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
        """Return the clipping, or None if it would change nothing."""
        return None if norm is None and value is None and scale == 1.0 else cls(norm, value, scale)


class StepResult(NamedTuple):
    """`norm` is the total gradient norm before clipping by norm (0-dim). `skipped` is True after an inf or a NaN."""

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
    """Call a module's method by name. "forward" runs as `module(...)`, with its hooks."""
    if name == "forward":
        return module(*args, **kwargs)
    return getattr(module, name)(*args, **kwargs)


class Strategy(JobView):
    """The base of strategies, which is one process on one device.

    All methods are called on every rank, in the same order. Override the methods in which your engine differs, set
    `capabilities` accordingly, and pass the instance as `strategy=`. The methods are, by groups:

    - setup: `check`, `connect`, `resolve`, `check_module`, `check_optimizer`, `setup_module`, `setup_optimizers`,
      `refresh_trainable`
    - step: `run`, `backward`, `sync_gradients`, `finalize`, `clip_gradients`, `step`, `check_gradients`
    - state: `model_pieces`, `optimizer_pieces`, `describe_optimizer`, `allocate_optimizer_state`, `refresh_weights`, and the
      property `state`
    - lifecycle: `after_run`, `close`

    >>> class ChannelsLast(tw.Strategy):
    ...     def setup_module(self, module, optimization):
    ...         super().setup_module(module, optimization)
    ...         module.to(memory_format=torch.channels_last)
    >>> tw.Trainer(strategy=ChannelsLast(), max_epochs=1, enable_model_summary=False).fit(module, loader)
    """

    name = "single_device"
    capabilities = Capabilities()
    timeout_seconds: float | None = None
    """How long a rank waits for the others, or None for the Engine's default."""

    def __init__(self) -> None:
        self.rank = 0
        self.world_size = 1
        self.data_rank, self.num_data_ranks = 0, 1
        """This rank's part of the data, and the number of parts. Ranks that compute one replica together have the same part."""
        self.data_group: dist.ProcessGroup | None = None
        """One rank of every part of the data, including this rank. None means all ranks."""
        self.device = torch.device("cpu")
        self.precision = Precision()
        self.wrapped: dict[nn.Module, Any] = {}
        """The modules whose forward must go through `run`, because a plain call would miss the wrapper."""
        self.buffers = SyncedBuffers()
        """Broadcasts rank 0's buffers before training steps."""
        self.ends_window = True
        """Whether the next backward ends an accumulation window."""
        self.finalized: dict[Optimizer, bool] = {}
        """Optimizers whose finalized gradients wait for a step; False once another backward has added to them."""

    # -- setup

    def check(self, device_type: str, num_processes: int, precision: Precision) -> None:
        """Raise ValueError, before any process starts, for a run that this strategy does not support."""
        if num_processes > 1 and not self.capabilities.is_parallel:
            raise ValueError(
                f"strategy={self.name!r} runs on one process, but {num_processes} were asked for. Pass devices=1, or a "
                "strategy for several processes, such as 'ddp'."
            )

    def connect(self, rank: int, world_size: int, device: torch.device, precision: Precision) -> None:
        """Set this process's rank, part of the data, and device. An engine that scales losses itself replaces the precision.

        Collective: call on every rank. A subclass whose ranks share a part of the data then sets `data_rank`,
        `num_data_ranks` and `data_group`.
        """
        self.rank, self.world_size, self.device, self.precision = rank, world_size, device, precision
        self.data_rank, self.num_data_ranks = rank, world_size

    def resolve(self, optimization: Optimization) -> Optimization:
        """Return the optimization with the settings of the engine's configuration, which win over the arguments."""
        return optimization

    def check_module(self, module: nn.Module, optimization: Optimization | None) -> None:
        """Raise ValueError for a module that this strategy cannot set up. It may be on the meta device."""

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise ValueError for an optimizer, of a checked module, that this strategy cannot step."""

    def setup_module(self, module: nn.Module, optimization: Optimization | None) -> None:
        """Move a module to the device, and wrap or shard it, before its optimizers exist.

        Collective: every rank gets rank 0's weights and buffers. If the module is only evaluated, `optimization` is None and
        no `setup_optimizers` follows. A sharded module may come back after `close`, still sharded. This may replace
        parameters, so take their names afterwards.
        """
        self._move(module)

    def _move(self, module: nn.Module) -> None:
        """Move a module to the device, and initialise its meta tensors."""
        refuse_sharded(module, self.name)
        if materialize(module):
            self.precision.convert_module(module)  # again, for tensors that had no values the first time
        move(module, self.device)

    def setup_optimizers(
        self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], optimization: Optimization
    ) -> list[Optimizer]:
        """Return the optimizers to step, in the same order. A later call passes the returned ones first.

        Schedulers stay bound to the given optimizers, so values that they set in a group must reach the step. Whatever the
        engine steps, the returned groups hold the module's parameters in the same order (checkpoints name state by them),
        `zero_grad` discards every gradient, and the class keeps its name.
        """
        return list(optimizers)

    def refresh_trainable(self, modules: Sequence[nn.Module], in_step: bool = False) -> None:
        """Adapt to which parameters require gradients now, at the start of a training epoch.

        With `in_step`, `toggle_optimizer` has frozen or unfrozen some within a manual step. Collective if they changed:
        freeze and unfreeze the same parameters on every rank.
        """

    # -- step

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
        if self.capabilities.is_parallel and self.ends_window:  # a window's forwards share its buffers
            self.buffers.end_window()

    def sync_gradients(self, enabled: bool) -> None:
        """Set, before a forward, whether its backward ends an accumulation window."""
        self.ends_window = enabled

    def finalize(self, optimizer: Optimizer) -> None:
        """Average and unscale the optimizer's gradients, unless that was done since the latest backward. Collective."""
        if not self.finalized.get(optimizer):
            self.finalized[optimizer] = True
            self._finalize(optimizer)

    def _finalize(self, optimizer: Optimizer) -> None:
        """Do the work of `finalize`. Override this if the engine leaves gradients unreduced. Collective."""
        self.precision.unscale(optimizer)

    def clip_gradients(self, optimizer: Optimizer, clipping: Clipping) -> Tensor | None:
        """Finalize and clip the gradients in place, and return their total norm before clipping by norm. Collective."""
        self.finalize(optimizer)
        parameters = with_gradients(optimizer)
        scale_and_clip_value(parameters, clipping)
        return None if clipping.norm is None else torch.nn.utils.clip_grad_norm_(parameters, clipping.norm)

    def step(
        self, optimizer: Optimizer, clipping: Clipping | None = None, closure: Closure | None = None
    ) -> StepResult:
        """Clip and step. A closure reruns forward and backward inside the step, and clips its gradients itself."""
        norm = None
        if clipping is not None:
            with self.precision.step_context():
                norm = self.clip_gradients(optimizer, clipping)
        skipped = self.precision.step(optimizer, closure)
        if self.finalized:
            self.finalized.pop(optimizer, None)
        return StepResult(norm, skipped) if skipped or norm is not None else PLAIN_STEP

    def release(self, optimizer: Optimizer) -> None:
        """Forget an optimizer's finalized gradients, which were discarded without a step."""
        self.finalized.pop(optimizer, None)
        self.precision.release(unwrap_optimizer(optimizer))

    def skip_step(self, optimizer: Optimizer) -> StepResult:
        """Discard an optimizer's gradients in place of a step."""
        optimizer.zero_grad()
        self.release(optimizer)
        return StepResult(None, True)

    def gradient_norm(self, optimizer: Optimizer) -> Tensor | None:
        """Return the total norm of the finalized gradients. Collective."""
        return self.clip_gradients(optimizer, Clipping(norm=math.inf))  # multiplies by 1.0

    def check_gradients(self, exchange: Exchange = gather_object) -> None:
        """Raise RuntimeError on every rank if the gradients of the ranks cannot have been combined. Collective."""

    # -- state

    def model_pieces(self, module: nn.Module) -> list[Piece]:
        """Return this rank's shard of the module's state_dict, as views that a load writes into."""
        # Buffers such as running statistics may differ from rank to rank. Rank 0's are stored.
        return [
            self._piece(name, value, None if isinstance(value, nn.Parameter) else 0)
            for name, value, _ in state_entries(module)
        ]

    def optimizer_pieces(self, optimizer: Optimizer, names: Mapping[Tensor, str]) -> list[Piece]:
        """Return this rank's shard of the optimizer's per-parameter tensors, as "parameter/key"."""
        writer = (
            self.rank if self.capabilities.divides_optimizers else None
        )  # None: any rank, because all hold the same
        return [
            self._piece(f"{names[parameter]}/{key}", value, writer)
            for parameter in self._local_parameters(optimizer)
            for key, value in plain_tensors(optimizer.state.get(parameter, {}))
        ]

    def describe_optimizer(self, optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
        """Return the optimizer's groups and the non-tensor state that this rank holds."""
        described = describe_optimizer(optimizer, names, UNSAVED_KEYS)
        if self.capabilities.divides_optimizers:
            # A load gives a rank the other ranks' state too, which goes stale.
            local = {names[parameter] for parameter in self._local_parameters(optimizer)}
            described["plain"] = {name: state for name, state in described["plain"].items() if name in local}
        return described

    def allocate_optimizer_state(
        self, optimizer: Optimizer, names: Mapping[Tensor, str], entries: Mapping[str, TensorEntry]
    ) -> None:
        """Replace the optimizer's state by empty tensors for a load to fill. Earlier views of it are stale afterwards.

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
                join_quantized(parameter, state)

    def _piece(self, name: str, value: Tensor, writer: int | None) -> Piece:
        """Return the part of a state tensor that this rank holds, as a piece."""
        return Piece(name, tuple(value.shape), 0, value.detach(), writer)

    def _local_parameters(self, optimizer: Optimizer) -> Iterable[Tensor]:
        """Return the parameters whose optimizer state this rank holds."""
        return parameters_of(unwrap_optimizer(optimizer))

    @property
    def state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs besides the pieces, as plain data that is equal on every rank."""
        return {}

    def refresh_weights(self, modules: Sequence[nn.Module], loaded: Mapping[str, Any] | None = None) -> None:
        """Update tensors that the engine derives from weights, after a write into the model's pieces. Collective.

        After a load, `loaded` is the saved `state` if the checkpoint is from this strategy and the same number of ranks,
        otherwise empty.
        """

    # -- lifecycle

    def after_run(self, error: BaseException | None = None) -> None:
        """Take the engine off the modules, and explain an error that ended the run and comes from this strategy.

        The modules' state can be read until `close`. Not collective, because a rank may be gone. Sharded modules stay sharded.
        """

    def close(self) -> None:
        """Release everything but the process group. A sharded module stays sharded, because a whole one might not fit."""
        self.ends_window = True
        self.note_module(None)
        for table in (self.wrapped, self.finalized, self.buffers):
            table.clear()


class SingleDeviceStrategy(Strategy):
    """One process on one device."""

    def __init__(self, **unknown: Any) -> None:
        super().__init__()
        device = "pass accelerator= to the Trainer, and devices=[index] for any but the first"
        refuse_options(SingleDeviceStrategy, unknown, {"device": device})


def scale_and_clip_value(parameters: list[nn.Parameter], clipping: Clipping) -> None:
    if clipping.scale != 1.0:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(clipping.scale)
    if clipping.value is not None:
        torch.nn.utils.clip_grad_value_(parameters, clipping.value)


def by_parameter(entries: Mapping[str, TensorEntry]) -> dict[str, dict[str, TensorEntry]]:
    """Return stored entries ("parameter/key") by parameter and key."""
    found: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        parameter_name, key = name.rsplit("/", 1)
        found.setdefault(parameter_name, {})[key] = entry
    return found


QUANTIZED, PARTS = "OptimState8bit", ("codes", "scale", "qmap")
"""torchao's 8-bit state and its tensors (Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization")."""


def plain_tensors(state: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a parameter's state by key, and quantized ones as the tensors in them ("key.codes")."""
    for key, value in state.items():
        if type(value).__name__ == QUANTIZED:
            yield from ((f"{key}.{part}", getattr(value, part)) for part in PARTS)
        elif isinstance(value, Tensor):
            yield key, value


def join_quantized(parameter: Tensor, state: dict[str, Tensor]) -> None:
    """Replace the tensors in quantized state by the quantized tensors, the reverse of `plain_tensors`."""
    for key in [key.removesuffix(".codes") for key in state if key.endswith(".codes")]:
        from torchao.optim.subclass_8bit import OptimState8bit

        is_signed = key == "exp_avg"  # the others are squares
        parts = [state.pop(f"{key}.{part}") for part in PARTS]
        state[key] = OptimState8bit(*parts, is_signed, dtype=parameter.dtype)


def new_state(parameter: Tensor, key: str, entry: TensorEntry, group: Mapping[str, Any], is_part: bool) -> Tensor:
    """Return a state tensor for a load to fill. `is_part` means that it has one element per element of the parameter."""
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
        # The kernel reads the step count on the parameter's device, as float32. A float64 run may have stored a wider one.
        return parameter.device, torch.float32
    return torch.device("cpu"), dtype
