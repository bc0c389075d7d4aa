"""Every strategy treats buffers, late parameters, clipping and optimizer state alike, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from alike_job import LATE, STRATEGIES, ZERO, alike
from jobs import run_job
from small import assert_close, assert_equal

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_job(alike, 2, tmp_path_factory.mktemp("alike"), seconds=400.0)


@pytest.mark.parametrize("strategy", [*STRATEGIES, *ZERO])
def test_a_step_finds_rank_0s_buffers(ranks: Any, strategy: str) -> None:
    first, second = (rank["buffers"][strategy] for rank in ranks)
    for mode in ("automatic", "manual"):
        assert first[mode] == second[mode]
        assert len({tuple(seen) for seen in first[mode]}) == 6  # they change in every step
    assert first["windows"][::2] == second["windows"][::2]
    assert first["windows"][1::2] != second["windows"][1::2]
    expected = ranks[0]["buffers"]["ddp"]
    for mode in expected:
        torch.testing.assert_close(first[mode], expected[mode])


@pytest.mark.parametrize("strategy", [*STRATEGIES, *ZERO])
def test_autocast_is_off_in_a_step_under_every_strategy(ranks: Any, strategy: str) -> None:
    for rank in ranks:
        for mode, seen in rank["arithmetic"][strategy].items():
            assert seen == {(False, "torch.float32")}, mode


def test_parameters_that_were_made_late_are_trained_alike(ranks: Any) -> None:
    for strategy in LATE:
        assert_equal(ranks[0]["late"][strategy], ranks[1]["late"][strategy])
    assert "shift" in ranks[0]["late"]["fsdp"]
    assert_close(ranks[0]["late"]["fsdp"], ranks[0]["late"]["ddp"])


def test_fsdp_computes_in_mixed_precision_what_ddp_computes(ranks: Any) -> None:
    """Bit for bit: low precision where autocast has it, float32 weights everywhere else."""
    for rank in ranks:
        for precision, expected in rank["norms"]["ddp"].items():
            assert_equal(rank["norms"]["fsdp"][precision], expected)


def test_clips_in_every_batch_do_not_differ_from_ddp(ranks: Any) -> None:
    for strategy in STRATEGIES:
        first, second = (rank["tempered"][strategy] for rank in ranks)
        for mode, expected in ranks[0]["tempered"]["ddp"].items():
            assert_equal(first[mode], second[mode])
            assert_close(first[mode], expected)


def test_resume_restores_optimizer_state_without_tensors(ranks: Any) -> None:
    expected = ranks[0]["kept"]["ddp"]["whole"]
    for strategy in ("ddp", "ddp_sharded"):
        for rank in ranks:
            assert_equal(rank["kept"][strategy]["whole"], expected)
            assert_equal(rank["kept"][strategy]["in parts"], expected)


@pytest.mark.parametrize("strategy", [*STRATEGIES, *ZERO])
def test_a_scheduled_rate_is_logged_once(ranks: Any, strategy: str) -> None:
    for rank in ranks:
        assert rank["rates"][strategy] == {"lr-SGD": [0.1, 0.05]}


def test_a_resume_calls_no_hook_of_a_gradient(ranks: Any) -> None:
    for rank in ranks:
        assert rank["hooked"] == {"first": [True] * 12, "ended": [], "more": [True] * 12}


def test_ddp_leaves_apart_what_the_module_says(ranks: Any) -> None:
    first, second = (rank["apart"] for rank in ranks)
    assert [rank["apart"]["place"].item() for rank in ranks] == [0.0, 1.0]
    own, other = first.pop("own"), second.pop("own")
    assert not torch.equal(own, other)
    assert not torch.equal(other, torch.ones(6))
    first.pop("place")
    second.pop("place")
    assert_equal(first, second)


REFUSED = {
    "unstorable": "CheckpointError: the state of Keeping.head.bias.odd is a builtins.object",
    "apart ddp_sharded": "ValueError: Apart._ddp_params_and_buffers_to_ignore keeps 'own' separate on every rank, but "
    "strategy='ddp_sharded' trains one model. Use strategy='ddp', or delete that attribute.",
    "apart fsdp": "ValueError: Apart._ddp_params_and_buffers_to_ignore keeps 'own' separate on every rank, but strategy='fsdp'",
    "fit 32-true": "ValueError: fsdp gathers the weights of Copies in bfloat16, as an earlier run has sharded it, and this one "
    "is in 32-true. Continue in that run's precision, take the whole copy that tw.gather_module(module, all_ranks=True) "
    "returns, or create the module again and load a checkpoint.",
    **dict.fromkeys(
        ("copy", "copy of stage 3"),
        "RuntimeError: a module that fsdp or ZeRO stage 3 has sharded cannot be copied, because a rank holds only a part of "
        "it. tw.gather_module(module)",
    ),
    "fit 16-mixed": "ValueError: fsdp gathers the weights of Copies in bfloat16",
    "validate 32-true": "ValueError: fsdp gathers the weights of Copies in bfloat16",
    "validate 16-mixed": "ValueError: fsdp gathers the weights of Copies in bfloat16",
    "Adafactor": "ValueError: Adafactor does not compute on the sharded parameters (DTensors) that strategy='fsdp' gives it.",
    "Rprop": "ValueError: Rprop does not compute on the sharded parameters",
    "Whole": "RuntimeError: Whole does not compute on the sharded parameters",
    **dict.fromkeys(
        (f"row norms {strategy}" for strategy in (*STRATEGIES, *ZERO)),
        "ValueError: 'words' of Words is an Embedding with max_norm=1.0, which scales the rows that a batch looks up. Under",
    ),
    **{
        f"sparse {strategy}": f"ValueError: 'words' of Words is an Embedding with sparse=True, and strategy='{strategy}' "
        "only reduces dense gradients. Omit sparse, or choose strategy='ddp'."
        for strategy in ("ddp_sharded", "fsdp", *ZERO)
    },
    "sparse ddp": "nothing",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_alike_is_refused_by_name(ranks: Any, what: str) -> None:
    for rank in ranks:
        assert rank["refused"][what].startswith(REFUSED[what])


@pytest.mark.parametrize("strategy", [*STRATEGIES, *ZERO])
def test_nothing_outlives_a_run_that_nobody_holds(ranks: Any, strategy: str) -> None:
    for rank in ranks:
        assert rank["outlived"][strategy] == [False] * 6
