"""Restored: what a load gives one rank back, beside what it has put into the modules and optimizers."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch

from trainwright.checkpoint.reader import Checkpoint
from trainwright.data.generator_states import check_generator_states, is_generator_state
from trainwright.data.seeding import derive_seed, derived_rng_state
from trainwright.devices.accelerator import count
from trainwright.devices.generators import lost_devices, taken_over
from trainwright.errors import CheckpointError
from trainwright.rank_zero import rank_zero_info


class Restored(NamedTuple):
    """What a load gives back: the caller's own state, and this rank's generators where the checkpoint has them.

    `rank_state` is all that this rank stored for itself; None where it stored nothing, or the world size was another.
    `nearest_rank_state` is that, or rank 0's at another world size, for what every rank stores in the same words.
    """

    state: dict[str, Any]
    rng: dict[str, Any] | None
    rank_state: dict[str, Any] | None
    nearest_rank_state: dict[str, Any]


def restored(
    checkpoint: Checkpoint, state: dict[str, Any], seed: int, rank: int, world_size: int, device: torch.device
) -> Restored:
    """Return what is a rank's own; one that the saved run had not gets generators that are derived from the seed.

    Raises:
        CheckpointError: a generator's state is none that it can have.
    """
    own, saved = checkpoint.rank_state(rank), checkpoint.world_size
    rng = own.get("rng") if own is not None else None
    check_generator_states(own, checkpoint.path)
    if rng is not None and not is_generator_state(rng):
        raise CheckpointError(
            f"{checkpoint.path}: the states of rank {rank}'s generators are not there. Use another checkpoint."
        )
    start = (seed, int(checkpoint.header["step"]), rank)
    if saved < world_size:
        rank_zero_info(
            "%s was saved on %d processes, and this run has %d: the generators of the further ones start from seeds that are "
            "derived from the run's.",
            checkpoint.path,
            saved,
            world_size,
        )
        rng = rng if rank < saved else derived_rng_state(derive_seed(*start))
    if rng is not None:
        if lost := lost_devices(rng, device):
            warnings.warn(
                f"{checkpoint.path}: the saved run has drawn on {device.type} device(s) {', '.join(lost)} beside its own. This "
                f"process computes on {device} and sees {count(device.type)} device(s), so it cannot restore the generators of "
                "those; that of its own device is restored.",
                stacklevel=2,
            )
        rng = taken_over(rng, device, derive_seed(*start))
    first = own if saved == world_size else checkpoint.rank_state(0)
    check_generator_states(first, checkpoint.path)
    mine = own if saved == world_size else None
    for number, (key, value) in enumerate((mine or {}).items()):
        if is_generator_state(value) and key != "rng":  # of an earlier moment of the run
            mine = {**(mine or {}), key: taken_over(value, device, derive_seed(*start, number))}
    return Restored(state, rng, mine, first or {})
