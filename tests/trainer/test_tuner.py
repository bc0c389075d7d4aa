"""Searches for a learning rate and a batch size, and the state after them."""

from __future__ import annotations

import gc
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET, SAVING, Classifier, make_data, make_loader
from torch import Tensor
from torch.utils.data import DataLoader

import trainwright as tw


@pytest.fixture(autouse=True)
def _little_to_collect() -> None:
    """A trial of a batch size collects garbage, which takes a second with all objects of earlier tests."""
    gc.freeze()


class Rated(Classifier):
    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(dropout=0.3, lr=lr)
        self.save_hyperparameters()
        self.batch_size = 4

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)

    def train_dataloader(self) -> Any:
        return DataLoader(make_data(40), self.batch_size, shuffle=True)


def fit(module: tw.Module, **settings: Any) -> dict[str, Tensor]:
    trainer = tw.Trainer(**{**QUIET, "max_epochs": 2, **settings})
    trainer.fit(module)
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_a_fit_after_a_search_is_the_same() -> None:
    torch.manual_seed(3)
    finder = tw.LearningRateFinder(1e-4, 1.0, 60)
    module = Rated()
    found = fit(module, callbacks=finder)
    search = finder.optimal_lr
    assert module.lr == module.hparams.lr == search.suggestion()
    assert search.results["lr"][:2] == [1e-4, pytest.approx(1e-4 * 1e4 ** (2 / 60))]
    assert len(search.results["lr"]) == len(search.results["loss"]) <= 60
    torch.manual_seed(3)
    plain = fit(Rated(module.lr))
    assert all(torch.equal(value, plain[name]) for name, value in found.items())


def test_lr_find_returns_a_search_and_leaves_the_module(tmp_path: Path) -> None:
    module, before = Rated(), Rated().state_dict()
    trainer = tw.Trainer(**{**QUIET, "logger": True}, default_root_dir=tmp_path, max_epochs=1)
    search = tw.Tuner(trainer).lr_find(
        module, num_training=40, mode="linear", min_lr=1e-3, max_lr=0.2, update_attr=False
    )
    assert module.lr == 0.05
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert trainer.global_step == 0
    assert list(tmp_path.iterdir()) == []
    assert search.results["lr"][-1] == pytest.approx(0.2)
    figure = search.plot(suggest=True)
    assert len(figure.axes[0].lines) == 2
    with pytest.warns(UserWarning, match="has 40 points, of which 39 at the beginning"):
        assert search.suggestion(skip_begin=39) is None


def test_a_diverging_search_ends() -> None:
    search = tw.Tuner(tw.Trainer(**QUIET, max_epochs=1)).lr_find(Rated(), min_lr=1e-2, max_lr=1e4, num_training=100)
    assert 3 < len(search.results["loss"]) < 100
    assert search.suggestion(2) is not None


def test_scale_batch_size_finds_the_largest_size() -> None:
    module = Rated()
    tuner = tw.Tuner(tw.Trainer(**QUIET, max_epochs=1))
    assert tuner.scale_batch_size(module, init_val=2, max_trials=2) == module.batch_size == 4
    assert tuner.scale_batch_size(module, init_val=32) == 64  # one batch is all 40 samples

    class Limited(Rated):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if len(batch[0]) > 11:
                raise torch.OutOfMemoryError("no memory for this batch")
            return super().training_step(batch, batch_idx)

    module = Limited()
    assert tuner.scale_batch_size(module, init_val=4) == 8
    assert tuner.scale_batch_size(module, init_val=10, mode="binsearch", margin=0.0) == module.batch_size == 11
    assert tuner.scale_batch_size(module, init_val=11, max_trials=1, mode="binsearch", margin=0.1) == 9
    finder = tw.BatchSizeFinder(init_val=16)
    fit(module, callbacks=finder)
    assert finder.optimal_batch_size == module.batch_size == 8


class Data(tw.DataModule):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return DataLoader(make_data(40), self.batch_size)


def test_the_batch_size_of_a_data_module_is_found() -> None:
    data = Data()
    tuner = tw.Tuner(tw.Trainer(**QUIET, max_epochs=1))
    assert tuner.scale_batch_size(Classifier(), datamodule=data, max_trials=2) == data.batch_size == 4
    assert tuner.scale_batch_size(Classifier(), data, init_val=8, max_trials=1) == data.batch_size == 8


