"""Mistakes that only a device shows, made on purpose: the simulated device finds all of them.

A test removes one precaution of the package. The run must then fail or end in other numbers, and not without the mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small import QUIET, Classifier, assert_equal, make_loader, weights
from torch import Tensor

import trainwright as tw
from trainwright.checkpoint import contents
from trainwright.data import seeding, transfer
from trainwright.engine.engine import Engine
from trainwright.trainer import sources, timeline

if not hasattr(torch, "sim"):
    pytest.skip("the simulated device is not loaded; run make test-device", allow_module_level=True)

pytestmark = pytest.mark.device
sim = torch.sim  # type: ignore[attr-defined]
SETTINGS = {**QUIET, "accelerator": "auto", "devices": 1}
Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # The timing of waits for data asks whether the stream is idle, and a host that knows this has waited for its copies.
    monkeypatch.setattr(timeline, "SHORT_SECONDS", float("inf"))
    sim.synchronize()
    sim.clear_violations()
    yield
    sim.set_sync_debug_mode("default")
    sim.synchronize()
    sim.clear_violations()


class Watched(Classifier):
    """From the second batch on the host may not read the device, until the epoch's last batch has been trained on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        sim.set_sync_debug_mode("error" if batch_idx > 0 else "default")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_last_batch:
            sim.set_sync_debug_mode("default")


def train(tmp_path: Path) -> dict[str, Tensor]:
    """Train with copies, waits and random numbers: prefetch from a pinned loader, dropout, a background save, a resume."""
    first = tw.Trainer(max_epochs=1, log_every_n_steps=100, **SETTINGS)
    module = Watched(dropout=0.3)
    try:
        first.fit(module, make_loader(shuffle=True))
    finally:
        sim.set_sync_debug_mode("default")
    first.save_checkpoint(tmp_path / "a.ckpt", blocking=False)
    for parameter in module.parameters():
        parameter.data.zero_()  # as the next step would: the save has its copy by now
    first.engine.finish_save()
    resumed = Watched(dropout=0.3)
    try:
        tw.Trainer(max_epochs=2, log_every_n_steps=100, **SETTINGS).fit(
            resumed, make_loader(shuffle=True), ckpt_path=tmp_path / "a.ckpt"
        )
    finally:
        sim.set_sync_debug_mode("default")
    sim.synchronize()
    return weights(resumed)


def forget_to_move(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sources, "to_device", lambda batch, device: batch)
    patch.setattr(transfer, "to_device", lambda batch, device: batch)
    patch.setattr(transfer.Prefetcher, "__iter__", lambda self: iter(self.batches))


def forget_to_wait_for_a_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transfer.CopyStream, "wait_for", lambda self, mark: None)


def forget_whose_memory_it_is(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transfer.CopyStream, "keep", lambda self, leaf: None)


def forget_to_wait_before_a_save_is_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(contents.torch.accelerator, "synchronize", lambda *_: None)


def use_pinned_memory_again(patch: pytest.MonkeyPatch) -> None:
    pinned = transfer.CopyStream.pin
    memory: list[Tensor] = []

    def pin(self: Any, batch: Any) -> Any:
        found = pinned(self, batch)
        if len(found[0]) == 4:
            if memory:
                memory[0].copy_(found[0])  # while the copy before it may not have been made
                return [memory[0], *found[1:]]
            memory.append(found[0])
        return found

    patch.setattr(transfer.CopyStream, "pin", pin)


def read_the_device_in_each_batch(patch: pytest.MonkeyPatch) -> None:
    backward = Engine.backward

    def reading(self: Engine, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        assert loss.item() > 0
        return backward(self, loss, *args, **kwargs)

    patch.setattr(Engine, "backward", reading)


def make_a_tensor_on_the_host(patch: pytest.MonkeyPatch) -> None:
    convert = Classifier.training_step

    def step(self: Any, batch: Any, index: int) -> Tensor:
        return convert(self, batch, index) * torch.ones(1)

    patch.setattr(Classifier, "training_step", step)


def forget_the_devices_generator(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(seeding, "device_state", lambda: None)
    patch.setattr(seeding, "set_device_state", lambda state: None)


MISTAKES: dict[str, tuple[Patch, str]] = {
    "a batch that is not moved": (forget_to_move, "same device"),
    "no wait for a copy": (forget_to_wait_for_a_copy, "nothing waits for it"),
    "memory that the copying stream takes back": (forget_whose_memory_it_is, "record_stream"),
    "a save that is written before it is copied": (forget_to_wait_before_a_save_is_written, ""),
    "pinned memory used again": (use_pinned_memory_again, ""),
    "a read in each batch": (read_the_device_in_each_batch, "the host waits for the device"),
    "a tensor of the host in the loss": (make_a_tensor_on_the_host, "same device"),
    "a generator that is not restored": (forget_the_devices_generator, ""),
}


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The weights of the run without a mistake."""
    return train(tmp_path_factory.mktemp("right"))


def test_without_a_mistake_nothing_is_found(right: dict[str, Tensor], tmp_path: Path) -> None:
    assert_equal(train(tmp_path), right)
    assert sim.violations() == []


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str, right: dict[str, Tensor], tmp_path: Path) -> None:
    make, text = MISTAKES[name]
    with pytest.MonkeyPatch.context() as patch:
        make(patch)
        caught: BaseException | None = None
        wrong: dict[str, Tensor] = {}
        try:
            wrong = train(tmp_path)
        except Exception as error:  # of whatever kind: the text is looked at
            caught = error
    if caught is None:
        assert any(not torch.equal(wrong[key], right[key]) for key in right), "it went unnoticed"
    assert text == "" or (caught is not None and text in str(caught)), repr(caught)
