"""ScriptSettings: the optimizer and scheduler settings that a script has chosen, compared with a checkpoint's.

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
"""The kinds of settings that `fresh` takes from the script instead of from the checkpoint."""
RATES = ("lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
"""Values of a parameter group that belong to its scheduler, if there is one."""
PROGRESS = ("last_epoch", "base_lrs", "T_cur", "T_i")
"""Attributes of schedulers that follow from the position or from the optimizer's rates."""


def checked_fresh(fresh: Any, ckpt_path: Any = None) -> tuple[str, ...]:
    """Return the names in `fresh`; ValueError for others, and for a command that is repeated with "auto"."""
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
    """The settings of one run's optimizers and schedulers, each kind under its name in FRESH."""

    def __init__(self) -> None:
        self.stored: dict[str, Settings] = {kind: {} for kind in FRESH}
        """The settings in effect, for checkpoints: the script's, or those of the checkpoint that the run has resumed from."""
        self._script: dict[str, Settings] = {kind: {} for kind in FRESH}
        self._schedulers: list[Any] = []

    def note_optimizers(self, optimizers: Sequence[Any], *, is_first: bool) -> None:
        """Record the settings of all optimizers; those of an earlier call, which come first, may have been trained since."""
        if is_first:  # others are of another run
            self.note_schedulers([])
        for known in (self._script, self.stored):
            known[OPTIMIZER_SETTINGS] = optimizer_settings(optimizers) | ({} if is_first else known[OPTIMIZER_SETTINGS])

    def note_schedulers(self, schedulers: Sequence[Any]) -> None:
        """Record all schedulers and their settings."""
        self._schedulers = list(schedulers)
        self.stored[SCHEDULERS] = self._script[SCHEDULERS] = _scheduler_settings(schedulers)

    def check(self, state: Mapping[str, Any], path: str, fresh: Collection[str]) -> None:
        """Reject a checkpoint of other schedulers (CheckpointError), unless `fresh` names them."""
        states, own = state.get("lr_schedulers"), self._script[SCHEDULERS].get("classes", "")
        if states is None or SCHEDULERS in fresh:  # a hook may have removed them
            return
        saved = state.get("settings", {}).get(SCHEDULERS, {}).get("classes")  # None in older checkpoints
        if saved != own if saved is not None else len(states) != len(self._schedulers):
            raise CheckpointError(
                f"{path}: it was saved with {saved or len(states)} as schedulers, and this run has {own or 0}. Build the same "
                "to resume, or pass fresh='schedulers' to start this run's at their step 0, at the script's learning rate."
            )

    def resume(self, state: Mapping[str, Any], path: str, fresh: Collection[str], unused: Sequence[str] = ()) -> None:
        """Load the schedulers' states after the optimizers', and warn once of all that differs from the script.

        `unused` are the keys of the callback states that no callback has loaded.
        """
        pairs = zip(self._schedulers, state.get("lr_schedulers", ()), strict=False)
        for scheduler, saved_state in () if SCHEDULERS in fresh else pairs:
            scheduler.load_state_dict(saved_state)
            if OPTIMIZER_SETTINGS in fresh:
                _take_rates(scheduler)
        now, texts, kinds, text = _scheduler_settings(self._schedulers), list[str](), list[str](), ""
        for kind, own in self._script.items():
            settings = {} if kind in fresh else state.get("settings", {}).get(kind, {})
            if fresh:  # also a new scheduler brings its rates
                settings = {name: value for name, value in settings.items() if name.partition(" ")[0] not in RATES}
            # A scheduler's state may lack a setting, which is the script's then.
            saved = {name: value for name, value in settings.items() if now.get(name, "") != own.get(name)}
            self.stored[kind] = own | saved
            # The rate follows from initial_lr, and a scheduler's private attributes follow from the public ones.
            unlike = [name for name in own.keys() & saved.keys() if own[name] != saved[name]]
            unlike = sorted(name for name in unlike if f"initial_{name}" not in own)
            unlike = [name for name in unlike if not name.startswith("_")] or unlike
            texts += [f"{name} is {saved[name]} there and {own[name]} here" for name in unlike]
            kinds += [kind] if unlike else []
        if texts:
            text = f" the script's settings differ, and the checkpoint's are used: {joined(texts)}."
            begins = " (the schedulers then begin at step 0)" if SCHEDULERS in kinds else ""
            text += f" To use the script's, resume from this path with fresh={kinds}{begins}."
        if unused:
            text += f" It has states that no callback loads, so this run continues without them: {', '.join(unused)}."
        if text:
            rank_zero_warn(f"{path}:{text}", stacklevel=2)


def fresh_group(stored: Mapping[str, Any], present: Mapping[str, Any], fresh: Collection[str]) -> dict[str, Any]:
    """Return the values of a parameter group to restore, with those of the script that `fresh` names.

    If a schedule continues with new settings of the optimizer, its current rate changes as the initial rate does.
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
    """Set the base rates of a scheduler, and of those within it, to the initial rates of its optimizer."""
    for each in (scheduler, *(inner for _, inner in _within(scheduler, ""))):
        if rates := getattr(each, "base_lrs", None):
            rates[:] = [group["initial_lr"] for group in each.optimizer.param_groups]


def _scheduler_settings(schedulers: Sequence[Any]) -> Settings:
    settings, classes = Settings(), list[str]()
    for number, scheduler in enumerate(schedulers):
        for where, each in ((f"scheduler {number}", scheduler), *_within(scheduler, f"scheduler {number}")):
            classes.append(type(each).__name__)
            for name, value in getattr(each, "__dict__", {}).items():
                if name not in PROGRESS and not name.startswith("_") and is_plain(value):
                    settings[f"{name} of {where}"] = repr(value)
    return {"classes": ", ".join(classes), **settings}


def _within(scheduler: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield the schedulers that a scheduler steps, such as those of SequentialLR, numbered after `where`."""
    values = getattr(scheduler, "__dict__", {}).values()
    inner = [each for value in values for each in (value if isinstance(value, (list, tuple)) else [value])]
    for number, each in enumerate(each for each in inner if isinstance(each, LRScheduler)):
        yield f"{where}.{number}", each
        yield from _within(each, f"{where}.{number}")
