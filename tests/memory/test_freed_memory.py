"""Freed memory stays in the process: a training step on the CPU faults few pages in, unless one variable is set."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, resource, torch, trainwright as tw
ctypes.CDLL(None).mallopt(-3, 1 << 17)  # the initial threshold, which glibc may otherwise raise
class Net(tw.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(800, 800) for _ in range(3)))
    def training_step(self, batch, batch_idx):
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
faults = []
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
tw.Trainer(accelerator="cpu", max_epochs=1, **quiet).fit(Net(), [torch.ones(64, 800)] * 21)
print((faults[-1] - faults[8]) / (len(faults) - 9))
"""


@pytest.mark.launch
@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_a_step_on_the_cpu_makes_few_page_faults() -> None:
    assert faults_of_a_step() < 300 < faults_of_a_step(TRAINWRIGHT_KEEP_FREED_MEMORY="0")


def faults_of_a_step(**variables: str) -> float:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)
