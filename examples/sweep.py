"""Try several learning rates on the digits of digits.py, print them in a table, the best first, and draw their curves.

python examples/sweep.py
python examples/sweep.py --rates 0.001 0.003 0.01 --epochs 10
"""

import argparse
import subprocess
import sys

import torch
from digits import load_splits, make_net
from torch import nn
from torch.utils.data import DataLoader

import trainwright as tw


class Digits(tw.Module):
    def __init__(self, lr: float):
        super().__init__()
        self.save_hyperparameters()
        self.net = make_net()

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]))
        self.log("val_acc", (logits.argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


def train(lr: float, epochs: int):
    """Train with a learning rate, and return the metrics of the last validation."""
    tw.seed_everything(0)  # the same weights and the same order of the data for each
    trainer = tw.Trainer(
        max_epochs=epochs,
        logger=tw.CSVLogger("runs", name="sweep", version=f"lr={lr:g}"),
        log_every_n_steps=5,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    train_set, val_set, _ = load_splits()
    trainer.fit(Digits(lr), DataLoader(train_set, 32, shuffle=True), DataLoader(val_set, 64))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def main():
    parser = argparse.ArgumentParser(description="Try several learning rates.")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 1e-3, 1e-2, 1e-1, 1.0])
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()

    results = {lr: train(lr, options.epochs) for lr in options.rates}
    ranked = sorted(results, key=lambda lr: results[lr]["val_loss"])
    folders = [f"runs/sweep/lr={lr:g}" for lr in ranked]

    print(f"\n{'lr':>8} {'val_loss':>9} {'val_acc':>8}  run")
    for lr, folder in zip(ranked, folders, strict=True):
        print(f"{lr:>8g} {results[lr]['val_loss']:>9.4f} {results[lr]['val_acc']:>8.4f}  {folder}")
    plot = ["plot", *folders, "--metrics", "train_loss,val_loss,val_acc", "--out", "runs/sweep/curves.html"]
    subprocess.run([sys.executable, "-m", "trainwright", *plot], check=True)
    print(f"best learning rate: {ranked[0]:g}")


if __name__ == "__main__":
    main()
