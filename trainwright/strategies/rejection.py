"""Rejection: why a strategy would reject a module, an optimizer or a number of ranks, without starting processes."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.precision import Precision
from trainwright.strategies import make_strategy, named_strategy
from trainwright.strategies.base import Optimization

__all__ = ["why_rejected"]


def why_rejected(
    name: str,
    options: dict[str, Any],
    num_ranks: int,
    precision: Precision,
    module: nn.Module,
    optimizer: type[Optimizer],
) -> str:
    """Return the error of a strategy's setup on the CPU, or "" if there is none or its package is missing.

    The module may be on the meta device, and the optimizer trains all of its parameters.
    """
    base, usual = named_strategy(name, num_ranks)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    instance: Optimizer | None = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            strategy = make_strategy(base, {**usual, **options})
            strategy.check("cpu", num_ranks, precision)
            strategy.connect(0, num_ranks, torch.device("cpu"), precision)
        strategy.check_module(module, Optimization())
        for parameters in ([each for each in trained if each.dim() == 2], trained):  # Muon takes matrices only
            with suppress(ValueError, TypeError):
                instance = optimizer(parameters)  # type: ignore[call-arg]
        if instance is not None:
            strategy.check_optimizer(instance)
    except (ImportError, ValueError) as error:
        return "" if isinstance(error, ImportError) else str(error)
    return ""
