"""Four tricks, each an argument of the Trainer: mixed precision with a loss scale, gradient accumulation, a progress bar, and
a report of each class.

    python examples/four_tricks.py
    python examples/four_tricks.py --devices 2

It trains on the digits of digits.py. The picture of the confusion matrix is written to the run's folder in runs/.
"""

import argparse

import torch
from digits import load_splits, make_net, shifted
from torch import nn
from torch.utils.data import DataLoader

import trainwright as tw


class Digits(tw.Module):
    def __init__(self, lr: float = 0.01):
        super().__init__()
        self.save_hyperparameters()
        self.net = make_net()

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(shifted(images)), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        return self.evaluate(batch, "val_loss")

    def test_step(self, batch, batch_idx):
        return self.evaluate(batch, "test_loss")

    def evaluate(self, batch, name):
        images, labels = batch
        logits = self.net(images)
        self.log(name, nn.functional.cross_entropy(logits, labels), prog_bar=True)
        return {"preds": logits, "target": labels}  # what the report counts

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main():
    parser = argparse.ArgumentParser(description="Train on scikit-learn's digits with four tricks.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    tw.seed_everything(options.seed)
    report = tw.ClassificationReport(num_classes=10, stages="test")
    trainer = tw.Trainer(
        max_epochs=options.epochs,
        devices=options.devices,
        precision="16-mixed",  # 1. float16 where it is safe; the loss scale, its unscaling and skipped steps included
        accumulate_grad_batches=4,  # 2. four batches of 16 make a step of 64; the last of an epoch may have fewer
        callbacks=[
            tw.TQDMProgressBar(refresh_rate=4),  # 3. a bar is there anyway: this sets how often it is drawn
            report,  # 4. precision, recall and F1 of each class, over all processes
        ],
        log_every_n_steps=5,
        default_root_dir="runs",
    )
    train_set, val_set, test_set = load_splits()
    train_loader = DataLoader(train_set, batch_size=16, shuffle=True)
    trainer.fit(Digits(), train_loader, DataLoader(val_set, batch_size=64))
    scale = trainer.precision_plugin.scaler.get_scale()
    trainer.test(dataloaders=DataLoader(test_set, batch_size=64), ckpt_path="best")

    scores = report.scores["test"]
    if trainer.is_global_zero:
        scores.plot().savefig(f"{trainer.log_dir}/confusion.png", dpi=120)
    trainer.print(f"batches and steps: {trainer.num_training_batches * options.epochs}, {trainer.global_step}")
    trainer.print(f"loss scale: {scale:g}")
    trainer.print(f"picture: {trainer.log_dir}/confusion.png")
    trainer.print(f"test accuracy: {scores.as_dict()['accuracy']:.4f}")


if __name__ == "__main__":
    main()
