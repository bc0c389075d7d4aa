"""The functions of the raw loop on two ranks: LocalSGD, and a batch size that all ranks agree on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import assert_close, loss_of, make_loader, make_net, weights
from torch.distributed import all_reduce

import trainwright as tw
from trainwright.raw_loop import batch_size

EVERY, ACCUMULATE = 3, 2


def optimizer_of(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.02)


def train_locally(accelerator: tw.Accelerator, folder: Path) -> dict[str, Any]:
    net, optimizer, loader = accelerator.prepare(
        *(lambda net: (net, optimizer_of(net)))(make_net()), make_loader(samples=64)
    )
    refused = ""
    for epoch in range(2):
        with tw.LocalSGD(accelerator, net, local_sgd_steps=EVERY) as local_sgd:
            for batch in loader:
                with accelerator.accumulate(net):
                    accelerator.backward(loss_of(net, batch))
                    optimizer.step()
                    optimizer.zero_grad()
                local_sgd.step()
            if epoch == 1:
                try:
                    accelerator.save_state(str(folder / "within"))
                except RuntimeError as error:
                    refused = str(error)
    after = weights(net)
    for batch in loader:  # with averaged gradients again
        with accelerator.accumulate(net):
            accelerator.backward(loss_of(net, batch))
            optimizer.step()
            optimizer.zero_grad()
    return {"after": after, "end": weights(net), "refused": refused}


def normalize(accelerator: tw.Accelerator) -> list[Any]:
    """Return the statistics of a batch norm that the ranks have trained with different samples."""
    net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
    net, optimizer = accelerator.prepare(net, optimizer_of(net))
    with tw.LocalSGD(accelerator, net, local_sgd_steps=EVERY):
        accelerator.backward(net(torch.randn(4, 8) + accelerator.process_index).square().sum())
        optimizer.step()
    statistics: list[Any] = accelerator.unwrap_model(net)[1].running_mean.tolist()
    optimizer.zero_grad()
    with accelerator.no_sync():
        accelerator.backward(net(torch.randn(4, 8) + accelerator.process_index).square().sum())
    own = accelerator.unwrap_model(net)[0].weight.grad
    return [statistics, own.equal(accelerator.reduce(own, "mean"))]


def search(accelerator: tw.Accelerator) -> dict[str, Any]:
    tried: list[int] = []

    @tw.find_executable_batch_size(starting_batch_size=8)
    def train(size: int) -> int:
        tried.append(size)
        if size > 6 and accelerator.process_index == 1:
            raise MemoryError("on one rank")
        if size > 5 and accelerator.process_index == 0:
            raise MemoryError("on the other")
        return size

    found = train()

    @tw.find_executable_batch_size(starting_batch_size=4)
    def hang(size: int) -> None:
        if accelerator.process_index == 1:
            raise MemoryError("on one rank only")
        if size == 4:
            all_reduce(torch.ones(1))  # waits for the other rank

    batch_size.PATIENCE_SECONDS = 0.5
    error = ""
    if accelerator.process_index == 1:
        try:
            hang()
        except RuntimeError as caught:
            error = str(caught)
            all_reduce(torch.ones(1))  # so that the other rank's try ends, and then its next one
            accelerator.engine.ranks.exchange("", "the end of a try of find_executable_batch_size")
    else:
        hang()
    return {"tried": tried, "found": found, "error": error}


def work(folder: Path) -> dict[str, Any]:
    plain = tw.Accelerator(cpu=True)
    found = {"plain": train_locally(plain, folder)}
    accumulating = tw.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    found["accumulating"] = train_locally(accumulating, folder)
    for name, settings in {"shards them": {"strategy": "fsdp"}, "loss scale": {"mixed_precision": "fp16"}}.items():
        accelerator = tw.Accelerator(cpu=True, **settings)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=name):
            tw.LocalSGD(accelerator, accelerator.prepare(make_net()), 2)
    off = tw.Accelerator(cpu=True, strategy="fsdp")
    with tw.LocalSGD(off, off.prepare(make_net()), 2, enabled=False) as local_sgd:
        local_sgd.step()
    found["normalized"] = normalize(tw.Accelerator(cpu=True))
    found["search"] = search(plain)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_job(work, 2, tmp_path_factory.mktemp("job"))


def by_hand(accumulate: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the weights of two replicas averaged by hand, at the end of LocalSGD and after an epoch together."""
    nets = [make_net(), make_net()]
    optimizers = [optimizer_of(net) for net in nets]
    batches = list(make_loader(samples=64))

    def average(tensors: list[tuple[torch.Tensor, ...]]) -> None:
        with torch.no_grad():
            for each in tensors:
                mean = sum(each) / len(each)
                for one in each:
                    one.copy_(mean)

    def pairs(name: str | None) -> list[Any]:
        if name is None:
            return list(zip(*(net.parameters() for net in nets), strict=True))
        return [
            tuple(optimizer.state[p][name] for optimizer, p in zip(optimizers, each, strict=True))
            for each in pairs(None)
        ]

    def epoch(is_local: bool) -> None:
        for number in range(len(batches) // 2):
            for rank, net in enumerate(nets):
                (loss_of(net, batches[2 * number + rank]) / accumulate).backward()
            if (number + 1) % accumulate == 0:
                if not is_local:
                    average([tuple(p.grad for p in each) for each in pairs(None)])
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            if is_local and (number + 1) % EVERY == 0:
                average(pairs(None))
        if is_local:
            for name in (None, "exp_avg", "exp_avg_sq"):
                average(pairs(name))

    epoch(True)
    epoch(True)
    after = weights(nets[0])
    epoch(False)
    return after, weights(nets[0])


@pytest.mark.parametrize(("name", "accumulate"), [("plain", 1), ("accumulating", ACCUMULATE)])
def test_local_sgd_averages_the_ranks(ranks: list[dict[str, Any]], name: str, accumulate: int) -> None:
    after, end = by_hand(accumulate)
    for rank in ranks:
        assert_close(rank[name]["after"], after, 1e-5)
        assert_close(rank[name]["end"], end, 1e-5)
        assert "within LocalSGD, where the ranks have different weights" in rank[name]["refused"]
    for key, value in ranks[0][name]["end"].items():
        assert torch.equal(value, ranks[1][name]["end"][key]), "the replicas stay the same afterwards"


def test_local_sgd_unites_buffers_and_no_sync_keeps_gradients_local(ranks: list[dict[str, Any]]) -> None:
    statistics, is_averaged = ranks[0]["normalized"]
    assert ranks[1]["normalized"] == [statistics, is_averaged]
    assert not is_averaged


def test_the_ranks_agree_on_a_batch_size(ranks: list[dict[str, Any]]) -> None:
    assert [rank["search"]["tried"] for rank in ranks] == [[8, 7, 6, 5]] * 2
    assert [rank["search"]["found"] for rank in ranks] == [5, 5]
    assert "rank 1 ran out of memory with a batch size of 4 (on one rank only)" in ranks[1]["search"]["error"]
