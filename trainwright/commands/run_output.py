"""Output of a run that has ended: why it failed, in one line."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Sequence

from trainwright.distributed.failures import shortened

_FIRST_FAILURE = re.compile(r"trainwright: rank \d+ of \d+.*? failed first \((?P<summary>.*)\); the job was ended\.")
_TRACEBACK = "Traceback (most recent call last)"
_ERROR = re.compile(r"(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Warning|Exit)\b.*")
_LOCATION = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+)')
_RANK_PREFIX = re.compile(r"\[rank\d+\]:? ?")
_OF_SYNTAX = ("SyntaxError:", "IndentationError:", "TabError:")
"""Errors that do not say of which line they are; the lines before them do."""
_IGNORED = "Exception ignored"
"""How Python begins what it prints of an error that ends nothing, as one of a finalizer at exit."""


def lines_of(output: str) -> list[str]:
    """Return the lines that are left of an output; a progress bar draws its line again after each carriage return."""
    return re.split(r"[\r\n]+", output)


def reason_of(output: str, code: int) -> str:
    """Return the error of a run that failed: its exception's message, or the last line of its output."""
    lines = [line for each in lines_of(output) if (line := _RANK_PREFIX.sub("", each, count=1)).strip()]
    for line in reversed(lines):
        if found := _FIRST_FAILURE.fullmatch(line.strip()):
            if not found["summary"].startswith("exit code"):
                return shortened(found["summary"])
            break
    lines = list(_without_ignored(lines)) or lines
    starts = [number for number, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    after = lines[starts[-1] + 1 :] if starts else []
    error = next((line for line in after if not line[0].isspace()), None)
    if error is None:
        error = next((line for line in reversed(lines) if _ERROR.fullmatch(line)), None)
    if error is not None and error.startswith(_OF_SYNTAX):
        error += _location_before(lines, error)
    if error is None and code < 0:
        hint = ", on Linux often by the out-of-memory killer" if -code == signal.SIGKILL else ""
        return f"killed by {_signal_name(-code)}{hint}"
    last = next((line for line in reversed(lines) if any(map(str.isalnum, line))), "it printed nothing")  # not a rule
    return shortened(error or last.strip())


def _location_before(lines: Sequence[str], error: str) -> str:
    """Return the file and line that were printed last before an error, in parentheses; "" if none were."""
    locations = map(_LOCATION.fullmatch, reversed(lines[: lines.index(error)]))
    found = next(filter(None, locations), None)
    return "" if found is None else f" ({found['path']}, line {found['line']})"


def _without_ignored(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of an output, without the errors that Python has ignored and their tracebacks."""
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
