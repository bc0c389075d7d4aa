"""Tensor parallelism: the layers that a group of neighbouring ranks computes together, and their parts in checkpoints.

Shoeybi et al., 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism". torch's parallel
styles do the work. FSDP shards every rank's part over the data dimension of the mesh.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from trainwright.checkpoint.tensors import Piece
from trainwright.checkpoint.vendor import tree_leaves
from trainwright.errors import did_you_mean
from trainwright.strategies.fsdp2 import vendor
from trainwright.strategies.fsdp2.wrap_policy import WHOLE
from trainwright.tensor_names import clean_name

DATA, TENSOR = "data", "tensor"
"""The dimensions of a mesh with tensor parallelism."""
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gathered": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "sequence": SequenceParallel,
    "head_norm": partial(SequenceParallel, sequence_dim=2, use_local_output=True),
    "loss_parallel": partial(ColwiseParallel, output_layouts=Shard(-1), use_local_output=False),
}
TRANSFORMERS = {
    "colwise_gather_output": "colwise_gathered",
    "colwise_rep": "colwise_gathered",
    "replicated_with_grad_allreduce": "head_norm",
}
"""Styles by their names in the plans of transformers."""
TensorPlan = Mapping[str, str | ParallelStyle]
"""A style by the name of a submodule, in which `*` matches one part of the name."""
SIZES = {
    (ColwiseParallel, nn.Linear): "out_features",
    (ColwiseParallel, nn.Embedding): "embedding_dim",
    (RowwiseParallel, nn.Linear): "in_features",
    (RowwiseParallel, nn.Embedding): "num_embeddings",
}
"""The size that a style divides over the tensor group, by the style and the layer."""
NUMBER = r"\b\d+\b"
HINT = (
    "Under tensor parallelism a rank has a share of the features and heads. Let view infer the number of heads, such as "
    "x.view(batch, length, -1, head_size). A colwise output goes into a rowwise layer, a head is colwise_gathered or "
    "loss_parallel, and 'sequence' needs activations that are divided along the sequence."
)
"""A note for errors of a forward."""


def check_plan(plan: object, mesh: Mapping[str, int] | None) -> None:
    """Raise ValueError or TypeError for a plan whose styles are unknown, or without a mesh for it."""
    if mesh is None or TENSOR not in mesh:
        raise ValueError('tensor_plan= needs a mesh with a tensor dimension; pass mesh={"data": 2, "tensor": 2}.')
    if not isinstance(plan, Mapping):
        raise TypeError(f"tensor_plan={plan!r} is not accepted; pass a dict such as {{'blocks.*.up': 'colwise'}}.")
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle) and style not in STYLES and style not in TRANSFORMERS:
            raise ValueError(
                f"tensor_plan[{pattern!r}]={style!r} is unknown; choose from {', '.join(STYLES)}, or pass a ParallelStyle of "
                f"torch.distributed.tensor.parallel.{did_you_mean(str(style), STYLES)}"
            )


def match_plan(module: nn.Module, plan: TensorPlan, num_ranks: int) -> dict[nn.Module, ParallelStyle]:
    """Return the style of every submodule that a plan names.

    Raises:
        ValueError: a pattern without a submodule, two for one, a tied parameter, or a layer that cannot be divided.
    """
    names = {clean_name(name): each for name, each in module.named_modules() if name}
    styles: dict[nn.Module, ParallelStyle] = {}
    for pattern, style in plan.items():
        matches = [name for name in names if _matches(name, pattern)]
        if not matches:
            raise ValueError(
                f"tensor_plan[{pattern!r}] matches no submodule of {type(module).__name__}. Use the names of named_modules(), "
                f"in which * matches one part.{did_you_mean(pattern, {re.sub(NUMBER, '*', name) for name in names})}"
            )
        for name in matches:
            if names[name] in styles:
                raise ValueError(
                    f"tensor_plan names {name!r} twice, the second time by {pattern!r}. Remove one of them."
                )
            styles[names[name]] = _style(name, names[name], style, num_ranks)
    _refuse_shared({"the module itself": module, **names}, styles)
    return styles


def _refuse_shared(names: Mapping[str, nn.Module], layers: Collection[nn.Module]) -> None:
    """Raise ValueError for a layer whose weight another layer uses too, or a parent without calling the layer."""
    uncalled = {each: owner for owner in names.values() if isinstance(owner, WHOLE) for each in owner.modules()}
    users: dict[Tensor, list[str]] = {}
    for name, each in names.items():
        for parameter in each.parameters(recurse=False):
            users.setdefault(parameter, []).append(name)
        if each in layers and each in uncalled:
            raise ValueError(
                f"tensor_plan divides {name!r}, whose weight a {type(uncalled[each]).__name__} uses without calling the "
                "layer. Write the block with nn.Linear layers and F.scaled_dot_product_attention."
            )
    for tied in users.values():
        if len(tied) > 1 and any(names[name] in layers for name in tied):
            raise ValueError(
                f"tensor_plan divides a parameter that {' and '.join(map(repr, tied))} have in common. A divided parameter "
                "cannot be tied: remove these layers from the plan, or untie them."
            )


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _style(name: str, layer: nn.Module, style: str | ParallelStyle, num_ranks: int) -> ParallelStyle:
    """Return a style for a layer (ValueError if the style does not divide it)."""
    if style == "rowwise" and isinstance(layer, nn.Embedding):
        made: ParallelStyle = RowwiseParallel(input_layouts=Replicate())
    else:
        made = STYLES[TRANSFORMERS.get(style, style)]() if isinstance(style, str) else style
    if isinstance(made, ColwiseParallel | RowwiseParallel):
        sizes = [size for kinds, size in SIZES.items() if isinstance(made, kinds[0]) and isinstance(layer, kinds[1])]
        if not sizes:
            raise ValueError(
                f"tensor_plan divides {name!r}, a {type(layer).__name__}. Only nn.Linear and nn.Embedding can be divided. Name "
                "the layers within it, or pass another ParallelStyle."
            )
        if getattr(layer, sizes[0]) % num_ranks:
            raise ValueError(
                f"tensor_plan divides {name!r} over {num_ranks} ranks, and its {sizes[0]}={getattr(layer, sizes[0])} is not a "
                f"multiple of {num_ranks}. Change the size, or remove the layer from the plan."
            )
    return made


def is_divided(value: object) -> bool:
    """Return whether a parameter is divided over the tensor group only, so that FSDP has not sharded or has gathered it."""
    return isinstance(value, DTensor) and value.device_mesh.mesh_dim_names == (TENSOR,)


def _is_planned(value: object) -> bool:
    return isinstance(value, DTensor) and TENSOR in (value.device_mesh.mesh_dim_names or ())


def is_shard(value: object) -> bool:
    """Return whether a parameter is a shard of FSDP's."""
    return isinstance(value, DTensor) and not is_divided(value)


