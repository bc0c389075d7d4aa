"""Every strategy loads every strategy's checkpoints at 1, 2 and 4 ranks, and makes the same next step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from matrix_job import WORLDS, cells, loads, of_optimizers, saves

CLOSE = 1e-6


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder, kept = tmp_path_factory.mktemp("matrix"), {}
    for world in WORLDS:
        first = run_job(saves, world, folder, seconds=400.0)[0]
        kept |= {f"{world}-{name}": states for name, states in first.items()}
    torch.save(kept, folder / "states.pt")
    return folder, kept


@pytest.mark.slow
@pytest.mark.parametrize("optimizers", [1, 2])
def test_every_strategy_saves_the_same_tensors(saved: tuple[Path, dict[str, Any]], optimizers: int) -> None:
    kept = of_optimizers(saved[1], optimizers)
    assert len(kept) == sum(count == optimizers for world in WORLDS for _, count in cells(world))
    wanted, _ = kept[f"1-single_device-{optimizers}"]
    assert wanted["model"]["body.empty"].numel() == 0
    assert wanted["model"]["body.frozen_half"].dtype == wanted["model"]["body.scale"].dtype == torch.bfloat16
    assert wanted["model"]["body.seen.mean_value"] != 0
    assert "body.scratch" not in wanted["model"]
    for name, (state, _) in kept.items():
        for section, tensors in wanted.items():
            assert state[section].keys() == tensors.keys(), name
            for key, tensor in tensors.items():
                torch.testing.assert_close(state[section][key], tensor, rtol=1e-5, atol=CLOSE, msg=f"{name}: {key}")


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_every_checkpoint_loads_under_every_strategy(saved: tuple[Path, dict[str, Any]], world: int) -> None:
    folder, kept = saved
    wanted = {(source, f"{name}-{count}") for name, count in cells(world) for source in of_optimizers(kept, count)}
    for found in run_job(loads, world, folder, seconds=400.0):
        assert found.keys() == wanted
        assert {cell: loaded for cell, (loaded, _) in found.items() if loaded != 0.0} == {}
        assert {cell: after for cell, (_, after) in found.items() if not after <= CLOSE} == {}
        same = {name: after for (source, name), (_, after) in found.items() if source == f"{world}-{name}"}
        assert same == dict.fromkeys(same, 0.0), "under the same strategy at the same world size it is bitwise"
