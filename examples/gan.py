"""Train a small GAN to draw points on a ring: two networks, two optimizers, manual optimization.

    python examples/gan.py
    python examples/gan.py --devices 2

The generator turns noise into points of the plane; the critic learns to distinguish them from the data, a ring of radius
2. At the end the program measures how far from the ring the generated points are, and how much of the ring they cover.
"""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw

RADIUS, WIDTH = 2.0, 0.1
SECTORS = 16


def make_points(count: int):
    """Return points of the ring: a uniform angle, and a radius that varies a little."""
    generator = torch.Generator().manual_seed(0)
    angle = 2 * math.pi * torch.rand(count, generator=generator)
    radius = RADIUS + WIDTH * torch.randn(count, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)


def make_net(inputs: int, outputs: int, width: int = 64):
    layers = [nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


class GAN(tw.Module):
    automatic_optimization = False

    def __init__(self, noise: int = 4, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.generator = make_net(noise, 2)
        self.critic = make_net(2, 1)

    def forward(self, count: int):
        """Return this many generated points."""
        return self.generator(torch.randn(count, self.hparams.noise, device=self.device))

    def training_step(self, batch, batch_idx):
        (real,) = batch
        of_generator, of_critic = self.optimizers()

        self.toggle_optimizer(of_critic)  # the generator's parameters need no gradients here
        loss = self.judge(real, 1.0) + self.judge(self(len(real)).detach(), 0.0)
        of_critic.zero_grad()
        self.manual_backward(loss)
        of_critic.step()
        self.untoggle_optimizer(of_critic)
        self.log("critic_loss", loss, prog_bar=True)

        self.toggle_optimizer(of_generator)
        loss = self.judge(self(len(real)), 1.0)
        of_generator.zero_grad()
        self.manual_backward(loss)
        of_generator.step()
        self.untoggle_optimizer(of_generator)
        self.log("generator_loss", loss, prog_bar=True)

    def judge(self, points, label: float):
        """Return the critic's loss for these points with that label: 1 for real, 0 for generated."""
        scores = self.critic(points)
        return nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, label))

    def validation_step(self, batch, batch_idx):
        (real,) = batch
        distance, coverage = measure(self(len(real)))
        self.log("distance", distance, prog_bar=True)
        self.log("coverage", coverage, prog_bar=True)

    def configure_optimizers(self):
        options = {"lr": self.hparams.lr, "betas": (0.5, 0.9)}
        return torch.optim.Adam(self.generator.parameters(), **options), torch.optim.Adam(
            self.critic.parameters(), **options
        )


def measure(points):
    """Return the mean distance of points from the ring, and the fraction of its sectors that have points near it."""
    off = (points.norm(dim=1) - RADIUS).abs()
    sector = (torch.atan2(points[:, 1], points[:, 0]) / (2 * math.pi) * SECTORS).floor().long() % SECTORS
    return off.mean(), sector[off < 5 * WIDTH].unique().numel() / SECTORS


def main():
    parser = argparse.ArgumentParser(description="Train a small GAN to draw points on a ring.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    tw.seed_everything(options.seed)
    points = TensorDataset(make_points(16_384))
    gan = GAN()
    before, _ = measure(gan(2048))
    trainer = tw.Trainer(
        max_epochs=options.epochs,
        devices=options.devices,
        accelerator="cpu",
        enable_checkpointing=False,
        default_root_dir="runs",
    )
    batch_size = 128 // trainer.world_size  # so that a step sees as many points on any number of devices
    trainer.fit(gan, DataLoader(points, batch_size=batch_size, shuffle=True), DataLoader(points, batch_size=2048))
    with torch.no_grad():
        distance, coverage = measure(gan(2048))

    trainer.print(f"steps: {trainer.global_step}")
    trainer.print(f"distance before: {before:.3f}")
    trainer.print(f"distance: {distance:.3f}")
    trainer.print(f"coverage: {coverage:.3f}")
    assert distance < 0.25 < before, "the generator did not find the ring"
    assert coverage > 0.8, "the generator found a part of the ring only"


if __name__ == "__main__":
    main()
