"""Comparison: the rungs of a ladder relative to the first one, which runs the script unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.errors import did_you_mean
from trainwright.metric_direction import Direction, direction_of
from trainwright.tools.ladder.attempt import Attempt, RungRecord

NOISE = 0.02
"""A metric may be worse by this fraction of its value."""
SPEED_NOISE = 0.05
"""A rung counts as faster if it is faster by this fraction."""
LEAST_SECONDS = 2.0
"""If the steps of the unchanged script take less time, its runs are too short to choose a rung."""
SETTINGS = ("devices", "strategy", "precision", "compile", "dynamo_backend")
"""The arguments by which a rung may be chosen."""


@dataclass(frozen=True)
class ComparedMetric:
    """The metric by which the rungs are compared."""

    name: str
    source: str
    """The source in `Attempt.metrics`."""
    direction: Direction | None
    """Whether lower or higher is better; None if unknown."""

    def of(self, attempt: Attempt) -> float | None:
        """Return its value in a run."""
        return next((values.get(self.name) for source, values in attempt.metrics() if source == self.source), None)


def choose_metric(
    attempt: Attempt, wanted: str | None = None, direction: Direction | None = None
) -> ComparedMetric | None:
    """Return the metric for comparisons: the wanted one, or a test's, or a validation's, or None.

    Raises:
        ValueError: the run does not have the wanted metric.
    """
    sources = [(source, values) for source, values in attempt.metrics() if values]
    if wanted is not None:
        source = next((source for source, values in sources if wanted in values), None)
        if source is None:
            known = list(dict.fromkeys(name for _, values in sources for name in values))
            has = f"it has {', '.join(known)}" if known else "it logs no metric, and has none of a test or validation"
            raise ValueError(f"--metric {wanted}: the script has no such metric; {has}.{did_you_mean(wanted, known)}")
        return ComparedMetric(wanted, source, direction or direction_of(wanted))
    evaluated = [(source, values) for source, values in sources if source != "log"]  # the log has training metrics
    if not evaluated:
        return None
    source, values = evaluated[0]
    # An accuracy says more than a loss, which depends on the precision.
    order: list[Direction | None] = ["max", "min", None]
    name = min(values, key=lambda name: order.index(direction_of(name)))
    return ComparedMetric(name, source, direction or direction_of(name))


@dataclass(frozen=True)
class Comparison:
    """The results of the rungs so far, the unchanged script first."""

    results: Sequence[Attempt]
    metric: ComparedMetric | None

    @property
    def first(self) -> Attempt:
        return self.results[0]

    @property
    def finished(self) -> list[Attempt]:
        """The rungs without an unfinished run."""
        return [result for result in self.results if result.state == "finished"]

    @property
    def records(self) -> list[RungRecord]:
        """The records of the finished rungs."""
        return [result.record for result in self.finished if result.record is not None]

    @property
    def counts_samples(self) -> bool:
        """Whether the number of samples is known in all batches. Otherwise batches are counted."""
        return all(run.samples_per_second is not None or run.batches_per_second is None for run in self.records)

    @property
    def common_steps(self) -> int | None:
        """The steps that all runs of finished rungs have made."""
        return min((record.points[-1][0] for record in self.records), default=None)

    def rate(self, result: Attempt) -> float | None:
        """Return the samples or batches a second."""
        if self.counts_samples:
            return result.figure(lambda record: record.samples_per_second)
        return result.figure(lambda record: record.batches_per_second)

    def seconds_to_common(self, result: Attempt) -> float | None:
        steps = self.common_steps
        return None if steps is None else result.figure(lambda record: record.seconds_to(steps))

    def speed_up(self, result: Attempt) -> float | None:
        """Return how many times as fast as the unchanged script a rung is."""
        rate, first = self.rate(result), self.rate(self.first)
        return None if rate is None or not first else rate / first

    def seconds_to_end(self, result: Attempt) -> float | None:
        """Return the duration of the whole training, or None if --steps cut it and its length is unknown."""
        return result.figure(lambda record: record.seconds_to_end)

    def gain(self, result: Attempt, other: Attempt) -> float:
        """Return how many times as fast as another a rung is, to the end of the training or at the steady rate."""
        less, more = self.seconds_to_end(result), self.seconds_to_end(other)
        if less is None or more is None:
            more, less = self.rate(result), self.rate(other)
        return 0.0 if not less or more is None else more / less

    @property
    def too_short(self) -> str:
        """Why the runs are too short to choose a rung, or "". It counts the script's steps at their steady rate."""
        rate = self.first.figure(lambda record: record.steps_per_second)
        made = self.first.figure(lambda record: record.steps)
        if rate is not None and made is not None and made >= LEAST_SECONDS * rate:
            return ""
        longer = "let it train for longer" if self.first.rung.steps is None else "pass a higher --steps"
        return f"its steps took less than {LEAST_SECONDS:g} s, which is too short to compare rungs; {longer}"

    def score(self, result: Attempt) -> float | None:
        """Return the metric."""
        metric = self.metric
        return None if metric is None else metric.of(result)

    @property
    def tolerance(self) -> float | None:
        """How much worse than with the unchanged script the metric may be, or None if it cannot be compared."""
        first = self.score(self.first)
        if first is None or self.metric is None or self.metric.direction is None:
            return None
        return NOISE * abs(first)

    def is_worse(self, result: Attempt) -> bool | None:
        """Return whether a rung's metric is missing, or worse by more than noise; None if unknown."""
        first, score, tolerance = self.score(self.first), self.score(result), self.tolerance
        if first is None or tolerance is None or self.metric is None:
            return None
        if score is None:
            return True
        lost = score - first if self.metric.direction == "min" else first - score
        return not lost <= tolerance  # also if it is NaN

    def choice(self) -> Attempt:
        """Return the fastest rung whose metric is not worse, or the unchanged script if no rung is faster."""
        changed = [result for result in self.finished if self.replaced(result)]
        faster = [result for result in changed if self.is_faster(result, self.first) and not self.is_worse(result)]
        return max(faster, key=lambda result: self.gain(result, self.first), default=self.first)

    def replaced(self, result: Attempt) -> dict[str, str]:
        """Return the script's values of the settings that a rung has replaced by others."""
        record = result.record
        known = {} if record is None else record.replaced
        return {name: was for name, (was, _) in known.items() if name in SETTINGS}

    def is_faster(self, result: Attempt, other: Attempt) -> bool:
        """Return whether a rung has finished and is faster by more than noise. False if runs are too short."""
        if self.too_short or result.state != "finished":
            return False
        return self.gain(result, other) > 1 + SPEED_NOISE

    def break_even(self, result: Attempt) -> int | None:
        """Return the steps after which a rung on one process overtakes the unchanged script, which starts sooner."""
        fast, slow = (each.figure(lambda record: record.steps_per_second) for each in (result, self.first))
        late, early = self.seconds_to_common(result), self.seconds_to_common(self.first)
        if fast is None or slow is None or late is None or early is None or (result.rung.devices or 1) > 1:
            return None
        steps = self.common_steps or 0
        lead = late - early
        return steps + round(lead / (1 / slow - 1 / fast)) if fast > slow else None
