"""ScriptSettings: the script's optimizer and scheduler settings, compared with a checkpoint's.

The settings are recorded as text when the objects are prepared, so values that training changes do not count as differences.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright.distributed.ranks import Ranks
from trainwright.errors import CheckpointError
from trainwright.rank_zero import rank_zero_warn
from trainwright.strategies.base import UNSAVED_KEYS

Settings = dict[str, str]
"""Values as text, by their descriptions."""
SHOWN = 5
"""The number of differences that a message names."""
SCHEDULERS, OPTIMIZER_SETTINGS = FRESH = ("schedulers", "optimizer_settings")
"""The kinds of settings that `fresh` takes from the script instead of the checkpoint."""
RATES = ("lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
"""Values of a parameter group that belong to its scheduler, if there is one."""
PROGRESS = ("last_epoch", "base_lrs", "T_cur", "T_i")
"""Attributes of schedulers that follow from the position or from the optimizer's rates."""


def checked_fresh(fresh: Any, ckpt_path: Any = None) -> tuple[str, ...]:
    """Return the names in `fresh` (ValueError for unknown ones, and with ckpt_path="auto")."""
    names = tuple(fresh) if isinstance(fresh, (tuple, list, set)) else (fresh,)
    if any(name not in FRESH for name in names):
        raise ValueError(
            f"fresh={fresh!r} is not accepted; pass 'schedulers', 'optimizer_settings', or a tuple of both."
        )
    if names and ckpt_path == "auto":
        raise ValueError(
            f"fresh={fresh!r} would apply at each start with ckpt_path='auto'; pass the checkpoint's path."
        )
    return names


class ScriptSettings:
    """The settings of one run's optimizers and schedulers, by their kinds in FRESH."""

    def __init__(self) -> None:
        self.stored: dict[str, Settings] = {kind: {} for kind in FRESH}
        """The settings in effect, for checkpoints, from the script or the checkpoint that the run has resumed from."""
        self._schedulers: list[Any] = []

    def note_optimizers(self, optimizers: Sequence[Any], *, is_first: bool) -> None:
        """Record the settings of new optimizers. Earlier ones, which come first, may have been trained since."""
        if is_first:  # others are of another run
            self.note_schedulers([])
        known = {} if is_first else self.stored[OPTIMIZER_SETTINGS]
        self.stored[OPTIMIZER_SETTINGS] = _optimizer_settings(optimizers) | known

    def note_schedulers(self, schedulers: Sequence[Any]) -> None:
        """Record all schedulers and their settings."""
        self._schedulers = list(schedulers)
        every = [inner for scheduler in schedulers for inner in _with_inner(scheduler)]
        settings = {"classes": ", ".join(type(scheduler).__name__ for scheduler in every)}
        for number, scheduler in enumerate(every):
            for name, value in getattr(scheduler, "__dict__", {}).items():
                if name not in PROGRESS and not name.startswith("_") and _is_plain(value):
                    settings[f"{name} of scheduler {number}"] = repr(value)
        self.stored[SCHEDULERS] = settings

    def check(self, state: Mapping[str, Any], path: str, fresh: Collection[str]) -> None:
        """Raise CheckpointError for a checkpoint of other schedulers, unless `fresh` contains "schedulers"."""
        states = state.get("lr_schedulers")
        if states is None or SCHEDULERS in fresh:  # a hook may have removed them
            return
        classes = self.stored[SCHEDULERS].get("classes", "")
        saved = state.get("settings", {}).get(SCHEDULERS, {}).get("classes")  # None in older checkpoints
        if saved != classes if saved is not None else len(states) != len(self._schedulers):
            raise CheckpointError(
                f"{path}: it was saved with {saved or len(states)} as schedulers, and this run has {classes or 0}. Build the "
                "same to resume, or pass fresh='schedulers' to start this run's at their step 0, at the script's learning rate."
            )

    def resume(self, state: Mapping[str, Any], path: str, fresh: Collection[str]) -> None:
        """Load the schedulers' states after the optimizers', and warn once of settings that differ from the script."""
        pairs = zip(self._schedulers, state.get("lr_schedulers", ()), strict=False)
        for scheduler, saved_state in () if SCHEDULERS in fresh else pairs:
            scheduler.load_state_dict(saved_state)
            for inner in _with_inner(scheduler) if OPTIMIZER_SETTINGS in fresh else ():
                if rates := getattr(inner, "base_lrs", None):
                    rates[:] = [group["initial_lr"] for group in inner.optimizer.param_groups]
        texts: list[str] = []
        for kind, script in self.stored.items():
            saved = {} if kind in fresh else state.get("settings", {}).get(kind, {})
            if fresh:  # new schedulers and new optimizer settings both bring their rates
                saved = {name: value for name, value in saved.items() if name.partition(" ")[0] not in RATES}
            texts += [
                f"{name} is {saved[name]} there and {script[name]} here"
                for name in sorted(script.keys() & saved.keys() - {"classes"})
                if script[name] != saved[name] and f"initial_{name}" not in script  # the rate follows from that
            ]
            self.stored[kind] = script | saved
        if texts:
            rank_zero_warn(
                f"{path}: the script's settings differ, and the checkpoint's are used: {'; '.join(texts[:SHOWN])}. To use the "
                "script's, resume from this path with fresh='optimizer_settings', or with fresh='schedulers' to start the "
                "schedulers at step 0.",
                stacklevel=2,
            )


