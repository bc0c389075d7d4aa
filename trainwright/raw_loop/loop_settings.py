"""Settings: the Engine's parts that the Accelerator's arguments choose, and the arguments that are rejected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from trainwright.devices.hardware import resolve_device_type
from trainwright.errors import a_type_of, did_you_mean
from trainwright.faults.nan_policy import POLICIES
from trainwright.memory.activation_checkpointing import ActivationCheckpointing
from trainwright.overrides import overridden
from trainwright.precision import MIXED, Precision, resolve_precision
from trainwright.raw_loop.options import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    by_kind,
)
from trainwright.raw_loop.plugins import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    check_length,
)
from trainwright.strategies import Strategy

REPLACED = {
    "deepspeed_plugins": "pass one plugin as deepspeed_plugin=, and make an Accelerator for each model",
    "megatron_lm_plugin": "Megatron-LM is not supported; strategy='fsdp' or 'deepspeed' shards the model",
    "torch_tp_plugin": "pass strategy=FSDPStrategy(mesh={'data': 2, 'tensor': 2}, tensor_plan={...})",
    "parallelism_config": "pass strategy='ddp', 'fsdp' or 'deepspeed', or for tp_size "
    "strategy=FSDPStrategy(mesh={'data': 2, 'tensor': 2}, tensor_plan={...})",
    "dynamo_plugin": "pass dynamo_backend=, or compile the model with its compile() before prepare",
    "dispatch_batches": "omit it: every process reads the data and keeps its share",
    "even_batches": "pass dataloader_config=DataLoaderConfiguration(even_batches=...)",
    "use_seedable_sampler": "pass dataloader_config=DataLoaderConfiguration(use_seedable_sampler=...)",
    "logging_dir": "pass project_config=ProjectConfiguration(logging_dir=...)",
    "tpu": "TPUs are not supported; accelerator= names the kind of device",
    "fp16": "pass mixed_precision='fp16'",
    "compile": "pass dynamo_backend='inductor'",
}
"""Arguments of Accelerate and of the Trainer that the Accelerator does not take, with their replacements."""


def word_for(precision: Precision) -> str:
    """Return "no", "fp16" or "bf16", or the name of another precision."""
    return next((word for word, name in MIXED.items() if name == precision.name), precision.name)


@dataclass
class LoopSettings:
    """The arguments of an Accelerator that choose the Engine's parts. See there.

    Raises:
        ValueError, TypeError: two of them contradict each other, or one is wrong.
    """

    mixed_precision: str | None
    precision: str | int | Precision | None
    cpu: bool
    accelerator: str
    strategy: str | Strategy
    deepspeed_plugin: DeepSpeedPlugin | None
    fsdp_plugin: FullyShardedDataParallelPlugin | None
    gradient_accumulation_steps: int
    gradient_accumulation_plugin: GradientAccumulationPlugin | None
    kwargs_handlers: Sequence[Any] | None
    dynamo_backend: Any
    nan_policy: str | None
    accumulate_by: str
    activation_checkpointing: Any

    def __post_init__(self) -> None:
        self._check_precision()
        if self.nan_policy not in POLICIES[:3]:
            raise ValueError(
                f"nan_policy={self.nan_policy!r} is not accepted by the Accelerator; pass None, 'raise' or 'skip'. Only a "
                "Trainer takes 'rollback'."
            )
        if self.accumulate_by not in ("batches", "tokens"):
            raise ValueError(f"accumulate_by={self.accumulate_by!r} is not accepted; pass 'batches' or 'tokens'.")
        self.checkpointing = ActivationCheckpointing.read(self.activation_checkpointing)
        if self.checkpointing is not None and self.checkpointing.offload and _compiler(self.dynamo_backend):
            raise ValueError(
                "dynamo_backend= cannot trace the 'offload' of activation_checkpointing. Omit one of them."
            )
        if self.cpu and self.accelerator not in ("auto", "cpu"):
            raise ValueError(f"cpu=True and accelerator={self.accelerator!r} were both given. Pass one.")
        check_length(self.gradient_accumulation_steps, "gradient_accumulation_steps")
        self.device_type = "cpu" if self.cpu else self.accelerator
        find = by_kind(self.kwargs_handlers)
        self.autocast: AutocastKwargs = find(AutocastKwargs) or AutocastKwargs()
        self.profiling: ProfileKwargs = find(ProfileKwargs) or ProfileKwargs()
        self.accumulation = self._accumulation()
        self.chosen_strategy = self._strategy(find(DistributedDataParallelKwargs))
        self.chosen_precision = self._precision(find(GradScalerKwargs))
        timeout = (find(InitProcessGroupKwargs) or InitProcessGroupKwargs()).timeout
        self.timeout_seconds = None if timeout is None else timeout.total_seconds()
        backend, is_like = _compiler(self.dynamo_backend), lambda given, value: (given is None) == (value is None)
        self.compiler: str | None = overridden("Accelerator", "dynamo_backend", backend, is_like=is_like)
        """The backend that compiles prepared models, or None if they run eagerly."""

    @property
    def clip_norm(self) -> float | None:
        """Return the limit on the gradients' norm in each step, or None if only the loop clips."""
        return self.deepspeed_plugin.gradient_clipping if self.deepspeed_plugin is not None else None

    def _check_precision(self) -> None:
        mixed = self.mixed_precision
        if mixed is not None and self.precision is not None:
            raise ValueError(f"mixed_precision={mixed!r} and precision={self.precision!r} were both given. Pass one.")
        if mixed is not None and mixed not in tuple(MIXED):
            of_trainer = next((word for word, name in MIXED.items() if name == mixed), None)
            hint = f" precision={mixed!r} means mixed_precision={of_trainer!r}." if of_trainer else ""
            hint = hint or " precision= takes every precision of the Trainer."
            raise ValueError(f"mixed_precision={mixed!r} is unknown. Choose from {', '.join(MIXED)}.{hint}")

    def _accumulation(self) -> GradientAccumulationPlugin:
        """Return the plugin that the arguments mean, its `num_steps` filled in."""
        plugin = _of_kind(self.gradient_accumulation_plugin, GradientAccumulationPlugin, "gradient_accumulation_plugin")
        deepspeed = _of_kind(self.deepspeed_plugin, DeepSpeedPlugin, "deepspeed_plugin")
        # 1 is the default, so it contradicts no plugin.
        steps = None if self.gradient_accumulation_steps == 1 else self.gradient_accumulation_steps
        lengths = {
            "gradient_accumulation_steps": steps,
            "gradient_accumulation_plugin.num_steps": plugin and plugin.num_steps,
            "deepspeed_plugin.gradient_accumulation_steps": deepspeed and deepspeed.gradient_accumulation_steps,
        }
        given = {name: length for name, length in lengths.items() if length is not None}
        if len(set(given.values())) > 1:
            listed = " and ".join(f"{name}={length}" for name, length in given.items())
            raise ValueError(f"{listed} were given. Pass one number.")
        length = next(iter(given.values()), 1)
        if plugin is None:
            return GradientAccumulationPlugin(length)
        chosen: GradientAccumulationPlugin = replace(plugin, num_steps=length)
        return chosen

    def _strategy(self, ddp: DistributedDataParallelKwargs | None) -> str | Strategy:
        fsdp = _of_kind(self.fsdp_plugin, FullyShardedDataParallelPlugin, "fsdp_plugin")
        given = [each for each in (self.deepspeed_plugin, fsdp) if each is not None]
        names = [type(each).__name__ for each in given]
        if names and self.strategy != "auto":
            names.insert(0, f"strategy={self.strategy!r}")
        if len(names) > 1:
            raise ValueError(f"{' and '.join(names)} were given. Pass one.")
        if given:
            return given[0].strategy()
        return self.strategy if ddp is None else ddp.strategy(self.strategy)

    def _precision(self, scaler: GradScalerKwargs | None) -> str | int | Precision | None:
        name = MIXED[self.mixed_precision] if self.mixed_precision is not None else self.precision
        if scaler is None:
            return name
        device_type = resolve_device_type(self.device_type)
        if resolve_precision(name, device_type).name != "16-mixed":
            return name  # as scripts pass the options whatever the precision is
        return scaler.precision("16-mixed", device_type)


def _compiler(given: Any) -> str | None:
    name = str(getattr(given, "value", given)).lower()
    if given is None or name == "no":
        return None
    # By default torch omits backends for debugging, such as "eager".
    known = torch.compiler.list_backends(exclude_tags=())
    if name not in known:
        raise ValueError(
            f"dynamo_backend={given!r} is unknown. Choose from no, {', '.join(known)}.{did_you_mean(name, known)}"
        )
    return name


def _of_kind(given: Any, kind: type, name: str) -> Any:
    if given is not None and not isinstance(given, kind):
        raise TypeError(f"{name} is {a_type_of(given)}. Expected a {kind.__name__} of trainwright.")
    return given
