"""Output of a run: the reason for a failure in one line, and the metrics that the script printed."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from trainwright.distributed.failures import shortened

_FIRST_FAILURE = re.compile(r"trainwright: rank \d+ of \d+.*? failed first \((?P<summary>.*)\); the job was ended\.")
_TRACEBACK = "Traceback (most recent call last)"
_STARTS = re.compile(rf"(?:Original )?{re.escape(_TRACEBACK)}")
"""The start of a traceback. That of a loader's worker follows the error in this process."""
_ERROR = re.compile(r"(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Warning|Exit)\b.*")
_RANK_PREFIX = re.compile(r"\[rank\d+\]:? ?")
_IGNORED = "Exception ignored"
"""The start of Python's text for an error that ends nothing, such as one in a finalizer at exit."""
_PRINTED = re.compile(
    r"(?<![\w.])(?P<name>(?P<stage>test|val|valid|validation)[ _/-]+[a-z][\w/@-]*(?: (?!is\b)[a-z][\w/@-]*)?)"
    r"\s*(?:[:=]|\bis\b)?\s*(?P<value>[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan|inf))\s*(?P<unit>%)?(?!\w|\.\w)",
    re.IGNORECASE,
)
_OTHER_RANK = re.compile(r"\[rank ?[1-9]\d*\]")


class PrintedMetric(NamedTuple):
    """A metric in a line of output."""

    stage: str
    """"test" or "validation"."""
    name: str
    value: float


def printed_metrics(lines: Iterable[str]) -> Iterator[PrintedMetric]:
    """Yield the metrics of lines such as `test accuracy: 91.4 %`, `test_acc=0.91` or `val_loss 0.4`."""
    for line in lines:
        for match in () if _OTHER_RANK.match(line) else _PRINTED.finditer(line):
            stage = "test" if match["stage"].lower() == "test" else "validation"
            name = f"{match['name'].strip()} (%)" if match["unit"] else match["name"].strip()
            yield PrintedMetric(stage, name, float(match["value"]))


def lines_of(output: str) -> list[str]:
    """Return the lines of an output. A progress bar redraws its line after a carriage return."""
    return re.split(r"[\r\n]+", output)


def reason_of(output: str, code: int) -> str:
    """Return the error of a failed run: its exception's message, or its last line."""
    whole = (_RANK_PREFIX.sub("", line, count=1) for line in lines_of(output))
    lines = [line for line in whole if any(map(str.isalnum, line))]
    first = next(filter(None, (_FIRST_FAILURE.fullmatch(line.strip()) for line in reversed(lines))), None)
    if first is not None and not first["summary"].startswith("exit code"):
        return shortened(first["summary"])
    lines = list(_without_ignored(lines)) or lines
    # The first line after the last traceback that is not indented, or the last one that looks like an error.
    start = max((at for at, line in enumerate(lines) if _STARTS.match(line)), default=len(lines))
    ends = [line for line in lines[start + 1 :] if not line[0].isspace()]
    error = next(iter(ends or filter(_ERROR.fullmatch, reversed(lines))), None)
    if code < 0 and (error is None or -code == signal.SIGKILL):  # no error causes a SIGKILL
        name = {number.value: number.name for number in signal.Signals}.get(-code, f"signal {-code}")
        return f"killed by {name}{', on Linux often by the out-of-memory killer' if -code == signal.SIGKILL else ''}"
    return shortened((error or (lines or ["it printed nothing"])[-1]).strip())


def _without_ignored(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of an output without the errors that Python has ignored and their tracebacks."""
    is_ignored = False
    for line in lines:
        if line.startswith(_IGNORED):
            is_ignored = True
        elif not is_ignored:
            yield line
        elif not line[0].isspace() and not line.startswith(_TRACEBACK):
            is_ignored = False  # after its last line, the error itself
