"""Checkpoints: their names, which are kept, loading and resuming."""

from __future__ import annotations

from typing import Any

import torch
from projects import files, loader, part, raised, refusal, regression, scripted, trainer

VALUES = (5.0, 3.0, 4.0, 1.0, 2.0)


def _names(L: Any, folder: Any, *, epochs: int = 5, batches: int = 8, fit: Any | None = None, **options: Any) -> Any:
    """Return the checkpoints of a ModelCheckpoint after a fit whose epochs have the scores VALUES."""
    callback = part(L, "callbacks").ModelCheckpoint(dirpath=folder / "saved", **options)
    module = scripted(L, "score", VALUES)()
    run = trainer(L, folder, callbacks=[callback], enable_checkpointing=True, max_epochs=epochs, **(fit or {}))
    run.fit(module, loader(batches), loader(4))
    best, kth = callback.best_model_path, callback.kth_best_model_path
    return {
        "files": files(folder),
        "best": str(best),
        "score": callback.best_model_score,
        "kth": str(kth),
        "kth value": callback.kth_value,
        "current": callback.current_score,
        "kept": {str(path): score for path, score in callback.best_k_models.items()},
    }


def case_name_without_inserted_metric_names(L: Any, folder: Any) -> Any:
    name = "e{epoch}-s{step}-{score:.1f}"
    return _names(L, folder, monitor="score", filename=name, auto_insert_metric_name=False)


def case_save_last(L: Any, folder: Any) -> Any:
    found = _names(L, folder, monitor="score", save_last=True)
    return [each for each in found["files"] if "last" in each], found["best"]


def case_path_of_last(L: Any, folder: Any) -> Any:
    callback = part(L, "callbacks").ModelCheckpoint(dirpath=folder, save_last=True)
    run = trainer(L, folder, callbacks=[callback], enable_checkpointing=True, max_epochs=2)
    run.fit(regression(L)(), loader(8))
    return str(callback.last_model_path)


def case_save_last_alone(L: Any, folder: Any) -> Any:
    found = _names(L, folder, save_top_k=0, save_last=True)
    return [[each for each in found["files"] if "last" in each], found["best"]]


def case_save_last_under_another_name(L: Any, folder: Any) -> Any:
    callback = part(L, "callbacks").ModelCheckpoint(dirpath=folder, save_last=True)
    callback.CHECKPOINT_NAME_LAST = "{epoch}-newest"
    run = trainer(L, folder, callbacks=[callback], enable_checkpointing=True, max_epochs=2)
    run.fit(regression(L)(), loader(8))
    return [each for each in files(folder) if "newest" in each]


def case_every_n_train_steps_with_accumulation(L: Any, folder: Any) -> Any:
    fit = {"accumulate_grad_batches": 2}
    return _names(L, folder, every_n_train_steps=2, save_top_k=-1, batches=16, fit=fit)


def case_save_on_train_epoch_end(L: Any, folder: Any) -> Any:
    return [
        _names(L, folder / str(each), save_on_train_epoch_end=each, save_top_k=-1, epochs=2)["files"]
        for each in (True, False)
    ]


def case_save_weights_only(L: Any, folder: Any) -> Any:
    found = _names(L, folder, save_weights_only=True, epochs=2)
    kwargs = {"weights_only": False} if L.__name__ == "lightning" else {}
    loaded = regression(L).load_from_checkpoint(found["best"], **kwargs)
    return [found["files"], loaded.layer.weight]


def case_wrong_settings_of_checkpoints(L: Any, folder: Any) -> Any:
    kind = part(L, "callbacks").ModelCheckpoint
    wrong = (
        {"save_top_k": 3}, {"mode": "best"}, {"save_top_k": -2}, {"every_n_epochs": -1},
        {"every_n_epochs": 1, "every_n_train_steps": 1}, {"every_n_train_steps": -1},
    )  # fmt: skip
    return {str(each): refusal(lambda each=each: kind(**each)) for each in wrong}


