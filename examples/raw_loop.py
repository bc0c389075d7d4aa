"""The digits of digits.py in a hand-written training loop, with `tw.Accelerator` for the processes and the precision.

    python examples/raw_loop.py
    python examples/raw_loop.py --devices 2 --mixed-precision bf16

The best checkpoint is written to runs/.
"""

import argparse
import time

import torch
from digits import load_splits, make_net, shifted
from torch import nn
from torch.utils.data import DataLoader

import trainwright as tw


def evaluate(accelerator, net, loader):
    """Return the accuracy over all processes; each image counts once."""
    net.eval()
    correct = total = 0
    with torch.no_grad():
        for images, labels in loader:
            predicted, labels = accelerator.gather_for_metrics((net(images).argmax(dim=1), labels))
            correct += (predicted == labels).sum().item()
            total += len(labels)
    net.train()
    return correct / total


def main():
    parser = argparse.ArgumentParser(description="Train on scikit-learn's digits in a loop of one's own.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--mixed-precision", default="no", choices=["no", "fp16", "bf16"])
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    tw.seed_everything(options.seed)
    accelerator = tw.Accelerator(
        devices=options.devices,
        mixed_precision=options.mixed_precision,
        gradient_accumulation_steps=options.accumulate,
    )
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    train_set, val_set, test_set = load_splits()
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True)
    net, optimizer, train_loader, val_loader, test_loader = accelerator.prepare(
        net, optimizer, train_loader, DataLoader(val_set, batch_size=64), DataLoader(test_set, batch_size=64)
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs)

    # Every process writes its part of one checkpoint, so all of them need rank 0's name for it.
    folder = accelerator.broadcast(f"runs/raw_loop/{time.strftime('%Y%m%d-%H%M%S')}")
    best_accuracy, best_checkpoint = -1.0, ""
    for epoch in range(options.epochs):
        for images, labels in train_loader:
            with accelerator.accumulate(net):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(net(shifted(images)), labels)
                accelerator.backward(loss)
                optimizer.step()
        schedule.step()
        val_accuracy = evaluate(accelerator, net, val_loader)
        accelerator.print(f"epoch {epoch}: val_acc {val_accuracy:.4f}")
        if val_accuracy > best_accuracy:
            best_accuracy = val_accuracy
            best_checkpoint = accelerator.save_state(f"{folder}/epoch={epoch}.ckpt")

    accelerator.load_state(best_checkpoint)
    accelerator.print(f"test_acc: {evaluate(accelerator, net, test_loader):.4f}")
    accelerator.print(f"checkpoint: {best_checkpoint}")


if __name__ == "__main__":
    main()
