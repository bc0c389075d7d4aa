"""Seeds and RNG states."""

from __future__ import annotations

import itertools
import logging
import random
from typing import Any

import numpy as np
import pytest
import torch

import trainwright as tw
from trainwright.checkpoint.codec import decode, encode
from trainwright.data.seeding import derive_seed, isolate_rng, rng_state, seed_everything, set_rng_state


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_rng_states_are_restored_through_a_checkpoint() -> None:
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


def test_no_seed_is_one_by_chance_and_the_same_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = seed_everything()
    first = draw()
    assert seed_everything() != seed
    assert seed_everything(seed) == seed
    assert draw() == first
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    chosen = []
    for rank in "01":
        for name, value in {**job, "RANK": rank, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("trainwright.data.seeding._chosen", itertools.count())
        chosen.append((seed_everything(), seed_everything()))
    assert chosen[0] == chosen[1]
    assert chosen[0][0] != chosen[0][1]


def test_the_seed_is_told_to_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="trainwright"):
        seed_everything(5)
        seed_everything(6, workers=True, verbose=False)
    assert [record.getMessage() for record in caplog.records] == ["seed_everything: the seed is 5."]


def test_isolate_rng_puts_the_generators_back() -> None:
    seed_everything(4)
    first = draw()
    for include_cuda in (True, False):
        seed_everything(4)
        with isolate_rng(include_cuda):
            seed_everything(9)
            assert draw() != first
        assert draw() == first
