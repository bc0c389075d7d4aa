"""Hooks: their order and their arguments."""

from __future__ import annotations

from typing import Any

import torch
from projects import FIT_HOOKS, STEP_HOOKS, data, hooks_of, loader, part, raised, recording, regression, trainer
from torch.utils.data import DataLoader


def case_fit_hooks_of_a_module(L: Any, folder: Any) -> Any:
    seen: list[str] = []
    module = recording(regression(L), FIT_HOOKS, seen.append)()
    trainer(L, folder).fit(module, loader(), loader(4))
    return seen


def case_fit_hooks_of_a_callback(L: Any, folder: Any) -> Any:
    seen: list[str] = []
    callback = recording(L.Callback, FIT_HOOKS, seen.append)()
    trainer(L, folder, callbacks=[callback], max_epochs=2).fit(regression(L)(), loader(8), loader(4))
    return seen


def case_step_hooks_of_a_callback(L: Any, folder: Any) -> Any:
    seen: list[str] = []
    callback = recording(L.Callback, [*STEP_HOOKS, "on_train_batch_start", "on_train_batch_end"], seen.append)()
    trainer(L, folder, callbacks=[callback]).fit(regression(L)(), loader(8))
    return seen


def case_step_hooks_and_methods_of_a_module(L: Any, folder: Any) -> Any:
    seen: list[str] = []
    names = [*STEP_HOOKS, "training_step", "backward", "optimizer_zero_grad", "configure_gradient_clipping"]
    trainer(L, folder, gradient_clip_val=1.0).fit(recording(regression(L), names, seen.append)(), loader(8))
    return seen


def case_optimizer_step_encloses_the_rest(L: Any, folder: Any) -> Any:
    seen: list[str] = []
    module = recording(regression(L), ["training_step", "backward", "optimizer_step"], seen.append)()
    trainer(L, folder).fit(module, loader(8))
    return seen


def case_step_hooks_with_accumulation(L: Any, folder: Any) -> Any:
    seen: list[str] = []
    callback = recording(L.Callback, [*STEP_HOOKS, "on_train_batch_end"], seen.append)()
    run = trainer(L, folder, callbacks=[callback], accumulate_grad_batches=2)
    run.fit(regression(L)(), loader(20))
    return [seen, run.global_step]


def case_gradients_in_the_hooks(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def on_before_zero_grad(self, optimizer: Any) -> None:
            seen.append(["before_zero_grad", self.layer.bias.grad is not None])

        def on_after_backward(self) -> None:
            seen.append(["after_backward", self.layer.bias.grad])

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(["batch_end", self.layer.bias.grad is not None])

    trainer(L, folder).fit(Module(), loader(8))
    return seen


def case_hooks_of_manual_optimization(L: Any, folder: Any) -> Any:
    seen: list[str] = []

    class Manual(regression(L)):  # type: ignore[misc]
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            seen.append("training_step ends")

    callback = recording(L.Callback, [*STEP_HOOKS, "on_train_batch_start", "on_train_batch_end"], seen.append)()
    trainer(L, folder, callbacks=[callback]).fit(Manual(), loader(8))
    return seen


def case_validate_hooks(L: Any, folder: Any) -> Any:
    seen: list[str] = []
    names = [*hooks_of("validation"), "on_validation_model_eval", "on_validation_model_train"]
    trainer(L, folder).validate(recording(regression(L), names, seen.append)(), loader(8), verbose=False)
    return seen


def case_test_hooks(L: Any, folder: Any) -> Any:
    seen: list[str] = []
    names = [*hooks_of("test"), "on_test_model_eval", "on_test_model_train"]
    trainer(L, folder).test(recording(regression(L), names, seen.append)(), loader(8), verbose=False)
    return seen


def case_predict_hooks(L: Any, folder: Any) -> Any:
    seen: list[str] = []
    callback = recording(L.Callback, hooks_of("predict"), seen.append)()
    trainer(L, folder, callbacks=callback).predict(regression(L)(), loader(8))
    return seen


def case_callbacks_come_before_the_module(L: Any, folder: Any) -> Any:
    seen: list[str] = []
    names = ["on_train_start", "on_train_epoch_end", "on_train_batch_start", "on_validation_epoch_end", "teardown"]
    callbacks = [recording(L.Callback, names, lambda name, i=i: seen.append(f"{name} {i}"))() for i in (1, 2)]
    module = recording(regression(L), names, lambda name: seen.append(f"{name} module"))()
    trainer(L, folder, callbacks=callbacks, num_sanity_val_steps=0).fit(module, loader(4), loader(4))
    return seen


def case_datamodule_hooks(L: Any, folder: Any) -> Any:
    seen: list[str] = []

    class Data(L.LightningDataModule):
        def prepare_data(self) -> None:
            seen.append("prepare_data")

        def setup(self, stage: str) -> None:
            seen.append(f"setup {stage == 'fit'}")

        def teardown(self, stage: str) -> None:
            seen.append(f"teardown {stage == 'fit'}")

        def train_dataloader(self) -> Any:
            seen.append("train_dataloader")
            return loader(8)

        def val_dataloader(self) -> Any:
            seen.append("val_dataloader")
            return loader(4)

        def test_dataloader(self) -> Any:
            seen.append("test_dataloader")
            return loader(4)

        def predict_dataloader(self) -> Any:
            seen.append("predict_dataloader")
            return loader(4)

    datamodule, run, module = Data(), trainer(L, folder, max_epochs=2), regression(L)()
    run.fit(module, datamodule=datamodule)
    run.validate(module, datamodule=datamodule, verbose=False)
    run.test(module, datamodule=datamodule, verbose=False)
    run.predict(module, datamodule=datamodule)
    return [seen, run.datamodule is datamodule]


def case_transfer_hooks(L: Any, folder: Any) -> Any:
    seen: list[str] = []
    names = ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "training_step"]
    trainer(L, folder).fit(recording(regression(L), names, seen.append)(), loader(8))
    return seen


