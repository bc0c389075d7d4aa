"""The loop: limits, loaders of every kind, optimizers, schedulers, compile, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small import QUIET, Classifier, assert_equal, loss_of, make_data, make_loader, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

import trainwright as tw


def fit(module: tw.Module, loader: Any = None, **settings: Any) -> tw.Trainer:
    trainer = tw.Trainer(**{"max_epochs": 1, **QUIET, **settings})
    trainer.fit(module, loader if loader is not None else make_loader())
    return trainer


class Unmeasured(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (make_data()[index] for index in range(44))


class Stream(Unmeasured):
    def __len__(self) -> int:
        return 1000  # an estimate, and a wrong one


@pytest.mark.parametrize(
    ("settings", "steps", "epochs"),
    [
        ({"max_epochs": 3}, 33, 3),
        ({"max_epochs": 3, "limit_train_batches": 4}, 12, 3),
        ({"max_epochs": 2, "limit_train_batches": 0.5}, 10, 2),
        ({"max_epochs": None, "max_steps": 15}, 15, 2),
        ({"max_epochs": 2, "accumulate_grad_batches": 4}, 6, 2),
        ({"max_epochs": 0}, 0, 0),
    ],
)
def test_limits(settings: dict[str, Any], steps: int, epochs: int) -> None:
    trainer = fit(Classifier(), **settings)
    assert (trainer.global_step, trainer.current_epoch) == (steps, epochs)


def test_should_stop_ends_the_run_at_a_step() -> None:
    class Stop(tw.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.should_stop = trainer.should_stop or batch_idx == 4

    assert fit(Classifier(), accumulate_grad_batches=4, callbacks=Stop()).global_step == 2


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


def test_an_endless_loader_ends_with_its_limit() -> None:
    def endless() -> Iterator[Any]:
        while True:
            yield next(iter(make_loader()))

    class Endless:
        def __iter__(self) -> Iterator[Any]:
            return endless()

    assert fit(Classifier(), Endless(), limit_train_batches=5, max_epochs=2).global_step == 10
    assert fit(Classifier(), Endless(), max_steps=7).global_step == 7


def test_none_skips_the_batch() -> None:
    class Skipping(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 2 else {"loss": loss_of(self.net, batch), "more": 1}

    assert fit(Skipping()).global_step == 6


def test_the_scheduler_is_left_out_with_a_skipped_step() -> None:
    class Overflowing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return loss_of(self.net, batch) * (float("inf") if batch_idx == 2 else 1.0)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 0.5**count)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    trainer = fit(Overflowing(), precision="16-mixed", limit_train_batches=5)
    assert (trainer.global_step, trainer.state.skipped_steps) == (5, 1)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 4
    assert trainer.engine.precision.state_dict()["scale"] == 2.0**15  # halved once


def test_plateau_and_epoch_schedulers() -> None:
    class Planned(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1, threshold=1e9)
            return [optimizer], [{"scheduler": plateau, "monitor": "val_loss"}]

    module = Planned()
    trainer = tw.Trainer(max_epochs=3, **QUIET)
    trainer.fit(module, make_loader(), make_loader())
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05 * 0.1**3)
    with pytest.raises(ValueError, match=r"ReduceLROnPlateau follows 'val_loss', which was not logged; there are loss"):
        fit(Planned())


def test_manual_optimization_through_the_scaler() -> None:
    class Manual(Classifier):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss_of(self.net, batch))
            optimizer.step()

    class Automatic(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return loss_of(self.net, batch)

    manual, automatic = Manual(), Automatic()
    assert fit(manual, precision="16-mixed").global_step == 11
    fit(automatic, precision="16-mixed")
    assert_equal(weights(manual), weights(automatic))
    with pytest.raises(ValueError, match="automatic_optimization = False"):
        fit(Manual(), gradient_clip_val=1.0)


def test_training_flags_are_kept_through_validation() -> None:
    class Frozen(Classifier):
        def on_train_start(self) -> None:
            self.net[0].eval()

        def on_train_epoch_end(self) -> None:
            assert self.training
            assert not self.net[0].training

    tw.Trainer(max_epochs=2, **QUIET).fit(Frozen(), make_loader(), make_loader())


# Torch's compiler meets these itself, and hides them where they are no errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_compiled_children_keep_the_names_of_the_state(tmp_path: Any) -> None:
    class Compiled(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(3, 3)])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.blocks[0](self.net(batch[0])), batch[1])

        def on_train_end(self) -> None:
            self.compiled = {type(each).__name__ for each in self.trainer.run.compiled.called}
            assert list(self.state_dict()) == names

    module = Compiled()
    names = list(module.state_dict())
    trainer = fit(module, compile={"backend": "eager"}, limit_train_batches=2)
    assert list(module.state_dict()) == names
    assert module.compiled == {"Sequential", "Linear"}
    assert module.net._compiled_call_impl is None  # a later run may be eager
    trainer.save_checkpoint(str(tmp_path / "compiled.ckpt"))
    eager = Compiled()
    tw.Trainer(**QUIET).test(eager, make_loader(), ckpt_path=str(tmp_path / "compiled.ckpt"))
    assert_equal(weights(eager), weights(module))


class NoLoss(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return "loss"


class Detached(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self.net, batch).detach()


class TwoOptimizers(Classifier):
    def configure_optimizers(self) -> Any:
        return [super(TwoOptimizers, self).configure_optimizers() for _ in range(2)]


class NoSteps(tw.Module):
    pass


class NoSuper(Classifier):
    def __init__(self) -> None:
        nn.Module.__init__(self)


class LyingSampler(list[Any]):
    def __len__(self) -> int:
        return 20


class ModestSampler(list[Any]):
    def __len__(self) -> int:
        return 1


class Nothing:
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Vector(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])


@pytest.mark.parametrize(
    ("module", "loader", "error", "match"),
    [
        (NoLoss(), None, TypeError, "returned a str; expected a loss tensor"),
        (Vector(), None, RuntimeError, r"a loss of shape \(4, 3\); expected one element"),
        (
            Classifier(),
            DataLoader(make_data(), batch_sampler=ModestSampler([[0], [1]])),
            RuntimeError,
            "more batches than its length, 1",
        ),
        (Detached(), None, RuntimeError, "no parameter requiring a gradient"),
        (TwoOptimizers(), None, ValueError, "automatic_optimization = False"),
        (NoSteps(), None, TypeError, "needs training_step and configure_optimizers, which NoSteps"),
        (NoSuper(), None, TypeError, r"did not call super\(\).__init__\(\)"),
        (Classifier, None, TypeError, "the class Classifier; pass an instance"),
        (nn.Linear(1, 1), None, TypeError, "given a Linear; expected an instance of trainwright.Module"),
        (Classifier(), 3, TypeError, "is an int; expected"),
        (Classifier(), [], ValueError, "no batch"),
        (Classifier(), iter([]), RuntimeError, "no batches, or none left: an iterator can be read once"),
        (Classifier(), Nothing(), RuntimeError, "yielded no batches"),
        (
            Classifier(),
            DataLoader(make_data(), batch_sampler=LyingSampler([[0], [1]])),
            RuntimeError,
            "yielded 2 batches, but its length is 20",
        ),
    ],
)
def test_fit_refuses(module: Any, loader: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        fit(module, loader)


def test_fit_without_a_loader_says_so() -> None:
    with pytest.raises(TypeError, match="given no train_dataloaders; pass a torch DataLoader"):
        tw.Trainer(**QUIET).fit(Classifier())
    with pytest.raises(TypeError, match="given no dataloaders"):
        tw.Trainer(**QUIET).test(Classifier())
    with pytest.raises(TypeError, match="given no module"):
        tw.Trainer(**QUIET).test(dataloaders=make_loader())


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"max_epochs": 1.5, "max_steps": "x"}, ValueError, r"max_epochs=1.5: .*; max_steps='x'"),
        ({"limit_val_batches": 1.5}, ValueError, "a fraction from 0.0 to 1.0"),
        ({"accumulate_grad_batches": 0}, ValueError, "integer of at least 1"),
        ({"gradient_clip_val": -1.0}, ValueError, "a number above 0"),
        (
            {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "nrom"},
            ValueError,
            "'norm' .the total norm. or 'value'",
        ),
        ({"compile": "yes"}, ValueError, "a dict of torch.compile's options"),
        ({"strategy": "dpp"}, ValueError, "choose from auto, single_device, ddp.*Did you mean 'ddp'"),
        ({"strategy": "zero2"}, ValueError, "deepspeed_stage_2, .*ddp_notebook"),
        ({"strategy": tw.DDPStrategy}, TypeError, "Pass an instance, not its class"),
        ({"strategy": "single_device", "devices": 2, "accelerator": "cpu"}, ValueError, "such as 'ddp'"),
        ({"precision": "8"}, ValueError, "choose from 64-true, 32-true, 16-mixed"),
        ({"precision": "fp8"}, ValueError, r"choose from [^?]*\.$"),
        ({"precision": 1.5}, TypeError, "is a float"),
        ({"devices": 0}, ValueError, "below 1"),
        ({"devices": 2.5}, TypeError, "expected a number of devices"),
        ({"accelerator": "tpu"}, ValueError, "choose from auto, cpu, gpu, cuda, mps, xpu"),
        ({"callbacks": [tw.ModelCheckpoint]}, TypeError, "expected instances"),
        ({"callbacks": [tw.ModelCheckpoint()]}, ValueError, "leave out one of the two"),
        ({"callbacks": tw.ModelSummary}, TypeError, "expected instances"),
        ({"logger": "csv"}, TypeError, "expected True, False or Logger"),
        ({"max_epoch": 3}, TypeError, "max_epoch"),
    ],
)
def test_trainer_refuses(settings: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        tw.Trainer(**{**QUIET, **settings})


def test_limits_of_validation() -> None:
    counted: list[int] = []

    class Counting(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            counted.append(batch_idx)

    def batches(**settings: Any) -> list[int]:
        counted.clear()
        tw.Trainer(max_epochs=1, **{**QUIET, **settings}).fit(Counting(), make_loader(), make_loader(12, 4))
        return list(counted)

    assert batches() == [0, 1, 0, 1, 2]
    assert batches(num_sanity_val_steps=0) == [0, 1, 2]
    assert batches(num_sanity_val_steps=-1) == [0, 1, 2, 0, 1, 2]
    assert batches(limit_val_batches=1) == [0, 0]
    assert batches(limit_val_batches=0) == []
    assert batches(limit_val_batches=0.7, check_val_every_n_epoch=2) == [0, 1]


def test_frozen_submodules_stay_in_evaluation_mode() -> None:
    module = Classifier()
    module.net[2].eval()
    fit(module)
    assert not module.net[2].training
    assert module.training


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
    settings = {**QUIET, "enable_checkpointing": True}
    trainer = tw.Trainer(max_epochs=2, accumulate_grad_batches=4, callbacks=[callback, Stop()], **settings)
    trainer.fit(Classifier(), make_loader())
    assert [path.name for path in tmp_path.iterdir()] == ["epoch=1-step=2.ckpt"]


def test_an_empty_compile_says_so() -> None:
    class Flat(tw.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 3))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(batch[0] @ self.weight, batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.warns(UserWarning, match="Flat has no submodule with a forward"):
        fit(Flat(), compile={"backend": "eager"})


def test_an_evaluation_goes_to_the_end_of_a_loader_that_estimates_its_length() -> None:
    class Modest(Unmeasured):
        def __len__(self) -> int:
            return 8

    for dataset in (Modest(), Stream(), Unmeasured()):
        assert tw.Trainer(**QUIET).test(Classifier(), DataLoader(dataset, batch_size=44))[0]["count"] == 44
    sampler = ModestSampler([[0], [1]])
    with pytest.raises(RuntimeError, match="more batches than its length, 1"):
        tw.Trainer(**QUIET).test(Classifier(), DataLoader(make_data(), batch_sampler=sampler))
