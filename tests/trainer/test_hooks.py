"""The complete order of the hooks in trainer/hooks.py for all kinds of runs, on one process and on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET, Classifier, loss_of, make_loader
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

import trainwright as tw
from trainwright.module_hooks import ModuleHooks
from trainwright.trainer.hooks import HOOKS, nearest_hook

TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
OF_MODULES = (
    *(name for name in vars(ModuleHooks) if not name.startswith("_")),
    "training_step", "validation_step", "test_step", "predict_step", "configure_optimizers", "backward",
    "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping",
)  # fmt: skip
OF_DATA = (
    "prepare_data", "setup", "teardown", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader",
    *TRANSFER, "state_dict", "load_state_dict", "on_exception",
)  # fmt: skip
OF_CALLBACKS = (*HOOKS, "state_dict", "load_state_dict")


def recording(base: type, names: Any, who: str, calls: list[str]) -> type:
    """Return a subclass that records these methods before it runs them."""

    def record(name: str) -> Any:
        inner = getattr(base, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(f"{who}.{name}")
            return inner(self, *args, **kwargs)

        return call

    return type(f"Recording{who}", (base,), {name: record(name) for name in names})


class Last(tw.Callback):
    """Runs last, and finds the epoch's metrics there."""

    priority = -10

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.calls.append("L.on_train_epoch_start")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.calls.append("L.on_train_epoch_end")
        assert "loss_epoch" in trainer.callback_metrics


class Data(tw.DataModule):
    def train_dataloader(self) -> Any:
        return make_loader()

    def val_dataloader(self) -> Any:
        return [make_loader(8), make_loader(8)]

    def test_dataloader(self) -> Any:
        return make_loader(8)

    def predict_dataloader(self) -> Any:
        return make_loader(8)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 1}


class Planned(Classifier):
    """Has schedulers of all kinds, and its loaders."""

    def __init__(self, calls: list[str], callback: tw.Callback) -> None:
        super().__init__()
        self.calls, self.callback = calls, callback

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", loss_of(self.net, batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", loss_of(self.net, batch))

    def configure_callbacks(self) -> Any:
        return [Last(self.calls), self.callback]

    train_dataloader = test_dataloader = predict_dataloader = lambda self: make_loader(24)
    val_dataloader = lambda self: make_loader(4)  # noqa: E731

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.calls.append(f"M.lr_scheduler_step({scheduler.label})")
        super().lr_scheduler_step(scheduler, metric)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: self.calls.append("step"))
        configs = []
        for interval in ("step", "epoch", "validation"):
            configs.append({"scheduler": LambdaLR(optimizer, lambda count: 1.0), "interval": interval})
            configs[-1]["scheduler"].label = interval
        plateau = ReduceLROnPlateau(optimizer)
        plateau.label = "plateau"
        return [optimizer], [*configs, {"scheduler": plateau, "monitor": "loss_epoch"}]


def both(*names: str) -> str:
    """Callbacks, then the module."""
    return " ".join(f"C.{name} M.{name}" for name in names)


def moved(who: str) -> str:
    return " ".join(f"{who}.{name}" for name in TRANSFER)


def evaluation(stage: str, who: str, loaders: str, *, batches: int = 1, ending: str = "") -> str:
    """The calls of a validation, test or prediction whose loaders and transfer hooks belong to `who`."""
    batch = f"{moved(who)} {both(f'on_{stage}_batch_start')} M.{stage}_step {both(f'on_{stage}_batch_end')} "
    save_point = "C.on_save_point" if stage == "validation" else ""
    return f"""{loaders} M.on_{stage}_model_eval {both(f"on_{stage}_start", f"on_{stage}_epoch_start")} {batch * batches}
        {both(f"on_{stage}_epoch_end")} {ending} {both(f"on_{stage}_end")} {save_point} M.on_{stage}_model_train"""


def training_batch(who: str, *, opens: bool = True, ends: bool = True) -> str:
    zero_grad = f"{both('on_before_zero_grad')} M.optimizer_zero_grad"
    step = f"""{both("on_before_optimizer_step")} M.configure_gradient_clipping M.optimizer_step step
        M.lr_scheduler_step(step)"""
    return f"""{moved(who)} {both("on_train_batch_start")} M.training_step {zero_grad if opens else ""}
        {both("on_before_backward")} M.backward {both("on_after_backward")} {step if ends else ""}
        {both("on_train_batch_end")} C.on_save_point"""


def opening(stage: str, *, data: bool, is_first: bool = True, tunes: bool = False) -> str:
    """The calls before any loop. Only one process prepares data."""
    tuned = "C.on_tune" if tunes else ""
    prepared = f"{'D.prepare_data ' if data else ''}M.prepare_data" if is_first else ""
    return f"M.configure_callbacks {tuned} {prepared} {'D.setup' if data else ''} {both('setup')} M.configure_model"


