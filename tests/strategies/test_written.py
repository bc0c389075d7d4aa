"""Writes of a user's code into parameters are kept as on one process, or rejected by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import assert_close
from written_job import CASES, REFUSED, alone, written_everywhere

from trainwright.strategies.zero.zero_write_back import note_empty_parameter

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_job(written_everywhere, 2, tmp_path_factory.mktemp("written"), seconds=600.0)


def test_writes_are_kept_as_on_one_process(ranks: Any, tmp_path: Path) -> None:
    expected = alone(tmp_path)
    assert len(ranks[0]["kept"]) == sum(map(len, CASES.values()))
    for rank in ranks:
        for (_, kind, place, form), weights in rank["kept"].items():
            assert_close(weights, expected[kind, place, form.removeprefix("gathered ")]), (kind, place, form)


def test_write_that_stage_3_would_lose_is_refused(ranks: Any) -> None:
    for rank in ranks:
        assert len(rank["refused"]) == sum(map(len, REFUSED.values()))
        for (_, kind, place, _), told in rank["refused"].items():
            which = "net.0.up.weight" if kind == "Clips" else "counted.calls" if place == "forward" else "alone"
            assert told.startswith(f"the parameter '{which}' was written, which ZeRO stage 3 would lose")
            assert "GatheredParameters" in told
            assert told.endswith("or choose 'ddp', 'ddp_sharded' or 'fsdp'.")


def test_the_last_hooks_writes_are_in_what_a_run_leaves(ranks: Any) -> None:
    steps = 6
    for rank in ranks:
        alone, dtype, is_contiguous = rank["left"]["alone"]
        torch.testing.assert_close(alone, torch.full_like(alone, 1 - 0.9**steps), rtol=1e-6, atol=1e-6)
        assert (dtype, is_contiguous) == ("torch.float32", True)
        assert rank["left"]["moved"] == ["torch.float32", "torch.float64"]


def test_a_write_that_would_be_rounded_is_refused(ranks: Any) -> None:
    for rank in ranks:
        assert len(rank["low"]) == 3
        for told in rank["low"].values():
            assert "the step wrote the parameter 'target.0.up.weight' while fsdp had gathered it in bfloat16" in told
    follows = ranks[0]["exact"]
    assert all(torch.isfinite(value).all() for value in follows.values())
    assert follows["alone"][0, 0].item() == pytest.approx(1 - 0.9**6)


def test_an_error_of_swapped_parameters_says_what_stage_3_cannot_do() -> None:
    found: list[AttributeError] = []
    for stage in (2, 3):
        with pytest.raises(AttributeError) as caught:
            _ = torch.zeros(2).ds_status  # type: ignore[attr-defined]  # the gathering hooks read it
        note_empty_parameter(caught.value, stage)
        found.append(caught.value)

    assert not hasattr(found[0], "__notes__")
    assert "torch.func.functional_call" in found[1].__notes__[0]
    assert "choose another strategy" in found[1].__notes__[0]
