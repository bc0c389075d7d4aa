"""Stacks: the Python stacks of this process's threads as faulthandler writes them, and their meaning for a hang."""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from trainwright.paths import absolute

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})
_THREAD = re.compile(r"hread (0x[0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_PATIENT = (f"{_PACKAGE}checkpoint", f"{_TORCH}_inductor", f"{_TORCH}_dynamo", f"{_TORCH}serialization.py")
"""Code that may take long while other ranks wait: saves, loads and compilation."""
PY_SPY_SECONDS = 20.0


class Frame(NamedTuple):
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        near = os.path.relpath(self.file) if self.file.startswith(absolute(".") + os.sep) else self.file
        return f"{near}:{self.line} in {self.function}"


def read_stacks() -> str:
    """Return the stacks of all threads of this process.

    Only faulthandler reads the frames of running threads safely: `sys._current_frames` crashes CPython 3.11.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        faulthandler.dump_traceback(file=file)
        file.seek(0)
        return file.read()


def stack_of(thread: int, stacks: str) -> list[Frame]:
    """Return the frames of a thread in the text of `read_stacks`, the innermost first."""
    frames: list[Frame] = []
    is_found = False
    for line in stacks.splitlines():
        if match := _THREAD.search(line):
            is_found = int(match[1], 16) == thread
        elif is_found and (match := _FRAME.fullmatch(line)):
            frames.append(Frame(match[1], int(match[2]), match[3]))
    return frames


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame outside of torch, this package and other libraries. Without one, the innermost frame."""
    inner = (_PACKAGE, *_LIBRARIES, "<frozen")
    return next((frame for frame in frames if not frame.file.startswith(inner)), frames[0] if frames else None)


def is_patient(frames: Sequence[Frame]) -> bool:
    """Return whether a main thread may stand still for long: in a save, a compilation, a debugger or `rank_zero_first`."""
    return any(
        frame.file.startswith(_PATIENT)
        or os.path.basename(frame.file) in ("bdb.py", "pdb.py")
        or (frame.function == "first" and frame.file == os.path.join(_PACKAGE, "distributed", "ranks.py"))
        for frame in frames
    )


def awaited(frames: Sequence[Frame], collective: str, is_pending: bool) -> str:
    """Return the call in which a main thread waits for other ranks, in words, or "" if it waits in none.

    Args:
        frames: the stack of the main thread.
        collective: the latest collective of the process, or "" without torch's flight recorder.
        is_pending: whether this collective has not ended.
    """
    if any(frame.file == os.path.join(_PACKAGE, "distributed", "store_channel.py") for frame in frames):
        return "a call that every rank makes"
    innermost = frames[0].file if frames else ""
    if not collective:
        return "a collective" if innermost.startswith((f"{_TORCH}distributed", f"{_TORCH}autograd")) else ""
    return collective if is_pending and innermost.startswith(_TORCH) and not is_loading(frames) else ""


def is_loading(frames: Sequence[Frame]) -> bool:
    """Return whether a main thread waits for a batch of a DataLoader."""
    return any(frame.file == f"{_TORCH}utils{os.sep}data{os.sep}dataloader.py" for frame in frames)


def silence_of(pid: int) -> str:
    """Return why a process of this machine may not answer, in words."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "its process has ended"
    meanings = {
        "T": "it is stopped (SIGSTOP)",
        "t": "a debugger has stopped it",
        "D": "it waits for a disk or a device",
    }
    return meanings.get(state, "none of its threads runs Python, as if one held the GIL")


def foreign_stacks(pid: int) -> str:
    """Return the stacks of another process of this machine by py-spy, or how to get them."""
    if shutil.which("py-spy") is None:
        return f"No stack: the process does not answer. Install py-spy (pip install py-spy) and run: py-spy dump --pid {pid}\n"
    command = ["py-spy", "dump", "--nonblocking", "--pid", str(pid)]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_SECONDS, check=False)
        return done.stdout or done.stderr
    return "No stack: py-spy did not answer.\n"
