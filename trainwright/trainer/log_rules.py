"""Rules of self.log: where it may be called, what it does there by default, and which settings it takes.

All of it is checked at the first log of a name in a hook; later calls must repeat the settings.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from trainwright.errors import a_type_of


class LogRule(NamedTuple):
    on_step: bool
    """The default of on_step."""
    on_epoch: bool
    """The default of on_epoch."""
    has_step: bool
    """Whether a batch runs there, so that on_step may be chosen."""


_IN_TRAINING = LogRule(on_step=True, on_epoch=False, has_step=True)
_IN_EVALUATION = LogRule(on_step=False, on_epoch=True, has_step=True)
_BETWEEN_BATCHES = LogRule(on_step=False, on_epoch=True, has_step=False)

_OF_EVALUATION = {
    "on_{}_start": _BETWEEN_BATCHES,
    "on_{}_epoch_start": _BETWEEN_BATCHES,
    "on_{}_batch_start": _IN_EVALUATION,
    "{}_step": _IN_EVALUATION,
    "on_{}_batch_end": _IN_EVALUATION,
    "on_{}_epoch_end": _BETWEEN_BATCHES,
}
LOG_RULES: dict[str, LogRule] = {
    "on_train_start": _BETWEEN_BATCHES,
    "on_train_epoch_start": _BETWEEN_BATCHES,
    "on_train_batch_start": _IN_TRAINING,
    "on_before_zero_grad": _IN_TRAINING,
    "optimizer_zero_grad": _IN_TRAINING,
    "training_step": _IN_TRAINING,
    "on_before_backward": _IN_TRAINING,
    "backward": _IN_TRAINING,
    "on_after_backward": _IN_TRAINING,
    "on_before_optimizer_step": _IN_TRAINING,
    "configure_gradient_clipping": _IN_TRAINING,
    "clip_gradients": _IN_TRAINING,
    "optimizer_step": _IN_TRAINING,
    "on_train_batch_end": _IN_TRAINING,
    "on_train_epoch_end": _BETWEEN_BATCHES,
    **{name.format(stage): rule for stage in ("validation", "test") for name, rule in _OF_EVALUATION.items()},
}
"""Each step and hook that may log, in the order of a run. The others collect nothing."""

# By name, or by the functions that scripts written for Lightning pass.
_REDUCTIONS: dict[str, tuple[Any, ...]] = {
    "mean": ("mean", "avg", torch.mean),
    "sum": ("sum", sum, torch.sum),
    "min": ("min", min, torch.min),
    "max": ("max", max, torch.max),
}


class LogSettings(NamedTuple):
    """The arguments of self.log that a name keeps, as they were given."""

    prog_bar: bool
    logger: bool | None
    on_step: bool | None
    on_epoch: bool | None
    reduce_fx: Any
    enable_graph: bool
    sync_dist: bool
    sync_dist_group: Any
    add_dataloader_idx: bool
    metric_attribute: str | None
    rank_zero_only: bool


def check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a metric's name is a str; self.log got {name!r}, {a_type_of(name)}. Use str(...).")


def choose_levels(name: str, hook: str, settings: LogSettings) -> tuple[bool, bool]:
    """Return (on_step, on_epoch), by the hook's default unless given.

    Raises:
        RuntimeError: nothing may be logged in the hook.
        ValueError: the hook cannot have these levels.
    """
    rule = LOG_RULES.get(hook)
    if rule is None:
        raise RuntimeError(
            f"self.log({name!r}, ...) was called {f'in {hook}' if hook else 'outside of a step or hook'}, where nothing is "
            "collected. Log in training_step, validation_step, test_step, in the hooks of a batch, in on_train_start, "
            "on_train_epoch_start or on_train_epoch_end, or in those hooks of validation and test."
        )
    on_step = rule.on_step if settings.on_step is None else bool(settings.on_step)
    on_epoch = rule.on_epoch if settings.on_epoch is None else bool(settings.on_epoch)
    if not rule.has_step and (on_step or not on_epoch):
        raise ValueError(
            f"self.log({name!r}, on_step={on_step}, on_epoch={on_epoch}) was called in {hook}, where there is no batch and so "
            "no step. Leave on_step at False and on_epoch at True."
        )
    if not on_step and not on_epoch:
        raise ValueError(
            f"self.log({name!r}, ...) has on_step=False and on_epoch=False. Set at least one of them to True."
        )
    return on_step, on_epoch


def reduction_named(reduce_fx: Any) -> str:
    """Return "mean", "sum", "min" or "max" for a name or a function; ValueError for any other."""
    wanted = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx
    for reduction, forms in _REDUCTIONS.items():
        if wanted in forms:
            return reduction
    raise ValueError(
        f"reduce_fx={reduce_fx!r} is unknown; choose from mean, sum, min, max. For another reduction log a torchmetrics Metric."
    )


def check_settings(name: str, settings: LogSettings, *, is_metric: bool) -> None:
    if settings.sync_dist_group is not None:
        raise ValueError(
            f"self.log({name!r}, ...) got sync_dist_group={settings.sync_dist_group!r}; only None is accepted, as epoch values "
            "are reduced over all ranks. Leave it out, or reduce over the group yourself before logging."
        )
    if settings.rank_zero_only and is_metric:
        raise ValueError(
            f"self.log({name!r}, ...) got a Metric with rank_zero_only=True; a Metric gathers its state over all ranks. Leave "
            "rank_zero_only out."
        )


def check_batch_size(name: str, batch_size: Any) -> float:
    """Return a batch size as a float; TypeError or ValueError unless it is a positive number."""
    if isinstance(batch_size, torch.Tensor):
        raise TypeError(
            f"self.log({name!r}, ...) got a tensor as batch_size. Expected a positive number. Pass len(...) or a shape's "
            "element; a sum over a mask has to be read with .item(), which waits for the device."
        )
    try:
        size = float(batch_size)
    except (TypeError, ValueError):
        raise TypeError(
            f"self.log({name!r}, ...) got batch_size={batch_size!r}, {a_type_of(batch_size)}. Expected a positive "
            "number."
        ) from None
    if not 0 < size < float("inf"):
        raise ValueError(
            f"self.log({name!r}, ...) got batch_size={batch_size!r}. Expected a positive number. If a batch has nothing to "
            "average, leave the call out."
        )
    return size