def test_searches_that_cannot_work_are_rejected() -> None:
    trainer = tw.Trainer(**QUIET, max_epochs=1)
    tuner = tw.Tuner(trainer)

    class Plain(tw.Module):
        pass

    class Several(Rated):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)]

    with pytest.raises(AttributeError, match="sets lr or learning_rate, and Plain has no such attribute"):
        tuner.lr_find(Plain(), make_loader())
    with pytest.raises(AttributeError, match="sets rate, and Rated has no such attribute"):
        tuner.lr_find(Rated(), attr_name="rate")
    with pytest.raises(AttributeError, match="sets size, and Classifier or Data has no such"):
        tuner.scale_batch_size(Classifier(), datamodule=Data(), batch_arg_name="size")
    with pytest.raises(ValueError, match="fit was given loaders"):
        tuner.scale_batch_size(Rated(), make_loader())
    with pytest.raises(ValueError, match="needs one optimizer, and configure_optimizers returned 2"):
        tuner.lr_find(Several())
    with pytest.raises(ValueError, match="searches only 'fit'"):
        tuner.lr_find(Rated(), method="test")
    for options, message in (
        ({"mode": "cubic"}, "choose from exponential, linear"),
        ({"min_lr": 1.0, "max_lr": 0.1}, "0 < min_lr < max_lr"),
        ({"num_training": 0}, "num_training=0 is not accepted"),
    ):
        with pytest.raises(ValueError, match=message):
            tuner.lr_find(Rated(), **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="choose from power, binsearch"):
        tw.BatchSizeFinder("cubic")
    with pytest.warns(UserWarning, match="No learning rate is searched with fast_dev_run"):
        assert tw.Tuner(tw.Trainer(**QUIET, fast_dev_run=True)).lr_find(Rated()) is None


def test_schedulers_of_a_validation_do_not_step_in_a_search() -> None:
    class Follows(Rated):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

        def on_train_batch_end(self, *args: Any) -> None:
            assert self.lr_schedulers() is not None  # hooks still see it

    tuner = tw.Tuner(tw.Trainer(**QUIET, max_epochs=1))
    search = tuner.lr_find(Follows(), num_training=14, early_stop_threshold=None)  # 10 steps an epoch
    assert len(search.results["lr"]) == 14
    assert tuner.scale_batch_size(Follows(), init_val=32, max_trials=1) == 32


def test_losses_that_are_not_finite_are_kept_in_the_results() -> None:
    class Spoils(Rated):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * torch.nan if self.trainer.global_step == 3 else loss

    tuner = tw.Tuner(tw.Trainer(**QUIET, max_epochs=1))
    module = Spoils()
    search = tuner.lr_find(module, num_training=30, early_stop_threshold=None, update_attr=False)
    losses = search.results["loss"]
    assert [index for index, loss in enumerate(losses) if math.isnan(loss)] == list(range(3, 30))  # of the weights too
    with pytest.warns(UserWarning, match="and 27 with a loss that is not finite are skipped"):
        assert search.suggestion() is None


def test_what_a_search_cannot_read() -> None:
    tuner = tw.Tuner(tw.Trainer(**QUIET, max_epochs=1))
    for loaders in (iter(make_loader()), [make_loader(), (each for each in make_loader())]):
        with pytest.raises(ValueError, match="this one is an iterator: the fit would train without them"):
            tuner.lr_find(Rated(), loaders)


def test_a_run_that_may_be_killed_searches_on_its_first_start_and_logs_what_it_has_found(tmp_path: Path) -> None:
    class Configured(Rated):
        def __init__(self, lr: float = 0.05, batch_size: int = 4) -> None:
            super().__init__(lr)
            self.save_hyperparameters()

        def configure_callbacks(self) -> Any:
            return [tw.LearningRateFinder(1e-4, 1.0, 30), tw.BatchSizeFinder(max_trials=2)]

    def run(epochs: int) -> Configured:
        torch.manual_seed(3)
        module = Configured()
        settings: dict[str, Any] = {**QUIET, "logger": True, "enable_checkpointing": True, "max_epochs": epochs}
        trainer = tw.Trainer(**settings, default_root_dir=tmp_path)
        trainer.fit(module, ckpt_path="auto")
        logged = json.loads(Path(trainer.log_dir, "hparams.json").read_text())
        assert logged == {"lr": module.lr, "batch_size": module.batch_size} == dict(module.hparams_initial)
        return module

    first, resumed = run(1), run(2)
    assert first.lr != 0.05
    assert (first.lr, first.batch_size) == (resumed.lr, resumed.batch_size)


