"""The bytes of one rank of a mesh, and of saved activations, by torch's simulated ranks and tensors, as read in torch 2.13."""

from __future__ import annotations

import copy
import re
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainwright.data.transfer import map_leaves
from trainwright.memory.memory_estimate import estimate_memory
from trainwright.precision.base import Precision
from trainwright.strategies.fsdp2.tensor_plan import DATA, TENSOR, TensorGroup, TensorPlan, check_plan
from trainwright.strategies.fsdp2.wrap_policy import WHOLE, choose_groups
from trainwright.strategies.memory_plan import ALONE, FULLY_SHARDED, DeviceBytes
from trainwright.strategies.mesh_axes import reject_unsupported_axes

__all__ = ["RankMesh", "saved_bytes"]


def saved_bytes(
    module: nn.Module,
    batch: object,
    precision: Precision,
    calls_forward: bool = False,
    group: TensorGroup | None = None,
) -> int:
    """Return the bytes of the tensors that one step saves for backward, without parameters and buffers.

    The tensors have shapes but no values, as on the CPU, so nothing is allocated or computed. A step that reads values
    raises an error of torch.

    Args:
        module: a module, also on the meta device, in the dtype of the precision.
        batch: tensors, of which only shapes and dtypes count.
        precision: its autocast applies.
        calls_forward: call the forward even if the module has a training_step. A dict has its keyword arguments, a list or
            a tuple its arguments.
        group: a tensor group, of which one rank's bytes are counted.
    """
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
        warnings.simplefilter("ignore")  # such as self.log's, without a trainer
        attributes = [value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor)]
        memo: dict[int, object] = {
            id(each): _fake(each) for each in (*module.parameters(), *module.buffers(), *attributes)
        }
        fake = copy.deepcopy(module, memo).train()
        if group is not None:
            group.plan(fake)
            group.divide(fake)
        batch = precision.convert_batch(map_leaves(_fake, batch))
        saved: list[weakref.ref[Tensor]] = []

        def record(tensor: Tensor) -> Tensor:
            saved.append(weakref.ref(tensor))
            return tensor

        loss_context = nullcontext() if group is None else group.loss_context()
        saving = torch.autograd.graph.saved_tensors_hooks(record, _same)
        with precision.forward_context() or nullcontext(), loss_context, saving:
            output = _call(fake, batch, calls_forward)  # keeps the graph alive
        own = {id(_storage(tensor)) for tensor in chain(fake.parameters(), fake.buffers())}
        storages = [_storage(tensor) for tensor in (ref() for ref in saved) if tensor is not None]
        size = sum(storage.nbytes() for key, storage in {id(each): each for each in storages}.items() if key not in own)
        del output
        return size


def _call(module: nn.Module, batch: object, calls_forward: bool) -> object:
    step = getattr(module, "training_step", None)
    if callable(step) and not calls_forward:
        return step(batch, 0)
    if isinstance(batch, dict):
        return module(**batch)
    return module(*batch) if isinstance(batch, (list, tuple)) else module(batch)


def _fake(leaf: object) -> object:
    if not isinstance(leaf, Tensor):
        return leaf
    fake = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
    return nn.Parameter(fake, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else fake


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


def _same(tensor: Tensor) -> Tensor:
    return tensor


class RankMesh(NamedTuple):
    """The numbers of ranks along the axes of a mesh."""

    replicas: int
    shards: int
    """The ranks that divide the parameters, gradients and optimizer state of a replica."""
    tensor: int
    """The ranks that divide the matrices of layers."""
    text: str
    plan: TensorPlan | None = None
    """The layers that tensor ranks divide, or None for all Linear and Embedding layers."""

    @classmethod
    def parse(cls, text: str, plan: TensorPlan | None = None) -> RankMesh:
        """Return the mesh of a text such as "replicate=32,shard=8" (ValueError for another form or other axes).

        The plan is for meshes with tensor ranks only.
        """
        parts = [re.fullmatch(r"\s*(\w+)\s*=\s*0*([1-9]\d*)\s*", part) for part in text.split(",")]
        sizes = {part[1]: int(part[2]) for part in parts if part is not None}
        if None in parts or len(sizes) != len(parts):
            raise ValueError(
                f"--mesh {text} is not a mesh; pass replicate=R,shard=S (replicas of groups of shards), or data=D,tensor=T "
                "(layers that T ranks divide), with integers of at least 1."
            )
        reject_unsupported_axes(sizes)
        shards = sizes.get("shard") or sizes["data"]
        plan = plan if TENSOR in sizes else None
        if plan is not None:
            check_plan(plan, sizes)
        return cls(sizes.get("replicate", 1), shards, sizes.get(TENSOR, 1), text.replace(" ", ""), plan)

    @property
    def num_ranks(self) -> int:
        """Return the product of the axes."""
        return self.replicas * self.shards * self.tensor

    @contextmanager
    def tensor_group(self) -> Iterator[TensorGroup | None]:
        """Return the context of a simulated tensor group, whose collectives do nothing, or of None without a plan."""
        if self.plan is None:
            yield None
            return
        dist.init_process_group("fake", rank=0, world_size=self.num_ranks)
        try:
            mesh = init_device_mesh("cpu", (self.shards, self.tensor), mesh_dim_names=(DATA, TENSOR))
            yield TensorGroup(mesh, self.plan)
        finally:
            dist.destroy_process_group()

    def on_rank(self, module: nn.Module, optimizer: type[Optimizer]) -> DeviceBytes:
        """Return the bytes on one rank under fsdp, without the activations that tensor ranks send (ValueError for the plan)."""
        module = copy.deepcopy(module)
        groups = set(choose_groups(module, None))  # fsdp chooses them by whole sizes
        with self.tensor_group() as group:
            if group is None:
                _divide(module, self.tensor)
            else:
                _divide_by_plan(module, group)
        policy = (lambda part: part in groups) if groups else None
        parts = estimate_memory(module, optimizer, self.shards, 1, policy).parts
        held = parts[ALONE if self.shards == 1 else FULLY_SHARDED]
        return held._replace(sent=held.sent + 2 * held.gradients * (self.replicas - 1) // self.replicas)


def _divide(module: nn.Module, count: int) -> None:
    """Keep one of `count` ranks' rows in the matrices of Linear and Embedding layers, in place."""
    uncalled = {layer for owner in module.modules() if isinstance(owner, WHOLE) for layer in owner.modules()}
    divided: set[Tensor] = set()  # tied ones once
    for layer in module.modules():
        if layer in uncalled or not isinstance(layer, (nn.Linear, nn.Embedding)):
            continue
        if layer.weight not in divided:
            divided.add(layer.weight)
            shape = (-(-layer.weight.shape[0] // count), *layer.weight.shape[1:])
            layer.weight.data = torch.empty(shape, dtype=layer.weight.dtype, device=layer.weight.device)


def _divide_by_plan(module: nn.Module, group: TensorGroup) -> None:
    group.plan(module)
    group.divide(module)
    for layer in module.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                setattr(layer, name, nn.Parameter(parameter.to_local().detach(), parameter.requires_grad))
