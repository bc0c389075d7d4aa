"""The configuration of a DeepSpeed engine (the framework's, overridden by the user's), and checks of the run."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.devices import cuda
from trainwright.errors import a_type_of
from trainwright.precision.base import Precision
from trainwright.rank_zero import rank_zero_warn
from trainwright.strategies.base import Optimization
from trainwright.strategies.divided_optimizers import parameters_of
from trainwright.strategies.memory_plan import LARGEST_BUCKET
from trainwright.strategies.module_checks import changed, trained
from trainwright.strategies.zero.vendor import import_deepspeed
from trainwright.tensor_names import clean_name, is_compiled

LOW_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""The sections of a configuration that select a dtype."""
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def read_config(config: str | os.PathLike[str] | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of the user's configuration as a dict, or raise TypeError or ValueError."""
    if config is None:
        return {}
    if isinstance(config, (str, os.PathLike)):
        try:
            with open(config, encoding="utf-8") as file:
                loaded = json.load(file)
        except FileNotFoundError:
            raise ValueError(
                f"config={os.fspath(config)!r}: there is no such file. Pass the path of a DeepSpeed JSON, or its "
                "contents as a dict."
            ) from None
        except ValueError as error:
            raise ValueError(f"config={os.fspath(config)!r} is not JSON ({error}). Correct the file.") from error
        config = loaded
    if not isinstance(config, Mapping):
        raise TypeError(f"config= is {a_type_of(config)}. Expected a dict of settings, or the path of a JSON file.")
    settings = _without_auto(config)
    _check(settings)
    return settings


def _check(config: dict[str, Any]) -> None:
    for key in ("zero_optimization", "fp16", "bf16", "optimizer"):
        if not isinstance(config.get(key, {}), Mapping):
            raise ValueError(f"the DeepSpeed config's {key}={config[key]!r} is not a section. Pass a dict, or omit it.")
    clip, accumulate = config.get("gradient_clipping", 0.0), config.get("gradient_accumulation_steps", 1)
    if isinstance(clip, bool) or not isinstance(clip, (int, float)) or not clip >= 0:
        raise ValueError(f"the DeepSpeed config's gradient_clipping={clip!r} is not a norm. Pass a number, 0 for none.")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(
            f"the DeepSpeed config's gradient_accumulation_steps={accumulate!r} is not accepted. Pass an integer of at least 1."
        )


def _without_auto(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy without the settings that the framework chooses ("auto")."""
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else copy.deepcopy(value)
        for key, value in settings.items()
        if value != "auto"
    }


def refuse_settings(zero: Mapping[str, Any], stage: int) -> None:
    """Raise ValueError for "zero_optimization" settings that this stage lacks.

    Settings that keep optimizer state where no checkpoint finds it are rejected too.
    """
    if stage == 1 and zero.get("overlap_comm"):
        raise ValueError(
            "overlap_comm=True needs stage 2 or 3: stage 1 reduces gradients at the end of an accumulation window, and has "
            "nothing to overlap with. Omit it, or choose stage=2."
        )
    offload = zero.get("offload_optimizer")
    offload = offload if isinstance(offload, Mapping) else {}
    odd = {
        "zenflow": zero.get("zenflow") is not None,
        "offload_optimizer.device='nvme'": offload.get("device") == "nvme",
        "offload_optimizer.ratio": offload.get("ratio", 1.0) != 1.0,
        "offload_optimizer.super_offload": bool(offload.get("super_offload")),
    }
    if name := next((name for name, is_set in odd.items() if is_set), None):
        raise ValueError(
            f"zero_optimization.{name} makes DeepSpeed keep optimizer state where no checkpoint finds it. Omit it, or "
            "offload by {'offload_optimizer': {'device': 'cpu'}}."
        )


def low_precision(config: Mapping[str, Any]) -> str | None:
    """Return "16-mixed" or "bf16-mixed" if the configuration enables one, "32-true" if it disables both, otherwise None."""
    fp16, bf16 = (config.get(key, {}).get("enabled") for key in LOW_DTYPES)
    if fp16 and bf16:
        raise ValueError("the DeepSpeed config enables both fp16 and bf16. Enable one of them.")
    if fp16 or bf16:
        return "16-mixed" if fp16 else "bf16-mixed"
    return "32-true" if fp16 is False and bf16 is False else None


def resolve(config: Mapping[str, Any], optimization: Optimization) -> Optimization:
    """Return the optimization with the configuration's settings, and warn where they differ from the caller's."""
    clip, accumulate = config.get("gradient_clipping"), config.get("gradient_accumulation_steps")
    if accumulate is None and {"train_batch_size", "train_micro_batch_size_per_gpu"} <= config.keys():
        raise ValueError(
            "the DeepSpeed config has train_batch_size and train_micro_batch_size_per_gpu, but no accumulation. Set "
            "gradient_accumulation_steps, or omit all three, because batches are the DataLoader's."
        )
    if not optimization.automatic:
        if clip or (accumulate or 1) > 1:
            raise ValueError(
                "the DeepSpeed config has gradient_clipping or gradient_accumulation_steps, but this module has "
                "automatic_optimization = False. Clip and accumulate in training_step, and omit them in the config."
            )
        return optimization
    norm, length = optimization.clip_norm, optimization.accumulate
    if clip is not None and float(clip) != (norm or 0.0):
        if norm is not None:
            _warn("gradient_clipping", clip, f"gradient_clip_val={norm}")
        norm = float(clip) or None
    if accumulate is not None and accumulate != length:
        if length != 1:
            _warn("gradient_accumulation_steps", accumulate, f"accumulate_grad_batches={length}")
        length = accumulate
    return replace(optimization, clip_norm=norm, accumulate=length)


def build_config(
    own: Mapping[str, Any],
    stage: int,
    *,
    precision: Precision,
    offload_optimizer: bool,
    offload_parameters: bool,
    parameters: Iterable[Any],
    **zero: Any,
) -> dict[str, Any]:
    """Return an engine's configuration. The keys of the user's `own` win, except keys of steps and windows.

    `parameters` are all of the engine's, frozen ones too.
    """
    trained = sum(getattr(each, "ds_numel", each.numel()) for each in set(parameters) if each.requires_grad)
    config: dict[str, Any] = {
        "gradient_clipping": 0.0,  # the default would clip at 1.0, while every step sets a norm
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**12,
    }
    if precision.autocast_dtype == torch.float16:
        config["fp16"] = {"hysteresis": 1, "loss_scale_window": 2000}  # the loss scale moves as torch's GradScaler
    if precision.param_dtype in LOW_DTYPES.values():
        config["data_types"] = {"grad_accum_dtype": "fp32"}  # the default sums windows in 16 bits
    config["zero_optimization"] = {
        "stage": stage,
        "overlap_comm": False,
        # A backward allocates this many elements. More than the model trains would stay empty.
        "reduce_bucket_size": min(max(trained, 1), LARGEST_BUCKET),
        "memory_efficient_linear": False,  # True replaces torch.nn.functional.linear in the whole process
        **zero,
    }
    if offload_optimizer:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if offload_parameters:
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    merged = _merged(config, own)
    for key in BATCH_KEYS:
        merged.pop(key, None)
    # Mixed precisions use autocast on float32 weights, because DeepSpeed's modes convert every layer's weights, which some
    # operations do not accept. Of the "fp16" section only the loss scale's settings are used then.
    for section, dtype in LOW_DTYPES.items():
        merged[section] = {**merged.get(section, {}), "enabled": precision.param_dtype == dtype}
    # The caller's step() ends a window, whatever its length. The sizes only appear in DeepSpeed's reports.
    merged |= {
        "train_micro_batch_size_per_gpu": own.get("train_micro_batch_size_per_gpu", 1),
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
    }
    return merged


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def _warn(key: str, value: Any, given: str) -> None:
    rank_zero_warn(
        f"the DeepSpeed config says {key}={value}, and the Trainer {given}: the config's is used.", stacklevel=6
    )


def check_supported(device_type: str, precision: Precision) -> None:
    """Raise ValueError for a device or precision that DeepSpeed lacks. It is imported only for unknown devices."""
    if precision.compute_dtype == torch.float64:
        raise ValueError(f"precision={precision.name!r}: DeepSpeed computes in 32 or 16 bits. Choose these, or 'fsdp'.")
    if device_type not in ("cpu", cuda.NAME, "xpu"):
        import_deepspeed(torch.device(device_type))


def refuse_other_parameters(module: nn.Module, before: Mapping[str, nn.Parameter] | None) -> None:
    """Raise RuntimeError if other parameters are trained than `before`, unless that is None, or have replaced them."""
    now = trained(module)
    if names := [] if before is None else changed(before, now):
        done, way = "frozen or unfrozen", "Freeze before fit and resume from a checkpoint in a second fit"
        if before is not None and names[0] in before and names[0] in now:
            done, way = "replaced", "Copy the new values into the parameter that is there"
        raise RuntimeError(
            f"{names[0]!r} of {type(module).__name__} was {done} after its optimizer was prepared, which DeepSpeed cannot "
            f"follow. {way}, or choose 'ddp'."
        )


def refuse_strangers(optimizer: Optimizer, own: Collection[Tensor]) -> None:
    strangers = [each for each in parameters_of(optimizer) if each.requires_grad and each not in own]
    if strangers:
        raise ValueError(
            f"{type(optimizer).__name__} trains parameters of no prepared module, the first of shape "
            f"{list(strangers[0].shape)}, which DeepSpeed cannot divide among the ranks. Assign them to attributes of the "
            "module in __init__ (a tensor as an nn.Parameter, several modules as an nn.ModuleList). Or choose 'ddp', under "
            "which every rank trains them separately."
        )


def refuse_what_cannot_be_sharded(part: nn.Module, stage: int) -> None:
    """Raise ValueError for parameters that ZeRO cannot train, or would train differently than one process."""
    dtypes: dict[torch.dtype, str] = {}
    for path, member in part.named_modules():
        prefix = path.partition(".")[2].partition(".")[2]  # without "members.0"
        if stage == 3 and is_compiled(member):
            raise ValueError(
                f"{clean_name(prefix) or 'the module'!r} is compiled by torch.compile, and the compiler does not follow the "
                "hooks with which ZeRO stage 3 gathers parameters. Compile it only under other strategies, or choose stage 2 "
                "or 'fsdp'."
            )
        for name, parameter in member.named_parameters(recurse=False):
            if parameter.requires_grad:
                dtypes.setdefault(parameter.dtype, f"{prefix}.{name}".removeprefix("."))
    found = " and ".join(f"{name!r} in {str(dtype).removeprefix('torch.')}" for dtype, name in dtypes.items())
    if len(dtypes) > 1 or any(dtype.is_complex or dtype == torch.float64 for dtype in dtypes):
        raise ValueError(
            f"the module trains {found}, but DeepSpeed lays parameters of one dtype out side by side, and its masters are "
            "float32. Convert the module to one dtype of 32 or 16 bits, or choose 'ddp'."
        )
