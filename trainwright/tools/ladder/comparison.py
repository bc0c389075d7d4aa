"""Comparison: the rungs of a ladder relative to the first one, which runs the script unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.errors import did_you_mean
from trainwright.metric_direction import Direction, direction_of
from trainwright.tools.ladder.attempt import Attempt, Figure, Result, RungRecord, figure_of

NOISE = 0.02
"""With one seed, a metric may be worse by this fraction of its value."""
SPEED_NOISE = 0.05
"""A rung counts as faster if it is faster by this fraction."""
LEAST_SECONDS = 2.0
"""If the steps of the unchanged script take less time, its runs are too short to choose a rung."""
DEVIATIONS = 2
"""With several seeds, the limit is this many standard deviations of the unchanged script instead of NOISE."""
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

    results: Sequence[Result]
    metric: ComparedMetric | None

    @property
    def first(self) -> Result:
        return self.results[0]

    @property
    def finished(self) -> list[Result]:
        """The rungs without an unfinished run."""
        return [result for result in self.results if result.state == "finished"]

    @property
    def records(self) -> list[RungRecord]:
        """The records of the finished rungs."""
        return [run.record for result in self.finished for run in result.finished if run.record is not None]

    @property
    def counts_samples(self) -> bool:
        """Whether the number of samples is known in all batches. Otherwise batches are counted."""
        return all(
            record.samples_per_second is not None or record.batches_per_second is None for record in self.records
        )

    @property
    def common_steps(self) -> int | None:
        """The steps that all runs of finished rungs have made."""
        return min((record.points[-1][0] for record in self.records), default=None)

    def rate(self, result: Result) -> Figure | None:
        """Return the samples or batches a second."""
        if self.counts_samples:
            return result.figure(lambda record: record.samples_per_second)
        return result.figure(lambda record: record.batches_per_second)

    def seconds_to_common(self, result: Result) -> Figure | None:
        steps = self.common_steps
        return None if steps is None else result.figure(lambda record: record.seconds_to(steps))

    def speed_up(self, result: Result) -> float | None:
        """Return how many times as fast as the unchanged script a rung is."""
        rate, first = self.rate(result), self.rate(self.first)
        return None if rate is None or first is None or not first.mean else rate.mean / first.mean

    def seconds_to_end(self, result: Result) -> Figure | None:
        """Return the duration of the whole training, or None if --steps cut it and its length is unknown."""
        return result.figure(lambda record: record.seconds_to_end)

    def gain(self, result: Result, other: Result) -> float:
        """Return how many times as fast as another a rung is, to the end of the training or at the steady rate."""
        less, more = self.seconds_to_end(result), self.seconds_to_end(other)
        if less is None or more is None:
            more, less = self.rate(result), self.rate(other)
        return 0.0 if less is None or more is None or not less.mean else more.mean / less.mean

    @property
    def too_short(self) -> str:
        """Why the runs are too short to choose a rung, or "". It counts the script's steps at their steady rate."""
        rate = self.first.figure(lambda record: record.steps_per_second)
        made = self.first.figure(lambda record: record.steps)
        if rate is not None and made is not None and made.mean >= LEAST_SECONDS * rate.mean:
            return ""
        longer = "let it train for longer" if self.first.rung.steps is None else "pass a higher --steps"
        return f"its steps took less than {LEAST_SECONDS:g} s, which is too short to compare rungs; {longer}"

    def score(self, result: Result) -> Figure | None:
        """Return the metric."""
        metric = self.metric
        return None if metric is None else figure_of([metric.of(run) for run in result.finished])

    @property
    def tolerance(self) -> float | None:
        """How much worse than with the unchanged script the metric may be, or None if it cannot be compared."""
        first = self.score(self.first)
        if first is None or self.metric is None or self.metric.direction is None:
            return None
        return NOISE * abs(first.mean) if first.spread is None else DEVIATIONS * first.spread

    def is_worse(self, result: Result) -> bool | None:
        """Return whether a rung's metric is missing, or worse by more than noise; None if unknown."""
        first, score, tolerance = self.score(self.first), self.score(result), self.tolerance
        if first is None or tolerance is None or self.metric is None:
            return None
        if score is None:
            return True
        lost = score.mean - first.mean if self.metric.direction == "min" else first.mean - score.mean
        return not lost <= tolerance  # also if it is NaN

    def choice(self) -> Result:
        """Return the fastest rung whose metric is not worse, or the unchanged script if no rung is faster."""
        changed = [result for result in self.finished if self.replaced(result)]
        faster = [result for result in changed if self.is_faster(result, self.first) and not self.is_worse(result)]
        return max(faster, key=lambda result: self.gain(result, self.first), default=self.first)

    def replaced(self, result: Result) -> dict[str, str]:
        """Return the script's values of the settings that a rung has replaced by others."""
        record = result.attempts[0].record
        known = {} if record is None else record.replaced
        return {name: was for name, (was, _) in known.items() if name in SETTINGS}

    def is_faster(self, result: Result, other: Result) -> bool:
        """Return whether a rung has finished and is faster by more than noise. False if runs are too short."""
        if self.too_short or result.state != "finished":
            return False
        return self.gain(result, other) > 1 + SPEED_NOISE

    def break_even(self, result: Result) -> int | None:
        """Return the steps after which a rung on one process overtakes the unchanged script, which starts sooner."""
        fast, slow = (each.figure(lambda record: record.steps_per_second) for each in (result, self.first))
        late, early = self.seconds_to_common(result), self.seconds_to_common(self.first)
        if fast is None or slow is None or late is None or early is None or (result.rung.devices or 1) > 1:
            return None
        steps = self.common_steps or 0
        lead = late.mean - early.mean
        return steps + round(lead / (1 / slow.mean - 1 / fast.mean)) if fast.mean > slow.mean else None