@pytest.mark.parametrize("finder", [tw.LearningRateFinder(1e-4, 1.0, 30), tw.BatchSizeFinder(max_trials=2)])
def test_a_trial_shows_the_limits_of_the_fit(finder: Any) -> None:
    limits = set()

    class Scheduled(Rated):
        def configure_optimizers(self) -> Any:
            limits.add((self.trainer.max_epochs, self.trainer.max_steps))
            optimizer = torch.optim.SGD(self.parameters(), self.lr)
            epochs = self.trainer.max_epochs
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs=epochs, steps_per_epoch=10)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    fit(Scheduled(), callbacks=finder, max_epochs=1, max_steps=7)
    assert limits == {(1, 7)}
    if isinstance(finder, tw.LearningRateFinder):
        assert len(finder.optimal_lr.results["lr"]) > 10  # more than an epoch, and than the fit's steps


def two_ranks(folder: Path) -> Any:
    found: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp", "ddp_sharded", "deepspeed"):
        torch.manual_seed(3)
        finder = tw.LearningRateFinder(1e-4, 1.0, 30)
        module = Rated()
        fit(module, callbacks=finder, devices="auto", strategy=strategy, max_epochs=1)
        found[strategy] = module.lr, finder.optimal_lr.results["loss"]
    try:
        tw.Tuner(tw.Trainer(**{**QUIET, "devices": "auto"}, max_epochs=1)).scale_batch_size(Rated())
    except ValueError as error:
        found["batch"] = str(error)
    return found


@pytest.mark.slow
def test_two_ranks_find_the_same_rate(tmp_path: Path) -> None:
    first, second = run_job(two_ranks, 2, tmp_path)
    assert first == second
    assert "runs on one process, and this Trainer has 2" in first.pop("batch")
    rates = {strategy: rate for strategy, (rate, _) in first.items()}
    assert len(set(rates.values())) == 1, rates


def test_a_search_within_a_run_is_refused() -> None:
    class AtEachEpoch(tw.LearningRateFinder):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            self.lr_find(trainer, pl_module)

    trainer = tw.Trainer(**QUIET, max_epochs=1, callbacks=AtEachEpoch(num_training_steps=2, update_attr=False))
    with pytest.raises(
        RuntimeError, match=r"lr_find was called within a run.*end the fit there .*tw\.Tuner\(trainer\)"
    ):
        trainer.fit(Classifier(), make_loader())
    with pytest.raises(RuntimeError, match=r"tw\.Tuner\(trainer\)\.scale_batch_size"):
        tw.BatchSizeFinder().scale_batch_size(tw.Trainer(**QUIET), Classifier())


@pytest.mark.parametrize("holder", ["module", "data module"])
def test_a_resumed_run_keeps_the_batch_size_that_was_found(tmp_path: Path, holder: str) -> None:
    def run(epochs: int, ckpt_path: str | None = None) -> tuple[int, int]:
        torch.manual_seed(3)
        module, data = (Rated(), None) if holder == "module" else (Classifier(), Data())
        saving = tw.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
        finder = tw.BatchSizeFinder(init_val=8, max_trials=2)
        settings: dict[str, Any] = {**SAVING, "max_epochs": epochs}
        trainer = tw.Trainer(**settings, callbacks=[finder, saving])
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
        return (module if data is None else data).batch_size, trainer.global_step

    assert run(1) == (16, 3)
    assert run(2, f"{tmp_path}/epoch=0.ckpt") == (16, 6)
    if holder == "data module":
        trainer = tw.Trainer(**QUIET, max_epochs=1, callbacks=tw.BatchSizeFinder())
        with pytest.warns(UserWarning, match="found the value 16, which this one does not use: .* no such attribute"):
            trainer.fit(Classifier(), make_loader(40, 16), ckpt_path=f"{tmp_path}/epoch=0.ckpt")


def test_a_resumed_run_keeps_the_rate_that_was_found(tmp_path: Path) -> None:
    def run(epochs: int, ckpt_path: str | None = None) -> float:
        saving = tw.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
        settings: dict[str, Any] = {**SAVING, "max_epochs": epochs}
        trainer = tw.Trainer(**settings, callbacks=[tw.LearningRateFinder(1e-4, 1.0, 30), saving])
        trainer.fit(Rated(), make_loader(40), ckpt_path=ckpt_path)
        return float(Rated.load_from_checkpoint(saving.last_model_path).hparams.lr)

    torch.manual_seed(3)
    rate = run(1)
    assert rate != 0.05
    assert run(2, f"{tmp_path}/epoch=0.ckpt") == rate


def test_a_failed_search_restores_each_holder() -> None:
    class Fails(Rated):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise RuntimeError("broken")

    module, data = Fails(), Data()
    with pytest.raises(RuntimeError, match="broken"):
        tw.Tuner(tw.Trainer(**QUIET, max_epochs=1)).scale_batch_size(module, datamodule=data, init_val=16)
    assert (module.batch_size, data.batch_size) == (4, 2)
