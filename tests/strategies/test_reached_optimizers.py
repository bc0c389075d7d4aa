"""Several optimizers under DeepSpeed, and backwards that reach the parameters of some of them on some ranks only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from contract_job import quiet
from jobs import run_job
from small import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader

import trainwright as tw
from trainwright.strategies.zero_order import ReductionOrder, take_turns

WORLD = 2
STRATEGIES: dict[str, dict[str, Any]] = {
    "1": {"stage": 1},
    "2": {"stage": 2},
    "2, while the backward runs": {"stage": 2, "overlap_comm": True},
    "2, several buckets": {"stage": 2, "reduce_bucket_size": 100},
}
PATHS = {
    "first step": ["A B", "AB B", "ABC ABC", "B AC"],
    "later": ["ABC ABC", "A BC", "BC A", "C AB", "A B", "ABC C", "AB AB", "A A", "B C", "ABC ABC"],
}
"""Which experts each rank's batch takes, step by step. No rank takes all of them in some steps."""


class Experts(tw.Module):
    """Adds the outputs of the experts that the batch names, each of which has its own optimizer."""

    def __init__(self, *, window: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(1)
        self.window = window
        self.experts = nn.ModuleDict(
            {name: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)) for name in "ABC"}
        )

    def forward(self, x: Tensor, names: str) -> Tensor:
        return torch.stack([self.experts[name](x) for name in names]).sum(dim=0)

    def training_step(self, batch: tuple[Tensor, str], batch_idx: int) -> None:
        self.manual_backward((self(*batch) - 1).pow(2).mean())
        if (batch_idx + 1) % self.window == 0:
            for each in self.optimizers():
                each.step()
                each.zero_grad()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(each.parameters(), 0.01, eps=1e-3, weight_decay=0.5) for each in self.experts.values()
        ]


class Adversaries(Experts):
    """Two losses in each step, the first of which reaches neither A nor B on any rank, and the second C on some."""

    def training_step(self, batch: tuple[Tensor, str], batch_idx: int) -> None:
        x, names = batch
        first, second, third = self.optimizers()
        with torch.no_grad():
            made = self(x, "AB")
        self.manual_backward((self(x + made, "C") - 1).pow(2).mean())
        third.step()
        third.zero_grad()
        self.manual_backward(self(x, names).pow(2).mean())
        for each in (first, second):
            each.step()
        for each in (first, second, third):
            each.zero_grad()


class Failing(Experts):
    """Fails in the middle of each second backward, on every rank, and goes on."""

    def training_step(self, batch: tuple[Tensor, str], batch_idx: int) -> None:
        handles = [each[1].register_full_backward_hook(self.fail) for each in self.experts.values() if batch_idx % 2]
        try:
            super().training_step(batch, batch_idx)
        except ArithmeticError:
            for each in self.optimizers():
                each.zero_grad()
        for handle in handles:
            handle.remove()

    def fail(self, *args: Any) -> None:
        raise ArithmeticError("the user's")


class Skipping(Experts):
    """Leaves out the batches with which the other fails."""

    def training_step(self, batch: tuple[Tensor, str], batch_idx: int) -> None:
        if batch_idx % 2 == 0:
            super().training_step(batch, batch_idx)


def trained(make: Any, strategy: Any, steps: list[str]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(4, 8, generator=generator), names) for step in steps for names in step.split()]
    module = make()
    trainer = tw.Trainer(strategy=strategy, devices=WORLD, max_epochs=1, **QUIET)
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return {key: each.detach().clone() for key, each in module.named_parameters()}


def failures(folder: Path) -> float:
    quiet()
    steps = ["AB AB", "A B", "AB AB", "B AC", "C C", "ABC A", "ABC ABC"]
    expected = trained(Skipping, tw.DDPStrategy(find_unused_parameters=True), steps)
    found = trained(Failing, tw.DeepSpeedStrategy(stage=2), steps)
    return max((found[key] - expected[key]).abs().max().item() for key in expected)


def test_backwards_that_fail_after_reaching_other_optimizers_on_each_rank(tmp_path: Path) -> None:
    assert max(run_job(failures, WORLD, tmp_path)) < 1e-5


def runs(folder: Path) -> dict[str, float]:
    quiet()
    found = {}
    kinds: dict[str, Any] = {"plain": Experts, "window": lambda: Experts(window=2), "adversaries": Adversaries}
    for (kind, make), (path, steps) in ((kind, path) for kind in kinds.items() for path in PATHS.items()):
        expected = trained(make, tw.DDPStrategy(find_unused_parameters=True), steps)
        for name, options in STRATEGIES.items():
            weights = trained(make, tw.DeepSpeedStrategy(**options), steps)
            found[f"{name}: {kind}, {path}"] = max((weights[k] - expected[k]).abs().max().item() for k in expected)
    return found


