"""Optimizers: checks of `configure_optimizers` results and closures, the clearing of gradients, and fused steps."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Adagrad, Adam, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainwright.devices.abilities import fuses
from trainwright.errors import a_type_of, did_you_mean
from trainwright.rank_zero import rank_zero_warn
from trainwright.strategies.divided_optimizers import unwrap_optimizer

INTERVALS = ("epoch", "step", "validation")
ACCEPTED = (
    "an Optimizer, a list of them, a pair ([optimizers], [schedulers]), a dict with 'optimizer' and optionally "
    "'lr_scheduler', a list of such dicts, or None"
)
OPTIMIZER_KEYS = ("optimizer", "lr_scheduler", "monitor")
SCHEDULER_KEYS = ("scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau")
_TORCHS_ZERO_GRAD = Optimizer.zero_grad
FUSED_CLASSES = (Adam, SGD, Adagrad)  # AdamW is an Adam
FUSED_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_watched: WeakSet[Optimizer] = WeakSet()
"""The optimizers whose steps begin with `_add_momentum`."""


@dataclass
class SchedulerConfig:
    """A scheduler and when it steps.

    It steps after every `frequency` of its `interval`: "epoch", "step" (an optimizer step) or "validation". `monitor` is the
    metric that a scheduler like ReduceLROnPlateau follows. `strict` makes it an error if that was not logged, and
    `reduce_on_plateau` says whether step() takes it. The learning rate is logged under `name`.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    name: str | None = None
    reduce_on_plateau: bool | None = None

    def __post_init__(self) -> None:
        if self.interval not in INTERVALS:
            raise ValueError(
                f"interval={self.interval!r} of a scheduler is unknown; choose from {', '.join(INTERVALS)}."
            )
        if not isinstance(self.frequency, int) or self.frequency < 1:
            raise ValueError(
                f"frequency={self.frequency!r} of a scheduler is not accepted; pass an integer of at least 1."
            )
        if self.reduce_on_plateau is None:
            self.reduce_on_plateau = isinstance(self.scheduler, ReduceLROnPlateau)

    def is_of(self, optimizer: Optimizer) -> bool:
        """Return whether the scheduler sets the rates of an optimizer, or of the optimizer that a strategy has wrapped."""
        scheduled = getattr(self.scheduler, "optimizer", None)
        return scheduled is optimizer or scheduled is unwrap_optimizer(optimizer)


def read_optimizers(returned: Any, *, is_manual: bool = False) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Return the optimizers and schedulers from a `configure_optimizers` result, which the module steps if `is_manual`.

    Raises:
        TypeError: the result has another form.
        ValueError: a setting of a scheduler is wrong, or a key is unknown.
    """
    if returned is None:
        rank_zero_warn(
            "configure_optimizers returned None, so nothing will be trained; return an optimizer if that is not intended.",
            stacklevel=2,
        )
        return [], []
    optimizers, schedulers = _split(returned)
    configs = [_config(scheduler) for scheduler in schedulers]
    for config in configs:
        check_scheduler(config, optimizers, is_manual)
    return optimizers, configs


def check_scheduler(config: SchedulerConfig, optimizers: Sequence[Optimizer], is_manual: bool = False) -> None:
    """Raise TypeError or ValueError for an object that is no scheduler of these optimizers."""
    scheduler, kind = config.scheduler, type(config.scheduler).__name__
    if isinstance(scheduler, Optimizer) or not (is_manual or callable(getattr(scheduler, "step", None))):
        raise TypeError(
            f"a scheduler was expected, got {a_type_of(scheduler)}; pass a torch LRScheduler, or an object "
            "with step() and state_dict()."
        )
    if not any(getattr(scheduler, "optimizer", optimizer) is optimizer for optimizer in optimizers):
        raise ValueError(
            f"the {kind} that configure_optimizers returned schedules an optimizer that it did not return; make it with one "
            "of those returned."
        )
    if config.reduce_on_plateau and config.monitor is None and not is_manual:
        raise ValueError(
            f"{kind} needs the metric to follow: return {{'scheduler': ..., 'monitor': 'val_loss'}} with a name that you log."
        )


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's step requires a closure, as in LBFGS."""
    first = next(iter(_step_parameters(optimizer)), None)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return first is not None and first.default is inspect.Parameter.empty and first.kind in positional


