"""Learn to read handwritten digits: 1,797 images of 8 x 8 pixels, which come with scikit-learn. With Lightning."""

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(288, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val_acc", (self.net(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0]).argmax(1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.005)


if __name__ == "__main__":
    L.seed_everything(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.images / 16).float()[:, None], torch.tensor(digits.target))
    train, val = random_split(data, [1500, 297])
    best = ModelCheckpoint(monitor="val_acc", mode="max")
    trainer = L.Trainer(max_epochs=15, devices=1, callbacks=[best])
    trainer.fit(Digits(), DataLoader(train, 32, shuffle=True), DataLoader(val, 99))
    predicted = torch.cat(trainer.predict(dataloaders=DataLoader(val, 99), ckpt_path="best"))
    for row in torch.cat([val[number][0][0] for number in range(6)], dim=1):
        trainer.print("".join(" ░▒▓█"[int(4 * pixel)] * 2 for pixel in row))
    trainer.print("".join(f"{digit:^16}" for digit in predicted[:6].tolist()))
    trainer.print(f"accuracy: {best.best_model_score:.4f}")
