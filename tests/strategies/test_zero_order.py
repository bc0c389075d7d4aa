"""Ranks whose backward reaches the parameters in another order, as an LSTM's does by the lengths of the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_job import quiet
from jobs import run_job
from small import QUIET
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import trainwright as tw
from trainwright.strategies.zero.zero_order import ReductionOrder

LENGTHS = [(4, 4), (2, 3), (3, 3), (5, 5)]
"""Two sequences a batch. Rank 0 reads every other batch, so its first step has another order than rank 1's."""
STAGES: dict[str, dict[str, Any]] = {
    "1": {"stage": 1},
    "2": {"stage": 2},
    "2, while the backward runs": {"stage": 2, "overlap_comm": True},
    "2, several buckets": {"stage": 2, "reduce_bucket_size": 300},
    "3": {"stage": 3},
    "3, several buckets": {"stage": 3, "reduce_bucket_size": 300},
}


class Sequences(tw.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.LSTM(8, 8, bidirectional=True)  # whose weights have one shape, so they can be confused
        self.unused = nn.Linear(2, 2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        packed = pack_padded_sequence(batch[0], batch[1].cpu(), enforce_sorted=False)
        return self.net(packed)[1][0].pow(2).sum()

    def configure_optimizers(self) -> Any:
        decayed = [each for name, each in self.named_parameters() if "weight" in name]
        others = [each for name, each in self.named_parameters() if "weight" not in name]
        return torch.optim.SGD([{"params": others, "lr": 0.2}, {"params": decayed}], lr=0.1)


def trained(make: Callable[[str], tw.Module], strategies: Any, batches: Any, **settings: Any) -> dict[str, Any]:
    """Return the weights of a module trained on two ranks, by strategy."""
    found = {}
    for name, strategy in strategies.items():
        module = make(name)
        tw.Trainer(strategy=strategy, devices=2, max_epochs=1, **QUIET, **settings).fit(
            module, DataLoader(batches, batch_size=None)
        )
        found[name] = {
            key: each.detach().clone() for key, each in tw.gather_module(module, all_ranks=True).named_parameters()
        }
    return found


def orders(folder: Path) -> dict[str, Any]:
    quiet()
    torch.manual_seed(0)
    batches = [(torch.randn(max(lengths), 2, 8), torch.tensor(lengths)) for lengths in LENGTHS]
    ddp = tw.DDPStrategy(find_unused_parameters=True)
    strategies: dict[str, Any] = {"ddp": ddp, "sharded": tw.ShardedDDPStrategy(reduce_buffer_size=0)}
    strategies |= {name: tw.DeepSpeedStrategy(**options) for name, options in STAGES.items()}
    return trained(lambda _: Sequences(), strategies, batches)


def check_alike(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        expected = rank.pop("ddp")
        for name, weights in rank.items():
            for key in expected:
                torch.testing.assert_close(weights[key], expected[key], msg=f"{name}: {key}")


@pytest.mark.slow
def test_the_order_of_arrival_does_not_matter(tmp_path: Path) -> None:
    check_alike(run_job(orders, 2, tmp_path))


class Checkpointed(tw.Module):
    """Runs the blocks' backwards within the backward of the loss, the last block first."""

    def __init__(self, is_nested: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.is_nested = is_nested
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = batch.requires_grad_()
        for block in self.blocks[batch_idx % 2 :]:
            hidden = checkpoint(block, hidden, use_reentrant=self.is_nested)
        return (hidden - 1).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def nested(folder: Path) -> dict[str, Any]:
    quiet()
    torch.manual_seed(0)
    strategies: dict[str, Any] = {"ddp": tw.DDPStrategy(find_unused_parameters=True)}
    strategies |= {name: tw.DeepSpeedStrategy(**options) for name, options in STAGES.items() if options["stage"] < 3}

    def make(strategy: str) -> tw.Module:
        return Checkpointed(is_nested=strategy != "ddp")  # torch's ddp refuses it with unused parameters

    return trained(make, strategies, torch.randn(8, 4, 8), accumulate_grad_batches=2)


@pytest.mark.slow
def test_backwards_within_a_backward_are_counted(tmp_path: Path) -> None:
    check_alike(run_job(nested, 2, tmp_path))


def resumed(folder: Path) -> list[dict[str, Tensor]]:
    """Return the weights of a run of four steps, and of a run resumed after two."""
    quiet()
    torch.manual_seed(0)
    batches = [(torch.randn(5, 2, 8), torch.tensor((5, each % 4 + 2))) for each in range(12)]

    def run(steps: int, **resume: Any) -> tuple[Any, dict[str, Tensor]]:
        module = Sequences()
        strategy = tw.DeepSpeedStrategy(stage=2, reduce_bucket_size=300)
        trainer = tw.Trainer(strategy=strategy, devices=3, max_steps=steps, **QUIET)
        trainer.fit(module, DataLoader(batches, batch_size=None), **resume)  # type: ignore[arg-type]
        return trainer, {key: each.detach().clone() for key, each in module.named_parameters()}

    _, expected = run(4)
    half, _ = run(2)
    half.save_checkpoint(str(folder / "half.ckpt"))
    (order,) = half.strategy.state["reduction_orders"]
    assert order != sorted(order)
    assert order != sorted(order)[::-1]  # otherwise a resume would not show that it was saved
    _, found = run(4, ckpt_path=str(folder / "half.ckpt"))
    return [expected, found]


@pytest.mark.slow
def test_a_resumed_run_of_three_ranks_sums_in_the_order_of_the_saved_one(tmp_path: Path) -> None:
    for expected, found in run_job(resumed, 3, tmp_path):
        for key in expected:
            assert torch.equal(found[key], expected[key]), key


class Zero:
    """Notes in which order a ZeRO optimizer is given gradients."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.bit16_groups = [parameters[::2], parameters[1::2]]
        self.given: list[Any] = []

    def reduce_independent_p_g_buckets_and_remove_grads(self, parameter: nn.Parameter, group: int) -> None:
        self.given.append((int(parameter), group))

    def independent_gradient_partition_epilogue(self) -> None:
        self.given.append("end")

    def setup_buckets(self) -> None:
        self.given.append("prepared")


def test_gradients_wait_for_their_turn() -> None:
    parameters = [nn.Parameter(torch.tensor(float(each))) for each in range(5)]
    zero = Zero(parameters)
    named = [(f"members.0.{int(each)}", each) for each in (*parameters, nn.Parameter(torch.tensor(9.0)))]
    order = ReductionOrder(zero, named, stage=2)

    def given(arrivals: list[int]) -> list[Any]:
        zero.given.clear()
        for each in arrivals:
            zero.reduce_independent_p_g_buckets_and_remove_grads(parameters[each], each % 2)
        zero.independent_gradient_partition_epilogue()
        return list(zero.given)

    assert order.indices == []
    assert given([3, 0, 4, 1]) == [(4, 0), (3, 1), (2, 0), (1, 1), (0, 0), "end"]
    assert parameters[2].grad == 0  # it was not used
    assert order.indices == [3, 0, 4, 1, 2]
    for arrivals in ([3, 0, 4, 1], [1, 4, 3, 0], [0, 1, 3, 4]):
        assert given(arrivals) == [(3, 1), (0, 0), (4, 0), (1, 1), (2, 0), "end"]
    assert given([]) == ["prepared", (3, 1), (0, 0), (4, 0), (1, 1), (2, 0), "end"]  # other ranks have used them
    order.replay([4, 3, 2, 1])  # of a module with other parameters
    assert order.indices == [3, 0, 4, 1, 2]
    order.replay([1, 0, 2, 3, 4])  # of a checkpoint
    assert given([3, 0, 4, 1]) == [(1, 1), (0, 0), (2, 0), (3, 1), (4, 0), "end"]
