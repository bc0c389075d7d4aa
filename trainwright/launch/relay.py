"""The launcher as a child of this process: started, its output shown here, and ended with whatever ends the wait for it."""

from __future__ import annotations

import codecs
import contextlib
import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

END_SECONDS = 4.5
"""How long the launcher has to end its workers, to which it gives 3 s between the first signal and SIGKILL."""


def run_beside(command: list[str]) -> int:
    """Run the launcher and return its exit code.

    It ends with this process, however that ends. An exception here, such as Ctrl-C's, ends it too.
    """
    # NOTE: the kernel ends the child when the *thread* that started it has ended: it is this one, which waits for it.
    bootstrap = str(Path(__file__).with_name("bootstrap.py"))
    streams = [each for each in (sys.stdout, sys.stderr) if each is not None]
    for stream in streams:
        stream.flush()
    with subprocess.Popen(
        [sys.executable, "-I", "-S", bootstrap, str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,  # this process may itself be reading its program from there
        stdout=_target(sys.stdout, sys.__stdout__, 1),
        stderr=_target(sys.stderr, sys.__stderr__, 2),
        start_new_session=True,  # a Ctrl-C in the terminal comes here alone, and is passed on
    ) as process:
        try:
            _relay(process)
            return process.wait()
        except BaseException as error:
            _end(process, signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            raise


def _target(stream: TextIO | None, original: TextIO | None, fd: int) -> int | None:
    """Return where the launcher writes: to this process's own stream, or to us where a notebook or a test has replaced it."""
    with contextlib.suppress(OSError, ValueError):
        if stream is not None and stream is original and stream.fileno() == fd:
            return None
    return subprocess.PIPE


def _relay(process: subprocess.Popen[bytes]) -> None:
    """Print what arrives until the launcher has ended and all of it is there."""
    pipes: list[tuple[Any, TextIO | None]] = [(process.stdout, sys.stdout), (process.stderr, sys.stderr)]
    with selectors.DefaultSelector() as selector:
        for pipe, stream in pipes:
            if pipe is not None:
                decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
                selector.register(pipe, selectors.EVENT_READ, (decoder, stream))
        while selector.get_map():
            has_ended = process.poll() is not None
            ready = selector.select(timeout=0.1)
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                decoder, stream = key.data
                if stream is not None:
                    stream.write(decoder.decode(chunk, final=not chunk))
                    stream.flush()
                if not chunk:
                    selector.unregister(key.fileobj)
            if has_ended and not ready:  # a process that a rank has left behind may still hold the pipe
                return


def _end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Have the launcher end its workers; they end with it in any case."""
    try:
        process.send_signal(number)
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()
        process.wait()
