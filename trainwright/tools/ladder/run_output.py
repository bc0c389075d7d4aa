"""Output of a run: the reason for a failure in one line, and the metrics that the script printed."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from trainwright.distributed.failures import shortened

_FIRST_FAILURE = re.compile(r"trainwright: rank \d+ of \d+.*? failed first \((?P<summary>.*)\); the job was ended\.")
_TRACEBACK = "Traceback (most recent call last)"
_STARTS = re.compile(rf"(?:  \+ Exception Group |Original )?{re.escape(_TRACEBACK)}")
"""The start of a traceback: of one error, of a group, or of a loader's worker, which follows the error in this process."""
_IN_GROUP = re.compile(rf"(?P<margin> +\| )(?P<head>(?:Exception Group )?{re.escape(_TRACEBACK)})?(?P<text>\S.*)")
_SECOND_OF_GROUP = re.compile(r" +\+-+ 2 -+")
_ERROR = re.compile(r"(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Warning|Exit)\b.*")
_LOCATION = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+)')
_RANK_PREFIX = re.compile(r"\[rank\d+\]:? ?")
_OF_SYNTAX = ("SyntaxError:", "IndentationError:", "TabError:")
"""Errors whose line number is in the preceding lines."""
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
    lines = [line for line in whole if line.strip()]
    first = next(filter(None, (_FIRST_FAILURE.fullmatch(line.strip()) for line in reversed(lines))), None)
    if first is not None and not first["summary"].startswith("exit code"):
        return shortened(first["summary"])
    lines = list(_without_ignored(lines)) or lines
    error = None if code == -signal.SIGKILL else _error_of(lines)  # no error causes a SIGKILL
    if error is None and code < 0:
        hint = ", on Linux often by the out-of-memory killer" if -code == signal.SIGKILL else ""
        return f"killed by {_signal_name(-code)}{hint}"
    last = next((line for line in reversed(lines) if any(map(str.isalnum, line))), "it printed nothing")  # not a rule
    return shortened(error or last.strip())


def _error_of(lines: Sequence[str]) -> str | None:
    """Return the last printed error, with details from the lines around it."""
    start = next((at for at in reversed(range(len(lines))) if _STARTS.match(lines[at])), len(lines))
    if lines[start:] and lines[start].startswith(" "):
        return _error_of_group(lines[start:])
    unindented = (at for at in range(start + 1, len(lines)) if not lines[at][0].isspace())
    at = next(unindented, next((at for at in reversed(range(len(lines))) if _ERROR.fullmatch(lines[at])), None))
    if at is None:
        return None
    error = lines[at]
    if error.startswith(_OF_SYNTAX):
        return error + _location_before(lines[:at])
    if error.rstrip().endswith(":") and " " not in error.rstrip():  # the text begins on the next line
        return " ".join([error.rstrip(), *(line.strip() for line in lines[at + 1 : at + 2])])
    return error


def _error_of_group(lines: Sequence[str]) -> str | None:
    """Return the error of an exception group, and the first error in it that is not a group."""
    texts: dict[str, str] = {}
    """The first line of the error at each margin, outermost first."""
    for line in takewhile(lambda line: not _SECOND_OF_GROUP.match(line), lines):
        if (match := _IN_GROUP.match(line)) is None:
            continue
        margin = match["margin"]
        if match["head"]:  # the error before it at this margin is the cause of the next one
            texts = {key: text for key, text in texts.items() if len(key) < len(margin)}
        elif all(len(key) < len(margin) for key in texts):
            texts[margin] = match["text"]
    return ", the first ".join(list(texts.values())[:: max(1, len(texts) - 1)]) or None


def _location_before(lines: Sequence[str]) -> str:
    """Return the file and line that were printed last, in parentheses, or ""."""
    locations = map(_LOCATION.fullmatch, reversed(lines))
    match = next(filter(None, locations), None)
    return "" if match is None else f" ({match['path']}, line {match['line']})"


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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
