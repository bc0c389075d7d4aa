"""Checkpoints: a state after every epoch, and a run that resumes from the newest.

python examples/raw_loop/checkpointing.py
python examples/raw_loop/checkpointing.py --resume
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from trainwright import Accelerator, ProjectConfiguration, set_seed

EPOCHS, BATCH_SIZE = 5, 32


def make_data():
    """Return training and validation sets of 900 and 300 points in three spiral arms."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(1200) % 3
    radius = torch.rand(1200, generator=generator)
    angle = 3.0 * radius + labels * (2 * torch.pi / 3) + 0.15 * torch.randn(1200, generator=generator)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return random_split(TensorDataset(points, labels), [900, 300], generator=generator)


def make_model():
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def main():
    set_seed(1)
    accelerator = Accelerator(
        project_config=ProjectConfiguration("runs/checkpointing", automatic_checkpoint_naming=True, total_limit=2)
    )
    train_set, val_set = make_data()
    train_loader = DataLoader(train_set, batch_size=BATCH_SIZE, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=BATCH_SIZE)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)
    steps = EPOCHS * len(train_loader)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps))

    if "--resume" in sys.argv:
        accelerator.load_state()
        accelerator.print(f"resumed after {train_loader.epoch} of {EPOCHS} epochs")

    for epoch in range(train_loader.epoch, EPOCHS):
        model.train()
        for points, labels in train_loader:
            loss = nn.functional.cross_entropy(model(points), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        model.eval()
        correct = total = 0
        for points, labels in val_loader:
            with torch.no_grad():
                predicted = model(points).argmax(dim=1)
            correct += (predicted == labels).sum().item()
            total += len(labels)
        correct, total = accelerator.reduce([correct, total])
        accelerator.print(f"epoch {epoch}: val_acc {correct / total:.4f}")
        accelerator.save_state()


if __name__ == "__main__":
    main()
