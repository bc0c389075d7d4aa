"""What a user's code writes into parameters itself is kept under every strategy, as on one process, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import assert_close
from written_job import CASES, REFUSED, alone, written_everywhere

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


def test_a_write_that_would_change_nothing_is_refused(ranks: Any) -> None:
    for rank in ranks:
        assert len(rank["refused"]) == sum(map(len, REFUSED.values()))
        for (_, kind, *_), told in rank["refused"].items():
            which = "target.0.up.weight" if kind == "Teaches" else "net.0.up.weight"
            assert f"the parameter '{which}' was used where it is not gathered" in told
            assert "GatheredParameters" in told


def test_the_last_hooks_writes_are_in_what_a_run_leaves(ranks: Any) -> None:
    steps = 6
    for rank in ranks:
        for name in ("fsdp", "deepspeed_stage_3"):
            alone, dtype, is_contiguous = rank["left"][name]
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
