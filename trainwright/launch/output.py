"""The workers' output: rank 0 writes to the terminal, if there is one. Lines of the other ranks get the rank as a prefix."""

from __future__ import annotations

import contextlib
import os
import selectors
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

MAX_LINE_BYTES = 1 << 20  # longer lines are split, so that a rank that prints no newline cannot fill the memory


@dataclass
class _Source:
    prefix: bytes
    target: TextIO
    log: str | None = None
    pending: bytes = b""


class PrefixedOutput:
    """Prints the lines that arrive in its pipes, with the prefixes of the pipes, from one thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._write_fds: list[int] = []
        self._deadline = float("inf")
        self._thread = threading.Thread(target=self._run, name="trainwright-output", daemon=True)

    def open_pipe(self, prefix: str, target: TextIO, log: str | None = None) -> str:
        """Return a path for a worker's stream. The file `log` gets its lines too, without the prefix."""
        read_fd, write_fd = os.pipe()
        self._write_fds.append(write_fd)
        self._selector.register(read_fd, selectors.EVENT_READ, _Source(prefix.encode(), target, log))
        # Elastic takes a path and opens it itself.
        return f"/dev/fd/{write_fd}"

    def start(self) -> None:
        """Start printing. Close the launcher's write ends, so that a pipe ends with its worker."""
        for fd in self._write_fds:
            os.close(fd)
        self._write_fds.clear()
        self._thread.start()

    def finish(self, timeout_seconds: float = 1.0) -> None:
        """Print the rest and stop, within a limit: a process that outlives its rank may hold a pipe open."""
        self._deadline = time.monotonic() + timeout_seconds
        if self._thread.is_alive():
            self._thread.join(timeout_seconds + 1.0)

    def _run(self) -> None:
        while self._selector.get_map() and time.monotonic() < self._deadline:
            for key, _ in self._selector.select(timeout=0.1):
                chunk = os.read(key.fd, 1 << 16)
                self._print(key.data, chunk)
                if not chunk:
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
        for key in list(self._selector.get_map().values()):
            self._print(key.data, b"")

    def _print(self, source: _Source, chunk: bytes) -> None:
        """Print the lines that a chunk completes. An empty one is the end of the stream."""
        *lines, source.pending = (source.pending + chunk).split(b"\n")
        if source.pending and (not chunk or len(source.pending) > MAX_LINE_BYTES):
            lines.append(source.pending)
            source.pending = b""
        if not lines:
            return
        # A progress bar redraws its line after a carriage return: only the last state is printed.
        shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        with contextlib.suppress(OSError, ValueError):  # keep reading the pipes even if our output is closed
            source.target.buffer.write(b"".join(source.prefix + line + b"\n" for line in shown))
            source.target.buffer.flush()
        if source.log is not None:
            with contextlib.suppress(OSError), open(source.log, "ab") as file:
                file.writelines(line + b"\n" for line in shown)


class PipeLogs(LogsSpecs):
    """Rank 0 inherits the terminal. The other ranks write into pipes. With a folder, files store the output too."""

    def __init__(self, folder: str | None, start_number: Callable[[], int]) -> None:
        super().__init__()
        self.output = PrefixedOutput()
        self._folder, self._start_number = folder, start_number

    @property
    def root_log_dir(self) -> str:
        return os.devnull  # elastic's log folder is not used

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return where the ranks' streams go. An empty path is the launcher's stream."""
        self.output = PrefixedOutput()
        stdouts: dict[int, str] = {}
        stderrs: dict[int, str] = {}
        for local_rank, variables in envs.items():
            variables["TORCHELASTIC_ERROR_FILE"] = ""
            variables["TORCHELASTIC_RESTART_COUNT"] = str(self._start_number())
            rank = int(variables["RANK"])
            prefix = f"[rank{rank}] " if rank else ""
            log = None if self._folder is None else str(Path(self._folder, f"rank{rank}.log"))
            for streams, target in ((stdouts, sys.stdout), (stderrs, sys.stderr)):
                # In a terminal rank 0 writes directly, for its progress bars. Elsewhere lines of ranks must not mix.
                is_direct = rank == 0 and log is None and target.isatty()
                streams[local_rank] = "" if is_direct else self.output.open_pipe(prefix, target, log)
            if rank == 0 and log is None and sys.stdout.isatty():
                continue
            if "PYTHONUNBUFFERED" not in os.environ:  # a pipe would buffer lines, and lose them in a crash
                variables["PYTHONUNBUFFERED"] = "1"
        return LogsDest(stdouts, stderrs, {}, {}, dict.fromkeys(envs, os.devnull))
