"""Boundaries of windows, epochs and runs on one process: saves, resumes, callbacks and errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from small import QUIET, Classifier, assert_equal, loss_of, make_data, make_loader, weights
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset

import trainwright as tw
from trainwright.loggers import CSVLogger


def fit(module: tw.Module, loader: Any = None, val: Any = None, ckpt_path: Any = None, **settings: Any) -> tw.Trainer:
    loader = make_loader(16) if loader is None else loader
    return small.fit(module, loader, val, ckpt_path=ckpt_path, **settings)


def saving(folder: Path, **settings: Any) -> dict[str, Any]:
    """The settings of a run that saves into a folder as `<step>.ckpt`."""
    checkpoint = tw.ModelCheckpoint(
        folder, "{step}", save_top_k=-1, auto_insert_metric_name=False, **(settings or {"every_n_train_steps": 1})
    )
    return {"callbacks": [checkpoint], "enable_checkpointing": True}


class Samples(IterableDataset[Any]):
    """A stream of unknown length, whose order is drawn from torch's generator."""

    def __init__(self, count: int, shuffle: bool = True) -> None:
        self.count, self.shuffle = count, shuffle

    def __iter__(self) -> Iterator[Any]:
        data = make_data(self.count)
        for index in torch.randperm(self.count).tolist() if self.shuffle else range(self.count):
            yield data[index]


