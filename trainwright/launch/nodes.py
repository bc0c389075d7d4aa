"""Which of a job's machines this is, and where all of them meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainwright.distributed.clusters import main_port, read_number
from trainwright.distributed.network import DEFAULT_PORT, LOOPBACK


@dataclass(frozen=True)
class Nodes:
    """The machines of a job and the place of this one among them.

    Args:
        count: how many there are.
        rank: the number of this one, from 0; node 0 is the main one.
        address: the main node's name or IP address, as all nodes reach it.
        port: the main node's port that all meet at; 0 is a free one, for a job of one node.

    Raises:
        ValueError: a number is out of its range.
    """

    count: int = 1
    rank: int = 0
    address: str = LOOPBACK
    port: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"num_nodes={self.count!r} is no whole number from 1; pass how many machines the job has.")
        if not 0 <= self.rank < self.count:
            raise ValueError(
                f"node_rank={self.rank} is out of range for num_nodes={self.count}; nodes are numbered from 0 to "
                f"{self.count - 1}. Give each node a number of its own, by --node-rank or the variable NODE_RANK."
            )
        if not 0 <= self.port < 65536 or (self.port == 0 and self.count > 1):
            raise ValueError(f"main_port={self.port} is no port; pass one from 1 to 65535, the same on every node.")


def nodes_of(num_nodes: int, variables: Mapping[str, str]) -> Nodes:
    """Return this node's place in a job of several nodes, from NODE_RANK, MASTER_ADDR and MASTER_PORT.

    Raises:
        ValueError: one of them is missing or wrong.
    """
    if not isinstance(num_nodes, int) or num_nodes < 2:
        return Nodes(num_nodes)  # which refuses what is no number of nodes
    missing = [name for name in ("NODE_RANK", "MASTER_ADDR") if not variables.get(name)]
    if missing:
        raise ValueError(
            f"num_nodes={num_nodes} was asked for, but the environment has no {' and no '.join(missing)}; set NODE_RANK (this "
            "node's number, from 0), MASTER_ADDR and MASTER_PORT (the main node's) and start the script on each node, or start "
            "it there with trainwright launch, torchrun or srun."
        )
    rank = read_number(variables, "NODE_RANK", "trainwright launch")
    return Nodes(num_nodes, rank, variables["MASTER_ADDR"], main_port(variables, DEFAULT_PORT))
