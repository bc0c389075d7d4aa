"""The functions of the raw loop on two ranks: gradients that stay local, and a batch size that all ranks agree on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import make_net
from torch.distributed import all_reduce

import trainwright as tw
from trainwright.raw_loop import batch_size


def keep_local(accelerator: tw.Accelerator) -> bool:
    """Return whether all ranks have the same gradients after a backward without their exchange."""
    net = make_net()
    net, _ = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.02))
    with accelerator.no_sync():
        accelerator.backward(net(torch.randn(4, 8) + accelerator.process_index).square().sum())
    own = accelerator.unwrap_model(net)[0].weight.grad
    return bool(own.equal(accelerator.reduce(own, "mean")))


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
    accelerator = tw.Accelerator(cpu=True)
    return {"is_same": keep_local(accelerator), "search": search(accelerator)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_job(work, 2, tmp_path_factory.mktemp("job"))


def test_no_sync_keeps_gradients_local(ranks: list[dict[str, Any]]) -> None:
    assert [rank["is_same"] for rank in ranks] == [False, False]


def test_the_ranks_agree_on_a_batch_size(ranks: list[dict[str, Any]]) -> None:
    assert [rank["search"]["tried"] for rank in ranks] == [[8, 7, 6, 5]] * 2
    assert [rank["search"]["found"] for rank in ranks] == [5, 5]
    assert "rank 1 ran out of memory with a batch size of 4 (on one rank only)" in ranks[1]["search"]["error"]
