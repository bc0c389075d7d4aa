"""Optim: one optimizer that steps hidden matrices with one class of optimizers and all other parameters with another."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.errors import a_type_of, did_you_mean

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
Excluded = str | nn.Module | Tensor
MATRIX, REST = "matrix", "rest"


class SplitOptimizer(Optimizer):
    """An optimizer that steps its parameter groups by two others. `split` makes it.

    Every group names its optimizer under the key "steps", as "matrix" or "rest". Groups and state are shared with the two
    optimizers, so schedulers, checkpoints and clipping see one optimizer. Groups that are added later belong to `rest`.
    """

    def __init__(self, matrix: Optimizer, rest: Optimizer, names: dict[str, list[str]]) -> None:
        self.parts = {MATRIX: matrix, REST: rest}
        self.names = names
        """The names of the parameters that "matrix" and "rest" step."""
        for steps, part in self.parts.items():
            for group in part.param_groups:
                group["steps"] = steps
        super().__init__([*matrix.param_groups, *rest.param_groups], {})
        # A checkpoint stores the name of the class, so that a resume with other parts is an error.
        kinds = "_".join(type(part).__name__ for part in self.parts.values())
        self.__class__ = type(f"Split_{kinds}", (type(self),), {})

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step both optimizers. A closure is called once, before them, and its result is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for steps, part in self.parts.items():
            # A strategy or a load may have replaced the groups and the state since the last step.
            groups = [group for group in self.param_groups if group["steps"] == steps]
            vars(part).update(param_groups=groups, state=self.state)
            part.step()
        return loss

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Add a group of parameters for `rest`."""
        if "steps" not in param_group:
            param_group = {**self.parts[REST].defaults, **param_group, "steps": REST}
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, object]:
        """Return what a deep copy needs."""
        return {**super().__getstate__(), "parts": self.parts, "names": self.names}

    def describe(self) -> str:
        """Return a text with the names of the parameters that each of the two optimizers steps."""
        return "\n".join(f"{type(part).__name__}: {', '.join(self.names[steps])}" for steps, part in self.parts.items())


def split(
    module: nn.Module,
    matrix: MakeOptimizer = torch.optim.Muon,
    rest: MakeOptimizer = torch.optim.AdamW,
    *,
    exclude: Excluded | Iterable[Excluded] = (),
    head: bool = True,
) -> SplitOptimizer:
    """Return one optimizer that steps hidden matrices by `matrix` and all other parameters by `rest`.

    Hidden matrices are all parameters of two dimensions, except the weights of nn.Embedding, the layers that are tied to one,
    the output head, and `exclude`. So biases, norms and the weights of convolutions belong to `rest`. Muon is described by
    Jordan et al., 2024, "Muon: An optimizer for hidden layers in neural networks".

    Args:
        module: the module whose parameters are trained.
        matrix: makes an optimizer from a list of parameters: a class, or a functools.partial with its settings.
        rest: the same for the other parameters.
        exclude: parameters that belong to `rest` too: submodules, parameters, or their names, such as position embeddings
            that are a bare nn.Parameter.
        head: whether the last nn.Linear in the order of `module.modules()` is the output head. Pass False if it is a
            hidden layer, and name the output layers in `exclude`.

    Raises:
        ValueError: no parameters are left for one of the two, or a name in `exclude` is unknown.
        TypeError: `module` is not a module, or `matrix` or `rest` makes no optimizer.

    >>> from functools import partial
    >>> net = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 10))
    >>> muon = partial(torch.optim.Muon, lr=0.02)
    >>> optimizer = tw.optim.split(net, muon, partial(torch.optim.AdamW, lr=3e-4))
    >>> print(optimizer.describe())
    Muon: 1.weight
    AdamW: 0.weight, 1.bias, 3.weight, 3.bias
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is {a_type_of(module)}, not an nn.Module. Pass the module itself, not its parameters.")
    embeddings = (layer for layer in module.modules() if isinstance(layer, nn.Embedding))
    others: set[Tensor] = {parameter for layer in embeddings for parameter in layer.parameters()}
    others |= _excluded(module, [exclude] if isinstance(exclude, Excluded) else list(exclude))
    if head and (last := last_linear(module)) is not None:
        others.add(last.weight)
    named: dict[str, dict[str, nn.Parameter]] = {MATRIX: {}, REST: {}}
    for name, parameter in module.named_parameters():
        named[MATRIX if parameter.dim() == 2 and parameter not in others else REST][name] = parameter
    for steps, other in ((MATRIX, REST), (REST, MATRIX)):
        if not named[steps]:
            raise ValueError(
                f"{type(module).__name__} has no parameters for {steps}=: all {len(named[other])} belong to {other}. Pass "
                f"exclude= or head= so that both get some, or use {other}'s optimizer for the whole module."
            )
    names = {steps: list(parameters) for steps, parameters in named.items()}
    return SplitOptimizer(_made(MATRIX, matrix, named[MATRIX]), _made(REST, rest, named[REST]), names)


def last_linear(module: nn.Module) -> nn.Linear | None:
    """Return the last nn.Linear in the order of `module.modules()`, which usually is the output head."""
    return next((layer for layer in reversed(list(module.modules())) if isinstance(layer, nn.Linear)), None)


def _excluded(module: nn.Module, exclude: list[Excluded]) -> set[Tensor]:
    named = dict(module.named_parameters(remove_duplicate=False))
    excluded: set[Tensor] = set()
    for item in exclude:
        if isinstance(item, nn.Module):
            excluded.update(item.parameters())
        elif isinstance(item, Tensor):
            excluded.add(item)
        elif found := {parameter for name, parameter in named.items() if f"{name}.".startswith(f"{item}.")}:
            excluded |= found
        else:
            known = [*(name for name, _ in module.named_modules() if name), *named]
            raise ValueError(
                f"exclude={item!r} names no parameter or submodule of {type(module).__name__}. Pass names such as "
                f"{known[-1]!r}, or the modules or parameters themselves.{did_you_mean(item, known)}"
            )
    return excluded


def _made(steps: str, make: MakeOptimizer, parameters: dict[str, nn.Parameter]) -> Optimizer:
    """Return the optimizer that `make` makes of its parameters."""
    made = make(list(parameters.values())) if callable(make) else make
    if not isinstance(made, Optimizer):
        raise TypeError(
            f"{steps}={make!r} makes {a_type_of(made)}, not an Optimizer. Pass a class of optimizers, such as "
            "torch.optim.AdamW, or functools.partial(torch.optim.AdamW, lr=3e-4)."
        )
    return made
