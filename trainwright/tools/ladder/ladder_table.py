"""The table of a ladder, for a terminal, as Markdown and as CSV, and the sentences below it."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from trainwright.engine.memory_estimate import size_text
from trainwright.launch.columns import lay_out
from trainwright.precision import MIXED
from trainwright.tools.ladder.attempt import Attempt, Figure, Result
from trainwright.tools.ladder.climb import SEED, with_seed
from trainwright.tools.ladder.comparison import DEVIATIONS, NOISE, SPEED_NOISE, Comparison
from trainwright.tools.ladder.rung import COMPILER
from trainwright.tools.ladder.steady_rate import OUTLIER

NO_VALUE = "-"
SLOW_SHARE = 0.1
"""Slow steps are noted if they take more than this part of the training's time."""
CSV_HEADS = (
    *("rung", "seed", "state", "reason", "made", "strategy", "precision", "compile", "processes", "steps"),
    *("common_steps", "seconds_to_common_steps", "seconds", "samples_per_second", "batches_per_second", "peak_bytes"),
    *("metric", "value", "process_seconds", "log"),
)


def terminal_table(comparison: Comparison, width: int | None) -> list[str]:
    """Return the lines of the table, without the columns that do not fit."""
    rows = [heads(comparison), *(cells(comparison, each) for each in comparison.results)]
    return lay_out(rows, width, indent=2, right=range(2, len(rows[0])), dropped=(2, 1, 7, 3))


def heads(comparison: Comparison) -> list[str]:
    steps = comparison.common_steps
    names = [
        "rung",
        "with",
        "steps",
        f"to step {steps}" if steps else "to a step",
        "to the end",
        _unit(comparison),
        "speed-up",
    ]
    return [*names, "memory", *([comparison.metric.name] if comparison.metric is not None else [])]


def cells(comparison: Comparison, result: Result) -> list[str]:
    """Return the row of a rung; the means of its seeds, with their standard deviations."""
    end = [NO_VALUE] if comparison.metric is not None else []
    if result.state != "finished":
        return [result.rung.name, _with(result), NO_VALUE, NO_VALUE, NO_VALUE, result.state, NO_VALUE, NO_VALUE, *end]
    speed_up, peak = comparison.speed_up(result), result.figure(lambda record: record.peak_bytes)
    steps, score = result.figure(lambda record: record.steps), comparison.score(result)
    return [
        result.rung.name,
        _with(result),
        NO_VALUE if steps is None else f"{steps.mean:,.0f}",
        _seconds(comparison.seconds_to_common(result)),
        _seconds(result.figure(lambda record: record.seconds)),
        _number(comparison.rate(result)),
        NO_VALUE if speed_up is None else f"{speed_up:.2f}x",
        NO_VALUE if peak is None else size_text(int(peak.mean)),
        *([_score(score)] if end else []),
    ]


def _unit(comparison: Comparison) -> str:
    return "samples/s" if comparison.counts_samples else "batches/s"


def markdown_table(comparison: Comparison) -> list[str]:
    """Return the whole table as Markdown."""
    first = heads(comparison)
    rows = [
        first,
        ["---", "---", *["---:"] * (len(first) - 2)],
        *(cells(comparison, each) for each in comparison.results),
    ]
    return [f"| {' | '.join(each.replace('|', chr(92) + '|') for each in row)} |" for row in rows]


