"""One model on several processes: ddp, then DeepSpeed's ZeRO stage 2, with a table of times and accuracies.

    python examples/multi_gpu_demo.py
    python examples/multi_gpu_demo.py --devices 1     # the same on one process, to compare

After it, what people stumble over with several GPUs: each turns out to be no problem, or a clear error. The images are
scikit-learn's digits, which come with the package. multi_gpu_demo.ipynb is the same in a notebook.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw


def load_splits():
    """Return 1,437 training and 360 validation images of 8 x 8 pixels, each with its label and its number."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    parts = order.split([1437, 360])
    return [TensorDataset(images[part], torch.tensor(labels)[part], torch.arange(len(part))) for part in parts]


class Digits(tw.Module):
    def __init__(self, has_spare_layer=False):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 10),
        )
        self.spare_layer = nn.Linear(10, 10) if has_spare_layer else None
        self.uses = torch.zeros(1437)
        """How often each training image was used in this process."""

    def training_step(self, batch, batch_idx):
        images, labels, numbers = batch
        self.uses[numbers.cpu()] += 1
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels, _ = batch
        accuracy = (self.net(images).argmax(1) == labels).float().mean()
        self.log("val_acc", accuracy)
        self.log("val_acc_synced", accuracy, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Curve(tw.Callback):
    """The validation accuracy after each epoch."""

    def __init__(self):
        self.points = []

    def on_validation_epoch_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.points.append(float(trainer.callback_metrics["val_acc"]))


class SaveOnRankZero(tw.Callback):
    """A mistake: a checkpoint is written by all processes together, and the others do not come."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, module):
        if trainer.is_global_zero:
            trainer.save_checkpoint(self.path, overwrite=True)


def make_trainer(options, strategy, *callbacks):
    return tw.Trainer(
        max_epochs=options.epochs,
        devices=options.devices,
        strategy=strategy,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def refusal(options, module, *callbacks):
    """Return the error with which a training ends, as each process gets it."""
    train_set, val_set = load_splits()
    try:
        make_trainer(options, "ddp", *callbacks).fit(module, DataLoader(train_set, 32), DataLoader(val_set, 32))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error on one process"


def draw(path, rows):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, _, points), marker in zip(rows, "ox", strict=True):
        left.plot(range(1, len(points) + 1), points, marker=marker, label=name)
    left.set(title="Validation accuracy", xlabel="epoch")
    left.legend()
    left.grid(alpha=0.3)
    right.bar([name for name, *_ in rows], [seconds for _, seconds, _ in rows], color=["tab:blue", "tab:orange"])
    right.set(title="Training time", ylabel="seconds")
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description="Train one model on several processes, under ddp and DeepSpeed.")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path("runs/multi_gpu_demo"), help="for the picture")
    options = parser.parse_args()
    train_set, val_set = load_splits()

    rows, modules = [], []
    for strategy in ("ddp", "deepspeed_stage_2"):
        tw.seed_everything(0)
        module, timer, curve = Digits(), tw.Timer(), Curve()
        trainer = make_trainer(options, strategy, timer, curve)
        trainer.fit(module, DataLoader(train_set, batch_size=32, shuffle=True), DataLoader(val_set, batch_size=32))
        rows.append((strategy, timer.time_elapsed(), curve.points))
        modules.append(module)

    trainer.print(f"{options.devices} process(es), {options.epochs} epochs of {len(train_set)} images:\n")
    trainer.print(f"{'strategy':20s} {'seconds':>8s} {'accuracy':>10s}")
    for strategy, seconds, points in rows:
        trainer.print(f"{strategy:20s} {seconds:8.1f} {100 * points[-1]:8.2f} %")

    trainer.print("\nWhat people stumble over:\n")
    module, logged = modules[-1], trainer.callback_metrics
    images, labels, _ = val_set.tensors
    with torch.no_grad():
        accuracy = (module.net(images.to(module.device)).argmax(1).cpu() == labels).float().mean()
    trainer.print(
        f"sync_dist: val_acc is {logged['val_acc']:.6f} without it, {logged['val_acc_synced']:.6f} with it, and "
        f"{accuracy:.6f} over all {len(val_set)} images in one process"
    )
    uses = trainer.strategy.reduce(module.uses, reduce_op="sum")
    trainer.print(
        f"samplers: in {options.epochs} epochs the image used least was used {int(uses.min())} times, the one used most "
        f"{int(uses.max())} times, without a DistributedSampler"
    )
    trainer.print(
        f"a save on rank 0 alone: {refusal(options, Digits(), SaveOnRankZero(options.folder / 'alone.ckpt'))}"
    )
    trainer.print(f"a layer that no loss uses: {refusal(options, Digits(has_spare_layer=True))}")
    if trainer.is_global_zero:
        options.folder.mkdir(parents=True, exist_ok=True)
        draw(options.folder / "strategies.png", rows)
    trainer.print(f"picture: {options.folder / 'strategies.png'}")


if __name__ == "__main__":
    main()
