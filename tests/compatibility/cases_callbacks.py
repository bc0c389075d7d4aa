"""The callbacks that come with the framework."""

from __future__ import annotations

from typing import Any

import torch
from projects import loader, part, refusal, regression, scripted, trainer

CALLBACKS = """
    BasePredictionWriter BaseFinetuning BackboneFinetuning BatchSizeFinder Callback Checkpoint DeviceStatsMonitor
    EarlyStopping EMAWeightAveraging GradientAccumulationScheduler LambdaCallback LearningRateFinder LearningRateMonitor
    ModelCheckpoint ModelSummary OnExceptionCheckpoint StochasticWeightAveraging ThroughputMonitor Timer
    TQDMProgressBar WeightAveraging
"""


def _stopped(L: Any, folder: Any, values: Any, *, fit: dict[str, Any] | None = None, **options: Any) -> Any:
    callback = part(L, "callbacks").EarlyStopping("score", **options)
    run = trainer(L, folder, callbacks=[callback], max_epochs=8, **(fit or {}))
    run.fit(scripted(L, "score", values)(), loader(8), loader(4))
    return [callback.stopped_epoch, callback.wait_count, callback.best_score, run.current_epoch, run.global_step]


def case_early_stopping_check_finite(L: Any, folder: Any) -> Any:
    return [
        _stopped(L, folder, (3.0, float("nan"), 1.0), check_finite=True)[0],
        _stopped(L, folder, (3.0, float("nan"), 2.0, 1.0, 0.5, 0.4, 0.3, 0.2), check_finite=False)[0],
    ]


def case_early_stopping_of_a_training_metric(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("score", float(self.current_epoch), on_step=False, on_epoch=True)
            return self.loss(batch)

    callback = part(L, "callbacks").EarlyStopping("score", patience=2, check_on_train_epoch_end=True)
    run = trainer(L, folder, callbacks=[callback], max_epochs=8)
    run.fit(Module(), loader(8))
    return [callback.stopped_epoch, run.current_epoch]


def case_early_stopping_without_its_metric(L: Any, folder: Any) -> Any:
    kind = part(L, "callbacks").EarlyStopping
    found = []
    for strict in (True, False):
        run = trainer(L, folder, callbacks=[kind("unheard", strict=strict)])
        found.append(refusal(lambda run=run: run.fit(regression(L)(), loader(4), loader(4))))
    return [found, refusal(lambda: kind("x", mode="best")), refusal(kind)]


def case_early_stopping_state(L: Any, folder: Any) -> Any:
    callback = part(L, "callbacks").EarlyStopping("score", patience=3)
    trainer(L, folder, callbacks=[callback], max_epochs=3).fit(
        scripted(L, "score", (1.0, 2.0, 3.0))(), loader(4), loader(4)
    )
    state = callback.state_dict()
    return {name: state[name] for name in ("best_score", "patience", "stopped_epoch", "wait_count")}


def case_early_stopping_attributes(L: Any, folder: Any) -> Any:
    callback = part(L, "callbacks").EarlyStopping("score", min_delta=0.5, mode="max")
    names = ("monitor", "min_delta", "patience", "mode", "wait_count", "stopped_epoch", "best_score", "strict")
    return {name: getattr(callback, name, "missing") for name in names}


def _scheduled(L: Any, names: int = 1, **scheduler: Any) -> type[Any]:
    class Module(regression(L)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(
                [{"params": [self.layer.weight]}, {"params": [self.layer.bias], "lr": 0.01}], lr=0.1
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), **scheduler},
            }

    return Module


def case_learning_rate_monitor(L: Any, folder: Any) -> Any:
    found = []
    for options in ({}, {"logging_interval": "step"}, {"logging_interval": "epoch"}):
        callback = part(L, "callbacks").LearningRateMonitor(**options)
        logger = part(L, "loggers").CSVLogger(folder)
        run = trainer(L, folder, callbacks=[callback], logger=logger, log_every_n_steps=1, max_epochs=2)
        run.fit(_scheduled(L)(), loader(8))
        found.append([sorted(run.callback_metrics), callback.lrs])
    return found


def case_learning_rate_monitor_names(L: Any, folder: Any) -> Any:
    callback = part(L, "callbacks").LearningRateMonitor()
    run = trainer(L, folder, callbacks=[callback], logger=part(L, "loggers").CSVLogger(folder), log_every_n_steps=1)
    run.fit(_scheduled(L, name="my_rate")(), loader(8))
    without = trainer(L, folder, callbacks=[part(L, "callbacks").LearningRateMonitor()], logger=False)
    return [callback.lrs, refusal(lambda: without.fit(_scheduled(L)(), loader(4)))]