def refuse_unlike_optimizers(optimizers: Sequence[Optimizer], ranks: Ranks) -> None:
    """Raise ValueError on every rank for optimizers whose kinds or options differ between ranks. Collective."""
    _refuse_unlike(_optimizer_settings(optimizers), ranks, "the optimizers")


def refuse_unlike_arguments(arguments: Mapping[str, Any], owner: str, ranks: Ranks) -> None:
    """Raise ValueError on every rank for plain arguments that differ between ranks. Collective."""
    settings = {name: repr(value) for name, value in arguments.items() if _is_plain(value)}
    _refuse_unlike(settings, ranks, f"the {owner}'s arguments")


def _refuse_unlike(settings: Settings, ranks: Ranks, subject: str) -> None:
    by_rank: list[Settings] = ranks.differing(settings, f"comparing {subject}")
    if by_rank:
        names = dict.fromkeys(name for local in by_rank for name in local)
        unlike = [name for name in names if len({local.get(name) for local in by_rank}) > 1]
        values = [f"{name} is {', '.join(local.get(name, 'nothing') for local in by_rank)}" for name in unlike[:SHOWN]]
        raise ValueError(
            f"{subject} differ between ranks, and so would their weights: by rank {'; '.join(values)}. Choose settings "
            "after tw.seed_everything, or pass rank 0's to the others with tw.broadcast."
        )


def _optimizer_settings(optimizers: Iterable[Optimizer]) -> Settings:
    """Return the kinds of optimizers and their options, except options that choose an implementation."""
    settings: Settings = {}
    for number, optimizer in enumerate(optimizers):
        settings[f"optimizer {number}"] = type(optimizer).__name__
        for index, group in enumerate(optimizer.param_groups):
            where = f"of group {index} of optimizer {number}"
            settings[f"the number of parameters {where}"] = str(len(group["params"]))
            for name, value in group.items():
                # A rate may be a tensor, for torch.compile.
                plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
                if name not in UNSAVED_KEYS and _is_plain(plain):
                    settings[f"{name} {where}"] = repr(plain)
    return settings


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number, a text, a boolean, None, or made of these."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def fresh_group(stored: Mapping[str, Any], present: Mapping[str, Any], fresh: Collection[str]) -> dict[str, Any]:
    """Return the values of a parameter group to restore, with the script's values for the kinds in `fresh`.

    If a schedule continues with new settings of the optimizer, its current rate changes like the initial rate.
    """
    if not fresh:
        return dict(stored)
    begins = SCHEDULERS in fresh
    values = {name: value for name, value in stored.items() if name not in RATES or not begins}
    for name in present.keys() - {"params"}:
        if name in RATES or OPTIMIZER_SETTINGS in fresh:
            values[name] = present[name]
    if not begins and stored.get("initial_lr") and "initial_lr" in present:
        values["lr"] = stored["lr"] * (present["initial_lr"] / stored["initial_lr"])
    return values


def _with_inner(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler and the schedulers that it steps, such as those of SequentialLR."""
    yield scheduler
    for inners in getattr(scheduler, "__dict__", {}).values():
        for inner in inners if isinstance(inners, (list, tuple)) else ():
            if isinstance(inner, LRScheduler):
                yield from _with_inner(inner)
