"""Optimization: schedulers, closures, clipping and overridden steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from small import QUIET, SAVING, Classifier, assert_close, assert_equal, loss_of, make_loader, weights
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

import trainwright as tw


class Plain(Classifier):
    """SGD without a scheduler, or the result of a function of the module."""

    def __init__(self, own: Callable[[Any], Any] | None = None, lr: float = 0.1) -> None:
        super().__init__(lr=lr)
        self.own = own

    def configure_optimizers(self) -> Any:
        return self.sgd() if self.own is None else self.own(self)

    def sgd(self) -> torch.optim.SGD:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def fit(module: tw.Module, val: Any = None, **settings: Any) -> tw.Trainer:
    return small.fit(module, None, val, **{"fused_optimizers": False, **settings})


def by_hand(
    make: Callable[[Any], torch.optim.Optimizer], before_step: Callable[[Any, int], bool | None] | None = None
) -> Classifier:
    """Train one epoch in a loop by hand. `before_step` gets (net, index of the batch) and returns False to skip the
    step."""
    module = Classifier()
    optimizer = make(module.parameters())
    for index, batch in enumerate(make_loader()):
        optimizer.zero_grad()
        loss_of(module.net, batch).backward()
        if before_step is None or before_step(module.net, index) is not False:
            optimizer.step()
    return module


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1)


def halving(optimizer: Any) -> StepLR:
    return StepLR(optimizer, 1, gamma=0.5)


@pytest.mark.parametrize(("config", "steps"), [
    ({"interval": "epoch"}, 2),
    ({"interval": "epoch", "frequency": 2}, 1),
    ({"interval": "step"}, 8),  # 11 batches in windows of 3
    ({"interval": "step", "frequency": 3}, 2),
    ({"interval": "validation"}, 4),
    ({"interval": "validation", "frequency": 2}, 2),
])  # fmt: skip
def test_schedulers_follow_their_intervals(config: dict[str, Any], steps: int) -> None:
    def own(module: Plain) -> Any:
        optimizer = module.sgd()
        return [optimizer], [{"scheduler": LambdaLR(optimizer, lambda count: 0.5**count), **config}]

    settings = {"max_epochs": 2, "accumulate_grad_batches": 3, "val_check_interval": 5}
    trainer = fit(Plain(own), make_loader(4), **settings)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == steps
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**steps)


def plateau(module: Plain, **config: Any) -> Any:
    optimizer = module.sgd()
    scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.1, threshold=1e9)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **config}, "monitor": "val_loss"}


def test_a_plateau_follows_its_monitor() -> None:
    trainer = fit(Plain(plateau), make_loader(4), max_epochs=3)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-4)  # the first one is the best by definition
    of_steps = fit(Plain(lambda module: plateau(module, monitor="loss", interval="step", frequency=5)))
    assert of_steps.lr_scheduler_configs[0].scheduler.last_epoch == 2
    of_validations = fit(
        Plain(lambda module: plateau(module, interval="validation")), make_loader(4), val_check_interval=5
    )
    assert of_validations.lr_scheduler_configs[0].scheduler.last_epoch == 2


def test_a_plateau_whose_monitor_was_not_logged() -> None:
    with pytest.raises(ValueError, match=r"ReduceLROnPlateau follows 'val_loss', which was not logged; there are loss"):
        fit(Plain(plateau))
    with pytest.warns(
        UserWarning, match=r"ReduceLROnPlateau follows 'val_loss', which was not logged; the scheduler does not step"
    ):
        trainer = fit(Plain(lambda module: plateau(module, strict=False)))
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1
    assert trainer.global_step == 11


def test_a_plateau_that_steps_before_the_first_validation_fails() -> None:
    class Validated(Plain):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", 1.0)

    def run(**settings: Any) -> None:
        module = Validated(plateau)
        tw.Trainer(**QUIET, max_epochs=2, **settings).fit(module, make_loader(8), make_loader(8))

    advice = "pass validation data, and give a scheduler interval='validation'"
    with pytest.raises(ValueError, match=f"No validation has run yet: if it logs 'val_loss', {advice}"):
        run(check_val_every_n_epoch=2)
    with pytest.raises(ValueError, match=advice):
        run(limit_val_batches=0)
    run()


class Stepping(Plain):
    """The form that every script of this kind has."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        assert optimizer is self.optimizers()
        optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize("settings", [{}, {"precision": "16-mixed"}, {"accumulate_grad_batches": 3}])
