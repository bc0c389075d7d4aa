"""The Trainer: limits, intervals, counters and attributes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from projects import data, loader, part, raised, refusal, regression, trainer
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, samples: int) -> None:
        self.items = list(data(samples))

    def __iter__(self) -> Any:
        return iter(self.items)


def _timeline(L: Any, folder: Any, train: Any, val: Any, **options: Any) -> Any:
    """Return the batches and validations of a fit in their order, and the final counters."""
    seen: list[str] = []

    class Module(regression(L)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(f"t{self.current_epoch}.{batch_idx}")
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(f"{'s' if self.trainer.sanity_checking else 'v'}{batch_idx}")
            return super().validation_step(batch, batch_idx)

    run = trainer(L, folder, **options)
    run.fit(Module(), train, val)
    return [" ".join(seen), run.current_epoch, run.global_step]


def case_val_check_interval_with_accumulation(L: Any, folder: Any) -> Any:
    options = {"val_check_interval": 4, "accumulate_grad_batches": 2}
    return _timeline(L, folder, loader(32), loader(4), max_epochs=1, **options)


def case_limits_as_numbers(L: Any, folder: Any) -> Any:
    return _timeline(
        L, folder, loader(40), loader(20), limit_train_batches=3, limit_val_batches=2, num_sanity_val_steps=1
    )


def case_limits_as_fractions(L: Any, folder: Any) -> Any:
    return _timeline(
        L, folder, loader(40), loader(20), limit_train_batches=0.25, limit_val_batches=0.5, num_sanity_val_steps=0
    )


def case_limits_of_zero(L: Any, folder: Any) -> Any:
    return [
        _timeline(L, folder, loader(8), loader(8), limit_val_batches=0),
        _timeline(L, folder, loader(8), loader(8), limit_train_batches=0),
        _timeline(L, folder, loader(8), loader(8), limit_train_batches=0.0, limit_val_batches=0.0),
    ]


def case_overfit_batches(L: Any, folder: Any) -> Any:
    return [
        _timeline(L, folder, loader(40), loader(20), overfit_batches=2, max_epochs=2),
        _timeline(L, folder, loader(40), loader(20), overfit_batches=0.5),
    ]


def case_overfit_batches_turns_shuffling_off(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch[0][0, 0])
            return self.loss(batch)

    trainer(L, folder, overfit_batches=1, max_epochs=2).fit(Module(), loader(12, shuffle=True))
    return seen


def case_fast_dev_run(L: Any, folder: Any) -> Any:
    run = trainer(L, folder, fast_dev_run=2, max_epochs=5, logger=True, enable_checkpointing=True)
    run.fit(regression(L)(), loader(40), loader(20))
    return [
        _timeline(L, folder, loader(40), loader(20), fast_dev_run=True),
        _timeline(L, folder, loader(40), loader(20), fast_dev_run=3),
        [run.max_epochs, run.max_steps, run.num_training_batches, run.num_sanity_val_steps, run.fast_dev_run],
        sorted(path.name for path in folder.iterdir()),
    ]


def case_max_steps_or_max_epochs(L: Any, folder: Any) -> Any:
    return [
        _timeline(L, folder, loader(12), None, max_steps=4, max_epochs=1),
        _timeline(L, folder, loader(12), None, max_steps=2, max_epochs=5),
    ]


def case_min_epochs_and_should_stop(L: Any, folder: Any) -> Any:
    class Stops(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.should_stop = True

    counts = []
    for options in ({}, {"min_epochs": 2}, {"min_steps": 5}):
        run = trainer(L, folder, max_epochs=4, callbacks=[Stops()], **options)
        run.fit(regression(L)(), loader(12))
        counts.append([run.current_epoch, run.global_step, run.should_stop])
    return counts


def case_should_stop_at_an_epochs_end(L: Any, folder: Any) -> Any:
    class Stops(L.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = trainer.current_epoch == 1

    return _timeline(L, folder, loader(8), loader(4), max_epochs=5, callbacks=[Stops()])


def case_should_stop_at_an_epochs_start(L: Any, folder: Any) -> Any:
    class Stops(L.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = trainer.current_epoch == 1

    return _timeline(L, folder, loader(8), None, max_epochs=5, callbacks=[Stops()])


def case_should_stop_within_an_epoch_validates(L: Any, folder: Any) -> Any:
    class Stops(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.should_stop = batch_idx == 1

    options = {"max_epochs": 5, "callbacks": [Stops()], "num_sanity_val_steps": 0}
    return _timeline(L, folder, loader(20), loader(4), **options)


def case_max_time(L: Any, folder: Any) -> Any:
    run = trainer(L, folder, max_epochs=-1, max_time={"seconds": 0})
    run.fit(regression(L)(), loader(8))
    accepted = [
        refusal(lambda each=each: trainer(L, folder, max_time=each))
        for each in ("00:00:01:00", timedelta(minutes=1), {"minutes": 2})
    ]
    return [run.global_step <= 2, accepted]


def case_short_last_window(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append(self.layer.bias.grad.clone())

    trainer(L, folder, accumulate_grad_batches=2).fit(Module(), loader(12))
    return seen


def case_counters_of_batches(L: Any, folder: Any) -> Any:
    run = trainer(L, folder, limit_val_batches=2, num_sanity_val_steps=1)

    class Module(regression(L)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            pass

    run.fit(Module(), loader(40), [loader(20), loader(4)])
    return [run.num_training_batches, run.num_val_batches, run.num_sanity_val_batches]


def case_estimated_stepping_batches(L: Any, folder: Any) -> Any:
    found = []

    class Module(regression(L)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            found.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    for options in (
        {"max_epochs": 3},
        {"max_epochs": 3, "accumulate_grad_batches": 4},
        {"max_steps": 7, "max_epochs": -1},
    ):
        trainer(L, folder, **options).fit(Module(), loader(20))
    return found


def case_streams(L: Any, folder: Any) -> Any:
    return [
        _timeline(L, folder, DataLoader(Stream(10), 4), DataLoader(Stream(4), 4), max_epochs=2),
        _timeline(L, folder, DataLoader(Stream(40), 4), None, limit_train_batches=2),
    ]


def case_stream_sizes(L: Any, folder: Any) -> Any:
    run = trainer(L, folder)
    run.fit(regression(L)(), DataLoader(Stream(10), 4), DataLoader(Stream(4), 4))
    return [str(run.num_training_batches), [str(each) for each in run.num_val_batches]]


def case_attributes(L: Any, folder: Any) -> Any:
    run = trainer(L, folder, max_epochs=3, gradient_clip_val=0.5, accumulate_grad_batches=2, log_every_n_steps=7)
    names = (
        "max_epochs", "max_steps", "min_epochs", "min_steps", "gradient_clip_val", "gradient_clip_algorithm",
        "accumulate_grad_batches", "log_every_n_steps", "check_val_every_n_epoch", "val_check_interval", "limit_train_batches",
        "limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches", "fast_dev_run", "global_step",
        "current_epoch", "world_size", "num_devices", "num_nodes", "global_rank", "local_rank", "node_rank",
        "is_global_zero", "should_stop", "precision", "num_sanity_val_steps", "reload_dataloaders_every_n_epochs",
        "interrupted", "device_ids", "barebones", "predict_loop", "ckpt_path",
    )  # fmt: skip
    return {name: getattr(run, name, "missing") for name in names if name != "predict_loop"}


def case_attributes_of_the_strategy(L: Any, folder: Any) -> Any:
    run = trainer(L, folder)
    return [str(run.strategy.root_device), run.strategy.is_global_zero, run.strategy.global_rank]


def case_state_after_a_fit(L: Any, folder: Any) -> Any:
    run = trainer(L, folder)
    run.fit(regression(L)(), loader(4))
    return [run.state.status.value, run.state.fn.value, run.state.finished]


def case_state_after_an_error(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("mine")

    run = trainer(L, folder)
    refused = raised(lambda: run.fit(Module(), loader(4)))
    return [refused, run.state.status.value]


def case_loop_attributes(L: Any, folder: Any) -> Any:
    run = trainer(L, folder, max_epochs=2)
    run.fit(regression(L)(), loader(8), loader(4))
    return [
        run.fit_loop.max_epochs,
        run.fit_loop.epoch_progress.current.completed,
        run.fit_loop.epoch_loop.total_batch_idx,
    ]


def case_raising_max_epochs_between_fits(L: Any, folder: Any) -> Any:
    run, module = trainer(L, folder, max_epochs=1), regression(L)()
    run.fit(module, loader(8))
    run.fit_loop.max_epochs = 3
    run.fit(module, loader(8))
    return [run.current_epoch, run.global_step, run.max_epochs]


def case_fit_twice(L: Any, folder: Any) -> Any:
    seen: list[int] = []

    class Module(regression(L)):  # type: ignore[misc]
        def on_train_epoch_start(self) -> None:
            seen.append(self.current_epoch)

    run, module = trainer(L, folder, max_epochs=2), Module()
    run.fit(module, loader(8))
    run.fit(module, loader(8))
    return [seen, run.current_epoch, run.global_step]


def case_two_trainers_one_module(L: Any, folder: Any) -> Any:
    module = regression(L)()
    for _ in range(2):
        run = trainer(L, folder, max_epochs=2)
        run.fit(module, loader(8))
    return [run.current_epoch, run.global_step, module.trainer is run, module.layer.weight.tolist()]


def case_reload_dataloaders(L: Any, folder: Any) -> Any:
    seen: list[str] = []

    class Module(regression(L)):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            seen.append(f"train {self.current_epoch}")
            return loader(8)

        def val_dataloader(self) -> Any:
            seen.append(f"val {self.current_epoch}")
            return loader(4)

    run = trainer(L, folder, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    run.fit(Module())
    return seen


def case_interrupt_by_a_user(L: Any, folder: Any) -> Any:
    seen: list[str] = []

    class Watch(L.Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            seen.append(type(exception).__name__)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            raise KeyboardInterrupt

    run = trainer(L, folder, callbacks=[Watch()])
    return [raised(lambda: run.fit(regression(L)(), loader(8))), seen, run.interrupted]


def case_wrong_settings(L: Any, folder: Any) -> Any:
    wrong = (
        {"limit_train_batches": 1.5}, {"val_check_interval": 1.5}, {"max_epochs": -2},
        {"gradient_clip_algorithm": "other"}, {"precision": "12-mixed"}, {"strategy": "unheard"}, {"accelerator": "warp"},
        {"unknown_argument": 1}, {"limit_val_batches": -1}, {"overfit_batches": 2.5},
    )  # fmt: skip
    return {str(each): refusal(lambda each=each: trainer(L, folder, **each)) for each in wrong}


def case_settings_without_a_meaning(L: Any, folder: Any) -> Any:
    wrong = ({"accumulate_grad_batches": 0}, {"check_val_every_n_epoch": None})

    def fit(options: Any) -> None:
        trainer(L, folder, **options).fit(regression(L)(), loader(8), loader(4))

    return {str(each): refusal(lambda each=each: fit(each)) for each in wrong}


def case_missing_parts_of_a_module(L: Any, folder: Any) -> Any:
    class Nothing(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

    class Steps(Nothing):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0]).sum()

    run = trainer(L, folder)
    calls = {
        "no training_step": lambda: run.fit(Nothing(), loader(4)),
        "no validation_step": lambda: run.validate(Nothing(), loader(4)),
        "no test_step": lambda: run.test(Nothing(), loader(4)),
        "no loader": lambda: run.fit(regression(L)()),
        "not a module": lambda: run.fit(torch.nn.Linear(2, 1), loader(4)),
        "loaders and datamodule": lambda: run.fit(regression(L)(), loader(4), datamodule=L.LightningDataModule()),
    }
    return {name: refusal(call) for name, call in calls.items()}


def case_precisions(L: Any, folder: Any) -> Any:
    found: dict[str, Any] = {}
    for precision in (32, "32-true", "bf16-mixed", "bf16-true", "64-true", "bf16", 64):
        seen: list[str] = []

        class Module(regression(L)):  # type: ignore[misc]
            def training_step(self, batch: Any, batch_idx: int, seen: Any = seen) -> Any:
                seen.append(f"{batch[0].dtype} {self(batch[0]).dtype} {self.dtype}")
                return self.loss(batch)

        run = trainer(L, folder, precision=precision)
        run.fit(Module(), loader(4))
        found[str(precision)] = [run.precision, *seen]
    return found


def case_barebones(L: Any, folder: Any) -> Any:
    run = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, barebones=True, default_root_dir=folder)
    run.fit(regression(L)(), loader(8))
    return [run.barebones, run.logger, [type(each).__name__ for each in run.callbacks], run.global_step]


def case_default_callbacks(L: Any, folder: Any) -> Any:
    run = L.Trainer(accelerator="cpu", devices=1, default_root_dir=folder, logger=False)
    kinds = [type(each).__name__ for each in run.callbacks]
    return [len(kinds), "ModelCheckpoint" in kinds, type(run.checkpoint_callback).__name__, run.early_stopping_callback]


def case_profilers(L: Any, folder: Any) -> Any:
    found = []
    for profiler in ("simple", "advanced", part(L, "profilers").SimpleProfiler(dirpath=folder, filename="mine"), None):
        run = trainer(L, folder, profiler=profiler)
        run.fit(regression(L)(), loader(4))
        found.append(type(run.profiler).__name__ if profiler else "none")
    return [found, sorted(path.name for path in folder.iterdir())]


def case_detect_anomaly(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) + torch.sqrt(self.layer.bias * 0.0 - 1.0).sum()

    return [
        refusal(lambda: trainer(L, folder, detect_anomaly=True).fit(Module(), loader(4))),
        refusal(lambda: trainer(L, folder).fit(Module(), loader(4))),
    ]


def case_inference_mode(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append([torch.is_inference_mode_enabled(), torch.is_grad_enabled()])

    for options in ({}, {"inference_mode": True}, {"inference_mode": False}):
        trainer(L, folder, **options).validate(Module(), loader(4), verbose=False)
    return seen


def case_deterministic_and_benchmark(L: Any, folder: Any) -> Any:
    before = torch.are_deterministic_algorithms_enabled()
    seen = []

    class Module(regression(L)):  # type: ignore[misc]
        def on_train_start(self) -> None:
            seen.append([torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark])

    trainer(L, folder, deterministic=True).fit(Module(), loader(4))
    torch.use_deterministic_algorithms(before)
    return seen


def case_devices_and_accelerators(L: Any, folder: Any) -> Any:
    found = []
    for options in ({"devices": 1}, {"devices": "1"}, {"devices": "auto", "accelerator": "cpu"}, {"strategy": "auto"}):
        run = trainer(L, folder, **options)
        found.append([run.num_devices, run.world_size, str(run.strategy.root_device)])
    return found


def case_callbacks_given_alone_or_none(L: Any, folder: Any) -> Any:
    mine = L.Callback()
    return [len(trainer(L, folder, callbacks=each).callbacks) for each in (mine, [mine], None, [])]


def case_is_last_batch(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(self.trainer.is_last_batch)
            return self.loss(batch)

    trainer(L, folder).fit(Module(), loader(12))
    return seen


def case_init_module_and_context(L: Any, folder: Any) -> Any:
    run = trainer(L, folder)
    with run.init_module():
        module = regression(L)()
    with run.init_module(empty_init=True):
        layer = torch.nn.Linear(2, 2)
    return [str(module.layer.weight.device), list(layer.weight.shape)]


def case_trained_weights(L: Any, folder: Any) -> Any:
    module = regression(L)()
    trainer(L, folder, max_epochs=3, gradient_clip_val=0.2, accumulate_grad_batches=3).fit(module, loader(24))
    return [module.layer.weight, module.layer.bias]


CASES = {
    "val_check_interval_as_a_fraction": lambda L, folder:
        _timeline(L, folder, loader(32), loader(4), val_check_interval=0.25, max_epochs=2),
    "val_check_interval_as_batches": lambda L, folder:
        _timeline(L, folder, loader(28), loader(4), val_check_interval=3, max_epochs=2),
    "val_check_interval_over_epochs": lambda L, folder:
        _timeline(L, folder, loader(20), loader(4), val_check_interval=4, check_val_every_n_epoch=None, max_epochs=3),
    "val_check_interval_above_the_epoch": lambda L, folder:
        refusal(lambda: trainer(L, folder, val_check_interval=10).fit(regression(L)(), loader(8), loader(4))),
    "check_val_every_n_epoch": lambda L, folder:
        _timeline(L, folder, loader(8), loader(4), check_val_every_n_epoch=2, max_epochs=5),
    "sanity_steps": lambda L, folder:
        [_timeline(L, folder, loader(4), loader(16), num_sanity_val_steps=each) for each in (0, 1, -1)],
    "max_steps": lambda L, folder:
        _timeline(L, folder, loader(12), loader(4), max_steps=5, max_epochs=-1, num_sanity_val_steps=0),
    "max_steps_at_an_epochs_end": lambda L, folder:
        _timeline(L, folder, loader(12), loader(4), max_steps=6, max_epochs=-1, num_sanity_val_steps=0),
    "max_steps_with_accumulation": lambda L, folder:
        _timeline(L, folder, loader(20), None, max_steps=4, accumulate_grad_batches=2, max_epochs=10),
    "max_steps_zero": lambda L, folder: _timeline(L, folder, loader(12), None, max_steps=0),
    "max_epochs_zero": lambda L, folder: _timeline(L, folder, loader(12), loader(4), max_epochs=0),
}  # fmt: skip
"""Cases of one call, by their names."""
