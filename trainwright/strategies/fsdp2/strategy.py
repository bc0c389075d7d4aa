"""FSDP: parameters, gradients and optimizer state sharded over the ranks (torch FSDP2, `fully_shard`).

Zhao et al., 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainwright.arguments import check_flags
from trainwright.checkpoint.tensors import Piece
from trainwright.checkpoint.vendor import tree_map
from trainwright.distributed.collectives import Exchange, gather_object
from trainwright.distributed.connection import make_mesh
from trainwright.duration import seconds_of
from trainwright.precision.base import Closure, Precision, Sender
from trainwright.rank_zero import rank_zero_warn
from trainwright.strategies.base import Capabilities, Clipping, Optimization, StepResult, Strategy, scale_and_clip_value
from trainwright.strategies.divided_optimizers import UNSHARDED, no_shards, refuse_undivided, with_gradients
from trainwright.strategies.fsdp2 import vendor
from trainwright.strategies.fsdp2.sharded_access import DIVIDED, USED, by_kind, failing, note_use_in_hook, split_groups
from trainwright.strategies.fsdp2.sharding import ModuleSharding, ShardingOptions, low_policy
from trainwright.strategies.fsdp2.tensor_plan import (
    DATA,
    TENSOR,
    TensorGroup,
    TensorPlan,
    check_plan,
    is_divided,
    is_shard,
    piece_of,
    whole_of,
)
from trainwright.strategies.fsdp2.wrap_policy import MIN_PARAMETERS, ROOT, WrapPolicy, check_policy
from trainwright.strategies.mesh_axes import check_mesh, replicas_of
from trainwright.strategies.module_checks import refuse_sparse_weights, refuse_unshardable
from trainwright.strategies.replaced_options import OF_FSDP, refuse_options, reshards
from trainwright.strategies.replication import DeferredAllReduce
from trainwright.strategies.used_parameters import BackwardGuard, RanksUse


class FSDPStrategy(Strategy):
    """Fully sharded data parallelism, on one process too.

    A group of parameters is gathered for its module's call and resharded after it. The root's group stays gathered until the
    end of backward. A step may call the module, its submodules and their public methods, but cannot use the bare parameters of
    a submodule that is a group. Optimizers cannot call closures. Ranks that use different parameters in a step are an error, at
    the latest before the next save (of shards offloaded from a GPU only in the first batch of a window). After a forward or
    backward that failed no step is possible.

    Under mixed precision the weights of linear layers, convolutions and attention are gathered in the low precision, all
    others in float32, and gradients are reduced in float32.

    Args:
        auto_wrap_policy: which submodules are groups: classes, or a function from a module to a bool. By default these are the
            blocks with at least `min_parameters` parameters.
        min_parameters: see auto_wrap_policy.
        reshard_after_forward: free a group after its forward and gather it again for backward. False saves the second
            gathering and costs memory.
        cpu_offload: keep shards in host memory, and step there (a bool, or torch's CPUOffload).
        activation_checkpointing_policy: modules whose activations are recomputed in backward: True for all groups, or as
            auto_wrap_policy.
        mixed_precision: torch's MixedPrecisionPolicy in place of the precision's, for all layers except batch norms.
        sync_every_batch: reduce gradients after every batch of an accumulation window and keep only shards. False reduces
            once a window and keeps whole gradients until then.
        sharding_strategy: "FULL_SHARD", or "SHARD_GRAD_OP" for reshard_after_forward=False.
        num_replicas: the number of groups of neighbouring ranks that each hold the whole model in shards (hybrid sharding). A
            parameter is gathered within its group, such as a node. Gradients are summed over the groups once a window.
        mesh: the sizes {"data": 4, "tensor": 2} for tensor parallelism. Two neighbouring ranks compute the divided layers
            together, on one batch. Their parts are sharded over four data ranks. {"replicate": 2, "shard": 4} has two replicas.
        tensor_plan: the style of the divided layers by the names of submodules, such as {"blocks.*.up": "colwise"}. A style is
            "colwise", "colwise_gathered", "rowwise", "sequence", "head_norm", "loss_parallel" or torch's ParallelStyle. Instead
            `configure_model` may call torch's parallelize_module with `self.device_mesh["tensor"]`.
        timeout: seconds (or a timedelta) that a rank waits for the others, by default half an hour.
        elementwise: accept optimizers that are not known to step every element independently.

    Raises:
        ValueError, TypeError: an option that is not accepted.

    >>> strategy = tw.FSDPStrategy(auto_wrap_policy={nn.Linear}, activation_checkpointing_policy={nn.Linear})
    >>> trainer = tw.Trainer(strategy=strategy, devices=2, max_epochs=1, enable_model_summary=False)
    >>> trainer.fit(module, loader)
    """

    name = "fsdp"
    capabilities = Capabilities(
        is_parallel=True,
        needs_group=True,
        forward_is_collective=True,
        holds_modules=False,
        trains_prepared_only=True,
        takes_closure=False,
        distributed_type="FSDP",
    )

    def __init__(
        self,
        *,
        auto_wrap_policy: WrapPolicy | None = None,
        min_parameters: int = MIN_PARAMETERS,
        reshard_after_forward: bool = True,
        cpu_offload: bool | CPUOffload = False,
        activation_checkpointing_policy: bool | WrapPolicy | None = None,
        mixed_precision: MixedPrecisionPolicy | None = None,
        sync_every_batch: bool = True,
        sharding_strategy: str | None = None,
        timeout: float | timedelta | None = None,
        elementwise: bool = False,
        num_replicas: int = 1,
        mesh: Mapping[str, int] | None = None,
        tensor_plan: TensorPlan | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        check_flags(elementwise=elementwise)
        refuse_options(FSDPStrategy, unknown, OF_FSDP)
        self.timeout_seconds = seconds_of(timeout)
        if isinstance(min_parameters, bool) or not isinstance(min_parameters, int) or min_parameters < 0:
            raise ValueError(f"min_parameters={min_parameters!r} is not accepted; pass an integer of at least 0.")
        num_replicas = replicas_of(mesh, num_replicas)
        if tensor_plan is not None:
            check_plan(tensor_plan, mesh)
        self.mesh = dict(mesh) if mesh is not None else None
        has_tensor = mesh is not None and TENSOR in mesh
        self.capabilities = replace(self.capabilities, pieces_are_collective=has_tensor, takes_compile=not has_tensor)
        self.num_replicas, self.tensor_plan = num_replicas, tensor_plan or {}
        check_policy("auto_wrap_policy", auto_wrap_policy)
        check_policy("activation_checkpointing_policy", activation_checkpointing_policy)
        if not isinstance(mixed_precision, MixedPrecisionPolicy | None):
            raise TypeError(
                f"mixed_precision={mixed_precision!r} is not accepted; pass a "
                "torch.distributed.fsdp.MixedPrecisionPolicy, or leave it out: the Trainer's precision= decides."
            )
        # A bool, or torch's CPUOffload, which contains one.
        self.cpu_offload = bool(getattr(cpu_offload, "offload_params", cpu_offload))
        self.options = ShardingOptions(
            auto_wrap_policy=auto_wrap_policy,
            min_parameters=min_parameters,
            reshard_after_forward=reshards(sharding_strategy, reshard_after_forward),
            is_offloaded=self.cpu_offload,
            activation_checkpointing_policy=activation_checkpointing_policy,
            mixed_precision=mixed_precision,
        )
        self.capabilities = replace(self.capabilities, communicates_on_host=self.cpu_offload)
        self.activation_checkpointing_policy = activation_checkpointing_policy
        self.sync_every_batch, self.elementwise = sync_every_batch, elementwise
        self._deferred = DeferredAllReduce()
        self._automatic = True
        self._use, self._guard = RanksUse(self.name), BackwardGuard(self.name)
        self._tensor: TensorGroup | None = None

    def connect(self, rank: int, world_size: int, device: torch.device, precision: Precision) -> None:
        super().connect(rank, world_size, device, precision)
        if self.mesh is not None and TENSOR in self.mesh:
            sizes = {name: self.mesh[name] for name in (DATA, TENSOR)}
            self.device_mesh = make_mesh(device.type, sizes)
            self._tensor = TensorGroup(self.device_mesh, self.tensor_plan)
            self.data_rank, self.num_data_ranks = rank // sizes[TENSOR], sizes[DATA]
            self.data_group = self.device_mesh[DATA].get_group()

    def check_module(self, module: nn.Module, optimization: Optimization | None) -> None:
        refuse_unshardable(module, self.name, optimization, self.world_size > 1)
        if ROOT not in module.__dict__:
            vendor.refuse_hooks(module)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, UNSHARDED):
            raise ValueError(no_shards(optimizer))
        refuse_undivided(optimizer, self.name, self.elementwise)

    def setup_module(self, module: nn.Module, optimization: Optimization | None) -> None:
        self.check_module(module, optimization)
        self._automatic = optimization is None or optimization.automatic
        if ROOT in module.__dict__:
            module.__dict__[ROOT].refuse_failed()
            self._refuse_other_precision(module)
        else:
            self._shard(module)
        self.wrapped[module] = module.__dict__[ROOT]
        self.refresh_trainable([module])

    def _shard(self, module: nn.Module) -> None:
        if any(map(is_shard, module.parameters())) or (
            self._tensor is None and any(map(is_divided, module.parameters()))
        ):
            raise ValueError(
                f"{type(module).__name__} holds parameters that torch's fully_shard has sharded. Leave the sharding to the "
                "strategy, or create the module again."
            )
        ModuleSharding(self.options, self._make_mesh(), self.device, self.precision, self._tensor).shard(module)

    def _make_mesh(self) -> DeviceMesh:
        """Return the mesh of shards, after a dimension of replicas if there are several. Collective."""
        if self.device_mesh is not None:
            return self.device_mesh[DATA]
        sizes = {"shard": self.world_size // self.num_replicas}
        return make_mesh(
            self.device.type, {"replicate": self.num_replicas, **sizes} if self.num_replicas > 1 else sizes
        )

    def _refuse_other_precision(self, module: nn.Module) -> None:
        """Raise ValueError for a module that an earlier run has sharded for another low precision."""
        gathered = module.__dict__[ROOT].dtype
        if gathered not in (None, low_policy(self.options, self.precision).param_dtype):
            raise ValueError(
                f"fsdp gathers the weights of {type(module).__name__} in {str(gathered).removeprefix('torch.')}, as an earlier "
                f"run has sharded it, and this one is in {self.precision.name}. Continue in that run's precision, take the "
                "whole copy that tw.gather_module(module, all_ranks=True) returns, or create the module again and load a "
                "checkpoint."
            )

    def refresh_trainable(self, modules: Sequence[nn.Module], in_step: bool = False) -> None:
        """Adopt parameters that were created after sharding: whole on every rank, averaged before a step.

        Within a step optimizers hold the shards, while the rest of the step uses the gathered parameters.
        """
        if in_step:
            if any(root.depth > 0 for root in self.wrapped.values()):
                self._gather_roots()
            return
        for module in modules:
            vendor.follow_unfrozen(self.wrapped[module])
            self._deferred.adopt(module)
            self._use.track(module)
            self.buffers.track(module)
            refuse_sparse_weights(module, self.name, True)  # an embedding may have been unfrozen

    def setup_optimizers(
        self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], optimization: Optimization
    ) -> list[Optimizer]:
        for optimizer in optimizers:
            self.check_optimizer(optimizer)
        self.refresh_trainable(modules)  # configure_optimizers may have created some
        return list(optimizers)

    def check(self, device_type: str, num_processes: int, precision: Precision) -> None:
        if self.mesh is not None:
            check_mesh(self.mesh, num_processes)
        if num_processes % self.num_replicas or 1 < num_processes == self.num_replicas:
            fitting = [str(count) for count in range(1, num_processes) if num_processes % count == 0]
            if self.mesh is not None:
                raise ValueError(
                    f"mesh={self.mesh!r} has a shard of 1, so that nothing is sharded. Pass at least 2, or choose "
                    "strategy='ddp', where every process holds the whole model."
                )
            raise ValueError(
                f"num_replicas={self.num_replicas} does not divide {num_processes} processes into groups of several. Pass "
                f"{' or '.join(fitting) or 1}, or choose strategy='ddp', where every process holds the whole model."
            )
        if self.cpu_offload and device_type == "cpu":
            rank_zero_warn(
                "cpu_offload moves what is sharded from a GPU to the host, and this run computes on the CPU: nothing is moved.",
                stacklevel=4,
            )

    def run(self, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        root: Any = self.wrapped[module]
        self.buffers.begin_step(module)
        if self._tensor is not None:
            self._tensor.forget_rows()
            self._tensor.compare_inputs((args, kwargs))
        self._guard.watch(self._automatic and self.ends_window and self.world_size > 1).begin(name)
        with self.precision.forward_context() or nullcontext(), self._failing([root]):
            outputs = root(name, *args, **kwargs)
            if self._tensor is not None:
                outputs = tree_map(lambda leaf: whole_of(leaf) if isinstance(leaf, DTensor) else leaf, outputs)
        if not (self._automatic and torch.is_grad_enabled()):
            root.reshard()  # no backward will do it, and hooks must freeze the shards, not the gathered parameters
            if self.cpu_offload and self.device.type != "cpu":
                # NOTE: waits for the device, which has to have copied the offloaded shards. They may be written next.
                torch.accelerator.synchronize(self.device)
        return outputs

    def backward(self, loss: Tensor, send: Sender | None = None, **options: Any) -> None:
        self._refuse_unusable()
        if isinstance(loss, DTensor):  # such as an L2 penalty over parameters()
            raise RuntimeError(USED)
        # FSDP hooks the outputs of the root's forward, but a manual backward runs inside that forward: without these hooks
        # the root's group would never be reduced.
        for root in () if self._automatic else self.wrapped.values():
            vendor.gather_for_backward(root, loss)
        with self._guard.backward(self._use.has_come), self._failing(self.wrapped.values()):
            super().backward(loss, send, **options)
        if self.world_size > 1:
            self._use.note_gradients()
        if not self._automatic:
            self._gather_roots()

    def sync_gradients(self, enabled: bool) -> None:
        super().sync_gradients(enabled)
        for root in self.wrapped.values():
            if not self.sync_every_batch:
                root.set_requires_gradient_sync(enabled)
            elif self.num_replicas > 1:
                root.set_requires_all_reduce(enabled)

    def _finalize(self, optimizer: Optimizer) -> None:
        if self._tensor is not None:
            self._tensor.compare_gradients(self.wrapped)
        self._deferred.reduce(optimizer, self.wrapped, self.name)
        self.precision.unscale(optimizer, lambda found: dist.all_reduce(found, op=dist.ReduceOp.MAX))

    def step(
        self, optimizer: Optimizer, clipping: Clipping | None = None, closure: Closure | None = None
    ) -> StepResult:
        self._refuse_unusable()
        self.finalize(optimizer)
        try:
            is_mixed = any(len(by_kind(group["params"])) > 1 for group in optimizer.param_groups)
            with split_groups(optimizer) if is_mixed else nullcontext():
                result = super().step(optimizer, clipping, closure)
        except (RuntimeError, NotImplementedError) as error:
            if "DTensor" in str(error) or "placement" in str(error):
                raise RuntimeError(no_shards(optimizer)) from error
            raise
        if not self._automatic:
            self._gather_roots()
        return result

    def check_gradients(self, exchange: Exchange = gather_object) -> None:
        self._use.compare(exchange)

    def clip_gradients(self, optimizer: Optimizer, clipping: Clipping) -> Tensor | None:
        self.finalize(optimizer)
        kinds = by_kind(with_gradients(optimizer))
        for kind in kinds:
            scale_and_clip_value(kind, clipping)
        if clipping.norm is None:
            return None
        # Gradients of offloaded shards are in host memory.
        norms = [torch.nn.utils.get_total_norm([p.grad for p in kind]) for kind in kinds]
        norms = [(whole_of(each) if isinstance(each, DTensor) else each).to(self.device) for each in norms]
        total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=self.device)
        for kind in kinds:
            torch.nn.utils.clip_grads_with_norm_(kind, clipping.norm, total)
        return total

    def model_pieces(self, module: nn.Module) -> list[Piece]:
        self._reshard_roots()
        return super().model_pieces(module)

    def _piece(self, name: str, value: Tensor, writer: int | None) -> Piece:
        if not isinstance(value, DTensor):
            return super()._piece(name, value, writer)
        if self._tensor is not None:
            return self._tensor.piece(name, value, self.rank)
        return piece_of(name, value, self.rank % (self.world_size // self.num_replicas))  # the first replica writes

    def refresh_weights(self, modules: Sequence[nn.Module], loaded: Mapping[str, Any] | None = None) -> None:
        self._reshard_roots()
        if self._tensor is not None:
            self._tensor.write_back()

    def after_run(self, error: BaseException | None = None) -> None:
        if error is not None:
            note_use_in_hook(error)

    def close(self) -> None:
        self._reshard_roots()
        super().close()
        self._deferred.clear()
        self._use, self._guard = self._use.renewed(), BackwardGuard(self.name)

    @contextmanager
    def _failing(self, roots: Iterable[Any]) -> Iterator[None]:
        """Return the context of a forward or backward, in which cross_entropy may compute on divided logits."""
        loss_context = nullcontext() if self._tensor is None else self._tensor.loss_context()
        with failing(roots, USED if self._tensor is None else DIVIDED), loss_context:
            yield

    def _reshard_roots(self) -> None:
        """Turn the roots' parameters into shards again, which the optimizers hold."""
        for root in self.wrapped.values():
            root.reshard()

    def _gather_roots(self) -> None:
        """Gather the roots' current parameters for the rest of a manual step."""
        for root in self.wrapped.values():
            root.reshard()
            root.unshard()
            root.writes.record()

    def _refuse_unusable(self) -> None:
        for root in self.wrapped.values():
            root.refuse_failed()
            root.writes.check()