def closing(*, data: bool, reports: bool = True) -> str:
    return f"{'D.teardown' if data else ''} {both('teardown')} {'C.on_run_end' if reports else ''}"


def validation(who: str, **kwargs: Any) -> str:
    within = evaluation("validation", who, "", ending="M.lr_scheduler_step(validation)", **kwargs)
    return f"M.on_validation_model_zero_grad {within}"


ENDING = f"{both('on_train_epoch_end')} M.lr_scheduler_step(plateau) L.on_train_epoch_end C.on_save_point"
STATE = "D.state_dict C.state_dict C.sharded_state_dict"
SAVED = f"saved {STATE} {both('on_save_checkpoint')} L.on_train_epoch_end"
PREPARED = f"M.configure_optimizers {both('on_fit_start')} C.configure_lr_scheduler"
LAST = f"C.on_before_train_end {both('on_train_end', 'on_fit_end')}"
EPOCH_START = (
    f"""{both("on_train_epoch_start").replace(" M.", " L.on_train_epoch_start M.")} C.configure_lr_scheduler"""
)
FIRST_EPOCH = f"""{EPOCH_START}
    {training_batch("D")} {training_batch("D")} M.lr_scheduler_step(epoch) {validation("D", batches=2)} {ENDING}"""


def fit_with_data(is_first: bool) -> str:
    return f"""{opening("fit", data=True, is_first=is_first, tunes=True)} {PREPARED}
        C.on_sanity_check_start {evaluation("validation", "D", "D.val_dataloader", batches=2)} C.on_sanity_check_end
        D.train_dataloader {both("on_train_start")} {FIRST_EPOCH.replace("L.on_train_epoch_end", SAVED)}
        {LAST} {closing(data=True)}"""


def resumed(is_first: bool) -> str:
    epoch = FIRST_EPOCH.replace("M.on_validation_model_eval", "D.val_dataloader M.on_validation_model_eval")
    return f"""{opening("fit", data=True, is_first=is_first)} {both("on_load_checkpoint")}
        C.load_state_dict D.load_state_dict {PREPARED} C.load_sharded_state_dict
        D.train_dataloader C.on_resume_start {both("on_train_start")} C.on_resume_end {epoch} {LAST} {closing(data=True)}"""


def evaluated(stage: str, is_first: bool) -> str:
    call = {"validation": "validate"}.get(stage, stage)
    loader = f"D.{stage.removesuffix('idation')}_dataloader"
    batches = 2 if stage == "validation" else 1
    return f"""{opening(call, data=True, is_first=is_first)} {evaluation(stage, "D", loader, batches=batches)}
        {closing(data=True, reports=stage != "predict")}"""


def record_all(folder: Path) -> dict[str, list[str]]:
    """Run everything with a DataModule and return the calls."""
    calls: list[str] = []
    data = recording(Data, OF_DATA, "D", calls)()
    kept = recording(tw.Callback, OF_CALLBACKS, "C", calls)
    settings = {**QUIET, "devices": "auto", "limit_train_batches": 2, "limit_val_batches": 1, "gradient_clip_val": 1.0}
    limits = {"limit_test_batches": 1, "limit_predict_batches": 1, "num_sanity_val_steps": 1}
    found: dict[str, list[str]] = {}

    class Saving(tw.Callback):
        priority = -10

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 0:
                calls.append("saved")
                trainer.save_checkpoint(folder / "first.ckpt")

    def run(name: str, method: str, epochs: int = 1, **kwargs: Any) -> None:
        calls.clear()
        callback = kept()
        callback.state_dict = lambda: calls.append("C.state_dict") or {"seen": 1}
        trainer = tw.Trainer(max_epochs=epochs, callbacks=[Saving()], **settings, **limits)
        getattr(trainer, method)(recording(Planned, OF_MODULES, "M", calls)(calls, callback), datamodule=data, **kwargs)
        found[name] = list(calls)

    run("fit", "fit")
    run("resumed", "fit", 2, ckpt_path=folder / "first.ckpt")
    for method in ("validate", "test", "predict"):
        run(method, method)
    return found


