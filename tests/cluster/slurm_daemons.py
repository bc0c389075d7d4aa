"""SLURM's daemons in a folder of their own, as two nodes of this machine, which end with the tests."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from deadlines import deadline, wait_until
from interpreters import run_command, search_path
from started import ROOT, processes_of

VARIABLES = {"PYTHONPATH": search_path(ROOT, ROOT / "tests"), "OMP_NUM_THREADS": "1"}
NEEDED = "TRAINWRIGHT_TEST_CLUSTER"
"""If set, it is a failure that these tests cannot run."""
UNFINISHED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")


def require(*programs: str) -> None:
    """Skip the test, or fail, unless these programs are installed and the tests run as root."""
    missing = [program for program in programs if shutil.which(program) is None]
    reasons = [f"not installed: {', '.join(missing)} (Debian's slurm-wlm, munge, openmpi-bin)"] if missing else []
    if reasons := reasons + ["the tests do not run as root"] * (os.geteuid() != 0):
        (pytest.fail if NEEDED in os.environ else pytest.skip)("; ".join(reasons))


class Slurm:
    """A cluster of the nodes 127.0.0.2 and 127.0.0.3."""

    def __init__(self, folder: Path) -> None:
        self.variables = VARIABLES | {"SLURM_CONF": str(folder / "slurm.conf"), "TEST_TAG": uuid.uuid4().hex}
        self._folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        folder = self._folder
        with contextlib.ExitStack() as stack:
            probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
            ports = [probe.getsockname()[1] for probe in probes]
        names = ("controller_port", "first_port", "second_port")
        settings = dict(zip(names, ports, strict=True), folder=folder, host=socket.gethostname().partition(".")[0])
        settings["first_job"] = random.randrange(1, 10**6)  # jobs of other clusters on this machine have other ports
        config = Path(__file__).with_name("slurm.conf").read_text().format(**settings)
        (folder / "slurm.conf").write_text(config)
        # SLURM reports that these are no devices, and counts them.
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-63]\n")
        for number in range(64):
            (folder / f"gpu{number}").touch()
        (folder / "state").mkdir()
        (folder / "key").write_bytes(os.urandom(64))
        (folder / "key").chmod(0o600)
        places = {"socket": "munge.socket", "key-file": "key", "pid-file": "munged.pid", "seed-file": "seed"}
        self._start(
            "munged", "--foreground", "--force", *(f"--{name}={folder / file}" for name, file in places.items())
        )
        wait_until((folder / "munge.socket").exists)
        self._start("slurmctld", "-D")
        for node in ("127.0.0.2", "127.0.0.3"):
            self._start("slurmd", "-D", "-N", node)
        wait_until(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout == "2\n", 60)

    def _start(self, *command: str) -> None:
        with (self._folder / f"{command[0]}.log").open("ab") as log:
            daemon = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | self.variables)
        self._daemons.append(daemon)

    def run(self, *command: str, folder: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        return run_command(command, folder=folder, **self.variables | more)

    def submit(self, folder: Path, file: str, **more: str) -> str:
        """Submit a batch file and return the number of its job."""
        (folder / "job.sbatch").write_text(file)
        done = self.run("sbatch", "--parsable", "job.sbatch", folder=folder, **more)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        """Return what SLURM knows of a job."""
        time.sleep(0.2)  # tests poll it
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", "-o", job).stdout))

    def wait(self, job: str, seconds: float = 180) -> dict[str, str]:
        """Wait until a job has ended."""
        wait_until(lambda: self.state(job)["JobState"] not in UNFINISHED, seconds)
        return self.state(job)

    def close(self) -> None:
        try:
            if len(self._daemons) == 4:  # a daemon of a step has no tag, and stays if SLURM ends before it
                wait_until(self._end_jobs, 60)
        finally:
            for daemon in reversed(self._daemons):
                daemon.terminate()
                daemon.wait(deadline(60))
            for process in processes_of(self.variables["TEST_TAG"]):
                process.kill()

    def _end_jobs(self) -> bool:
        """Kill all jobs, and return whether there are none left."""
        self.run("scancel", "--user=root", "--full", "--signal=KILL")
        return not self.run("squeue", "--noheader").stdout


@contextlib.contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    """Run a cluster, or skip the test where that is impossible."""
    require("munged", "slurmctld", "slurmd", "srun")
    cluster = Slurm(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