def case_a_transfer_hook_changes_the_batch(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] * 2, batch[1]]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch[0].sum())
            return super().training_step(batch, batch_idx)

    trainer(L, folder).fit(Module(), loader(8))
    return seen


def case_setup_and_configure_order(L: Any, folder: Any) -> Any:
    seen: list[str] = []
    names = [
        "prepare_data", "setup", "configure_model", "configure_callbacks", "configure_optimizers", "on_fit_start",
        "train_dataloader", "on_train_start",
    ]  # fmt: skip

    class Module(regression(L)):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            return loader(4)

        def configure_callbacks(self) -> Any:
            return []

    trainer(L, folder).fit(recording(Module, names, seen.append)())
    return seen


def case_stage_given_to_setup(L: Any, folder: Any) -> Any:
    seen: list[str] = []

    class Module(regression(L)):  # type: ignore[misc]
        def setup(self, stage: str) -> None:
            seen.append([each for each in ("fit", "validate", "test", "predict") if stage == each])

        def teardown(self, stage: str) -> None:
            seen.append([each for each in ("fit", "validate", "test", "predict") if stage == each])

    run, module = trainer(L, folder), Module()
    run.fit(module, loader(4))
    run.validate(module, loader(4), verbose=False)
    run.test(module, loader(4), verbose=False)
    run.predict(module, loader(4))
    return seen