def csv_text(comparison: Comparison) -> str:
    """Return a row for each run, as numbers."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_HEADS)
    for result in comparison.results:
        for attempt in result.attempts:
            writer.writerow([_plain(each) for each in _csv_row(comparison, attempt)])
    return text.getvalue()


def _csv_row(comparison: Comparison, attempt: Attempt) -> Iterator[Any]:
    rung, record, metric = attempt.rung, attempt.record, comparison.metric
    facts = {} if record is None else record.facts
    yield from (rung.name, rung.seed, attempt.state, attempt.reason, None if record is None else record.owner)
    yield from (facts.get("strategy", rung.strategy), facts.get("precision", rung.precision), rung.compile)
    yield facts.get("processes", rung.devices)
    steps = comparison.common_steps
    yield from (None if record is None else record.steps, steps)
    if record is None:
        yield from [None] * 5
    else:
        yield from (None if steps is None else record.seconds_to(steps), record.seconds)
        yield from (record.samples_per_second, record.batches_per_second, record.peak_bytes)
    yield from (None, None) if metric is None else (metric.name, metric.of(attempt))
    yield from (attempt.seconds, attempt.log)


def notes(comparison: Comparison, command: Sequence[str], device_type: str) -> Iterator[str]:
    """Yield the sentences that a reader of the table needs."""
    skipped: dict[str, list[str]] = {}
    for result in comparison.results:
        if result.state == "skipped":
            skipped.setdefault(result.attempts[0].reason, []).append(result.rung.name)
    for result in comparison.results:
        each = next((each for each in result.attempts if each.state not in ("finished", "skipped")), None)
        if each is not None:
            seed = "" if each.rung.seed is None else f" with seed {each.rung.seed}"
            log = f" Its output is in {each.log}." if each.log else ""
            yield f"{each.rung.name}{seed} {_verb(each)}: {sentence(each.reason)}{log}"
    for reason, names in skipped.items():
        yield f"{_named(names)} {'was' if len(names) == 1 else 'were'} skipped: {sentence(reason)}"
    ran = [run.record for each in comparison.finished for run in each.finished if run.record is not None]
    for result in comparison.finished:
        if result is not comparison.first and not comparison.replaced(result):
            yield f"The script has the settings of {result.rung.name} already: what differs between the two is noise."
    if older := sorted({path for each in comparison.finished for run in each.finished for path in run.older}):
        yield (
            f"The runs saved under other names than {_named(older)}, which existed before the ladder: if the script loads it, "
            "each rung was scored with those older weights. Then move it away and run the ladder again."
        )
    if device_type == "cpu" and any((each.facts.get("processes") or 1) > 1 for each in ran):
        yield "Several processes shared this machine's cores, so their figures say nothing about several GPUs."
    if not comparison.counts_samples:
        yield "The number of samples in a batch is unknown, so batches are counted, those of all processes together."
    if no_rate := [each.rung.name for each in comparison.finished if comparison.rate(each) is None]:
        yield f"Runs of {', '.join(no_rate)} took fewer than two steps, too few to measure a speed."
    yield from _notes_on_slow_steps(comparison)
    yield from _metric_notes(comparison)
    if any(each.is_cut for each in ran):
        has_test = comparison.metric is not None and comparison.metric.source.endswith(", test")
        yield "--steps ends a loop with an Accelerator before its " + (
            "end, so this is its latest test until then." if has_test else "test, so its runs have no test metric."
        )
    has_seeds = any(each.rung.seed is not None for each in comparison.results)
    if has_seeds and not any(SEED in each for each in command) and not any(each.has_seeded for each in ran):
        yield (
            f"The script calls neither tw.seed_everything nor tw.set_seed, and has no {SEED} in its arguments: each run uses "
            "whatever seeds the script sets itself."
        )


def _named(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _notes_on_slow_steps(comparison: Comparison) -> Iterator[str]:
    for result in comparison.finished:
        seconds, total = (
            result.figure(lambda record: record.slow_seconds),
            result.figure(lambda record: record.seconds),
        )
        number = result.figure(lambda record: record.slow_steps)
        if number is None or seconds is None or total is None or seconds.mean <= SLOW_SHARE * total.mean:
            continue
        steps = f"{number.mean:,.0f} step{'' if round(number.mean) == 1 else 's'}"
        why = (
            "If they were compiled for a batch of a new shape, fewer lengths help: see the page on compiling."
            if result.rung.compile
            else "If they are batches of a new length, fewer lengths help, or another attention: see the page on precision."
        )
        yield (
            f"{result.rung.name}: {steps} took more than {OUTLIER} times as long as most, {seconds.mean:.3g} s of its "
            f"{total.mean:.3g} s, and {_unit(comparison)} leaves them out. {why}"
        )


def _metric_notes(comparison: Comparison) -> Iterator[str]:
    metric = comparison.metric
    if metric is None:
        yield "No run has a test or validation metric, so only speed is compared."
        return
    source, _, stage = metric.source.partition(", ")
    where = {
        "trainer": "comes from the Trainer",
        "log": "was logged by the loop",
        "output": "was printed by the script",
    }
    of = f" ({stage})" if stage else ""
    last = " The runs have no test metric." if stage == "validation" else ""
    yield f"{metric.name} {where[source]}{of}.{last}"
    if metric.direction is None:
        yield (
            f"The name {metric.name} does not say whether lower or higher is better: pass --lower or --higher. Until then "
            "only speed is compared."
        )
    shared = [
        each.rung.name for each in comparison.finished if (each.rung.devices or 1) > 1 and comparison.is_worse(each)
    ]
    if shared and comparison.metric is not None:
        yield (
            f"{_named(shared)} made fewer steps on larger batches, since each device keeps the script's batch size: that "
            f"alone may make {metric.name} worse. A smaller batch size in the script shows whether it does."
        )


def choice_lines(comparison: Comparison, command: Sequence[str]) -> Iterator[str]:
    """Yield which rung to choose and why, then the code to copy, which is indented."""
    chosen, first = comparison.choice(), comparison.first
    if chosen is first:
        yield f"Keep the script unchanged: {_why_unchanged(comparison)}."
        late = max(comparison.finished, key=lambda each: comparison.speed_up(each) or 0.0)
        if not (comparison.too_short or comparison.is_worse(late)):
            yield from _late_gain(comparison, late)
        return
    took, before = comparison.seconds_to_end(chosen), comparison.seconds_to_end(first)
    to_end = f"to the end of the training ({_seconds(took)} instead of {_seconds(before)})"
    when = "once it is warmed up" if took is None or before is None else to_end
    gain = comparison.gain(chosen, first)
    yield f"Choose {chosen.rung.name}, {gain:.2f} times as fast as the unchanged script {when}{_about(comparison, chosen)}."
    record = chosen.finished[0].record
    assert record is not None, "a run that has finished has a record"
    yield f"    {_code(chosen, record.owner)}"
    devices = chosen.rung.devices or 1
    if record.owner == "Accelerator" and devices > 1:
        on_cpu = "--cpu " if chosen.rung.accelerator == "cpu" else ""
        yield f"    trainwright launch {on_cpu}--devices {devices} {shlex.join(with_seed(command, chosen.rung.seed))}"
    if took is None:
        yield from _late_gain(comparison, chosen)
    replaced = [f"{name}={was}" for name, was in comparison.replaced(chosen).items() if was != "None"]
    if replaced:
        yield f"The script had {', '.join(replaced)}."


def _why_unchanged(comparison: Comparison) -> str:
    if comparison.finished == [comparison.first]:
        return "no other rung has finished"
    if any(comparison.is_faster(each, comparison.first) and comparison.is_worse(each) for each in comparison.finished):
        return "the faster rungs have a worse metric or none"
    return comparison.too_short or f"no other rung is {SPEED_NOISE:.0%} faster"


def _late_gain(comparison: Comparison, result: Result) -> Iterator[str]:
    """Yield when a rung that starts slowly pays off."""
    own, before = (comparison.seconds_to_common(each) for each in (result, comparison.first))
    speed_up = comparison.speed_up(result) or 0.0
    # A step has a batch for each device.
    is_late = own is not None and before is not None and own.mean > (result.rung.devices or 1) * before.mean
    if not is_late or speed_up <= 1 + SPEED_NOISE:
        return
    steps = comparison.break_even(result)
    when = "in longer runs only" if steps is None else f"after {steps:,} steps"
    yield (
        f"The first {comparison.common_steps} steps of {result.rung.name} took {_seconds(own)}, unchanged {_seconds(before)}: "
        f"its start, such as compiling, pays off {when}. Then it is {speed_up:.2f} times as fast."
    )


def _about(comparison: Comparison, chosen: Result) -> str:
    metric, own, first = comparison.metric, comparison.score(chosen), comparison.score(comparison.first)
    if metric is None or own is None or first is None:
        return ""
    text = f"; {metric.name} is {_score(own)}, unchanged {_score(first)}"
    if comparison.tolerance is None:
        return text
    if first.spread is None:
        return f"{text} (a difference up to {NOISE:.0%} counts as noise; --seeds 3 measures it)"
    return f"{text} (noise: {DEVIATIONS} standard deviations of its seeds, {comparison.tolerance:.2g})"


def _code(result: Result, owner: str) -> str:
    rung = result.rung
    arguments: dict[str, Any] = {"accelerator": rung.accelerator, "devices": rung.devices, "strategy": rung.strategy}
    if owner == "Accelerator":
        word = next((word for word, name in MIXED.items() if name == rung.precision), None)
        arguments |= {"mixed_precision": word} if word is not None else {"precision": rung.precision}
        arguments["dynamo_backend"] = COMPILER if rung.compile else None
    else:
        arguments |= {"precision": rung.precision, "compile": rung.compile or None}
    shown = [f"{name}={_literal(value)}" for name, value in arguments.items() if value is not None]
    return f"tw.{owner}({', '.join(shown)})"


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _with(result: Result) -> str:
    rung = result.rung
    devices = f"{rung.devices} device{'s' * (rung.devices > 1)}" if rung.devices else ""
    parts = [rung.precision or "", "compile" if rung.compile else "", devices]
    return ", ".join(part for part in parts if part and part != rung.name)


def sentence(text: str) -> str:
    """Return a text with a full stop, or with the "..." that it ends in."""
    return text if text.endswith("...") else f"{text.rstrip('.')}."


def _verb(attempt: Attempt) -> str:
    return "was interrupted" if attempt.state == "interrupted" else attempt.state


def _plain(value: Any) -> Any:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else value


def _seconds(figure: Figure | None) -> str:
    return NO_VALUE if figure is None else f"{_shown(figure, '.3g' if figure.mean < 100 else ',.0f')} s"


def _number(figure: Figure | None) -> str:
    return NO_VALUE if figure is None else _shown(figure, ".3g" if figure.mean < 100 else ",.0f")


def _score(figure: Figure | None) -> str:
    return NO_VALUE if figure is None else _shown(figure, ".4g")


def _shown(figure: Figure, form: str) -> str:
    spread = "" if figure.spread is None else f" ±{figure.spread:{form if figure.mean >= 100 else '.2g'}}"
    return f"{figure.mean:{form}}{spread}"
