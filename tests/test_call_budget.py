"""The cost of the framework in a batch, counted: frames, calls, and reads from the device."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from small import QUIET, loss_of, make_loader, make_net
from torch import Tensor

import trainwright as tw
from trainwright.trainer.metrics import MetricCollector

PACKAGE = str(Path(tw.__file__).parent)
MOST_FRAMES, MOST_CALLS, MOST_CALLS_OF_LOG = 6, 28, 3
"""A batch takes at most 6 frames to the optimizer and 28 calls, and 3 more with a log. Five calls cost 0.15 % of a step."""


class Bare(tw.Module):
    def __init__(self, log: bool) -> None:
        super().__init__()
        self.net = make_net()
        self.with_log = log
        self.frames: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = loss_of(self.net, batch)
        if self.with_log:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        frames = self.frames

        def watch(*_: Any) -> None:
            frame, names = sys._getframe(1), []
            while frame is not None and frame.f_code.co_name != "fit":
                if frame.f_code.co_filename.startswith(PACKAGE):
                    names.append(frame.f_code.co_name)
                frame = frame.f_back  # type: ignore[assignment]
            frames[:] = names

        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(watch)
        return optimizer


def count_calls(log: bool) -> tuple[float, list[str]]:
    """Return the package's function calls a batch, and its frames below the optimizer's step."""
    calls: list[int] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        name, path = frame.f_code.co_name, frame.f_code.co_filename
        # The hooks that bf16-mixed registers with every optimizer stay after a test that used it.
        if event == "call" and path.startswith(PACKAGE) and not path.endswith("mixed.py"):
            if name == "train_batch":
                calls.append(0)
            if calls:
                calls[-1] += 1

    module = Bare(log)
    sys.setprofile(profile)
    try:
        tw.Trainer(max_epochs=1, **QUIET).fit(module, make_loader())
    finally:
        sys.setprofile(None)
    return float(sorted(calls[2:-1])[len(calls[2:-1]) // 2]), module.frames


def test_a_batch_keeps_its_budget_of_frames_and_calls() -> None:
    calls, frames = count_calls(log=False)
    assert frames[-1] == "fit_epoch"
    assert len(frames) <= MOST_FRAMES, frames
    assert calls <= MOST_CALLS
    with_log, _ = count_calls(log=True)
    assert with_log - calls <= MOST_CALLS_OF_LOG


def test_a_batch_reads_nothing_from_the_device(monkeypatch: Any) -> None:
    """On a device a read waits for the queue. The meta device cannot be read at all, so a tensor of it shows a read."""
    read: list[str] = []
    for name in ("item", "tolist", "numpy", "cpu", "__float__", "__bool__"):
        inner = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda self, *a, n=name, f=inner: (read.append(n), f(self, *a))[1])
    collector = MetricCollector(torch.nn.Module())
    collector.batch, collector.hook = torch.zeros(4), "training_step"
    for _ in range(200):
        value = torch.zeros((), device="meta")
        collector.log("x", value, (False, True, True, True, "mean", False, False, None, True, None, False))
    assert read == []
