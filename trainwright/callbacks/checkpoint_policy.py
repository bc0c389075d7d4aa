"""The policy of a ModelCheckpoint: when a save is due, its score, and which checkpoints are kept."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, cast

import torch
from torch import Tensor

from trainwright.checkpoint.discovery import same_path
from trainwright.duration import to_seconds
from trainwright.errors import a_type_of
from trainwright.metric_direction import direction_of
from trainwright.paths import absolute
from trainwright.rank_zero import rank_zero_warn, warn

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import TrainerProtocol

__all__ = ["monitor_of"]

KEY_SETTINGS = (
    "monitor", "mode", "save_top_k", "every_n_train_steps", "every_n_epochs", "train_time_interval", "filename",
)  # fmt: skip
"""The settings that distinguish one ModelCheckpoint's state from another's."""


def monitor_of(state_key: str) -> tuple[str, str] | None:
    """Return the monitored metric and the mode of a ModelCheckpoint with this state key, or None without a metric."""
    found = re.search(r"\(monitor=(.+), mode=(min|max), save_top_k=", state_key)
    return (found[1], found[2]) if found and found[1] != "None" else None


def are_similar(state_key: str, other: str) -> bool:
    """Return whether these are keys of ModelCheckpoints of the same class, monitor and mode."""
    begin, settings, _ = state_key.partition("save_top_k=")
    return bool(settings) and other.startswith(begin)


COUNTERS = ("epoch", "step")
"""Values that a ModelCheckpoint may monitor without a log call."""


def chosen_mode(mode: str | None, monitor: str | None, callback: str) -> str:
    """Return the mode, by default "min". Warn if the name of the metric says that more is better.

    Raises:
        ValueError: the mode is unknown.
    """
    if mode not in (None, "min", "max"):
        raise ValueError(f"mode={mode!r} is unknown; choose from min, max.")
    # The word score does not say it, unlike accuracy or f1_score.
    if mode is None and isinstance(monitor, str) and direction_of(monitor.replace("score", "")) == "max":
        rank_zero_warn(
            f"{callback}(monitor={monitor!r}) keeps the lowest value, as always without a mode, but the name says that higher "
            "is better: pass mode='max', or mode='min' if that is meant."
        )
    return mode or "min"


def check_choices(save_last: Any, save_top_k: Any, filename: Any, monitor: Any) -> None:
    """Raise ValueError for an unknown save_last or save_top_k, and TypeError for names that are not text."""
    if save_last not in (None, True, False, "link"):
        raise ValueError(f"save_last={save_last!r} is not accepted; choose from True, False, None, 'link'.")
    for name, text in (("filename", filename), ("monitor", monitor)):
        if text is not None and not isinstance(text, str):
            raise TypeError(f"{name}={text!r} is {a_type_of(text)}; expected a str or None.")
    if isinstance(save_top_k, bool) or not isinstance(save_top_k, int) or save_top_k < -1:
        raise ValueError(f"save_top_k={save_top_k!r} is not accepted; pass a number of checkpoints, or -1 for all.")
    if monitor is None and save_top_k > 1:
        raise ValueError(
            f"save_top_k={save_top_k} needs a metric that decides. Pass monitor='val_loss' with a name that you log, or "
            "save_top_k=1 (the newest), 0 or -1."
        )


def checked_intervals(steps: Any, interval: Any, epochs: Any) -> tuple[int, float | None, int]:
    """Return the steps (0 for off), the seconds (None) and the epochs (0) between two saves, by default one epoch."""
    for name, value in (("every_n_train_steps", steps), ("every_n_epochs", epochs)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ValueError(f"{name}={value!r} is not accepted; pass an integer: 0 (off) or more.")
    if bool(steps) + bool(epochs) + (interval is not None) > 1:
        raise ValueError(
            f"every_n_train_steps={steps!r}, train_time_interval={interval!r} and every_n_epochs={epochs!r} exclude each "
            "other; give one of them, or a ModelCheckpoint for each."
        )
    if steps is None and epochs is None and interval is None:
        return 0, None, 1
    seconds = None if interval is None else to_seconds(interval, name="train_time_interval", allows_zero=True)
    return steps or 0, seconds, epochs or 0


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


FIELD = r"\{([^{}:]+)(:[^{}]*)?\}"
"""A field of a template: a name and, if wanted, its format."""


def check_template(template: str) -> None:
    """Raise ValueError for an unpaired brace, and for "::"."""
    absolute(template)
    if set("{}") & set(re.sub(FIELD, "", template)):
        raise ValueError(f"filename={template!r} has a brace without its pair. Write {{epoch}} or {{val_loss:.3f}}.")


def filled(template: str, values: Mapping[str, Any], equals: str | None) -> str:
    """Return a template with the values of its fields, or raise ValueError if one was not logged.

    `equals` is between a field's name and its value. With None there are only values.
    """

    def written(match: re.Match[str]) -> str:
        name, spec = match.group(1), match.group(2) or ""
        if name not in values:
            raise ValueError(
                f"filename={template!r} asks for {name!r}, which was not logged; there are {', '.join(sorted(values))}."
            )
        value = values[name]
        text = format(value.item() if isinstance(value, Tensor) else value, spec[1:])
        return text if equals is None else f"{name.replace('/', '_')}{equals}{text}"  # "/" would make a folder

    return re.sub(FIELD, written, template)


def name_values(trainer: TrainerProtocol, monitor: str | None, template: str, is_left: bool) -> dict[str, Any]:
    """Return the values of a template's fields at this point of the run.

    With a monitor, a metric of earlier weights is NaN. Until the monitor is logged, or if the run stops within the epoch, so is
    every field that is missing.
    """
    metrics = trainer.metrics
    values: dict[str, Any] = {}
    for name in trainer.callback_metrics:
        is_outdated = monitor is not None and metrics.is_outdated(name)
        values[name] = math.nan if is_outdated else metrics.monitored(name, "ModelCheckpoint")
    values.update(epoch=trainer.current_epoch, step=trainer.global_step)
    if is_left or (monitor is not None and monitor not in values):
        values = {**{name: math.nan for name, _ in re.findall(FIELD, template)}, **values}
    return values


class Kept(TypedDict):
    """The checkpoints that a ModelCheckpoint keeps: plain data, so that a call made in worker processes brings it back."""

    scores: dict[str, float]
    """The score of every kept checkpoint by its path, or 0 where nothing is monitored."""
    last: str
    """The path of the newest checkpoint."""
    written_to: str
    """Where the newest one was written, before it got its path."""
    replaced: list[str]
    """Checkpoints that the newest replaces, removed once it has committed: the resume source only in a later run."""
    current_score: float | None
    link: str
    """The link that leads to the newest checkpoint, or "" for none."""


class Save(NamedTuple):
    """A save as rank 0 has planned it: its path, where it is written first, and the checkpoints that it replaces."""

    path: str
    written_to: str
    score: float | None
    is_best: bool
    dropped: list[str]
    link: str


class Ranking:
    """Ranks checkpoints by their scores, without a monitor by their age, and chooses which are kept."""

    def __init__(self, monitor: str | None, mode: str, save_top_k: int) -> None:
        self._monitor, self._top_k = monitor, save_top_k
        self._sign = 1.0 if mode == "min" else -1.0

    @property
    def worst(self) -> float:
        """The score that every other is better than."""
        return self._sign * math.inf

    def best_first(self, scores: dict[str, float]) -> list[str]:
        if self._monitor is None:
            # Saves are in the dict in their order.
            return list(reversed(scores))
        return sorted(scores, key=lambda path: self._sign * scores[path])

    def accepts(self, score: float | None, scores: dict[str, float]) -> bool:
        """Return whether a new checkpoint with this score is among the best."""
        if self._top_k == 0 or (score is not None and not math.isfinite(score)):
            return False
        if self._top_k == -1 or len(scores) < self._top_k or score is None:
            return True
        # There are more if an earlier run has kept more.
        return self._sign * score < sorted(self._sign * each for each in scores.values())[self._top_k - 1]

    def dropped(self, kept: Kept, is_best: bool) -> list[str]:
        """Return the checkpoints that a new one replaces."""
        scores, dropped = kept["scores"], list[str]()
        if is_best and -1 < self._top_k <= len(scores):
            worst_first = sorted(scores, key=lambda path: -self._sign * scores[path])  # of equal ones the oldest first
            dropped = worst_first[: len(scores) - self._top_k + 1]
        if kept["last"] and kept["last"] not in scores:
            dropped.append(kept["last"])
        return dropped

    def kept_after(self, kept: Kept, save: Save, folder: str) -> Kept:
        """Return the kept checkpoints after a save. Checkpoints outside of the folder are not replaced."""
        old = [each for each in dict.fromkeys([*kept["replaced"], *save.dropped]) if not same_path(each, save.path)]
        old = [each for each in old if each.startswith(f"{folder}/") or same_path(each.rpartition("/")[0], folder)]
        scores = {path: score for path, score in kept["scores"].items() if path not in save.dropped}
        if save.is_best:
            scores[save.path] = 0.0 if save.score is None else save.score
        latest = {"last": save.path, "written_to": save.written_to, "current_score": save.score, "link": save.link}
        return cast(Kept, {"scores": scores, "replaced": old, **latest})


class MonitoredScore:
    """Reads the monitored metric, if any, at a save, on rank 0. It warns once of every problem."""

    def __init__(self, monitor: str | None) -> None:
        self.monitor = monitor
        self._has_warned = self._has_warned_of_value = False

    def read(self, trainer: TrainerProtocol, has_validated: bool) -> float | None:
        """Return its value, or NaN if it belongs to earlier weights or is not logged yet.

        Raises:
            ValueError: it should have been logged.
        """
        if self.monitor is None:
            return None
        if self._is_counter(trainer):
            return float(trainer.current_epoch if self.monitor == "epoch" else trainer.global_step)
        if self.monitor in trainer.callback_metrics:
            value = float(trainer.metrics.monitored(self.monitor, "ModelCheckpoint"))
            return math.nan if trainer.metrics.is_outdated(self.monitor) else value
        # Everything that logs has run by now, so the name is wrong, not early.
        if trainer.state.epoch_ended and (has_validated or not trainer.enable_validation):
            return float(trainer.metrics.monitored(self.monitor, "ModelCheckpoint"))  # raises, and lists the metrics
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"ModelCheckpoint monitors {self.monitor!r}, which was not logged yet. Checkpoints saved before it is do not "
                "count among the best, and only the newest of them is kept.",
                stacklevel=2,
            )
        return math.nan

    def is_pending(self, trainer: TrainerProtocol) -> bool:
        """Return whether the next validation may score the current weights, which have no score yet."""
        if self.monitor is None or not trainer.enable_validation or self._is_counter(trainer):
            return False
        return self.monitor not in trainer.callback_metrics or trainer.metrics.is_outdated(self.monitor)

    def _is_counter(self, trainer: TrainerProtocol) -> bool:
        return self.monitor in COUNTERS and self.monitor not in trainer.callback_metrics

    def warn_of_value(self, trainer: TrainerProtocol, score: float | None, is_awaited: bool) -> None:
        """Warn that the value is not finite, or that earlier weights got it and no validation of these is awaited."""
        if self._has_warned_of_value or is_awaited or self.monitor not in trainer.callback_metrics:
            return
        self._has_warned_of_value = True
        problem = (
            "but its latest value belongs to earlier weights. Such a checkpoint does not count among the best, and only the "
            "newest of them is kept. Save where it is logged: after validations (leave save_on_train_epoch_end out), or in the "
            "same epochs."
            if trainer.metrics.is_outdated(self.monitor)
            else f"which is {score}, not finite. Until it is finite, only the newest checkpoint is kept, to resume from, and "
            "none counts as the best."
        )
        warn(f"ModelCheckpoint monitors {self.monitor!r}, {problem}", stacklevel=2)
