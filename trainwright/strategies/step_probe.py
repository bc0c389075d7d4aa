"""Step probe: whether an optimizer steps shards of the parameters as it steps all of them.

torch's optimizers are known. Others are tried: one copy steps small tensors, two copies step a shard of them each, as two ranks
would, and the results are compared. The parameters themselves are not touched.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from trainwright.data.seeding import isolate_rng

KNOWN = (SGD, Adam, Adagrad, NAdam, RAdam, Adamax, ASGD, Rprop, RMSprop, Adadelta)  # AdamW is an Adam
"""torch's optimizers that step each element independently."""
KNOWN_OF_DEEPSPEED = ("FusedAdam", "DeepSpeedCPUAdam", "FusedLion", "DeepSpeedCPULion", "DeepSpeedCPUAdagrad")
STEPS = 8
TOLERANCE = 1e-4
"""The largest difference between the two, relative to the distance moved."""
LARGEST = {0: 1, 1: 4096, 2: 128}
"""The largest size per dimension, by number of dimensions (optimizers may step small tensors differently)."""


class Untried(Exception):
    """An optimizer that cannot be tried, even on whole tensors."""


def refuse_uneven_steps(optimizer: Optimizer, device: torch.device, strategy: str, *, flat: bool) -> None:
    """Raise ValueError for an optimizer that steps a rank's shard of the parameters differently than all of them.

    Args:
        optimizer: the user's, which is not changed.
        device: where it will step.
        strategy: the strategy that shards the parameters.
        flat: whether a shard is flat pieces of each group's parameters, or some whole parameters.
    """
    if steps_elements(optimizer):
        return
    name = type(optimizer).__name__
    share = "flat pieces of parameters" if flat else "some of the parameters"
    instead = (
        f"Choose strategy='ddp'{', or ddp_sharded, which keeps tensors whole' if flat else ''}, or another optimizer."
    )
    try:
        distance = _distance(optimizer, device, flat)
    except Untried as error:
        if not flat:
            return  # it will step whole tensors, as usual
        if _needs_closure(optimizer):
            raise ValueError(
                f"{name} computes the loss in its step, which strategy={strategy!r} does not let it. {instead}"
            ) from None
        raise ValueError(
            f"{name} cannot be tried on small tensors ({error}), so it is not known whether it steps {share} as all of them, "
            f"and strategy={strategy!r} gives each rank no more. {instead}"
        ) from error
    except Exception as error:
        raise ValueError(
            f"{name} cannot step {share} ({type(error).__name__}: {error}), and strategy={strategy!r} gives each rank no more. "
            f"{instead}"
        ) from error
    if not distance <= TOLERANCE:
        raise ValueError(
            f"{name} steps an element by others too, and strategy={strategy!r} gives each rank {share} alone: the weights "
            f"would not be those of one process. {instead}"
        )


