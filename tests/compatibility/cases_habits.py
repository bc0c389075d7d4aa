"""Habits: small projects that do more around the framework, as real projects do."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from projects import data, files, loader, part, raised, recording, refusal, regression, scripted, trainer
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


def case_outputs_collected_in_a_list(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.training_step_outputs: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.training_step_outputs.append(loss.detach())
            return loss

        def on_train_epoch_end(self) -> None:
            self.log("epoch_mean", torch.stack(self.training_step_outputs).mean())
            self.training_step_outputs.clear()

    run = trainer(L, folder, max_epochs=2)
    run.fit(Module(), loader(12))
    return run.callback_metrics


def case_old_epoch_end_hooks_are_refused(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def training_epoch_end(self, outputs: Any) -> None:
            pass

    class Validates(regression(L)):  # type: ignore[misc]
        def validation_epoch_end(self, outputs: Any) -> None:
            pass

    return [
        refusal(lambda: trainer(L, folder).fit(Module(), loader(4))),
        refusal(lambda: trainer(L, folder).fit(Validates(), loader(4), loader(4))),
    ]


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


def case_frozen_part_in_training_mode(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)
            self.norm.eval()
            self.norm.requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(self.norm.training)
            return super().training_step(batch, batch_idx)

    trainer(L, folder).fit(Module(), loader(8), loader(4))
    return seen


def case_ema_by_hand(L: Any, folder: Any) -> Any:
    class Ema(L.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.average = copy.deepcopy(pl_module.layer.weight.detach())

        def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.average.lerp_(pl_module.layer.weight.detach(), 0.5)

    ema = Ema()
    trainer(L, folder, callbacks=[ema]).fit(regression(L)(), loader(16))
    return ema.average


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


def case_learning_rate_is_logged_by_hand(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("lr", self.optimizers().param_groups[0]["lr"])
            return super().training_step(batch, batch_idx)

    run = trainer(L, folder)
    run.fit(Module(), loader(8))
    return run.callback_metrics


def case_warmup_in_on_train_batch_start(L: Any, folder: Any) -> Any:
    seen: list[float] = []

    class Warmup(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            for group in trainer.optimizers[0].param_groups:
                group["lr"] = 0.1 * min(1.0, (trainer.global_step + 1) / 4)
                seen.append(group["lr"])

    module = regression(L)()
    trainer(L, folder, callbacks=[Warmup()], max_epochs=2).fit(module, loader(12))
    return [seen, module.layer.weight]


def case_parameter_groups_without_decay(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            groups = [
                {"params": [self.layer.weight], "weight_decay": 0.1},
                {"params": [self.layer.bias], "weight_decay": 0.0},
            ]
            return torch.optim.AdamW(groups, lr=0.01)

    module, run = Module(), trainer(L, folder, max_epochs=2)
    run.fit(module, loader(12))
    return [module.layer.weight, module.layer.bias, len(run.optimizers[0].param_groups)]


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


def case_checkpoint_then_more_epochs(L: Any, folder: Any) -> Any:
    newest = part(L, "callbacks").ModelCheckpoint(folder, save_last=True, save_top_k=-1, filename="{epoch}")
    trainer(L, folder, callbacks=[newest], enable_checkpointing=True, max_epochs=2).fit(regression(L)(), loader(12))
    again = part(L, "callbacks").ModelCheckpoint(folder, save_last=True, save_top_k=-1, filename="{epoch}")
    run = trainer(L, folder, callbacks=[again], enable_checkpointing=True, max_epochs=4)
    run.fit(regression(L)(), loader(12), ckpt_path=str(folder / "last.ckpt"))
    return [run.current_epoch, run.global_step, files(folder)]


def case_a_callback_stops_at_a_score(L: Any, folder: Any) -> Any:
    class Stop(L.Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.sanity_checking and trainer.callback_metrics["score"] < 2.5:
                trainer.should_stop = True

    run = trainer(L, folder, callbacks=[Stop()], max_epochs=9)
    run.fit(scripted(L, "score", (4.0, 3.0, 2.0, 1.0))(), loader(8), loader(4))
    return [run.current_epoch, run.global_step, run.should_stop]


def case_metrics_written_by_a_callback(L: Any, folder: Any) -> Any:
    rows: list[Any] = []

    class Writes(L.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            rows.append({name: round(float(value), 4) for name, value in trainer.callback_metrics.items()})

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            rows.append(sorted(trainer.callback_metrics))

    trainer(L, folder, callbacks=[Writes()], max_epochs=2).fit(regression(L)(), loader(8), loader(4))
    return rows


def case_images_of_a_validation_batch(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Watch(L.Callback):
        def on_validation_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            if batch_idx == 0 and not trainer.sanity_checking:
                seen.append(
                    [list(pl_module(batch[0]).shape), outputs is None, pl_module.training, trainer.current_epoch]
                )

    trainer(L, folder, callbacks=[Watch()], max_epochs=2).fit(regression(L)(), loader(8), loader(8))
    return seen


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


def case_sizes_from_the_datamodule(L: Any, folder: Any) -> Any:
    class Data(L.LightningDataModule):
        def setup(self, stage: str) -> None:
            self.width = 2

        def train_dataloader(self) -> Any:
            return loader(8)

    class Module(L.LightningModule):
        def setup(self, stage: str) -> None:
            torch.manual_seed(0)
            self.layer = nn.Linear(self.trainer.datamodule.width, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    trainer(L, folder).fit(module, datamodule=Data())
    return module.layer.weight


def case_predictions_joined(L: Any, folder: Any) -> Any:
    predictions = trainer(L, folder).predict(regression(L)(), loader(10))
    return [list(torch.cat(predictions).shape), predictions[0].requires_grad, str(predictions[0].device)]


def case_predict_after_fit_without_a_module(L: Any, folder: Any) -> Any:
    run = trainer(L, folder, enable_checkpointing=True)
    run.fit(regression(L)(), loader(12))
    return [list(each.shape) for each in run.predict(dataloaders=loader(6))]


def case_a_module_used_in_a_plain_loop_after_fit(L: Any, folder: Any) -> Any:
    module = regression(L)()
    trainer(L, folder).fit(module, loader(12))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for batch in loader(8):
        optimizer.zero_grad()
        module.loss(batch).backward()
        optimizer.step()
    return module.layer.weight


def case_the_same_module_fitted_then_finetuned(L: Any, folder: Any) -> Any:
    module = regression(L)()
    trainer(L, folder, max_epochs=2).fit(module, loader(12))
    module.lr = 0.01
    run = trainer(L, folder, max_epochs=1)
    run.fit(module, loader(12))
    return [module.layer.weight, run.optimizers[0].param_groups[0]["lr"], run.current_epoch]


def case_validate_before_training(L: Any, folder: Any) -> Any:
    run, module = trainer(L, folder), regression(L)()
    before = run.validate(module, loader(8), verbose=False)
    run.fit(module, loader(12), loader(8))
    return [before, run.callback_metrics]


def case_nan_losses(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * math.nan if batch_idx == 1 else loss

    run, module = trainer(L, folder), Module()
    run.fit(module, loader(12))
    return [run.global_step, bool(module.layer.weight.isnan().any())]


def case_stop_on_nan(L: Any, folder: Any) -> Any:
    stop = part(L, "callbacks").EarlyStopping("train_loss", check_finite=True, check_on_train_epoch_end=True)

    class Module(regression(L)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("train_loss", loss * math.nan if self.current_epoch == 1 else loss)
            return loss

    run = trainer(L, folder, callbacks=[stop], max_epochs=5)
    run.fit(Module(), loader(8))
    return [run.current_epoch, stop.stopped_epoch]


def case_rank_zero_work(L: Any, folder: Any) -> Any:
    utilities, seen = part(L, "utilities"), []

    class Module(regression(L)):  # type: ignore[misc]
        @utilities.rank_zero_only
        def write(self) -> None:
            seen.append(self.current_epoch)

        def on_train_epoch_end(self) -> None:
            if self.trainer.is_global_zero:
                self.write()

    trainer(L, folder, max_epochs=2).fit(Module(), loader(8))
    return seen


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


def case_early_stopping_subclass(L: Any, folder: Any) -> Any:
    class Warm(part(L, "callbacks").EarlyStopping):  # type: ignore[misc]
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch >= 3:
                super().on_validation_end(trainer, pl_module)

    stop = Warm("score", patience=1, check_on_train_epoch_end=False)
    run = trainer(L, folder, callbacks=[stop], max_epochs=9)
    run.fit(scripted(L, "score", (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0))(), loader(4), loader(4))
    return [run.current_epoch, stop.stopped_epoch]


def case_progress_bar_items(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(sorted(trainer.progress_bar_metrics))

    class Module(regression(L)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("a", loss, prog_bar=True, on_step=True, on_epoch=True)
            return loss

    trainer(L, folder, callbacks=[Watch()], max_epochs=2).fit(Module(), loader(8))
    return seen


def case_names_by_the_pytorch_path(L: Any, folder: Any) -> Any:
    pytorch = L.pytorch
    return [
        pytorch.Trainer is L.Trainer,
        pytorch.callbacks.EarlyStopping.__name__,
        pytorch.loggers.CSVLogger.__name__,
        pytorch.LightningModule is L.LightningModule,
        pytorch.seed_everything is L.seed_everything,
    ]


def case_names_of_the_states(L: Any, folder: Any) -> Any:
    states, seen = part(L, "trainer.states"), []

    class Module(regression(L)):  # type: ignore[misc]
        def setup(self, stage: str) -> None:
            seen.append(stage == states.TrainerFn.FITTING)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(self.trainer.state.stage == states.RunningStage.SANITY_CHECKING)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(self.trainer.state.fn == states.TrainerFn.FITTING)
            seen.append(self.trainer.state.stage == states.RunningStage.TRAINING)
            return super().training_step(batch, batch_idx)

    run = trainer(L, folder)
    run.fit(Module(), loader(4), loader(4))
    return [seen, run.state.status == states.TrainerStatus.FINISHED, run.state.finished, run.state.stopped]


def case_loop_counters_in_a_hook(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loop = self.trainer.fit_loop
            seen.append([loop.max_epochs, loop.epoch_loop.global_step, loop.epoch_progress.current.completed])
            return super().training_step(batch, batch_idx)

    trainer(L, folder, max_epochs=2).fit(Module(), loader(8))
    return seen


def case_misconfiguration_is_caught(L: Any, folder: Any) -> Any:
    kind = part(L, "utilities.exceptions").MisconfigurationException
    try:
        trainer(L, folder, limit_train_batches=1.5)
    except kind:
        return "caught"


def case_iterable_validation_that_is_a_list(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log(f"val_{dataloader_idx}", self.loss(batch), add_dataloader_idx=False)

    run = trainer(L, folder)
    run.fit(Module(), loader(8), [loader(4), loader(8)])
    return run.callback_metrics


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


def case_hparams_file_lists_nested_values(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def __init__(self, net: Any = None, sizes: Any = (1, 2), name: str | None = None) -> None:
            super().__init__()
            self.save_hyperparameters()

    run, module = trainer(L, folder), Module({"depth": 2}, [3, 4])
    run.fit(module, loader(4))
    run.save_checkpoint(folder / "a.ckpt")
    return dict(Module.load_from_checkpoint(folder / "a.ckpt").hparams)
