"""Local SGD: each process steps its own copy of the model, and all are averaged every eight batches.

trainwright launch --devices 2 examples/raw_loop/local_sgd.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from trainwright import Accelerator, set_seed

EPOCHS, BATCH_SIZE = 5, 32
EVERY = 8
"""The batches between two averages of the weights."""


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


@torch.no_grad()
def average(accelerator, model):
    """Average the weights of all processes. The moments of the optimizer stay those of each process."""
    for parameter in model.parameters():
        parameter.copy_(accelerator.reduce(parameter, "mean"))


def main():
    set_seed(1)
    accelerator = Accelerator()
    train_set, val_set = make_data()
    train_loader = DataLoader(train_set, batch_size=BATCH_SIZE, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=BATCH_SIZE)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)
    steps = EPOCHS * len(train_loader)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps))

    for epoch in range(EPOCHS):
        model.train()
        for number, (points, labels) in enumerate(train_loader, start=1):
            with accelerator.no_sync(model):
                loss = nn.functional.cross_entropy(model(points), labels)
                accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if number % EVERY == 0 or number == len(train_loader):
                average(accelerator, model)

        model.eval()
        correct = total = 0
        for points, labels in val_loader:
            with torch.no_grad():
                predicted = model(points).argmax(dim=1)
            correct += (predicted == labels).sum().item()
            total += len(labels)
        correct, total = accelerator.reduce([correct, total])
        accelerator.print(f"epoch {epoch}: val_acc {correct / total:.4f}")


if __name__ == "__main__":
    main()
