"""The smallest FSDP2 and DeepSpeed strategies: they prove that the strategy contract carries the real engines.

They are not the product's; `trainwright/strategies/fsdp.py` and `deepspeed.py` are. Kept small on purpose, so that what an
engine needs of the contract stays in sight.
"""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from trainwright.checkpoint.tensors import Piece, TensorEntry
from trainwright.precision.base import Clipper, Closure, Sender, StepResult
from trainwright.strategies.base import Optimization, Strategy, broadcast_tensors, call_step, clean_name


class FSDPSpike(Strategy):
    """torch FSDP2: a group for each child that shares no parameter with another, the rest in the root's group."""

    name = "fsdp_spike"
    is_parallel = True
    forward_is_collective = True
    takes_closure = False

    def __init__(self) -> None:
        super().__init__()
        self._roots: dict[nn.Module, set[str]] = {}
        self._sharded = WeakIdKeyDictionary()  # a parameter as it was -> as it is sharded
        self._steps: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()  # registered, for good
        self._automatic = True

    def setup_module(self, module: nn.Module, optimization: Optimization | None) -> None:
        self._automatic = optimization is None or optimization.automatic
        if isinstance(module, FSDPModule):
            self._roots[module] = self._steps.setdefault(module, {"forward"})
            return  # of an earlier run: sharded as it was left
        broadcast_tensors((*module.parameters(), *module.buffers()))
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        before = dict(module.named_parameters())
        children = list(_callable_children(module))
        for child in children:
            own = {id(p) for p in child.parameters()}
            others = {id(p) for other in children if other is not child for p in other.parameters()}
            if own and not own & others:
                fully_shard(child, mesh=mesh)
        fully_shard(module, mesh=mesh)
        after = dict(module.named_parameters())
        for name, parameter in before.items():
            self._sharded[parameter] = after[name]
        self._roots[module] = self._steps.setdefault(module, {"forward"})

    def setup_optimizers(
        self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], optimization: Optimization
    ) -> list[Optimizer]:
        # In a loop of one's own the optimizers were made before their modules were sharded.
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["params"] = [self._sharded.get(parameter, parameter) for parameter in group["params"]]
        return list(optimizers)

    def run(self, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name not in self._roots[module]:
            register_fsdp_forward_method(module, name)
            self._roots[module].add(name)
        return super().run(module, name, args, kwargs)

    def backward(self, loss: Tensor, send: Sender | None = None, **options: Any) -> None:
        if self._automatic:
            return super().backward(loss, send, **options)
        # The root's hooks sit on what its step returns, and this backward runs inside of the step: without these the
        # root's group is never reduced.
        for root in self._fsdp_roots():
            root._get_fsdp_state()._register_pre_backward_hook(loss)
        super().backward(loss, send, **options)
        self._gather_roots()

    def step(self, optimizer: Optimizer, clip: Clipper | None, closure: Closure | None = None) -> StepResult:
        result = super().step(optimizer, clip, closure)
        if not self._automatic:
            self._gather_roots()
        return result

    def sync_gradients(self, enabled: bool) -> None:
        for root in self._fsdp_roots():
            root.set_requires_gradient_sync(enabled)

    def clip_gradients(
        self, optimizer: Optimizer, norm: float | None, value: float | None, scale: float = 1.0
    ) -> Tensor | None:
        total = super().clip_gradients(optimizer, norm, value, scale)
        return total.full_tensor() if isinstance(total, DTensor) else total

    def piece(self, name: str, value: Tensor, writer: int | None) -> Piece:
        if not isinstance(value, DTensor):
            return super().piece(name, value, writer)
        _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
        local = value.detach().to_local()
        # NOTE: indexing a DTensor would communicate, and so hang where ranks hold unequal shares.
        start = offsets[0] * math.prod(value.shape[1:]) if local.numel() else 0
        return Piece(name, tuple(value.shape), start, local.view(-1), self.rank)

    def after_load(
        self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], state: Mapping[str, Any]
    ) -> None:
        for root in self._fsdp_roots():
            root.reshard()

    def before_evaluation(self, modules: Iterable[nn.Module]) -> None:
        broadcast_tensors(buffer for module in modules for buffer in module.buffers())

    def close(self) -> None:
        self._roots.clear()

    def _fsdp_roots(self) -> Iterator[FSDPModule]:
        return (root for root in self._roots if isinstance(root, FSDPModule))

    def _gather_roots(self) -> None:
        """Give the rest of a manual step the root's own parameters: whole, and as they are by now."""
        for root in self._fsdp_roots():
            root.reshard()
            root.unshard()


