"""Wrap policy: which submodules are sharded as separate groups, and which parameters are gathered in the low dtype.

Low-precision layers are gathered in the low dtype, because autocast computes in it anyway. All other parameters stay float32,
as on one process: norms, embeddings, recurrent nets and parametrizations. So do a module's bare parameters, whose use is
unknown.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from trainwright.errors import a_type_of

ROOT = "_fsdp_root"
"""The attribute of a sharded module that keeps FSDP's root for its next run."""
MIN_PARAMETERS = 1_000_000
"""The smallest block worth a group: for smaller ones the extra collectives cost more than the memory saved."""

WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Modules that use their children's weights without calling the children."""

WrapPolicy = Iterable[type[nn.Module]] | Callable[[nn.Module], bool]
"""Module classes, or a function that returns whether a module is a group."""


def check_policy(name: str, policy: object) -> None:
    """Raise TypeError for a policy that cannot be called with a module, such as a policy of torch's first FSDP."""
    if callable(policy) and not isinstance(policy, type):
        try:
            inspect.signature(policy).bind("module")
        except TypeError as error:
            raise TypeError(f"{name} cannot be called: it is given (module) ({error}). Take one module.") from None


def choose_groups(
    module: nn.Module, policy: WrapPolicy | None, min_parameters: int = MIN_PARAMETERS
) -> list[nn.Module]:
    """Return the submodules that become groups, innermost first. Everything else is the root's group.

    By default these are blocks: modules with a forward and children, and at least `min_parameters` parameters outside inner
    groups. A block is no group if a module outside shares its parameters, or calls a submodule of it.

    Raises:
        ValueError: the policy selects nothing, a module that cannot be called, or one with tied parameters.
    """
    owners: dict[Tensor | nn.Module, set[nn.Module]] = {}
    for each in module.modules():
        parts: Iterable[Tensor | nn.Module] = chain(each.parameters(recurse=False), each.children())
        for part in parts:
            owners.setdefault(part, set()).add(each)
    if policy is None:
        return list(_by_size(module, owners, min_parameters, set()))
    is_wanted = policy if callable(policy) and not isinstance(policy, type) else _is_one_of(policy)
    modules = list(module.modules())
    # Attention reads the weight of its out_proj, a Linear by class, but never calls it.
    skipped = {module, *(each.out_proj for each in modules if isinstance(each, nn.MultiheadAttention))}
    groups = [each for each in reversed(modules) if each not in skipped and is_wanted(each)]
    if not groups:
        found = sorted({type(each).__name__ for each in modules[1:]})
        raise ValueError(
            f"auto_wrap_policy chooses no submodule of {type(module).__name__}, whose classes are {', '.join(found)}. "
            "Name some of them, or omit the policy to choose by size."
        )
    names = {each: name for name, each in module.named_modules()}
    for group in groups:
        _refuse_group(group, names[group], owners, set(groups))
    return groups


def _refuse_group(
    group: nn.Module, name: str, owners: dict[Tensor | nn.Module, set[nn.Module]], chosen: set[nn.Module]
) -> None:
    if not has_forward(group):
        raise ValueError(
            f"auto_wrap_policy makes {name!r} a group, but {a_type_of(group)} cannot be called, and only a call gathers a "
            "group. Name the classes of the modules in it."
        )
    inner = (each for each in group.modules() if each is not group and each in chosen)
    if tied := _tied(group, owners, {parameter for each in inner for parameter in each.parameters()}):
        raise ValueError(
            f"auto_wrap_policy makes {name!r} a group, but its parameter {tied!r} is also used outside of it (tied weights or "
            "a shared submodule), and every group gathers its parameters itself. Remove it from the policy."
        )


def refuse_mixed(group: nn.Module, whole: set[nn.Parameter]) -> None:
    dtypes = {parameter.dtype for parameter in whole if parameter.requires_grad}
    if len(dtypes) > 1:
        names = {parameter.dtype: name for name, parameter in group.named_parameters() if parameter.dtype in dtypes}
        found = ", ".join(f"{name!r} in {str(dtype).removeprefix('torch.')}" for dtype, name in names.items())
        raise ValueError(
            f"fsdp gathers the parameters of a group in one dtype, but here are {found}. Convert the module to one dtype, "
            "or put parameters of another dtype into a submodule that is a separate group (auto_wrap_policy)."
        )


