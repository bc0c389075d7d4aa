"""A command that a test starts, all of whose processes, however they were started, are found by a tag in their environment."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import psutil
from deadlines import deadline, wait_until
from interpreters import search_path

ROOT = Path(__file__).resolve().parents[1]
GONE_SECONDS = 20.0
"""Until all processes of a job have ended: four times the goal of 5 s. A `deadline` scales it."""


class Started:
    """A started command with its processes. A `None` in variables leaves that variable out."""

    def __init__(self, command: Sequence[str], folder: Path, **variables: str | None) -> None:
        self.tag = uuid.uuid4().hex
        settings = {
            "PYTHONPATH": search_path(ROOT, ROOT / "tests"),
            "TEST_TAG": self.tag,
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        kept = {name: value for name, value in os.environ.items() if name not in settings}
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=kept | {name: value for name, value in settings.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.stdout, self.stderr = "", ""

    def wait(self, seconds: float = 120.0) -> int:
        stdout, stderr = self.process.communicate(timeout=deadline(seconds))
        self.stdout, self.stderr = self.stdout + stdout, self.stderr + stderr
        return self.process.returncode

    def wait_for(self, text: str, times: int = 1) -> None:
        for line in self.process.stdout:
            self.stdout += line
            times -= text in line
            if times == 0:
                return
        raise AssertionError(f"it ended early with {self.wait()}: {self.stdout} {self.stderr}")

    def wait_for_message(self, text: str) -> None:
        """Wait until it has written this to its standard error."""
        for line in self.process.stderr:
            self.stderr += line
            if text in line:
                return
        raise AssertionError(f"it ended early with {self.wait()}: {self.stdout} {self.stderr}")

    def processes(self) -> list[psutil.Process]:
        return processes_of(self.tag)

    def check_nothing_left(self) -> None:
        wait_until(lambda: not self.processes(), GONE_SECONDS)

    def close(self) -> None:
        for process in self.processes():
            process.kill()
        if self.process.stdout is not None and not self.process.stdout.closed:
            self.wait(60)


def processes_of(tag: str) -> list[psutil.Process]:
    """Return the living processes that have this TEST_TAG in their environment."""

    def is_ours(process: psutil.Process) -> bool:
        try:
            return process.environ().get("TEST_TAG") == tag and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    return [process for process in psutil.process_iter() if is_ours(process)]


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]
