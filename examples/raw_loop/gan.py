"""A GAN: two models with an optimizer each, which step in turns.

python examples/raw_loop/gan.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from trainwright import Accelerator, set_seed

EPOCHS, BATCH_SIZE = 5, 32


def make_data():
    """Return training and validation sets of 900 and 300 points in three spiral arms."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(1200) % 3
    radius = torch.rand(1200, generator=generator)
    angle = 3.0 * radius + labels * (2 * torch.pi / 3) + 0.15 * torch.randn(1200, generator=generator)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return random_split(TensorDataset(points, labels), [900, 300], generator=generator)


def make_model(inputs=2, outputs=1):
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def judged(critic, points, is_real):
    """Return the critic's loss for points that are real or generated."""
    scores = critic(points)
    return nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(is_real)))


def main():
    set_seed(1)
    accelerator = Accelerator()
    train_set, val_set = make_data()
    train_loader = DataLoader(train_set, batch_size=BATCH_SIZE, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=BATCH_SIZE)
    generator, critic = make_model(inputs=4, outputs=2), make_model()
    optimizer = torch.optim.AdamW(generator.parameters(), lr=0.002, betas=(0.5, 0.9))
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=0.002, betas=(0.5, 0.9))
    generator, critic, optimizer, critic_optimizer, train_loader, val_loader = accelerator.prepare(
        generator, critic, optimizer, critic_optimizer, train_loader, val_loader
    )

    for epoch in range(EPOCHS):
        generator.train()
        for points, _ in train_loader:
            generated = generator(torch.randn(len(points), 4, device=accelerator.device))
            critic_loss = judged(critic, points, True) + judged(critic, generated.detach(), False)
            accelerator.backward(critic_loss)
            critic_optimizer.step()
            critic_optimizer.zero_grad()

            loss = judged(critic, generated, True)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            critic_optimizer.zero_grad()  # of what the generator's loss has left on the critic

        generator.eval()
        distance = total = 0
        for points, _ in val_loader:
            with torch.no_grad():
                generated = generator(torch.randn(len(points), 4, device=accelerator.device))
            distance += torch.cdist(generated, points).min(dim=1).values.sum().item()
            total += len(points)
        distance, total = accelerator.reduce([distance, total])
        accelerator.print(f"epoch {epoch}: distance to the points {distance / total:.4f}")


if __name__ == "__main__":
    main()
