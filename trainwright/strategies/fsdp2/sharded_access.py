"""Sharded access: FSDP's root around a sharded module, which calls gather its parameters, and errors for other uses.

FSDP2 gathers a group's parameters for its module's forward. This file does the same for its other public methods, and for
calls of the whole module outside a step. Anywhere else a step cannot use a group's parameters.
"""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from trainwright.checkpoint.vendor import tree_leaves, tree_map_only
from trainwright.strategies.base import StepForward
from trainwright.strategies.fsdp2.vendor import record_versions, write_back
from trainwright.strategies.fsdp2.wrap_policy import ROOT
from trainwright.strategies.used_parameters import failed_before

CHAIN = re.compile(r"\b([A-Za-z_]\w*)((?:\.\w+|\[\d+\])+)")
PART = re.compile(r"\.(\w+)|\[(\d+)\]")
MIXED = "mixed torch.Tensor and DTensor"
"""The text of torch's error for an operation on a sharded parameter."""
SHARDED = (
    MIXED,
    "not supported for tensor subclasses",
    "sharding strategy registered",
    "storage that is not resizable",
)
"""Texts of errors about sharded parameters. The last one means that an array of numpy() keeps a parameter's memory."""
NO_STEPS = ("reset_parameters", "configure_optimizers")
"""Public methods that no step calls."""


