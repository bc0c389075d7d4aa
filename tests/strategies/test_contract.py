"""Every strategy matches one process on the same global batches, on two gloo ranks and on more.

A strategy is started once, and contract_job.py makes all checks in that job.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import contract_job
import pytest
import torch
from contract_job import (
    CASES,
    Classifies,
    alone,
    classifier,
    compiled,
    contract,
    manual_kind,
    more_ranks,
    relative_distance,
)
from deadlines import deadline
from interpreters import run_command, search_path
from jobs import run_job

import trainwright as tw
from trainwright.strategies import STRATEGIES, VARIANTS

CLOSE = 1e-5
PARALLEL = ["ddp", "ddp_sharded", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
MESH = contract_job.MESH
LOW_TOLERANCE = 0.05  # two or three significant digits in bfloat16
SHARE = {"ddp": 1.0, MESH: 0.25}
"""The part of the optimizer's state that a rank holds, where it is not a half."""


def test_every_name_is_checked() -> None:
    parallel = {name for name in STRATEGIES if name != "single_device"}
    kinds = {VARIANTS.get(name, (name, {}))[0] for name in PARALLEL}
    assert parallel == kinds


Alone = Callable[[str], tuple[dict[str, Any], Path]]
"""Returns the results of one process for the model that a strategy trains, and the folder of its checkpoints."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    @cache
    def trained(kind: type[Classifies]) -> tuple[dict[str, Any], Path]:
        folder = tmp_path_factory.mktemp("alone")
        return alone(2, folder, kind), folder

    return lambda strategy: trained(classifier(strategy))


@pytest.fixture(scope="module", params=[*PARALLEL, pytest.param(MESH, marks=pytest.mark.slow)])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("contract") / request.param
    return request.param, run_job(contract, 4 if request.param == MESH else 2, folder), folder


def weights(kind: type[tw.Module], path: Path) -> dict[str, torch.Tensor]:
    return kind.load_from_checkpoint(str(path)).state_dict()


def assert_same_run(
    found: dict[str, Any], expected: dict[str, Any], path: Path, other: Path, kind: type[tw.Module] = Classifies
) -> None:
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(found["norms"], expected["norms"], rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-6, atol=1e-6)
    assert (found["steps"], found["lr"]) == (expected["steps"], pytest.approx(expected["lr"]))
    stored, wanted = weights(kind, path), weights(kind, other)
    zeros = dict.fromkeys((name for name, value in wanted.items() if value.is_floating_point()), 0.0)
    assert dict(relative_distance(stored, wanted)) == pytest.approx(zeros, abs=CLOSE)


def assert_same_evaluation(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for stage in ("validate", "test"):
        assert found[stage] == pytest.approx(expected[stage], abs=1e-6, rel=1e-6)
    assert torch.equal(found["predict"], expected["predict"])


def test_two_ranks_match_one_process_under_every_strategy(job: Any, expected: Alone) -> None:
    strategy, ranks, folder = job
    one, other = expected(strategy)
    for rank in ranks:
        for case in CASES:
            assert_same_run(
                rank[case], one[case], folder / f"{case}.ckpt", other / f"{case}.ckpt", classifier(strategy)
            )
        assert len(ranks[0]["norm"]["norms"]) == contract_job.STEPS
        assert_same_evaluation(rank["evaluation"], one["evaluation"])
        # With a rate of 1 the first step's change is the gradient.
        for steps in (1, 3):
            kind = manual_kind(strategy)
            found = weights(kind, folder / f"{kind.__name__}-{steps}.ckpt")
            wanted = weights(kind, other / f"{kind.__name__}-{steps}.ckpt")
            assert max(distance for _, distance in relative_distance(found, wanted)) < CLOSE, steps


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [each for each in PARALLEL if not re.search("stage_[13]", each)])
def test_a_compiled_module_matches_one_process_under_every_strategy(
    strategy: str, expected: Alone, tmp_path: Path
) -> None:
    """DeepSpeed's stage 1 runs the compiled module as stage 2 does, and stage 3 refuses it."""
    one, other = expected(strategy)
    folder = tmp_path / strategy
    for rank in run_job(compiled, 2, folder):
        assert_same_run(rank, one["plain"], folder / "compiled.ckpt", other / "plain.ckpt")


def test_optimizer_state_is_shared_among_ranks(job: Any, expected: Alone) -> None:
    strategy, ranks, _ = job
    whole = expected(strategy)[0]["bytes"]
    shares = [rank["bytes"] / whole for rank in ranks]
    assert max(shares) <= SHARE.get(strategy, 0.5) + 0.05
    assert sum(shares) >= 1.0  # else the state is not where it was looked for


def test_mixed_precisions_train_under_every_strategy(job: Any, expected: Alone) -> None:
    """Both mixed precisions train, and an overflow on one rank skips the step on all ranks."""
    strategy, ranks, folder = job
    reference = expected(strategy)[0]["plain"]["losses"]
    for rank in ranks:
        low, half = rank["low"]["bf16-mixed"], rank["low"]["16-mixed"]
        torch.testing.assert_close(low["losses"], reference, rtol=LOW_TOLERANCE, atol=LOW_TOLERANCE)
        torch.testing.assert_close(half["losses"][:2], reference[:2], rtol=LOW_TOLERANCE, atol=LOW_TOLERANCE)
        assert half["losses"].isfinite().all()
        assert (low["used"], half["used"]) == ("bf16-mixed", "16-mixed")
        assert (low["skipped"], half["skipped"]) == (0, 1)
        assert half["scale"] == 2.0**15
    assert all(rank["low"]["16-mixed"]["told"] == 0 for rank in ranks)
    found = weights(classifier(strategy), folder / "bf16-mixed.ckpt")
    assert all(value.dtype == torch.float32 for value in found.values() if value.is_floating_point())


@pytest.mark.launch
@pytest.mark.parametrize("strategy", PARALLEL)
def test_a_failing_rank_ends_the_job_under_every_strategy(strategy: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys\nsys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}\n"
        "from pathlib import Path\nfrom contract_job import fail\n"
        f"import trainwright as tw\nif __name__ == '__main__':\n"
        f"    tw.Trainer(devices=2, accelerator='cpu', barebones=True)\n    fail(Path({strategy!r}))\n"
    )
    started = time.monotonic()
    root = str(Path(tw.__file__).parents[1])
    done = run_command([sys.executable, script], folder=tmp_path, PYTHONPATH=search_path(root))
    assert done.returncode == 1
    assert "trainwright: rank 1 of 2 failed first (ArithmeticError: the third batch is bad)" in done.stderr
    assert time.monotonic() - started < deadline(90.0)


MORE_RANKS = {"deepspeed_stage_1": [4], "deepspeed_stage_2": [3]}
"""Both have the optimizer's state in pieces, and differ in when they release gradients."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("hybrid", 4), *((strategy, ranks) for strategy in PARALLEL for ranks in MORE_RANKS.get(strategy, [3, 4]))],
)
def test_more_ranks_match_one_process(strategy: str, ranks: int, tmp_path: Path) -> None:
    folder, other = tmp_path / f"{strategy}@{ranks}", tmp_path / "alone"
    found = run_job(more_ranks, ranks, folder)
    wanted = contract_job.train("single_device", ranks, ranks, other / "run.ckpt", **CASES["norm, 4 batches"])
    for rank in found:
        assert_same_run(rank["norm, 4 batches"], wanted, folder / "run.ckpt", other / "run.ckpt")
        assert_same_evaluation(rank["evaluation"], contract_job.evaluate("single_device", ranks, other / "run.ckpt"))