class Gradients(Classifier):
    """Records the gradients of the optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Tensor] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.noted.append(torch.cat([each.grad.flatten() for each in self.parameters()]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Own(Gradients):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize("kind", [Gradients, Own])
def test_a_short_last_window_is_divided_by_its_length(kind: type[Gradients]) -> None:
    """Seven batches in windows of three, of a stream whose end nobody knew when the seventh was divided."""
    module = kind()
    fit(module, DataLoader(Samples(7, shuffle=False), batch_size=1), accumulate_grad_batches=3, gradient_clip_val=0.05)
    hand = Gradients()
    optimizer = hand.configure_optimizers()
    batches = list(DataLoader(Samples(7, shuffle=False), batch_size=1))
    for window in (batches[:3], batches[3:6], batches[6:]):
        optimizer.zero_grad()
        for batch in window:
            (loss_of(hand.net, batch) / len(window)).backward()
        hand.on_before_optimizer_step(optimizer)
        nn.utils.clip_grad_norm_(hand.parameters(), 0.05)
        optimizer.step()
    torch.testing.assert_close(torch.stack(module.noted).cpu(), torch.stack(hand.noted))
    torch.testing.assert_close(weights(module), weights(hand))


def test_on_train_batch_end_gets_detached_outputs() -> None:
    given: list[Any] = []

    class Returns(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
            loss = super().training_step(batch, batch_idx)
            return (loss, {"loss": loss, "more": {"logits": self.net(batch[0])}, "name": "a"}, None, loss)[batch_idx]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            given.append(outputs)

    watch = tw.LambdaCallback(on_train_batch_end=lambda trainer, module, outputs, *_: given.append(outputs))
    fit(Returns(), callbacks=[watch])
    for first, second in (given[:2], given[6:]):
        assert first.keys() == second.keys() == {"loss"}
        assert first["loss"].grad_fn is None
        assert first["loss"].shape == ()
    for outputs in given[2:4]:
        assert (outputs["name"], outputs["loss"].grad_fn, outputs["more"]["logits"].grad_fn) == ("a", None, None)
    assert given[4:6] == [{}, {}]


@pytest.mark.parametrize("stage", ["validation", "test", "predict"])
def test_index_zero_is_passed_to_hooks_of_one_loader(stage: str) -> None:
    given: list[int] = []

    class Module(Classifier):
        def start(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            given.append(dataloader_idx)

        def end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            given.append(dataloader_idx)

    def watch(trainer: Any, module: Any, *given_to_hook: Any) -> None:
        given.append(given_to_hook[-1])

    hooks = (f"on_{stage}_batch_start", f"on_{stage}_batch_end")
    for name, hook in zip(hooks, (Module.start, Module.end), strict=True):
        setattr(Module, name, hook)
    trainer = tw.Trainer(callbacks=[tw.LambdaCallback(**dict.fromkeys(hooks, watch))], **QUIET)
    call = {"validation": trainer.validate, "test": trainer.test, "predict": trainer.predict}[stage]
    call(Module(), make_loader(4, 4))
    assert given == [0] * 4
    if stage == "predict":
        call(Module(), [make_loader(4, 4), make_loader(4, 4)])
        assert given == [*[0] * 8, *[1] * 4]


class Averaged(Classifier):
    """Follows its weights in buffers, at the ends of batches and of validations."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros_like(self.net[0].weight))
        self.register_buffer("validations", torch.zeros(()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.mean.lerp_(self.net[0].weight.detach(), 0.1)

    def on_validation_end(self) -> None:
        self.validations += 1


@pytest.mark.parametrize("settings", [{"every_n_train_steps": 3}, {"every_n_epochs": 1}])
def test_a_save_holds_what_the_module_has_done(tmp_path: Path, settings: dict[str, Any]) -> None:
    """At the end of the batch that it is made after, and at the end of the validation within an epoch."""
    whole = Averaged()
    fit(whole, None, make_loader(4), max_epochs=2, val_check_interval=2, **saving(tmp_path, **settings))
    saved = sorted(int(path.stem) for path in tmp_path.glob("*.ckpt"))
    assert saved == ([3, 6] if "every_n_train_steps" in settings else [2, 4, 6, 8])
    for step in saved:
        resumed = Averaged()
        fit(resumed, None, make_loader(4), tmp_path / f"{step}.ckpt", max_epochs=2, val_check_interval=2)
        assert_equal(weights(resumed), weights(whole))


class Drawing(Dataset[Any]):
    """Draws from torch's generator in this process, as augmentation does."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        sample, label = make_data(16)[index]
        return sample + 0.1 * torch.rand_like(sample), label


class SavesInBatch(Classifier):
    """Asks for a checkpoint once, in one of the hooks and parts of its third batch."""

    def __init__(self, moment: str = "", path: Any = None, *, is_manual: bool = False) -> None:
        super().__init__(dropout=0.2)
        self.automatic_optimization = not is_manual
        self.moment, self.path = moment, path
        self.written: list[bool] = []

    def ask(self, moment: str) -> None:
        if moment == self.moment and self.global_step >= 2 and not self.written:
            self.written.append(self.trainer.save_checkpoint(self.path))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.ask("training_step")
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.ask("after_a_step")
        return loss

    def on_after_backward(self) -> None:
        self.ask("on_after_backward")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.ask("optimizer_step")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.9), "interval": "step"}]


@pytest.mark.parametrize("moment", ["training_step", "on_after_backward", "optimizer_step", "after_a_step"])
def test_a_save_within_a_batch_is_of_its_end(tmp_path: Path, moment: str) -> None:
    """A resumed run repeats no batch that was drawn, of which gradients wait, or with which the weights were stepped."""
    is_manual = moment == "after_a_step"
    whole, resumed = SavesInBatch(moment, tmp_path / "a.ckpt", is_manual=is_manual), SavesInBatch(is_manual=is_manual)
    fit(whole, DataLoader(Drawing(), batch_size=4), max_epochs=2)
    assert whole.written == [False]
    trainer = fit(resumed, DataLoader(Drawing(), batch_size=4), max_epochs=2, ckpt_path=tmp_path / "a.ckpt")
    assert_equal(weights(resumed), weights(whole))
    assert trainer.global_step == 8


class Validated(Classifier):
    """A scheduler steps after a validation, and another follows a metric of it that never improves."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("same", 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.9)
        return [optimizer], [
            {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "validation"},
            {"scheduler": plateau, "interval": "validation", "monitor": "same"},
        ]


@pytest.mark.parametrize("interval", [1.0, 3])
@pytest.mark.parametrize("at_epoch_end", [None, False])
def test_the_validation_of_a_stopped_run_counts_for_nothing(
    tmp_path: Path, interval: int | float, at_epoch_end: bool | None
) -> None:
    """A run is stopped in the middle of its second epoch. Four validations without improvement end it after the fourth."""
    settings: dict[str, Any] = {"val": make_loader(4), "val_check_interval": interval}

    def stopping() -> tw.EarlyStopping:
        return tw.EarlyStopping("same", patience=3, check_on_train_epoch_end=at_epoch_end)

    whole, resumed = Validated(), Validated()
    expected = fit(whole, max_epochs=6, callbacks=[stopping()], **settings)
    early, checkpoint = stopping(), tw.ModelCheckpoint(tmp_path)
    trainer = fit(
        Validated(), max_steps=6, max_epochs=6, callbacks=[early, checkpoint],
        **{**settings, "enable_checkpointing": True},
    )  # fmt: skip
    assert trainer.callback_metrics["same"] == 1.0
    assert (trainer.global_step, trainer.state.validations, early.wait_count) == (6, 1, 0)
    found = fit(resumed, max_epochs=6, callbacks=[stopping()], ckpt_path=checkpoint.best_model_path, **settings)
    assert_equal(weights(resumed), weights(whole))
    for trainer in (expected, found):
        assert (trainer.global_step, trainer.state.validations) == (expected.global_step, 4)
        assert trainer.early_stopping_callback.wait_count == 3
    rates = [each.optimizers[0].param_groups[0]["lr"] for each in (expected, found)]
    assert rates[0] == rates[1] == pytest.approx(0.5**4 * 0.9**3)


@pytest.mark.parametrize("key", ["seed", "extra", "precision", "strategy", "optimizers"])
def test_keys_of_the_engine_are_refused(tmp_path: Path, key: str) -> None:
    class Takes(Classifier):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint[key] = 1

    trainer = fit(Takes())
    with pytest.raises(ValueError, match=f"on_save_checkpoint put {key} into the checkpoint.*choose another key"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()


class Late(Classifier):
    """Builds its layers in configure_model."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = Classifier().net


def test_a_module_that_builds_its_layers_late_comes_back(tmp_path: Path) -> None:
    trainer = fit(Late())
    assert trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert_equal(weights(Late.load_from_checkpoint(str(tmp_path / "a.ckpt"))), weights(trainer.model))


class Named(tw.Callback):
    def __init__(self, name: str) -> None:
        self.name = name


class Other(Named):
    pass


def names(trainer: tw.Trainer) -> list[str]:
    return [each.name for each in trainer.callbacks if isinstance(each, Named)]


def test_a_modules_callbacks_are_its_own(tmp_path: Path) -> None:
    class First(Classifier):
        def configure_callbacks(self) -> Any:
            checkpoint = tw.ModelCheckpoint(tmp_path, monitor="val_loss")
            return [checkpoint, tw.EarlyStopping("val_loss"), Named("first")]

    trainer = tw.Trainer(
        max_epochs=2, callbacks=[Named("own"), Other("other")], **{**QUIET, "enable_checkpointing": None}
    )
    default = trainer.checkpoint_callback
    first = First()
    for _ in range(2):
        trainer.fit(first, make_loader(8), make_loader(4))
        callbacks = list(trainer.callbacks)
        assert names(trainer) == ["other", "first"]
        checkpoint = trainer.checkpoint_callback
        assert checkpoint is not default
        assert len(trainer.checkpoint_callbacks) == 1
        assert Path(checkpoint.best_model_path).parent == tmp_path
        best = trainer.test(first, make_loader(4), ckpt_path="best", verbose=False)
        assert best[0]["val_loss"] == pytest.approx(float(checkpoint.best_model_score))
        assert trainer.callbacks == callbacks  # with their state of the fit


@pytest.mark.parametrize("call", ["fit", "validate"])
def test_a_run_within_a_run_is_refused(call: str) -> None:
    class Nests(tw.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            with pytest.raises(RuntimeError, match=f"trainer.{call} was called while trainer.fit runs. Call it after"):
                getattr(trainer, call)(module, make_loader(4))

    module, expected = Classifier(), Classifier()
    trainer = fit(module, callbacks=[Nests()])
    assert (trainer.global_step, trainer.run.running_call) == (4, None)
    fit(expected)
    assert_equal(weights(module), weights(expected))


class Ending(tw.Callback):
    """Fails in given hooks, and records its calls."""

    def __init__(self, calls: list[str], *failing: str) -> None:
        self.calls, self.failing = calls, failing

    def told(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failing:
            raise LookupError(f"{name} failed")

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.told("setup")

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.told("on_exception")

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self.told("teardown")


class Closing(CSVLogger):
    """Notes how it was left."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.left: list[str] = []

    def finalize(self, status: Any) -> None:
        self.left.append(status)
        super().finalize(status)

    def close(self) -> None:
        self.left.append("closed")
        super().close()


@pytest.mark.parametrize("where", ["setup", "training_step", "teardown"])
def test_the_first_error_comes_out_and_the_rest_is_done(tmp_path: Path, capsys: Any, where: str) -> None:
    calls: list[str] = []

    class Broken(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if where == "training_step":
                raise ArithmeticError("training_step failed")
            return super().training_step(batch, batch_idx)

        def setup(self, stage: str) -> None:
            if where == "setup":
                raise ArithmeticError("setup failed")

        def teardown(self, stage: str) -> None:
            calls.append("module teardown")
            raise LookupError("the module's teardown failed")

    class Data(tw.DataModule):
        def train_dataloader(self) -> Any:
            return make_loader(8)

        def on_exception(self, exception: BaseException) -> None:
            calls.append("data on_exception")

        def teardown(self, stage: str) -> None:
            calls.append("data teardown")

    failing = Ending(calls, "teardown", "on_exception")
    logger = Closing(tmp_path)
    trainer = tw.Trainer(
        max_epochs=1, limit_val_batches=0, callbacks=[failing, Ending(calls)], **{**QUIET, "logger": logger}
    )
    module = Broken()
    kind = LookupError if where == "teardown" else ArithmeticError
    with pytest.raises(kind, match=f"{where} failed"):
        trainer.fit(module, datamodule=Data())
    ends = ["data teardown", "teardown", "teardown", "module teardown"]
    told = [] if where == "teardown" else ["on_exception", "on_exception", "data on_exception"]
    assert calls == ["setup", "setup", *told, *ends]
    assert logger.left == ["failed", "closed"]
    said = capsys.readouterr().err
    assert "LookupError: the module's teardown failed" in said
    assert ("LookupError: on_exception failed" in said) is (where != "teardown")
    assert (trainer.run.running_call, trainer.training) == (None, False)


@pytest.mark.parametrize(
    ("scheduling", "settings", "steps"),
    [({0: 4}, {}, 9), ({0: 1, 1: 2, 2: 8}, {}, 11 + 6 + 2), ({1: 3}, {}, 11 + 4 + 4), ({0: 4}, {"max_steps": 5}, 5)],
)
def test_estimated_steps_include_scheduled_windows(scheduling: dict[int, int], settings: Any, steps: int) -> None:
    class Planned(Classifier):
        def configure_optimizers(self) -> Any:
            self.planned = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    module = Planned()
    scheduler = tw.GradientAccumulationScheduler(scheduling)
    trainer = fit(module, make_loader(44), max_epochs=3, callbacks=[scheduler], **settings)
    assert (module.planned, trainer.global_step) == (steps, steps)


def test_another_trainer_may_run_within_a_run() -> None:
    class Evaluates(tw.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                (found,) = tw.Trainer(**QUIET).validate(module, make_loader(5), verbose=False)
                assert found["count"] == 5
                assert module.trainer is trainer
                assert module.training

    module, expected = Classifier(dropout=0.3), Classifier(dropout=0.3)
    torch.manual_seed(1)
    trainer = fit(module, make_loader(16), max_epochs=2, callbacks=[Evaluates()])
    torch.manual_seed(1)
    other = fit(expected, make_loader(16), max_epochs=2)
    assert_equal(weights(module), weights(expected))
    assert trainer.callback_metrics == other.callback_metrics


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_save_in_a_batch_that_ends_the_epoch_is_of_the_epochs_end(tmp_path: Path, accumulate: int) -> None:
    class Leaves(tw.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> int | None:
            if trainer.current_epoch or batch_idx != 2:
                return None
            assert not trainer.save_checkpoint(tmp_path / "a.ckpt")
            return -1

    whole, resumed = Classifier(dropout=0.2), Classifier(dropout=0.2)
    settings: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
    expected = fit(whole, callbacks=[Leaves()], **settings)
    trainer = fit(resumed, ckpt_path=tmp_path / "a.ckpt", **settings)
    assert_equal(weights(resumed), weights(whole))
    assert trainer.global_step == expected.global_step


def test_a_toggled_optimizer_is_untoggled_after_an_error() -> None:
    class Toggles(Classifier):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.net[0].bias.requires_grad = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net[index].parameters(), lr=0.1) for index in (0, 3)]

        def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
            self.toggle_optimizer(self.optimizers()[1])
            assert not self.net[0].weight.requires_grad
            raise ArithmeticError("between toggle and untoggle")

    module = Toggles()
    with pytest.raises(ArithmeticError, match="between toggle and untoggle"):
        fit(module)
    assert {name for name, each in module.named_parameters() if not each.requires_grad} == {"net.0.bias"}


def test_rows_that_are_logged_in_teardown_are_written(tmp_path: Path) -> None:
    last = tw.LambdaCallback(teardown=lambda trainer, *_: trainer.logger.log_metrics({"final": 0.25}, step=99))
    trainer = fit(Classifier(), callbacks=[last], logger=CSVLogger(tmp_path))
    rows = Path(str(trainer.log_dir), "metrics.csv").read_text().splitlines()
    assert "final" in rows[0].split(",")
    assert rows[-1].split(",")[0] == "99"
    assert "0.25" in rows[-1].split(",")


def test_the_module_may_log_after_a_save_with_its_hook(tmp_path: Path) -> None:
    saves = tw.LambdaCallback(
        on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx: trainer.save_checkpoint(
            tmp_path / f"{batch_idx}.ckpt"
        )
    )

    class Logs(Classifier):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = 1

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("end", float(batch_idx), on_epoch=True)

    trainer = fit(Logs(), callbacks=[saves])
    assert float(trainer.callback_metrics["end_epoch"]) == 1.5
    assert len(list(tmp_path.iterdir())) == 4


def test_weights_are_saved_within_a_batch_and_a_failed_one_waits_for_nothing(tmp_path: Path) -> None:
    class Fails(tw.Callback):
        def on_after_backward(self, trainer: Any, module: Any) -> None:
            assert trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
            raise KeyError("broken")

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            assert trainer.save_checkpoint(tmp_path / "failed.ckpt")

    with pytest.raises(KeyError, match="broken"):
        fit(Classifier(), callbacks=[Fails()])
    assert len(list(tmp_path.iterdir())) == 2
