"""Classify images with few examples, without and with augmentation, and draw what the second net makes of new ones.

    python examples/images.py
    python examples/images.py --data cifar10

By default the images are made: circles, squares, triangles and crosses of any size, place and turn, brighter than the rest.
"""

import argparse

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw

SHAPES = ["circle", "square", "triangle", "cross"]


def make_shapes(count: int, seed: int):
    """Return images of 3 x 32 x 32 numbers with the number of the shape that each shows."""
    generator = torch.Generator().manual_seed(seed)
    turn, size, across, down = torch.rand(4, count, 1, 1, generator=generator)
    y, x = torch.meshgrid(torch.linspace(-1, 1, 32), torch.linspace(-1, 1, 32), indexing="ij")
    x, y, turn, size = x + 0.6 * across - 0.3, y + 0.6 * down - 0.3, 2 * torch.pi * turn, 0.45 + 0.25 * size
    x, y = (x * turn.cos() - y * turn.sin()) / size, (x * turn.sin() + y * turn.cos()) / size
    large, small = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    triangle, cross = torch.maximum(1.6 * y, 1.4 * x.abs() - 0.8 * y), torch.maximum(0.9 * large, 3 * small)
    shapes = torch.stack([(x**2 + y**2).sqrt(), 1.15 * large, triangle, cross]) < 1
    labels = torch.arange(count) % len(SHAPES)
    shape, background = torch.rand(2, count, 3, 1, 1, generator=generator) / 2
    images = torch.where(shapes[labels, torch.arange(count)][:, None], 0.5 + shape, background)
    return TensorDataset(images + 0.1 * torch.randn(images.shape, generator=generator), labels)


def load_cifar10():
    """Return 2,000 training and 2,000 test images of CIFAR-10, and the names of its classes."""
    from datasets import load_dataset  # pip install datasets pillow

    parts = load_dataset("uoft-cs/cifar10", split=["train[:2000]", "test[:2000]"])
    columns = [part.with_format("torch")[:] for part in parts]
    return [TensorDataset(each["img"] / 255, each["label"]) for each in columns], parts[0].features["label"].names


def augmented(images):
    """Return the images mirrored, turned, moved, and with their colours exchanged, at random."""
    for change in (lambda it: it.flip(2), lambda it: it.flip(3), lambda it: it.transpose(2, 3)):
        images = torch.where(torch.rand(len(images), 1, 1, 1).to(images) < 0.5, change(images), images)
    down, right = torch.randint(9, (2,)).tolist()
    images = nn.functional.pad(images, (4, 4, 4, 4), "reflect")[..., down : down + 32, right : right + 32]
    return images[:, torch.randperm(3)]


class Classifier(tw.Module):
    def __init__(self, classes: int, augments: bool):
        super().__init__()
        self.save_hyperparameters()
        layers = []
        for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))

    def training_step(self, batch, batch_idx):
        images = augmented(batch[0]) if self.hparams.augments else batch[0]
        return nn.functional.cross_entropy(self.net(images), batch[1])

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0]).argmax(1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.003)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)]


def main():
    parser = argparse.ArgumentParser(description="Classify images, without and with augmentation.")
    parser.add_argument("--data", default="made", choices=["made", "cifar10"])
    parser.add_argument("--epochs", type=int, default=24)
    options = parser.parse_args()
    sets, names = ([make_shapes(400, 0), make_shapes(1000, 1)], SHAPES) if options.data == "made" else load_cifar10()
    images, labels = sets[1].tensors
    for augments in (False, True):
        tw.seed_everything(0)
        trainer = tw.Trainer(max_epochs=options.epochs, default_root_dir="runs")
        trainer.fit(classifier := Classifier(len(names), augments), DataLoader(sets[0], 32, shuffle=True))
        found = torch.cat(trainer.predict(classifier, DataLoader(sets[1], 100)))
        print(f"{'with' if augments else 'without'} augmentation: {(found == labels).float().mean():.3f}")
    figure = Figure(figsize=(10, 5), layout="constrained")
    for panel, image, label, guess in zip(figure.subplots(4, 8).flat, images, labels, found, strict=False):
        panel.imshow(image.permute(1, 2, 0).clamp(0, 1).numpy())
        panel.set_title(names[guess], color="green" if guess == label else "red", fontsize=9)
        panel.axis("off")
    figure.savefig(f"{trainer.log_dir}/predictions.png", dpi=120)
    print(f"picture: {trainer.log_dir}/predictions.png")


if __name__ == "__main__":
    main()
