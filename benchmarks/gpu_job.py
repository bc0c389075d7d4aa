"""A process of benchmarks/gpu.py as its parent sees it: started, controlled, read from, and always ended."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_cases import Case

HERE = Path(__file__).resolve().parent


class JobFailed(Exception):
    """A process ended early, hung, or reported that it cannot run; the text is the reason, in one line."""


@dataclass(frozen=True)
class Place:
    """The settings that all processes of a run have in common."""

    device: str
    is_small: bool
    with_transformers: bool
    compiler: str
    logs: Path
    environment: dict[str, str]

    def command(self, **settings: Any) -> list[str]:
        return [sys.executable, str(HERE / "gpu_process.py"), json.dumps(settings)]


class Job:
    """The process of one implementation of one case.

    Args:
        place: where it computes.
        case: the case.
        implementation: its name.
        is_crowded: whether it frees memory between its turns.
    """

    def __init__(self, place: Place, case: Case, implementation: str, is_crowded: bool = False) -> None:
        self.case, self.implementation = case, implementation
        self.folder = tempfile.mkdtemp(prefix="trainwright-gpu-")
        self.log = place.logs / f"{case.name}.{implementation}.log"
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        reading, writing = os.pipe()
        command = place.command(
            case=asdict(case),
            implementation=implementation,
            device=place.device,
            small=place.is_small,
            with_transformers=place.with_transformers,
            compiler=place.compiler,
            crowded=is_crowded,
            folder=self.folder,
            descriptor=writing,
        )
        self.began = time.monotonic()
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(writing,),
                env=place.environment,
                start_new_session=True,  # loader workers are ended with it
            )
        os.close(writing)
        threading.Thread(target=self._listen, args=(reading,), daemon=True).start()

    def _listen(self, descriptor: int) -> None:
        with open(descriptor, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                with contextlib.suppress(json.JSONDecodeError):
                    self._messages.put(json.loads(line))
        self._messages.put(None)

    def tell(self, do: str, **facts: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended; waiting for its answer says why
            self._process.stdin.write(json.dumps({"do": do, **facts}).encode() + b"\n")
            self._process.stdin.flush()

    def wait_for(self, event: str, seconds: float) -> dict[str, Any]:
        """Return the process's next message of that kind.

        Raises:
            JobFailed: it reported a failure, ended, or was silent for too long.
        """
        deadline = time.monotonic() + seconds
        while True:
            has_ended = self._process.poll() is not None  # asked first: what it said before is still heard
            try:
                told = self._messages.get(timeout=min(max(deadline - time.monotonic(), 0.01), 1.0))
            except queue.Empty:
                if has_ended:  # though loader workers of its may hold the pipe open
                    raise JobFailed(self._how_it_ended()) from None
                if time.monotonic() >= deadline:
                    raise JobFailed(f"no answer ({event}) in {seconds:.0f} s") from None
                continue
            if told is None:
                raise JobFailed(self._how_it_ended())
            if told["event"] == "failed":
                raise JobFailed(told["reason"])
            if told["event"] == event:
                return told

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        code = self._process.poll()
        with contextlib.suppress(ValueError, TypeError):
            code = signal.Signals(-code).name if code is not None and code < 0 else code
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"ended by itself ({code}): {lines[-1][:300] if lines else 'it printed nothing'}"

    def leave(self, at_once: bool) -> None:
        """Let the process end without waiting for it; kill it at once if it hangs."""
        if at_once:
            self._kill()
        else:
            self.tell("end")

    def end(self) -> None:
        """End the process and those that it started, and delete its folder."""
        self.tell("end")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.5)
        self._kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def describe(device: str, environment: dict[str, str]) -> dict[str, Any]:
    """Return what a separate process found on this machine.

    Raises:
        JobFailed: torch cannot be imported there, or does not know the device.
    """
    reading, writing = os.pipe()
    settings = {"describe": device, "descriptor": writing}
    command = [sys.executable, str(HERE / "gpu_process.py"), json.dumps(settings)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=240, pass_fds=(writing,), env=environment
        )
    finally:
        os.close(writing)
        with open(reading, encoding="utf-8") as stream:
            told = stream.read()
    if done.returncode != 0 or not told:
        raise JobFailed((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    found: dict[str, Any] = json.loads(told)
    if driver := _driver(found["device"]):
        found["driver"] = driver
    return found


def _driver(device: str) -> str:
    """Return the version of NVIDIA's driver, or an empty text without one."""
    if device != "cuda" or shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout.strip().splitlines() or [""])[0] if done.returncode == 0 else ""