def test_an_overridden_optimizer_step_changes_nothing(settings: dict[str, Any]) -> None:
    module, expected = Stepping(), Plain()
    trainer = fit(module, gradient_clip_val=0.5, max_epochs=2, **settings)
    fit(expected, gradient_clip_val=0.5, max_epochs=2, **settings)
    assert_equal(weights(module), weights(expected))
    assert trainer.global_step == (8 if "accumulate_grad_batches" in settings else 22)


def test_setup_may_set_a_part_of_the_step() -> None:
    class Sets(Classifier):
        def setup(self, stage: str) -> None:
            self.optimizer_step = lambda *_: None  # type: ignore[method-assign]

    trainer = small.fit(Sets())
    assert trainer.global_step == 0


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_an_optimizer_step_that_does_nothing_is_not_counted(precision: str) -> None:
    """Every second batch counts. A batch whose closure is not called loses its gradients."""
    seen: list[int] = []

    class Sparing(Plain):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            seen.append(batch_idx)
            if batch_idx % 2:
                optimizer.step(closure=optimizer_closure)

        def configure_optimizers(self) -> Any:
            optimizer = self.sgd()
            return [optimizer], [{"scheduler": LambdaLR(optimizer, lambda count: 1.0), "interval": "step"}]

    module = Sparing()
    trainer = fit(module, precision=precision)
    assert seen == list(range(11))
    assert trainer.global_step == trainer.lr_scheduler_configs[0].scheduler.last_epoch == 5
    if precision == "32-true":
        assert_equal(weights(module), weights(by_hand(sgd, lambda net, index: bool(index % 2))))


