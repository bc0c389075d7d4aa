"""Sharded access: FSDP's root around a sharded module, which calls gather its parameters, and errors for other uses.

FSDP2 gathers a group's parameters for its module's forward. This file does the same for its other public methods, and for
calls of the whole module outside a step. Anywhere else a step cannot use a group's parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.optim import Optimizer

from trainwright.checkpoint.vendor import tree_leaves, tree_map
from trainwright.strategies.base import StepForward
from trainwright.strategies.fsdp2.tensor_plan import HINT, is_shard
from trainwright.strategies.fsdp2.vendor import WriteCheck, without_view
from trainwright.strategies.fsdp2.wrap_policy import ROOT
from trainwright.strategies.used_parameters import failed_before

MIXED = ("mixed torch.Tensor and DTensor", "inputs with different meshes")
"""Texts of torch's errors for an operation on a sharded parameter."""
SHARDED = (
    *MIXED,
    "not supported for tensor subclasses",
    "sharding strategy registered",
    "storage that is not resizable",
)
"""Texts of errors about sharded parameters. The last one means that an array of numpy() keeps a parameter's memory."""
USED = (
    "the step used a parameter itself, but under fsdp a rank holds only a part of it, except while its module is called. Call "
    "the module, or a method of it that uses the parameter. For a penalty on weights use the optimizer's weight_decay. Or keep "
    "that module whole: FSDPStrategy(auto_wrap_policy=...) without it."
)
DIVIDED = (
    "the step used a divided tensor together with a whole one. A layer with the style 'loss_parallel', or with "
    "use_local_output=False, returns a DTensor, which only F.cross_entropy and other divided layers take: use its "
    "full_tensor() elsewhere. A parameter can only be used by calling its module."
)
"""The same under tensor parallelism."""


def without_views(module: nn.Module, args: Any, output: Any) -> Any:
    """Clone views among a group's outputs: an in-place write would detach FSDP's hook, and lose gradients."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return output
    return tree_map(lambda leaf: without_view(leaf) if isinstance(leaf, Tensor) else leaf, output)


def refuse_second_order(name: str, group: nn.Module, args: Any, output: Any) -> None:
    """Make backwards with `create_graph=True` through this group fail, as a forward hook of the group.

    FSDP reduces a group's gradients once its inputs have theirs. A second backward's gradients would be lost.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    for each in tree_leaves(output):
        if isinstance(each, Tensor) and each.requires_grad:
            each.register_hook(partial(_refuse_graph, name))  # type: ignore[no-untyped-call]


def _refuse_graph(name: str, gradient: Tensor) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"a backward with create_graph=True went through {name!r}, which fsdp has sharded as a separate group. Its "
            "gradients of a second backward would be lost. For a penalty on gradients keep that module out of the groups, by "
            "FSDPStrategy(auto_wrap_policy=...) or a larger min_parameters=, or choose 'ddp', 'ddp_sharded' or "
            "'deepspeed_stage_2'."
        )


class Root(StepForward):
    """FSDP's root: its forward runs a step of the module.

    Parameters are gathered in `dtype`, or in theirs for None. `groups` are the submodules that are gathered separately.
    """

    depth = 0
    """Positive while a step runs."""
    is_called_alone = False
    """Whether the module is called outside a step."""
    has_failed = False
    """Whether a forward or backward has failed, so that FSDP is still in the middle of it."""
    writes: WriteCheck

    def __init__(self, module: nn.Module, dtype: torch.dtype | None, groups: Sequence[nn.Module]) -> None:
        super().__init__(module)
        self.dtype = dtype
        self.groups = tuple(groups)

    def forward(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        self.refuse_failed()
        self.depth += 1
        self.writes.record()
        try:
            output = super().forward(name, *args, **kwargs)
            self.writes.check()
            return output
        finally:
            self.depth -= 1

    def begin_call(self) -> None:
        """Gather the root's group for a call of the module outside a step. Collective."""
        self.refuse_failed()
        self.depth, self.is_called_alone = 1, True
        self.unshard()  # type: ignore[operator] # which fully_shard adds

    def end_call(self) -> None:
        self.depth, self.is_called_alone = 0, False
        self.reshard()  # type: ignore[operator]

    def fail(self) -> None:
        """Record that a forward or backward has failed, and keep only shards, which a checkpoint stores. Sends nothing."""
        self.has_failed = True
        self.set_reshard_after_forward(True)  # type: ignore[operator] # otherwise the root stays gathered
        for group in self.modules():
            if isinstance(group, FSDPModule):
                group.reshard()

    def refuse_failed(self) -> None:
        """Raise RuntimeError if an earlier forward or backward has failed: FSDP would reduce nothing any more."""
        if self.has_failed:
            raise failed_before("fsdp")


@contextmanager
def failing(roots: Iterable[Any], explanation: str = USED) -> Iterator[None]:
    """Record a failed forward or backward within the context, and explain the use of a shard."""
    try:
        yield
    except BaseException as error:
        for root in roots:
            root.fail()
        if any(text in str(error) for text in MIXED):
            raise RuntimeError(explanation) from error
        may_be_shape = isinstance(error, RuntimeError | IndexError | ValueError)
        if explanation is DIVIDED and may_be_shape and not isinstance(error, torch.OutOfMemoryError):
            error.add_note(HINT)
        raise


def unshard_for_call(module: nn.Module, args: Any) -> None:
    """Gather parameters for a call outside a step, such as after a fit, as a forward pre-hook. Collective."""
    root: Root | None = module.__dict__.get(ROOT)
    if root is None or root.depth > 0:
        return
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{type(module).__name__} is sharded by fsdp, and was called outside of a step with gradients, which would not be "
            "reduced. Call it under torch.no_grad() on every rank, train it by a Trainer or an Accelerator, or take the "
            "whole copy that tw.gather_module(module) returns."
        )
    root.begin_call()


