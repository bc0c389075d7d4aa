"""Step probe: whether an optimizer steps shards of the parameters as it steps whole ones.

torch's optimizers are known. Others are tried: one copy steps small whole tensors, others step shards of these, and the results
are compared. The parameters themselves are not touched.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from trainwright.data.seeding import isolate_rng
from trainwright.distributed import collectives
from trainwright.distributed.failures import summarize

KNOWN = (SGD, Adam, Adagrad, NAdam, RAdam, Adamax, ASGD, Rprop, RMSprop, Adadelta)  # AdamW is an Adam
"""torch's optimizers that step each element independently."""
KNOWN_OF_DEEPSPEED = ("FusedAdam", "DeepSpeedCPUAdam", "FusedLion", "DeepSpeedCPULion", "DeepSpeedCPUAdagrad")
STEPS = 8
TOLERANCE = 1e-4
"""The largest accepted difference between the results, relative to the distance moved."""
LARGEST = {0: 1, 1: 4096, 2: 128}
"""The largest size per dimension, by number of dimensions (optimizers may step small tensors differently)."""

Groups = Sequence[Sequence[Tensor]]


class Untried(Exception):
    """An optimizer that cannot be tried, even on whole tensors."""


def refuse_uneven_steps(optimizer: Optimizer, device: torch.device, strategy: str, *, flat: bool) -> None:
    """Raise ValueError for an optimizer that steps a rank's shard of the parameters differently than all of them.

    A shard consists of `flat` pieces of each group's parameters, or else of some whole parameters.
    """
    if steps_elements(optimizer):
        return
    name = type(optimizer).__name__
    shard = "flat pieces of parameters" if flat else "some of the parameters"
    instead = (
        f"Choose strategy='ddp'{', or ddp_sharded, which keeps tensors whole' if flat else ''}, or another optimizer."
    )
    try:
        distance = _distance(optimizer, device, flat)
    except Untried as error:
        if not flat:
            return  # it will step whole tensors, as usual
        closure = [*inspect.signature(type(optimizer).step).parameters.values()][1:2]
        if any(each.name == "closure" and each.default is inspect.Parameter.empty for each in closure):
            raise ValueError(
                f"{name} computes the loss in its step, which strategy={strategy!r} does not let it. {instead}"
            ) from None
        raise ValueError(
            f"{name} cannot be tried on small tensors ({error}), so it is not known whether it steps {shard} as all of them, "
            f"and strategy={strategy!r} gives each rank no more. {instead}"
        ) from error
    except Exception as error:
        raise ValueError(
            f"{name} cannot step {shard} ({type(error).__name__}: {error}), and strategy={strategy!r} gives each rank no more. "
            f"{instead}"
        ) from error
    if not distance <= TOLERANCE:
        raise ValueError(
            f"{name} steps an element by others too, and strategy={strategy!r} gives each rank {shard} alone: the weights "
            f"would not be those of one process. {instead}"
        )


def refuse_sharded_steps(optimizer: Optimizer, mesh: DeviceMesh) -> None:
    """Raise ValueError for an optimizer that steps DTensors sharded by rows differently than whole tensors. Collective."""
    if steps_elements(optimizer):
        return
    distance, reason = 0.0, ""  # some take the local shard for the whole, as float(gradient.sum()) does
    try:
        distance = _distance_of_rows(optimizer, mesh)
    except Untried:  # its first step will show
        pass
    except Exception as error:
        distance, reason = math.inf, f" ({summarize(error)})"
    found = collectives.gather_object([distance if math.isfinite(distance) else None, reason])
    if any(each is None or each > TOLERANCE for each, _ in found):
        raise ValueError(no_shards(optimizer, next((f" as on whole ones{each}" for _, each in found if each), "")))


def no_shards(optimizer: Optimizer, reason: str = "") -> str:
    return (
        f"{type(optimizer).__name__} does not compute on the sharded parameters (DTensors) that strategy='fsdp' "
        f"gives it{reason}. Use another optimizer, such as AdamW, or strategy='ddp' or 'ddp_sharded', where a parameter is "
        "stepped whole."
    )


