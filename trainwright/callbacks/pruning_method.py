"""PruningMethod: what torch.nn.utils.prune would prune next of some tensors, without a change to their modules."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from trainwright.errors import a_type_of, did_you_mean
from trainwright.rank_zero import rank_zero_warn

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "l1_unstructured": prune.l1_unstructured,
    "random_unstructured": prune.random_unstructured,
    "ln_structured": prune.ln_structured,
    "random_structured": prune.random_structured,
}
METHODS: dict[str, type[prune.BasePruningMethod]] = {
    "l1_unstructured": prune.L1Unstructured,
    "random_unstructured": prune.RandomUnstructured,
}
"""Those that can compare the elements of several tensors."""
ORIGINAL, MASK = "orig", "mask"
"""What torch's pruning appends, after an underscore, to the name of a parameter, and to that of its mask."""


@dataclass(frozen=True)
class Target:
    """A parameter to prune: its name in the whole module, and where it is."""

    name: str
    module: nn.Module
    attribute: str
    parameter: nn.Parameter

    @property
    def is_reparametrized(self) -> bool:
        """Return whether the module computes it from `weight_orig` and `weight_mask`, as torch's pruning leaves it."""
        return f"{self.attribute}_{ORIGINAL}" in self.module._parameters

    @property
    def mask_name(self) -> str:
        """Return the name of the buffer with torch's mask."""
        return f"{self.attribute}_{MASK}"


class PruningMethod:
    """A way to prune.

    Args:
        pruning_fn, use_global_unstructured, pruning_dim, pruning_norm: those of ModelPruning.

    Raises:
        TypeError: pruning_fn is nothing that prunes.
        ValueError: a name is unknown, or the settings do not fit together.
    """

    def __init__(
        self,
        pruning_fn: Any,
        use_global_unstructured: bool,
        pruning_dim: int | None,
        pruning_norm: int | float | str | None,
    ) -> None:
        known = {function: name for name, function in FUNCTIONS.items()}
        given = known.get(pruning_fn, pruning_fn) if callable(pruning_fn) else pruning_fn
        self._function: Callable[..., Any] | None = None
        self._method: type[prune.BasePruningMethod] | None = None
        self._dim: int | None = None
        self._is_torchs = isinstance(given, str)
        """Whether it is known what an amount counts: elements, or channels along `_dim`."""
        self._has_warned = False
        self.is_structured = False
        """Whether it takes whole rows or channels, which a tensor of one dimension does not have."""
        if isinstance(given, str):
            self.name = given
            self._choose(given, use_global_unstructured, pruning_dim, pruning_norm)
        elif inspect.isclass(given) and issubclass(given, prune.BasePruningMethod):
            self.name = given.__name__
            self.is_structured = given.PRUNING_TYPE == "structured"  # type: ignore[attr-defined]
            self._function = given.apply
            if use_global_unstructured:
                _refuse_global(given.__name__, given.PRUNING_TYPE == "unstructured")  # type: ignore[attr-defined]
                self._method = given
        elif callable(given) and not isinstance(given, (type, prune.BasePruningMethod)):  # whose instances are hooks
            self.name = getattr(given, "__name__", type(given).__name__)
            self._function = given
            if use_global_unstructured:
                _refuse_global(self.name, False)
        else:
            hint = " Pass the class, not an instance." if isinstance(given, prune.BasePruningMethod) else ""
            raise TypeError(
                f"pruning_fn={given!r} is {a_type_of(given)}; expected one of the names {', '.join(FUNCTIONS)}, a "
                f"subclass of torch.nn.utils.prune.BasePruningMethod, or a function of (module, name, amount).{hint}"
            )
        if not isinstance(given, str) and (pruning_dim, pruning_norm) != (None, None):
            raise ValueError(
                f"pruning_dim={pruning_dim!r} and pruning_norm={pruning_norm!r} are for the structured functions by name; "
                f"give {self.name} its own settings, such as with functools.partial."
            )

    def _choose(self, name: str, is_global: bool, dim: int | None, norm: int | float | str | None) -> None:
        if name not in FUNCTIONS:
            raise ValueError(
                f"pruning_fn={name!r} is unknown; choose from {', '.join(FUNCTIONS)}, or pass a subclass of "
                f"BasePruningMethod or a function.{did_you_mean(name, FUNCTIONS)}"
            )
        self.is_structured = name not in METHODS
        options: dict[str, Any] = {}
        if is_global:
            _refuse_global(name, not self.is_structured)
            self._method = METHODS[name]
        if self.is_structured:
            if isinstance(dim, bool) or not isinstance(dim, int):
                raise ValueError(
                    f"{name} needs pruning_dim=, the dimension to prune along, such as 0; {dim!r} was given."
                )
            options["dim"] = self._dim = dim
        if name == "ln_structured":
            if norm is None:
                raise ValueError("ln_structured needs pruning_norm=, such as 2; None was given.")
            options["n"] = norm
        self._function = partial(FUNCTIONS[name], **options)

    @torch.no_grad()
    def prune(self, targets: Sequence[Target], pruned: dict[str, Tensor], amount: int | float) -> dict[str, Tensor]:
        """Return where each target is pruned after it has pruned `amount` more; `pruned` is where they are so far.

        Raises:
            ValueError: torch, or the user's function, cannot do it.
        """
        twins = _twins(targets)
        for target in targets:
            mask = pruned.get(target.name)
            if mask is not None:
                prune.custom_from_mask(twins[id(target.module)], target.attribute, ~mask)  # type: ignore[no-untyped-call]
        pairs = [(twins[id(target.module)], target.attribute) for target in targets]
        try:
            if self._method is not None:
                fitting = self._fitting(amount, targets, pruned)
                if fitting is not None:
                    prune.global_unstructured(pairs, pruning_method=self._method, amount=fitting)
            else:
                assert self._function is not None
                for target, (twin, attribute) in zip(targets, pairs, strict=True):
                    fitting = self._fitting(amount, [target], pruned)
                    if fitting is not None:
                        self._function(twin, attribute, amount=fitting)
        except Exception as error:  # of the user's own function, too
            raise ValueError(
                f"pruning with {self.name} and amount={amount!r} failed with {type(error).__name__}: {error} An amount "
                "counts the elements that are not pruned yet: a number of them, or a fraction from 0.0 to 1.0."
            ) from error
        found = {}
        for target, (twin, _) in zip(targets, pairs, strict=True):
            mask = getattr(twin, target.mask_name, None)
            if not isinstance(mask, Tensor):
                raise ValueError(
                    f"{self.name} left no mask on {target.name!r}; call a function of torch.nn.utils.prune on the module and "
                    "the name that it is given, such as prune.custom_from_mask."
                )
            found[target.name] = mask == 0
        return found

    def _fitting(self, amount: int | float, targets: Sequence[Target], pruned: dict[str, Tensor]) -> int | float | None:
        """Return `amount`, or what is left if that is a smaller number; None if nothing is."""
        masks = [pruned.get(target.name) for target in targets]
        if not self._is_torchs or all(mask is None for mask in masks):
            return amount  # more than there is at all is torch's error
        total = left = 0
        for target, mask in zip(targets, masks, strict=True):
            size = target.parameter.numel() if self._dim is None else target.parameter.shape[self._dim]
            if mask is not None and self._dim is not None:
                mask = mask.movedim(self._dim, 0).flatten(1).all(1)
            total, left = total + size, left + size - (0 if mask is None else int(mask.sum()))
        if isinstance(amount, float) or not left < amount <= total:
            return amount if left else None
        if not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"amount={amount!r} is more than the {left} {'elements' if self._dim is None else 'channels'} that are left of "
                f"{targets[0].name!r}{' and the others' if len(targets) > 1 else ''}: all of them are pruned. Pass a smaller "
                "amount, a fraction, or apply_pruning as a function of the epoch that ends the pruning.",
                stacklevel=2,
            )
        return left or None


