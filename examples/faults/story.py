"""The model, the data and the endings of the programs in this folder."""

import shutil
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import trainwright as tw

FOLDER = Path("runs/faults", Path(sys.argv[0]).stem)
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "enable_report": False}
SETTINGS = {"accelerator": "cpu", "log_every_n_steps": 1, **QUIET}


class Classifier(tw.Module):
    def __init__(self, dropout: float = 0.1):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 2))

    def training_step(self, batch, batch_idx):
        inputs, labels, _ = batch
        loss = nn.functional.cross_entropy(self.net(inputs), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def samples(count: int) -> TensorDataset:
    """Return (input, label, number of the sample) for every sample."""
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long(), torch.arange(count))


def start(*arguments: object) -> subprocess.CompletedProcess:
    """Start this program with arguments, as in a shell, and return its output."""
    return subprocess.run([sys.executable, sys.argv[0], *map(str, arguments)], capture_output=True, text=True)


def empty_folder() -> Path:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    return FOLDER


def end(is_kept: bool, promise: str):
    """Print whether the promise of the program was kept, and exit with 0 or 1."""
    print("ok:" if is_kept else "broken:", promise)
    sys.exit(0 if is_kept else 1)
