"""ScriptSettings: the script's optimizer and scheduler settings, compared with a checkpoint's.

The settings are recorded as text when the objects are prepared, so values that training changes do not count as differences.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from trainwright.engine.replicas import Settings, is_plain, joined, optimizer_settings
from trainwright.errors import CheckpointError
from trainwright.rank_zero import rank_zero_warn

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
        self._script: dict[str, Settings] = {kind: {} for kind in FRESH}
        self._schedulers: list[Any] = []

    def note_optimizers(self, optimizers: Sequence[Any], *, is_first: bool) -> None:
        """Record the settings of new optimizers. Earlier ones, which come first, may have been trained since."""
        if is_first:  # others are of another run
            self.note_schedulers([])
        for known in (self._script, self.stored):
            known[OPTIMIZER_SETTINGS] = optimizer_settings(optimizers) | ({} if is_first else known[OPTIMIZER_SETTINGS])

    def note_schedulers(self, schedulers: Sequence[Any]) -> None:
        """Record all schedulers and their settings."""
        self._schedulers = list(schedulers)
        self.stored[SCHEDULERS] = self._script[SCHEDULERS] = _scheduler_settings(schedulers)

    def check(self, state: Mapping[str, Any], path: str, fresh: Collection[str]) -> None:
        """Raise CheckpointError for a checkpoint of other schedulers, unless `fresh` contains "schedulers"."""
        states, classes = state.get("lr_schedulers"), self._script[SCHEDULERS].get("classes", "")
        if states is None or SCHEDULERS in fresh:  # a hook may have removed them
            return
        saved = state.get("settings", {}).get(SCHEDULERS, {}).get("classes")  # None in older checkpoints
        if saved != classes if saved is not None else len(states) != len(self._schedulers):
            raise CheckpointError(
                f"{path}: it was saved with {saved or len(states)} as schedulers, and this run has {classes or 0}. Build the "
                "same to resume, or pass fresh='schedulers' to start this run's at their step 0, at the script's learning rate."
            )

    def resume(self, state: Mapping[str, Any], path: str, fresh: Collection[str], unused: Sequence[str] = ()) -> None:
        """Load the schedulers' states after the optimizers', and warn once of all differences to the script.

        `unused` are the keys of the callback states that no callback has loaded.
        """
        pairs = zip(self._schedulers, state.get("lr_schedulers", ()), strict=False)
        for scheduler, saved_state in () if SCHEDULERS in fresh else pairs:
            scheduler.load_state_dict(saved_state)
            if OPTIMIZER_SETTINGS in fresh:
                _take_rates(scheduler)
        now = _scheduler_settings(self._schedulers)
        texts, kinds = list[str](), list[str]()
        for kind, script in self._script.items():
            settings = {} if kind in fresh else state.get("settings", {}).get(kind, {})
            # With fresh settings, a new scheduler brings its rates too. A scheduler's state may lack a setting of the script.
            saved = {
                name: value
                for name, value in settings.items()
                if not (fresh and name.partition(" ")[0] in RATES) and now.get(name, "") != script.get(name)
            }
            self.stored[kind] = script | saved
            if unlike := _unlike(script, saved):
                texts += [f"{name} is {saved[name]} there and {script[name]} here" for name in unlike]
                kinds.append(kind)
        text = ""
        if texts:
            text = f" the script's settings differ, and the checkpoint's are used: {joined(texts)}."
            begins = " (the schedulers then begin at step 0)" if SCHEDULERS in kinds else ""
            text += f" To use the script's, resume from this path with fresh={kinds}{begins}."
        if unused:
            text += f" It has states that no callback loads, so this run continues without them: {', '.join(unused)}."
        if text:
            rank_zero_warn(f"{path}:{text}", stacklevel=2)


def _unlike(script: Settings, saved: Settings) -> list[str]:
    """Return the names of the settings that differ, except settings that follow from others."""
    # The rate follows from initial_lr, and a scheduler's private attributes follow from its public ones.
    names = sorted(name for name in script.keys() & saved.keys() if script[name] != saved[name])
    names = [name for name in names if f"initial_{name}" not in script]
    return [name for name in names if not name.startswith("_")] or names


def fresh_group(stored: Mapping[str, Any], present: Mapping[str, Any], fresh: Collection[str]) -> dict[str, Any]:
    """Return the values of a parameter group to restore, with the script's values for the kinds in `fresh`.

    If a schedule continues with new settings of the optimizer, its current rate changes like the initial rate.
    """
    if not fresh:
        return dict(stored)
    begins, is_cycled = SCHEDULERS in fresh, "max_momentum" in {*stored, *present}
    scheduled = {*RATES, "momentum", "betas"} if is_cycled else {*RATES}
    values = {name: value for name, value in stored.items() if name not in scheduled or not begins}
    for name in present.keys() - {"params"}:
        if name in RATES or (begins if name in scheduled else OPTIMIZER_SETTINGS in fresh):
            values[name] = present[name]
    if not begins and stored.get("initial_lr") and "initial_lr" in present:
        values["lr"] = stored["lr"] * (present["initial_lr"] / stored["initial_lr"])
    return values


def _take_rates(scheduler: Any) -> None:
    """Set the base rates of a scheduler, and of its inner schedulers, to the initial rates of its optimizer."""
    for _, inner in _all_schedulers(scheduler, ""):
        if rates := getattr(inner, "base_lrs", None):
            rates[:] = [group["initial_lr"] for group in inner.optimizer.param_groups]


def _scheduler_settings(schedulers: Sequence[Any]) -> Settings:
    settings, classes = Settings(), list[str]()
    for number, scheduler in enumerate(schedulers):
        for where, inner in _all_schedulers(scheduler, f"scheduler {number}"):
            classes.append(type(inner).__name__)
            for name, value in getattr(inner, "__dict__", {}).items():
                if name not in PROGRESS and not name.startswith("_") and is_plain(value):
                    settings[f"{name} of {where}"] = repr(value)
    return {"classes": ", ".join(classes), **settings}


def _all_schedulers(scheduler: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield a scheduler and the schedulers that it steps, such as in SequentialLR, numbered after `where`."""
    yield where, scheduler
    values = getattr(scheduler, "__dict__", {}).values()
    items = [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value])]
    for number, inner in enumerate(item for item in items if isinstance(item, LRScheduler)):
        yield from _all_schedulers(inner, f"{where}.{number}")