def steps_elements(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to step each element independently, or inherits such a step."""
    own = type(optimizer)
    if own.__module__.startswith("deepspeed.ops.") and own.__name__ in KNOWN_OF_DEEPSPEED:
        return True
    return any(
        all(
            inspect.unwrap(getattr(own, name)) is inspect.unwrap(getattr(kind, name))
            for name in ("step", "_init_group")
            if hasattr(kind, name)
        )
        for kind in KNOWN
        if isinstance(optimizer, kind)
    )


def _distance(optimizer: Optimizer, device: torch.device, flat: bool) -> float:
    """Return how far two ranks' shards end up from whole tensors."""
    try:
        return _tried(optimizer, device, flat, torch.float64)
    except Exception:  # float32 kernels
        return _tried(optimizer, device, flat, torch.float32)


def _tried(optimizer: Optimizer, device: torch.device, flat: bool, dtype: torch.dtype) -> float:
    starts, gradients = _drawn(optimizer, device, dtype)
    with set_apart():
        whole = _stepped_whole(optimizer, starts, gradients)
        shards = [
            _stepped(
                optimizer,
                [_shard(group, rank, flat) for group in starts],
                [[_shard(group, rank, flat) for group in step] for step in gradients],
                one_by_one=flat,
            )
            for rank in (0, 1)
        ]
    return _relative(
        triple
        for rank in (0, 1)
        for before, after, found in zip(starts, whole, shards[rank], strict=True)
        for triple in zip(_shard(before, rank, flat), _shard(after, rank, flat), found, strict=True)
    )


def _distance_of_rows(optimizer: Optimizer, mesh: DeviceMesh) -> float:
    """Return how far this rank's rows of DTensors end up from those of whole tensors."""
    from torch.distributed.tensor import DTensor, Shard

    def rows(tensor: Tensor) -> Tensor:
        return tensor.chunk(mesh.size())[dist.get_rank()] if tensor.dim() else tensor

    def sharded(group: Sequence[Tensor]) -> list[Tensor]:
        # Every rank has drawn the same, so nothing is sent.
        return [
            DTensor.from_local(rows(each).clone(), mesh, [Shard(0)], run_check=False) if each.dim() else each
            for each in group
        ]

    starts, gradients = _drawn(optimizer, torch.device(mesh.device_type), None, mesh.size())
    with set_apart():
        whole = _stepped_whole(optimizer, starts, gradients)
        parts = _stepped(optimizer, list(map(sharded, starts)), [list(map(sharded, step)) for step in gradients])
    return _relative(
        (rows(before), rows(after), part.to_local() if isinstance(part, DTensor) else part)
        for groups in zip(starts, whole, parts, strict=True)
        for before, after, part in zip(*groups, strict=True)
    )


def _relative(triples: Iterable[tuple[Tensor, Tensor, Tensor]]) -> float:
    """Return the largest difference of (start, expected, found), relative to the distance moved."""
    moved = distance = 0.0
    for start, expected, found in triples:
        moved = max(moved, float((expected - start).abs().max()))
        distance = max(distance, float((expected - found).abs().max()))
    return distance / moved if moved else distance


def _drawn(
    optimizer: Optimizer, device: torch.device, dtype: torch.dtype | None, ranks: int = 1
) -> tuple[Groups, Sequence[Groups]]:
    """Draw start values and gradients, with equal numbers of rows for each rank, so that all ranks fail or none."""
    generator = torch.Generator().manual_seed(0)
    shapes = [
        [(-(-shape[0] // ranks) * ranks, *shape[1:]) if shape else shape for shape in _shapes_of(group)]
        for group in optimizer.param_groups
    ]

    def draw() -> Groups:
        return [[torch.randn(each, generator=generator, dtype=dtype).to(device) for each in group] for group in shapes]

    return draw(), [[[each * 0.1 for each in group] for group in draw()] for _ in range(STEPS)]


def _shapes_of(group: dict[str, Any]) -> list[tuple[int, ...]]:
    """Return two reduced copies of the group's largest shape for each number of dimensions."""
    largest: dict[int, tuple[int, ...]] = {}
    for parameter in group["params"]:
        shape = tuple(int(size) for size in getattr(parameter, "ds_shape", parameter.shape))
        if parameter.requires_grad and math.prod(shape) >= math.prod(largest.get(len(shape), (0,))):
            largest[len(shape)] = shape
    small = [tuple(min(size, LARGEST.get(len(shape), 12)) for size in shape) for shape in largest.values()]
    return [shape for shape in small if math.prod(shape) for _ in range(2)]


def _shard(tensors: Sequence[Tensor], rank: int, flat: bool) -> list[Tensor]:
    """Return one of two ranks' shard of a group: every second tensor, or a range of all of them flattened."""
    if not flat:
        return list(tensors[rank::2])
    size = sum(each.numel() for each in tensors)
    start, stop = ((0, size - size // 3), (size - size // 3, size))[rank]
    pieces, offset = [], 0
    for each in tensors:
        piece = each.reshape(-1)[max(start - offset, 0) : max(stop - offset, 0)]
        pieces += [piece] if piece.numel() else []
        offset += each.numel()
    return pieces


def _stepped_whole(optimizer: Optimizer, starts: Groups, gradients: Sequence[Groups]) -> Groups:
    """Return whole tensors after a copy's steps, or raise Untried if it cannot be copied or its steps move nothing."""
    try:
        whole = _stepped(optimizer, starts, gradients)
    except Exception as error:
        raise Untried(f"{type(error).__name__}: {error}") from error
    pairs = [pair for groups in zip(starts, whole, strict=True) for pair in zip(*groups, strict=True)]
    if any(starts) and all(torch.equal(before, after) for before, after in pairs):
        raise Untried("its steps move nothing")
    return whole


def _stepped(optimizer: Optimizer, starts: Groups, gradients: Sequence[Groups], one_by_one: bool = False) -> Groups:
    """Return each group's tensors after the steps of a copy of the optimizer; `one_by_one` steps a group at a time."""
    tensors = [[nn.Parameter(each.clone()) for each in group] for group in starts]
    twin = twin_of(optimizer, tensors)
    groups = twin.param_groups
    every = list(groups)
    for step in gradients:
        for group, mine in zip(tensors, step, strict=True):
            for tensor, gradient in zip(group, mine, strict=True):
                tensor.grad = gradient.clone()
        for chosen in [[group] for group in every if group["params"]] if one_by_one else [every]:
            groups[:] = chosen
            type(twin).step(twin)
        groups[:] = every
    return [[tensor.detach() for tensor in group] for group in tensors]


@contextmanager
def set_apart() -> Iterator[None]:
    """Isolate the steps of copies: restore all generators, and disable torch's global step hooks."""
    kept: list[Any] = [(hooks, dict(hooks)) for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)]
    with isolate_rng(), torch.compiler.set_stance("force_eager"):
        try:
            for hooks, _ in kept:
                hooks.clear()
            yield
        finally:
            for hooks, held in kept:
                hooks.update(held)


def twin_of(optimizer: Optimizer, tensors: Sequence[Sequence[nn.Parameter]]) -> Optimizer:
    """Return a copy of an optimizer over other tensors, without copying large objects or parameters."""
    memo: dict[int, Any] = {}
    for group, own in zip(optimizer.param_groups, tensors, strict=True):
        for parameter in group["params"]:
            memo[id(parameter)] = own[0] if own else nn.Parameter(torch.zeros(()))
    twin = _copied(optimizer, memo)
    for group, own, theirs in zip(twin.param_groups, tensors, optimizer.param_groups, strict=True):
        for made in [p for p in theirs["params"] if optimizer.state.get(p)][:1]:  # some create state in the constructor
            for tensor in own:
                twin.state[tensor] = {
                    key: _state_like(value, made, tensor) for key, value in optimizer.state[made].items()
                }
        group["params"] = list(own)
        if isinstance(group.get("lr"), (float, int)):
            group["lr"] = 0.01  # a warm-up starts at 0
        elif isinstance(group.get("lr"), Tensor):
            group["lr"] = torch.full_like(group["lr"], 0.01)
    begin: Any = getattr(twin, "train", None)
    if callable(begin):
        begin()  # a schedule-free optimizer only steps in training mode
    return twin


def _state_like(value: Any, parameter: Tensor, tensor: Tensor) -> Any:
    """Return a parameter's state as that of another tensor."""
    if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
        first = float(value.detach().reshape(-1)[0]) if value.numel() else 0.0
        return torch.full_like(tensor, first, requires_grad=False)
    return copy.deepcopy(value)


def _copied(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    # Not copy.deepcopy, which drops an Optimizer's own attributes and copies its state and hooks.
    kept = dict(vars(optimizer))
    kept.pop("step", None)  # a scheduler's wrapper, bound to the original
    twin: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = twin
    for name, value in kept.items():
        if isinstance(value, Optimizer) and id(value) not in memo:
            _copied(value, memo)
        elif isinstance(value, OrderedDict) and name.endswith("_hooks"):
            memo[id(value)] = OrderedDict()
    if "state" in kept:
        memo[id(kept["state"])] = defaultdict(dict)
    vars(twin).update(copy.deepcopy(kept, memo))
    return twin
