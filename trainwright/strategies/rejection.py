"""Rejection: why a strategy would reject a module, an optimizer or a number of ranks, without starting processes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
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
    options: Mapping[str, Any],
    module: nn.Module,
    optimizer: type[Optimizer],
    num_ranks: int,
    precision: Precision,
) -> str:
    """Return the error of a strategy's setup on the CPU, or "". A strategy whose package is missing is not asked.

    Args:
        name: the strategy's name.
        options: further options of the strategy.
        module: a module, also on the meta device.
        optimizer: the class of an optimizer of all trained parameters.
        num_ranks: the number of processes.
        precision: the precision of the run.
    """
    base, usual = named_strategy(name, num_ranks)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            strategy = make_strategy(base, {**usual, **options})
            strategy.check("cpu", num_ranks, precision)
            strategy.connect(0, num_ranks, torch.device("cpu"), precision)
        strategy.check_module(module, Optimization())
        for parameters in (trained, [each for each in trained if each.dim() == 2]):  # Muon takes matrices only
            with suppress(ValueError, TypeError):
                instance: Any = optimizer(parameters)  # type: ignore[call-arg]
                break
        else:
            return ""
        strategy.check_optimizer(instance)
    except ImportError:
        return ""
    except ValueError as error:
        return str(error)
    return ""
