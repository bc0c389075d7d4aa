"""A run that is cut anywhere and goes on does all that the uninterrupted one does, once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET, SAVING, Classifier, make_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import trainwright as tw
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.errors import RunStopped


class Killed(Exception):
    pass


class Falling(tw.Module):
    """One weight that every step reduces by 1, and a score of it in the validation."""

    automatic = True

    def __init__(self, best: float = 2.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.best = best
        self.seen: list[Any] = []
        self.automatic_optimization = self.automatic

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append((self.trainer.current_epoch, batch_idx))
        self.log("loss", self.weight.detach(), on_epoch=True)
        return self.weight * 1.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and not self.trainer.sanity_checking:
            self.seen.append(("validated", self.weight.item()))
        self.log("val_loss", (self.weight + self.best).abs())
        self.log("val_step", float(batch_idx), on_step=True, on_epoch=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Stream(IterableDataset[Tensor]):
    """Its length is not known."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.zeros(self.length, 1))


def fit(module: tw.Module, *callbacks: tw.Callback, data: Any = 4, path: Any = None, **settings: Any) -> tw.Trainer:
    """Train on so many batches an epoch, or on these."""
    loader = DataLoader(torch.zeros(data, 1)) if isinstance(data, int) else data
    saves = any(isinstance(each, tw.ModelCheckpoint) for each in callbacks)
    options = {**QUIET, "enable_checkpointing": saves, "max_epochs": 3, "num_sanity_val_steps": 0, **settings}
    trainer = tw.Trainer(callbacks=list(callbacks), **options)
    trainer.fit(module, loader, DataLoader(torch.zeros(2, 1)), ckpt_path=path)
    return trainer


def every_step(folder: Path, every: int = 1) -> tw.ModelCheckpoint:
    return tw.ModelCheckpoint(folder, "{step}", save_top_k=-1, auto_insert_metric_name=False, every_n_train_steps=every)


def is_true(callback: tw.ModelCheckpoint, kind: type[Falling] = Falling) -> None:
    """All kept checkpoints reach their scores again, and their names contain the step of the weights."""
    assert callback.best_k_models
    for path, score in callback.best_k_models.items():
        module = kind()
        [metrics] = tw.Trainer(**QUIET).validate(module, DataLoader(torch.zeros(2, 1)), ckpt_path=path, verbose=False)
        assert metrics["val_loss"] == float(score), path
        assert Path(path).name.startswith(f"step={-int(module.weight.item())}-val_loss={float(score)}"), path


@pytest.mark.parametrize(("every", "settings"), [
    ({}, {"val_check_interval": 4, "accumulate_grad_batches": 3}),
    ({}, {"val_check_interval": 0.3, "accumulate_grad_batches": 4}),
    ({}, {"val_check_interval": 5, "accumulate_grad_batches": 2, "check_val_every_n_epoch": None}),
    ({"every_n_train_steps": 4}, {}),
    ({"every_n_train_steps": 3}, {"val_check_interval": 5}),
    ({"every_n_train_steps": 2}, {"max_steps": 17, "val_check_interval": 4}),
])  # fmt: skip
def test_a_checkpoint_holds_the_weights_that_got_its_score(tmp_path: Path, every: Any, settings: Any) -> None:
    callback = tw.ModelCheckpoint(tmp_path, "{step}-{val_loss}", monitor="val_loss", save_top_k=3, **every)
    if every:
        with pytest.warns(UserWarning, match="was not logged yet"):
            fit(Falling(7.0), callback, data=11, max_epochs=2, **settings)
    else:
        fit(Falling(), callback, data=11, max_epochs=2, **settings)
    is_true(callback, lambda: Falling(7.0) if every else Falling())  # type: ignore[arg-type]