def reshard_after_call(module: nn.Module, args: Any, output: Any) -> None:
    root: Root | None = module.__dict__.get(ROOT)
    if root is not None and root.is_called_alone:
        root.end_call()


def public_methods(kind: type[nn.Module]) -> Iterator[str]:
    """Yield the names of the public methods that a module's classes add to nn.Module, without forward."""
    seen = {"forward", "reset_parameters", "configure_optimizers"}  # the last two are called by no step
    for each in kind.__mro__:
        if each is nn.Module:
            return
        for name, value in vars(each).items():
            is_method = inspect.isfunction(value) and not inspect.isgeneratorfunction(value)
            if is_method and not name.startswith("_") and name not in seen and not hasattr(nn.Module, name):
                seen.add(name)
                yield name


def open_methods(
    module: nn.Module, kind: type[nn.Module], writes: WriteCheck, is_within_step: Callable[[], bool]
) -> None:
    """Let the public methods of a sharded module's original class gather its parameters when a step calls them."""
    for name in public_methods(kind):
        plain = getattr(module, name)
        setattr(module, name, _checked(plain, writes))
        register_fsdp_forward_method(module, name)
        setattr(module, name, _opening(module, plain, getattr(module, name), is_within_step))


def _checked(plain: Callable[..., Any], writes: WriteCheck) -> Callable[..., Any]:
    @wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        writes.record()
        output = plain(*args, **kwargs)
        writes.check()
        return output

    return call


def _opening(
    module: nn.Module, plain: Callable[..., Any], gathering: Callable[..., Any], is_within_step: Callable[[], bool]
) -> Callable[..., Any]:
    @wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        is_sharded = any(map(is_shard, module.parameters()))
        return gathering(*args, **kwargs) if is_sharded and is_within_step() else plain(*args, **kwargs)

    return call


def note_use_in_hook(error: BaseException) -> None:
    """Add a note to the error of a hook that used sharded parameters, for example in a submodule that it called."""
    if any(each in str(error) for each in SHARDED):
        error.add_note(
            "Under fsdp a rank holds only a part of a parameter, except in a step. In a hook or a callback use its "
            "full_tensor(), or tw.gather_module(module, all_ranks=True), called on every rank. Or call the module itself, "
            "self(...), under torch.no_grad(). Or do this in a step, such as validation_step, with a copy before numpy(): "
            "parameter.detach().clone()."
        )


@contextmanager
def split_groups(optimizer: Optimizer) -> Iterator[None]:
    """Separate shards from whole parameters while the optimizer steps, because foreach kernels take one kind."""
    whole = optimizer.param_groups
    parts = [[{**group, "params": kind} for kind in by_kind(group["params"])] for group in whole]
    optimizer.param_groups = [part for kinds in parts for part in kinds]
    try:
        yield
    finally:
        optimizer.param_groups = whole
        for group, kinds in zip(whole, parts, strict=True):  # a step may write into its groups
            group.update(
                (key, value)
                for part in kinds[:1]
                for key, value in part.items()
                if key not in ("params", "param_names")
            )


def by_kind(parameters: list[Any]) -> list[list[Any]]:
    """Return the lists of shards, one per mesh, and of whole parameters that are not empty."""
    kinds: dict[Any, list[Any]] = {}
    for parameter in parameters:
        kinds.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(kinds.values())
