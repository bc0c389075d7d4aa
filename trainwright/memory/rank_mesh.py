"""Rank mesh: the memory and the traffic of fsdp on a mesh of replicas and shards, or of data and tensor ranks."""

from __future__ import annotations

import copy
import re
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.errors import did_you_mean
from trainwright.memory.memory_estimate import estimate_memory
from trainwright.strategies.fsdp2.wrap_policy import choose_groups
from trainwright.strategies.memory_plan import ALONE, FULLY_SHARDED, DeviceBytes

__all__ = ["RankMesh"]

MESHES = (("replicate", "shard"), ("data", "tensor"))
ACCEPTED = "pass replicate=R,shard=S (replicas of groups of shards), or data=D,tensor=T (layers that T ranks divide)"


class RankMesh(NamedTuple):
    """The numbers of ranks along the axes of a mesh."""

    replicas: int
    shards: int
    """The ranks that divide the parameters, gradients and optimizer state of a replica."""
    tensor: int
    """The ranks that divide the matrices of layers."""
    text: str

    @classmethod
    def parse(cls, text: str) -> RankMesh:
        """Return the mesh of a text such as "replicate=32,shard=8"; ValueError for another form or other axes."""
        parts = [re.fullmatch(r"\s*(\w+)\s*=\s*0*([1-9]\d*)\s*", part) for part in text.split(",")]
        sizes = {part[1]: int(part[2]) for part in parts if part is not None}
        known = [name for names in MESHES for name in names]
        for name in sizes:
            if name not in known:
                raise ValueError(f"--mesh {text}: {name!r} is not an axis; {ACCEPTED}.{did_you_mean(name, known)}")
        if None in parts or len(sizes) != len(parts) or set(sizes) not in map(set, MESHES):
            raise ValueError(f"--mesh {text}: {ACCEPTED}, with integers of at least 1.")
        shards = sizes.get("shard") or sizes["data"]
        return cls(sizes.get("replicate", 1), shards, sizes.get("tensor", 1), text.replace(" ", ""))

    @property
    def num_ranks(self) -> int:
        """Return the product of the axes."""
        return self.replicas * self.shards * self.tensor

    def on_rank(self, module: nn.Module, optimizer: type[Optimizer]) -> DeviceBytes:
        """Return the bytes on one rank under fsdp.

        With tensor ranks the matrices of Linear and Embedding layers count as divided, and sent activations are not counted.
        """
        module = copy.deepcopy(module)
        groups = set(choose_groups(module, None))  # fsdp chooses them by whole sizes
        _divide(module, self.tensor)
        policy = (lambda part: part in groups) if groups else None
        parts = estimate_memory(module, optimizer, self.shards, 1, policy).parts
        held = parts[ALONE if self.shards == 1 else FULLY_SHARDED]
        return held._replace(sent=held.sent + 2 * held.gradients * (self.replicas - 1) // self.replicas)


def _divide(module: nn.Module, count: int) -> None:
    """Keep one of `count` ranks' rows in the matrices of Linear and Embedding layers, in place."""
    divided: set[Tensor] = set()  # tied ones once
    for layer in module.modules():
        if isinstance(layer, (nn.Linear, nn.Embedding)) and layer.weight not in divided:
            divided.add(layer.weight)
            shape = (-(-layer.weight.shape[0] // count), *layer.weight.shape[1:])
            layer.weight.data = torch.empty(shape, dtype=layer.weight.dtype, device=layer.weight.device)
