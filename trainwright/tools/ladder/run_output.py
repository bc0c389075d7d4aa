"""Output of a run that has ended: why it failed, in one line."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from trainwright.distributed.failures import shortened

_FIRST_FAILURE = re.compile(r"trainwright: rank \d+ of \d+.*? failed first \((?P<summary>.*)\); the job was ended\.")
_TRACEBACK = "Traceback (most recent call last)"
_STARTS = re.compile(rf"(?:  \+ Exception Group |Original )?{re.escape(_TRACEBACK)}")
"""Of a traceback, of that of a group, and of that of a loader's worker, which comes after the error in this process."""
_IN_GROUP = re.compile(rf"(?P<margin> +\| )(?P<head>(?:Exception Group )?{re.escape(_TRACEBACK)})?(?P<text>\S.*)")
_SECOND_OF_GROUP = re.compile(r" +\+-+ 2 -+")
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
    error = None if code == -signal.SIGKILL else _error_of(lines)  # of which no error is the cause
    if error is None and code < 0:
        hint = ", on Linux often by the out-of-memory killer" if -code == signal.SIGKILL else ""
        return f"killed by {_signal_name(-code)}{hint}"
    last = next((line for line in reversed(lines) if any(map(str.isalnum, line))), "it printed nothing")  # not a rule
    return shortened(error or last.strip())


def _error_of(lines: Sequence[str]) -> str | None:
    """Return the error that was printed last, with what says more about it in the lines around it."""
    start = next((at for at in reversed(range(len(lines))) if _STARTS.match(lines[at])), len(lines))
    if lines[start:] and lines[start].startswith(" "):
        return _error_of_group(lines[start:])
    own = (at for at in range(start + 1, len(lines)) if not lines[at][0].isspace())
    at = next(own, next((at for at in reversed(range(len(lines))) if _ERROR.fullmatch(lines[at])), None))
    if at is None:
        return None
    error = lines[at]
    if error.startswith(_OF_SYNTAX):
        return error + _location_before(lines[:at])
    if error.rstrip().endswith(":") and " " not in error.rstrip():  # the text begins on the next line
        return " ".join([error.rstrip(), *(each.strip() for each in lines[at + 1 : at + 2])])
    return error


def _error_of_group(lines: Sequence[str]) -> str | None:
    """Return the error of an exception group, and the first in it that holds no others."""
    texts: dict[str, str] = {}
    """The first line of the error at each margin, outermost first."""
    for line in takewhile(lambda line: not _SECOND_OF_GROUP.match(line), lines):
        if (found := _IN_GROUP.match(line)) is None:
            continue
        margin = found["margin"]
        if found["head"]:  # what came before at this margin is the cause of what comes
            texts = {key: text for key, text in texts.items() if len(key) < len(margin)}
        elif all(len(key) < len(margin) for key in texts):
            texts[margin] = found["text"]
    return ", the first ".join(list(texts.values())[:: max(1, len(texts) - 1)]) or None


def _location_before(lines: Sequence[str]) -> str:
    """Return the file and line that were printed last, in parentheses; "" if none were."""
    locations = map(_LOCATION.fullmatch, reversed(lines))
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
