"""Parts: the callbacks, loggers and switches that a Trainer's arguments mean."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch

from trainwright.arguments import foreign_hint
from trainwright.callbacks.base import Callback, Checkpoint
from trainwright.callbacks.memory_snapshot import MemorySnapshot
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.callbacks.model_summary import ModelSummary
from trainwright.callbacks.progress_bar import ProgressBar
from trainwright.callbacks.ray_report import RayReport
from trainwright.callbacks.run_report import RunReport
from trainwright.callbacks.timer import Timer
from trainwright.callbacks.tqdm_progress_bar import TQDMProgressBar
from trainwright.devices import cuda
from trainwright.distributed.clusters import ray_folder, ray_train
from trainwright.distributed.environment import prepare_deterministic
from trainwright.errors import a_type_of
from trainwright.loggers.base import Logger, SilentLogger
from trainwright.loggers.csv import CSVLogger
from trainwright.loggers.folder import FolderLogger
from trainwright.module import is_overridden
from trainwright.overrides import overridden
from trainwright.paths import absolute
from trainwright.precision import Precision
from trainwright.rank_zero import rank_zero_warn
from trainwright.strategies import Strategy
from trainwright.trainer.settings import Settings

P = TypeVar("P")
PARTS = ("strategy", "precision", "plugins")
"""Arguments that may be objects, which belong to one Trainer."""
TRIAL: dict[str, Any] = {
    "callbacks": None, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    "enable_report": False, "max_epochs": -1, "min_epochs": None, "min_steps": None, "max_time": None, "limit_val_batches": 0,
    "num_sanity_val_steps": 0, "val_check_interval": None, "check_val_every_n_epoch": 1, "profiler": None,
    "fast_dev_run": False, "barebones": False, "log_every_n_steps": 0, "nan_policy": None,
    "detect_syncs": False, "memory_snapshot": None,
}  # fmt: skip
"""The arguments of a trial run."""
DEFAULTS: tuple[tuple[str, type[Callback], type[Callback], Any], ...] = (
    ("enable_model_summary", ModelSummary, ModelSummary, ()),
    ("enable_progress_bar", ProgressBar, TQDMProgressBar, ProgressBar),
    ("enable_checkpointing", Checkpoint, ModelCheckpoint, ModelCheckpoint),
    ("enable_report", RunReport, RunReport, RunReport),
)
"""Callbacks that a Trainer adds: the argument, the kind that takes the default's place, the default, and the kind that the
argument forbids if it is False."""


def settings_of(arguments: dict[str, Any]) -> Settings:
    """Return the settings among a Trainer's arguments, as a run takes them."""
    settings = Settings(**{each.name: arguments[each.name] for each in fields(Settings) if each.name in arguments})
    batches = settings.accumulate_grad_batches
    batches = overridden("Trainer", "accumulate_grad_batches", batches, is_open=batches == 1)
    return replace(settings.effective, accumulate_grad_batches=batches)


def root_folder(default_root_dir: str | os.PathLike[str] | None) -> str:
    """Return the folder of logs and checkpoints as an absolute path or a URL (TypeError if it is neither)."""
    if not isinstance(default_root_dir, (str, os.PathLike, type(None))):
        raise TypeError(f"default_root_dir={default_root_dir!r} is {a_type_of(default_root_dir)}. Expected a path.")
    return absolute(default_root_dir or ray_folder() or ".")


def arranged_callbacks(callbacks: Any, settings: Settings, loggers: Sequence[Logger]) -> list[Callback]:
    """Return the user's callbacks and the enabled defaults that are not among them, checkpoints last.

    Raises:
        TypeError: something is not a Callback.
        ValueError: two have the same state_key, or a setting forbids one.
    """
    passed = _as_list(callbacks, Callback, "callbacks= holds")
    for switch, _, _, forbidden in DEFAULTS:
        refused = next((each for each in passed if isinstance(each, forbidden)), None)
        if getattr(settings, switch) is False and refused is not None:
            raise ValueError(f"{switch}=False, but callbacks= holds {a_type_of(refused)}. Omit one of the two.")
    writes_files = any(isinstance(logger, FolderLogger) for logger in loggers)
    if settings.enable_report and not writes_files and not settings.fast_dev_run:
        rank_zero_warn(
            "enable_report=True, but no logger in logger= writes a folder, so no report is written. Pass a CSVLogger or a "
            "TensorBoardLogger.",
            stacklevel=3,
        )
    before, after = list[Callback](), list[Callback]()
    for switch, kind, default, _ in DEFAULTS:
        wanted = getattr(settings, switch)
        if wanted is None:
            wanted = writes_files or kind is not RunReport
        if wanted and not any(isinstance(callback, kind) for callback in passed):
            (after if kind is RunReport else before).append(default())
    return _in_order([*before, *_asked_for(settings, passed), *passed, *after])


