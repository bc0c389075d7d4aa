"""The strategy contract, with one process as its default.

A strategy owns what the processes of a job do together around one model: wrap it, run a step through the wrapper, send a
loss backward, clip and step, and hand out its share of the state as checkpoint pieces. The numbers that it computes in
are the precision's. A new strategy overrides what its engine does differently; nothing outside this folder asks for its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainwright.checkpoint.contents import describe_optimizer
from trainwright.checkpoint.tensors import Piece, TensorEntry
from trainwright.compiled_names import clean_name as clean_name
from trainwright.precision.base import Closure, Precision, Sender
from trainwright.strategies.materialize import materialize
from trainwright.strategies.placement import move
from trainwright.strategies.shared_buffers import SharedBuffers
from trainwright.strategies.shared_buffers import broadcast_tensors as broadcast_tensors
from trainwright.strategies.state_entries import state_tensors

STORED_NEVER = frozenset({"params", "param_names", "fused", "foreach", "capturable", "differentiable"})
"""Keys of a parameter group that a checkpoint leaves out: its tensors, and how the optimizer is computed here."""


@dataclass(frozen=True)
class Optimization:
    """What a strategy has to know of the optimization before it is set up.

    `automatic` is False where the user's own training_step sends losses backward and steps; `clip_norm` and `clip_value`
    are the gradient limits of automatic optimization (None: unlimited); `accumulate` is the usual number of batches a step.
    """

    automatic: bool = True
    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1


class Clipping(NamedTuple):
    """How gradients are clipped: multiplied by `scale`, then clipped by `value`, then by total `norm` (None: not at all)."""

    norm: float | None = None
    value: float | None = None
    scale: float = 1.0

    @classmethod
    def needed(cls, norm: float | None, value: float | None, scale: float = 1.0) -> Clipping | None:
        """Return the clipping, or None where it would change nothing."""
        return None if norm is None and value is None and scale == 1.0 else cls(norm, value, scale)


class StepResult(NamedTuple):
    """What one optimizer step did.

    `norm` is the total gradient norm before clipping (a 0-dim tensor; None where nothing was clipped by norm), `skipped`
    is True where the step was left out because the gradients held an inf or a NaN.
    """

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
    """Call a method of the module by name; "forward" goes through `module(...)`, so that its hooks run."""
    if name == "forward":
        return module(*args, **kwargs)
    return getattr(module, name)(*args, **kwargs)


class Strategy:
    """One process, one device.

    Every method is called on every rank, in the same order.
    """

    name = "single_device"
    is_parallel = False
    """True where it can run on several processes."""
    forward_is_collective = False
    """True where a forward needs every rank, so that a rank out of evaluation batches has to go on taking part."""
    takes_closure = True
    """True where an optimizer's step may run forwards and backwards of its own, through a closure."""
    makes_optimizer = False
    """True where its engine's own configuration says which optimizer to make, so that the module makes none."""
    takes_compile = True
    """True where torch.compile can trace what its engine does around the modules."""
    holds_modules = True
    """True where the module's own tensors are what is trained, whole on each rank."""
    keeps_optimizers = True
    """True where optimizers still have their state once the strategy was closed; else an evaluation leaves it open."""
    divides_optimizers = False
    """True where a rank has the state of those parameters alone whose part it steps."""
    gradients_are_parameters = True
    """True where each rank's gradients are its parameters' `.grad`, from which a checkpoint can take them."""
    needs_group = False
    """True where its engine wants a process group, on one process too."""
    communicates_on_host = False
    """True where its engine sends tensors that are in host memory, though it computes on GPUs."""
    timeout_seconds: float | None = None
    """How long a rank waits for the others; None leaves it to the Engine."""

    def __init__(self) -> None:
        self.rank = 0
        self.world_size = 1
        self.device = torch.device("cpu")
        self.precision = Precision()
        self.wrapped: dict[nn.Module, Any] = {}
        """The modules whose forward has to go through `run`, since calling them would leave something out."""
        self.buffers = SharedBuffers()
        """Makes those that training steps read and write rank 0's, where a strategy lets it."""
        self.finalized: dict[Optimizer, bool] = {}
        """The optimizers whose gradients were finalized and wait for a step; False where a backward has added to them since."""

    # -- before a run ------------------------------------------------------------------------------------------------

    def connect(self, rank: int, world_size: int, device: torch.device, precision: Precision) -> None:
        """Take the place that this process has in the job; the process group is open by now.

        An engine that scales losses itself (DeepSpeed) puts a precision of its own in place of the given one, so ask
        `self.precision` for the state of the scale.
        """
        self.rank, self.world_size, self.device, self.precision = rank, world_size, device, precision

    def check(self, device_type: str, num_processes: int, precision: Precision) -> None:
        """Refuse a job that this strategy cannot run, before any process is started.

        Raises:
            ValueError: the device, the number of processes or the precision excludes it.
        """
        if num_processes > 1 and not self.is_parallel:
            raise ValueError(
                f"strategy={self.name!r} runs on one process, but {num_processes} were asked for; pass devices=1, or a "
                "strategy for several such as 'ddp'."
            )

    def settle(self, optimization: Optimization) -> Optimization:
        """Return the optimization as it will be done: an engine's own configuration may say otherwise than was asked for."""
        return optimization

    def setup_module(self, module: nn.Module, optimization: Optimization | None) -> None:
        """Move a module to the device, and wrap or shard it; called before its optimizers are made.

        Collective: rank 0's weights and buffers become everyone's. `optimization` is None where the module will be
        evaluated only; no `setup_optimizers` follows then. A module comes again after `close`, sharded as it was left.
        Its parameters may be other objects from here on, so names are taken afterwards.
        """
        self.place(module)

    def place(self, module: nn.Module) -> None:
        """Move a module to the device; give values to what was made on the meta device.

        Raises:
            ValueError: an engine has sharded it for another strategy, or it cannot be given values.
        """
        refuse_sharded(module, self.name)
        if materialize(module):
            self.precision.convert_module(module)  # what had no values when it was converted first
        move(module, self.device)

    def setup_optimizers(
        self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], optimization: Optimization
    ) -> list[Optimizer]:
        """Return the optimizers to step, one for each given; called with the optimizers of all modules.

        Called again, those that it returned come first. The given ones hold the modules' parameters as they are by now.

        Schedulers are bound to the optimizers that were given: what they set in a group has to reach the step. In the groups
        of those returned stand the module's own parameters, in the same order, whatever an engine steps in their stead
        (checkpoints name state by them); their `zero_grad` drops every gradient, and their class has the same name.
        """
        return list(optimizers)

    def follow_toggle(self) -> None:
        """Take note, within a manual step, that parameters of the optimizers were frozen or unfrozen by `toggle_optimizer`."""

    def follow_parameters(self, modules: Sequence[nn.Module]) -> None:
        """Take note of which parameters require gradients now; called at the beginning of each epoch of training.

        Collective where they have changed: freezing and unfreezing has to be alike on every rank.
        """

    # -- a step ------------------------------------------------------------------------------------------------------

    def run(self, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a named step of the module (or its "forward") through the wrapper and in the precision's context."""
        context = self.precision.forward_context()
        if context is None:
            return call_step(module, name, args, kwargs)
        with context:
            return call_step(module, name, args, kwargs)

    def backward(self, loss: Tensor, send: Sender | None = None, **options: Any) -> None:
        """Send a loss backward; gradients are averaged over the ranks unless `sync_gradients(False)` was said.

        `send(loss, **options)` does it where it is given, with the loss as it is scaled; else `loss.backward(**options)`.
        """
        if self.finalized:
            self.finalized = dict.fromkeys(self.finalized, False)
        self.precision.backward(loss, send, **options)

    def sync_gradients(self, enabled: bool) -> None:
        """Say, before a forward, whether the backward that follows it ends an accumulation window."""
        self.buffers.ends_window = enabled

    def finalize(self, optimizer: Optimizer) -> None:
        """Make this rank's gradients averaged and unscaled, unless they are. Collective.

        It is done once before a step, whoever looks at the gradients: a hook, clipping, or the step itself. After a further
        backward it is done again.
        """
        if not self.finalized.get(optimizer):
            self.finalized[optimizer] = True
            self.finalize_gradients(optimizer)

    def release(self, optimizer: Optimizer) -> None:
        """Let an optimizer's finalized gradients go: they were discarded, and no step was made with them."""
        self.finalized.pop(optimizer, None)
        self.precision.release(optimizer)

    def finalize_gradients(self, optimizer: Optimizer) -> None:
        """Do what `finalize` says; a strategy whose engine leaves gradients unreduced overrides this. Collective."""
        self.precision.unscale(optimizer)

    def step(
        self, optimizer: Optimizer, clipping: Clipping | None = None, closure: Closure | None = None
    ) -> StepResult:
        """Clip where asked and step; return the norm if it was taken, and whether the step was skipped.

        The optimizer may call the closure, which runs the step's forward and backward again, and clips what it computes.
        """
        norm = None
        if clipping is not None:
            with self.precision.step_context():
                norm = self.clip_gradients(optimizer, clipping)
        skipped = self.precision.step(optimizer, closure)
        if self.finalized:
            self.finalized.pop(optimizer, None)
        return StepResult(norm, skipped) if skipped or norm is not None else PLAIN_STEP

    def clip_gradients(self, optimizer: Optimizer, clipping: Clipping) -> Tensor | None:
        """Clip the finalized gradients in place; return their total norm before, if it was taken. Collective.

        Nothing outside of a strategy touches gradients: under some engines no parameter has its own.
        """
        self.finalize(optimizer)
        parameters = with_gradients(optimizer)
        scale_and_clip_value(parameters, clipping)
        return None if clipping.norm is None else torch.nn.utils.clip_grad_norm_(parameters, clipping.norm)

    def before_evaluation(self, modules: Iterable[nn.Module]) -> None:
        """Make every rank evaluate the same model: rank 0's buffers go to all. Collective."""
        broadcast_tensors(each for module in modules for each in common(module, module.named_buffers()))

    # -- state -------------------------------------------------------------------------------------------------------

    def model_pieces(self, module: nn.Module) -> list[Piece]:
        """Return this rank's share of the module's state_dict, as views that a load writes into."""
        pieces = []
        for name, value in state_tensors(module):
            # A buffer may differ between ranks (running statistics): rank 0's is the one that counts.
            writer = None if isinstance(value, nn.Parameter) else 0
            pieces.append(self.piece(clean_name(name), value, writer))
        return pieces

    def optimizer_pieces(self, optimizer: Optimizer, names: Mapping[Tensor, str]) -> list[Piece]:
        """Return this rank's share of the optimizer's per-parameter tensors, named "parameter/key".

        `names` maps this module's parameters to their names in its state_dict.
        """
        pieces = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        pieces.append(self.piece(f"{names[parameter]}/{key}", value, None))
        return pieces

    def allocate_optimizer_state(
        self, optimizer: Optimizer, names: Mapping[Tensor, str], entries: Mapping[str, TensorEntry]
    ) -> None:
        """Make the state tensors that a load will fill, where the optimizer has not stepped yet.

        `entries` are the stored tensors by name ("parameter/key"), with whole shapes; what state there was is dropped.
        `optimizer_pieces` is asked afterwards, since the views that it gave before are stale.
        """
        by_parameter: dict[str, dict[str, TensorEntry]] = {}
        for name, entry in entries.items():
            parameter_name, key = name.rsplit("/", 1)
            by_parameter.setdefault(parameter_name, {})[key] = entry
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                stored = by_parameter.get(names[parameter])
                if not stored:
                    optimizer.state.pop(parameter, None)  # not an empty one, which some optimizers take for their own
                    continue
                state = optimizer.state[parameter]
                state.clear()
                for key, entry in stored.items():
                    is_part = tuple(parameter.shape) == tuple(entry.shape) and key != "step"
                    state[key] = made_state(parameter, key, entry, group, is_part)

    def piece(self, name: str, value: Tensor, writer: int | None) -> Piece:
        """Return one tensor of the state as a piece; a sharded one as the range that this rank holds."""
        return Piece(name, tuple(value.shape), 0, value.detach(), writer)

    def describe_optimizer(self, optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
        """Return the optimizer's groups and what in its state is no tensor, as far as this rank knows it."""
        return describe_optimizer(optimizer, names, STORED_NEVER)

    @property
    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs beside the pieces, as plain data alike on every rank."""
        return {}

    def after_load(
        self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], state: Mapping[str, Any]
    ) -> None:
        """Follow up on state that a load has written into the pieces, all sections of it. Collective.

        `state` is what `state` was when the checkpoint was saved, if that was under this strategy and as many ranks.
        """

    def after_run(self) -> None:
        """Leave the modules as their user's own, whatever ended the run; their state can be asked for until `close`.

        Nothing is sent: a rank may be gone. What an engine has sharded stays sharded.
        """

    def close(self) -> None:
        """Give back what this strategy holds; the process group is closed by its owner.

        Called before the first run too. A sharded module stays sharded: whole, it might not fit.
        """
        for each in (self.wrapped, self.finalized, self.buffers):
            each.clear()


def with_gradients(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of an optimizer that have gradients."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def scale_and_clip_value(parameters: list[nn.Parameter], clipping: Clipping) -> None:
    """Do to gradients what of a clipping needs no norm, in place."""
    if clipping.scale != 1.0:
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], clipping.scale)
    if clipping.value is not None:
        torch.nn.utils.clip_grad_value_(parameters, clipping.value)


def made_state(parameter: Tensor, key: str, entry: TensorEntry, group: Mapping[str, Any], is_part: bool) -> Tensor:
    """Return a state tensor for a load to fill: like the parameter where it has an element for each, else as it was stored."""
    if is_part:
        return torch.zeros_like(parameter, dtype=entry.dtype, requires_grad=False)
    device, dtype = place_of_state(parameter, key, entry.dtype, group)
    return torch.zeros(entry.shape, dtype=dtype, device=device)


def place_of_state(
    parameter: Tensor, key: str, dtype: torch.dtype, group: Mapping[str, Any]
) -> tuple[torch.device, torch.dtype]:
    """Return the device and the dtype that a step wants a parameter's state in, where that is no part of the parameter."""
    if key != "step":
        return parameter.device, dtype
    if group.get("fused") or group.get("capturable"):
        # The kernel reads the count where the parameter is, as float32; a run in float64 may have stored a wider one.
        return parameter.device, torch.float32
    return torch.device("cpu"), dtype


def refuse_sharded(module: nn.Module, name: str) -> None:
    """Refuse a module that another strategy's engine has sharded (ValueError)."""
    for parameter_name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) or hasattr(parameter, "ds_id"):
            raise ValueError(
                f"parameter {parameter_name!r} of {type(module).__name__} is sharded, as fsdp or ZeRO stage 3 has left it, and "
                f"strategy={name!r} needs it whole. Go on with the strategy that sharded it, take the whole copy that "
                "tw.gather_module(module) gives on all ranks, or make the module anew and load a checkpoint."
            )


def refuse_lazy(module: nn.Module, name: str) -> None:
    """Refuse parameters whose shape the first forward is to tell (ValueError): there is nothing to share out yet."""
    for parameter_name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {parameter_name!r} of {type(module).__name__} is lazy: its shape is not known before a forward, "
                f"and strategy={name!r} needs it before. Run a forward on a sample in the module's __init__, or give the "
                "layer its size."
            )