class Counting(Plain):
    """Counts the calls that a recomputation must not repeat."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__(lambda module: make(module.parameters()))
        self.logged: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.logged.append(self.trainer.callback_metrics["loss"].item())
        assert outputs["loss"].item() == self.logged[-1]


def lbfgs(parameters: Any) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(parameters, lr=0.3, max_iter=5, line_search_fn="strong_wolfe")


class Sharpness(torch.optim.Optimizer):
    """A step of sharpness-aware minimisation: it looks at the gradients once more a little way uphill."""

    def __init__(self, parameters: Any, lr: float = 0.1, radius: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "radius": radius})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        group = self.param_groups[0]
        norm = torch.cat([each.grad.flatten() for each in group["params"]]).norm()
        moves = [each.grad * (group["radius"] / norm) for each in group["params"]]
        for parameter, move in zip(group["params"], moves, strict=True):
            parameter.add_(move)
        with torch.enable_grad():
            loss = closure()
        for parameter, move in zip(group["params"], moves, strict=True):
            parameter.sub_(move).sub_(parameter.grad, alpha=group["lr"])
        return loss


def with_closures(make: Callable[[Any], Any]) -> Classifier:
    module = Classifier()
    optimizer = make(module.parameters())
    for batch in make_loader():

        def closure(batch: Any = batch) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(module.net, batch)
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)
    return module


@pytest.mark.parametrize("make", [lbfgs, Sharpness])
def test_optimizers_can_recompute_the_loss(make: Callable[[Any], Any]) -> None:
    module = Counting(make)
    trainer = fit(module)
    assert_close(weights(module), weights(with_closures(make)))
    assert (trainer.global_step, trainer.state.total_batches, len(module.logged)) == (11, 11, 11)
    mean = sum(module.logged) / 11
    assert trainer.callback_metrics["loss_epoch"].item() == pytest.approx(mean, rel=1e-5)  # batches count once


def test_an_overridden_step_can_recompute_the_loss() -> None:
    class Own(Counting):
        optimizer_step = Stepping.optimizer_step

    module = Own(lbfgs)
    fit(module)
    assert_close(weights(module), weights(with_closures(lbfgs)))


@pytest.mark.parametrize("settings", [{"precision": "16-mixed"}, {"accumulate_grad_batches": 2}])
def test_recomputing_optimizers_are_rejected_under_accumulation(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="LBFGS, whose step computes the loss several times"):
        fit(Plain(lambda module: lbfgs(module.parameters())), **settings)

    class Asking(Plain):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer_closure()
            optimizer_closure()

    with pytest.raises(RuntimeError, match="calls for the loss again"):
        fit(Asking(), **settings)


def clipping(kind: str, limit: float) -> Callable[[Any, int], None]:
    def clip(net: nn.Module, index: int) -> None:
        if kind == "norm":
            nn.utils.clip_grad_norm_(net.parameters(), limit)
        else:
            nn.utils.clip_grad_value_(net.parameters(), limit)

    return clip


@pytest.mark.parametrize(("kind", "limit"), [(None, 0.1), ("norm", 0.1), ("value", 0.01)])
def test_clipping_is_by_norm_or_by_value(kind: str | None, limit: float) -> None:
    module = Plain()
    fit(module, gradient_clip_val=limit, gradient_clip_algorithm=kind)
    assert_close(weights(module), weights(by_hand(sgd, clipping(kind or "norm", limit))))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_training_step_that_returns_none_is_skipped(accumulate: int) -> None:
    """A window without a loss makes neither an optimizer step nor a scheduler step."""

    class Choosy(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx in (3, 4, 5, 7) else loss_of(self.net, batch)

        def configure_optimizers(self) -> Any:
            optimizer = self.sgd()
            return [optimizer], [{"scheduler": LambdaLR(optimizer, lambda count: 1.0), "interval": "step"}]

    module = Choosy()
    trainer = fit(module, accumulate_grad_batches=accumulate)
    steps = 7 if accumulate == 1 else 3
    assert trainer.global_step == trainer.lr_scheduler_configs[0].scheduler.last_epoch == steps
    if accumulate == 1:
        assert_equal(weights(module), weights(by_hand(sgd, lambda net, index: index not in (3, 4, 5, 7))))


class TwoHalves(Plain):
    """Two layers with separate optimizers. The second optimizer accumulates four batches and is clipped."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        with self.toggled_optimizer(first):
            assert [parameter.requires_grad for parameter in self.parameters()] == [True, True, False, False]
            first.zero_grad()
            self.manual_backward(loss_of(self.net, batch))
            first.step()
        self.toggle_optimizer(second)
        if batch_idx % 4 == 0:
            second.zero_grad()
        self.manual_backward(loss_of(self.net, batch) / 4)
        if batch_idx % 4 == 3 or self.trainer.is_last_batch:
            self.clip_gradients(second, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
            second.step()
            self.lr_schedulers().step()
        self.untoggle_optimizer(second)
        assert all(parameter.requires_grad for parameter in self.parameters())

    def configure_optimizers(self) -> Any:
        first, second = sgd(self.net[0].parameters()), sgd(self.net[3].parameters())
        return [first, second], [halving(second)]


def test_manual_optimization_can_step_two_optimizers() -> None:
    module, expected = TwoHalves(), Classifier()
    trainer = fit(module)
    first, second = sgd(expected.net[0].parameters()), sgd(expected.net[3].parameters())
    schedule = halving(second)
    for index, batch in enumerate(make_loader()):
        first.zero_grad()
        loss_of(expected.net, batch).backward(inputs=list(expected.net[0].parameters()))
        first.step()
        if index % 4 == 0:
            second.zero_grad()
        (loss_of(expected.net, batch) / 4).backward(inputs=list(expected.net[3].parameters()))
        if index in (3, 7, 10):
            nn.utils.clip_grad_norm_(expected.net[3].parameters(), 0.2)
            second.step()
            schedule.step()
    assert_close(weights(module), weights(expected))
    assert trainer.global_step == 11 + 3
    assert trainer.optimizers[1].param_groups[0]["lr"] == pytest.approx(0.1 / 8)


def test_manual_optimization_steps_a_plateau_without_a_monitor() -> None:
    class Steps(Plain):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss_of(self.net, batch))
            optimizer.step()

        def on_train_epoch_end(self) -> None:
            self.lr_schedulers().step(1.0)

    trainer = fit(Steps(lambda module: plateau(module, monitor=None)), max_epochs=3)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-4)


