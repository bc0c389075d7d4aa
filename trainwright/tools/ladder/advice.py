"""Advice on the results of a ladder: notes on the table, the rung to choose, and the code to copy."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from trainwright.precision import MIXED
from trainwright.tools.ladder.attempt import Attempt
from trainwright.tools.ladder.comparison import NOISE, SPEED_NOISE, Comparison
from trainwright.tools.ladder.ladder_table import score_text, seconds_text
from trainwright.tools.ladder.rung import COMPILER


def notes(comparison: Comparison, device_type: str) -> Iterator[str]:
    """Yield the sentences that a reader of the table needs."""
    yield from _notes_on_states(comparison)
    yield from _notes_on_noise(comparison, device_type)
    yield from _notes_on_metric(comparison)
    records = comparison.records
    if any(record.is_cut for record in records):
        has_test = comparison.metric is not None and comparison.metric.source.endswith(", test")
        yield "--steps ends a loop with an Accelerator before its " + (
            "end, so this is its latest test until then." if has_test else "test, so its runs have no test metric."
        )


def _notes_on_states(comparison: Comparison) -> Iterator[str]:
    skipped: dict[str, list[str]] = {}
    for result in comparison.results:
        if result.state == "skipped":
            skipped.setdefault(result.reason, []).append(result.rung.name)
        elif result.state != "finished":
            log = f" Its output is in {result.log}." if result.log else ""
            yield f"{result.rung.name} {_verb(result)}: {sentence(result.reason)}{log}"
    for reason, names in skipped.items():
        yield f"{_named(names)} {'was' if len(names) == 1 else 'were'} skipped: {sentence(reason)}"


def _notes_on_noise(comparison: Comparison, device_type: str) -> Iterator[str]:
    """Yield why some figures do not compare the rungs."""
    for result in comparison.finished:
        if result is not comparison.first and not comparison.replaced(result):
            yield f"The script already has the settings of {result.rung.name}. Any difference between the two is noise."
    if older := sorted({path for result in comparison.finished for path in result.older}):
        yield (
            f"The runs saved under other names than {_named(older)}, which existed before the ladder. If the script loads it, "
            "every rung was scored with those older weights. Then move it away and run the ladder again."
        )
    if device_type == "cpu" and any((record.facts.get("processes") or 1) > 1 for record in comparison.records):
        yield "Several processes shared this machine's cores, so their figures say nothing about several GPUs."
    if not comparison.counts_samples:
        yield "The number of samples in a batch is unknown, so the rates count the batches of all processes."
    if no_rate := [result.rung.name for result in comparison.finished if comparison.rate(result) is None]:
        yield f"Runs of {', '.join(no_rate)} took fewer than two steps, too few to measure a speed."


def _notes_on_metric(comparison: Comparison) -> Iterator[str]:
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
    worse = (result.rung for result in comparison.finished if comparison.is_worse(result))
    shared = [rung.name for rung in worse if (rung.devices or 1) > 1]
    if shared:
        yield (
            f"{_named(shared)} made fewer steps on larger batches, since every device keeps the script's batch size. This may "
            f"be why {metric.name} is worse. A smaller batch size in the script shows whether it is."
        )


def choice_lines(comparison: Comparison, command: Sequence[str]) -> Iterator[str]:
    """Yield the rung to choose and why, then the code to copy, which is indented."""
    chosen, first = comparison.choice(), comparison.first
    if chosen is first:
        yield f"Keep the script unchanged: {_why_unchanged(comparison)}."
        late = max(comparison.finished, key=lambda result: comparison.speed_up(result) or 0.0)
        if not (comparison.too_short or comparison.is_worse(late)):
            yield from _late_gain(comparison, late)
        return
    took, before = comparison.seconds_to_end(chosen), comparison.seconds_to_end(first)
    to_end = f"to the end of the training ({seconds_text(took)} instead of {seconds_text(before)})"
    when = "once it is warmed up" if None in (took, before) else to_end
    gain = comparison.gain(chosen, first)
    yield f"Choose {chosen.rung.name}, {gain:.2f} times as fast as the unchanged script {when}{_about(comparison, chosen)}."
    record = chosen.record
    assert record is not None, "a finished run has a record"
    yield f"    {_code(chosen, record.owner)}"
    devices = chosen.rung.devices or 1
    if record.owner == "Accelerator" and devices > 1:
        on_cpu = "--cpu " if chosen.rung.accelerator == "cpu" else ""
        yield f"    trainwright launch {on_cpu}--devices {devices} {shlex.join(command)}"
    if took is None:
        yield from _late_gain(comparison, chosen)
    if replaced := [f"{name}={was}" for name, was in comparison.replaced(chosen).items() if was != "None"]:
        yield f"The script had {', '.join(replaced)}."


def _why_unchanged(comparison: Comparison) -> str:
    if comparison.finished == [comparison.first]:
        return "no other rung has finished"
    faster = (result for result in comparison.finished if comparison.is_faster(result, comparison.first))
    if any(comparison.is_worse(result) for result in faster):
        return "the faster rungs have a worse metric or none"
    return comparison.too_short or f"no other rung is {SPEED_NOISE:.0%} faster"


def _late_gain(comparison: Comparison, result: Attempt) -> Iterator[str]:
    """Yield when a rung that starts slowly pays off."""
    took, before = (comparison.seconds_to_common(each) for each in (result, comparison.first))
    speed_up = comparison.speed_up(result) or 0.0
    # A step has a batch for each device.
    is_late = took is not None and before is not None and took > (result.rung.devices or 1) * before
    if not is_late or speed_up <= 1 + SPEED_NOISE:
        return
    steps = comparison.break_even(result)
    when = "in longer runs only" if steps is None else f"after {steps:,} steps"
    yield (
        f"The first {comparison.common_steps} steps of {result.rung.name} took {seconds_text(took)}, unchanged "
        f"{seconds_text(before)}. Its start, such as compiling, pays off {when}. Then it is {speed_up:.2f} times as fast."
    )


def _about(comparison: Comparison, chosen: Attempt) -> str:
    metric, score, first = comparison.metric, comparison.score(chosen), comparison.score(comparison.first)
    if metric is None or score is None or first is None:
        return ""
    text = f"; {metric.name} is {score_text(score)}, unchanged {score_text(first)}"
    return text if comparison.tolerance is None else f"{text} (a difference up to {NOISE:.0%} counts as noise)"


def _code(result: Attempt, owner: str) -> str:
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


def sentence(text: str) -> str:
    """Return a text with a full stop, unless it ends in "..."."""
    return text if text.endswith("...") else f"{text.rstrip('.')}."


def _named(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _verb(attempt: Attempt) -> str:
    return "was interrupted" if attempt.state == "interrupted" else attempt.state