def case_learning_rate_monitor_without_schedulers(L: Any, folder: Any) -> Any:
    callback = part(L, "callbacks").LearningRateMonitor()
    run = trainer(L, folder, callbacks=[callback], logger=part(L, "loggers").CSVLogger(folder), log_every_n_steps=1)
    run.fit(regression(L)(), loader(8))
    return callback.lrs


def case_timer(L: Any, folder: Any) -> Any:
    callback = part(L, "callbacks").Timer(duration="00:01:00:00", interval="epoch")
    run = trainer(L, folder, callbacks=[callback], max_epochs=2)
    run.fit(regression(L)(), loader(8), loader(4))
    stops = part(L, "callbacks").Timer(duration={"seconds": 0})
    short = trainer(L, folder, callbacks=[stops], max_epochs=100)
    short.fit(regression(L)(), loader(8))
    return [
        callback.time_elapsed("train") > 0, callback.time_elapsed("validate") > 0, callback.time_elapsed("test"),
        callback.time_remaining() > 3000, callback.start_time("train") is not None, short.global_step < 3,
    ]  # fmt: skip


def case_lambda_callback(L: Any, folder: Any) -> Any:
    seen: list[Any] = []
    callback = part(L, "callbacks").LambdaCallback(
        on_train_epoch_start=lambda trainer, module: seen.append(f"start {trainer.current_epoch}"),
        on_train_batch_end=lambda *args: seen.append(len(args)),
    )
    trainer(L, folder, callbacks=[callback]).fit(regression(L)(), loader(8))
    return seen