@pytest.mark.slow
def test_ranks_whose_backwards_reach_other_optimizers(tmp_path: Path) -> None:
    for rank in run_job(runs, WORLD, tmp_path):
        assert len(rank) == len(STRATEGIES) * len(PATHS) * 3
        assert {name: each for name, each in rank.items() if each > 1e-5} == {}


class Zero:
    """Notes what a ZeRO optimizer is told, in a log that several share."""

    def __init__(self, name: str, log: list[str], parameters: list[nn.Parameter]) -> None:
        self.name, self.log, self.bit16_groups = name, log, [parameters]
        self.ipg_buckets: dict[Any, Any] = {}
        self.extra_large_param_to_reduce: dict[Any, Any] = {}
        self.params_already_reduced: list[bool] = []

    def reduce_independent_p_g_buckets_and_remove_grads(self, parameter: nn.Parameter, group: int) -> None:
        self.log.append(f"{self.name}{int(parameter)}")

    def reduce_ipg_grads(self) -> None:
        self.log.append(f"{self.name} sent")

    def setup_buckets(self) -> None:
        self.log.append(f"{self.name} prepared")

    def independent_gradient_partition_epilogue(self) -> None:
        self.log.append(f"{self.name} ended")

    def clear_backward_seen_flag(self) -> None: ...


def backward(stage: int, reached: list[list[int]], elsewhere: list[bool]) -> tuple[list[str], list[bool]]:
    """Return what the engines of two optimizers do in a backward that reaches these parameters of theirs, in this order.

    `elsewhere` says which engines other ranks reach. Also returned is which of the engines await their end then.
    """
    log: list[str] = []
    parameters = [[nn.Parameter(torch.tensor(float(each))) for each in range(2)] for _ in "ab"]
    zeros = [Zero(name, log, each) for name, each in zip("ab", parameters, strict=True)]
    orders = [
        ReductionOrder(zero, zip("xy", each, strict=True), stage) for zero, each in zip(zeros, parameters, strict=True)
    ]
    answers = iter(elsewhere[::-1])  # what was made last comes first

    def on_any(is_here: bool) -> bool:
        log.append(f"asked with {is_here}")
        return next(answers) or is_here

    take_turns(orders, stage, on_any)
    for order in orders:
        order.begin()
    for zero, own, numbers in zip(zeros, parameters, reached, strict=True):
        for each in numbers:
            zero.reduce_independent_p_g_buckets_and_remove_grads(own[each], 0)
    for zero, numbers in zip(zeros, reached, strict=True):
        if numbers or stage == 1:
            zero.independent_gradient_partition_epilogue()
    return log, [order.awaits_end() for order in orders]


def test_engines_that_only_other_ranks_reach_send_zeros_in_their_turn() -> None:
    b = ["b prepared", "b1", "b0", "b sent"]
    a = ["asked with True", "a1", "a0", "a sent", "a ended"]
    assert backward(2, [[1, 0], []], [True, True]) == (["asked with False", *b, *a], [False, True])
    assert backward(2, [[1, 0], []], [True, False]) == (["asked with False", *a], [False, False])
    log, awaiting = backward(2, [[0], [0, 1]], [False, False])
    assert log == [
        "asked with True",
        "b1",
        "b0",
        "b sent",
        "asked with True",
        "a1",
        "a0",
        "a sent",
        "a ended",
        "b ended",
    ]
    assert awaiting == [False, False]
    log, awaiting = backward(2, [[], [1]], [True, False])
    assert log[-5:] == ["asked with False", "a prepared", "a1", "a0", "a sent"]
    assert awaiting == [True, False]


def test_stage_1_sends_zeros_in_the_step_without_a_question() -> None:
    log, awaiting = backward(1, [[1, 0], []], [])
    assert log == ["a1", "a0", "a ended", "b prepared", "b1", "b0", "b ended"]
    assert awaiting == [False, False]


def test_one_engine_sends_zeros_whatever_a_backward_reaches() -> None:
    log: list[str] = []
    parameter = nn.Parameter(torch.tensor(0.0))
    order = ReductionOrder(Zero("a", log, [parameter]), [("x", parameter)], 2)
    take_turns([order], 2, lambda is_here: is_here)
    order.begin()
    assert order.awaits_end()
    assert log == ["a prepared", "a0"]
