"""Learn to read handwritten digits: 1,797 images of 8 x 8 pixels, which come with scikit-learn. With Accelerate."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

if __name__ == "__main__":
    set_seed(0)
    accelerator = Accelerator()
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.images / 16).float()[:, None], torch.tensor(digits.target))
    train, val = random_split(data, [1500, 297])
    net = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(288, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.005)
    net, optimizer, train_loader, val_loader = accelerator.prepare(
        net, optimizer, DataLoader(train, 32, shuffle=True), DataLoader(val, 99)
    )
    best = 0.0
    for epoch in range(15):
        net.train()
        for images, labels in train_loader:
            loss = nn.functional.cross_entropy(net(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        net.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in val_loader:
                found, labels = accelerator.gather_for_metrics((net(images).argmax(1), labels))
                correct += (found == labels).sum().item()
        accelerator.print(f"epoch {epoch}: val_acc {correct / len(val):.4f}")
        if correct / len(val) > best:
            best = correct / len(val)
            accelerator.save_state("best")
    accelerator.load_state("best")
    with torch.no_grad():
        predicted = torch.cat([accelerator.gather_for_metrics(net(images).argmax(1)) for images, _ in val_loader])
    for row in torch.cat([val[number][0][0] for number in range(6)], dim=1):
        accelerator.print("".join(" ░▒▓█"[int(4 * pixel)] * 2 for pixel in row))
    accelerator.print("".join(f"{digit:^16}" for digit in predicted[:6].tolist()))
    accelerator.print(f"accuracy: {best:.4f}")
