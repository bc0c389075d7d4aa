"""The loop: when it validates and ends, kinds of loaders and steps, and their errors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small import ACCELERATOR, QUIET, SAVING, Classifier, assert_equal, fit, loss_of, make_data, make_loader, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

import trainwright as tw
from trainwright.trainer.evaluate import skip_none


class Diary(Classifier):
    """Records the validations as (epoch, batches trained before it), and the inputs of the steps."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.validations: list[tuple[int, int]] = []
        self.trained: list[Any] = []
        self.validated: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained.append((self.current_epoch, batch_idx, batch[0].sum().item()))
        return loss_of(self.net, batch)

    def on_validation_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.validations.append((self.current_epoch, self.trainer.state.total_batches))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(batch[0].sum().item())
        self.log("val_loss", loss_of(self.net, batch))


def run(module: tw.Module | None = None, loader: Any = None, val: Any = None, **settings: Any) -> Any:
    """Return (module, trainer)."""
    module = Diary() if module is None else module
    return module, fit(module, loader, val, **settings)


@pytest.mark.parametrize(("settings", "validations"), [
    ({}, [(0, 11), (1, 22)]),
    ({"val_check_interval": 1.0}, [(0, 11), (1, 22)]),
    ({"val_check_interval": 0.5}, [(0, 5), (0, 10), (1, 16), (1, 21)]),
    ({"val_check_interval": 4}, [(0, 4), (0, 8), (1, 15), (1, 19)]),
    ({"val_check_interval": 11}, [(0, 11), (1, 22)]),
    ({"val_check_interval": 0.01}, [(index // 11, index + 1) for index in range(22)]),
    ({"val_check_interval": 4, "check_val_every_n_epoch": 2}, [(1, 15), (1, 19)]),
    ({"val_check_interval": 4, "check_val_every_n_epoch": None}, [(0, 4), (0, 8), (1, 12), (1, 16), (1, 20)]),
    ({"val_check_interval": 15, "check_val_every_n_epoch": None}, [(1, 15)]),
    ({"check_val_every_n_epoch": 3, "max_epochs": 7}, [(2, 33), (5, 66)]),
    ({"limit_train_batches": 6, "val_check_interval": 0.5}, [(0, 3), (0, 6), (1, 9), (1, 12)]),
    ({"limit_val_batches": 0}, []),
])  # fmt: skip
def test_when_it_validates(settings: dict[str, Any], validations: list[tuple[int, int]]) -> None:
    module, _ = run(val=make_loader(4), **{"max_epochs": 2, **settings})
    assert module.validations == validations


def test_validations_follow_an_interval_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("trainwright.trainer.prepared_run.time", clock)
    moments: list[float] = []

    class Slow(Diary):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            clock.now += 20.0
            return super().training_step(batch, batch_idx)

        def on_validation_start(self) -> None:
            super().on_validation_start()
            moments.append(clock.now)

    for every in (1, None):
        moments.clear()
        settings = {"check_val_every_n_epoch": every, "val_check_interval": timedelta(seconds=100), "max_epochs": 2}
        module, _ = run(Slow(), val=make_loader(4), **settings)
        assert 2 <= len(moments) < 11
        assert all(later - sooner > 60 for sooner, later in pairwise(moments))
        assert any(total not in (11, 22) for _, total in module.validations)


@pytest.mark.parametrize(("steps", "batches"), [(0, 0), (1, 1), (-1, 3), (None, 2), (9, 3)])
def test_the_sanity_check_leaves_no_trace(steps: int | None, batches: int) -> None:
    """The check runs the given number of batches per loader, and leaves neither metrics nor random draws behind."""
    seen: list[Any] = []

    class Checked(Diary):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            torch.rand(1)
            seen.append(self.trainer.sanity_checking)
            self.log("val_loss", 1.0)

        def on_train_start(self) -> None:
            seen.append((self.trainer.num_sanity_val_batches, dict(self.trainer.callback_metrics)))
            assert torch.equal(torch.get_rng_state(), generator)
            assert self.training

        def on_fit_start(self) -> None:
            nonlocal generator
            generator = torch.get_rng_state()

    generator = torch.get_rng_state()
    module, _ = run(
        Checked(), val=[make_loader(12), make_loader(12)], num_sanity_val_steps=steps, limit_train_batches=1
    )
    assert seen.index((([batches] * 2 if batches else []), {})) == 2 * batches
    assert seen.count(True) == 2 * batches
    assert seen.count(False) == 6
    assert module.validations == [(0, 1)]


def test_overfit_batches_replaces_other_limits() -> None:
    trainer = tw.Trainer(max_epochs=1, limit_train_batches=3, limit_val_batches=1.0, overfit_batches=2, **QUIET)
    trainer.fit(Classifier(), make_loader(), make_loader())
    assert (trainer.global_step, trainer.num_val_batches) == (2, [2])


def test_a_trial_run_goes_through_everything_and_writes_nothing(tmp_path: Path) -> None:
    class Everything(Diary):
        def __init__(self) -> None:
            super().__init__()
            self.counts = {"test": 0, "predict": 0}

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.logger.log_metrics({"mine": 1.0}, step=0)
            assert self.logger.experiment is not None
            self.logger.experiment.add_scalar("mine", 1.0)
            return super().training_step(batch, batch_idx)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.counts["test"] += 1

        def predict_step(self, batch: Any, batch_idx: int) -> None:
            self.counts["predict"] += 1

    callbacks = [tw.ModelCheckpoint(monitor="val_loss", every_n_train_steps=1), tw.EarlyStopping("never_logged")]
    settings = {"accelerator": ACCELERATOR, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = tw.Trainer(fast_dev_run=2, max_epochs=9, callbacks=callbacks, default_root_dir=tmp_path, **settings)
    module = Everything()
    trainer.fit(module, make_loader(), make_loader())
    trainer.test(module, make_loader(), verbose=False)
    trainer.predict(module, make_loader())
    assert (len(module.trained), len(module.validated), module.counts) == (2, 2, {"test": 2, "predict": 2})
    assert (trainer.current_epoch, trainer.global_step, trainer.max_epochs, trainer.max_steps) == (1, 2, 1, 2)
    trainer = tw.Trainer(fast_dev_run=True, default_root_dir=tmp_path, **settings)
    trainer.fit(Everything(), make_loader(), make_loader())
    assert trainer.checkpoint_callback.best_model_path == ""
    assert list(tmp_path.iterdir()) == []


class Stop(tw.Callback):
    """Requests a stop after every batch."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = True


@pytest.mark.parametrize(("settings", "steps", "epochs"), [
    ({"max_steps": 15}, 15, 2),
    ({"max_steps": 11}, 11, 1),
    ({"max_steps": 0}, 0, 0),
    ({"max_epochs": 0}, 0, 0),
    ({"max_epochs": None, "max_steps": 15}, 15, 2),
    ({"max_epochs": 1, "max_steps": 100}, 11, 1),
    ({"max_epochs": -1, "max_steps": 25}, 25, 3),
    ({"max_steps": 4, "accumulate_grad_batches": 4}, 4, 2),
    ({"callbacks": Stop()}, 1, 1),
    ({"callbacks": Stop(), "min_steps": 14}, 14, 2),
    ({"callbacks": Stop(), "min_epochs": 2}, 22, 2),
    ({"callbacks": Stop(), "min_epochs": 1, "min_steps": 14}, 14, 2),
    ({"callbacks": Stop(), "min_steps": 14, "accumulate_grad_batches": 3}, 14, 4),
    ({"max_epochs": 2, "limit_train_batches": 0.5}, 10, 2),
    ({"max_epochs": 2, "limit_train_batches": 1.0}, 22, 2),
    ({"max_epochs": 2, "limit_train_batches": 1}, 2, 2),
    ({"max_epochs": 2, "limit_train_batches": 99}, 22, 2),
    ({"max_epochs": 2, "accumulate_grad_batches": 4}, 6, 2),
])  # fmt: skip
def test_where_training_ends(settings: dict[str, Any], steps: int, epochs: int) -> None:
    _, trainer = run(**{"max_epochs": 9, **settings})
    assert (trainer.global_step, trainer.current_epoch) == (steps, epochs)


def test_a_run_that_stops_within_an_epoch_is_not_validated_there() -> None:
    assert run(val=make_loader(4), max_epochs=9, max_steps=15)[0].validations == [(0, 11)]
    assert run(val=make_loader(4), max_epochs=9, callbacks=Stop())[0].validations == []
    assert run(val=make_loader(4), val_check_interval=3, max_steps=7)[0].validations == [(0, 3), (0, 6)]
    assert run(val=make_loader(4), val_check_interval=3, max_steps=6)[0].validations == [(0, 3), (0, 6)]
    assert run(val=make_loader(4), check_val_every_n_epoch=2, max_steps=5)[0].validations == []


def test_max_time_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("trainwright.callbacks.timer.time", clock)

    class Slow(Diary):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            clock.now += 10.0
            return super().training_step(batch, batch_idx)

    _, trainer = run(Slow(), max_epochs=None, max_time={"seconds": 400})
    assert trainer.global_step == 40  # beyond the first epoch: max_epochs has no default beside a time
    _, trainer = run(max_epochs=3, max_time="00:01:00:00")
    assert trainer.current_epoch == 3


def test_minus_one_from_a_hook_of_the_module_ends_the_epoch() -> None:
    """Batches 0 and 1 make a step. Batch 2 opens a window that is dropped."""

    class Short(Diary):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 else None

    module, trainer = run(Short(), val=make_loader(4), max_epochs=2, accumulate_grad_batches=2)
    assert (trainer.global_step, trainer.current_epoch) == (2, 2)
    assert module.validations == [(0, 3), (1, 6)]
    assert all(parameter.grad is None for parameter in module.parameters())


class Unmeasured(IterableDataset[Any]):
    def __init__(self, length: float = 44) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        data, index = make_data(), 0
        while index < self.length:
            yield data[index % 44]
            index += 1


def test_streams_of_unknown_length_are_trained() -> None:
    module, trainer = run(loader=DataLoader(Unmeasured(), batch_size=4), val=make_loader(4), max_epochs=2)
    assert (trainer.global_step, trainer.num_training_batches) == (22, math.inf)
    assert module.validations == [(0, 11), (1, 22)]
    endless = DataLoader(Unmeasured(math.inf), batch_size=4)
    module, trainer = run(loader=endless, val=endless, limit_train_batches=5, limit_val_batches=2, max_epochs=2)
    assert (trainer.global_step, trainer.num_training_batches, trainer.num_val_batches) == (10, 5, [2])
    module, trainer = run(
        loader=endless, val=make_loader(4), max_steps=13, max_epochs=-1, val_check_interval=5,
        check_val_every_n_epoch=None,
    )  # fmt: skip
    assert (trainer.global_step, trainer.current_epoch) == (13, 1)
    assert module.validations[:2] == [(0, 5), (0, 10)]
    with pytest.raises(ValueError, match=r"a limit of 0.5 is a fraction of the batches, but this loader has no length"):
        run(loader=endless, limit_train_batches=0.5)


def test_validation_loaders_are_made_again_only_for_a_validation() -> None:
    class Own(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.made: list[int] = []

        def val_dataloader(self) -> Any:
            self.made.append(self.current_epoch)
            return make_loader(4)

    module = Own()
    options = {"reload_dataloaders_every_n_epochs": 1, "check_val_every_n_epoch": 3, "num_sanity_val_steps": 0}
    tw.Trainer(max_epochs=6, **options, **QUIET).fit(module, make_loader(8))
    assert module.made == [2, 5]


def test_a_batch_that_is_none_is_skipped_and_counted() -> None:
    """Every second batch is None: windows of two have one batch, and validation scores the rest."""
    calls = iter(range(100))

    def collate(rows: Any) -> Any:
        return None if next(calls) % 2 else torch.utils.data.default_collate(rows)

    class Notes(tw.Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(("start", batch_idx))

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(("end", batch_idx, batch is None))

    notes, module = Notes(), Diary()
    loader = DataLoader(make_loader().dataset, 4, collate_fn=collate)
    trainer = tw.Trainer(
        max_epochs=1, limit_train_batches=4, accumulate_grad_batches=2, num_sanity_val_steps=0, callbacks=notes, **QUIET
    )
    with pytest.warns(UserWarning, match="loader yielded None .from collate_fn..*skipped") as said:
        trainer.fit(module, loader, DataLoader(make_loader(16).dataset, 4, collate_fn=collate))
    assert {str(each.message).split()[1] for each in said} == {"training", "validation"}
    assert (trainer.global_step, trainer.state.total_batches, len(module.validated)) == (2, 4, 2)
    assert notes.seen == [
        ("start", 0), ("end", 0, False), ("end", 1, True), ("start", 2), ("end", 2, False), ("end", 3, True),
    ]  # fmt: skip
    with pytest.warns(UserWarning, match="is skipped"), pytest.raises(RuntimeError, match="or the loader yielded None"):
        tw.Trainer(max_steps=3, **QUIET).fit(Diary(), DataLoader(make_loader(8).dataset, 4, collate_fn=lambda _: None))
    with pytest.raises(RuntimeError, match=r"training loader yielded None on one of 2 ranks.*remove bad samples"):
        skip_none(2)


@pytest.mark.parametrize("step", ["training_step", "validation_step"])
def test_a_step_cannot_take_its_batches_from_an_iterator(step: str) -> None:
    module = Classifier()
    setattr(module, step, lambda dataloader_iter: None)
    with pytest.raises(TypeError, match=rf"{step}\(dataloader_iter\) cannot take .* pass a larger batch_size"):
        tw.Trainer(max_epochs=1, **QUIET).fit(module, make_loader(10), make_loader(10))


def test_deterministic_enables_the_algorithms_of_torch() -> None:
    try:
        run(deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        run(deterministic="warn")
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        run(deterministic=False)
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_steps_to_come_are_known_when_optimizers_are_made() -> None:
    class Planned(Diary):
        def configure_optimizers(self) -> Any:
            self.planned = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    def planned(loader: Any = None, **settings: Any) -> Any:
        module, trainer = run(Planned(), loader, **settings)
        if module.planned != math.inf:
            assert trainer.global_step == module.planned
        return module.planned

    assert planned(max_epochs=3) == 33
    assert planned(max_epochs=3, accumulate_grad_batches=4) == 9
    assert planned(max_epochs=3, max_steps=20) == 20
    assert planned(max_epochs=2, limit_train_batches=0.5) == 10
    assert planned(DataLoader(Unmeasured(), batch_size=4), max_steps=5, max_epochs=-1) == 5
    assert planned(DataLoader(Unmeasured(), batch_size=4)) == math.inf
    with pytest.raises(RuntimeError, match="which no fit has loaded yet"):
        tw.Trainer(**QUIET).estimated_stepping_batches


class Stream(Unmeasured):
    def __len__(self) -> int:
        return 1000  # an estimate, and a wrong one


@pytest.mark.parametrize("accumulate", [1, 4])
def test_loaders_of_other_kinds_train_alike(accumulate: int) -> None:
    """An iterable dataset has no length, so its last window is known to be shorter only at its end."""
    settings = {"accumulate_grad_batches": accumulate, "max_epochs": 2}
    expected = Classifier()
    fit(expected, **settings)
    batches = list(make_loader())
    loaders = {
        "list": batches,
        "stream": DataLoader(Stream(), batch_size=4),
        "unmeasured": DataLoader(Unmeasured(), batch_size=4),
        "unbatched": DataLoader(batches, batch_size=None),
    }
    for name, loader in loaders.items():
        module = Classifier()
        trainer = fit(module, loader, **settings)
        assert trainer.global_step == 2 * -(-11 // accumulate), name
        for key, value in weights(module).items():
            torch.testing.assert_close(value, weights(expected)[key], rtol=1e-6, atol=1e-6)


# Torch's compiler meets these itself, and hides them where they are no errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_compiling_does_not_change_the_names_of_the_state(tmp_path: Any) -> None:
    class Compiled(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(3, 3)])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.blocks[0](self.net(batch[0])), batch[1])

        def on_train_end(self) -> None:
            self.compiled = [layer._compiled_call_impl is not None for layer in (self.net, *self.blocks)]
            assert list(self.state_dict()) == names

    module = Compiled()
    names = list(module.state_dict())
    trainer = fit(module, compile={"backend": "eager"}, limit_train_batches=2)
    assert list(module.state_dict()) == names
    assert module.compiled == [True, True]
    assert module.net._compiled_call_impl is None  # a later run may be eager
    trainer.save_checkpoint(str(tmp_path / "compiled.ckpt"))
    eager = Compiled()
    tw.Trainer(**QUIET).test(eager, make_loader(), ckpt_path=str(tmp_path / "compiled.ckpt"))
    assert_equal(weights(eager), weights(module))


class LyingSampler(list[Any]):
    def __len__(self) -> int:
        return 20


class ModestSampler(list[Any]):
    def __len__(self) -> int:
        return 1


class Nothing:
    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize(("module", "loader", "error", "match"), [
    (Classifier(), DataLoader(make_data(), batch_sampler=ModestSampler([[0], [1]])), RuntimeError,
     "more batches than its length, 1"),
    (Classifier(), iter([]), RuntimeError, "yields no batches: an iterator can be read only once"),
    (Classifier(), Nothing(), RuntimeError, "yielded no batches"),
    (Classifier(), DataLoader(make_data(), batch_sampler=LyingSampler([[0], [1]])), RuntimeError,
     "yielded 2 batches, but its length is 20"),
])  # fmt: skip
def test_fit_rejects_a_loader_that_lies_about_its_length_or_is_empty(
    module: Any, loader: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        fit(module, loader)


def test_an_evaluation_before_fit_leaves_metrics_that_can_be_trained_with() -> None:
    class Measuring(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.mean(1.0)
            self.log("mean", self.mean, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.mean(2.0)
            self.log("val_mean", self.mean)

    module = Measuring()
    trainer = tw.Trainer(max_epochs=1, **QUIET)
    assert trainer.validate(module, make_loader()) == [{"val_mean": 2.0}]
    trainer.fit(module, make_loader())
    assert trainer.callback_metrics["mean"] == 1.0


def test_a_second_fit_starts_with_the_first_scale() -> None:
    trainer = tw.Trainer(max_epochs=1, precision="16-mixed", **QUIET)
    first, second = Classifier(), Classifier()
    trainer.fit(first, make_loader())
    scale = trainer.engine.precision.state_dict()
    trainer.fit(second, make_loader())
    assert trainer.engine.precision.state_dict() == scale
    assert_equal(weights(first), weights(second))


def test_an_epoch_that_ends_within_a_window_is_saved(tmp_path: Any) -> None:
    class Stop(tw.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 6 else None

    callback = tw.ModelCheckpoint(str(tmp_path))
    trainer = tw.Trainer(max_epochs=2, accumulate_grad_batches=4, callbacks=[callback, Stop()], **SAVING)
    trainer.fit(Classifier(), make_loader())
    assert [path.name for path in tmp_path.iterdir()] == ["epoch=1-step=2.ckpt"]


def test_an_evaluation_goes_to_the_end_of_a_loader_that_estimates_its_length() -> None:
    class Modest(Unmeasured):
        def __len__(self) -> int:
            return 8

    for dataset in (Modest(), Stream(), Unmeasured()):
        assert tw.Trainer(**QUIET).test(Classifier(), DataLoader(dataset, batch_size=44))[0]["count"] == 44
    sampler = ModestSampler([[0], [1]])
    with pytest.raises(RuntimeError, match="more batches than its length, 1"):
        tw.Trainer(**QUIET).test(Classifier(), DataLoader(make_data(), batch_sampler=sampler))