def without_views(module: nn.Module, args: Any, output: Any) -> Any:
    """Clone views among a group's outputs: an in-place write would detach FSDP's hook, and lose gradients."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return output
    return tree_map_only(Tensor, lambda each: each.clone() if each._is_view() else each, output)


def guard(group: nn.Module, module: nn.Module, is_chosen: bool) -> None:
    """Register the forward hooks of a group in a module that run before FSDP's."""
    name = next(name for name, each in module.named_modules() if each is group)
    if is_chosen:
        group.register_forward_hook(without_views)
    group.register_forward_hook(partial(refuse_second_order, name))


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

    def __init__(self, module: nn.Module, dtype: torch.dtype | None, groups: Sequence[nn.Module]) -> None:
        super().__init__(module)
        self.dtype = dtype
        self.groups = tuple(groups)

    def forward(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        self.refuse_failed()
        self.depth += 1
        record_versions(self)
        try:
            output = super().forward(name, *args, **kwargs)
            write_back(self)
            return output
        finally:
            self.depth -= 1

    def begin_call(self) -> None:
        """Gather the root's group for a call of the module outside a step. Collective."""
        self.refuse_failed()
        self.depth, self.is_called_alone = 1, True
        self.unshard()  # type: ignore[operator] # which fully_shard adds
        record_versions(self)

    def end_call(self) -> None:
        """Write back the call's writes, and reshard."""
        self.depth, self.is_called_alone = 0, False
        write_back(self)
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
def failing(roots: Iterable[Any], module: nn.Module | None = None) -> Iterator[None]:
    """Record a failed forward (of this module) or backward within the context, and explain its error."""
    try:
        yield
    except BaseException as error:
        explained = None if module is None else explain(error, module)
        for root in roots:
            root.fail()
        if explained is not None:
            raise explained from error
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


def refuse_copy(module: nn.Module, memo: Any) -> None:
    """Raise RuntimeError for a deep copy of a module that is sharded or contains a sharded one."""
    raise RuntimeError(
        "a module that fsdp has sharded cannot be copied, because a rank holds only a part of it. tw.gather_module(module), "
        "called on all ranks, returns a whole, plain copy in host memory."
    )


def public_methods(kind: type[nn.Module]) -> Iterator[str]:
    """Yield the names of the public methods that a module's classes add to nn.Module, without forward."""
    seen = {"forward", *NO_STEPS}
    for each in kind.__mro__:
        if each is nn.Module:
            return
        for name, value in vars(each).items():
            is_method = inspect.isfunction(value) and not inspect.isgeneratorfunction(value)
            if is_method and not name.startswith("_") and name not in seen and not hasattr(nn.Module, name):
                seen.add(name)
                yield name


def open_methods(module: nn.Module, kind: type[nn.Module], is_within_step: Callable[[], bool]) -> None:
    """Let the public methods of a sharded module's original class gather its parameters when a step calls them."""
    for name in public_methods(kind):
        plain = getattr(module, name)
        setattr(module, name, _keeping(module, plain))
        register_fsdp_forward_method(module, name)
        setattr(module, name, _opening(module, plain, getattr(module, name), is_within_step))


def _keeping(module: nn.Module, plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        record_versions(module)
        output = plain(*args, **kwargs)
        write_back(module)
        return output

    return call


def _opening(
    module: nn.Module, plain: Callable[..., Any], gathering: Callable[..., Any], is_within_step: Callable[[], bool]
) -> Callable[..., Any]:
    @wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        is_sharded = any(isinstance(parameter, DTensor) for parameter in module.parameters())
        return gathering(*args, **kwargs) if is_sharded and is_within_step() else plain(*args, **kwargs)

    return call


def explain(error: BaseException, module: nn.Module) -> RuntimeError | None:
    """Return an error that names the sharded parameter that a step used outside its module, or None for other errors."""
    if MIXED not in str(error):
        return None
    return _refusal(module, list(_touched(error.__traceback__, _names_of_shards(module))))


def note_use_in_hook(error: BaseException, modules: Iterable[nn.Module]) -> None:
    """Add a note to the error of a hook that used sharded parameters, for example in a submodule that it called."""
    for module in modules if any(each in str(error) for each in SHARDED) else ():
        which = " and ".join(map(repr, sorted(set(_touched(error.__traceback__, _names_of_shards(module))))[:3]))
        error.add_note(
            f"Under fsdp a rank holds only a part of {which or 'a parameter'}, except in a step. In a hook or a callback use "
            "its full_tensor(), or tw.gather_module(module, all_ranks=True), called on every rank. Or call the module itself, "
            "self(...), under torch.no_grad(). Or do this in a step, such as validation_step, with a copy before numpy(): "
            "parameter.detach().clone()."
        )


def refuse_sharded_loss(loss: Tensor, module: nn.Module | None) -> None:
    """Raise RuntimeError for a loss computed from sharded parameters directly, such as an L2 over parameters()."""
    if not isinstance(loss, DTensor):
        return
    names = {} if module is None else _names_of_shards(module)
    found: list[str] = []
    waiting, seen = [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found += [names[key] for key in [id(getattr(node, "variable", None))] if key in names]
            waiting += [following for following, _ in node.next_functions]
    raise _refusal(module, found)


def _names_of_shards(module: nn.Module) -> dict[int, str]:
    return {id(each): name for name, each in module.named_parameters() if isinstance(each, DTensor)}


def _refusal(module: nn.Module | None, names: list[str]) -> RuntimeError:
    names = sorted(set(names))
    which = " and ".join(map(repr, names[:3])) or "a parameter"
    inside = f" of {type(module).__name__}" if module is not None else ""
    called = _group_of(module, names[0]) if module is not None and names else "its module"
    return RuntimeError(
        f"the step used {which}{inside} itself, but under fsdp a rank holds only a part of it, except while {called} is "
        f"called. Call {called}, or a method of it that uses the parameter. For a penalty on weights use the optimizer's "
        "weight_decay. Or keep that module whole: FSDPStrategy(auto_wrap_policy=...) without it."
    )


def _group_of(module: nn.Module, parameter_name: str) -> str:
    """Return the call that gathers this parameter, as code: self.blocks[1](...)."""
    name = owner = parameter_name.rpartition(".")[0]
    while name and not isinstance(module.get_submodule(name), FSDPModule):
        name = name.rpartition(".")[0]
    parts = (name or owner).split(".")
    return "self" + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts) + "(...)"


def _touched(traceback: TracebackType | None, names: dict[int, str]) -> Iterator[str]:
    """Yield the names of sharded parameters that failing lines mention or that their local variables hold."""
    while traceback is not None:
        frame = traceback.tb_frame
        line = linecache.getline(frame.f_code.co_filename, traceback.tb_lineno)
        values = [_resolve(frame.f_locals.get(root), chain) for root, chain in CHAIN.findall(line)]
        for value in (*values, *flat(frame.f_locals.values())):
            if id(value) in names:
                yield names[id(value)]
        traceback = traceback.tb_next


def flat(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values, and those in lists, as `torch._foreach_*` takes them."""
    for value in values:
        yield from value if isinstance(value, (list, tuple)) else (value,)


def _resolve(value: Any, chain: str) -> Any:
    for name, index in PART.findall(chain):
        if not isinstance(value, nn.Module):
            return value  # for example a method of the module
        if index:
            value = list(value.children())[int(index)] if int(index) < len(list(value.children())) else None
        else:
            value = {**value._modules, **value._parameters}.get(name)
    return value
