"""A run takes no more memory than by hand plus one batch, and a process works on after a run out of memory."""

from __future__ import annotations

import gc
import pickle
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import ON_DEVICE, adamw
from small import Classifier, assert_close, make_loader, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import trainwright as tw
from trainwright.data.transfer import to_device
from trainwright.memory.activation_checkpointing import ActivationCheckpointing

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_memory")]

WIDTH, ROWS, BATCHES = 512, 512, 6
BATCH_BYTES = ROWS * WIDTH * 4
SLACK = 256 << 10
"""Losses, metrics and the allocator's rounding."""


class Random(Dataset[Tensor]):
    def __len__(self) -> int:
        return ROWS * BATCHES

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((WIDTH,), float(index % 7))


def make_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


class Wide(tw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_layers()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def loader() -> DataLoader[Tensor]:
    return DataLoader(Random(), batch_size=ROWS)


def by_hand(device: torch.device, precision: str, accumulate: int) -> None:
    net = make_layers().to(device)
    optimizer = adamw(net)
    dtype = {"bf16-mixed": torch.bfloat16}.get(precision)
    for _ in range(2):
        for index, batch in enumerate(loader()):
            batch = batch.to(device)
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                loss = net(batch).square().mean() / accumulate
            loss.backward()
            if (index + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()


def peak(run: Callable[[], Any]) -> int:
    """Return how many bytes of the device a run takes at most."""
    for _ in range(2):  # at first libraries take their workspaces
        gc.collect()
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        run()
        torch.accelerator.synchronize()
        taken = torch.accelerator.max_memory_allocated() - before
        gc.collect()
    return int(taken)


@pytest.mark.parametrize(("precision", "accumulate"), [("32-true", 1), ("32-true", 2), ("bf16-mixed", 1)])
def test_a_run_takes_what_the_loop_by_hand_takes_and_one_batch(
    device: torch.device, precision: str, accumulate: int
) -> None:
    def run() -> None:
        settings = {"precision": precision, "accumulate_grad_batches": accumulate, "max_epochs": 2}
        tw.Trainer(**settings, **ON_DEVICE).fit(Wide(), loader())

    allowed = peak(lambda: by_hand(device, precision, accumulate)) + BATCH_BYTES + SLACK
    assert peak(run) <= allowed


def test_evaluation_keeps_no_graphs(device: torch.device) -> None:
    def run() -> None:
        tw.Trainer(**ON_DEVICE).validate(Wide(), loader(), verbose=False)

    def plain() -> None:
        net = make_layers().to(device)
        with torch.no_grad():
            for batch in loader():
                net(to_device(batch, device)).square().mean()

    assert peak(run) <= peak(plain) + BATCH_BYTES + SLACK


def test_a_save_takes_no_memory_of_the_device(device: torch.device, tmp_path: Any) -> None:
    module = Wide()
    trainer = tw.Trainer(max_epochs=1, **ON_DEVICE)
    trainer.fit(module, loader())
    saves = iter(range(9))

    def save() -> None:
        trainer.save_checkpoint(str(tmp_path / f"{next(saves)}.ckpt"))

    assert peak(save) <= SLACK


class Greedy(Classifier):
    """Asks for more than there is in one of its steps."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == self.step:
            free, _ = torch.get_device_module(self.device).mem_get_info()
            kept = [torch.ones(free // 8, device=self.device) for _ in range(64)]  # half of it per device
            loss = loss + sum(each.sum() for each in kept)
        return loss


@pytest.mark.parametrize("step", [0, 3])
def test_a_run_out_of_memory_says_so_and_the_process_goes_on(device: torch.device, step: int) -> None:
    module = torch.get_device_module(device)
    if hasattr(module, "set_memory_limit"):  # the simulated device has no separate one
        module.set_memory_limit(64 << 20)
    try:
        expected, _ = Classifier(), tw.Trainer(max_epochs=1, **ON_DEVICE)
        tw.Trainer(max_epochs=1, **ON_DEVICE).fit(expected, make_loader())
        gc.collect()
        before = torch.accelerator.memory_allocated()

        def fail() -> None:
            greedy = Greedy(step)
            with pytest.raises(torch.OutOfMemoryError) as failed:
                tw.Trainer(max_epochs=1, **ON_DEVICE).fit(greedy, make_loader())
            (note,) = [note for note in failed.value.__notes__ if note.startswith("Out of memory on rank 0")]
            assert "which stored: parameters " in note
            assert re.search(
                r"The peak was [\d.]+ \wiB: activations, batches and workspace used up to [\d.]+ \wiB", note
            )

        fail()
        gc.collect()
        assert torch.accelerator.memory_allocated() - before < 1 << 20
        after = Classifier()
        tw.Trainer(max_epochs=1, **ON_DEVICE).fit(after, make_loader())
        assert_close(weights(after), weights(expected), 1e-6)
    finally:
        if hasattr(module, "set_memory_limit"):
            module.set_memory_limit(1 << 62)


@pytest.mark.parametrize("when", ["on_oom", 2])
def test_a_snapshot_of_the_memory_is_written(cuda: torch.device, tmp_path: Path, when: str | int) -> None:
    settings: dict[str, Any] = {**ON_DEVICE, "max_epochs": 1, "default_root_dir": tmp_path, "memory_snapshot": when}
    if when == 2:
        tw.Trainer(**settings).fit(Classifier(), make_loader())
    else:
        with pytest.raises(torch.OutOfMemoryError):
            tw.Trainer(**settings).fit(Greedy(3), make_loader())
    snapshot = pickle.loads((tmp_path / "memory-rank0.pickle").read_bytes())  # as memory_viz reads it
    traces = [event for events in snapshot["device_traces"] for event in events]
    assert any(frame["name"] == "training_step" for event in traces for frame in event.get("frames", []))
    assert any(event["action"] == "oom" for event in traces) == (when == "on_oom")


def test_offload_keeps_the_inputs_of_blocks_on_the_host() -> None:
    device = torch.accelerator.current_accelerator()
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))).to(device)
    checkpointing = ActivationCheckpointing.read({"offload": True})
    checkpointing.install(blocks, device.type)
    inputs: list[Any] = []
    blocks[1].register_forward_pre_hook(lambda _, arguments: inputs.append(weakref.ref(arguments[0])))
    loss = blocks(torch.ones(2, 8, device=device)).sum()
    gc.collect()
    assert inputs[0]() is None
    loss.backward()
    assert all(parameter.grad is not None for parameter in blocks.parameters())
