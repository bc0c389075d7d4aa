"""The processes that run a kind's cases, kept from case to case: one that forks, and a gloo job of each larger size."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from fuzz.kind import Config, Kind
from fuzz.worker import Answer

START = 120.0
"""Seconds in which the processes of a job have to be there."""
MEMORY = "/dev/shm"
"""Where a case writes, where there is such a place: a checkpoint waits for its disk, which is most of a small run's time."""


class JobEnded(Exception):
    """A process of the job did not answer."""


class Job:
    """Processes of one kind and one size.

    Args:
        kind: the module.
        size: how many processes; trainwright's launcher starts more than one.
    """

    def __init__(self, kind: Kind, size: int) -> None:
        self.kind, self.size = kind, size
        self._folder = Path(tempfile.mkdtemp(prefix="fuzz-job-"))
        self._output = self._folder / "output"
        self._lines: list[IO[str]] = []
        self._sockets: list[socket.socket] = []
        self._start()

    def _start(self) -> None:
        path = str(self._folder / "socket")
        command = [sys.executable, "-W", "ignore", "-m", "fuzz.worker", kind_module(self.kind), path]
        if self.size > 1:
            launcher = ["-m", "trainwright.launch.processes", f'{{"num_processes": {self.size}}}']
            command = [sys.executable, "-W", "ignore", *launcher, *command]
        with socket.socket(socket.AF_UNIX) as listener, open(self._output, "w") as output:
            listener.bind(path)
            listener.listen(self.size)
            listener.settimeout(START)
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                while len(self._sockets) < self.size:
                    self._sockets.append(listener.accept()[0])
            except TimeoutError:
                raise JobEnded(f"the job did not start:\n{self.said()}") from None
        for each in self._sockets:
            each.settimeout(self.kind.LIMIT + 20)
        self._lines = [each.makefile("rw") for each in self._sockets]
        for lines in self._lines:
            lines.readline()

    def ask(self, config: Config, folder: Path) -> list[Answer]:
        """Run a case on all processes and return their answers. Raises JobEnded if one does not answer."""
        self._output.write_text("")
        text = json.dumps({"config": config, "folder": str(folder)})
        answers: list[Answer] = []
        try:
            for lines in self._lines:
                print(text, file=lines, flush=True)
            for lines in self._lines:
                line = lines.readline()
                if not line:
                    raise JobEnded(f"exit: a process of {self.size} has ended\n{self.said()}")
                answers.append(json.loads(line))
        except TimeoutError:
            raise JobEnded(f"hang: {self.kind.LIMIT:.0f} s on {self.size} processes\n{self.said()}") from None
        except OSError as error:
            raise JobEnded(f"exit: {error}\n{self.said()}") from None
        return answers

    def said(self) -> str:
        """Return the end of the output of the processes."""
        return self._output.read_text(errors="replace")[-2500:] if self._output.exists() else ""

    def close(self) -> None:
        """End the processes."""
        for each in [*self._lines, *self._sockets]:
            with contextlib.suppress(OSError):
                each.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self.size == 1:  # ends at the end of its lines
                self._process.wait(timeout=5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass
class Outcome:
    """The outcome of a case."""

    differences: list[str] = field(default_factory=list)
    refused: str | None = None

    @property
    def aspects(self) -> set[str]:
        """What differs, without the amounts."""
        return {each.split(":")[0] for each in self.differences}


class Jobs:
    """The jobs of all sizes that a kind's cases need, started on first use and kept."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._jobs: dict[int, Job] = {}

    def run(self, config: Config) -> Outcome:
        """Run a case in a job of each of its sizes, and return the outcome."""
        sizes = self.kind.PROCESSES
        if "processes" in config:
            sizes = tuple(size for size in sizes if size in (1, config["processes"]))
        folder = Path(tempfile.mkdtemp(prefix="fuzz-case-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None))
        outcome = Outcome()
        try:
            for size in sizes:
                self._ask(size, config, folder, outcome)
                if outcome.differences or outcome.refused:
                    break
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return outcome

    def _ask(self, size: int, config: Config, folder: Path, outcome: Outcome) -> None:
        try:
            if size not in self._jobs:
                self._jobs[size] = Job(self.kind, size)
            answers = self._jobs[size].ask(config, folder)
        except JobEnded as ended:
            outcome.differences.append(str(ended))
            self._drop(size)
            return
        refusals = [each["refused"] for each in answers]
        if all(refusals):
            outcome.refused = refusals[0]
        elif any(refusals):
            outcome.differences.append(f"refused: by some ranks alone: {refusals}")
        for rank, each in enumerate(answers):
            found = [text for text in each["differences"] if text not in outcome.differences]
            outcome.differences += [text if size == 1 else f"{text} (rank {rank} of {size})" for text in found]
        if size > 1 and (any(each["spent"] for each in answers) or (any(refusals) and not all(refusals))):
            self._drop(size)

    def _drop(self, size: int) -> None:
        job = self._jobs.pop(size, None)
        if job is not None:
            job.close()

    def close(self) -> None:
        """End all jobs."""
        for size in list(self._jobs):
            self._drop(size)


def kind_module(kind: Any) -> str:
    """Return the name under which a worker imports the kind."""
    name = str(kind.__name__)
    return name.removeprefix("fuzz.") if name.count(".") == 1 and name.startswith("fuzz.") else name


def timed(jobs: Jobs, config: Config) -> tuple[Outcome, float]:
    """Run a case, and print how many seconds it took."""
    began = time.monotonic()
    return jobs.run(config), time.monotonic() - began