def case_default_checkpoints(L: Any, folder: Any) -> Any:
    logger = part(L, "loggers").CSVLogger(folder, name="logs")
    run = trainer(L, folder, logger=logger, enable_checkpointing=True)
    run.fit(regression(L)(), loader(8))
    saved = [each for each in files(folder) if each.endswith(".ckpt")]  # the loggers may write a row of a short run
    return [saved, str(run.checkpoint_callback.dirpath), str(run.checkpoint_callback.best_model_path)]


def case_default_checkpoints_without_a_logger(L: Any, folder: Any) -> Any:
    run = trainer(L, folder, enable_checkpointing=True)
    run.fit(regression(L)(), loader(8))
    return files(folder)


def case_two_checkpoint_callbacks(L: Any, folder: Any) -> Any:
    kind = part(L, "callbacks").ModelCheckpoint
    best = kind(dirpath=folder, monitor="score", filename="best-{epoch}")
    newest = kind(dirpath=folder, filename="newest-{epoch}")
    run = trainer(L, folder, callbacks=[best, newest], enable_checkpointing=True, max_epochs=5)
    run.fit(scripted(L, "score", VALUES)(), loader(8), loader(4))
    return [files(folder), len(run.checkpoint_callbacks), run.checkpoint_callback is best]


def case_nan_scores(L: Any, folder: Any) -> Any:
    callback = part(L, "callbacks").ModelCheckpoint(dirpath=folder, monitor="score")
    run = trainer(L, folder, callbacks=[callback], enable_checkpointing=True, max_epochs=3)
    run.fit(scripted(L, "score", (3.0, float("nan"), 5.0))(), loader(4), loader(4))
    return [files(folder), callback.best_model_score]


def case_scores_that_tie(L: Any, folder: Any) -> Any:
    callback = part(L, "callbacks").ModelCheckpoint(dirpath=folder, monitor="score")
    run = trainer(L, folder, callbacks=[callback], enable_checkpointing=True, max_epochs=3)
    run.fit(scripted(L, "score", (3.0, 3.0, 3.0))(), loader(4), loader(4))
    return files(folder)


def case_format_checkpoint_name(L: Any, folder: Any) -> Any:
    kind = part(L, "callbacks").ModelCheckpoint
    values = {"epoch": torch.tensor(3), "step": torch.tensor(12), "val": torch.tensor(0.123)}
    return [
        kind(dirpath=folder).format_checkpoint_name(values),
        kind(dirpath=folder, filename="{epoch}-{val:.2f}").format_checkpoint_name(values),
        kind(dirpath=folder, filename="{epoch:03d}", auto_insert_metric_name=False).format_checkpoint_name(values),
    ]


def _saved(L: Any, folder: Any, module: Any, **options: Any) -> Any:
    run = trainer(L, folder, **options)
    run.fit(module, loader(12))
    path = str(folder / "my.ckpt")
    run.save_checkpoint(path)
    return path


def _with_hparams(L: Any) -> type[Any]:
    class Module(regression(L)):  # type: ignore[misc]
        def __init__(self, width: int, lr: float = 0.1, name: str = "net") -> None:
            super().__init__(lr)
            self.save_hyperparameters()
            self.extra = torch.nn.Linear(width, 1)

    return Module


def case_load_from_checkpoint(L: Any, folder: Any) -> Any:
    kind = _with_hparams(L)
    module = kind(width=3, lr=0.2)
    loaded = kind.load_from_checkpoint(_saved(L, folder, module))
    return [dict(loaded.hparams), torch.equal(loaded.layer.weight, module.layer.weight), loaded.lr, loaded.training]


def case_load_with_overrides(L: Any, folder: Any) -> Any:
    kind = _with_hparams(L)
    loaded = kind.load_from_checkpoint(_saved(L, folder, kind(width=3, lr=0.2)), lr=0.5, map_location="cpu")
    return [dict(loaded.hparams), loaded.lr]


def case_load_with_another_shape(L: Any, folder: Any) -> Any:
    kind = _with_hparams(L)
    path = _saved(L, folder, kind(width=3))
    return [
        refusal(lambda: kind.load_from_checkpoint(path, width=4)),
        refusal(lambda: regression(L).load_from_checkpoint(path)),
        refusal(lambda: regression(L).load_from_checkpoint(path, strict=False)),
    ]