def expected_of_all(is_first: bool) -> dict[str, list[str]]:
    timelines = {
        "fit": fit_with_data(is_first),
        "resumed": resumed(is_first),
        "validate": evaluated("validation", is_first),
        "test": evaluated("test", is_first),
        "predict": evaluated("predict", is_first),
    }
    return {name: text.split() for name, text in timelines.items()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_kinds_of_runs_call_their_hooks_in_order(tmp_path: Path, ranks: int) -> None:
    results = [record_all(tmp_path)] if ranks == 1 else run_job(record_all, ranks, tmp_path / "job")
    for rank, found in enumerate(results):
        for name, timeline in expected_of_all(is_first=rank == 0).items():
            assert found[name] == timeline, f"{name} on rank {rank}"


def test_windows_and_validations_call_their_hooks_in_order(tmp_path: Path) -> None:
    """Six batches in windows of two, and a validation after every third batch. The first validation waits for its
    window."""
    calls: list[str] = []
    callback = recording(tw.Callback, OF_CALLBACKS, "C", calls)()
    settings = {"max_epochs": 1, "accumulate_grad_batches": 2, "val_check_interval": 3, "num_sanity_val_steps": 0}
    trainer = tw.Trainer(**settings, **QUIET)
    trainer.fit(recording(Planned, OF_MODULES, "M", calls)(calls, callback))
    first = validation("M").replace("M.on_validation_model_eval", "M.val_dataloader M.on_validation_model_eval", 1)
    opened, stepped = training_batch("M", ends=False), training_batch("M", opens=False)
    timeline = f"""{opening("fit", data=False, tunes=True)} {PREPARED}
        M.train_dataloader {both("on_train_start")} {EPOCH_START}
        {opened} {stepped} {opened} {stepped} {first} {opened} {stepped}
        M.lr_scheduler_step(epoch) {validation("M")} {ENDING}
        {LAST} {closing(data=False)}"""
    assert calls == timeline.split()


def test_gradients_are_unscaled_when_before_optimizer_step_is_called() -> None:
    norms: dict[str, list[torch.Tensor]] = {}

    class Watch(tw.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            gradient = torch.cat([p.grad.flatten() for p in module.parameters()])
            norms.setdefault(trainer.engine.precision.name, []).append(gradient.norm())

    for precision in ("32-true", "16-mixed"):
        tw.Trainer(max_epochs=1, precision=precision, callbacks=[Watch()], **QUIET).fit(Classifier(), make_loader())
    torch.testing.assert_close(norms["16-mixed"], norms["32-true"], rtol=0.05, atol=0.01)


@pytest.mark.parametrize("kind", [ArithmeticError, KeyboardInterrupt, SystemExit])
def test_an_exception_reaches_its_hooks_and_tears_the_run_down(kind: type[BaseException]) -> None:
    calls: list[str] = []
    last = ("on_exception", "teardown", "on_train_batch_end", "on_train_end", "on_fit_end")

    class Broken(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise kind("no such luck")

    data = recording(Data, ("on_exception", "teardown"), "D", calls)()
    callback = recording(tw.Callback, last, "C", calls)()
    module = recording(Broken, ("teardown", *last[2:]), "M", calls)()
    trainer = tw.Trainer(max_epochs=1, limit_val_batches=0, callbacks=[callback], **QUIET)
    with pytest.raises(kind, match="no such luck"):
        trainer.fit(module, datamodule=data)
    assert calls == ["C.on_exception", "D.on_exception", "D.teardown", "C.teardown", "M.teardown"]
    assert trainer.interrupted
    assert not trainer.training


class Misspelt(Classifier):
    def on_fit_starts(self) -> None:
        """Never called."""

    def on_train_epoch_ends(self) -> None:
        """Never called, beside the right one."""

    def on_train_epoch_end(self) -> None:
        """The right one."""

    def save_checkpoint(self) -> None:
        """A method of the user."""


class MisspeltCallback(tw.Callback):
    def on_train_epoch_finish(self, trainer: Any, module: Any) -> None:
        """Never called."""


def test_a_misspelt_hook_is_warned_of(tmp_path: Path) -> None:
    trainer = tw.Trainer(max_steps=1, callbacks=[MisspeltCallback()], default_root_dir=tmp_path, **QUIET)
    with pytest.warns(UserWarning, match="is not a hook") as warned:
        trainer.fit(Misspelt(), make_loader())
    assert [str(each.message).partition("?")[0] for each in warned] == [
        "Misspelt.on_fit_starts is not a hook, so it is never called; did you mean on_fit_start",
        "MisspeltCallback.on_train_epoch_finish is not a hook, so it is never called; did you mean on_train_epoch_end",
    ]
    for own in ("save_checkpoint", "train_loader", "prepare_dataset", "shared_step", "configure_loss", "optimizer"):
        assert not nearest_hook(own, tw.Module), own


def test_hooks_take_a_loader_index_or_none(tmp_path: Path) -> None:
    def with_hook(base: type, name: str, hook: Any) -> Any:
        return type("Wrong", (base,), {name: hook, "__module__": "wrong"})()

    def fit(module: tw.Module) -> None:
        tw.Trainer(max_steps=1, default_root_dir=tmp_path, **QUIET).fit(module, make_loader())

    for hook in (lambda self, batch, index: None, lambda self, batch, index, loader: None, lambda *args: None):
        fit(with_hook(Classifier, "on_validation_batch_start", hook))