def _callable_children(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost submodules that have a forward; FSDP gathers a group when its module's forward is called."""
    for child in module.children():
        if "forward" in {name for kind in type(child).__mro__ if kind is not nn.Module for name in vars(kind)}:
            yield child
        else:
            yield from _callable_children(child)


class Part(nn.Module):
    """What one DeepSpeed engine owns of a module; its forward runs a step that uses it."""

    def __init__(self, members: Sequence[nn.Module], strays: Sequence[nn.Parameter] = ()) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.strays = nn.ParameterList(strays)

    def forward(self, step: Callable[[], Any]) -> Any:
        return step()


class ZeroGroup(UserDict[str, Any]):
    """A parameter group as the user made it, over the one that DeepSpeed steps, whose only parameter is a flat master."""

    def __init__(self, stepped: dict[str, Any]) -> None:
        self.data = stepped  # shared: what a scheduler or a load sets reaches the step
        self.parameters = list(stepped["params"])

    def __getitem__(self, key: str) -> Any:
        return self.parameters if key == "params" else super().__getitem__(key)


class ZeroOptimizer(Optimizer):
    """The user's optimizer with the module's own parameters in its groups, after DeepSpeed has put flat masters there."""

    def __init__(self, stepped: Optimizer) -> None:
        self.param_groups = [ZeroGroup(group) for group in stepped.param_groups]  # type: ignore[assignment,arg-type]
        self.stepped = stepped
        self.engine: Any = None
        self.__class__ = type(type(stepped).__name__, (ZeroOptimizer,), {})  # a checkpoint names the optimizer's class

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.stepped.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that wait in DeepSpeed's buckets; no parameter has one of its own."""
        zero = self.engine.optimizer
        zero.zero_grad()
        if hasattr(zero, "all_grad_tensors"):  # ZeRO-2
            zero.all_grad_tensors = dict.fromkeys(zero.all_grad_tensors)
            zero.averaged_gradients = dict.fromkeys(zero.averaged_gradients)
        else:
            # Else a parameter that the next steps do not use keeps the gradient of the last one that did.
            for buffer in zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition.values():
                buffer.zero_()


class DeepSpeedSpike(Strategy):
    """DeepSpeed ZeRO-2 or ZeRO-3, one DeepSpeed engine an optimizer."""

    name = "deepspeed_spike"
    is_parallel = True
    takes_closure = False

    def __init__(self, stage: int = 2, persistence_threshold: int = 8) -> None:
        super().__init__()
        self.stage = stage
        self.forward_is_collective = stage == 3
        self.persistence_threshold = persistence_threshold
        self._engines: dict[Optimizer, Any] = {}
        self._parts: dict[nn.Module, list[Any]] = {}
        self.wrapped: dict[nn.Module, None] = {}

    def setup_module(self, module: nn.Module, optimization: Optimization | None) -> None:
        whole = [p for p in module.parameters() if not hasattr(p, "ds_id")]
        broadcast_tensors((*whole, *module.buffers()))
        self.wrapped[module] = None
        if optimization is None and self.stage == 3:
            self._parts[module] = [self._initialize(Part([module]), None)]

    def _initialize(self, part: Part, optimizer: Optimizer | None) -> Any:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,  # our step() is the boundary, whatever the window's length
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**12,
            "zero_optimization": {
                "stage": self.stage,
                "overlap_comm": False,
                "reduce_bucket_size": 100_000,
                "memory_efficient_linear": False,  # True would replace torch.nn.functional.linear, for the whole process
                "stage3_max_live_parameters": 1,  # a small model would stay gathered, and show nothing
                "stage3_max_reuse_distance": 0,
                "stage3_param_persistence_threshold": self.persistence_threshold,
            },
        }
        return deepspeed.initialize(model=part, optimizer=optimizer, config=config, dist_init_required=False)[0]

    def setup_optimizers(
        self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], optimization: Optimization
    ) -> list[Optimizer]:
        for optimizer in (each for each in optimizers if each not in self._engines):
            own = {p for group in optimizer.param_groups for p in group["params"]}
            owners = [module for module in modules if not own.isdisjoint(module.parameters())]
            members, strays = owners, []
            if self.stage == 3 and len(optimizers) > 1:
                # ZeRO-3 hangs its hooks on modules, and two engines that fetch and release one module's parameters break.
                members = [member for module in owners for member in _owned(module, own)]
                inside = {p for member in members for p in member.parameters()}
                strays = [p for group in optimizer.param_groups for p in group["params"] if p not in inside]
                if any(stray.numel() > self.persistence_threshold for stray in strays):
                    raise ValueError("under ZeRO-3 an optimizer of several needs whole submodules of its own")
            facade = ZeroOptimizer(optimizer)
            facade.engine = self._initialize(Part(members, strays), optimizer)
            if strays:
                strays[0].all_gather(
                    strays
                )  # small ones stay gathered from their first use on, which no hook would see
            self._engines[facade] = facade.engine
            for module in owners:
                self._parts.setdefault(module, []).append(facade.engine)
        return list(self._engines)

    def run(self, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def step() -> Any:
            return call_step(module, name, args, kwargs)

        for engine in self._parts.get(module, []):
            # Not engine(...): it would hang its own prologue on what the step returns, and a manual backward runs before.
            step = _nested(engine.module, step)
        with self.precision.forward_context() or nullcontext():
            return step()

    def backward(self, loss: Tensor, send: Sender | None = None, **options: Any) -> None:
        for engine in self._engines.values():
            engine.optimizer.clear_backward_seen_flag()
            engine._backward_prologue()
            loss = engine.scale(loss)
        super().backward(loss, send, **options)
        for engine in self._engines.values():
            # Engines that this loss reached have run their epilogue from their gradient hooks; the others did not.
            engine.optimizer._backward_hook_state.backward_active_depth = 0

    def step(self, optimizer: Optimizer, clip: Clipper | None, closure: Closure | None = None) -> StepResult:
        engine = self._engines[optimizer]
        norm = clip(optimizer) if clip is not None else None
        engine.step()
        return StepResult(norm, bool(engine.optimizer.overflow))

    def clip_gradients(
        self, optimizer: Optimizer, norm: float | None, value: float | None, scale: float = 1.0
    ) -> Tensor | None:
        zero = self._engines[optimizer].optimizer
        if self.stage == 2:
            # What the step will do first: cut this rank's share out of the gradients, as views, so clipping them lasts.
            kept = dict(zero.all_grad_tensors)
            zero.finalize_gradient_accumulation_boundary()
            zero.all_grad_tensors = kept
        mine = [gradient for group in zero.averaged_gradients.values() for gradient in group]
        for gradient in mine:
            gradient.mul_(scale)
            if value is not None:
                gradient.clamp_(-value, value)
        if norm is None:
            return None
        total = torch.stack([gradient.norm() for gradient in mine]).square().sum()
        dist.all_reduce(total)
        total.sqrt_()
        for gradient in mine:
            gradient.mul_((norm / (total + 1e-6)).clamp(max=1.0))
        return total

    def before_evaluation(self, modules: Iterable[nn.Module]) -> None:
        broadcast_tensors(buffer for module in modules for buffer in module.buffers())

    # -- state: a rank's share of a parameter is one range, which lies somewhere in a flat fp32 master ----------------

    def model_pieces(self, module: nn.Module) -> list[Piece]:
        shares = {p: share for engine in self._engines.values() for p, *share in self._shares(engine.optimizer)}
        pieces = []
        for name, value in module.state_dict(keep_vars=True).items():
            if value not in shares and hasattr(value, "ds_tensor"):  # not trained: no fp32 master, its partition counts
                start = min(value.ds_tensor.numel() * self.rank, value.ds_numel)
                share = value.ds_tensor.detach()[: min(value.ds_tensor.numel(), value.ds_numel - start)]
                pieces.append(Piece(clean_name(name), tuple(value.ds_shape), start, share, self.rank))
                continue
            if value not in shares:
                pieces.append(self.piece(clean_name(name), value, None if isinstance(value, nn.Parameter) else 0))
                continue
            flat, offset, start, numel, shape = shares[value]
            pieces.append(Piece(clean_name(name), shape, start, flat.detach().narrow(0, offset, numel), self.rank))
        return pieces

    def optimizer_pieces(self, optimizer: Optimizer, names: Mapping[Tensor, str]) -> list[Piece]:
        pieces = []
        for parameter, flat, offset, start, numel, shape in self._shares(self._engines[optimizer].optimizer):
            for key, value in optimizer.state.get(flat, {}).items():
                if value.shape == flat.shape and key != "step":
                    share = Piece(f"{names[parameter]}/{key}", shape, start, value.narrow(0, offset, numel), self.rank)
                else:
                    share = self.piece(f"{names[parameter]}/{key}", value, None)
                pieces.append(share)
        return pieces

    def allocate_optimizer_state(
        self, optimizer: Optimizer, names: Mapping[Tensor, str], entries: Mapping[str, TensorEntry]
    ) -> None:
        zero = self._engines[optimizer].optimizer
        zero._hp_optimizer_states_linked = False
        optimizer.state.clear()
        by_name: dict[str, dict[str, TensorEntry]] = {}
        for name, entry in entries.items():
            parameter_name, key = name.rsplit("/", 1)
            by_name.setdefault(parameter_name, {})[key] = entry
        for parameter, flat, *_, shape in self._shares(zero):
            for key, entry in by_name.get(names[parameter], {}).items():
                like_parameter = tuple(entry.shape) == shape and key != "step"
                state = torch.zeros_like(flat, dtype=entry.dtype) if like_parameter else torch.zeros(entry.shape)
                optimizer.state[flat].setdefault(key, state)

    def after_load(
        self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], state: Mapping[str, Any]
    ) -> None:
        trained = {p for engine in self._engines.values() for p, *_ in self._shares(engine.optimizer)}
        for parameter in (p for module in modules for p in module.parameters() if hasattr(p, "ds_tensor")):
            if parameter not in trained and parameter.ds_status.name == "AVAILABLE":
                parameter.partition(has_been_updated=False)
                parameter.all_gather()
        for engine in self._engines.values():
            zero = engine.optimizer
            if self.stage == 2:
                zero.update_lp_params()
                continue
            zero._partition_all_parameters()
            for group in range(len(zero.fp16_groups)):
                zero._reassign_or_swap_out_partitioned_parameters(group)
            if zero.persistent_parameters:
                zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def _shares(self, zero: Any) -> Iterator[tuple[nn.Parameter, Tensor, int, int, int, tuple[int, ...]]]:
        """Yield (parameter, flat master, offset in it, start in the parameter, numel, shape of the parameter)."""
        groups, flats = (
            (zero.bit16_groups, zero.single_partition_of_fp32_groups)
            if self.stage == 2
            else (zero.fp16_groups, zero.fp32_partitioned_groups_flat)
        )
        for group, flat in zip(groups, flats, strict=True):
            for parameter in group:
                if self.stage == 2:
                    mapping = parameter._hp_mapping
                    if mapping is None:
                        yield parameter, flat, 0, 0, 0, tuple(parameter.shape)
                        continue
                    mine, there = mapping.lp_fragment_address, mapping.hp_fragment_address
                    yield parameter, flat, there.start, mine.start, mine.numel, tuple(parameter.shape)
                else:
                    _, offset, padded = zero.grad_position[zero.get_param_id(parameter)]
                    start = min(padded * self.rank, parameter.ds_numel)
                    numel = min(padded, parameter.ds_numel - start)
                    yield parameter, flat, offset, start, numel, tuple(parameter.ds_shape)

    def close(self) -> None:
        for engine in {id(engine): engine for engines in self._parts.values() for engine in engines}.values():
            engine.destroy()
        self._engines.clear()
        self._parts.clear()


def _nested(part: nn.Module, step: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: part(step)


def _owned(module: nn.Module, own: set[Tensor]) -> Iterator[nn.Module]:
    """Yield the largest submodules all of whose parameters are of `own`."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    if parameters and own.issuperset(parameters):
        yield module
    else:
        for child in module.children():
            yield from _owned(child, own)
