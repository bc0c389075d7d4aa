"""The private names of torch that counts and time limits of collectives need, as read in torch 2.11 to 2.15."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from trainwright.distributed.collectives import world_size


def count_issued(*, in_all: bool = False) -> int | None:
    """Return how many collectives this process has called in any group, or None if a group does not count them.

    `in_all` counts only groups of all ranks. That number is the same on all ranks wherever they meet.
    """
    if world_size() == 1:
        return 0
    try:
        groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
        groups = [group for group in groups if not in_all or group.size() == world_size()]
        backends = [group._get_backend(device) for group in groups for device in group._device_types]
        return sum(int(backend._get_sequence_number_for_group()) for backend in backends)
    except (AttributeError, RuntimeError):
        return None


def set_timeout(seconds: float) -> None:
    """Set how long later collectives wait for the other ranks."""
    if world_size() > 1:
        # torch 2.15 has a public call and warns at each use of the private one, the only one before it.
        public = getattr(dist, "set_timeout", None)
        with warnings.catch_warnings():
            # Other backends keep the timeout that they were opened with.
            warnings.filterwarnings("ignore", "Set timeout is now only supported")
            (public or dist.distributed_c10d._set_pg_timeout)(timedelta(seconds=seconds))