def may_use_closure(optimizer: Optimizer) -> bool:
    """Return whether the optimizer needs a closure, or may call it more than once."""
    if needs_closure(optimizer):
        return True
    step = inspect.unwrap(type(optimizer).step)  # torch wraps the step of each class, for its profiler
    calls_once = step.__module__.startswith(("torch.optim.", "trainwright.optim"))  # except LBFGS
    return not calls_once and any(parameter.name == "closure" for parameter in _step_parameters(optimizer))


def _step_parameters(optimizer: Optimizer) -> list[inspect.Parameter]:
    return list(inspect.signature(type(optimizer).step).parameters.values())[1:]


def clear_gradients(optimizer: Optimizer) -> None:
    """Set the gradients of an optimizer to None, as its `zero_grad` does."""
    # Torch's zero_grad takes about 10 us for a profiler's region and for the needs of torch.compile.
    is_torchs = type(optimizer).zero_grad is _TORCHS_ZERO_GRAD and "zero_grad" not in vars(optimizer)
    if not is_torchs or profiler._is_profiler_enabled:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _split(returned: Any) -> tuple[list[Optimizer], list[Any]]:
    """Return the optimizers, and the schedulers or their dicts, of one of the accepted forms."""
    if isinstance(returned, (Optimizer, Mapping)):
        returned = [returned]
    if not isinstance(returned, (list, tuple)) or not returned:
        shown = f"the class {returned.__name__}" if isinstance(returned, type) else a_type_of(returned)
        raise TypeError(f"configure_optimizers returned {shown}; expected {ACCEPTED}.")
    optimizers: list[Optimizer] = []
    schedulers: list[Any] = []
    if len(returned) == 2 and all(isinstance(part, (list, tuple)) for part in returned):
        returned, schedulers = returned[0], list(returned[1])
    for index, item in enumerate(returned):
        optimizer, more = _split_mapping(item) if isinstance(item, Mapping) else (item, [])
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"item {index} of the configure_optimizers result is {a_type_of(optimizer)}, not an Optimizer; expected "
                f"{ACCEPTED}."
            )
        optimizers.append(optimizer)
        schedulers += more
    return optimizers, schedulers


