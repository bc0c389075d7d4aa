"""A call that only one rank makes raises an error that names the calls of both ranks, and never hangs."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from deadlines import deadline
from jobs import run_job
from small import QUIET, Classifier, make_loader
from started import Started

import trainwright as tw

MET = ["on_validation_end", "on_train_start", "on_train_epoch_start"]
"""Hooks after which the other rank comes to another call over the store."""


def save_alone(hook: str, path: str) -> tw.LambdaCallback:
    def save(trainer: tw.Trainer, *_: Any) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            trainer.save_checkpoint(path)

    return tw.LambdaCallback(**{hook: save})


def fit(callback: tw.Callback) -> None:
    trainer = tw.Trainer(max_epochs=1, val_check_interval=2, callbacks=[callback], devices=2, **QUIET)
    trainer.fit(Classifier(), make_loader(16), make_loader(8))


def meet(folder: Path) -> dict[str, str]:
    said = {}
    for hook in MET:
        try:
            fit(save_alone(hook, str(folder / f"{hook}.ckpt")))
        except RuntimeError as error:
            said[hook] = str(error)
    return said


def test_ranks_that_meet_in_different_calls_all_raise(tmp_path: Path) -> None:
    results = run_job(meet, 2, tmp_path)
    assert results[0] == results[1]
    for hook in MET:
        text = results[0][hook]
        assert text.startswith("the ranks have met in different calls: rank 0 in a save of step "), text
        assert ", rank 1 in " in text
        assert not (tmp_path / f"{hook}.ckpt").exists()


def leave_alone(trainer: tw.Trainer, module: tw.Module, batch: Any, batch_idx: int) -> int | None:
    return -1 if trainer.global_rank == 1 and batch_idx == 1 else None


ALONE = {
    "save": (
        "on_train_batch_end",
        "a save of step 1 (fit, epoch 0, batch 1, on_train_batch_end). Rank 1 is already past it",
    ),
    "leave": ("on_train_batch_start", "the end of an epoch by -1 from on_train_batch_start (fit, epoch 0, batch 1"),
}
"""Cases in which the other rank waits in a collective of the training: the hook, and the message."""


@pytest.mark.slow
@pytest.mark.parametrize("case", ALONE)
def test_a_rank_that_is_waited_for_in_vain_is_named(tmp_path: Path, case: str) -> None:
    started = Started(
        [sys.executable, "-m", "trainwright.launch.processes", '{"num_processes": 2}', sys.executable, __file__, case],
        tmp_path,
    )
    began = time.monotonic()
    try:
        assert started.wait() == 1
        started.check_nothing_left()
    finally:
        started.close()
    assert ALONE[case][1] in started.stderr, started.stderr
    assert time.monotonic() - began < deadline(90.0)  # the limit of the collective is half an hour


if __name__ == "__main__":
    name = sys.argv[1]
    hook = ALONE[name][0]
    if name == "leave":
        fit(tw.LambdaCallback(on_train_batch_start=leave_alone))
    else:
        fit(save_alone(hook, "a.ckpt"))