def test_manual_clipping_is_exact_under_a_loss_scale() -> None:
    norms: list[float] = []

    class Manual(Plain):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss_of(self.net, batch))
            self.clip_gradients(optimizer, gradient_clip_val=0.1)
            norms.append(torch.cat([each.grad.flatten() for each in self.parameters()]).norm().item())
            optimizer.step()

    class Automatic(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return loss_of(self.net, batch)

    manual, automatic = Manual(), Automatic()
    trainer = fit(manual, precision="16-mixed")
    fit(automatic, precision="16-mixed", gradient_clip_val=0.1)
    assert_close(weights(manual), weights(automatic))
    assert trainer.global_step == 11
    assert max(norms) == pytest.approx(0.1, rel=1e-3)


def test_a_plateau_skips_the_steps_of_an_overflow() -> None:
    class Overflows(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * torch.inf if batch_idx < 4 else loss

    module = Overflows(lambda module: plateau(module, monitor="loss", interval="step"))
    trainer = fit(module, precision="16-mixed")
    assert trainer.state.skipped_steps == 4
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 7


def test_the_closure_returns_the_computed_loss() -> None:
    losses: list[Any] = []

    class Looking(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            losses.append(loss.detach())
            return loss

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            losses.append(optimizer_closure())
            losses.append(optimizer.step())

    module = Looking()
    fit(module, limit_train_batches=3)
    assert losses[0::3] == losses[1::3]
    assert losses[2::3] == [None] * 3


def test_a_step_wise_scheduler_follows_the_validation_after_its_step(tmp_path: Path) -> None:
    """A checkpoint between that step and the validation has the scheduler wait in the resumed run too."""
    rates: list[float] = []

    class Follows(Plain):
        def configure_optimizers(self) -> Any:
            optimizer = self.sgd()
            scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            config = {"scheduler": scheduler, "monitor": "score", "interval": "step", "frequency": 3}
            return {"optimizer": optimizer, "lr_scheduler": config}

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("score", 1.0)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def run(name: str, path: str | None = None) -> Any:
        rates.clear()
        module, saving = Follows(), tw.ModelCheckpoint(tmp_path / name, "{step}", save_top_k=-1, every_n_train_steps=1)
        settings = {**SAVING, "num_sanity_val_steps": 0, "callbacks": saving}
        trainer = tw.Trainer(max_epochs=2, val_check_interval=3, **settings)
        trainer.fit(module, make_loader(24), make_loader(4), ckpt_path=path)  # 6 batches an epoch
        return weights(module), trainer.optimizers[0].param_groups[0]["lr"]

    whole, rate = run("whole")
    first = rates[0]
    assert [each / first for each in rates] == [1, 1, 1, 1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]
    for step in (2, 3, 5, 6, 9, 11):
        resumed, rate_then = run(f"from {step}", str(tmp_path / "whole" / f"step={step}.ckpt"))
        assert_equal(resumed, whole)
        assert rate_then == rate
