"""Between two log points the host does not wait for the device: it only gives it work."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from itertools import pairwise
from typing import Any

import pytest
import torch
from by_hand import DTYPES, ON_DEVICE
from small import Classifier, make_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader

import trainwright as tw
from trainwright.devices.abilities import autocasts

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]

Refusing = Callable[[], AbstractContextManager[None]]
FIRST, LAST = 2, 18
"""The batches between which nothing may be read. Before them kernels are loaded and memory is allocated."""

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "norm": {"gradient_clip_val": 0.1},
    "value": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    "accumulation": {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1},
    "unfused": {"fused_optimizers": False},
}


class Reads(tw.Callback):
    """Refuses every read of the device by the host, from the start of one batch to the end of another."""

    def __init__(self, refusing: Refusing) -> None:
        self.refusing, self.open = refusing, ExitStack()
        self.batches = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == FIRST:
            self.open.enter_context(self.refusing())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += FIRST <= batch_idx <= LAST
        if batch_idx == LAST:
            self.open.close()


def fit(module: tw.Module, reads: Reads, loader: Any, val: Any = None, **settings: Any) -> None:
    try:
        trainer = tw.Trainer(**{"max_epochs": 1, "log_every_n_steps": 1000, **ON_DEVICE, **settings}, callbacks=[reads])
        trainer.fit(module, loader, val)
    finally:
        reads.open.close()


class Logging(Classifier):
    """Logs tensors and numbers, per step and per epoch, with all reductions."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"worst": loss, "best": -loss}, reduce_fx="max", on_step=False, on_epoch=True)
        self.log("count", len(batch[0]), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("bar", loss.detach(), prog_bar=True, batch_size=len(batch[0]))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_read_between_log_points(device: torch.device, refusing_reads: Refusing, name: str) -> None:
    settings = CASES[name]
    precision = settings.get("precision")
    if precision is not None and not autocasts(device.type, DTYPES[precision]):
        pytest.skip(f"{device.type} has no autocast in {DTYPES[precision]}")
    reads = Reads(refusing_reads)
    fit(Logging(dropout=0.2), reads, make_loader(84), max_epochs=2, **settings)
    assert reads.batches == 2 * (LAST - FIRST + 1)


def test_the_check_finds_a_read(refusing_reads: Refusing) -> None:
    class Looks(Logging):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == FIRST + 1:
                loss.item()
            return loss

    reads = Reads(refusing_reads)
    with pytest.raises(RuntimeError):
        fit(Looks(), reads, make_loader(84))
    assert reads.batches == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_copied_without_waiting(refusing_reads: Refusing, num_workers: int) -> None:
    reads = Reads(refusing_reads)
    fit(Logging(), reads, make_loader(84, num_workers=num_workers))
    assert reads.batches == LAST - FIRST + 1


def test_a_validation_reads_nothing_batch_by_batch(refusing_reads: Refusing) -> None:
    reads = _ValidationReads(refusing_reads)
    fit(Logging(), reads, make_loader(8), make_loader(84))
    assert reads.batches == LAST - FIRST + 1


class _ValidationReads(Reads):
    def on_validation_batch_start(self, *args: Any) -> None:
        self.on_train_batch_start(*args[:4])

    def on_validation_batch_end(self, *args: Any) -> None:
        self.on_train_batch_end(*args[:5])


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_loop_of_ones_own_reads_nothing(refusing_reads: Refusing, accumulate: int) -> None:
    accelerator = tw.Accelerator(devices=1, gradient_accumulation_steps=accumulate)
    module = Classifier()
    data = DataLoader(make_loader(84).dataset, batch_size=4, pin_memory=True)
    model, optimizer, loader = accelerator.prepare(
        module.net, torch.optim.AdamW(module.net.parameters(), fused=True), data
    )
    total = torch.zeros((), device=accelerator.device)
    with ExitStack() as stack:
        for index, batch in enumerate(loader):
            if index == FIRST:
                stack.enter_context(refusing_reads())
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach()
            if index == LAST:
                stack.close()
    assert float(total) > 0


def test_a_loss_scale_is_read_once_a_step(device: torch.device) -> None:
    """The host has to know whether to step. Nothing else under 16-mixed has to wait."""
    module: Any = torch.get_device_module(device)
    if not hasattr(module, "counts"):
        pytest.skip(f"{device.type} does not count the host's reads")
    counts: list[int] = []

    class Counts(tw.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            counts.append(module.counts()[2])

    trainer = tw.Trainer(max_epochs=1, precision="16-mixed", log_every_n_steps=1000, callbacks=[Counts()], **ON_DEVICE)
    trainer.fit(Logging(), make_loader(84))
    assert {after - before for before, after in pairwise(counts[2:])} == {1}


class Waits(Logging):
    """Waits for the device at two of its lines."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 2:
            loss.item()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs["loss"] > 1e6:
            raise AssertionError


def test_detect_syncs_names_the_lines_that_wait(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    module: Any = torch.get_device_module(device)
    if not hasattr(module, "set_sync_debug_mode"):
        pytest.skip(f"{device.type} does not report that the host waits for it")
    show = warnings.showwarning
    trainer = tw.Trainer(max_epochs=2, log_every_n_steps=1000, detect_syncs=True, **ON_DEVICE)
    trainer.fit(Waits(), make_loader(40))
    first = {name: getattr(Waits, name).__code__.co_firstlineno for name in ("training_step", "on_train_batch_end")}
    item = f"{__file__}:{first['training_step'] + 3} in training_step"
    compare = f"{__file__}:{first['on_train_batch_end'] + 1} in on_train_batch_end"
    lines = [line for line in capsys.readouterr().out.splitlines() if "detect_syncs" in line or line.startswith("  /")]
    assert lines[:2] == [f"detect_syncs: the host waits for the device at {place}" for place in (compare, item)]
    assert re.match(
        r"detect_syncs: the host waited for the device at 2 line\(s\) outside of trainwright; trainwright waited",
        lines[2],
    )
    assert lines[3:] == [f"  {compare}: 20 times", f"  {item}: 10 times"]
    assert module.get_sync_debug_mode() == 0
    assert warnings.showwarning is show
