"""self.log and the loggers: names, values and moments."""

from __future__ import annotations

import csv
from typing import Any

import torch
from projects import data, files, loader, part, refusal, regression, trainer
from torch.utils.data import DataLoader


def _logging(L: Any, *names: Any, **options: Any) -> type[Any]:
    class Logging(regression(L)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("value", float(batch_idx), **options)
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    return Logging


def _metrics(L: Any, folder: Any, module: Any, **options: Any) -> Any:
    run = trainer(L, folder, **options)
    run.fit(module, loader(10))
    return [run.callback_metrics, run.logged_metrics, run.progress_bar_metrics]


def case_reductions(L: Any, folder: Any) -> Any:
    return [
        _metrics(L, folder, _logging(L, on_step=False, on_epoch=True, reduce_fx=each)())[0]
        for each in ("mean", "sum", "min", "max", torch.mean, max)
    ]


def case_batch_size_weighs_the_mean(L: Any, folder: Any) -> Any:
    plain = _metrics(L, folder, _logging(L, on_step=False, on_epoch=True)())[0]
    given = _metrics(L, folder, _logging(L, on_step=False, on_epoch=True, batch_size=1)())[0]
    return [plain, given]


def case_log_dict(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log_dict({"a": loss, "b/c": 2, "d": torch.tensor(3.0)}, on_epoch=True, on_step=False)
            return loss

    return _metrics(L, folder, Module())


def case_validation_metrics_and_moments(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", float(batch_idx))

        def on_validation_epoch_end(self) -> None:
            seen.append(["val epoch end", sorted(self.trainer.callback_metrics)])

        def on_validation_end(self) -> None:
            seen.append(["val end", sorted(self.trainer.callback_metrics)])

        def on_train_epoch_end(self) -> None:
            seen.append(["train epoch end", sorted(self.trainer.callback_metrics)])

        def on_train_end(self) -> None:
            seen.append(["train end", sorted(self.trainer.callback_metrics)])

    trainer(L, folder, num_sanity_val_steps=0).fit(Module(), loader(8), loader(8))
    return seen


def case_logging_in_epoch_hooks(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def on_train_epoch_start(self) -> None:
            self.log("start", 1.0)

        def on_train_epoch_end(self) -> None:
            self.log("end", 2.0)

        def on_validation_epoch_end(self) -> None:
            self.log("val_end", 3.0)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("batch_end", float(batch_idx))

    run = trainer(L, folder)
    run.fit(Module(), loader(8), loader(4))
    return run.callback_metrics


def case_logging_from_a_callback(L: Any, folder: Any) -> Any:
    class Logs(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("from_callback", batch_idx * 1.0, on_epoch=True)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.log_dict({"from_module": 5.0})

    return _metrics(L, folder, regression(L)(), callbacks=[Logs()])[0]


def case_where_logging_is_refused(L: Any, folder: Any) -> Any:
    found = {}
    for hook in ("on_fit_start", "on_train_start", "on_train_end", "on_validation_end", "configure_optimizers"):
        base = regression(L)

        def method(self: Any, *args: Any, hook: str = hook, base: Any = base) -> Any:
            self.log("x", 1.0)
            return getattr(base, hook)(self, *args)

        module = type("Module", (base,), {hook: method})()
        found[hook] = refusal(lambda module=module: trainer(L, folder).fit(module, loader(4), loader(4)))
    return found


def case_wrong_arguments_of_log(L: Any, folder: Any) -> Any:
    found = {}
    for name, value, options in (
        ("tensor", torch.zeros(3), {}),
        ("text", "loss", {}),
        ("reduce", 1.0, {"reduce_fx": "median", "on_epoch": True}),
    ):

        class Module(regression(L)):  # type: ignore[misc]
            def training_step(self, batch: Any, batch_idx: int, value: Any = value, options: Any = options) -> Any:
                self.log("x", value, **options)
                return self.loss(batch)

        found[name] = refusal(lambda: trainer(L, folder).fit(Module(), loader(4)))
    return found


def case_log_without_a_trainer(L: Any, folder: Any) -> Any:
    module = regression(L)()
    return refusal(lambda: module.log("x", 1.0))


def case_loader_suffixes(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val", float(dataloader_idx))
            self.log("same", 1.0, add_dataloader_idx=False) if dataloader_idx == 0 else None

    run = trainer(L, folder)
    run.fit(Module(), loader(4), [loader(4), loader(8)])
    return run.callback_metrics


def case_loaders_in_a_dict(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val", float(dataloader_idx))

    run = trainer(L, folder)
    return run.validate(Module(), {"clean": loader(4), "noisy": loader(4)}, verbose=False)


def case_torchmetrics(L: Any, folder: Any) -> Any:
    from torchmetrics import MeanMetric, SumMetric

    class Module(regression(L)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.sum = MeanMetric(), SumMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.mean(float(batch_idx))
            self.log("mean", self.mean, on_step=True, on_epoch=True)
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.sum(float(batch_idx))
            self.log("sum", self.sum)

    run = trainer(L, folder, max_epochs=2)
    run.fit(Module(), loader(12), loader(12))
    return run.callback_metrics


def case_metric_collection(L: Any, folder: Any) -> Any:
    from torchmetrics import MaxMetric, MeanMetric, MetricCollection

    class Module(regression(L)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.metrics = MetricCollection({"mean": MeanMetric(), "max": MaxMetric()}, prefix="val_")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.metrics.update(float(batch_idx))
            self.log_dict(self.metrics)

    return trainer(L, folder).validate(Module(), loader(12), verbose=False)


def _rows(path: Any) -> list[dict[str, str]]:
    with open(path) as file:
        return [{key: value for key, value in row.items() if value != ""} for row in csv.DictReader(file)]


def _merged(rows: list[dict[str, str]], *names: str) -> dict[str, Any]:
    """Return the (step, value) pairs of every column, in whatever rows they are."""
    return {name: [[int(row["step"]), round(float(row[name]), 4)] for row in rows if name in row] for name in names}


def case_csv_logger_files(L: Any, folder: Any) -> Any:
    logger = part(L, "loggers").CSVLogger(folder, name="mine")
    run = trainer(L, folder, logger=logger, log_every_n_steps=1)
    run.fit(regression(L)(), loader(), loader(4))
    return [files(folder), str(run.log_dir), logger.version, logger.name, str(logger.save_dir), str(logger.root_dir)]


def case_csv_logger_versions(L: Any, folder: Any) -> Any:
    loggers = part(L, "loggers")
    for options in ({}, {}, {"version": "named"}, {"version": 7}, {}):
        trainer(L, folder, logger=loggers.CSVLogger(folder, name="x", **options)).fit(regression(L)(), loader(4))
    return [str(path.relative_to(folder)) for path in sorted((folder / "x").iterdir())]


def case_csv_steps_of_training_values(L: Any, folder: Any) -> Any:
    logger = part(L, "loggers").CSVLogger(folder)
    trainer(L, folder, logger=logger, log_every_n_steps=2, max_epochs=2).fit(regression(L)(), loader(20))
    return _merged(_rows(f"{logger.log_dir}/metrics.csv"), "train_loss", "epoch")


def case_csv_steps_of_validation_values(L: Any, folder: Any) -> Any:
    logger = part(L, "loggers").CSVLogger(folder)
    trainer(L, folder, logger=logger, log_every_n_steps=1, max_epochs=2).fit(regression(L)(), loader(8), loader(4))
    return _merged(_rows(f"{logger.log_dir}/metrics.csv"), "val_loss")


def case_csv_steps_of_epoch_values(L: Any, folder: Any) -> Any:
    logger = part(L, "loggers").CSVLogger(folder)
    module = _logging(L, on_step=True, on_epoch=True)()
    trainer(L, folder, logger=logger, log_every_n_steps=1, max_epochs=2).fit(module, loader(8))
    return _merged(_rows(f"{logger.log_dir}/metrics.csv"), "value_step", "value_epoch")


def case_csv_columns(L: Any, folder: Any) -> Any:
    logger = part(L, "loggers").CSVLogger(folder)
    trainer(L, folder, logger=logger, log_every_n_steps=1).fit(regression(L)(), loader(8), loader(4))
    return sorted({key for row in _rows(f"{logger.log_dir}/metrics.csv") for key in row})


def case_csv_rows(L: Any, folder: Any) -> Any:
    logger = part(L, "loggers").CSVLogger(folder)
    trainer(L, folder, logger=logger, log_every_n_steps=1).fit(regression(L)(), loader(8), loader(4))
    return [sorted(row) for row in _rows(f"{logger.log_dir}/metrics.csv")]


def case_csv_rows_with_accumulation(L: Any, folder: Any) -> Any:
    logger = part(L, "loggers").CSVLogger(folder)
    run = trainer(L, folder, logger=logger, log_every_n_steps=1, accumulate_grad_batches=2)
    run.fit(_logging(L)(), loader(16))
    return [_merged(_rows(f"{logger.log_dir}/metrics.csv"), "value"), run.global_step]


def case_csv_steps_of_learning_rates(L: Any, folder: Any) -> Any:
    found = []
    for interval in ("step", "epoch", None):

        class Module(regression(L)):  # type: ignore[misc]
            def configure_optimizers(self, interval: str = interval or "epoch") -> Any:
                optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}

        logger = part(L, "loggers").CSVLogger(folder)
        monitor = part(L, "callbacks").LearningRateMonitor(interval)
        options = {"callbacks": [monitor], "log_every_n_steps": 2, "max_epochs": 3}
        trainer(L, folder, logger=logger, **options).fit(Module(), loader(12))
        found.append(_merged(_rows(f"{logger.log_dir}/metrics.csv"), "lr-SGD"))
    return found


def case_csv_steps_of_values_from_hooks(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def on_train_epoch_start(self) -> None:
            self.log("start", 1.0)

        def on_train_epoch_end(self) -> None:
            self.log("end", 2.0)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("batch_end", float(batch_idx))

    logger = part(L, "loggers").CSVLogger(folder)
    trainer(L, folder, logger=logger, log_every_n_steps=2, max_epochs=2).fit(Module(), loader(16), loader(4))
    return _merged(_rows(f"{logger.log_dir}/metrics.csv"), "start", "end", "batch_end", "val_loss")


def case_csv_steps_of_validations_within_epochs(L: Any, folder: Any) -> Any:
    logger = part(L, "loggers").CSVLogger(folder)
    options = {"logger": logger, "log_every_n_steps": 3, "max_epochs": 2, "val_check_interval": 0.5}
    trainer(L, folder, **options).fit(regression(L)(), loader(16), loader(4))
    return _merged(_rows(f"{logger.log_dir}/metrics.csv"), "train_loss", "val_loss")


def case_csv_steps_of_a_resumed_run(L: Any, folder: Any) -> Any:
    run = trainer(L, folder, logger=part(L, "loggers").CSVLogger(folder), log_every_n_steps=2)
    run.fit(regression(L)(), loader(12))
    run.save_checkpoint(folder / "a.ckpt")
    logger = part(L, "loggers").CSVLogger(folder, name="other")
    resumed = trainer(L, folder, logger=logger, log_every_n_steps=2, max_epochs=3)
    resumed.fit(regression(L)(), loader(12), ckpt_path=folder / "a.ckpt")
    return _merged(_rows(f"{logger.log_dir}/metrics.csv"), "train_loss")


def case_step_as_a_logged_value(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def on_train_epoch_end(self) -> None:
            self.log_dict({"by_epoch": 7.0, "step": float(self.current_epoch)})

    logger = part(L, "loggers").CSVLogger(folder)
    trainer(L, folder, logger=logger, max_epochs=2).fit(Module(), loader(8))
    return _merged(_rows(f"{logger.log_dir}/metrics.csv"), "by_epoch")


def case_csv_of_a_test(L: Any, folder: Any) -> Any:
    logger = part(L, "loggers").CSVLogger(folder)
    run, module = trainer(L, folder, logger=logger, log_every_n_steps=1), regression(L)()
    run.fit(module, loader(8))
    run.test(module, loader(8), verbose=False)
    return _merged(_rows(f"{logger.log_dir}/metrics.csv"), "test_loss")


def case_csv_hyperparameters(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def __init__(self, width: int = 3, lr: float = 0.1) -> None:
            super().__init__(lr)
            self.save_hyperparameters()

    logger = part(L, "loggers").CSVLogger(folder)
    trainer(L, folder, logger=logger).fit(Module(width=5), loader(4))
    with open(f"{logger.log_dir}/hparams.yaml") as file:
        return file.read().strip().splitlines()


def case_logger_called_directly(L: Any, folder: Any) -> Any:
    logger = part(L, "loggers").CSVLogger(folder, name="direct", version=0)
    logger.log_hyperparams({"a": 1})
    logger.log_metrics({"x": 1.0}, step=0)
    logger.log_metrics({"x": 2.0, "y": torch.tensor(3.0)}, step=1)
    logger.save()
    logger.finalize("success")
    there = [name in files(folder) for name in ("direct/version_0/metrics.csv", "direct/version_0/hparams.yaml")]
    return [_merged(_rows(f"{logger.log_dir}/metrics.csv"), "x", "y"), there]


def case_tensorboard_folder(L: Any, folder: Any) -> Any:
    logger = part(L, "loggers").TensorBoardLogger(folder, name="tb", version="v", sub_dir="sub")
    run = trainer(L, folder, logger=logger, log_every_n_steps=1)
    run.fit(regression(L)(), loader())
    names = sorted({path.name.split(".")[0] for path in folder.rglob("*") if path.is_file()})
    return [
        str(run.log_dir),
        str(logger.log_dir),
        str(logger.root_dir),
        type(logger.experiment).__name__,
        "events" in names,
    ]


def case_tensorboard_values(L: Any, folder: Any) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = part(L, "loggers").TensorBoardLogger(folder)
    run = trainer(L, folder, logger=logger, log_every_n_steps=1, max_epochs=2)
    run.fit(_logging(L, on_step=True, on_epoch=True)(), loader(8))
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    return {tag: [[each.step, each.value] for each in events.Scalars(tag)] for tag in sorted(events.Tags()["scalars"])}


def case_experiment_of_the_logger(L: Any, folder: Any) -> Any:
    logger = part(L, "loggers").TensorBoardLogger(folder)

    class Module(regression(L)):  # type: ignore[misc]
        def on_train_epoch_end(self) -> None:
            self.logger.experiment.add_scalar("own", 3.0, self.global_step)
            self.logger.experiment.add_histogram("weights", self.layer.weight, self.current_epoch)
            self.logger.log_metrics({"direct": 1.0}, step=self.global_step)

    trainer(L, folder, logger=logger).fit(Module(), loader())
    return [type(logger.experiment).__name__, any("events" in each for each in files(folder))]


def case_several_loggers(L: Any, folder: Any) -> Any:
    loggers = part(L, "loggers")
    run = trainer(L, folder, logger=[loggers.CSVLogger(folder, name="a"), loggers.CSVLogger(folder, name="b")])
    module = regression(L)()
    run.fit(module, loader())
    return [
        [each.name for each in run.loggers],
        run.logger.name,
        len(module.loggers),
        module.logger.name,
        str(run.log_dir),
    ]


def case_own_logger(L: Any, folder: Any) -> Any:
    loggers = part(L, "loggers")
    seen: list[Any] = []

    class Mine(loggers.Logger):
        @property
        def name(self) -> str:
            return "mine"

        @property
        def version(self) -> str:
            return "1"

        @part(L, "utilities").rank_zero_only
        def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
            seen.append(["hyper-parameters", dict(params)])

        @part(L, "utilities").rank_zero_only
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            seen.append([sorted(metrics), step])

        def save(self) -> None:
            pass

        def finalize(self, status: str) -> None:
            seen.append(["finalize", status])

    trainer(L, folder, logger=Mine(), log_every_n_steps=1).fit(regression(L)(), loader(8))
    return seen


def case_logger_true(L: Any, folder: Any) -> Any:
    run = trainer(L, folder, logger=True, log_every_n_steps=1)
    run.fit(regression(L)(), loader(8))
    return [len(run.loggers), type(run.logger).__name__, str(run.log_dir)]


def case_log_dir_without_a_logger(L: Any, folder: Any) -> Any:
    run = trainer(L, folder)
    return [str(run.log_dir), run.logger, run.loggers]


def case_print(L: Any, folder: Any) -> Any:
    import contextlib
    import io

    class Module(regression(L)):  # type: ignore[misc]
        def on_train_start(self) -> None:
            self.print("hello", 3, sep="-")

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        trainer(L, folder).fit(Module(), loader(4))
    return "hello-3\n" in output.getvalue()


def case_log_before_each_row(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append([batch_idx, sorted(self.trainer.callback_metrics), sorted(self.trainer.logged_metrics)])

    trainer(L, folder, log_every_n_steps=2).fit(Module(), DataLoader(data(12), batch_size=4))
    return seen


def case_log_graph(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = torch.zeros(1, 2)

    logger = part(L, "loggers").TensorBoardLogger(folder, log_graph=True)
    module = Module()
    trainer(L, folder, logger=logger).fit(module, loader(4))
    return [any("events" in each for each in files(folder)), list(module.example_input_array.shape)]


CASES = {
    "defaults_in_training_step": lambda L, folder: _metrics(L, folder, _logging(L)()),
    "on_epoch_alone": lambda L, folder: _metrics(L, folder, _logging(L, on_step=False, on_epoch=True)()),
    "on_step_and_on_epoch": lambda L, folder: _metrics(L, folder, _logging(L, on_step=True, on_epoch=True)()),
    "prog_bar": lambda L, folder:
        _metrics(L, folder, _logging(L, on_step=True, on_epoch=True, prog_bar=True, logger=False)()),
    "sync_dist_is_accepted": lambda L, folder: _metrics(L, folder, _logging(L, on_epoch=True, sync_dist=True)())[0],
}  # fmt: skip
"""Cases of one call, by their names."""
