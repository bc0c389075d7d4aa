"""What ModelPruning refuses of its arguments and of a module's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from trainwright.callbacks.pruning_method import ORIGINAL, Target
from trainwright.compiled_names import clean_name


def joined(path: str, attribute: str) -> str:
    """Return the name of a module's attribute."""
    return f"{path}.{attribute}".lstrip(".")


def refuse_shared(module: nn.Module, found: Mapping[int, Target]) -> None:
    """Raise ValueError if several modules have one of the parameters."""
    names: dict[int, list[str]] = {}
    for path, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if id(parameter) in found:
                own = attribute.removesuffix(f"_{ORIGINAL}")
                names.setdefault(id(parameter), []).append(joined(clean_name(path), own))
    for shared in names.values():
        if len(shared) > 1:
            raise ValueError(
                f"{', '.join(map(repr, shared))} are one parameter, and with make_pruning_permanent=False only the first would "
                "be pruned. Leave out that argument, or leave out the parameter with parameters_to_prune."
            )


def checked_pairs(given: Any) -> list[tuple[nn.Module, str]] | None:
    """Return the pairs of a module and a name; TypeError if they are not."""
    if given is None:
        return None
    pairs = list(given)
    if not pairs:
        raise ValueError("parameters_to_prune is empty; pass pairs of a module and a name, or None for all parameters.")
    for each in pairs:
        if not (
            isinstance(each, (tuple, list)) and len(each) == 2 and isinstance(each[0], nn.Module)
        ) or not isinstance(each[1], str):
            raise TypeError(
                f"parameters_to_prune holds {each!r:.80}; expected pairs of a module and the name of its parameter, such "
                "as (model.layer, 'weight')."
            )
    return [(each[0], each[1]) for each in pairs]


def check_amount(amount: Any, origin: str = "") -> None:
    """Raise ValueError unless it is a fraction or a number of elements."""
    is_number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
    if not is_number or amount < 0 or (isinstance(amount, float) and not amount <= 1.0):
        raise ValueError(
            f"amount={amount!r}{origin} is not accepted; pass a fraction from 0.0 to 1.0, a whole number of elements, or a "
            "function of the epoch that returns one."
        )


def refuse_lazy(*targets: Target) -> None:
    """Raise ValueError if a parameter has no shape yet."""
    lazy = [each.name for each in targets if is_lazy(each.parameter)]
    if lazy:
        raise ValueError(
            f"{lazy[0]!r} is lazy: it has no elements to prune yet. Call the module on a batch before fit, or leave the "
            "parameter out with parameters_to_prune."
        )
