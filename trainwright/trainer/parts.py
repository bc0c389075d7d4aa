"""Parts: the callbacks, loggers and switches that a Trainer's arguments mean."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch

from trainwright.arguments import foreign_hint
from trainwright.callbacks.base import Callback, Checkpoint
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.callbacks.model_summary import ModelSummary
from trainwright.callbacks.progress_bar import ProgressBar
from trainwright.callbacks.run_report import RunReport
from trainwright.callbacks.timer import Timer
from trainwright.callbacks.tqdm_progress_bar import TQDMProgressBar
from trainwright.devices import cuda
from trainwright.distributed.environment import prepare_deterministic
from trainwright.engine.engine import Engine
from trainwright.errors import a_type_of
from trainwright.loggers.base import Logger, SilentLogger
from trainwright.loggers.csv import CSVLogger
from trainwright.loggers.folder import FolderLogger
from trainwright.module import is_overridden
from trainwright.overrides import overridden
from trainwright.rank_zero import rank_zero_warn
from trainwright.trainer.inputs import check_replaced_hooks
from trainwright.trainer.settings import Settings

PARTS = ("strategy", "precision", "plugins")
"""Arguments that may be objects, which belong to one Trainer."""
TRIAL: dict[str, Any] = {
    "callbacks": None, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    "enable_report": False, "max_epochs": -1, "min_epochs": None, "min_steps": None, "max_time": None, "limit_val_batches": 0,
    "num_sanity_val_steps": 0, "val_check_interval": None, "check_val_every_n_epoch": 1, "profiler": None,
    "fast_dev_run": False, "barebones": False, "log_every_n_steps": 0,
}  # fmt: skip
"""The arguments of a trial run."""


def settings_of(arguments: dict[str, Any]) -> Settings:
    """Return the settings among a Trainer's arguments, as a run takes them."""
    given = Settings(**{each.name: arguments[each.name] for each in fields(Settings) if each.name in arguments})
    limits, overfit = (repr(given.limit_train_batches), repr(given.limit_val_batches)), repr(given.overfit_batches)
    if given.overfit_batches and {*limits} - {"None", "1.0", overfit}:
        text = f"overfit_batches={overfit} replaces limit_train_batches={limits[0]} and limit_val_batches={limits[1]}."
        rank_zero_warn(text, stacklevel=4)
    batches = given.accumulate_grad_batches
    batches = overridden("Trainer", "accumulate_grad_batches", batches, is_open=batches == 1)
    return replace(given.effective, accumulate_grad_batches=batches)


def arranged_callbacks(
    callbacks: Callback | Sequence[Callback] | None, settings: Settings, loggers: Sequence[Logger]
) -> list[Callback]:
    """Return the user's callbacks and the enabled defaults that are not among them, checkpoints last.

    Raises:
        TypeError: something is not a Callback.
        ValueError: two have the same state_key, or a setting forbids one.
    """
    if isinstance(callbacks, str) or not (callbacks is None or isinstance(callbacks, (Callback, type, Iterable))):
        raise TypeError(
            f"callbacks={callbacks!r} is {a_type_of(callbacks)}. Expected a Callback or a list of them."
            f"{foreign_hint(callbacks)}"
        )
    given = _as_callbacks([callbacks] if isinstance(callbacks, type) else callbacks, "callbacks= holds")
    for each in given:
        check_replaced_hooks(each)
    if settings.enable_checkpointing is False and any(isinstance(each, ModelCheckpoint) for each in given):
        raise ValueError(
            "enable_checkpointing=False, but callbacks= holds a ModelCheckpoint. Leave out one of the two."
        )
    if settings.enable_progress_bar is False and (bars := [each for each in given if isinstance(each, ProgressBar)]):
        raise ValueError(
            f"enable_progress_bar=False, but callbacks= holds {a_type_of(bars[0])}. Leave out one of the two."
        )
    if settings.enable_report is False and any(isinstance(each, RunReport) for each in given):
        raise ValueError("enable_report=False, but callbacks= holds a RunReport. Leave out one of the two.")
    writes_files = any(isinstance(each, FolderLogger) for each in loggers)
    if settings.enable_report and not writes_files and not settings.fast_dev_run:
        rank_zero_warn(
            "enable_report=True, but no logger in logger= writes a folder, so no report is written. Pass a CSVLogger or a "
            "TensorBoardLogger.",
            stacklevel=3,
        )
    reports = writes_files if settings.enable_report is None else settings.enable_report
    defaults: list[tuple[bool, type[Callback], type[Callback]]] = [
        (settings.enable_model_summary is not False, ModelSummary, ModelSummary),
        (settings.enable_progress_bar is not False, ProgressBar, TQDMProgressBar),
        (settings.enable_checkpointing is not False, ModelCheckpoint, ModelCheckpoint),
    ]
    # A default must not join a callback of the same kind that the user configured.
    missing = [
        made()
        for wanted, kind, made in defaults
        if wanted and not any(isinstance(each, Checkpoint if kind is ModelCheckpoint else kind) for each in given)
    ]
    if settings.max_time is not None:
        if any(isinstance(each, Timer) for each in given):
            raise ValueError(
                f"max_time={settings.max_time!r} and a Timer in callbacks= both limit the time. Leave out one of the two."
            )
        missing.append(Timer(settings.max_time))
    # Last, so that it does not come before the user's own in trainer.callbacks.
    is_missing = reports and not any(isinstance(each, RunReport) for each in given)
    return _in_order([*missing, *given, *([RunReport()] if is_missing else [])])


