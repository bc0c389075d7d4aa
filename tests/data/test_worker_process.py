"""Loader workers that are stuck after a fork, before they run any Python, are killed and forked again."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.context import ForkContext, ForkProcess

import psutil
import pytest
import torch
from small import QUIET, Classifier, make_loader
from torch.utils.data import DataLoader, Dataset

import trainwright as tw
from trainwright.data import worker_process
from trainwright.data.loaders import ShardedLoader
from trainwright.data.worker_process import WorkerContext, WorkerProcess

PARENT = os.getpid()
stuck = torch.zeros(2, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
"""How many of the next forks are stuck, and the process id of the last stuck process."""


def be_stuck() -> None:
    """Stop a forked child forever if its parent asks for it."""
    if stuck[0] > 0:
        stuck[0] -= 1
        stuck[1] = os.getpid()
        while os.getppid() == PARENT:
            time.sleep(0.1)


os.register_at_fork(after_in_child=be_stuck)


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture(autouse=True)
def none_is_stuck_afterwards() -> Iterator[None]:
    yield
    stuck.zero_()


@pytest.mark.parametrize("context", [None, "fork"])
def test_a_stuck_worker_is_forked_again(context: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "WAITS", (1, 60))
    loader = DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context=context)
    shard = ShardedLoader(loader, rank=0, world_size=1, mode="train")
    shard.set_epoch(0, 0)
    stuck[0] = 1
    assert [batch.tolist() for batch in shard] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert stuck[0] == 0
    assert not psutil.pid_exists(int(stuck[1]))
    shard.close()


def test_a_run_reads_on_with_a_worker_that_was_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    def weights() -> list[torch.Tensor]:
        module, data = Classifier(), make_loader().dataset
        tw.Trainer(**QUIET, max_epochs=2).fit(module, DataLoader(data, batch_size=8, num_workers=1))
        return [each.detach().cpu() for each in module.parameters()]

    expected = weights()
    monkeypatch.setattr(worker_process, "WAITS", (1, 60))
    stuck[0] = 1
    found = weights()
    assert stuck[0] == 0
    assert all(map(torch.equal, found, expected))


def test_a_worker_that_never_runs_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "WAITS", (0.1, 0.2))
    stuck[0] = 2
    with pytest.raises(RuntimeError, match=r"within 0\.2 s of its fork, at the last of 2 attempts.*forkserver"):
        tw.Trainer(**QUIET, max_epochs=1).fit(Classifier(), DataLoader(make_loader().dataset, num_workers=1))
    assert not psutil.pid_exists(int(stuck[1]))


class OwnProcess(ForkProcess):
    """A user's process."""


class OwnContext(ForkContext):
    """Starts it."""

    Process = OwnProcess


def test_other_start_methods_and_contexts_are_left_alone() -> None:
    own = OwnContext()
    for given, kind in (("spawn", False), ("forkserver", False), (own, False), ("fork", True), (None, True)):
        loader: DataLoader[int] = DataLoader(Numbers(), num_workers=1, multiprocessing_context=given)
        before = loader.multiprocessing_context
        with worker_process.forked_until_running(loader):
            assert isinstance(loader.multiprocessing_context, WorkerContext) == kind
            assert kind or loader.multiprocessing_context is before
        assert loader.multiprocessing_context is before


def test_a_loader_follows_a_start_method_that_is_set_between_epochs() -> None:
    loader = DataLoader(Numbers(), batch_size=4, num_workers=1)
    shard = ShardedLoader(loader, rank=0, world_size=1, mode="train")
    methods = []
    before = multiprocessing.get_start_method()
    try:
        for epoch, method in enumerate(("fork", "spawn")):
            multiprocessing.set_start_method(method, force=True)
            shard.set_epoch(0, epoch)
            batches = iter(shard)
            methods.append(type(next(iter(shard._with_workers))._workers[0]))
            assert next(batches).tolist() == [0, 1, 2, 3]
            del batches
            shard.close()
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert methods == [WorkerProcess, multiprocessing.Process]
