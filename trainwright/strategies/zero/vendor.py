"""DeepSpeed's package, imported on use and set to this process's device, and its engine around a module."""

from __future__ import annotations

import functools
import importlib
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.devices import cuda
from trainwright.distributed.environment import Environment, announce_local_rank, announced
from trainwright.precision.base import Precision
from trainwright.strategies.divided_optimizers import parameters_of
from trainwright.strategies.module_checks import changed, trained
from trainwright.strategies.zero.master_optimizer import MasterOptimizer
from trainwright.tensor_names import clean_name, is_compiled

ACCELERATORS = ("cpu", cuda.NAME, "xpu")
"""The torch devices that DeepSpeed supports."""


def check_supported(device_type: str, precision: Precision) -> None:
    """Raise ValueError for a device or precision that DeepSpeed lacks. It is imported only for unknown devices."""
    if precision.compute_dtype == torch.float64:
        raise ValueError(
            f"precision={precision.name!r}: DeepSpeed computes in 32 or 16 bits. Choose one of these, or 'fsdp'."
        )
    if device_type not in ACCELERATORS:
        import_deepspeed(torch.device(device_type))


def import_deepspeed(device: torch.device) -> Any:
    """Return the package, set to this device, with only its warnings shown, or raise ValueError for the device."""
    with announced(**({"DS_ACCELERATOR": "cpu"} if device.type == "cpu" else {})):
        import deepspeed

    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    logger.addFilter(_is_relevant)  # once, however often it is called
    # DeepSpeed calls collectives by deprecated names, which users cannot change.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    accelerator = _accelerator(deepspeed, device.type)
    if device.type == "cpu":
        # DeepSpeed's CPU collectives need a compiler, and leak shared memory when killed.
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    else:
        _keep_to_current_device(accelerator)
    return deepspeed


@contextmanager
def _replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of a class or module of DeepSpeed within the context."""
    theirs = {name: getattr(owner, name) for name in attributes}
    try:
        for name, own in attributes.items():
            setattr(owner, name, own)
        yield
    finally:
        for name, their in theirs.items():
            setattr(owner, name, their)


def _compiled_on_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch compiles when it is first called.

    DeepSpeed imports its optimizer Muon to see whether the user has passed one. torch.compile, which decorates Muon's
    functions, imports inductor, which takes a second.
    """
    compiled = functools.cache(lambda: torch.compile(function))
    return functools.wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))


def _accelerator(deepspeed: Any, device_type: str) -> Any:
    """Select and return DeepSpeed's class for a kind of device. The process may have used another before."""
    present = deepspeed.accelerator.get_accelerator()
    if present.device_name() == device_type:
        return present
    if device_type not in ACCELERATORS:
        raise ValueError(
            f"strategy='deepspeed' on {device_type!r}: DeepSpeed does not support it, and would compute on "
            f"{present.device_name()!r}. Choose 'fsdp', or call deepspeed.accelerator.set_accelerator with a class for "
            f"{device_type!r} before you make the Trainer."
        )
    module = importlib.import_module(f"deepspeed.accelerator.{device_type}_accelerator")
    general = importlib.import_module("deepspeed.accelerator.abstract_accelerator").DeepSpeedAccelerator
    kinds = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, general)]
    deepspeed.accelerator.set_accelerator(next(each for each in kinds if each is not general)())
    return deepspeed.accelerator.get_accelerator()


def _keep_to_current_device(accelerator: Any) -> None:
    """Make DeepSpeed compute on the current device, not on device LOCAL_RANK, which counts processes."""
    name_of = accelerator.device_name
    if getattr(name_of, "keeps_to_current_device", False):
        return

    def device_name(index: Any = None) -> str:
        return str(accelerator.current_device_name() if isinstance(index, str) else name_of(index))

    device_name.keeps_to_current_device = True  # type: ignore[attr-defined]
    accelerator.device_name = device_name


def _is_relevant(record: logging.LogRecord) -> bool:
    known = ("untested optimizer", "learning rate from scheduler before it has started")
    return not any(text in record.getMessage() for text in known)


