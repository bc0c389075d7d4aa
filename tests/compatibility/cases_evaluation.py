"""validate, test and predict: results and metrics."""

from __future__ import annotations

from typing import Any

import torch
from projects import files, loader, part, refusal, regression, trainer


def case_validate_returns_the_metrics(L: Any, folder: Any) -> Any:
    run = trainer(L, folder)
    return [run.validate(regression(L)(), loader(10), verbose=False), run.callback_metrics]


def case_test_returns_the_metrics(L: Any, folder: Any) -> Any:
    run = trainer(L, folder)
    return [run.test(regression(L)(), loader(10), verbose=False), run.callback_metrics]


def case_test_of_several_loaders(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("acc", float(dataloader_idx))
            self.log("plain", 1.0 + dataloader_idx, add_dataloader_idx=True)

    return trainer(L, folder).test(Module(), [loader(4), loader(8)], verbose=False)


def case_one_loader_in_a_dict(L: Any, folder: Any) -> Any:
    return trainer(L, folder).test(regression(L)(), {"clean": loader(4)}, verbose=False)


def case_without_metrics(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def test_step(self, batch: Any, batch_idx: int) -> None:
            pass

    return trainer(L, folder).test(Module(), loader(4), verbose=False)


def case_step_values_in_evaluation(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("v", float(batch_idx), on_step=True, on_epoch=True)

    run = trainer(L, folder)
    return [run.validate(Module(), loader(12), verbose=False), sorted(run.callback_metrics)]


def case_metrics_of_epoch_ends(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.outputs: list[Any] = []

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.outputs.append(self.loss(batch))

        def on_test_epoch_end(self) -> None:
            self.log("mean", torch.stack(self.outputs).mean())
            self.outputs.clear()

    return trainer(L, folder).test(Module(), loader(12), verbose=False)


def case_predict_returns_batches(L: Any, folder: Any) -> Any:
    return trainer(L, folder).predict(regression(L)(), loader(10))


def case_predict_of_several_loaders(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return self(batch[0])

    run = trainer(L, folder)
    found = run.predict(Module(), [loader(4), loader(6, 2)])
    return [[[list(batch.shape) for batch in each] for each in found], run.num_predict_batches]


def case_predict_without_returning(L: Any, folder: Any) -> Any:
    return trainer(L, folder).predict(regression(L)(), loader(4), return_predictions=False)


def case_predict_with_forward_alone(L: Any, folder: Any) -> Any:
    class Module(L.LightningModule):
        def forward(self, x: Any) -> Any:
            return x[0].sum()

    return trainer(L, folder).predict(Module(), loader(8))


def case_predict_dicts(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return {"p": self(batch[0]), "i": batch_idx, "text": "a"}

    return trainer(L, folder, limit_predict_batches=2).predict(Module(), loader(12))


def _writer(L: Any, interval: str, seen: list[Any]) -> Any:
    class Writer(part(L, "callbacks").BasePredictionWriter):  # type: ignore[misc]
        def write_on_batch_end(
            self,
            trainer: Any,
            pl_module: Any,
            prediction: Any,
            batch_indices: Any,
            batch: Any,
            batch_idx: int,
            loader: int,
        ) -> None:
            seen.append([list(prediction.shape), batch_indices, batch_idx, loader])

        def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
            seen.append([len(predictions), batch_indices])

    return Writer(write_interval=interval)


def case_prediction_writer(L: Any, folder: Any) -> Any:
    found = []
    for interval in ("batch", "epoch", "batch_and_epoch"):
        seen: list[Any] = []
        trainer(L, folder, callbacks=[_writer(L, interval, seen)]).predict(regression(L)(), loader(10))
        found.append(seen)
    return found


def case_prediction_writer_without_returning(L: Any, folder: Any) -> Any:
    seen: list[Any] = []
    run = trainer(L, folder, callbacks=[_writer(L, "batch", seen)])
    return [run.predict(regression(L)(), loader(10), return_predictions=False), seen]


def case_wrong_interval_of_a_writer(L: Any, folder: Any) -> Any:
    return refusal(lambda: _writer(L, "sometimes", []))


def case_limits_of_evaluation(L: Any, folder: Any) -> Any:
    run = trainer(L, folder, limit_test_batches=2, limit_val_batches=0.5, limit_predict_batches=1)
    module = regression(L)()
    run.test(module, loader(20), verbose=False)
    run.validate(module, loader(16), verbose=False)
    validated = list(run.num_val_batches)
    predictions = run.predict(module, loader(20))
    return [run.num_test_batches, validated, run.num_predict_batches, len(predictions)]


def case_without_a_module_after_fit(L: Any, folder: Any) -> Any:
    run, module = trainer(L, folder, max_epochs=2, enable_checkpointing=True), regression(L)()
    run.fit(module, loader(12), loader(4))
    return [
        run.validate(dataloaders=loader(8), verbose=False),
        run.test(dataloaders=loader(8), verbose=False),
        refusal(lambda: trainer(L, folder).validate(dataloaders=loader(8))),
    ]


def case_the_best_weights_without_a_module(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("score", float(self.current_epoch))

    best = part(L, "callbacks").ModelCheckpoint(folder, monitor="score")
    run, module = trainer(L, folder, max_epochs=3, callbacks=[best], enable_checkpointing=True), Module()
    run.fit(module, loader(12), loader(4))
    last = module.layer.weight.tolist()
    found = run.test(dataloaders=loader(8), verbose=False)
    return [found, last, module.layer.weight]


def case_the_present_weights_with_a_module(L: Any, folder: Any) -> Any:
    run, module = trainer(L, folder, max_epochs=2, enable_checkpointing=True), regression(L)()
    run.fit(module, loader(12), loader(4))
    torch.nn.init.zeros_(module.layer.weight)
    return run.test(module, loader(8), verbose=False)


def case_metrics_of_validate_within_fit_and_after(L: Any, folder: Any) -> Any:
    run, module = trainer(L, folder), regression(L)()
    run.fit(module, loader(12), loader(4))
    fitted = dict(run.callback_metrics)
    run.test(module, loader(8), verbose=False)
    return [fitted, run.callback_metrics, run.logged_metrics]


def case_evaluation_leaves_counters(L: Any, folder: Any) -> Any:
    run, module = trainer(L, folder, max_epochs=2), regression(L)()
    run.fit(module, loader(12))
    run.test(module, loader(4), verbose=False)
    run.validate(module, loader(4), verbose=False)
    return [run.current_epoch, run.global_step]


def case_gradients_in_evaluation(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def test_step(self, batch: Any, batch_idx: int) -> None:
            with torch.enable_grad():
                x = batch[0].clone().requires_grad_()
                gradient = torch.autograd.grad(self(x).sum(), x)[0]
            self.log("g", gradient.sum())

    return trainer(L, folder, inference_mode=False).test(Module(), loader(4), verbose=False)


def case_verbose_table(L: Any, folder: Any) -> Any:
    import contextlib
    import io

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        trainer(L, folder).test(regression(L)(), loader(4), verbose=True)
    return "test_loss" in output.getvalue()


def case_an_evaluation_of_a_checkpoint(L: Any, folder: Any) -> Any:
    run, module = trainer(L, folder), regression(L)()
    run.fit(module, loader(12))
    run.save_checkpoint(folder / "my.ckpt")
    fresh = regression(L)()
    found = trainer(L, folder).test(fresh, loader(12), ckpt_path=str(folder / "my.ckpt"), verbose=False)
    return [found, torch.equal(fresh.layer.weight, module.layer.weight)]


def case_weights_of_a_test_stay(L: Any, folder: Any) -> Any:
    run, module = trainer(L, folder, enable_checkpointing=True), regression(L)()
    run.fit(module, loader(12), loader(4))
    run.test(ckpt_path="best", dataloaders=loader(4), verbose=False)
    return [module.layer.weight, len(files(folder))]


def case_dataloader_names_of_predict(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            seen.append([batch_idx, dataloader_idx])

    trainer(L, folder).predict(Module(), [loader(8), loader(4)])
    return seen


def case_eval_with_arguments_that_are_missing(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("v", 1.0)

    return refusal(lambda: trainer(L, folder).validate(Module(), [loader(4), loader(4)], verbose=False))


def case_combined_loader_in_validation(L: Any, folder: Any) -> Any:
    seen: list[Any] = []
    combined = part(L, "utilities.combined_loader").CombinedLoader({"a": loader(4), "b": loader(8)}, "max_size_cycle")

    class Module(regression(L)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append([sorted(batch), batch_idx])

    trainer(L, folder).validate(Module(), combined, verbose=False)
    return seen