def case_load_of_a_missing_file(L: Any, folder: Any) -> Any:
    try:
        regression(L).load_from_checkpoint(str(folder / "missing.ckpt"))
    except FileNotFoundError:
        return "there is no such file"


def case_load_without_saved_hparams(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def __init__(self, width: int) -> None:
            super().__init__()
            self.width = width

    path = _saved(L, folder, Module(3))
    return [refusal(lambda: Module.load_from_checkpoint(path)), Module.load_from_checkpoint(path, width=5).width]


def case_load_of_a_subclass_in_memory(L: Any, folder: Any) -> Any:
    module = regression(L)()
    path = _saved(L, folder, module)
    fresh = regression(L)()
    loaded = type(fresh).load_from_checkpoint(path, lr=0.7)
    return [loaded.lr, loaded is fresh, torch.equal(loaded.layer.bias, module.layer.bias)]


def case_checkpoint_hooks_of_a_module(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def on_save_checkpoint(self, checkpoint: Any) -> None:
            checkpoint["mine"] = {"a": 1}
            seen.append(["save", checkpoint["epoch"], checkpoint["global_step"], sorted(checkpoint["state_dict"])])

        def on_load_checkpoint(self, checkpoint: Any) -> None:
            seen.append(["load", checkpoint["mine"], checkpoint["global_step"]])

    path = _saved(L, folder, Module())
    Module.load_from_checkpoint(path)
    trainer(L, folder, max_epochs=2).fit(Module(), loader(12), ckpt_path=path)
    return seen


def case_state_of_callbacks(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Counter(L.Callback):
        def __init__(self) -> None:
            self.count = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.count += 1

        def state_dict(self) -> Any:
            return {"count": self.count}

        def load_state_dict(self, state_dict: Any) -> None:
            seen.append(dict(state_dict))
            self.count = state_dict["count"]

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            seen.append("save")

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            seen.append("load")

    path = _saved(L, folder, regression(L)(), callbacks=[Counter()])
    counter = Counter()
    trainer(L, folder, max_epochs=2, callbacks=[counter]).fit(regression(L)(), loader(12), ckpt_path=path)
    return [sorted(map(str, seen)), counter.count]


def case_state_of_a_datamodule(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(12)

        def state_dict(self) -> Any:
            return {"position": 7}

        def load_state_dict(self, state_dict: Any) -> None:
            seen.append(dict(state_dict))

    run, module = trainer(L, folder), regression(L)()
    run.fit(module, datamodule=Data())
    run.save_checkpoint(folder / "my.ckpt")
    trainer(L, folder, max_epochs=2).fit(module, datamodule=Data(), ckpt_path=folder / "my.ckpt")
    return seen


def case_resume(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def on_train_start(self) -> None:
            seen.append([self.current_epoch, self.global_step])

        def on_train_epoch_start(self) -> None:
            seen.append(self.current_epoch)

    path = _saved(L, folder, Module(), max_epochs=2)
    run, module = trainer(L, folder, max_epochs=4), Module()
    run.fit(module, loader(12), ckpt_path=path)
    whole = regression(L)()
    trainer(L, folder, max_epochs=4).fit(whole, loader(12))
    return [seen, run.current_epoch, run.global_step, torch.equal(whole.layer.weight, module.layer.weight)]


def case_resume_with_momentum_and_schedule(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    path = _saved(L, folder, Module(), max_epochs=3)
    run, module = trainer(L, folder, max_epochs=5), Module()
    run.fit(module, loader(12), ckpt_path=path)
    return [module.layer.weight, run.optimizers[0].param_groups[0]["lr"]]


def case_resume_from_a_finished_run(L: Any, folder: Any) -> Any:
    path = _saved(L, folder, regression(L)(), max_epochs=2)
    run = trainer(L, folder, max_epochs=2)
    run.fit(regression(L)(), loader(12), ckpt_path=path)
    return [run.current_epoch, run.global_step]


def case_resume_within_an_epoch(L: Any, folder: Any) -> Any:
    kind = part(L, "callbacks").ModelCheckpoint
    callback = kind(dirpath=folder, every_n_train_steps=2, save_top_k=-1)
    trainer(L, folder, callbacks=[callback], enable_checkpointing=True).fit(regression(L)(), loader(20))
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append([self.current_epoch, batch_idx, batch[0][0, 0]])
            return super().training_step(batch, batch_idx)

    run = trainer(L, folder)
    run.fit(Module(), loader(20), ckpt_path=str(folder / "epoch=0-step=2.ckpt"))
    return [seen, run.global_step]


def case_resume_after_max_steps_within_an_epoch(L: Any, folder: Any) -> Any:
    path = _saved(L, folder, regression(L)(), max_steps=5, max_epochs=-1)
    run = trainer(L, folder, max_epochs=3)
    run.fit(regression(L)(), loader(12), ckpt_path=path)
    return [run.current_epoch, run.global_step]


def case_resume_with_the_best(L: Any, folder: Any) -> Any:
    callback = part(L, "callbacks").ModelCheckpoint(dirpath=folder, monitor="score", save_top_k=2)
    run = trainer(L, folder, callbacks=[callback], enable_checkpointing=True, max_epochs=2)
    run.fit(scripted(L, "score", (1.0, 2.0))(), loader(4), loader(4))
    again = part(L, "callbacks").ModelCheckpoint(dirpath=folder, monitor="score", save_top_k=2)
    longer = trainer(L, folder, callbacks=[again], enable_checkpointing=True, max_epochs=4)
    longer.fit(scripted(L, "score", (0.5, 3.0))(), loader(4), loader(4), ckpt_path=str(folder / "epoch=1-step=2.ckpt"))
    return [files(folder), again.best_model_score, str(again.best_model_path)]


def case_last_and_best_as_paths(L: Any, folder: Any) -> Any:
    callback = part(L, "callbacks").ModelCheckpoint(dirpath=folder, monitor="val_loss", save_last=True)
    run, module = trainer(L, folder, callbacks=[callback], enable_checkpointing=True, max_epochs=2), regression(L)()
    run.fit(module, loader(12), loader(4))
    best = run.validate(dataloaders=loader(4), ckpt_path="best", verbose=False)
    last = run.test(dataloaders=loader(4), ckpt_path="last", verbose=False)
    longer = trainer(L, folder, callbacks=[callback], enable_checkpointing=True, max_epochs=3)
    longer.fit(regression(L)(), loader(12), loader(4), ckpt_path="last")
    return [best, last, longer.current_epoch, longer.global_step]


def case_best_without_checkpoints(L: Any, folder: Any) -> Any:
    run, module = trainer(L, folder), regression(L)()
    run.fit(module, loader(4))
    return [
        refusal(lambda: run.test(dataloaders=loader(4), ckpt_path="best")),
        refusal(lambda: run.test(module, loader(4), ckpt_path=str(folder / "none.ckpt"))),
    ]


def case_save_checkpoint_in_a_hook(L: Any, folder: Any) -> Any:
    class Saves(L.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(folder / f"mine-{trainer.current_epoch}.ckpt")

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(folder / "two.ckpt", weights_only=True)

    trainer(L, folder, callbacks=[Saves()], max_epochs=2).fit(regression(L)(), loader(12))
    run = trainer(L, folder, max_epochs=3)
    run.fit(regression(L)(), loader(12), ckpt_path=folder / "mine-0.ckpt")
    return [files(folder), run.current_epoch, run.global_step]


def case_dirpath_and_filename_after_construction(L: Any, folder: Any) -> Any:
    callback = part(L, "callbacks").ModelCheckpoint()
    callback.dirpath = str(folder / "later")
    callback.filename = "{epoch}"
    trainer(L, folder, callbacks=[callback], enable_checkpointing=True).fit(regression(L)(), loader(4))
    return files(folder)


def case_weights_of_a_loaded_datamodule(L: Any, folder: Any) -> Any:
    class Data(L.LightningDataModule):
        def __init__(self, size: int, seed: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return loader(self.hparams.size)

    run = trainer(L, folder)
    run.fit(regression(L)(), datamodule=Data(8))
    run.save_checkpoint(folder / "my.ckpt")
    return dict(Data.load_from_checkpoint(folder / "my.ckpt", seed=5).hparams)


def case_on_exception_checkpoint(L: Any, folder: Any) -> Any:
    callback = part(L, "callbacks").OnExceptionCheckpoint(folder, filename="broken")

    class Module(regression(L)):  # type: ignore[misc]
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                raise ValueError("mine")

    refused = raised(
        lambda: trainer(L, folder, callbacks=[callback], max_epochs=3, enable_checkpointing=True).fit(
            Module(), loader(8)
        )
    )
    return [refused, files(folder)]


def case_time_interval(L: Any, folder: Any) -> Any:
    from datetime import timedelta

    callback = part(L, "callbacks").ModelCheckpoint(
        dirpath=folder, train_time_interval=timedelta(seconds=0), save_top_k=-1
    )
    trainer(L, folder, callbacks=[callback], enable_checkpointing=True).fit(regression(L)(), loader(12))
    return len(files(folder)) >= 2


def case_checkpoint_before_the_first_step(L: Any, folder: Any) -> Any:
    callback = part(L, "callbacks").ModelCheckpoint(dirpath=folder, save_top_k=-1)

    class Module(regression(L)):  # type: ignore[misc]
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            pass

    trainer(L, folder, callbacks=[callback], enable_checkpointing=True).fit(Module(), loader(8))
    return files(folder)


CASES = {
    "newest_without_a_monitor": lambda L, folder: _names(L, folder),
    "best_of_a_monitor": lambda L, folder: _names(L, folder, monitor="score"),
    "best_three": lambda L, folder: _names(L, folder, monitor="score", save_top_k=3),
    "best_three_of_two": lambda L, folder: _names(L, folder, monitor="score", save_top_k=3, epochs=2),
    "best_of_mode_max": lambda L, folder: _names(L, folder, monitor="score", mode="max", save_top_k=2),
    "all_of_them": lambda L, folder: _names(L, folder, save_top_k=-1),
    "all_with_a_monitor": lambda L, folder: _names(L, folder, save_top_k=-1, monitor="score"),
    "none_of_them": lambda L, folder: _names(L, folder, save_top_k=0),
    "name_with_a_metric": lambda L, folder: _names(L, folder, monitor="score", filename="{epoch}-{score:.2f}"),
    "name_with_text_and_padding": lambda L, folder:
        _names(L, folder, filename="model-{epoch:02d}-{step:05d}", save_top_k=-1, epochs=2),
    "name_in_a_subfolder": lambda L, folder: _names(L, folder, filename="sub/{epoch}", save_top_k=-1, epochs=2),
    "fixed_name": lambda L, folder: _names(L, folder, filename="model", epochs=3),
    "fixed_name_kept_twice": lambda L, folder:
        _names(L, folder, filename="model", monitor="score", save_top_k=2, epochs=3),
    "fixed_name_without_versions": lambda L, folder:
        _names(L, folder, filename="model", enable_version_counter=False, epochs=3),
    "files_beside_last": lambda L, folder: _names(L, folder, monitor="score", save_last=True)["files"],
    "every_n_epochs": lambda L, folder: _names(L, folder, every_n_epochs=2, save_top_k=-1),
    "every_n_train_steps": lambda L, folder: _names(L, folder, every_n_train_steps=3, save_top_k=-1),
    "every_n_train_steps_newest": lambda L, folder: _names(L, folder, every_n_train_steps=4),
    "save_after_validations_within_epochs": lambda L, folder:
        _names(L, folder, monitor="score", save_top_k=-1, batches=16, fit={"val_check_interval": 0.5}, epochs=2),
    "a_monitor_that_is_not_logged": lambda L, folder: refusal(lambda: _names(L, folder, monitor="unheard", epochs=1)),
    "save_checkpoint_before_a_fit": lambda L, folder:
        refusal(lambda: trainer(L, folder).save_checkpoint(folder / "x.ckpt")),
}  # fmt: skip
"""Cases of one call, by their names."""
