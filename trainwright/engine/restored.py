"""Restored: what a load returns to one rank; modules and optimizers are loaded in place."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from trainwright.checkpoint.reader import StoredCheckpoint
from trainwright.data.seeding import check_generator_states, derive_seed, derived_rng_state
from trainwright.devices.accelerator import count
from trainwright.devices.generators import is_generator_state, lost_devices, taken_over
from trainwright.errors import CheckpointError
from trainwright.rank_zero import rank_zero_info, warn


class Restored(NamedTuple):
    """What a load returns."""

    state: dict[str, Any]
    """The caller's own state."""
    rng: dict[str, Any] | None
    """The states of this rank's generators, if the checkpoint has them."""
    rank_state: dict[str, Any] | None
    """What this rank stored for itself; None if nothing, or at a different world size."""
    nearest_rank_state: dict[str, Any]
    """The same, or rank 0's at a different world size, for what every rank stores under the same keys."""


def restored(
    checkpoint: StoredCheckpoint, state: dict[str, Any], seed: int, rank: int, world_size: int, device: torch.device
) -> Restored:
    """Return a rank's part of a checkpoint; a rank that the saved run did not have gets generators derived from the seed.

    Raises:
        CheckpointError: the state of a generator is missing or malformed.
    """
    own, saved = checkpoint.rank_state(rank), checkpoint.world_size
    rng = own.get("rng") if own is not None else None
    check_generator_states(own, checkpoint.path)
    if rng is not None and not is_generator_state(rng):
        raise CheckpointError(
            f"{checkpoint.path}: the states of rank {rank}'s generators are missing. Use another checkpoint."
        )
    start = (seed, int(checkpoint.header["step"]), rank)
    if saved < world_size:
        rank_zero_info(
            "%s was saved on %d processes, and this run has %d: the generators of the others start from seeds derived from "
            "the run's.",
            checkpoint.path,
            saved,
            world_size,
        )
        rng = rng if rank < saved else derived_rng_state(derive_seed(*start))
    if rng is not None:
        if lost := lost_devices(rng, device):
            warn(
                f"{checkpoint.path}: the saved run also drew random numbers on {device.type} device(s) {', '.join(lost)}. This "
                f"process computes on {device} and sees {count(device.type)} device(s), so it restores only the "
                "generator of that device.",
                stacklevel=2,
            )
        rng = taken_over(rng, device, derive_seed(*start))
    if saved != world_size:
        first = checkpoint.rank_state(0)
        check_generator_states(first, checkpoint.path)
        return Restored(state, rng, None, first or {})
    nearest = own or {}
    mine = dict(nearest)
    for number, (key, value) in enumerate(nearest.items()):
        if is_generator_state(value) and key != "rng":  # of an earlier moment of the run
            mine[key] = taken_over(value, device, derive_seed(*start, number))
    return Restored(state, rng, None if own is None else mine, nearest)
