"""Comparison: the rungs of a ladder relative to the first of them, which runs the script unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.errors import did_you_mean
from trainwright.metric_direction import Direction, direction_of
from trainwright.tools.ladder.attempt import Attempt, Figure, Result, figure_of

NOISE = 0.02
"""The fraction of its value by which a metric may be worse without counting as worse, if there is one seed."""
SPEED_NOISE = 0.05
"""The fraction by which a rung has to be faster than another to count as faster."""
LEAST_SECONDS = 2.0
"""If the steps of the unchanged script take less, its runs are too short to choose a rung by."""
DEVIATIONS = 2
"""What replaces NOISE, in standard deviations of the unchanged script's seeds, if there are several."""

SETTINGS = ("devices", "strategy", "precision", "compile", "dynamo_backend")
"""The arguments of a script that a rung may be chosen for."""


@dataclass(frozen=True)
class ComparedMetric:
    """The metric by which the rungs are compared."""

    name: str
    source: str
    """Which of the sources of a run's metrics has it."""
    direction: Direction | None
    """Whether lower or higher is better; None if that is unknown."""

    def of(self, attempt: Attempt) -> float | None:
        """Return its value in a run."""
        return next((values.get(self.name) for source, values in attempt.metrics() if source == self.source), None)


def choose_metric(
    attempt: Attempt, wanted: str | None = None, direction: Direction | None = None
) -> ComparedMetric | None:
    """Return the metric to compare by: the wanted one, else a test's, else a validation's; None if the run has none.

    Raises:
        ValueError: the run does not have the wanted metric.
    """
    found = [(source, values) for source, values in attempt.metrics() if values]
    if wanted is not None:
        source = next((source for source, values in found if wanted in values), None)
        if source is None:
            known = list(dict.fromkeys(name for _, values in found for name in values))
            has = (
                f"it has {', '.join(known)}"
                if known
                else "it has neither a test nor a validation metric, and logs none"
            )
            raise ValueError(f"--metric {wanted}: the script has no such metric; {has}.{did_you_mean(wanted, known)}")
        return ComparedMetric(wanted, source, direction or direction_of(wanted))
    found = [each for each in found if each[0] != "log"]  # of the training, unless it is wanted
    if not found:
        return None
    source, values = found[0]
    # An accuracy says more than a loss, which differs by itself from precision to precision.
    order: list[Direction | None] = ["max", "min", None]
    name = min(values, key=lambda each: order.index(direction_of(each)))
    return ComparedMetric(name, source, direction or direction_of(name))


@dataclass(frozen=True)
class Comparison:
    """The results of the rungs so far, the unchanged script first."""

    results: Sequence[Result]
    metric: ComparedMetric | None

    @property
    def first(self) -> Result:
        return self.results[0]

    @property
    def finished(self) -> list[Result]:
        """The rungs all of whose runs have finished."""
        return [each for each in self.results if each.state == "finished"]

    @property
    def counts_samples(self) -> bool:
        """Whether the samples of each batch are known; otherwise batches are counted."""
        ran = [run.record for each in self.finished for run in each.finished if run.record is not None]
        return not any(each.samples_per_second is None and each.batches_per_second is not None for each in ran)

    @property
    def common_steps(self) -> int | None:
        """The steps that each run of a finished rung has made."""
        made = [run.record.points[-1][0] for each in self.finished for run in each.finished if run.record is not None]
        return min(made, default=None)

    def rate(self, result: Result) -> Figure | None:
        """Return the samples, or batches, a second."""
        if self.counts_samples:
            return result.figure(lambda record: record.samples_per_second)
        return result.figure(lambda record: record.batches_per_second)

    def seconds_to_common(self, result: Result) -> Figure | None:
        steps = self.common_steps
        return None if steps is None else result.figure(lambda record: record.seconds_to(steps))

    def speed_up(self, result: Result) -> float | None:
        """Return how many times as fast as the unchanged script a rung is."""
        own, first = self.rate(result), self.rate(self.first)
        return None if own is None or first is None or not first.mean else own.mean / first.mean

    def seconds_to_end(self, result: Result) -> Figure | None:
        """Return the duration of the whole training; None if --steps cut it and its length is unknown."""
        return result.figure(lambda record: record.seconds_to_end)

    def gain(self, result: Result, other: Result) -> float:
        """Return how many times as fast as another a rung is: to the end, or at the steady rate if the end is unknown."""
        own, than = self.seconds_to_end(result), self.seconds_to_end(other)
        if own is None or than is None:
            than, own = self.rate(result), self.rate(other)
        return 0.0 if own is None or than is None or not own.mean else than.mean / own.mean

    @property
    def too_short(self) -> str:
        """Why the unchanged script's steps, at their steady rate, take too little time to choose a rung; "" if they do not."""
        rate, made = (self.first.figure(lambda each: each.steps_per_second), self.first.figure(lambda each: each.steps))
        if rate is not None and made is not None and made.mean >= LEAST_SECONDS * rate.mean:
            return ""
        longer = "let it train for longer" if self.first.rung.steps is None else "pass a higher --steps"
        return f"its steps took less than {LEAST_SECONDS:g} s, which is too short to compare rungs; {longer}"

    def score(self, result: Result) -> Figure | None:
        """Return the metric."""
        metric = self.metric
        return None if metric is None else figure_of([metric.of(each) for each in result.finished])

    @property
    def tolerance(self) -> float | None:
        """By how much the metric may be worse than that of the unchanged script; None if it cannot be compared."""
        first = self.score(self.first)
        if first is None or self.metric is None or self.metric.direction is None:
            return None
        return NOISE * abs(first.mean) if first.spread is None else DEVIATIONS * first.spread

    def is_worse(self, result: Result) -> bool | None:
        """Return whether a rung's metric is worse by more than noise, or missing; None if that is unknown."""
        first, own, tolerance = self.score(self.first), self.score(result), self.tolerance
        if first is None or tolerance is None or self.metric is None:
            return None
        if own is None:
            return True
        lost = own.mean - first.mean if self.metric.direction == "min" else first.mean - own.mean
        return not lost <= tolerance  # also if it is NaN

    def choice(self) -> Result:
        """Return the fastest rung whose metric is not worse; the unchanged script if no other is faster."""
        changed = [each for each in self.finished if self.replaced(each)]
        faster = [each for each in changed if self.is_faster(each, self.first) and not self.is_worse(each)]
        return max(faster, key=lambda each: self.gain(each, self.first), default=self.first)

    def replaced(self, result: Result) -> dict[str, str]:
        """Return the script's values of the settings that a rung has replaced; none if the script has the rung's already."""
        record = result.attempts[0].record
        known = {} if record is None else record.replaced
        return {name: was for name, (was, _) in known.items() if name in SETTINGS}

    def is_faster(self, result: Result, other: Result) -> bool:
        """Return whether a rung has finished and is faster than another by more than noise; False if runs are too short."""
        if self.too_short or result.state != "finished":
            return False
        return self.gain(result, other) > 1 + SPEED_NOISE

    def break_even(self, result: Result) -> int | None:
        """Return after how many steps a rung on one process overtakes the unchanged script, which began sooner."""
        rates = [each.figure(lambda record: record.steps_per_second) for each in (result, self.first)]
        seconds = [self.seconds_to_common(each) for each in (result, self.first)]
        if None in rates or None in seconds or self.common_steps is None or (result.rung.devices or 1) > 1:
            return None
        (own, before), (late, early) = [each.mean for each in rates if each], [each.mean for each in seconds if each]
        return self.common_steps + round((late - early) / (1 / before - 1 / own)) if own > before else None