def _asked_for(settings: Settings, passed: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks that settings require, and RayReport in a worker of Ray Train."""
    asked = list[Callback]()
    if settings.max_time is not None:
        asked.append(Timer(settings.max_time))
    if settings.memory_snapshot is not None:
        asked.append(MemorySnapshot(settings.memory_snapshot))
    if ray_train() is not None and not any(isinstance(callback, RayReport) for callback in passed):
        asked.append(RayReport())
    return asked


def with_the_modules(callbacks: Sequence[Callback], returned: Any) -> list[Callback]:
    """Return the callbacks with those of configure_callbacks, which replace their class (TypeError)."""
    new = _as_list(returned, Callback, "configure_callbacks returned")
    kinds = {type(callback) for callback in new}
    return _in_order([*(callback for callback in callbacks if type(callback) not in kinds), *new])


def _as_list(value: Any, kind: type[P], origin: str, expected: str = "") -> list[P]:
    """Return one object of a kind, or several, as a list (TypeError if one is of another kind)."""
    is_one = isinstance(value, (kind, type, str)) or not isinstance(value, Iterable)
    parts = [] if value is None else [value] if is_one else list(value)
    for part in parts:
        if not isinstance(part, kind):
            expected = expected or f"Expected instances of trainwright.{kind.__name__}."
            raise TypeError(f"{origin} {part!r}, {a_type_of(part)}. {expected}{foreign_hint(part)}")
    return parts


def _in_order(callbacks: list[Callback]) -> list[Callback]:
    """Return the callbacks with the checkpoints last, as Lightning does. HookTable calls them by priority.

    Raises:
        ValueError: two have the same state_key, so that a checkpoint could keep the state of only one.
    """
    keys = [each.state_key for each in callbacks if is_overridden("state_dict", each, Callback)]
    twins = sorted({key for key in keys if keys.count(key) > 1})
    if twins:
        raise ValueError(
            f"callbacks= holds two of one state_key ({', '.join(twins)}), so a checkpoint could keep the state of only one. "
            "Give them settings or a state_key that differ."
        )
    return sorted(callbacks, key=lambda callback: isinstance(callback, Checkpoint))


def arranged_loggers(logger: Any, root: str, settings: Settings) -> list[Logger]:
    """Return the loggers of logger=, in a trial run one that writes nothing (TypeError for other objects)."""
    if settings.barebones and logger:
        raise ValueError(f"barebones=True omits the loggers, but logger={logger!r} asks for one. Omit one.")
    if settings.barebones or logger is False:
        return []
    expected = "Expected True, False or Logger instances, such as CSVLogger(...) and TensorBoardLogger(...)."
    loggers = _as_list(None if logger is True else logger, Logger, "logger= holds", expected)
    if settings.fast_dev_run:
        return [SilentLogger()]
    loggers = [CSVLogger(root)] if logger is None or logger is True else loggers
    for each in loggers:
        if isinstance(each, FolderLogger):
            each.use_root(root)
    return loggers


def set_switches(settings: Settings) -> None:
    """Set torch's switches, which hold for the whole process."""
    if settings.deterministic is not None:
        if settings.deterministic:
            prepare_deterministic()
        torch.use_deterministic_algorithms(bool(settings.deterministic), warn_only=settings.deterministic == "warn")
    benchmark = settings.benchmark
    if benchmark is None and settings.deterministic:
        benchmark = False  # cuDNN's search may choose another algorithm in each run
    if benchmark is not None:
        cuda.try_algorithms(benchmark)


def choose_precision(precision: Any, plugins: Any) -> Any:
    """Return the precision chosen by precision= or plugins= (TypeError for another plug-in, ValueError for two precisions)."""
    expected = (
        "Expected a Precision. Pass a strategy as strategy=. Omit environments, checkpoint IO and layer synchronisation: "
        "a job is detected, checkpoints have one format, and sync_batchnorm=True synchronises."
    )
    for plugin in _as_list(plugins, Precision, "plugins= holds", expected):
        if precision is not None:
            raise ValueError(f"precision={precision!r} and plugins={plugin!r} both choose a precision. Pass one.")
        precision = plugin
    return precision


def check_compile(compile: Any, strategy: Strategy) -> None:
    """Raise ValueError for compile= under a strategy whose engine the compiler cannot follow."""
    if compile and not strategy.capabilities.takes_compile:
        raise ValueError(
            f"compile={compile!r} cannot hold under strategy={strategy.name!r} as it is set: the compiler does not follow the "
            "hooks of DeepSpeed's stage 3 and of divided layers. Leave compile out, or choose 'fsdp' or stage 2 without a "
            "tensor dimension."
        )


def copied(part: Any) -> Any:
    """Return a copy of a part, or the part itself if it has none."""
    try:
        return copy.deepcopy(part)
    except Exception:  # a part of any kind, which another Trainer then shares
        return part
