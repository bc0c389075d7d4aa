"""A signal to one of two ranks: both leave at the same place, whatever the other is doing, and go on from there."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deadlines import deadline
from jobs import run_job
from small import SAVING, Classifier, assert_equal, make_loader
from torch import Tensor

import trainwright as tw
from trainwright.checkpoint.discovery import find_checkpoints
from trainwright.distributed import connection
from trainwright.distributed.failures import PeerWatch

WATCHES = functools.partial(PeerWatch, poll_seconds=0.02)
"""Ten times as often as usual, so that the pauses may be short."""


class Net(Classifier):
    """Rank 1 is slow from its third batch on while `pause` is set, so that rank 0 waits for it in a collective."""

    pause = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 1 and self.pause and batch_idx >= 2:
            time.sleep(deadline(self.pause))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(deadline(0.005) if self.pause else 0.0)
        super().validation_step(batch, batch_idx)
        torch.rand(2)


class Sender(tw.Callback):
    """Has one rank signal itself: in its third validation batch, or within a collective of its third training batch."""

    def __init__(self, rank: int, place: str) -> None:
        self.rank, self.place = rank, place
        self.validated = 0

    def signal(self, seconds: float) -> None:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM)).start()

    def on_train_batch_start(self, trainer: tw.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if (
            self.place == "training"
            and trainer.global_rank == self.rank
            and batch_idx == 2
            and not trainer.current_epoch
        ):
            self.signal(0.05)  # by then it waits for the other rank

    def on_validation_batch_start(self, trainer: tw.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        is_here = trainer.current_epoch == 1 and batch_idx == 2
        if self.place == "validation" and trainer.global_rank == self.rank and is_here:
            self.signal(0.0)

    def on_validation_batch_end(self, *_: Any) -> None:
        self.validated += 1


def fit(folder: Path, strategy: Any, sender: Sender | None = None, path: str | None = None) -> tuple[Any, Any, Any]:
    torch.manual_seed(5)
    module, code = Net(dropout=0.3), None
    Net.pause = 0.0 if sender is None else 0.1 if sender.place == "training" else 0.001
    settings = {**SAVING, "num_sanity_val_steps": 1, "max_epochs": 2, "devices": 2}
    saver = tw.ModelCheckpoint(dirpath=folder, save_top_k=-1)
    trainer = tw.Trainer(strategy=strategy, callbacks=[saver, *([sender] if sender else [])], **settings)
    try:
        trainer.fit(module, make_loader(shuffle=True), make_loader(240), ckpt_path=path)
    except tw.RunStopped as stopped:
        code = stopped.code
    return module, trainer, code


def job(folder: Path) -> Any:
    results = {}
    mock.patch.object(connection, "PeerWatch", WATCHES).start()
    for strategy in ("ddp", "fsdp"):
        whole, trainer, _ = fit(folder / strategy / "whole", strategy)
        end = trainer.engine.strategy.model_pieces(whole)
        for place, rank in (("training", 0), ("validation", 1)):
            own = folder / strategy / place
            sender = Sender(rank, place)
            began = time.monotonic()
            _, stopped, code = fit(own, strategy, sender)
            seconds = time.monotonic() - began
            stops = [each.path for each in find_checkpoints(str(own)) if "/stop-" in each.path]
            at = (stopped.current_epoch, stopped.state.batch, stopped.global_step)
            module, resumed, again = fit(own, strategy, None, stops[0] if len(stops) == 1 else "no stop")
            results[strategy, place] = {
                "code": code,
                "at": at,
                "stops": len(stops),
                "validated": sender.validated,
                "seconds": seconds,
                "again": again,
                # The stop made one more save.
                "position": {**resumed.state.state_dict(), "saves": 0} == {**trainer.state.state_dict(), "saves": 0},
                "weights": {each.name: each.tensor.clone() for each in resumed.engine.strategy.model_pieces(module)},
                "expected": {each.name: each.tensor.clone() for each in end},
            }
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_job(job, 2, tmp_path_factory.mktemp("job"))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("place", ["training", "validation"])
def test_both_ranks_leave_alike_and_go_on_bitwise(results: Any, strategy: str, place: str) -> None:
    ours = [result[strategy, place] for result in results]
    for each in ours:
        assert each["code"] == 75
        assert each["stops"] == 1
        assert each["again"] is None
        assert each["position"]
        assert_equal(each["weights"], each["expected"])
    assert ours[0]["at"] == ours[1]["at"]
    epoch, batch, step = ours[0]["at"]
    if place == "training":
        assert epoch == 0
        assert 3 <= batch <= 5  # the batch at hand, and at most two more until both know
    else:
        assert (epoch, step) == (1, 12)
        for each in ours:  # of 30: one of the sanity check, and the whole first validation
            assert 31 < each["validated"] < 61