def whole_of(value: DTensor) -> Tensor:
    """Return the whole value of a DTensor. Collective."""
    # One dimension of the mesh at a time, because torch warns where it cannot merge the collectives of several.
    for index in range(value.device_mesh.ndim - 1):
        rest = value.placements[index + 1 :]
        value = value.redistribute(placements=[*[Replicate()] * (index + 1), *rest])
    return value.full_tensor()


class TensorGroup:
    """The ranks that compute one replica's layers together, and the styles of the layers that are not divided yet.

    `mesh` has the dimensions "data" and "tensor", of which a tensor group has neighbouring ranks.
    """

    def __init__(self, mesh: DeviceMesh, plan: TensorPlan) -> None:
        vendor.flatten(mesh)
        self.mesh, self._plan = mesh, plan
        self.num_ranks = mesh[TENSOR].size()
        self._index = mesh[TENSOR].get_local_rank()
        self._styles: dict[nn.Module, ParallelStyle] = {}
        self._steps = self._calls = 0
        self._is_in_loss = False
        self._rows: list[tuple[DTensor, DTensor]] = []
        """Tensors that are divided by columns, with the rows that a checkpoint stores of them."""

    def plan(self, module: nn.Module) -> set[nn.Module]:
        """Match the plan with a module, and return the submodules that are divided (ValueError if none is)."""
        self._styles = match_plan(module, self._plan, self.num_ranks)
        divided = set[nn.Module]()
        for each in module.modules():
            for name, parameter in each.named_parameters(recurse=False):
                if is_divided(parameter):
                    if parameter.is_meta:
                        raise ValueError(
                            f"{type(module).__name__}.configure_model parallelized layers on the meta device, which have no "
                            "values. Pass FSDPStrategy(tensor_plan=...) instead, which divides them once they have."
                        )
                    divided.add(each)
                    # A new one, because torch cannot move a DTensor with weak references.
                    setattr(each, name, nn.Parameter(parameter.detach(), parameter.requires_grad))
        if not divided and not self._styles and self.num_ranks > 1:
            raise ValueError(
                f"the mesh has tensor={self.num_ranks}, but no layer of {type(module).__name__} is divided. Pass "
                "FSDPStrategy(tensor_plan={'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}), or call "
                "parallelize_module(layer, self.device_mesh['tensor'], ...) in configure_model."
            )
        return divided | self._styles.keys()

    def divide(self, group: nn.Module) -> None:
        """Divide the layers of a group, whose values are equal on every rank. Collective.

        Layers that the module has divided get the values of the first data rank.
        """
        for parameter in group.parameters():
            if is_divided(parameter):
                dist.broadcast(_local(parameter.detach()), group=self.mesh[DATA].get_group(), group_src=0)
        for each in list(group.modules()):
            if (style := self._styles.pop(each, None)) is not None:
                parallelize_module(each, self.mesh[TENSOR], style)

    @contextmanager
    def loss_context(self) -> Iterator[None]:
        """Let cross_entropy compute on divided logits within the context, which may be nested."""
        if self._is_in_loss:  # a manual backward
            yield
            return
        context = loss_parallel()
        context.__enter__()
        self._is_in_loss = True
        try:
            yield
        finally:
            self._is_in_loss = False
            with suppress(KeyError):  # the step has used loss_parallel() itself
                context.__exit__(None, None, None)

    def compare_inputs(self, inputs: Any) -> None:
        """Compare the inputs of the group's ranks in calls 1, 2, 4, 8 and so on. Collective.

        Raises:
            RuntimeError: they differ, because the ranks have built different data.
        """
        self._calls += 1
        if self._calls & (self._calls - 1):
            return
        tensors = [leaf.detach() for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and not leaf.is_complex()]
        sums = [tensor.sum(dtype=torch.float32).to(self.mesh.device_type) for tensor in tensors]
        number = torch.tensor(float(sum(map(Tensor.numel, tensors))), device=self.mesh.device_type)
        most, least = self._extremes(torch.stack([number, sum(sums, number)]))
        if (most > least).any().item():  # False for NaN. NOTE: waits for the device
            raise RuntimeError(
                "the ranks of a tensor group got different batches, but they compute one model on one batch. Build the same "
                "data on all ranks: call tw.seed_everything() before random data is made, and do not divide the data by rank."
            )

    def _extremes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest and the smallest values of the group's ranks. Collective."""
        most, least = values.clone(), values.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.mesh[TENSOR].get_group())
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.mesh[TENSOR].get_group())
        return most, least

    def compare_gradients(self, modules: Iterable[nn.Module]) -> None:
        """Compare the gradients of undivided parameters over the group, in steps 1, 2, 4, 8 and so on. Collective.

        Raises:
            RuntimeError: they differ, because a parameter is used on a part of the sequence without being in the plan.
        """
        self._steps += 1
        if self._steps & (self._steps - 1):
            return
        named = [
            (clean_name(name), parameter.grad)
            for module in modules
            for name, parameter in module.named_parameters()
            if parameter.grad is not None and not _is_planned(parameter)
        ]
        if not named:
            return
        # Gradients of offloaded shards are in host memory.
        norms = [torch.linalg.vector_norm(_local(gradient)).to(self.mesh.device_type) for _, gradient in named]
        most, least = self._extremes(torch.stack(norms))
        differs = (most - least > 0.05 * most) & (most > 1e-4 * most.max())  # rounding differs less
        for (name, _), is_different in zip(named, differs.tolist(), strict=True):  # NOTE: waits for the device
            if is_different:
                raise RuntimeError(
                    f"the ranks of a tensor group have different gradients of {name!r}, which is not divided. Its module "
                    "computes on divided activations, so that every rank has only a part of the gradient. Give the module a "
                    "style in tensor_plan: 'sequence' for a norm on a divided sequence, 'head_norm' for one on queries or keys "
                    "of shape (batch, length, heads, size)."
                )

    def piece(self, name: str, value: DTensor, rank: int) -> Piece:
        """Return this rank's part of a tensor for a checkpoint. Collective if the tensor is divided by columns."""
        writer = rank - self._index
        if _is_planned(value) and not value.placements[-1].is_replicate():
            writer = rank
            if value.placements[-1] != Shard(0):
                with torch.no_grad():
                    columns, value = value, value.redistribute(placements=[Shard(0)] * value.device_mesh.ndim)
                self._rows.append((columns, value))
        return piece_of(name, value, writer)

    def write_back(self) -> None:
        """Write the rows that `piece` has returned back into their tensors. Collective."""
        with torch.no_grad():
            for columns, rows in self._rows:
                columns.to_local().copy_(rows.redistribute(placements=columns.placements).to_local())
        self._rows.clear()

    def forget_rows(self) -> None:
        """Free the rows that `piece` has returned, which are stale after a step."""
        self._rows.clear()


def _local(value: Tensor) -> Tensor:
    local: Tensor = value.to_local() if isinstance(value, DTensor) else value
    return local


def piece_of(name: str, value: DTensor, writer: int) -> Piece:
    """Return the range of rows that this rank has of a tensor."""
    local: Tensor = value.detach().to_local()  # type: ignore[attr-defined]
    # NOTE: indexing a DTensor communicates, and would hang if ranks hold unequal shards.
    start = vendor.first_row(value) * math.prod(value.shape[1:]) if local.numel() else 0
    return Piece(name, tuple(value.shape), start, local.view(-1), writer)
