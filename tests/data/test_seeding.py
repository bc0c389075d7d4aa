"""Seeds and the states of the generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import trainwright as tw
from trainwright.checkpoint.codec import decode, encode
from trainwright.data.seeding import derive_seed, rng_state, set_rng_state


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_seed_everything_and_states_through_a_checkpoint() -> None:
    assert tw.seed_everything(4) == 4
    state = rng_state()
    first = draw()
    set_rng_state(decode(*encode(state)))
    assert draw() == first
    tw.seed_everything(4)
    assert draw() == first


@pytest.mark.parametrize(
    ("seed", "error"), [(-1, ValueError), (2**32, ValueError), ("4", TypeError), (True, TypeError)]
)
def test_seed_everything_refuses(seed: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"from 0 to 2\*\*32 - 1"):
        tw.seed_everything(seed)


def test_derived_seeds_differ() -> None:
    seeds = {derive_seed(a, b) for a in range(50) for b in range(50)}
    assert len(seeds) == 2500
    assert derive_seed(1, 2) == derive_seed(1, 2)
    assert all(0 <= seed < 2**63 for seed in seeds)