def refuse_row_norms(module: nn.Module, name: str) -> None:
    """Refuse to train embeddings whose forward writes the rows that it looks up: each rank writes its own (ValueError)."""
    for layer_name, layer in module.named_modules():
        is_written = isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None
        if is_written and layer.weight.requires_grad:
            raise ValueError(
                f"{layer_name!r} of {type(module).__name__} is an {type(layer).__name__} with max_norm={layer.max_norm}, which "
                f"scales the rows that a batch looks up; under strategy={name!r} each rank would scale others. Leave max_norm "
                "out and bound the rows after each step (torch.renorm under no_grad), or train on one process."
            )


def own_to_each_rank(module: nn.Module) -> frozenset[str]:
    """Return the parameters and buffers of which torch's DDP is told, on the module, to leave each rank its own."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def common(module: nn.Module, named: Iterable[tuple[str, Tensor]]) -> list[Tensor]:
    """Return those of a module's parameters or buffers that are to be alike on every rank."""
    left_out = own_to_each_rank(module)
    return [each for name, each in named if name not in left_out]


def trained(module: nn.Module) -> list[str]:
    """Return the names of the parameters that require gradients, and are not each rank's own."""
    left_out = own_to_each_rank(module)
    return [name for name, each in module.named_parameters() if each.requires_grad and name not in left_out]


def check_alike(module: nn.Module, name: str, optimization: Optimization | None) -> None:
    """Refuse what cannot be shared out, to be trained or at all (ValueError)."""
    refuse_lazy(module, name)
    if optimization is not None:
        refuse_row_norms(module, name)
    if names := sorted(own_to_each_rank(module)):
        raise ValueError(
            f"{type(module).__name__}._ddp_params_and_buffers_to_ignore leaves {names[0]!r} to each rank, but "
            f"strategy={name!r} trains one model; use strategy='ddp', or delete that attribute."
        )
