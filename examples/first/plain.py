"""Learn to read handwritten digits: 1,797 images of 8 x 8 pixels, which come with scikit-learn. With a plain loop."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

if __name__ == "__main__":
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.images / 16).float()[:, None], torch.tensor(digits.target))
    train, val = random_split(data, [1500, 297])
    train_loader, val_loader = DataLoader(train, 32, shuffle=True), DataLoader(val, 99)
    net = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(288, 10)).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.005)
    best = 0.0
    for epoch in range(15):
        net.train()
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            loss = nn.functional.cross_entropy(net(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        net.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in val_loader:
                images, labels = images.to(device), labels.to(device)
                correct += (net(images).argmax(1) == labels).sum().item()
        print(f"epoch {epoch}: val_acc {correct / len(val):.4f}")
        if correct / len(val) > best:
            best = correct / len(val)
            torch.save(net.state_dict(), "best.pt")
    net.load_state_dict(torch.load("best.pt"))
    with torch.no_grad():
        predicted = torch.cat([net(images.to(device)).argmax(1) for images, _ in val_loader])
    for row in torch.cat([val[number][0][0] for number in range(6)], dim=1):
        print("".join(" ░▒▓█"[int(4 * pixel)] * 2 for pixel in row))
    print("".join(f"{digit:^16}" for digit in predicted[:6].tolist()))
    print(f"accuracy: {best:.4f}")
