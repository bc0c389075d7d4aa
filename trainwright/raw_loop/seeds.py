"""Seeds by Accelerate's name for them."""

from __future__ import annotations

import torch

from trainwright.arguments import refuses_unknown
from trainwright.data.seeding import seed_rank
from trainwright.devices import cuda
from trainwright.distributed.environment import Environment, prepare_deterministic


@refuses_unknown
def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed python, numpy and torch on every device: `seed_everything(seed)`, with two options.

    The order of the data depends on rank 0's seed alone, also with device_specific.

    Args:
        seed: from 0 to 2**32 - 1, the same on every rank.
        device_specific: add the rank to the seed, for other random numbers (dropout, noise) on each.
        deterministic: let torch use deterministic algorithms only, in this process from now on. Call it before a GPU is used.

    Raises:
        TypeError, ValueError: the seed is not such a number.

    >>> tw.set_seed(42)
    >>> noise = torch.rand(3)
    >>> tw.set_seed(42)
    >>> torch.equal(noise, torch.rand(3))
    True
    """
    seed_rank(seed, Environment.detect().rank if device_specific else 0, verbose=False)
    if deterministic:
        prepare_deterministic()
        torch.use_deterministic_algorithms(True)
        # cuDNN's search may choose another algorithm in each run.
        cuda.try_algorithms(False)