def check_resets(targets: Sequence[Target]) -> None:
    """Raise ValueError if a module has no reset_parameters."""
    for target in targets:
        if not callable(getattr(target.module, "reset_parameters", None)):
            raise ValueError(
                f"resample_parameters=True needs reset_parameters() of each module that is pruned, and "
                f"{type(target.module).__name__} of {target.name!r} has none; add it, or pass resample_parameters=False."
            )


@torch.no_grad()
def new_values(targets: Sequence[Target]) -> dict[str, Tensor]:
    """Return the values that `reset_parameters` of the modules gives the targets, without a change to the modules."""
    twins = _twins(targets)
    for twin in twins.values():
        twin._parameters = {
            name: None if each is None else nn.Parameter(each.detach().clone(), each.requires_grad)
            for name, each in twin._parameters.items()
        }
        twin._buffers = {name: None if each is None else each.clone() for name, each in twin._buffers.items()}
        twin.reset_parameters()  # type: ignore[operator]
    return {each.name: twins[id(each.module)]._parameters[each.attribute].detach() for each in targets}  # type: ignore[union-attr]


def _twins(targets: Sequence[Target]) -> dict[int, nn.Module]:
    """Return a copy of each target's module with the same tensors, which takes torch's pruning instead of it."""
    twins: dict[int, nn.Module] = {}
    for target in targets:
        if id(target.module) not in twins:
            twin = copy.copy(target.module)
            for name, value in vars(twin).items():
                if type(value) in (list, dict):  # such as an LSTM's list of its weights, which follows its attributes
                    vars(twin)[name] = copy.copy(value)
            twin._forward_pre_hooks = OrderedDict()
            twins[id(target.module)] = twin
        twin = twins[id(target.module)]
        for extra in (twin._parameters, twin._buffers):
            for ending in (ORIGINAL, MASK):
                extra.pop(f"{target.attribute}_{ending}", None)
        twin.__dict__.pop(target.attribute, None)  # what the module has computed of a reparametrized one
        twin._parameters[target.attribute] = target.parameter
    return twins


def _refuse_global(name: str, is_unstructured: bool) -> None:
    if not is_unstructured:
        raise ValueError(
            f"pruning_fn={name} cannot compare elements of different tensors, as use_global_unstructured=True asks; pass "
            "use_global_unstructured=False, or an unstructured method, such as 'l1_unstructured'."
        )
