"""Sharded access: which methods of sharded modules a step may call, and errors that name the parameter it touched.

FSDP2 gathers a group's parameters for its module's forward; this file does the same for its other public methods. Outside of
both, a step cannot use a group's parameters.
"""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from trainwright.strategies.shard_write_back import record_versions, write_back

CHAIN = re.compile(r"\b([A-Za-z_]\w*)((?:\.\w+|\[\d+\])+)")
PART = re.compile(r"\.(\w+)|\[(\d+)\]")
NO_STEPS = ("reset_parameters", "configure_optimizers")
"""Public methods that no step calls."""


def public_methods(kind: type[nn.Module]) -> Iterator[str]:
    """Yield the names of the public methods that a module's own classes define, without forward."""
    seen = {"forward", *NO_STEPS}
    for each in kind.__mro__:
        if each is nn.Module:
            return
        for name, value in vars(each).items():
            is_method = inspect.isfunction(value) and not inspect.isgeneratorfunction(value)
            if is_method and not name.startswith("_") and name not in seen and not hasattr(nn.Module, name):
                seen.add(name)
                yield name


def open_methods(module: nn.Module, kind: type[nn.Module], is_within_step: Callable[[], bool]) -> list[str]:
    """Let the public methods of a sharded module gather its parameters when a step calls them; return their names.

    `kind` is the class before sharding. Called from elsewhere, or from the module's own forward, they run unchanged.
    """
    names = list(public_methods(kind))
    for name in names:
        plain = getattr(module, name)
        setattr(module, name, _keeping(module, plain))
        register_fsdp_forward_method(module, name)
        setattr(module, name, _opening(module, plain, getattr(module, name), is_within_step))
    return names


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


def explain(error: Exception, module: nn.Module) -> RuntimeError | None:
    """Return an error that names the sharded parameter that a step used outside its module; None for other errors."""
    if "mixed torch.Tensor and DTensor" not in str(error):
        return None
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return _refusal(module, list(_touched(error.__traceback__, names)))


def refuse_sharded_loss(loss: Tensor, module: nn.Module | None) -> None:
    """Raise RuntimeError for a loss computed from sharded parameters directly, such as an L2 over parameters()."""
    if not isinstance(loss, DTensor):
        return
    names = {id(parameter): name for name, parameter in module.named_parameters()} if module is not None else {}
    found, waiting, seen = [], [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, DTensor) and id(variable) in names:
            found.append(names[id(variable)])
        waiting += [next_node for next_node, _ in node.next_functions]
    raise _refusal(module, found)


def _refusal(module: nn.Module | None, names: list[str]) -> RuntimeError:
    which = " and ".join(repr(name) for name in sorted(set(names))[:3]) or "a parameter"
    inside = f" of {type(module).__name__}" if module is not None else ""
    called = _as_code(_group_of(module, sorted(names)[0])) if module is not None and names else "its module"
    return RuntimeError(
        f"the step used {which}{inside} itself, but under fsdp each rank holds a part of it, and the whole is there only while "
        f"{called} is called. Call {called}, or a method of it that uses the parameter; for a penalty on weights use the "
        "optimizer's weight_decay; or keep that module whole: FSDPStrategy(auto_wrap_policy=...) without it."
    )


def _group_of(module: nn.Module, parameter_name: str) -> str:
    """Return the innermost submodule whose call gathers this parameter."""
    name = parameter_name.rpartition(".")[0]
    while name and not isinstance(module.get_submodule(name), FSDPModule):
        name = name.rpartition(".")[0]
    return name or parameter_name.rpartition(".")[0]


def _as_code(name: str) -> str:
    """Return a submodule's name as code: "blocks.1" is self.blocks[1](...)."""
    return "self" + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in name.split(".")) + "(...)"


def _touched(traceback: TracebackType | None, names: dict[int, str]) -> Iterator[str]:
    """Yield the names of sharded parameters that failing lines mention or that their local variables hold."""
    while traceback is not None:
        frame = traceback.tb_frame
        line = linecache.getline(frame.f_code.co_filename, traceback.tb_lineno)
        values = [_resolve(frame.f_locals.get(root), chain) for root, chain in CHAIN.findall(line)]
        for value in (*values, *_flat(frame.f_locals.values())):
            if isinstance(value, DTensor) and id(value) in names:
                yield names[id(value)]
        traceback = traceback.tb_next


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values, and those in lists, as `torch._foreach_*` takes them."""
    for value in values:
        yield from value if isinstance(value, (list, tuple)) else (value,)


def _resolve(value: Any, chain: str) -> Any:
    for name, index in PART.findall(chain):
        if not isinstance(value, nn.Module):
            return value  # a method of what was reached, say
        if index:
            value = list(value.children())[int(index)] if int(index) < len(list(value.children())) else None
        else:
            value = {**value._modules, **value._parameters}.get(name)
    return value
