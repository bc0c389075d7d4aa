"""Plugins: how Accelerate's users configure accumulation, FSDP and DeepSpeed, as settings of a strategy."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.arguments import NamedArguments
from trainwright.strategies import Strategy, make_strategy

FSDP_VALUES: dict[str, tuple[Any, ...]] = {
    "sharding_strategy": (None, 1, 2, "FULL_SHARD", "SHARD_GRAD_OP"),
    "auto_wrap_policy": (None, "transformer_based_wrap", "size_based_wrap", "no_wrap"),
    "use_orig_params": (None, True),
    "ignored_modules": (None,),
    "param_init_fn": (None,),
}
"""The accepted values of the FSDP plugin's fields. A policy may also be a function."""
FSDP_REASONS = {
    "sharding_strategy": "strategy='ddp' keeps the model whole; tw.FSDPStrategy(num_replicas=) shards within groups",
    "auto_wrap_policy": "or pass module classes, or a function of a module",
    "use_orig_params": "parameters always keep their names and shapes",
    "ignored_modules": "every parameter is sharded",
    "param_init_fn": "build the model on the meta device, and its reset_parameters are run",
}


@dataclass
class GradientAccumulationPlugin(NamedArguments):
    """How gradients are accumulated.

    Args:
        num_steps: batches per optimizer step, or None for the Accelerator's gradient_accumulation_steps.
        adjust_scheduler: accepted. Prepared schedulers step once per optimizer step either way.
        sync_with_dataloader: whether a window ends at the end of its loader. Otherwise the next epoch fills it.
        sync_each_batch: average the gradients over the ranks in every batch, which saves memory under sharding strategies.

    Raises:
        ValueError: num_steps is below 1.

    >>> plugin = tw.GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    >>> accelerator = tw.Accelerator(gradient_accumulation_plugin=plugin)
    >>> accelerator.gradient_accumulation_steps
    4
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if self.num_steps is not None:
            check_length(self.num_steps, "num_steps")


@dataclass
class FullyShardedDataParallelPlugin(NamedArguments):
    """The strategy "fsdp", under the names that Accelerate has for its options.

    Fields that torch's FSDP2 does not need are accepted if their promise holds. Parameters keep their names, gathers are
    limited, and all ranks start from rank 0's weights. One checkpoint format is loaded by every strategy.

    Args:
        reshard_after_forward: False keeps the parameters whole between forward and backward.
        sharding_strategy: "FULL_SHARD", or "SHARD_GRAD_OP" for reshard_after_forward=False.
        auto_wrap_policy: module classes, a function of a module, "transformer_based_wrap", "size_based_wrap" or "no_wrap".
        transformer_cls_names_to_wrap: class names of the modules to shard one by one.
        min_num_params: for "size_based_wrap": the parameters of the smallest module to shard.
        cpu_offload: keep the shards in host memory.
        activation_checkpointing: recompute the activations of the sharded modules.
        mixed_precision_policy: torch's MixedPrecisionPolicy.

    Raises:
        ValueError: a value that the strategy cannot fulfil.

    >>> plugin = tw.FullyShardedDataParallelPlugin(sharding_strategy="SHARD_GRAD_OP", min_num_params=1_000_000)
    >>> accelerator = tw.Accelerator(fsdp_plugin=plugin, devices=2)
    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """

    fsdp_version: int = 2
    sharding_strategy: str | int | None = None
    reshard_after_forward: bool | None = None
    auto_wrap_policy: Any = None
    transformer_cls_names_to_wrap: Sequence[str] | None = None
    min_num_params: int | None = None
    cpu_offload: bool | Any = False
    activation_checkpointing: bool = False
    mixed_precision_policy: Any = None
    backward_prefetch: Any = None
    forward_prefetch: bool = False
    state_dict_type: Any = None
    use_orig_params: bool | None = None
    limit_all_gathers: bool = True
    sync_module_states: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    ignored_modules: Any = None
    param_init_fn: Any = None

    def __post_init__(self) -> None:
        for name, accepted in FSDP_VALUES.items():
            value = getattr(self, name)
            is_policy = name == "auto_wrap_policy" and not isinstance(value, str)
            if not is_policy and value not in accepted:
                raise ValueError(
                    f"FullyShardedDataParallelPlugin({name}={value!r}) is not accepted. Choose from "
                    f"{', '.join(map(repr, accepted))}: {FSDP_REASONS[name]}."
                )

    def strategy(self) -> Strategy:
        """Return the strategy of these settings."""
        # 2 is the number of SHARD_GRAD_OP in Accelerate's configs.
        is_grad_only = self.sharding_strategy in (2, "SHARD_GRAD_OP")
        reshards = not is_grad_only if self.reshard_after_forward is None else self.reshard_after_forward
        options: dict[str, Any] = {
            "reshard_after_forward": bool(reshards),
            # A bool, or torch's CPUOffload, which holds one.
            "cpu_offload": bool(getattr(self.cpu_offload, "offload_params", self.cpu_offload)),
            "mixed_precision": self.mixed_precision_policy,
            "auto_wrap_policy": self._policy(),
        }
        if self.min_num_params is not None:
            options["min_parameters"] = self.min_num_params
        if self.activation_checkpointing:
            options["activation_checkpointing_policy"] = True
        return make_strategy("fsdp", options)

    def _policy(self) -> Any:
        if self.transformer_cls_names_to_wrap and self.auto_wrap_policy in (None, "transformer_based_wrap"):
            names = frozenset(self.transformer_cls_names_to_wrap)
            return lambda module: type(module).__name__ in names
        if self.auto_wrap_policy == "no_wrap":
            return lambda module: False
        return None if isinstance(self.auto_wrap_policy, str) else self.auto_wrap_policy


@dataclass
class DeepSpeedPlugin(NamedArguments):
    """The strategy "deepspeed", under the names that Accelerate has for its options.

    Args:
        hf_ds_config: a DeepSpeed configuration, as a dict or the path of a JSON file. "auto" leaves a value to the Accelerator.
        gradient_accumulation_steps: None for the Accelerator's.
        gradient_clipping: the limit on the gradients' norm in a step.
        zero_stage: 1, 2 or 3, by default the configuration's, or 2.
        offload_optimizer_device, offload_param_device: "none" or "cpu".
        zero3_init_flag: accepted. It has no effect.
        zero3_save_16bit_model: accepted. `save_model` gathers the weights under every stage.

    Raises:
        ValueError: a value that the strategy cannot fulfil.

    >>> plugin = tw.DeepSpeedPlugin(zero_stage=2, gradient_clipping=1.0)
    >>> accelerator = tw.Accelerator(deepspeed_plugin=plugin, devices=2)
    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """

    hf_ds_config: Mapping[str, Any] | str | os.PathLike[str] | None = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None
    zero_stage: int | None = None
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None

    def __post_init__(self) -> None:
        for name in ("offload_optimizer_device", "offload_param_device"):
            if (value := getattr(self, name)) not in (None, "none", "cpu"):
                raise ValueError(
                    f"DeepSpeedPlugin({name}={value!r}) is not accepted. Choose 'none' or 'cpu', or give a configuration "
                    "as hf_ds_config= whose zero_optimization section names the device."
                )
        if self.gradient_accumulation_steps is not None:
            check_length(self.gradient_accumulation_steps, "gradient_accumulation_steps")

    def strategy(self) -> Strategy:
        """Return the strategy of these settings."""
        options = {"stage": self.zero_stage, "config": self.hf_ds_config}
        options |= {"offload_optimizer": self.offload_optimizer_device == "cpu"}
        return make_strategy("deepspeed", {**options, "offload_parameters": self.offload_param_device == "cpu"})


def check_length(length: Any, name: str) -> None:
    """Refuse a number of batches that is not an integer of at least 1 (ValueError)."""
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ValueError(f"{name}={length!r} is not accepted. Pass an integer of at least 1.")
