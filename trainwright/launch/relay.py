"""The launcher as a child of this process, which shows its output and ends it when the wait for it ends."""

from __future__ import annotations

import codecs
import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from trainwright.distributed.signals import STOP_SIGNALS

END_SECONDS = 4.5  # for the launcher to end its workers, to which it gives 3 s between the first signal and SIGKILL


def run_launcher(command: list[str]) -> int:
    """Run the launcher as a child, pass signals on, and return its exit code; KeyboardInterrupt once it ends after a Ctrl-C."""
    # NOTE: the kernel kills the child when the *thread* that started it ends; that is this one, which waits for it.
    bootstrap = str(Path(__file__).with_name("bootstrap.py"))
    streams = [each for each in (sys.stdout, sys.stderr) if each is not None]
    for stream in streams:
        stream.flush()
    with subprocess.Popen(
        [sys.executable, "-I", "-S", bootstrap, str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,  # this process may be reading its program from there
        stdout=_target(sys.stdout, sys.__stdout__, 1),
        stderr=_target(sys.stderr, sys.__stderr__, 2),
        start_new_session=True,  # so that a Ctrl-C in the terminal reaches this process only, which passes it on
    ) as process:
        try:
            with _passing_on(process) as passed:
                _relay(process)
                code = process.wait()
        except BaseException as error:
            _end(process, signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            raise
        if signal.SIGINT in passed:
            raise KeyboardInterrupt
        return code


@contextlib.contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Pass the first signal of each kind on to the launcher, and yield the list of those; a second Ctrl-C interrupts."""
    passed: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # only the main thread may install handlers
        yield passed
        return

    def pass_on(number: int, _: FrameType | None) -> None:
        if number not in passed:
            passed.append(number)
            process.send_signal(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    handled = [number for number in STOP_SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    previous = {number: signal.signal(number, pass_on) for number in handled}
    try:
        yield passed
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def _target(stream: TextIO | None, original: TextIO | None, fd: int) -> int | None:
    """Return None to inherit this process's stream, or a pipe if a notebook or a test has replaced the stream."""
    with contextlib.suppress(OSError, ValueError):
        if stream is not None and stream is original and stream.fileno() == fd:
            return None
    return subprocess.PIPE


def _relay(process: subprocess.Popen[bytes]) -> None:
    """Print the launcher's output until it has ended and all is printed."""
    pipes: list[tuple[Any, TextIO | None]] = [(process.stdout, sys.stdout), (process.stderr, sys.stderr)]
    with selectors.DefaultSelector() as selector:
        for pipe, stream in pipes:
            if pipe is not None:
                decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
                selector.register(pipe, selectors.EVENT_READ, (decoder, stream))
        while selector.get_map():
            has_ended = process.poll() is not None  # before the select, so that nothing printed until then is missed
            ready = selector.select(timeout=0.1)
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                decoder, stream = key.data
                if stream is not None:
                    stream.write(decoder.decode(chunk, final=not chunk))
                    stream.flush()
                if not chunk:
                    selector.unregister(key.fileobj)
            if has_ended and not ready:  # a process that outlives its rank may still hold the pipe
                return


def _end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Make the launcher end its workers; they end with it in any case."""
    try:
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    finally:
        process.kill()
        process.wait()
