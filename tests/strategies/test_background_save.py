"""An async save writes the same files as a blocking save, even if steps change the weights meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from contract_job import quiet
from jobs import run_job
from small import QUIET, Classifier, make_loader

import trainwright as tw
from trainwright.checkpoint.reader import open_checkpoint

FAST = ("ddp", "fsdp")
SLOW = ("ddp_sharded", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")


class SavesTwice(tw.Callback):
    """Saves the same state in both ways, and goes on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(f"{self.folder}/blocking.ckpt")
            trainer.save_checkpoint(f"{self.folder}/background.ckpt", blocking=False)


def digests(path: str) -> dict[str, str]:
    """Return the digests of all files, and the state without the number of saves."""
    checkpoint = open_checkpoint(path)
    found = {name: record.sha256 for name, record in checkpoint._manifest.files.items()}
    state = checkpoint.run_state()
    del state["position"]["saves"]
    return {**found, "state.json": repr(state)}


def both_ways(folder: Path, strategies: tuple[str, ...] = FAST) -> dict[str, Any]:
    quiet()
    said = {}
    for strategy in strategies:
        place = folder / strategy
        trainer = tw.Trainer(devices=2, strategy=strategy, max_steps=5, callbacks=[SavesTwice(place)], **QUIET)
        trainer.fit(Classifier(dropout=0.2), make_loader())
        said[strategy] = [digests(f"{place}/{name}.ckpt") for name in ("blocking", "background")]
    return said


def the_slow_ones(folder: Path) -> dict[str, Any]:
    return both_ways(folder, SLOW)


@pytest.mark.parametrize("job", [both_ways, pytest.param(the_slow_ones, marks=pytest.mark.slow)])
def test_a_background_save_writes_the_same_files(tmp_path: Path, job: Any) -> None:
    for said in run_job(job, 2, tmp_path):
        for blocking, background in said.values():
            assert background == blocking
            assert {"model-00000.safetensors", "rank-00000.json", "rank-00001.json"} <= background.keys()