def test_a_save_at_an_epochs_end_has_no_score_of_earlier_weights(tmp_path: Path) -> None:
    callback = tw.ModelCheckpoint(
        tmp_path, "{step}-{val_loss}", monitor="val_loss", save_top_k=-1, save_on_train_epoch_end=True
    )
    with pytest.warns(
        UserWarning, match=r"its latest value belongs to earlier weights. .*leave save_on_train_epoch_end"
    ):
        fit(Falling(), callback, data=11, max_epochs=2, val_check_interval=4)
    assert callback.best_model_path == ""
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["step=22-val_loss=nan.ckpt"]
    fit(Falling(), callback, data=12, max_epochs=2, val_check_interval=4)
    is_true(callback)


class Ends(tw.ModelCheckpoint):
    """Saves nothing, and ends the run between the saves of the callbacks before it and after it, at the n-th call of a hook."""

    def __init__(self, folder: Path, hook: str, call: int) -> None:
        super().__init__(folder, save_top_k=0)
        self.calls_left = call
        setattr(self, hook, self.count)
        if hook == "on_train_epoch_end":
            self.on_train_epoch_stop = self.count  # type: ignore[method-assign]

    def count(self, *_: Any) -> None:
        self.calls_left -= 1

    def on_save_point(self, trainer: Any, module: Any) -> None:
        if self.calls_left == 0:
            raise Killed


BEST = {"monitor": "val_loss", "save_top_k": 2}


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize(("hook", "first", "second", "settings"), [
    ("on_train_epoch_end", {}, BEST, {}),
    ("on_train_epoch_end", {}, BEST, {"max_steps": 10}),
    ("on_validation_end", {}, BEST, {"val_check_interval": 2}),
    ("on_train_batch_end", {"every_n_train_steps": 1}, {"every_n_train_steps": 2, "save_top_k": -1},
     {"accumulate_grad_batches": 3, "val_check_interval": 4, "data": 11}),
])  # fmt: skip
def test_a_resume_makes_the_missing_save_of_another_callback(
    tmp_path: Path, hook: str, first: Any, second: Any, settings: dict[str, Any], weights_only: bool
) -> None:
    def run(folder: Path, call: int = -1) -> tuple[Any, ...]:
        newest = tw.ModelCheckpoint(folder / "newest", "{epoch}-{step}", **first)
        best = tw.ModelCheckpoint(folder / "best", "{epoch}-{step}", save_weights_only=weights_only, **second)
        log = tw.CSVLogger(folder, version=0)
        fit(Falling(7.0), newest, Ends(folder, hook, call), best, path="auto", logger=log, **settings)
        kept, rows = {}, Path(f"{log.log_dir}/metrics.csv").read_text()
        for path in best.state_dict()["best_k_models"]:
            saved = open_checkpoint(path, "off")
            state = saved.run_state()
            for each in state.get("loggers", ()):
                for stood in (each["state"], each.get("ended", {})):
                    stood.pop("folder", None)
            told = {key: state.get(key) for key in ("position", "metrics", "loggers")}
            kept[Path(path).name] = saved.header["epoch"], told
        return kept, Path(best.best_model_path).name, best.best_model_score, rows

    whole = run(tmp_path / "whole")
    assert whole[0]
    for call in (6, 11) if hook == "on_train_batch_end" else (1, 2, 3):  # batches that end steps 2 and 4
        with pytest.raises(Killed):
            run(tmp_path / str(call), call)
        assert run(tmp_path / str(call)) == whole, call


@pytest.mark.parametrize("data", [4, DataLoader(Stream(4))])
def test_a_resumed_run_completes_the_end_of_its_epoch(tmp_path: Path, data: Any) -> None:
    def run(folder: Path, path: Any = None) -> tuple[Any, ...]:
        module = Falling()
        stopping = tw.EarlyStopping("loss_epoch", patience=1)
        trainer = fit(module, every_step(folder), stopping, data=data, path=path, val_check_interval=4)
        return module.seen, trainer.global_step, trainer.current_epoch, stopping.wait_count, stopping.best_score

    whole = run(tmp_path)
    assert whole[1:3] == (12, 3)
    for step in (3, 4, 7, 8, 11, 12):
        resumed = run(tmp_path / "more", tmp_path / f"{step}.ckpt")
        rest = whole[0][whole[0].index(resumed[0][0]) :]
        assert resumed == (rest, *whole[1:]), step


