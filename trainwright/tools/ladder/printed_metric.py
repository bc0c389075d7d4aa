"""Metrics that a script prints, found in the output of its run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_PRINTED = re.compile(
    r"(?<![\w.])(?P<name>(?P<stage>test|val|valid|validation)[ _/-]+[a-z][\w/@-]*(?: (?!is\b)[a-z][\w/@-]*)?)"
    r"\s*(?:[:=]|\bis\b)?\s*(?P<value>[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan|inf))\s*(?P<unit>%)?(?!\w|\.\w)",
    re.IGNORECASE,
)
_RANK_PREFIX = re.compile(r"\[rank ?[1-9]\d*\]")


class PrintedMetric(NamedTuple):
    """A metric as a line of output has it."""

    stage: str
    """"test" or "validation"."""
    name: str
    value: float


def printed_metrics(lines: Iterable[str]) -> Iterator[PrintedMetric]:
    """Yield what the lines have of the form `test accuracy: 91.4 %`, `test_acc=0.91` or `val_loss 0.4`, in their order."""
    for line in lines:
        if _RANK_PREFIX.match(line):
            continue
        for found in _PRINTED.finditer(line):
            stage = "test" if found["stage"].lower() == "test" else "validation"
            name = f"{found['name'].strip()} (%)" if found["unit"] else found["name"].strip()
            yield PrintedMetric(stage, name, float(found["value"]))
