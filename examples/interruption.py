"""Press Ctrl-C in a training on purpose, start the same command again, and compare with a run that nothing interrupted.

python examples/interruption.py
python examples/interruption.py --folder runs/mine --pause 0.1     # one run: press Ctrl-C yourself, and start it again
"""

import argparse
import csv
import os
import shutil
import signal
import subprocess
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw


class Spiral(tw.Module):
    """Tells two spiral arms apart; it draws random numbers in each step, for the dropout and for noise."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 2))

    def training_step(self, batch, batch_idx):
        points, labels = batch
        loss = nn.functional.cross_entropy(self.net(points + 0.02 * torch.randn_like(points)), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Interruption(tw.Callback):
    """Sends this process what Ctrl-C sends, after a step; and waits after each step, for readers who would rather do it."""

    def __init__(self, step: int, pause: float):
        self.step, self.pause = step, pause

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        time.sleep(self.pause)
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def train(root: str, step: int, pause: float):
    tw.seed_everything(0)
    labels = torch.arange(1600) % 2
    radius = torch.rand(1600)
    angle = 6 * radius + torch.pi * labels
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    loader = DataLoader(TensorDataset(points, labels), 32, shuffle=True)
    callback = Interruption(step, pause)
    trainer = tw.Trainer(max_epochs=4, callbacks=[callback], log_every_n_steps=1, default_root_dir=root)
    trainer.fit(Spiral(), loader, ckpt_path="auto")


def start(*arguments: str):
    """Run this program with arguments, as in a shell, and print the command and how it ended."""
    print("$ python examples/interruption.py", *arguments, flush=True)
    code = subprocess.run([sys.executable, __file__, *arguments]).returncode
    print(f"it ended with exit code {code}\n", flush=True)


def losses(folder: str):
    with open(f"{folder}/trainwright_logs/version_0/metrics.csv", newline="") as file:
        return {int(row["step"]): row["loss"] for row in csv.DictReader(file) if row["loss"]}


def main():
    parser = argparse.ArgumentParser(description="Interrupt a training, and resume it.")
    parser.add_argument("--folder", help="train once, in this folder")
    parser.add_argument("--interrupt-after", type=int, default=0, metavar="STEPS")
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="wait so long after each step")
    options = parser.parse_args()
    if options.folder:
        return train(options.folder, options.interrupt_after, options.pause)

    whole, cut = "runs/interruption/whole", "runs/interruption/cut"
    shutil.rmtree("runs/interruption", ignore_errors=True)
    train(whole, step=0, pause=0)
    start("--folder", cut, "--interrupt-after", "70")  # within the second epoch, of 50 batches
    stopped = max(losses(cut))
    start("--folder", cut)
    expected, found = losses(whole), losses(cut)
    print(f"{'step':>5}  {'uninterrupted':<20}  interrupted and resumed")
    for step in range(stopped - 2, stopped + 4):
        print(f"{step:>5}  {expected[step]:<20}  {found[step]}{'   resumed here' if step == stopped + 1 else ''}")
    print(f"losses that differ: {sum(expected[step] != found.get(step) for step in expected)} of {len(expected)}")


if __name__ == "__main__":
    main()
