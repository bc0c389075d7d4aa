"""Mesh axes: the dimensions along which processes divide a model, and the reasons why others are rejected."""

from __future__ import annotations

import math
from collections.abc import Mapping

from trainwright.errors import a_type_of, did_you_mean

__all__ = ["check_mesh", "reject_unsupported_axes", "reject_unsupported_parallelism", "replicas_of"]

AXES = (("replicate", "shard"), ("data", "tensor"))
"""The pairs of axes that a mesh can have."""
OTHER_NAMES = {"dp": "data", "tp": "tensor", "dp_replicate": "replicate", "dp_shard": "shard"}
ELSEWHERE = "torchtitan (https://github.com/pytorch/torchtitan) has it. Here strategy='fsdp' shards a large model"
REASONS = {
    "context": "torch's kernels for attention over a divided sequence need a GPU of NVIDIA",
    "expert": "the layers of a model would have to send tokens to the processes of their experts",
    "pipeline": "a schedule of micro-batches would replace training_step",
}
"""The kinds of parallelism that are not supported, with the reason."""
ABBREVIATIONS = {"cp": "context", "ep": "expert", "pp": "pipeline"}
TENSOR = 'pass FSDPStrategy(mesh={"data": 2, "tensor": 2}, tensor_plan={...}), with the numbers of processes'
HYBRID = "pass FSDPStrategy(num_replicas=2), with the number of nodes"
STRATEGIES_OF_OPTIONS = {
    **dict.fromkeys(("tensor_parallel", "tensor", "tp", "model_parallel", "sequence_parallel", "megatron"), TENSOR),
    **dict.fromkeys(("hsdp", "hybrid_shard", "hybrid_sharding"), HYBRID),
    "shard_grad_op": "pass FSDPStrategy(reshard_after_forward=False)",
}
"""Names of strategies that are options of fsdp, with the advice."""


def reject_unsupported_parallelism(strategy: str) -> None:
    """Raise ValueError for the name of a parallelism that is not a strategy here, with the reason or the option."""
    if (advice := STRATEGIES_OF_OPTIONS.get(strategy.lower())) is not None:
        raise ValueError(f"strategy={strategy!r} is an option of fsdp: {advice}.")
    if (reason := _reason(strategy.partition("_")[0])) is not None:
        raise ValueError(f"strategy={strategy!r} is not supported, because {reason}. {ELSEWHERE}.")


def reject_unsupported_axes(mesh: Mapping[str, int]) -> None:
    """Raise an error unless a mesh has a supported pair of axes with sizes of at least 1.

    Raises:
        TypeError: it is not a mapping.
        ValueError: an axis is unsupported, unknown or missing, or its size is not an integer of at least 1.
    """
    pairs = " or ".join(f"{{{first!r}: 2, {second!r}: 2}}" for first, second in AXES)
    if not isinstance(mesh, Mapping):
        raise TypeError(f"mesh={mesh!r} is {a_type_of(mesh)}; pass a dict of axes and sizes: {pairs}.")
    names = [name for pair in AXES for name in pair]
    for name, size in mesh.items():
        if (reason := _reason(name)) is not None:
            raise ValueError(f"mesh={mesh!r}: the axis {name!r} is not supported, because {reason}. {ELSEWHERE}.")
        if name not in names:
            hint = f" Did you mean {OTHER_NAMES[name]!r}?" if name in OTHER_NAMES else did_you_mean(name, names)
            raise ValueError(f"mesh={mesh!r}: the axis {name!r} is unknown; choose from {', '.join(names)}.{hint}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"mesh={mesh!r}: {name}={size!r} is not accepted; pass an integer of at least 1.")
    if not any(set(mesh) == set(pair) for pair in AXES):
        raise ValueError(f"mesh={mesh!r} has not the axes of one pair. Pass {pairs}. A size can be 1.")


def replicas_of(mesh: Mapping[str, int] | None, num_replicas: int) -> int:
    """Return the number of replicas of a mesh, or without one the argument. An error as of `reject_unsupported_axes`."""
    if isinstance(num_replicas, bool) or not isinstance(num_replicas, int) or num_replicas < 1:
        raise ValueError(f"num_replicas={num_replicas!r} is not accepted; pass an integer of at least 1.")
    if mesh is None:
        return num_replicas
    reject_unsupported_axes(mesh)
    if num_replicas > 1:
        raise ValueError(f"num_replicas={num_replicas} does not go with mesh={mesh!r}. Pass only the mesh.")
    return mesh.get("replicate", 1)


def check_mesh(mesh: Mapping[str, int], world_size: int) -> None:
    """Raise an error unless a mesh is supported and has as many places as the job has processes."""
    reject_unsupported_axes(mesh)
    if (places := math.prod(mesh.values())) != world_size:
        product = " * ".join(map(str, mesh.values()))
        raise ValueError(
            f"mesh={mesh!r} is for {places} processes ({product}), but the job has {world_size}. Pass sizes whose product "
            f"is {world_size}, or start {places} processes."
        )


def _reason(name: str) -> str | None:
    return REASONS.get(ABBREVIATIONS.get(name, name))
