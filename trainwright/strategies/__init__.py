"""Strategies by name: how the processes of a job share one training run.

To give a strategy a name, add one line to `STRATEGIES`. The class is imported only when it is chosen.
"""

from __future__ import annotations

import importlib
import warnings
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.arguments import foreign_hint
from trainwright.errors import a_type_of, did_you_mean
from trainwright.precision import Precision
from trainwright.strategies.base import Optimization, Strategy
from trainwright.strategies.mesh_axes import reject_unsupported_parallelism

STRATEGIES = {
    "single_device": "trainwright.strategies.base:SingleDeviceStrategy",
    "ddp": "trainwright.strategies.ddp.strategy:DDPStrategy",
    "ddp_sharded": "trainwright.strategies.oss.strategy:ShardedDDPStrategy",
    "fsdp": "trainwright.strategies.fsdp2.strategy:FSDPStrategy",
    "deepspeed": "trainwright.strategies.zero.strategy:DeepSpeedStrategy",
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp_find_unused_parameters_true": ("ddp", {"find_unused_parameters": True}),
    "ddp_find_unused_parameters_false": ("ddp", {"find_unused_parameters": False}),
    "fsdp_cpu_offload": ("fsdp", {"cpu_offload": True}),
    "deepspeed_stage_1": ("deepspeed", {"stage": 1}),
    "deepspeed_stage_1_offload": ("deepspeed", {"stage": 1, "offload_optimizer": True}),
    "deepspeed_stage_2": ("deepspeed", {"stage": 2}),
    "deepspeed_stage_2_offload": ("deepspeed", {"stage": 2, "offload_optimizer": True}),
    "deepspeed_stage_3": ("deepspeed", {"stage": 3}),
    "deepspeed_stage_3_offload": ("deepspeed", {"stage": 3, "offload_optimizer": True, "offload_parameters": True}),
    "ddp_spawn": ("ddp", {}),
    "ddp_notebook": ("ddp", {}),
    "ddp_spawn_find_unused_parameters_true": ("ddp", {"find_unused_parameters": True}),
    "ddp_notebook_find_unused_parameters_true": ("ddp", {"find_unused_parameters": True}),
}
"""Other names: a strategy with options, or another way to start its processes."""

RENAMED = {
    **dict.fromkeys(("fsdp2", "fsdp_native", "fsdp_full_shard", "full_shard"), "fsdp"),
    **dict.fromkeys(("dp", "ddp2", "no_shard"), "ddp"),
    **{f"zero{mark}{stage}": f"deepspeed_stage_{stage}" for mark in ("", "_") for stage in (1, 2, 3)},
    "fsdp_native_full_shard_offload": "fsdp_cpu_offload",
    "deepspeed_stage_3_offload_nvme": "deepspeed_stage_3_offload",
}
"""Names in other frameworks and versions, with the names to use."""
CHOICES = ("auto", *STRATEGIES)
"""The names that `trainwright config` offers. The names in `VARIANTS` are accepted too."""
SPAWNING = frozenset(name for name in VARIANTS if name.startswith(("ddp_spawn", "ddp_notebook")))
"""Names under which a call hands its work over to processes that it starts, in a plain script too."""


def __getattr__(name: str) -> Any:
    for path in STRATEGIES.values():
        if path.endswith(f":{name}"):
            return _imported(path)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)


def _imported(path: str) -> Any:
    module_name, class_name = path.split(":")
    return getattr(importlib.import_module(module_name), class_name)


def make_strategy(name: str, options: dict[str, Any]) -> Strategy:
    """Return the strategy of one of the names in `STRATEGIES`, with its options."""
    strategy: Strategy = _imported(STRATEGIES[name])(**options)
    return strategy


def named_strategy(strategy: str, num_processes: int, or_else: str = "") -> tuple[str, dict[str, Any]]:
    """Return the name in `STRATEGIES` and the options of a name. "auto" is single_device, or ddp for several processes.

    Raises:
        ValueError: the name is unknown, and the message lists the names, with `or_else` after them. Or the name is of an
            unsupported parallelism, and the message has the reason.
    """
    auto = "single_device" if num_processes == 1 else "ddp"
    name = auto if strategy == "auto" else strategy
    if name.startswith("ddp_fork"):
        raise ValueError(
            f"strategy={name!r} is not supported, because neither a GPU nor running threads survive a fork. "
            "Choose 'ddp_notebook', which starts fresh processes."
        )
    name, options = VARIANTS.get(name, (name, {}))
    if name not in STRATEGIES:
        reject_unsupported_parallelism(name)
        new = RENAMED.get(name.lower())
        raise ValueError(
            f"strategy={strategy!r} is unknown;{f' use {new!r}, or' if new else ''} choose from "
            f"{', '.join([*CHOICES, *VARIANTS])}{or_else}.{'' if new else did_you_mean(name, [*STRATEGIES, *VARIANTS])}"
        )
    return name, options


def is_variant_of(strategy: Any, name: str) -> bool:
    """Return whether a strategy is the named one, perhaps with more options."""
    if isinstance(strategy, Strategy):
        return strategy.name == name
    if not isinstance(strategy, str) or strategy == "auto":
        return False
    (base, options), (named, least) = named_strategy(strategy, 2), named_strategy(name, 2)
    return base == named and least.items() <= options.items()


def resolve_strategy(strategy: str | Strategy, num_processes: int) -> Strategy:
    """Return the strategy of a name or an instance. "auto" is single_device, or ddp for several processes."""
    if isinstance(strategy, str):
        strategy = make_strategy(*named_strategy(strategy, num_processes, ", or pass a Strategy instance"))
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"strategy={strategy!r} is {a_type_of(strategy)}; expected a name ({', '.join(STRATEGIES)}) or a "
            f"Strategy instance. Pass an instance, not its class.{foreign_hint(strategy)}"
        )
    return strategy


def why_rejected(
    name: str,
    options: dict[str, int],
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
            # NOTE: with mesh= this would open process groups.
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


__all__ = [
    "CHOICES",
    "SPAWNING",
    "STRATEGIES",
    "VARIANTS",
    "Strategy",
    "is_variant_of",
    "make_strategy",
    "named_strategy",
    "resolve_strategy",
    "why_rejected",
]