def case_outputs_given_to_on_train_batch_end(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append([sorted(outputs), outputs["loss"].requires_grad, batch_idx])

    class Dicts(regression(L)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": self.loss(batch), "size": len(batch[0])}

    for module in (regression(L)(), Dicts()):
        trainer(L, folder, callbacks=[Watch()], limit_train_batches=2).fit(module, loader())
    return seen


def case_outputs_given_to_validation_and_predict_ends(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return {"value": batch_idx * 10}

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            seen.append([outputs, batch_idx, dataloader_idx])

        def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            seen.append([list(outputs.shape), batch_idx, dataloader_idx])

    run, module = trainer(L, folder), Module()
    run.validate(module, loader(8), verbose=False)
    run.predict(module, loader(8))
    return seen


def case_minus_one_leaves_the_epoch(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if batch_idx == 2 else None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append([self.current_epoch, batch_idx])
            return super().training_step(batch, batch_idx)

    run = trainer(L, folder, max_epochs=2)
    run.fit(Module(), loader(20))
    return [seen, run.global_step, run.current_epoch]


def case_training_step_may_return_none(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    run = trainer(L, folder)
    run.fit(Module(), loader())
    return [run.global_step, run.callback_metrics["train_loss"]]


def case_on_exception(L: Any, folder: Any) -> Any:
    seen: list[str] = []

    class Watch(L.Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            seen.append(f"{type(exception).__name__} {trainer.interrupted}")

    class Module(regression(L)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("mine")

    run = trainer(L, folder, callbacks=[Watch()])
    return [raised(lambda: run.fit(Module(), loader())), seen, run.interrupted]


def case_teardown_after_an_exception(L: Any, folder: Any) -> Any:
    seen: list[str] = []

    class Module(regression(L)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("mine")

    module = recording(Module, ["setup", "teardown"], seen.append)()
    callback = recording(L.Callback, ["setup", "teardown"], seen.append)()
    return [raised(lambda: trainer(L, folder, callbacks=[callback]).fit(module, loader())), seen]


def case_module_modes(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.frozen = torch.nn.Dropout()
            self.frozen.eval()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(["train", self.training, self.frozen.training, torch.is_grad_enabled()])
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(["val", self.training, self.frozen.training, torch.is_grad_enabled()])

    module = Module()
    trainer(L, folder, max_epochs=2, limit_train_batches=1).fit(module, loader(), loader(4))
    return [seen, module.training]


def case_epoch_hooks_see_the_counters(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def on_train_epoch_start(self) -> None:
            seen.append(["start", self.current_epoch, self.global_step])

        def on_validation_epoch_end(self) -> None:
            seen.append(["val", self.current_epoch, self.global_step])

        def on_train_epoch_end(self) -> None:
            seen.append(["end", self.current_epoch, self.global_step])

        def on_train_end(self) -> None:
            seen.append(["last", self.current_epoch, self.global_step])

    run = trainer(L, folder, max_epochs=2, num_sanity_val_steps=0)
    run.fit(Module(), loader(8), loader(4))
    return [seen, run.current_epoch, run.global_step]


def case_step_without_batch_idx(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def training_step(self, batch: Any) -> Any:
            return self.loss(batch)

        def validation_step(self, batch: Any) -> None:
            self.log("val_loss", self.loss(batch))

    run = trainer(L, folder)
    run.fit(Module(), loader(), loader(4))
    return [run.global_step, sorted(run.callback_metrics)]


def case_configure_callbacks_replace_those_of_the_same_type(L: Any, folder: Any) -> Any:
    callbacks = part(L, "callbacks")

    class Module(regression(L)):  # type: ignore[misc]
        def configure_callbacks(self) -> Any:
            return [callbacks.EarlyStopping("train_loss", patience=7), callbacks.LambdaCallback()]

    run = trainer(L, folder, callbacks=[callbacks.EarlyStopping("train_loss", patience=1)])
    run.fit(Module(), loader())
    return [[type(each).__name__ for each in run.callbacks], run.early_stopping_callback.patience]


def case_state_flags_in_the_hooks(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    def note(where: str, run: Any) -> None:
        flags = ("training", "validating", "testing", "predicting", "sanity_checking", "evaluating")
        seen.append([where, *(name for name in flags if getattr(run, name))])

    class Watch(L.Callback):
        def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
            note("sanity", trainer)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            note("train", trainer)

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            note("validation", trainer)

        def on_test_start(self, trainer: Any, pl_module: Any) -> None:
            note("test", trainer)

        def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
            note("predict", trainer)

    run, module = trainer(L, folder, callbacks=[Watch()]), regression(L)()
    run.fit(module, loader(4), loader(4))
    run.validate(module, loader(4), verbose=False)
    run.test(module, loader(4), verbose=False)
    run.predict(module, loader(4))
    note("after", run)
    return seen


def case_loaders_from_the_module(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            return DataLoader(data(6), batch_size=2)

        def val_dataloader(self) -> Any:
            return [loader(4), loader(8)]

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val_loss", self.loss(batch))

    run = trainer(L, folder)
    run.fit(Module())
    return [run.num_training_batches, run.num_val_batches, run.num_sanity_val_batches, sorted(run.callback_metrics)]
