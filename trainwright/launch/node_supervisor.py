"""Node supervisor: runs the ranks of one of several machines, as the only worker of torch elastic there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType

from trainwright.distributed.job_store import Store, join_store, post, stores
from trainwright.distributed.signals import ENDING_SIGNALS
from trainwright.launch.nodes import Job, JobOutcome, Place
from trainwright.launch.supervisor import Supervisor, catch_signals

START_VARIABLE = "TRAINWRIGHT_START"
"""The variable in which the launcher describes a start to its supervisor, as JSON."""
JOIN_SECONDS = 20.0  # for the ranks to save and exit because a node has come; elastic kills them after 30
JOINING = -1
"""The cause of a stop for a node that has come. Other causes are the signals that launchers received, and 0."""
JOINED = "a node has joined"
NODE_LOST = "its node was lost: the launcher there has ended or cannot be reached"


class NodeFolder:
    """The files of a node's supervisors for its launcher: the outcome of each start, and the pid of the latest one."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def write_outcome(self, start: int, outcome: JobOutcome) -> None:
        (self.path / "part").write_text(json.dumps(outcome))
        os.rename(self.path / "part", self.path / f"outcome{start}")

    def read_outcome(self, start: int) -> JobOutcome | None:
        path = self.path / f"outcome{start}"
        return JobOutcome(*json.loads(path.read_text())) if path.exists() else None

    def send(self, number: int) -> bool:
        """Send a signal to the supervisor, and return whether there is one."""
        try:
            os.kill(int((self.path / "pid").read_text()), number)
        except (OSError, ValueError):
            return False
        return True


class NodeSupervisor(Supervisor):
    """Runs the ranks of one start on one machine of several.

    Elastic, in the launcher, restarts the ranks by SIGTERM. The launcher passes its signals on: its SIGTERM as SIGUSR2.
    """

    def __init__(self, job: Job, folder: NodeFolder, least: int, launcher: int) -> None:
        super().__init__(job)
        self._folder, self._launcher, self._least = folder, launcher, least
        self._cause = 0
        self._has_finished = self._is_agreed = False
        self._first_rank, self._why = 0, ""
        self._store: Store

    def handle_signals(self) -> None:
        signal.signal(signal.SIGTERM, self._on_elastic)
        catch_signals(self._on_launcher, signal.SIGUSR2, *ENDING_SIGNALS[1:])
        (self._folder.path / "pid").write_text(str(os.getpid()))

    def _on_elastic(self, number: int, _: FrameType | None) -> None:
        self._cause = self._cause or JOINING
        self._why = self._why or "its node restarts the ranks for a node that has joined"
        self.on_signal(number)
        self._deadline = min(self._deadline, time.monotonic() + JOIN_SECONDS)

    def _on_launcher(self, number: int, _: FrameType | None) -> None:
        self._cause = signal.SIGTERM if number == signal.SIGUSR2 else number
        self._why = f"{signal.Signals(self._cause).name} stopped its launcher"
        self.on_signal(self._cause)

    def run_start(self, place: Place) -> int:
        """Run the ranks, write their end into a file for the launcher, and return elastic's exit code."""

        def open_store() -> Store:
            base = join_store(place.address, place.port, timedelta(seconds=300))
            self._store = stores().PrefixStore(f"nodes/{place.start}", base)
            return base

        self._first_rank = place.first_rank(place.node)
        try:
            outcome = self.run(place, open_store)
        except RuntimeError:  # of a request to the store: the main node has gone, as the launcher sees too
            return 1
        finally:
            if os.getppid() != self._launcher:  # so the files have no reader
                shutil.rmtree(self._folder.path, ignore_errors=True)
        if self._cause == JOINING and not self._is_agreed:
            outcome = outcome if outcome.reason else JobOutcome(outcome.code, JOINED)
        elif self._cause and not self._is_agreed:
            outcome = outcome._replace(may_restart=False)
        with suppress(FileNotFoundError):  # the launcher has ended
            self._folder.write_outcome(place.start, outcome)
            (self._folder.path / "pid").unlink()  # not earlier, or the launcher would end at a signal
        return 0 if self._is_agreed and outcome.may_restart and not outcome.reason else 1

    def look_around(self) -> JobOutcome | None:
        if os.getppid() == self._launcher:
            return None
        self._why = NODE_LOST
        return self.abandon(JobOutcome(1))

    def abandon(self, outcome: JobOutcome) -> JobOutcome:
        self.failures.post(self._first_rank, self._why, code=1)  # so that the other nodes end their ranks too
        return super().abandon(outcome)

    def finish(self, place: Place, code: int) -> JobOutcome | None:
        """Wait until the ranks of all nodes have ended well, so that a failure elsewhere restarts all of them."""
        if not self._has_finished:
            self._has_finished = True
            post(self._store, f"finished/{place.node}", str(self._cause))
        names = [f"finished/{node}" for node in range(len(place.hosts))]
        if not self._store.check(names):
            return self.look_around()
        self._is_agreed = True
        causes = [int(self._store.get(name)) for name in names]
        stopped = [node for node, cause in enumerate(causes) if cause > 0]
        if code == 0 or (JOINING not in causes and not stopped):
            return JobOutcome(code)
        if not stopped:
            deadline = time.monotonic() + JOIN_SECONDS
            while not self._cause and time.monotonic() < deadline:
                time.sleep(0.05)  # elastic ends this process, and does not count the restart
            return JobOutcome(code, JOINED)
        if not self._least or 0 in stopped or len(causes) - len(stopped) < self._least:
            return JobOutcome(code)
        signals = " and ".join(sorted({signal.Signals(causes[node]).name for node in stopped}))
        hosts = ", ".join(f"node {node} ({place.hosts[node]})" for node in stopped)
        text = f"{signals} stopped {hosts}"
        if place.node in stopped:
            return JobOutcome(code, rest=f"trainwright: {text}, which leaves the job.\n", may_restart=False)
        return JobOutcome(code, text)


def main() -> int:
    """Run the ranks of the start that the launcher has described, and return elastic's exit code."""
    start = json.loads(os.environ.pop(START_VARIABLE))
    supervisor = NodeSupervisor(Job(**start["job"]), NodeFolder(start["folder"]), start["least"], start["launcher"])
    supervisor.handle_signals()
    return supervisor.run_start(Place(**start["place"]))
