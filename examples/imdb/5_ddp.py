"""2_trainer.py on two processes: each takes batches of its own, and gradients are averaged.

python examples/imdb/5_ddp.py
"""

import time

import reviews
import torch
import torchmetrics

import trainwright as tw


class Classifier(tw.Module):
    def __init__(self, model, learning_rate):
        super().__init__()
        self.model = model
        self.learning_rate = learning_rate
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=2)
        self.test_acc = torchmetrics.Accuracy(task="multiclass", num_classes=2)

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        outputs = self.model(**batch)
        self.val_acc.update(outputs.logits, batch["labels"])
        self.log("val_loss", outputs.loss)
        self.log("val_acc", self.val_acc, prog_bar=True)

    def test_step(self, batch, batch_idx):
        self.test_acc.update(self.model(**batch).logits, batch["labels"])
        self.log("test_acc", self.test_acc)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


def main():
    options = reviews.parse_options()
    tw.seed_everything(options.seed)
    trainer = tw.Trainer(
        max_epochs=options.epochs,
        devices=2,
        strategy="ddp",
        callbacks=[tw.ModelCheckpoint(monitor="val_acc", mode="max")],
        default_root_dir="runs/imdb",
    )
    with trainer.engine.rank_zero_first():  # which downloads, if need be, while the others wait
        train_loader, val_loader, test_loader = reviews.load(options)
    module = Classifier(reviews.make_model(options), options.learning_rate)

    start = time.perf_counter()
    trainer.fit(module, train_loader, val_loader)
    seconds = time.perf_counter() - start

    result = trainer.test(dataloaders=test_loader, ckpt_path="best")
    trainer.print(f"test accuracy: {100 * result[0]['test_acc']:.2f} %")
    trainer.print(f"training time: {seconds:.1f} s")


if __name__ == "__main__":
    main()
