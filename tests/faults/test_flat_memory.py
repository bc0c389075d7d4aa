"""Long runs and many runs in one process keep their memory, threads and descriptors."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from fault_rows import record_row
from started import Started, python
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw

pytestmark = pytest.mark.faults

STEPS, FITS = int(os.environ.get("TRAINWRIGHT_TEST_STEPS", "30000")), int(os.environ.get("TRAINWRIGHT_TEST_FITS", "40"))
IDLE_SECONDS = 6.0
"""Writing threads of loggers end after 5 s without work."""
MOST_KIB = 8 * 1024
"""The growth of resident memory that is allowed for the allocator, in either half."""


class Tiny(tw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def usage() -> tuple[int, int, int]:
    """Return KiB of resident memory, threads and descriptors of this process."""
    gc.collect()
    process = psutil.Process()
    return process.memory_info().rss >> 10, process.num_threads(), process.num_fds()


def fit(steps: int, **options: object) -> None:
    loader = DataLoader(TensorDataset(torch.randn(2000, 4)), batch_size=1)
    options = {"enable_progress_bar": False, "enable_model_summary": False, "enable_report": False, **options}
    tw.Trainer(max_epochs=-1, max_steps=steps, logger=tw.CSVLogger("."), **options).fit(Tiny(), loader)  # type: ignore[arg-type]


def run_long(steps: int, fits: int) -> None:
    """Print the growth over one long fit, and over many short ones, after a shorter part as warm-up."""
    torch.set_num_threads(1)
    for warm_up, work in (((steps // 5,), (steps,)), ([20] * (fits // 5), [20] * fits)):
        usages = []
        for part in (warm_up, work):
            for number in part:
                fit(number)
            time.sleep(IDLE_SECONDS)
            usages.append(usage())
        print("growth", *(late - early for early, late in zip(*usages, strict=True)))


def test_long_run_and_many_runs_keep_memory_threads_and_descriptors(tmp_path: Path) -> None:
    began = time.monotonic()
    done = Started(python("-W", "error", __file__, str(STEPS), str(FITS)), tmp_path)
    assert done.wait(900) == 0, done.stderr
    growths = [tuple(map(int, line.split()[1:])) for line in done.stdout.splitlines() if line.startswith("growth")]
    assert len(growths) == 2
    for kib, threads, descriptors in growths:
        assert (threads, descriptors) == (0, 0), growths
        assert kib < MOST_KIB, growths
    text = f"resident memory grew by {growths[0][0]} and {growths[1][0]} KiB, threads and descriptors by none"
    record_row(f"{STEPS:,} steps, then {FITS} fits in one process", time.monotonic() - began, text, "nothing")


if __name__ == "__main__":
    run_long(int(sys.argv[1]), int(sys.argv[2]))
