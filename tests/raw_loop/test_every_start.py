"""The README's loop under every way to start it: python, trainwright launch with each strategy, torchrun, notebook_launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deadlines import deadline
from safetensors.torch import load_file
from small import ON_HOST
from started import ROOT

pytestmark = [
    pytest.mark.launch,
    pytest.mark.slow,
    pytest.mark.skipif(not ON_HOST, reason="starts processes on the CPU"),
]
SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainwright import Accelerator, notebook_launcher


def train(path):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = TensorDataset(torch.randn(24, 4), torch.randint(0, 3, (24,)))
    loader = DataLoader(data, batch_size=4 // accelerator.num_processes)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.save_model(model, path)
    accelerator.print(accelerator.num_processes, accelerator.distributed_type)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        notebook_launcher(train, (sys.argv[1],), num_processes=2)
    else:
        train(sys.argv[1])
"""
LAUNCH = ["-m", "trainwright", "launch", "--cpu", "--devices", "2"]
STARTS = {
    "python": ([], [], "1 NO"),
    "ddp": (LAUNCH, [], "2 MULTI_CPU"),
    "ddp_sharded": ([*LAUNCH, "--strategy", "ddp_sharded"], [], "2 MULTI_CPU"),
    "fsdp": ([*LAUNCH, "--strategy", "fsdp"], [], "2 FSDP"),
    "deepspeed_stage_2": ([*LAUNCH, "--strategy", "deepspeed_stage_2"], [], "2 DEEPSPEED"),
    "deepspeed_stage_3": ([*LAUNCH, "--strategy", "deepspeed_stage_3"], [], "2 DEEPSPEED"),
    "torchrun": (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], [], "2 MULTI_CPU"),
    "notebook_launcher": ([], ["notebook"], "2 MULTI_CPU"),
}


def test_weights_are_those_of_one_process(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    saved = {}
    for name, (launcher, more, printed) in STARTS.items():
        command = [sys.executable, *launcher, str(script), str(tmp_path / name), *more]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=deadline(120), env=variables, check=False
        )
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
        assert printed in done.stdout, f"{name}: {done.stdout}"
        saved[name] = load_file(tmp_path / name / "model.safetensors")
    for name, weights in saved.items():
        torch.testing.assert_close(weights, saved["python"], msg=lambda text, name=name: f"{name}: {text}")