def _is_one_of(policy: object) -> Callable[[nn.Module], bool]:
    kinds = tuple(policy) if isinstance(policy, Iterable) else (policy,)
    if not kinds or not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds):
        raise TypeError(
            f"auto_wrap_policy={policy!r} is not a policy. Pass Module classes such as {{Block}}, a function from a module to "
            "a bool, or None to choose by size."
        )
    return lambda module: isinstance(module, kinds)


def _by_size(
    module: nn.Module, owners: dict[Tensor | nn.Module, set[nn.Module]], least: int, taken: set[Tensor]
) -> Iterator[nn.Module]:
    for child in module.children():
        if not isinstance(child, WHOLE):
            yield from _by_size(child, owners, least, taken)
        rest = [parameter for parameter in child.parameters() if parameter not in taken]
        is_block = has_forward(child) and any(True for _ in child.children())
        if is_block and sum(map(Tensor.numel, rest)) >= least and not _tied(child, owners, taken):
            taken.update(rest)
            yield child


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called, unlike a ModuleList."""
    return type(module).forward is not nn.Module.forward


def _tied(module: nn.Module, owners: dict[Tensor | nn.Module, set[nn.Module]], taken: set[Tensor]) -> str | None:
    """Return the name of a parameter used outside of a module, because it is tied or its submodule is shared.

    A shared submodule that is a group itself (its parameters are taken) is gathered wherever it is called.
    """
    inside = set(module.modules())
    tied = (name for name, parameter in module.named_parameters() if owners[parameter] - inside)
    shared = (
        f"{path}.{name}"
        for path, each in module.named_modules()
        if each is not module and owners[each] - inside
        for name, parameter in each.named_parameters()
        if parameter not in taken
    )
    return next(tied, None) or next(shared, None)


SMALL = 100_000
"""Up to this many elements a layer's float32 parameters stay whole on every rank, because sharding costs more."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
FORWARDS = frozenset(kind.forward for kind in (nn.Linear, nn.MultiheadAttention, *CONVOLUTIONS))
PROJECTIONS = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")
NAMES = frozenset(["weight", "bias", "bias_k", "bias_v", *PROJECTIONS])
"""The parameters of such layers. A layer with others computes its weights from them."""


def is_low(module: nn.Module) -> bool:
    """Return whether autocast uses this layer's parameters in the low dtype."""
    return type(module).forward in FORWARDS and module._parameters.keys() <= NAMES and not is_parametrized(module)


@dataclass
class Float32:
    whole: set[tuple[nn.Module, str]] = field(default_factory=set)
    """Parameters that stay whole on every rank, by their module and name."""
    groups: set[nn.Module] = field(default_factory=set)
    """Modules that are sharded as a separate group."""

    def parameters(self, module: nn.Module) -> Iterator[Any]:
        """Yield the parameters within a module that stay whole on every rank."""
        for each in module.modules():
            for name, parameter in each.named_parameters(recurse=False):
                if (each, name) in self.whole:
                    yield parameter


def find_float32(module: nn.Module) -> Float32:
    """Return the parts of a module that stay float32.

    A parameter of more than SMALL elements may be tied to a low-precision layer, or be bare in a module with children. It can
    neither stay whole nor be a separate group, so it stays in its group.
    """
    owners: dict[Tensor, list[nn.Module]] = {}
    for each in module.modules():
        for parameter in each.parameters(recurse=False):
            owners.setdefault(parameter, []).append(each)
    found, done = Float32(), set[nn.Module]()
    for each in module.modules():
        if each in done or is_low(each):
            continue
        members = list(each.modules()) if is_parametrized(each) else [each]
        done.update(members)
        inside = set(members)
        own = [
            (member, name, parameter)
            for member in members
            for name, parameter in member.named_parameters(recurse=False)
            if parameter.is_floating_point() and not any(map(is_low, owners[parameter]))
        ]
        is_unit = all(inside.issuperset(owners[parameter]) for *_, parameter in own) and not any(
            True for child in each.modules() if child not in inside for _ in child.parameters(recurse=False)
        )
        if sum(parameter.numel() for *_, parameter in own) > SMALL and is_unit and has_forward(each):
            found.groups.add(each)
        else:
            found.whole.update((member, name) for member, name, parameter in own if parameter.numel() <= SMALL)
    return found