def _split_mapping(returned: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    unknown = [key for key in returned if key not in OPTIMIZER_KEYS]
    if unknown or "optimizer" not in returned:
        raise ValueError(
            f"the configure_optimizers result is a dict with the keys {list(returned)}; expected 'optimizer', 'lr_scheduler' "
            f"and 'monitor'.{_suggestions(unknown, OPTIMIZER_KEYS)}"
        )
    scheduler = returned.get("lr_scheduler")
    if scheduler is None:
        return returned["optimizer"], []
    if not isinstance(scheduler, Mapping):
        scheduler = {"scheduler": scheduler}
    return returned["optimizer"], [{"monitor": returned.get("monitor"), **scheduler}]


def _config(scheduler: Any) -> SchedulerConfig:
    if not isinstance(scheduler, Mapping):
        return SchedulerConfig(scheduler)
    unknown = [key for key in scheduler if key not in SCHEDULER_KEYS]
    if "scheduler" not in scheduler:
        raise ValueError(
            f"a scheduler's dict has the keys {list(scheduler)}; 'scheduler' is required, and optional are "
            f"{', '.join(SCHEDULER_KEYS[1:])}.{_suggestions(unknown, SCHEDULER_KEYS)}"
        )
    if unknown:
        rank_zero_warn(
            f"a scheduler's dict has the keys {unknown}, which have no effect; expected {', '.join(SCHEDULER_KEYS)}."
            f"{_suggestions(unknown, SCHEDULER_KEYS)}",
            stacklevel=3,
        )
    return SchedulerConfig(**{key: scheduler[key] for key in SCHEDULER_KEYS if key in scheduler})


def _suggestions(unknown: Sequence[str], known: Sequence[str]) -> str:
    return "".join(did_you_mean(key, known) for key in unknown)


def use_fused(optimizer: Optimizer, modules: Iterable[nn.Module] = ()) -> bool:
    """Fuse the groups whose `fused` and `foreach` are None, where possible. Return whether any group is fused.

    Call it again for groups that were added since. `modules` contain the parameters that the optimizer steps. Their embeddings
    may have sparse gradients, which no fused kernel takes.
    """
    # Compares the inner functions, because torch wraps the method when it makes the first instance of a class.
    step = inspect.unwrap(type(optimizer).step)
    kind = next((kind for kind in FUSED_CLASSES if step is inspect.unwrap(kind.step)), None)
    if kind is None:
        return False
    layers = [layer for module in modules for layer in module.modules() if getattr(layer, "sparse", False) is True]
    sparse = {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
    for group in optimizer.param_groups:
        if group.get("fused", False) is None and any(map(is_lazy, group["params"])):
            # For good: a later call, once the layers have run, would fuse it, but in a resumed run at another step.
            group["fused"] = False
        if _can_be_fused(group, kind, sparse):
            group["fused"] = True
            for parameter in group["params"]:
                # The kernel needs the count of steps on the parameter's device. An unfused step has it in host memory.
                if "step" in (state := optimizer.state.get(parameter, {})):
                    state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=parameter.device)
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    has_momentum = kind is SGD and any(group["momentum"] for group in optimizer.param_groups)
    if is_fused and has_momentum and optimizer not in _watched:
        _watched.add(optimizer)
        optimizer.register_step_pre_hook(_add_momentum)
    return is_fused


def _can_be_fused(group: dict[str, Any], kind: type[Optimizer], sparse: set[int]) -> bool:
    if group.get("fused", False) is not None or group.get("foreach", False) is not None:
        return False
    if group.get("capturable") or group.get("differentiable") or group.get("dampening"):  # see _add_momentum
        return False
    if any(isinstance(value, Tensor) for value in (group["lr"], *group.get("betas", ()))):
        return False  # a kernel would round a tensor of float64
    return all(_is_fit(parameter, kind) and id(parameter) not in sparse for parameter in group["params"])


def _is_fit(parameter: Tensor, kind: type[Optimizer]) -> bool:
    if type(parameter) not in (Tensor, nn.Parameter) or parameter.is_meta:
        return False
    # Fused kernels ignore strides. empty_like keeps the strides only if the tensor's elements are adjacent in memory.
    if parameter.dtype not in FUSED_DTYPES or torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        return False
    # On the CPU torch 2.13's fused SGD does not update most elements of a half-precision tensor.
    if kind is SGD and parameter.device.type == "cpu" and parameter.dtype in (torch.bfloat16, torch.float16):
        return False
    return fuses(parameter.device.type, kind.__name__, parameter.dtype)


def _add_momentum(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Give a momentum buffer of zeros to parameters that lack one before a fused step of SGD.

    Its kernel takes all momentum buffers or none, but a parameter may get its first gradient late, when it is unfrozen.
    """
    groups, state = optimizer.param_groups, optimizer.state
    if len(state) >= sum(len(group["params"]) for group in groups):  # the usual step
        return
    for group in groups:
        if group["fused"] and group["momentum"] and any(state.get(parameter) for parameter in group["params"]):
            for parameter in group["params"]:
                if parameter.requires_grad and not state.get(parameter):
                    state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
