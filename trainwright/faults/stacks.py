"""Stacks: the Python stacks of this process's threads as faulthandler writes them, and their meaning for a hang."""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from contextlib import suppress

import torch

Frame = tuple[str, str, str]
"""File, line and function."""

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_INNER = (_PACKAGE, "<frozen", *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})
_DEBUGGER = re.compile(r"/(bdb|pdb)\.py$|pydevd|debugpy")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_RANKS, _CHANNEL = f"{_PACKAGE}distributed{os.sep}ranks.py", f"{_PACKAGE}distributed{os.sep}store_channel.py"
_SAVES = ("checkpoint", "trainer/saving.py", "engine/engine_checkpoints.py", "raw_loop/saved_states.py")
_OF_TORCH = ("_dynamo/convert_frame.py", "_inductor/compile_fx.py", "_inductor/async_compile.py", "serialization.py")
_SLOW = (*(_TORCH + name for name in _OF_TORCH), *(_PACKAGE + name for name in _SAVES))
_STATES = {"T": "it is stopped (SIGSTOP)", "t": "a debugger has stopped it", "D": "it waits for a disk or a device"}


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
    for part in stacks.split("\n\n"):
        if f"hread 0x{thread:016x} " in part.partition("\n")[0]:
            return [(found[1], found[2], found[3]) for found in map(_FRAME.fullmatch, part.splitlines()) if found]
    return []


def user_place(stack: list[Frame], worker: str) -> str:
    """Return the innermost line outside of libraries and this package in words, and the loader's worker it waits for."""
    users = [frame for frame in stack if not frame[0].startswith(_INNER)]
    file, line, function = (users or stack or [("an unknown file", "0", "an unknown function")])[0]
    is_loading = any(frame[0] == f"{_TORCH}utils{os.sep}data{os.sep}dataloader.py" for frame in stack)
    near = os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
    waiting = f", waiting for {worker or 'a batch of a DataLoader'}" if is_loading else ""
    return f"at {near}:{line} in {function}{waiting}"


def is_patient(stack: list[Frame]) -> bool:
    """Return whether a main thread may rightly wait for long: in a save, a compilation, a debugger or `rank_zero_first`."""
    return any(
        file.startswith(_SLOW) or _DEBUGGER.search(file) or (file == _RANKS and function == "first")
        for file, _, function in stack
    )


def awaited(stack: list[Frame], collective: str, is_pending: bool) -> str:
    """Return the call in which a main thread waits for other ranks, in words, or "" if it waits in none.

    `collective` is the latest collective of the process, "" if unknown, and `is_pending` says that it has not ended.
    """
    if any(file == _CHANNEL for file, _, _ in stack):
        return "a call that every rank makes"
    innermost = stack[0][0] if stack else ""
    if not collective and innermost.startswith((f"{_TORCH}distributed", f"{_TORCH}autograd")):
        return "a collective"
    return collective if is_pending and innermost.startswith(_TORCH) else ""


def silence_of(pid: int) -> str:
    """Return why a process of this machine may not answer, in words."""
    with suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        state = file.read().rpartition(")")[2].split()[0]
        return _STATES.get(state, "no thread of it runs Python, as if one held the GIL")
    return "it does not answer"


def foreign_stacks(pid: int) -> str:
    """Return the stacks of another process of this machine by py-spy, if it is installed."""
    if shutil.which("py-spy") is None:
        return f"No stack: the process does not answer. Install py-spy and run: py-spy dump --pid {pid}\n"
    with suppress(OSError, subprocess.SubprocessError):
        command = ["py-spy", "dump", "--nonblocking", "--pid", str(pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        return done.stdout or done.stderr
    return "No stack: py-spy did not answer.\n"
