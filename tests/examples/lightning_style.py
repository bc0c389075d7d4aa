"""A script as it is written for Lightning: only its import lines name another package."""

import os
import sys
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import trainwright as L
from trainwright.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from trainwright.loggers import CSVLogger, TensorBoardLogger


class BlobsDataModule(L.LightningDataModule):
    def __init__(self, batch_size: int = 32, num_samples: int = 640):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        generator = torch.Generator().manual_seed(0)
        centers = torch.tensor([[2.0, 0.0], [-1.0, 1.7], [-1.0, -1.7]])
        labels = torch.randint(0, 3, (self.hparams.num_samples,), generator=generator)
        points = centers[labels] + 0.8 * torch.randn(len(labels), 2, generator=generator)
        torch.save({"points": points, "labels": labels}, "blobs.pt")

    def setup(self, stage: str):
        stored = torch.load("blobs.pt")
        dataset = TensorDataset(stored["points"], stored["labels"])
        parts = random_split(dataset, [0.6, 0.2, 0.2], generator=torch.Generator().manual_seed(1))
        if stage in ("fit", "validate"):
            self.train_set, self.val_set = parts[:2]
        if stage in ("test", "predict"):
            self.test_set = parts[2]

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        noisy = [(point + 0.5 * torch.randn(2), label) for point, label in self.val_set]
        return [DataLoader(self.val_set, batch_size=64), DataLoader(noisy, batch_size=64)]

    def test_dataloader(self):
        return DataLoader(self.test_set, batch_size=64)

    def predict_dataloader(self):
        return DataLoader(self.test_set, batch_size=64)


class LitClassifier(L.LightningModule):
    def __init__(self, hidden: int = 16, lr: float = 0.1, warmup: int = 10):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 3))
        self.loss_fn = nn.CrossEntropyLoss()
        self.example_input_array = torch.zeros(1, 2)

    def forward(self, x):
        return self.net(x)

    def _shared_step(self, batch):
        x, y = batch
        logits = self(x)
        return self.loss_fn(logits, y), (logits.argmax(dim=-1) == y).float().mean()

    def training_step(self, batch, batch_idx):
        loss, acc = self._shared_step(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train_acc", acc, on_step=False, on_epoch=True)
        return {"loss": loss, "acc": acc.detach()}

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss, acc = self._shared_step(batch)
        name = ("clean", "noisy")[dataloader_idx]
        self.log_dict({f"val_loss_{name}": loss, f"val_acc_{name}": acc}, prog_bar=True, add_dataloader_idx=False)

    def test_step(self, batch, batch_idx):
        loss, acc = self._shared_step(batch)
        self.log_dict({"test_loss": loss, "test_acc": acc})

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch[0]).softmax(dim=-1)

    def on_train_epoch_end(self):
        if self.current_epoch == 0:
            self.print(f"first epoch's loss: {self.trainer.callback_metrics['train_loss_step']:.3f}")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.trainer.model.parameters(), lr=self.hparams.lr, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss_clean", "name": "lr"},
        }

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if self.trainer.global_step < self.hparams.warmup:
            scale = (self.trainer.global_step + 1) / self.hparams.warmup
            for group in optimizer.param_groups:
                group["lr"] = scale * self.hparams.lr
        optimizer.step(closure=optimizer_closure)


class EpochCounter(Callback):
    def __init__(self):
        self.epochs = 0

    def on_train_epoch_end(self, trainer, pl_module):
        self.epochs += 1
        pl_module.log("epochs_done", float(self.epochs))

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict):
        self.epochs = state_dict["epochs"]


def main(root: str):
    L.seed_everything(7, workers=True)
    datamodule = BlobsDataModule()
    model = LitClassifier()
    checkpoint = ModelCheckpoint(monitor="val_loss_clean", filename="{epoch}-{val_loss_clean:.2f}", save_top_k=2)
    stopping = EarlyStopping(monitor="val_loss_clean", patience=4, min_delta=0.002)
    counter = EpochCounter()
    trainer = L.Trainer(
        max_epochs=30,
        accelerator="cpu",
        devices=1,
        logger=[CSVLogger(root, name="csv"), TensorBoardLogger(root, name="tb")],
        callbacks=[checkpoint, stopping, LearningRateMonitor(logging_interval="step"), counter],
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        deterministic=True,
        default_root_dir=root,
    )
    trainer.fit(model, datamodule=datamodule)
    print("epochs:", counter.epochs, trainer.current_epoch)
    print("stopped early:", stopping.stopped_epoch == counter.epochs - 1)
    print("metrics:", " ".join(sorted(trainer.callback_metrics)))

    results = trainer.test(model, datamodule=datamodule, ckpt_path="best")
    predictions = trainer.predict(model, datamodule=datamodule)
    loaded = LitClassifier.load_from_checkpoint(checkpoint.best_model_path, lr=0.01)
    loaded.eval()
    x, _ = next(iter(datamodule.predict_dataloader()))
    same = torch.allclose(loaded(x).softmax(dim=-1), predictions[0], atol=1e-6)

    print("test_acc:", round(results[0]["test_acc"], 3))
    print("predictions:", sum(len(batch) for batch in predictions))
    print("hyper-parameters:", loaded.hparams.lr, loaded.hparams.hidden, datamodule.hparams.batch_size)
    print("loaded as it was:", same)
    print("checkpoints:", len(checkpoint.best_k_models), os.path.basename(checkpoint.best_model_path)[:6])
    print("folders:", sorted(os.path.basename(logger.log_dir) for logger in trainer.loggers))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
