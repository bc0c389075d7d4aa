"""Train a small convolutional net on scikit-learn's digits: 1,797 images of 8 x 8 pixels that come with the package.

    python examples/digits.py
    python examples/digits.py --devices 2 --precision bf16-mixed

The logs, the best checkpoint and a picture of the run are written to runs/.
"""

import argparse
import csv

import torch
import torchmetrics
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw


def load_splits():
    """Return the training, validation and test sets: 70, 15 and 15 % of the images, the same in every run."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    labels = torch.tensor(labels)
    rest, test = train_test_split(range(len(labels)), test_size=0.15, stratify=labels, random_state=0)
    train, val = train_test_split(rest, test_size=0.15 / 0.85, stratify=labels[rest], random_state=0)
    return [TensorDataset(images[part], labels[part]) for part in (train, val, test)]


def make_net():
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=5, padding=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 32, kernel_size=3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(32 * 4 * 4, 10),
    )


def shifted(images):
    """Return the images moved by up to one pixel, so that each epoch shows the digits a little differently."""
    down, right = torch.randint(3, (2,)).tolist()
    return nn.functional.pad(images, (1, 1, 1, 1))[..., down : down + 8, right : right + 8]


class Digits(tw.Module):
    def __init__(self, epochs: int):
        super().__init__()
        self.epochs = epochs
        self.net = make_net()
        self.train_acc = torchmetrics.Accuracy(task="multiclass", num_classes=10)
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=10)
        self.test_acc = torchmetrics.Accuracy(task="multiclass", num_classes=10)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.net(shifted(images))
        loss = nn.functional.cross_entropy(logits, labels)
        self.train_acc.update(logits, labels)
        self.log("train_loss", loss)
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.net(images)
        self.val_acc.update(logits, labels)
        self.log("val_loss", nn.functional.cross_entropy(logits, labels))
        self.log("val_acc", self.val_acc, prog_bar=True)

    def test_step(self, batch, batch_idx):
        images, labels = batch
        self.test_acc.update(self.net(images), labels)
        self.log("test_acc", self.test_acc)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.epochs)
        return [optimizer], [schedule]


def draw(metrics_path: str, picture_path: str):
    """Draw loss and accuracy over the steps, from the rows that the CSV logger wrote."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with open(metrics_path, newline="") as file:
        rows = list(csv.DictReader(file))

    def points(name):
        kept = [row for row in rows if row.get(name)]
        return [int(row["step"]) for row in kept], [float(row[name]) for row in kept]

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(
        *points("train_loss"), color="tab:blue", linewidth=1, alpha=0.6, label="training (a batch, each 5th step)"
    )
    left.plot(*points("val_loss"), color="tab:orange", marker="o", label="validation (each epoch)", markersize=5)
    left.set(title="Loss", xlabel="optimizer step", ylabel="cross-entropy", yscale="log")
    right.plot(*points("train_acc"), color="tab:blue", marker="s", label="training (each epoch)", markersize=4)
    right.plot(*points("val_acc"), color="tab:orange", marker="o", label="validation (each epoch)", markersize=5)
    right.set(title="Accuracy", xlabel="optimizer step", ylabel="share of the images")
    for panel in (left, right):
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(picture_path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description="Train a small convolutional net on scikit-learn's digits.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    tw.seed_everything(options.seed)
    train_set, val_set, test_set = load_splits()
    checkpoint = tw.ModelCheckpoint(monitor="val_acc", mode="max")
    trainer = tw.Trainer(
        max_epochs=options.epochs,
        devices=options.devices,
        strategy=options.strategy,
        precision=options.precision,
        compile=options.compile,
        callbacks=[checkpoint],
        log_every_n_steps=5,
        default_root_dir="runs",
    )
    trainer.fit(
        Digits(options.epochs),
        DataLoader(
            train_set, batch_size=32, shuffle=True, drop_last=options.compile
        ),  # a short batch is compiled again
        DataLoader(val_set, batch_size=64),
    )
    result = trainer.test(dataloaders=DataLoader(test_set, batch_size=64), ckpt_path="best")

    # With several devices this script runs once in every process: what is done once is done on rank 0.
    if trainer.is_global_zero:
        draw(f"{trainer.log_dir}/metrics.csv", f"{trainer.log_dir}/curves.png")
    trainer.print(f"test_acc: {result[0]['test_acc']:.4f}")
    trainer.print(f"checkpoint: {checkpoint.best_model_path}")
    trainer.print(f"metrics: {trainer.log_dir}/metrics.csv")
    trainer.print(f"picture: {trainer.log_dir}/curves.png")


if __name__ == "__main__":
    main()