class Dies(tw.Callback):
    """Ends the run in its n-th validation."""

    def __init__(self, call: int) -> None:
        self.call = call

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.call -= 1
        if self.call == 0 and trainer.resume_source is None:
            raise Killed


class StopsAt(tw.Callback):
    """Asks once for a stop, after so many batches."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = trainer.should_stop or trainer.state.total_batches == self.batches


@pytest.mark.parametrize(
    "settings", [{"max_steps": 8}, {"max_steps": 6}, {"stop": 8}, {"stop": 6}, {"stop": 3, "min_steps": 6}]
)
def test_a_run_killed_at_its_end_is_completed(tmp_path: Path, settings: dict[str, Any]) -> None:
    settings = {**settings}
    stop = settings.pop("stop", 0)

    def run(folder: Path, *extra: tw.Callback) -> tuple[Any, ...]:
        module = Falling()
        best = tw.ModelCheckpoint(folder / "best", "{step}", monitor="val_loss")
        callbacks = (every_step(folder, 2), best, *extra, *([StopsAt(stop)] if stop else []))
        logger = tw.CSVLogger(folder, name="logs", version=0)
        trainer = fit(module, *callbacks, path="auto", logger=logger, log_every_n_steps=1, **settings)
        files = sorted(path.name for path in folder.glob("**/*.ckpt"))
        rows = (folder / "logs" / "version_0" / "metrics.csv").read_bytes()
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        best_path = best.best_model_path.removeprefix(str(folder))
        return metrics, trainer.current_epoch, trainer.global_step, best_path, files, rows

    whole = run(tmp_path / "whole")
    assert whole[2] == settings.get("max_steps", settings.get("min_steps", 8 if stop == 8 else 6))
    with pytest.raises(Killed):
        run(tmp_path / "part", Dies(2) if whole[2] == 8 else Ends(tmp_path, "on_train_epoch_end", 2))
    assert run(tmp_path / "part") == whole
    again = Falling()
    callbacks = (every_step(tmp_path / "part", 2), *([StopsAt(stop)] if stop else []))
    with pytest.warns(UserWarning, match="no callback loads, .*monitor=val_loss"):
        fit(again, *callbacks, path="auto", **settings)
    assert again.seen == []  # it has come to its end


def test_a_save_at_an_epochs_end_includes_the_decision_of_early_stopping(tmp_path: Path) -> None:
    saves = tw.LambdaCallback(
        on_train_epoch_end=lambda trainer, *_: trainer.save_checkpoint(tmp_path / str(trainer.current_epoch))
    )

    class Rising(Falling):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", float(self.trainer.current_epoch))

    whole = fit(Rising(), saves, tw.EarlyStopping("val_loss", patience=2), max_epochs=9)
    assert whole.current_epoch == 3
    for epoch in range(3):
        resumed = fit(Rising(), tw.EarlyStopping("val_loss", patience=2), path=tmp_path / str(epoch), max_epochs=9)
        assert resumed.current_epoch == 3, epoch


class Steps(Falling):
    """Steps by itself, every third batch, over the ends of epochs too."""

    automatic = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.seen.append((self.trainer.current_epoch, batch_idx))
        optimizer = self.optimizers()
        self.manual_backward(self.weight / 3.0)
        if self.trainer.state.total_batches % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", [Falling, Steps])
@pytest.mark.parametrize(
    "interval", [{"val_check_interval": 3}, {"val_check_interval": 5, "check_val_every_n_epoch": None}]
)
def test_a_due_validation_runs_after_a_resume(tmp_path: Path, kind: type[Falling], interval: dict[str, Any]) -> None:
    whole, ends = kind(), tw.ModelCheckpoint(tmp_path, "end-{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    fit(whole, every_step(tmp_path), ends, data=8, **interval)
    for step in range(1, 12):
        if (tmp_path / f"{step}.ckpt").exists():
            resumed = kind()
            fit(resumed, data=8, path=tmp_path / f"{step}.ckpt", **interval)
            trained = [place for place, each in enumerate(whole.seen) if each[0] != "validated"]
            last = trained[(3 * step if kind is Steps else step) - 1]
            assert resumed.seen == whole.seen[last + 1 :], step
            assert torch.equal(resumed.weight, whole.weight)
    for epoch in (0, 1):
        resumed = kind()
        trainer = fit(resumed, data=8, path=tmp_path / f"end-epoch={epoch}.ckpt", **interval)
        assert torch.equal(resumed.weight, whole.weight)
        assert trainer.global_step == 8 if kind is Steps else trainer.global_step > 8


class Draws(Falling):
    """Draws in the hooks at the start of a run and of an epoch, and trains on these numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.zeros(3)
        self.drawn: list[float] = []

    def on_train_start(self) -> None:
        self.noise[0] = torch.rand(())

    def on_train_epoch_start(self) -> None:
        self.noise[1] = torch.rand(())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        torch.rand(())

    def val_dataloader(self) -> Any:
        self.noise[2] = torch.rand(())
        return DataLoader(torch.zeros(2, 1))

    def train_dataloader(self) -> Any:
        return DataLoader(torch.rand(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.drawn.append(float(batch + torch.rand(()) + self.noise[:2].sum()))
        return self.weight * self.drawn[-1]

    def on_validation_start(self) -> None:
        self.drawn.append(float(torch.rand(()) + self.noise[2]))


@pytest.mark.parametrize(
    "settings", [{"num_sanity_val_steps": 0}, {"num_sanity_val_steps": 2}, {"reload_dataloaders_every_n_epochs": 1}]
)
def test_hooks_draw_the_same_numbers_in_a_resumed_run(tmp_path: Path, settings: dict[str, Any]) -> None:
    def run(*callbacks: tw.Callback, path: Any = None) -> list[float]:
        torch.manual_seed(3)
        module = Draws()
        options = {**QUIET, "enable_checkpointing": bool(callbacks), "max_epochs": 3, "val_check_interval": 2}
        tw.Trainer(callbacks=list(callbacks), **{**options, **settings}).fit(module, ckpt_path=path)
        return module.drawn[settings.get("num_sanity_val_steps", 2) > 0 and path is None :]

    ends = tw.ModelCheckpoint(
        tmp_path / "ends", "{step}", save_top_k=-1, auto_insert_metric_name=False, save_on_train_epoch_end=True
    )
    whole = run(every_step(tmp_path), ends)
    for path in (*(tmp_path / f"{step}.ckpt" for step in range(1, 12)), tmp_path / "ends" / "4.ckpt"):
        resumed = run(path=path)
        assert resumed == whole[len(whole) - len(resumed) :], path


class Drawing(Falling):
    """Draws a number in every step, and some in every validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(torch.rand(()).item())
        return self.weight * 1.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.rand(3)


def test_a_stop_within_an_epoch_is_scored_by_what_it_has_logged(tmp_path: Path) -> None:
    best = tw.ModelCheckpoint(tmp_path, monitor="loss_epoch")
    with pytest.warns(UserWarning, match="was not logged yet"):
        trainer = fit(Falling(), best, max_steps=3, val_check_interval=3)
    assert best.best_model_score == trainer.callback_metrics["loss_epoch"]


def test_max_steps_within_an_epoch_leaves_the_rng_of_a_longer_run(tmp_path: Path) -> None:
    class DrawingAtTheEnd(Drawing):
        def on_train_epoch_end(self) -> None:
            torch.rand(2)

    def run(steps: int, folder: str, path: Any = None) -> tuple[list[Any], float]:
        tw.seed_everything(3, verbose=False)
        module = DrawingAtTheEnd()
        saving = tw.ModelCheckpoint(tmp_path / folder, every_n_epochs=1)
        fit(module, saving, max_steps=steps, path=path)
        return module.seen, torch.rand(()).item()

    whole, after = run(7, "whole")
    part, after_part = run(5, "part")
    for _ in range(2):
        assert run(5, "part", "auto") == ([], after_part), "nothing is left to do"
    rest, after_rest = run(7, "part", "auto")
    assert part + rest == whole
    assert after_rest == after


def test_rows_of_an_interrupted_validation_are_written_once(tmp_path: Path) -> None:
    class Signals(tw.Callback):
        def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.current_epoch == 1 and trainer.resume_source is None:
                os.kill(os.getpid(), signal.SIGTERM)

    def run(folder: Path, *callbacks: tw.Callback) -> bytes:
        logger = tw.CSVLogger(folder, name="logs", version=0)
        fit(Falling(), every_step(folder), *callbacks, path="auto", logger=logger, log_every_n_steps=1)
        return (folder / "logs" / "version_0" / "metrics.csv").read_bytes()

    whole = run(tmp_path / "whole")
    assert whole.count(b"\n") == 1 + 12 + 3 * 4
    with pytest.raises(RunStopped):
        run(tmp_path / "part", Signals())
    assert run(tmp_path / "part") == whole


def test_a_resumed_run_can_have_windows_of_another_length(tmp_path: Path) -> None:
    """Saved after batch 6 of 10: the rest is a window of four, whose steps are whole ones."""
    fit(Falling(), every_step(tmp_path), data=10, max_epochs=1, accumulate_grad_batches=2)
    for windows, steps in ((4, 4), (3, 5), (2, 5), (1, 7)):
        module, again = Falling(), tmp_path / str(windows)
        fit(module, every_step(again), data=10, max_epochs=1, accumulate_grad_batches=windows, path=tmp_path / "3.ckpt")
        assert module.weight.item() == pytest.approx(-steps)
    module = Falling()
    fit(module, data=10, max_epochs=1, accumulate_grad_batches=3, path=tmp_path / "3" / "4.ckpt")  # and again, after 9
    assert module.weight.item() == pytest.approx(-5)


def test_a_training_step_without_a_loss_is_explained() -> None:
    class Forgets(Falling):
        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            self.log("loss", self.weight.detach(), on_epoch=True)

    class Sends(Falling):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = (self.weight * 2.0).square().sum()
            loss.backward()
            return loss

    with pytest.raises(
        RuntimeError, match=r"returned None for all 4 batches of the first epoch.*automatic_optimization = False"
    ):
        fit(Forgets())
    with pytest.raises(RuntimeError, match=r"If training_step calls loss.backward\(\) itself, leave that out"):
        fit(Sends())


class Gathers(Classifier):
    """Steps every third batch of the run, also over the ends of epochs, and has a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.scale = nn.Parameter(torch.ones(()))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]) * self.scale, batch[1]))
        if self.trainer.state.total_batches % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).double().sum() * self.scale