def case_gradient_accumulation_scheduler(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Watch(L.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append([trainer.accumulate_grad_batches, trainer.global_step])

    callback = part(L, "callbacks").GradientAccumulationScheduler(scheduling={0: 4, 2: 2})
    trainer(L, folder, callbacks=[callback, Watch()], max_epochs=3).fit(regression(L)(), loader(32))
    return seen


def case_stochastic_weight_averaging(L: Any, folder: Any) -> Any:
    callback = part(L, "callbacks").StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2)
    module = _scheduled(L)()
    run = trainer(L, folder, callbacks=[callback], max_epochs=4)
    run.fit(module, loader(8))
    return [module.layer.weight, module.layer.bias, run.current_epoch, run.global_step]


def case_weight_averaging(L: Any, folder: Any) -> Any:
    callback = part(L, "callbacks").EMAWeightAveraging(decay=0.5)
    module = regression(L)()
    trainer(L, folder, callbacks=[callback], max_epochs=2).fit(module, loader(8), loader(4))
    return [module.layer.weight, module.layer.bias]


def case_backbone_finetuning(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.backbone = torch.nn.Linear(2, 2)
            self.head = torch.nn.Linear(2, 1)

        def forward(self, x: Any) -> Any:
            return self.head(self.backbone(x))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([each for each in self.head.parameters() if each.requires_grad], lr=0.1)

        def on_train_epoch_end(self) -> None:
            groups = [[round(group["lr"], 5), len(group["params"])] for group in self.optimizers().param_groups]
            seen.append([self.backbone.weight.requires_grad, groups])

    callback = part(L, "callbacks").BackboneFinetuning(unfreeze_backbone_at_epoch=2, lambda_func=lambda epoch: 1.5)
    trainer(L, folder, callbacks=[callback], max_epochs=5).fit(Module(), loader(8))
    return seen


def case_own_finetuning(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Finetuning(part(L, "callbacks").BaseFinetuning):  # type: ignore[misc]
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.layer)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.layer, optimizer, lr=0.5)
            seen.append([pl_module.layer.weight.requires_grad, [group["lr"] for group in optimizer.param_groups]])

    class Module(regression(L)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(1, 1)

        def forward(self, x: Any) -> Any:
            return self.head(self.layer(x))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.head.parameters(), lr=0.1)

    trainer(L, folder, callbacks=[Finetuning()], max_epochs=3).fit(Module(), loader(8))
    return seen


def case_device_stats_monitor(L: Any, folder: Any) -> Any:
    logger = part(L, "loggers").CSVLogger(folder)
    seen: list[Any] = []

    class Spy(type(logger)):  # type: ignore[misc]
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            seen.extend(name for name in metrics if "DeviceStats" in name)
            super().log_metrics(metrics, step)

    spy = Spy(folder)
    run = trainer(
        L, folder, callbacks=[part(L, "callbacks").DeviceStatsMonitor(cpu_stats=True)], logger=spy, log_every_n_steps=1
    )
    run.fit(regression(L)(), loader(4))
    return sorted({name.split("cpu_")[0] for name in seen})


def case_model_summary(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.block = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
            self.block[0].weight.requires_grad = False

    summary = part(L, "utilities.model_summary").ModelSummary(Module(), max_depth=-1)
    return [summary.total_parameters, summary.trainable_parameters, summary.layer_names, summary.param_nums]


def case_model_summary_text(L: Any, folder: Any) -> Any:
    text = str(part(L, "utilities.model_summary").ModelSummary(regression(L)()))
    return ["layer" in text, "Linear" in text]


def case_progress_bar_metrics(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Bar(part(L, "callbacks").TQDMProgressBar):  # type: ignore[misc]
        def get_metrics(self, trainer: Any, model: Any) -> Any:
            items = super().get_metrics(trainer, model)
            items.pop("v_num", None)
            seen.append(sorted(items))
            return items

    class Module(regression(L)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("shown", loss, prog_bar=True)
            return loss

    run = trainer(L, folder, callbacks=[Bar(refresh_rate=1)], enable_progress_bar=True)
    run.fit(Module(), loader(8))
    return [seen[-1] if seen else "none", type(run.progress_bar_callback).__name__, bool(seen)]


def case_progress_bar_options(L: Any, folder: Any) -> Any:
    kind = part(L, "callbacks").TQDMProgressBar
    bar = kind(refresh_rate=5, process_position=0, leave=True)
    bar.disable()
    first = bar.is_enabled
    bar.enable()
    return [bar.refresh_rate, first, bar.is_enabled, bar.process_position, kind(refresh_rate=0).is_disabled]


def case_callback_state_keys(L: Any, folder: Any) -> Any:
    callbacks = part(L, "callbacks")

    class Mine(L.Callback):
        pass

    return [Mine().state_key.split(".")[-1], callbacks.EarlyStopping("x", mode="max").state_key.split("{")[0][:13]]


def case_a_callback_reads_the_trainer(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append([trainer.global_step, trainer.current_epoch, trainer.optimizers[0].param_groups[0]["lr"]])
            seen.append([pl_module is trainer.lightning_module, pl_module.global_step, trainer.model is pl_module])
            seen.append([len(trainer.train_dataloader), trainer.num_training_batches, trainer.val_dataloaders is None])

    trainer(L, folder, callbacks=[Watch()]).fit(regression(L)(), loader(4))
    return seen


CASES = {
    "early_stopping": lambda L, folder: _stopped(L, folder, (3.0, 2.0, 2.5, 2.6, 2.7, 2.8)),
    "early_stopping_patience": lambda L, folder:
        [_stopped(L, folder, (3.0, 2.0, 2.5, 2.6, 1.0, 2.8), patience=each) for each in (1, 2)],
    "early_stopping_min_delta": lambda L, folder:
        _stopped(L, folder, (3.0, 2.95, 2.9, 2.85, 2.8), min_delta=0.1, patience=2),
    "early_stopping_mode_max": lambda L, folder:
        _stopped(L, folder, (1.0, 2.0, 1.5, 1.4, 1.3, 1.2), mode="max", patience=2),
    "early_stopping_threshold": lambda L, folder: _stopped(L, folder, (3.0, 2.0, 0.5, 0.4), stopping_threshold=1.0),
    "early_stopping_divergence": lambda L, folder:
        _stopped(L, folder, (3.0, 2.0, 50.0, 0.4), divergence_threshold=10.0, patience=9),
    "early_stopping_with_min_epochs": lambda L, folder:
        _stopped(L, folder, (1.0, 2.0, 3.0, 4.0), patience=1, fit={"min_epochs": 4}),
    "early_stopping_within_epochs": lambda L, folder:
        _stopped(L, folder, (3.0, 4.0, 5.0, 6.0, 7.0), patience=2, fit={"val_check_interval": 0.5}),
    "callbacks_that_exist": lambda L, folder:
        [name for name in CALLBACKS.split() if not hasattr(part(L, "callbacks"), name)],
}  # fmt: skip
"""Cases of one call, by their names."""
