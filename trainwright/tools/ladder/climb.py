"""Climb: runs a script under one rung after another, in new processes, so that a failure does not end the ladder."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainwright.checkpoint.filesystem import NEW_PATHS
from trainwright.distributed.environment import RUNG_VARIABLE
from trainwright.distributed.failures import shortened
from trainwright.launch.processes import launcher_command
from trainwright.tools.columns import terminal_width
from trainwright.tools.ladder.attempt import Attempt, RungRecord
from trainwright.tools.ladder.rung import Rung

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


LEAVE_SECONDS = 10
"""The time that a stopped run has to exit before it is killed."""
OTHER_FRAMEWORK = re.compile(r"^\s*(?:import|from)\s+(lightning|pytorch_lightning|accelerate)\b", re.MULTILINE)
LOG_NAME, RUNG_NAME = "output.log", "rung.json"
SHOWN_SECONDS, LINE_SECONDS = 5.0, 60.0
"""The intervals at which a run shows its progress, in a terminal and elsewhere."""


@dataclass(frozen=True)
class Climb:
    """Runs the script of a ladder. Its attributes are the same in all runs."""

    command: Sequence[str]
    """The script, or -m and a module, and its arguments."""
    folder: Path
    variables: Mapping[str, str]
    steps: int | None
    accelerator: str | None
    timeout_seconds: float | None

    def run(self, name: str, settings: Mapping[str, Any]) -> Attempt:
        """Run the script under a rung, and return the attempt.

        Raises:
            KeyboardInterrupt: a signal ended the run.
        """
        folder = self.folder / name
        folder.mkdir(parents=True)
        rung = Rung(name, str(folder), **settings, accelerator=self.accelerator, steps=self.steps)
        rung.write(folder / RUNG_NAME)
        variables = {"TRAINWRIGHT_GRACE_SECONDS": str(LEAVE_SECONDS), "PYTHONUNBUFFERED": "1", **self.variables}
        variables[RUNG_VARIABLE] = str(folder / RUNG_NAME)
        log, start = folder / LOG_NAME, time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._command_of(rung),
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches only the ladder, which ends the run
            )
            try:
                has_time = self._wait(process, log, start)
            finally:
                end(process)
                older = _move_new(folder)
        seconds = time.monotonic() - start
        text = log.read_text(encoding="utf-8", errors="replace")
        if not has_time:
            reason = f"it had not ended after {self.timeout_seconds:g} s"
            return Attempt(rung, "timed out", reason, log=str(log), seconds=seconds)
        if process.returncode != 0:
            reason = f"exit code {process.returncode}: {reason_of(text, process.returncode)}"
            return Attempt(rung, "failed", reason, log=str(log), seconds=seconds)
        record = RungRecord.read(folder)
        printed: dict[str, dict[str, float]] = {}
        for metric in printed_metrics(lines_of(text)):
            printed.setdefault(metric.stage, {}).pop(metric.name, None)
            printed[metric.stage] = {metric.name: metric.value, **printed[metric.stage]}  # the latest first
        reason = _why_empty(record, self.command[0])
        return Attempt(rung, "failed" if reason else "finished", reason, record, printed, str(log), seconds, older)

    def _wait(self, process: subprocess.Popen[bytes], log: Path, start: float) -> bool:
        """Show the latest line of a run until its end, and return whether it ended in time."""
        is_terminal, limit = sys.stderr.isatty(), self.timeout_seconds or math.inf
        while (left := limit - (time.monotonic() - start)) > 0:
            try:
                process.wait(min(left, SHOWN_SECONDS if is_terminal else LINE_SECONDS))
                break
            except subprocess.TimeoutExpired:
                line = lines_of(log.read_bytes()[-2000:].decode(errors="replace").strip())[-1]
                text = f"{time.monotonic() - start:.0f} s  {line}"
                # In a terminal the cursor goes back to the place of the outcome.
                text = text[: max(20, (terminal_width(sys.stderr) or 80) - 40)] if is_terminal else text
                shown = f"\0337{text}\033[K\0338" if is_terminal else f"{log.parent.name} runs: {text}\n"
                print(shown, end="", file=sys.stderr, flush=True)
        print("\033[K" if is_terminal else "", end="", file=sys.stderr, flush=True)
        return process.poll() is not None

    def _command_of(self, rung: Rung) -> list[str]:
        command = [sys.executable, *self.command]
        return launcher_command(rung.devices, command) if rung.devices is not None and rung.devices > 1 else command


def _move_new(folder: Path) -> tuple[str, ...]:
    """Move the new files of a run into its folder, and return older checkpoints whose names it could not use."""
    listed, older = folder / NEW_PATHS, []
    for line in dict.fromkeys(listed.read_text(encoding="utf-8").splitlines()) if listed.exists() else ():
        if os.path.lexists(line):
            relative, plain = os.path.relpath(line), re.sub(r"-v\d+(?=\.[^./]*$|$)", "", line)
            older += [os.path.relpath(plain)] if plain != line and os.path.lexists(plain) else []
            target = folder / "saved" / (line.lstrip("/") if relative.startswith("..") else relative)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(line, target)
    return tuple(older)


def _other_framework(script: str) -> str:
    """Return the framework that a script imports and trainwright can replace, or ""."""
    try:
        imported = OTHER_FRAMEWORK.search(Path(script).read_text(encoding="utf-8", errors="replace"))
    except OSError:  # a module, or a folder
        return ""
    return "" if imported is None else imported[1]


def _why_empty(record: RungRecord | None, script: str) -> str:
    """Return why a successful run has no figures, or ""."""
    if record is None:
        why = "the script made neither a Trainer nor an Accelerator of trainwright, so no setting of it can be changed"
        other = _other_framework(script)
        return f"{why}; it imports {other}: import trainwright instead, most names are the same" if other else why
    if not record.points:
        is_loop = record.owner == "Accelerator"
        unseen = ", or the script ended by os._exit, which leaves no time to record a loop" if is_loop else ""
        return f"its {record.owner} took no optimizer step, so there is nothing to compare{unseen}"
    return ""


def end(process: subprocess.Popen[bytes]) -> None:
    """End a run with all its processes: SIGTERM allows them to clean up; SIGKILL follows later or at a second signal."""
    try:
        if process.poll() is None:
            _send(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LEAVE_SECONDS)
    finally:
        _send(process, signal.SIGKILL)  # also to processes that outlive the run, such as loader workers
        process.wait()


def _send(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group has ended
        os.killpg(process.pid, number)