def gathers_over_ends(folder: Path) -> dict[str, bool]:
    found = {}
    for strategy in ("ddp", "fsdp", "ddp_sharded"):

        def run(epochs: int, path: str | None = None, name: str = strategy) -> Any:
            tw.seed_everything(3)
            module = Gathers()
            options = {**QUIET, "devices": 2, "strategy": name, "max_epochs": epochs}
            trainer = tw.Trainer(**options)
            trainer.fit(module, make_loader(40), ckpt_path=path)  # five batches per rank
            trainer.save_checkpoint(folder / f"{name}-{epochs}-{path is None}.ckpt")
            return [float(each) for each in trainer.predict(module, make_loader(8))]

        whole = run(3)
        run(1)
        found[strategy] = run(3, str(folder / f"{strategy}-1-True.ckpt")) == whole
    return found


def test_a_reused_name_contains_the_weights_of_its_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"monitor": "val_loss", "async_save": True, "save_weights_only": True}
    best = tw.ModelCheckpoint(tmp_path / "best", "best", **options)
    ends = Ends(tmp_path, "on_train_epoch_end", 2)
    monkeypatch.setattr("trainwright.callbacks.checkpoint_files.PendingSave.conclude_alone", lambda *_: None)
    with pytest.raises(Killed):
        fit(Falling(7.0), best, tw.ModelCheckpoint(tmp_path / "newest"), ends)
    monkeypatch.undo()
    best = tw.ModelCheckpoint(tmp_path / "best", "best", **options)
    fit(Falling(8.0), best, tw.ModelCheckpoint(tmp_path / "newest"), path="auto")
    assert open_checkpoint(best.best_model_path, "off").step == 8
    assert float(best.best_model_score or 9.0) == 1.0


