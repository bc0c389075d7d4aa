"""Machines, as separate network namespaces, whose cables (veth pairs) end in one switch (a bridge)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from deadlines import deadline
from started import Started

NEEDED = "TRAINWRIGHT_TEST_TWO_NODES"
"""If set, it is a failure that these tests cannot run."""
ADDRESSES = ("10.77.0.1", "10.77.0.2", "10.77.0.3")
JOIN = """
set -e
mount -t tmpfs tmpfs /run
mkdir /run/netns
ip link add switch type bridge
ip link set switch up
for node in $(seq 0 $(($1 - 1))); do
    ip netns add node$node
    ip link add veth$node netns node$node type veth peer name port$node
    ip link set port$node master switch up
    ip -n node$node addr add 10.77.0.$((node + 1))/24 dev veth$node
    for name in lo veth$node; do ip -n node$node link set $name up; done
done
echo joined
exec cat
"""


class Network:
    """Nodes. A process on one of them sees only its interfaces."""

    def __init__(self, unshare: list[str], folder: Path, nodes: int) -> None:
        self._has_users = "-U" in unshare
        self.process = subprocess.Popen(
            [*unshare, "sh", "-c", JOIN, "sh", str(nodes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.is_joined = self.process.stdout.readline() == "joined\n"
        self.folder = folder
        self.started: list[Started] = []

    @property
    def enter(self) -> list[str]:
        """The command before another one that runs where the switch is."""
        users = ["--user", "--preserve-credentials"] if self._has_users else []
        return ["nsenter", "--target", str(self.process.pid), *users, "--mount", "--net"]

    def run(self, command: list[str]) -> None:
        subprocess.run([*self.enter, *command], check=True)

    def start(self, node: int, command: list[str], **variables: str | None) -> Started:
        folder = self.folder / f"node{node}"
        folder.mkdir(exist_ok=True)
        # The first nsenter has left the folder.
        enter = [*self.enter, "nsenter", f"--net=/run/netns/node{node}", f"--wd={folder}"]
        self.started.append(Started([*enter, *command], folder, **variables))
        return self.started[-1]

    def cut(self, node: int) -> None:
        """Pull a node's end of the cable."""
        self.run(["ip", "-n", f"node{node}", "link", "set", f"veth{node}", "down"])

    def close(self) -> None:
        for each in self.started:
            each.close()
            print(
                *each.process.args[-3:], each.stdout, each.stderr, sep="\n"
            )  # pytest shows it where the test has failed
        self.process.communicate(timeout=deadline(60))


@contextmanager
def machines(folder: Path, nodes: int = 2) -> Iterator[Network]:
    """Join machines, at most as many as have ADDRESSES, for a test, which is skipped where they cannot be made."""
    reasons = []
    for unshare in (["unshare", "-U", "-r", "-n", "-m"], ["unshare", "-n", "-m"]):
        if not all(shutil.which(program) for program in ("unshare", "nsenter", "ip")):
            reasons.append("unshare, nsenter (util-linux) and ip (iproute2) are not all installed")
            break
        network = Network(unshare, folder, nodes)
        if network.is_joined:
            try:
                yield network
            finally:
                network.close()
            return
        reasons.append(network.process.communicate(timeout=deadline(60))[1].strip())
    reason = f"network namespaces cannot be made here; they need root or user namespaces: {reasons}"
    if NEEDED in os.environ:
        pytest.fail(reason)
    pytest.skip(reason)
