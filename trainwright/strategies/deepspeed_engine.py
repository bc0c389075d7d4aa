"""Creates DeepSpeed's engine around a module, and works around what users cannot change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.distributed.environment import Environment, announce_local_rank
from trainwright.precision.base import Precision
from trainwright.strategies.deepspeed_package import import_deepspeed
from trainwright.strategies.master_optimizer import MasterOptimizer


def make_engine(
    part: nn.Module,
    optimizer: MasterOptimizer | None,
    trained: Any,
    config: dict[str, Any],
    device: torch.device,
    check: Callable[[Optimizer], None],
) -> Any:
    """Return DeepSpeed's engine around a module whose weights are already rank 0's. Collective.

    `trained` are the parameters for an optimizer that the config defines, which `check` may refuse.

    Raises:
        ValueError: DeepSpeed refuses a setting, or cannot train a parameter.
    """
    announce_local_rank(Environment.detect().local_rank)
    deepspeed = import_deepspeed(device)
    is_sharding = config["zero_optimization"]["stage"] == 3
    refuse_what_cannot_be_sharded(part, config["zero_optimization"]["stage"])
    whole = [p for p in part.parameters() if not hasattr(p, "ds_id")] if is_sharding else []
    for parameter in whole:
        parameter.data = parameter.data.contiguous()  # stage 3 shards the memory, whatever its strides
    scalars = [p for p in whole if p.dim() == 0]
    own_hooks = {module: set(module._forward_pre_hooks) for module in part.modules()}
    for parameter in scalars:
        parameter.data = parameter.data.reshape(1)
    try:
        with _own_ways(deepspeed.DeepSpeedEngine, check):
            engine = deepspeed.initialize(
                args=None if device.type == "cpu" else SimpleNamespace(device_rank=device.index),
                model=part,
                optimizer=optimizer,
                model_parameters=trained,
                config=config,
                dist_init_required=False,
            )[0]
    except pydantic_error() as error:
        raise ValueError(
            f"DeepSpeed refuses a setting of the strategy or its config: {error}. Its settings are listed at "
            "https://www.deepspeed.ai/docs/config-json."
        ) from error
    _make_printable(part)
    _gather_first(own_hooks)
    for parameter in scalars:
        parameter.ds_shape = torch.Size([])  # type: ignore[attr-defined]
        if parameter.numel() == 1:
            parameter.data = parameter.data.reshape(())
    return engine


def _make_printable(part: nn.Module) -> None:
    """Unbind the methods that DeepSpeed stores on modules: EmbeddingBag prints its attributes, and would recurse."""
    for module in part.modules():
        for name in ("ds_external_parameters", "all_parameters"):
            method = module.__dict__.get(name)
            if getattr(method, "__self__", None) is module:
                module.__dict__[name] = lambda *args, call=method: call(*args)


def _gather_first(own_hooks: dict[nn.Module, set[int]]) -> None:
    """Run the engine's gathering hooks before the user's, which may use the parameters (weight_norm does)."""
    for module, own in own_hooks.items():
        hooks: Any = module._forward_pre_hooks
        for key in [each for each in reversed(hooks) if each not in own] if own else ():
            hooks.move_to_end(key, last=False)


def scale_losses(engine: Any) -> None:
    """Give an engine with float32 weights the loss scale of its float16 configuration."""
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

    zero = engine.optimizer
    zero.loss_scaler = CreateLossScaler(
        dtype=torch.float16,
        static_loss_scale=engine.loss_scale(),
        dynamic_scaling=engine.dynamic_loss_scale(),
        dynamic_loss_args=engine.dynamic_loss_scale_args(),
    )
    zero.dynamic_loss_scale = zero.loss_scaler.dynamic


def refuse_other_dtype(sharded: Mapping[str, Any], precision: Precision) -> None:
    """Raise ValueError for parameters that an earlier run has sharded in another precision."""
    low = precision.param_dtype
    for name, parameter in sharded.items():
        is_low = parameter.ds_tensor.dtype in (torch.bfloat16, torch.float16)
        if parameter.ds_tensor.dtype != low and (low is not None or is_low):
            raise ValueError(
                f"parameter {name!r} was sharded by a run in another precision, and this one is in {precision.name}; "
                "continue in that precision, take the whole copy that tw.gather_module(module, all_ranks=True) gives, or "
                "create the module again and load a checkpoint."
            )


@contextmanager
def _own_ways(kind: Any, look: Callable[[Optimizer], None]) -> Iterator[None]:
    """Patch how engines of this class are created, within the context."""
    theirs = {name: getattr(kind, name) for name in ("_broadcast_model", "_configure_basic_optimizer")}
    check = kind._do_optimizer_sanity_check

    def configure(engine: Any, parameters: Any) -> MasterOptimizer:
        optimizer = theirs["_configure_basic_optimizer"](engine, parameters)
        look(optimizer)
        return MasterOptimizer(optimizer)

    def choose(engine: Any, optimizer: Any) -> Any:
        # For windows summed in float32 DeepSpeed would choose another class in stage 1, with other masters.
        chosen = check(engine, optimizer)
        return "zero_optimization" if engine.zero_optimization() else chosen

    # DeepSpeed broadcasts parameters as bytes, which fails for 0-dim ones. They are rank 0's already.
    kind._broadcast_model = lambda engine: None
    kind._configure_basic_optimizer = configure
    kind._do_optimizer_sanity_check = choose
    try:
        yield
    finally:
        for name, own in theirs.items():
            setattr(kind, name, own)
        kind._do_optimizer_sanity_check = check


def refuse_what_cannot_be_sharded(part: nn.Module, stage: int) -> None:
    """Raise ValueError for parameters that ZeRO cannot train, or would train differently than one process."""
    named = [
        (f"{prefix}.{name}" if (prefix := place.partition(".")[2].partition(".")[2]) else name, parameter)
        for place, member in part.named_modules()
        for name, parameter in member.named_parameters(recurse=False)
        if parameter.requires_grad or stage == 3
    ]
    for name, parameter in named:
        told = str(parameter.dtype).removeprefix("torch.")
        if parameter.is_complex():
            raise ValueError(
                f"parameter {name!r} is {told}, and DeepSpeed's masters are real numbers; keep its real and imaginary parts as "
                "two parameters (torch.view_as_real), or choose 'ddp'."
            )
        if parameter.dtype == torch.float64 and parameter.requires_grad:
            raise ValueError(
                f"parameter {name!r} is float64, and DeepSpeed's masters are float32; convert it, or choose 'ddp' or 'fsdp'."
            )
        if parameter.numel() == 0 and not hasattr(parameter, "ds_id") and stage == 3:
            raise ValueError(
                f"parameter {name!r} has the shape {tuple(parameter.shape)}, but ZeRO stage 3 cannot gather one without "
                "elements; make it a buffer, or choose stage 1 or 2."
            )
    dtypes: dict[torch.dtype, str] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            dtypes.setdefault(parameter.dtype, name)
    if len(dtypes) > 1:
        told = " and ".join(f"{name!r} in {str(dtype).removeprefix('torch.')}" for dtype, name in dtypes.items())
        raise ValueError(
            f"the module trains {told}, but DeepSpeed lays parameters of one dtype out side by side; convert the module to "
            "one, or choose 'ddp'."
        )


def pydantic_error() -> type[Exception]:
    """Return the error that DeepSpeed raises for its settings."""
    from pydantic import ValidationError

    return ValidationError