@pytest.mark.parametrize("step", [2, 4])
def test_a_save_in_on_train_start_contains_the_resumed_state(tmp_path: Path, step: int) -> None:
    class Saves(tw.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            torch.rand(1)
            trainer.save_checkpoint(tmp_path / "own.ckpt")
            raise Killed

    def run(*callbacks: tw.Callback, path: Any = None) -> list[Any]:
        tw.seed_everything(3, verbose=False)
        module = Drawing()
        fit(module, *callbacks, path=path)
        return module.seen

    whole = run(every_step(tmp_path / "all"), tw.ModelCheckpoint(tmp_path / "ends"))
    source = tmp_path / "all" / "2.ckpt" if step == 2 else tmp_path / "first" / "epoch=0-step=4.ckpt"
    if step == 4:
        with pytest.raises(Killed):
            run(tw.ModelCheckpoint(tmp_path / "first"), Ends(tmp_path, "on_train_epoch_end", 1))
    with pytest.raises(Killed):
        run(Saves(), path=source)
    later = tw.ModelCheckpoint(tmp_path / "first", save_top_k=-1)
    assert run(later, path=tmp_path / "own.ckpt") == whole[step:]


def test_a_resumed_stop_keeps_the_metrics_from_before_the_stop(tmp_path: Path) -> None:
    known: list[set[str]] = []

    class Stops(tw.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            trainer.should_stop = False

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            known.append(set(trainer.callback_metrics))

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.should_stop = trainer.resume_source is None and trainer.global_step == 2

    for _ in range(2):
        trainer = fit(Falling(), Stops(), tw.ModelCheckpoint(tmp_path), path="auto", max_epochs=1)
    assert trainer.global_step == 4
    assert [("val_loss" in names) for names in known] == [False] * 4, "a longer run has no other metrics"


def test_should_stop_within_an_epoch_leaves_the_rng_of_a_longer_run(tmp_path: Path) -> None:
    class Stopping(tw.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = trainer.should_stop or trainer.global_step == 6

    class Going(tw.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            trainer.should_stop = False

    def run(callback: tw.Callback | None = None, path: Any = None) -> list[Any]:
        torch.manual_seed(3)
        module = Drawing()
        trainer = fit(module, *([callback] if callback is not None else []), path=path)
        trainer.save_checkpoint(tmp_path / "after.ckpt", overwrite=True)
        return [*module.seen, torch.rand(()).item()]

    whole = run()
    part = run(Stopping())
    assert run(path=tmp_path / "after.ckpt") == part[-1:], "should_stop is kept, and nothing is left to do"
    rest = run(Going(), tmp_path / "after.ckpt")
    assert part[:-1] + rest == whole


def test_a_reloaded_stream_resumes_within_its_epoch(tmp_path: Path) -> None:
    class Counting(IterableDataset[Tensor]):
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Iterator[Tensor]:
            while True:
                self.at += 1
                yield torch.tensor([float(self.at)])

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    class Making(Falling):
        def train_dataloader(self) -> Any:
            return DataLoader(Counting())

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen.append(batch.item())
            return self.weight * 1.0

    def run(path: Any = None) -> list[Any]:
        module = Making()
        settings = {**SAVING, "limit_train_batches": 3, "reload_dataloaders_every_n_epochs": 2}
        trainer = tw.Trainer(max_epochs=4, callbacks=[every_step(tmp_path)] if path is None else [], **settings)
        trainer.fit(module, ckpt_path=path)
        return module.seen

    whole = run()
    assert whole == [1, 2, 3, 4, 5, 6] * 2
    for step in range(1, 12):
        assert run(tmp_path / f"{step}.ckpt") == whole[step:]


@pytest.mark.slow
def test_gradients_wait_over_an_epochs_end_on_two_ranks(tmp_path: Path) -> None:
    for found in run_job(gathers_over_ends, 2, tmp_path):
        assert found == {"ddp": True, "fsdp": True, "ddp_sharded": True}


def test_a_stop_that_min_epochs_delays_stays_requested(tmp_path: Path, capsys: Any) -> None:
    """This holds for early stopping, although the metric improves meanwhile, and for the user's request."""

    class Bumpy(Falling):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", [3.0, 4.0, 4.0, 2.0, 1.0, 1.0][min(self.trainer.current_epoch, 5)])

    for number, kind in enumerate((lambda: tw.EarlyStopping("val_loss", patience=2), lambda: StopsAt(10))):
        folder = tmp_path / str(number)
        whole = fit(Bumpy(), every_step(folder), kind(), min_epochs=5, max_epochs=10)
        assert whole.current_epoch == 5
        for step in (13, 16, 18):
            path = folder / f"{step}.ckpt"
            assert fit(Bumpy(), kind(), path=path, min_epochs=5, max_epochs=10).current_epoch == 5, step
        if number == 0:  # a stop that new settings would not request is dropped
            patient = tw.EarlyStopping("val_loss", patience=4)
            assert fit(Bumpy(), patient, path=folder / "18.ckpt", min_epochs=5, max_epochs=8).current_epoch == 8
    assert "To train on, set trainer.should_stop = False in on_train_start" in capsys.readouterr().out


def test_a_checkpoint_callback_that_is_new_in_a_resumed_run_makes_up_nothing(tmp_path: Path) -> None:
    fit(Falling(), tw.ModelCheckpoint(tmp_path / "a"), max_epochs=1)
    new = tw.ModelCheckpoint(tmp_path / "b", "{epoch}", save_top_k=-1, save_on_exception=True)

    def kill(*_: Any) -> None:
        raise Killed

    killing = tw.LambdaCallback(on_train_epoch_start=kill)
    with pytest.raises(Killed):
        fit(Falling(), tw.ModelCheckpoint(tmp_path / "a"), new, killing, path="auto")
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["exception-epoch=1-step=4.ckpt"]
    fit(Falling(), tw.ModelCheckpoint(tmp_path / "a"), new, path="auto")
    assert sorted(Path(path).name for path in new.state_dict()["best_k_models"]) == ["epoch=1.ckpt", "epoch=2.ckpt"]


def test_a_metric_that_nobody_logs_is_an_error_in_the_resumed_run_too(tmp_path: Path) -> None:
    for _ in range(2):
        wrong = tw.ModelCheckpoint(tmp_path / "b", monitor="val_los")
        module = Falling()
        with pytest.raises(ValueError, match="'val_los', which was not logged"):
            fit(module, tw.ModelCheckpoint(tmp_path / "a"), wrong, path="auto")
    assert module.seen == [], "before it trains on"
