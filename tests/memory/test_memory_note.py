"""The note on an error of too little memory, after allocations that really fail."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET, Classifier, make_loader
from torch import Tensor, nn

import trainwright as tw

pytestmark = pytest.mark.host  # the errors are of the CPU's allocator

WIDTH = 200


class Greedy(Classifier):
    """Asks for more memory than any machine has, in the batch with this number."""

    def __init__(self, batch: int = 1) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3, bias=False))
        self.register_buffer("scale", torch.ones(16))
        self.batch = batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == self.batch:
            torch.empty(1 << 60, dtype=torch.uint8)
        return loss


def note_of(settings: dict[str, Any]) -> str:
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate memory") as failed:
        tw.Trainer(**{**QUIET, "max_epochs": 1, **settings}).fit(Greedy(), make_loader(32))
    (note,) = [note for note in failed.value.__notes__ if note.startswith("Out of memory")]
    return note


def test_note_shows_stored_bytes_and_arguments_that_need_less() -> None:
    lines = note_of({}).splitlines()
    bytes_of = 4 * (8 * WIDTH + WIDTH + 3 * WIDTH)
    assert lines[0] == (
        f"Out of memory on rank 0 (cpu), which stored: parameters {bytes_of / 1024:.1f} KiB, gradients 0 bytes, optimizer "
        f"state {(2 * bytes_of + 12) / 1024:.1f} KiB, buffers 64 bytes. The largest tensors in the failed call: "
        + lines[0].split("failed call: ")[1]
    )
    assert re.search(r"call: 4 bytes \[\] loss in training_step \(test_memory_note.py:\d+\)", lines[0])
    text = "\n".join(lines[2:])
    assert "batch_size=2 instead of 4 in the loader, with accumulate_grad_batches=2" in text
    assert "activation_checkpointing" not in text  # there are no repeated blocks
    assert 'precision="bf16-mixed"' in text
    assert 'precision="bf16-true": from 37.6 KiB to 18.8 KiB' in text
    assert re.search(r'num_nodes=2, strategy="\w+": from 37\.6 KiB to [\d.]+ KiB on each machine', text)


def test_note_advises_no_smaller_batch_than_one_and_no_half_precision_twice() -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory") as failed:
        tw.Trainer(**QUIET, max_epochs=1, precision="bf16-true").fit(Greedy(), make_loader(4, batch_size=1))
    (note,) = [note for note in failed.value.__notes__ if note.startswith("Out of memory")]
    assert "batch_size" not in note
    assert "precision=" not in note


def test_other_errors_have_no_note() -> None:
    class Fails(Greedy):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise RuntimeError("not of memory")

    with pytest.raises(RuntimeError, match="not of memory") as failed:
        tw.Trainer(**QUIET, max_epochs=1).fit(Fails(), make_loader())
    assert not [note for note in getattr(failed.value, "__notes__", []) if "Out of memory" in note]


def on_ranks(folder: Path) -> list[str]:
    return [note_of({"strategy": name, "devices": 2}) for name in ("ddp", "ddp_sharded", "fsdp")]


def kib(part: str, note: str) -> float:
    found = re.search(rf"{part} ([\d.]+) KiB", note)
    assert found, note
    return float(found[1])


def test_every_rank_names_its_share(tmp_path: Path) -> None:
    results = run_job(on_ranks, 2, tmp_path)
    for rank, notes in enumerate(results):
        assert all(f"Out of memory on rank {rank} (cpu)" in note and "devices=" not in note for note in notes)
        assert (kib("parameters", notes[0]), kib("optimizer state", notes[0])) == (9.4, 18.8)
    for number, parts in ((1, {"optimizer state": 18.8}), (2, {"parameters": 9.4, "optimizer state": 18.8})):
        for part, whole in parts.items():
            shares = [kib(part, notes[number]) for notes in results]
            assert sum(shares) == pytest.approx(whole, abs=0.2)
            assert max(shares) < whole