def with_the_modules(callbacks: Sequence[Callback], returned: Any) -> list[Callback]:
    """Return the callbacks with those of configure_callbacks, which replace their class; TypeError if one is not a Callback."""
    own = _as_callbacks(returned, "configure_callbacks returned")
    kinds = {type(each) for each in own}
    return _in_order([*(each for each in callbacks if type(each) not in kinds), *own])


def _as_callbacks(given: Any, origin: str) -> list[Callback]:
    callbacks = [given] if isinstance(given, Callback) else list(given or [])
    for each in callbacks:
        if not isinstance(each, Callback):
            raise TypeError(
                f"{origin} {each!r}, {a_type_of(each)}. Expected instances of trainwright.Callback.{foreign_hint(each)}"
            )
    return callbacks


def _in_order(callbacks: list[Callback]) -> list[Callback]:
    """Return the callbacks with the checkpoints last, as Lightning does. HookTable calls them by priority.

    Raises:
        ValueError: two have the same state_key, so that a checkpoint could keep the state of only one; or two are bars.
    """
    keys = [each.state_key for each in callbacks if is_overridden("state_dict", each, Callback)]
    twins = sorted({key for key in keys if keys.count(key) > 1})
    if twins:
        raise ValueError(
            f"callbacks= holds two of one state_key ({', '.join(twins)}), so a checkpoint could keep the state of only one; "
            "give them settings or a state_key that differ."
        )
    bars = [type(each).__name__ for each in callbacks if isinstance(each, ProgressBar)]
    if len(bars) > 1:
        raise ValueError(
            f"callbacks= holds {len(bars)} progress bars ({', '.join(bars)}). Give the Trainer one of them."
        )
    return sorted(callbacks, key=lambda callback: isinstance(callback, Checkpoint))


def arranged_loggers(logger: Any, root: str, settings: Settings) -> list[Logger]:
    """Return the loggers of logger=, in a trial run one that writes nothing; TypeError if it is neither bool nor loggers."""
    if settings.barebones:
        if logger:
            raise ValueError(
                f"barebones=True leaves out the loggers, but logger={logger!r} asks for one. Leave out one."
            )
        return []
    if isinstance(logger, str) or not (logger is None or isinstance(logger, (bool, Logger, Iterable))):
        raise TypeError(
            f"logger={logger!r} is {a_type_of(logger)}. Expected True, False or Logger instances, such as "
            f"CSVLogger(...) and TensorBoardLogger(...).{foreign_hint(logger)}"
        )
    loggers = [logger] if isinstance(logger, Logger) else list(logger) if isinstance(logger, Iterable) else []
    for each in loggers:
        if not isinstance(each, Logger):
            raise TypeError(
                f"logger= holds {each!r}, {a_type_of(each)}. Expected True, False or Logger instances."
                f"{foreign_hint(each)}"
            )
    if settings.fast_dev_run:
        return [SilentLogger()] if logger is not False else []
    loggers = [CSVLogger(root)] if logger is None or logger is True else loggers
    for each in loggers:
        if isinstance(each, FolderLogger):
            each.use_root(root)
    return loggers


def set_switches(settings: Settings) -> None:
    """Set torch's own switches, which hold for the whole process."""
    if settings.deterministic is not None:
        if settings.deterministic:
            prepare_deterministic()
        torch.use_deterministic_algorithms(bool(settings.deterministic), warn_only=settings.deterministic == "warn")
    benchmark = settings.benchmark
    if benchmark is None and settings.deterministic:
        benchmark = False  # cuDNN's search may choose another algorithm in each run
    if benchmark is not None:
        cuda.try_algorithms(benchmark)


@contextmanager
def making_modules(engine: Engine, empty: bool) -> Iterator[None]:
    """Make modules in the run's dtype and on its device; `empty` leaves their parameters without values."""
    device = torch.device("meta") if empty else engine.device
    with engine.precision.init_context(), device:
        yield


def trial_arguments(arguments: dict[str, Any], has_loggers: bool) -> dict[str, Any]:
    """Return the arguments of a Trainer for a trial run, with copies of its parts."""
    trial = {name: copied(value) if name in PARTS else value for name, value in arguments.items()} | TRIAL
    trial["logger"] = SilentLogger() if has_loggers else False  # a step may write to self.logger, if there is one
    if overfit := trial["overfit_batches"]:  # it would set the validation's batches too
        trial |= {"overfit_batches": 0.0, "limit_train_batches": overfit}
    return trial


def copied(part: Any) -> Any:
    """Return a copy of a part; the part itself if it has none."""
    try:
        return copy.deepcopy(part)
    except Exception:  # a part of any kind, which another Trainer then shares
        return part