def make_engine(
    part: nn.Module,
    optimizer: MasterOptimizer | None,
    trained: Any,
    config: dict[str, Any],
    device: torch.device,
    check: Callable[[Optimizer], None],
) -> Any:
    """Return DeepSpeed's engine for a module with rank 0's weights. `check` may reject the config's optimizer. Collective."""
    from pydantic import ValidationError

    announce_local_rank(Environment.detect())
    deepspeed = import_deepspeed(device)
    stage = config["zero_optimization"]["stage"]
    refuse_what_cannot_be_sharded(part, stage)
    whole = [p for p in part.parameters() if not hasattr(p, "ds_id")] if stage == 3 else []
    for parameter in whole:
        parameter.data = parameter.data.contiguous()  # stage 3 shards the memory, whatever its strides
    scalars = [p for p in whole if p.dim() == 0]
    own_hooks = {module: set(module._forward_pre_hooks) for module in part.modules()}
    for parameter in scalars:
        parameter.data = parameter.data.reshape(1)
    try:
        compiler = importlib.import_module("deepspeed.runtime.compiler")
        with _patched(deepspeed.DeepSpeedEngine, check), _replaced(compiler, compile=lambda: _compiled_on_call):
            engine = deepspeed.initialize(
                args=None if device.type == "cpu" else SimpleNamespace(device_rank=device.index),
                model=part,
                optimizer=optimizer,
                model_parameters=trained,
                config=config,
                dist_init_required=False,
            )[0]
    except ValidationError as error:
        raise ValueError(
            f"DeepSpeed rejects a setting of the strategy or its config: {error}. Its settings are listed at "
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


def refuse_plain_backward(zero: Any, is_expected: Callable[[], bool], name: str) -> None:
    """Raise RuntimeError if another backward than the strategy's reaches a ZeRO optimizer's parameters.

    Its hooks on the parameters would reduce them in a state of the last backward, or not at all.
    """
    asked_first = zero.should_refresh_expected_hook_count  # in all of those hooks

    def checked() -> bool:
        if not is_expected():
            raise RuntimeError(
                f"loss.backward() was called under strategy {name!r}, which scales losses and shards gradients in a separate "
                "backward. Call accelerator.backward(loss) in a loop, and self.manual_backward(loss) in a training_step."
            )
        return bool(asked_first())

    zero.should_refresh_expected_hook_count = checked


def refuse_other_dtype(sharded: Mapping[str, Any], precision: Precision) -> None:
    """Raise ValueError for parameters that an earlier run has sharded in a different precision."""
    low = precision.param_dtype
    for name, parameter in sharded.items():
        is_low = parameter.ds_tensor.dtype in (torch.bfloat16, torch.float16)
        if parameter.ds_tensor.dtype != low and (low is not None or is_low):
            raise ValueError(
                f"parameter {name!r} was sharded by a run in a different precision, and this one is in {precision.name}. "
                "Continue in that precision, take the whole copy that tw.gather_module(module, all_ranks=True) returns, or "
                "create the module again and load a checkpoint."
            )


def _patched(kind: Any, check: Callable[[Optimizer], None]) -> AbstractContextManager[None]:
    """Patch how engines of this class are created, within the context."""
    configure_theirs, choose_theirs = kind._configure_basic_optimizer, kind._do_optimizer_sanity_check

    def configure(engine: Any, parameters: Any) -> MasterOptimizer:
        optimizer = configure_theirs(engine, parameters)
        check(optimizer)
        return MasterOptimizer(optimizer)

    def choose(engine: Any, optimizer: Any) -> Any:
        # For windows summed in float32 DeepSpeed would choose another class in stage 1, with other masters.
        chosen = choose_theirs(engine, optimizer)
        return "zero_optimization" if engine.zero_optimization() else chosen

    return _replaced(
        kind,
        # DeepSpeed broadcasts parameters as bytes, which fails for 0-dim ones. They are rank 0's already.
        _broadcast_model=lambda engine: None,
        _configure_basic_optimizer=configure,
        _do_optimizer_sanity_check=choose,
    )


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
    """Raise ValueError for an optimizer of parameters that no prepared module has: no engine could divide them."""
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
    named = [
        (f"{path.partition('.')[2].partition('.')[2]}.{name}".removeprefix("."), parameter)  # without "members.0"
        for path, member in part.named_modules()
        for name, parameter in member.named_parameters(recurse=False)
        if parameter.requires_grad or stage == 3
    ]
    for path, member in part.named_modules() if stage == 3 else ():
        if is_compiled(member):
            attribute = clean_name(path.partition(".")[2].partition(".")[2])
            raise ValueError(
                f"{attribute or 'the module'!r} is compiled by torch.compile, and the compiler does not follow the hooks with "
                "which ZeRO stage 3 gathers parameters. Compile it only under other strategies, or choose stage 2 or 'fsdp'."
            )
    dtypes: dict[torch.dtype, str] = {}
    for name, parameter in named:
        dtype = str(parameter.dtype).removeprefix("torch.")
        if parameter.requires_grad:
            dtypes.setdefault(parameter.dtype, name)
        if parameter.is_complex():
            raise ValueError(
                f"parameter {name!r} is {dtype}, and DeepSpeed's masters are real numbers. Keep its real and imaginary parts "
                "as two parameters (torch.view_as_real), or choose 'ddp'."
            )
        if parameter.dtype == torch.float64 and parameter.requires_grad:
            raise ValueError(
                f"parameter {name!r} is float64, and DeepSpeed's masters are float32. Convert it, or choose 'ddp' or 'fsdp'."
            )
        if parameter.numel() == 0 and not hasattr(parameter, "ds_id") and stage == 3:
            raise ValueError(
                f"parameter {name!r} has the shape {tuple(parameter.shape)}, but ZeRO stage 3 cannot gather one without "
                "elements. Make it a buffer, or choose stage 1 or 2."
            )
    if len(dtypes) > 1:
        found = " and ".join(f"{name!r} in {str(dtype).removeprefix('torch.')}" for dtype, name in dtypes.items())
        raise ValueError(
            f"the module trains {found}, but DeepSpeed lays parameters of one dtype out side by side. Convert the module to "
            "one, or choose 'ddp'."
        )
