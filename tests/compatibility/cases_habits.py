"""Habits: small projects that do more around the framework, as real projects do."""

from __future__ import annotations

import copy
from typing import Any

import torch
from projects import data, files, loader, part, raised, recording, regression, scripted, trainer
from torch import nn
from torch.utils.data import DataLoader, random_split


def case_a_classifier_with_accuracy(L: Any, folder: Any) -> Any:
    from torchmetrics.classification import MulticlassAccuracy

    class Classifier(L.LightningModule):
        def __init__(self, classes: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()
            torch.manual_seed(0)
            self.net = nn.Linear(2, classes)
            self.train_acc, self.val_acc = MulticlassAccuracy(classes), MulticlassAccuracy(classes)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.net(batch[0])
            self.train_acc(logits, batch[1])
            self.log("train_acc", self.train_acc, on_epoch=True, on_step=False)
            return nn.functional.cross_entropy(logits, batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.val_acc.update(self.net(batch[0]), batch[1])

        def on_validation_epoch_end(self) -> None:
            self.log("val_acc", self.val_acc.compute(), prog_bar=True)
            self.val_acc.reset()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.1)

    points = data(24).tensors[0]
    samples = torch.utils.data.TensorDataset(points, (points.sum(1) > 0).long() + (points.sum(1) > 1).long())
    run = trainer(L, folder, max_epochs=4)
    run.fit(Classifier(), DataLoader(samples, 6), DataLoader(samples, 6))
    return run.callback_metrics


def case_best_then_test(L: Any, folder: Any) -> Any:
    best = part(L, "callbacks").ModelCheckpoint(folder, monitor="val_loss", filename="best")
    stop = part(L, "callbacks").EarlyStopping("val_loss", patience=2)
    run = trainer(L, folder, callbacks=[best, stop], enable_checkpointing=True, max_epochs=6)
    run.fit(regression(L)(), loader(24), loader(8))
    found = run.test(dataloaders=loader(8), ckpt_path="best", verbose=False)
    return [files(folder), found, round(float(best.best_model_score), 4), run.current_epoch]


def case_arguments_that_are_gone(L: Any, folder: Any) -> Any:
    gone = ("gpus", "tpu_cores", "resume_from_checkpoint", "auto_lr_find", "weights_summary", "checkpoint_callback")
    return {name: raised(lambda name=name: trainer(L, folder, **{name: 1})) for name in gone}


def case_pretrained_backbone(L: Any, folder: Any) -> Any:
    source = regression(L)()
    run = trainer(L, folder)
    run.fit(source, loader(12))
    run.save_checkpoint(folder / "a.ckpt")

    class Student(L.LightningModule):
        def __init__(self, path: str) -> None:
            super().__init__()
            self.teacher = regression(L).load_from_checkpoint(path)
            self.teacher.freeze()
            self.head = nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.mse_loss(self.head(self.teacher(batch[0])), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.head.parameters(), lr=0.1)

    student = Student(str(folder / "a.ckpt"))
    trainer(L, folder).fit(student, loader(12))
    return [torch.equal(student.teacher.layer.weight, source.layer.weight), student.teacher.training]


def case_swapped_weights_in_validation(L: Any, folder: Any) -> Any:
    class Swap(L.Callback):
        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            self.kept = copy.deepcopy(pl_module.state_dict())
            nn.init.zeros_(pl_module.layer.weight)

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.load_state_dict(self.kept)

    run, module = trainer(L, folder, callbacks=[Swap()]), regression(L)()
    run.fit(module, loader(8), loader(4))
    return [run.callback_metrics, module.layer.weight]


def case_gradient_norms_are_logged(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norm = torch.cat([each.grad.flatten() for each in self.parameters()]).norm()
            self.log("grad_norm", norm, on_step=True, on_epoch=True)

    run = trainer(L, folder, gradient_clip_val=0.1)
    run.fit(Module(), loader(12))
    return run.callback_metrics


def case_several_schedulers_on_one_optimizer(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            by_step = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}
            return [optimizer], [by_step, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    run = trainer(L, folder, max_epochs=2)
    run.fit(Module(), loader(8))
    return [run.optimizers[0].param_groups[0]["lr"], len(run.lr_scheduler_configs)]


def case_gan_with_alternating_steps(L: Any, folder: Any) -> Any:
    class Gan(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            torch.manual_seed(1)
            self.generator, self.critic = nn.Linear(2, 2), nn.Linear(2, 1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            if batch_idx % 2:
                loss = -self.critic(self.generator(batch[0])).mean()
                first.zero_grad()
                self.manual_backward(loss)
                first.step()
            else:
                loss = (self.critic(batch[0]) - self.critic(self.generator(batch[0]).detach())).mean()
                second.zero_grad()
                self.manual_backward(loss)
                second.step()
            self.log_dict({"g" if batch_idx % 2 else "d": loss}, prog_bar=True)

        def on_train_epoch_end(self) -> None:
            for scheduler in self.lr_schedulers():
                scheduler.step()

        def configure_optimizers(self) -> Any:
            optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.generator, self.critic)]
            return optimizers, [torch.optim.lr_scheduler.StepLR(each, 1) for each in optimizers]

    run, module = trainer(L, folder, max_epochs=2), Gan()
    run.fit(module, loader(16))
    rates = [each.param_groups[0]["lr"] for each in run.optimizers]
    return [run.callback_metrics, run.global_step, rates, module.critic.bias]


def case_a_callback_stops_at_a_score(L: Any, folder: Any) -> Any:
    class Stop(L.Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.sanity_checking and trainer.callback_metrics["score"] < 2.5:
                trainer.should_stop = True

    run = trainer(L, folder, callbacks=[Stop()], max_epochs=9)
    run.fit(scripted(L, "score", (4.0, 3.0, 2.0, 1.0))(), loader(8), loader(4))
    return [run.current_epoch, run.global_step, run.should_stop]


def case_split_in_setup(L: Any, folder: Any) -> Any:
    class Data(L.LightningDataModule):
        def __init__(self, batch_size: int = 4) -> None:
            super().__init__()
            self.batch_size = batch_size

        def setup(self, stage: str) -> None:
            if stage == "fit":
                self.train_set, self.val_set = random_split(
                    data(20), [16, 4], generator=torch.Generator().manual_seed(3)
                )
            if stage == "test":
                self.test_set = data(8)

        def train_dataloader(self) -> Any:
            return DataLoader(self.train_set, self.batch_size)

        def val_dataloader(self) -> Any:
            return DataLoader(self.val_set, self.batch_size)

        def test_dataloader(self) -> Any:
            return DataLoader(self.test_set, self.batch_size)

    run, module, datamodule = trainer(L, folder), regression(L)(), Data(batch_size=8)
    run.fit(module, datamodule)
    found = run.test(module, datamodule, verbose=False)
    return [run.num_training_batches, run.num_val_batches, found, module.layer.weight]


def case_predict_after_fit_without_a_module(L: Any, folder: Any) -> Any:
    run = trainer(L, folder, enable_checkpointing=True)
    run.fit(regression(L)(), loader(12))
    return [list(each.shape) for each in run.predict(dataloaders=loader(6))]


def case_validate_before_training(L: Any, folder: Any) -> Any:
    run, module = trainer(L, folder), regression(L)()
    before = run.validate(module, loader(8), verbose=False)
    run.fit(module, loader(12), loader(8))
    return [before, run.callback_metrics]


def case_hooks_by_mixins(L: Any, folder: Any) -> Any:
    seen: list[str] = []

    class Logs:
        def on_train_epoch_end(self) -> None:
            seen.append("mixin")
            super().on_train_epoch_end()  # type: ignore[misc]

    class Module(Logs, regression(L)):  # type: ignore[misc]
        pass

    trainer(L, folder).fit(Module(), loader(4))
    return seen


def case_hooks_set_on_an_instance(L: Any, folder: Any) -> Any:
    seen: list[str] = []
    module = regression(L)()
    module.on_train_epoch_end = lambda: seen.append("instance")
    trainer(L, folder).fit(module, loader(4))
    return seen


def case_callback_without_super_init(L: Any, folder: Any) -> Any:
    class Mine(L.Callback):
        def __init__(self, every: int) -> None:
            self.every, self.calls = every, 0

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.calls += trainer.global_step % self.every == 0

    mine = Mine(2)
    trainer(L, folder, callbacks=mine).fit(regression(L)(), loader(20))
    return mine.calls


def case_callbacks_with_old_signatures(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Mine(L.Callback):
        def on_validation_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, *args: Any
        ) -> None:
            seen.append([batch_idx, *args])

        def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
            seen.append([len(args), sorted(kwargs)])

    trainer(L, folder, callbacks=[Mine()]).fit(regression(L)(), loader(4), loader(4))
    return seen


def case_order_of_two_callbacks_and_a_checkpoint(L: Any, folder: Any) -> Any:
    seen: list[str] = []
    kind = recording(L.Callback, ["on_validation_end"], lambda name: seen.append("mine"))
    saves = recording(part(L, "callbacks").ModelCheckpoint, ["on_validation_end"], lambda name: seen.append("saves"))
    run = trainer(L, folder, callbacks=[saves(folder), kind()], enable_checkpointing=True, num_sanity_val_steps=0)
    run.fit(regression(L)(), loader(4), loader(4))
    return [seen, [type(each).__name__ for each in run.callbacks]]


def case_own_checkpoint_class(L: Any, folder: Any) -> Any:
    class Mine(part(L, "callbacks").ModelCheckpoint):  # type: ignore[misc]
        def format_checkpoint_name(self, metrics: Any, filename: Any = None, ver: Any = None) -> str:
            return super().format_checkpoint_name(metrics, filename, ver).replace("epoch", "e")

    trainer(L, folder, callbacks=[Mine(folder / "x")], enable_checkpointing=True).fit(regression(L)(), loader(4))
    return files(folder)


def case_names_by_the_pytorch_path(L: Any, folder: Any) -> Any:
    pytorch = L.pytorch
    return [
        pytorch.Trainer is L.Trainer,
        pytorch.callbacks.EarlyStopping.__name__,
        pytorch.loggers.CSVLogger.__name__,
        pytorch.LightningModule is L.LightningModule,
        pytorch.seed_everything is L.seed_everything,
    ]


def case_misconfiguration_is_caught(L: Any, folder: Any) -> Any:
    kind = part(L, "utilities.exceptions").MisconfigurationException
    try:
        trainer(L, folder, limit_train_batches=1.5)
    except kind:
        return "caught"


def case_monitor_of_the_second_loader(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val", float(dataloader_idx) + self.current_epoch)

    best = part(L, "callbacks").ModelCheckpoint(folder, monitor="val/dataloader_idx_1", save_top_k=1)
    run = trainer(L, folder, callbacks=[best], enable_checkpointing=True, max_epochs=2)
    run.fit(Module(), loader(8), {"a": loader(4), "b": loader(4)})
    return [files(folder), best.best_model_score]


def case_hyperparameters_of_both(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()

    class Data(L.LightningDataModule):
        def __init__(self, size: int = 8) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return loader(self.hparams.size)

    logger = part(L, "loggers").CSVLogger(folder)
    trainer(L, folder, logger=logger).fit(Module(), datamodule=Data())
    with open(f"{logger.log_dir}/hparams.yaml") as file:
        return sorted(file.read().split())
