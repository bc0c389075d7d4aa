"""Output of a run that has ended: why it failed, in one line."""

from __future__ import annotations

import re
import signal

_FIRST_FAILURE = re.compile(r"trainwright: rank \d+ of \d+.*? failed first \((?P<summary>.*)\); the job was ended\.")
_TRACEBACK = "Traceback (most recent call last)"
_ERROR = re.compile(r"(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Warning|Exit)\b.*")
_RANK_PREFIX = re.compile(r"\[rank\d+\]:? ?")
LONGEST = 700


def lines_of(output: str) -> list[str]:
    """Return the lines that are left of an output; a progress bar draws its line again after each carriage return."""
    return re.split(r"[\r\n]+", output)


def reason_of(output: str, code: int) -> str:
    """Return the error of a run that failed: its exception's message, or the last line of its output."""
    lines = [line for each in lines_of(output) if (line := _RANK_PREFIX.sub("", each, count=1)).strip()]
    for line in reversed(lines):
        if found := _FIRST_FAILURE.fullmatch(line.strip()):
            if not found["summary"].startswith("exit code"):
                return _cut(found["summary"])
            break
    starts = [number for number, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    after = lines[starts[-1] + 1 :] if starts else []
    error = next((line for line in after if not line[0].isspace()), None)
    if error is None:
        error = next((line for line in reversed(lines) if _ERROR.fullmatch(line)), None)
    if error is None and code < 0:
        hint = ", on Linux often by the out-of-memory killer" if -code == signal.SIGKILL else ""
        return f"killed by {_signal_name(-code)}{hint}"
    return _cut(error or (lines[-1].strip() if lines else "it printed nothing"))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