def steps_elements(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to step each element independently, or inherits such a step."""
    if type(optimizer).__module__.startswith("deepspeed.ops.") and type(optimizer).__name__ in KNOWN_OF_DEEPSPEED:
        return True
    for kind in KNOWN:
        names = ("step", "_init_group") if hasattr(kind, "_init_group") else ("step",)
        own = type(optimizer)
        if isinstance(optimizer, kind) and all(
            inspect.unwrap(getattr(own, name)) is inspect.unwrap(getattr(kind, name)) for name in names
        ):
            return True
    return False


def _needs_closure(optimizer: Optimizer) -> bool:
    first = next(iter(list(inspect.signature(type(optimizer).step).parameters.values())[1:]), None)
    return first is not None and first.name == "closure" and first.default is inspect.Parameter.empty


def _distance(optimizer: Optimizer, device: torch.device, flat: bool) -> float:
    """Return how far shards end up from whole tensors, relative to the distance moved."""
    try:
        return _tried(optimizer, device, flat, torch.float64)
    except Exception:  # float32 kernels
        return _tried(optimizer, device, flat, torch.float32)


def _tried(optimizer: Optimizer, device: torch.device, flat: bool, dtype: torch.dtype) -> float:
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=generator, dtype=dtype).to(device)

    starts = [[drawn(shape) for shape in shapes_of(group)] for group in optimizer.param_groups]
    gradients = [[[drawn(each.shape) * 0.1 for each in group] for group in starts] for _ in range(STEPS)]
    with set_apart():
        whole = stepped_whole(optimizer, starts, gradients)
        shares = [
            stepped(
                optimizer,
                [_share(group, rank, flat) for group in starts],
                [[_share(group, rank, flat) for group in step] for step in gradients],
                one_by_one=flat,
            )
            for rank in (0, 1)
        ]
    moved = distance = 0.0
    for number, before in enumerate(starts):
        for rank in (0, 1):
            expected, begun = _share(whole[number], rank, flat), _share(before, rank, flat)
            for found, after, start in zip(shares[rank][number], expected, begun, strict=True):
                moved = max(moved, float((after - start).abs().max()))
                distance = max(distance, float((after - found).abs().max()))
    return distance / moved if moved else 0.0


def shapes_of(group: dict[str, Any]) -> list[tuple[int, ...]]:
    """Return two reduced copies of the group's largest shape for each number of dimensions."""
    largest: dict[int, tuple[int, ...]] = {}
    for parameter in group["params"]:
        shape = tuple(int(size) for size in getattr(parameter, "ds_shape", parameter.shape))
        if parameter.requires_grad and math.prod(shape) >= math.prod(largest.get(len(shape), (0,))):
            largest[len(shape)] = shape
    small = [tuple(min(size, LARGEST.get(len(shape), 12)) for size in shape) for shape in largest.values()]
    return [shape for shape in small if math.prod(shape) for _ in range(2)]


def _share(tensors: Sequence[Tensor], rank: int, flat: bool) -> list[Tensor]:
    """Return one of two ranks' shard of a group: every second tensor, or a range of all of them flattened."""
    if not flat:
        return list(tensors[rank::2])
    size = sum(each.numel() for each in tensors)
    start, stop = ((0, size - size // 3), (size - size // 3, size))[rank]
    pieces, place = [], 0
    for each in tensors:
        first, last = max(start - place, 0), min(stop - place, each.numel())
        if first < last:
            pieces.append(each.reshape(-1)[first:last])
        place += each.numel()
    return pieces


def stepped_whole(
    optimizer: Optimizer, starts: Sequence[Sequence[Tensor]], gradients: Sequence[Sequence[Sequence[Tensor]]]
) -> list[list[Tensor]]:
    """Return whole tensors after the steps of a copy of the optimizer.

    Raises:
        Untried: it cannot be copied, or its steps fail or move nothing.
    """
    try:
        whole = stepped(optimizer, starts, gradients)
    except Exception as error:
        raise Untried(f"{type(error).__name__}: {error}") from error
    if any(starts) and all(
        torch.equal(before, after)
        for group, left in zip(starts, whole, strict=True)
        for before, after in zip(group, left, strict=True)
    ):
        raise Untried("its steps move nothing")
    return whole


def stepped(
    optimizer: Optimizer,
    starts: Sequence[Sequence[Tensor]],
    gradients: Sequence[Sequence[Sequence[Tensor]]],
    one_by_one: bool = False,
) -> list[list[Tensor]]:
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
    kept: list[tuple[Any, Any]] = [
        (hooks, dict(hooks)) for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    ]
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
                twin.state[tensor] = {key: _alike(value, made, tensor) for key, value in optimizer.state[made].items()}
        group["params"] = list(own)
        if isinstance(group.get("lr"), (float, int)):
            group["lr"] = 0.01  # a warm-up starts at 0
        elif isinstance(group.get("lr"), Tensor):
            group["lr"] = torch.full_like(group["lr"], 0.01)
    begin: Any = getattr(twin, "train", None)
    if callable(begin):
        begin()  # a schedule-free optimizer only steps in training mode
    return twin


def _alike(value: Any, parameter: Tensor, tensor: Tensor) -> Any:
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
