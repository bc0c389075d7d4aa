"""Every precision on an accelerator equals a loop by hand with torch's autocast and scaler on the same device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import CASES, DTYPES, ON_DEVICE, adamw, on_host, train_by_hand
from small import Classifier, assert_close, make_loader, make_net, weights
from torch import Tensor, nn

import trainwright as tw
from trainwright.devices.abilities import autocasts
from trainwright.precision.mixed import MixedPrecision

pytestmark = pytest.mark.gpu


class Recording(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss


def settings_of(case: dict[str, Any]) -> dict[str, Any]:
    by_value = "clip_value" in case
    return {
        "accumulate_grad_batches": case.get("accumulate", 1),
        "gradient_clip_val": case.get("clip_value", case.get("clip_norm")),
        "gradient_clip_algorithm": "value" if by_value else "norm",
    }


def need_autocast(device: torch.device, precision: str) -> None:
    if not autocasts(device.type, DTYPES[precision]):
        pytest.skip(f"{device.type} has no autocast in {DTYPES[precision]}")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_a_run_equals_the_loop_by_hand(device: torch.device, precision: str, name: str) -> None:
    if precision in DTYPES:
        need_autocast(device, precision)
    net, module = make_net(), Recording()
    by_hand = train_by_hand(net, make_loader(), device, precision=precision, **CASES[name])
    trainer = tw.Trainer(max_epochs=2, precision=precision, **settings_of(CASES[name]), **ON_DEVICE)
    trainer.fit(module, make_loader())
    torch.testing.assert_close(torch.stack(module.losses).float().cpu(), by_hand.losses, rtol=1e-5, atol=1e-5)
    assert_close(on_host(weights(module.net)), on_host(weights(net)), 1e-5)
    assert {each.dtype for each in module.parameters()} == {torch.float32}
    (state,) = (trainer.engine.precision.state_dict(),)
    assert (state.get("scale", 1.0), trainer.state.skipped_steps) == (by_hand.scale, by_hand.skipped)
    assert trainer.global_step == 2 * (11 if CASES[name].get("accumulate", 1) == 1 else 3)


@pytest.mark.parametrize("name", CASES)
def test_a_scale_that_overflows_skips_those_steps_and_recovers(device: torch.device, name: str) -> None:
    need_autocast(device, "16-mixed")

    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler(device.type, init_scale=2.0**26, growth_interval=4)

    net, module = make_net(), Recording()
    by_hand = train_by_hand(net, make_loader(), device, epochs=6, precision="16-mixed", scaler=scaler(), **CASES[name])
    assert by_hand.skipped > 2
    precision = MixedPrecision("16-mixed", device.type, scaler())
    trainer = tw.Trainer(max_epochs=6, precision=precision, **settings_of(CASES[name]), **ON_DEVICE)
    trainer.fit(module, make_loader())
    assert trainer.state.skipped_steps == by_hand.skipped
    assert trainer.engine.precision.state_dict()["scale"] == by_hand.scale
    assert_close(on_host(weights(module.net)), on_host(weights(net)), 1e-5)
    assert all(each.isfinite().all() for each in module.parameters())
    assert not torch.equal(module.net[0].weight.cpu(), make_net()[0].weight)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-true", torch.bfloat16), ("16-true", torch.float16)])
def test_weights_of_a_low_dtype_are_trained_as_by_hand(
    device: torch.device, precision: str, dtype: torch.dtype
) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=False, fused=False)

    class Plain(Recording):
        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters())

    net, module = make_net().to(dtype), Plain()
    batches = [[batch[0].to(dtype), batch[1]] for batch in make_loader()]
    by_hand = train_by_hand(net, batches, device, make_optimizer=lambda each: optimizer(each.parameters()))
    tw.Trainer(max_epochs=2, precision=precision, **ON_DEVICE).fit(module, make_loader())
    assert {each.dtype for each in module.parameters()} == {dtype}
    torch.testing.assert_close(torch.stack(module.losses).float().cpu(), by_hand.losses, rtol=1e-6, atol=1e-6)
    assert_close(on_host(weights(module.net)), on_host(weights(net)), 1e-6)


def test_float64_is_trained_or_refused(device: torch.device) -> None:
    settings = {"max_epochs": 1, "precision": "64-true", **ON_DEVICE}
    try:
        torch.ones(1, dtype=torch.float64, device=device)
    except TypeError:
        with pytest.raises(ValueError, match=r"64-true.*float64"):
            tw.Trainer(**settings)
        return
    found = []
    for accelerator in ("gpu", "cpu"):
        module = Classifier()
        tw.Trainer(**{**settings, "accelerator": accelerator}).fit(module, make_loader())
        found.append(on_host(weights(module)))
    assert_close(*found, tolerance=1e-12)


class WithNorms(tw.Module):
    """A batch norm as the first layer, and a layer norm: autocast has special rules for them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.BatchNorm1d(8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
        self.outputs: set[torch.dtype] = set()
        self.losses: set[torch.dtype] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.body(self.first(batch[0]))
        loss = nn.functional.cross_entropy(outputs, batch[1])
        self.outputs.add(outputs.dtype)
        self.losses.add(loss.dtype)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outputs.add(self.body(self.first(batch[0])).dtype)

    def configure_optimizers(self) -> Any:
        return adamw(self)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_norms_keep_float32_statistics_and_losses(device: torch.device, precision: str) -> None:
    need_autocast(device, precision)
    module = WithNorms()
    tw.Trainer(max_epochs=1, precision=precision, **ON_DEVICE).fit(module, make_loader(), make_loader(8))
    assert module.outputs == {DTYPES[precision]}
    assert module.losses == {torch.float32}
    assert {value.dtype for value in module.state_dict().values() if value.is_floating_point()} == {torch.float32}
    full = WithNorms()
    tw.Trainer(max_epochs=1, **ON_DEVICE).fit(full, make_loader())
    found, expected = (dict(each.first.named_buffers()) for each in (module, full))  # only of the data
    assert_close(on_host(found), on_host(expected), 1e-5)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_manual_steps_see_the_weights_that_the_step_before_left(device: torch.device, precision: str) -> None:
    need_autocast(device, precision)

    class Twice(Classifier):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            for _ in range(2):
                optimizer.zero_grad()
                self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
                optimizer.step()

    net, module = make_net(), Twice()
    twice = [batch for batch in make_loader() for _ in range(2)]
    train_by_hand(net, twice, device, epochs=1, precision=precision)
    tw.Trainer(max_epochs=1, precision=precision, **ON_DEVICE).fit(module, make_loader())
    assert_close(on_host(weights(module.net)), on_host(weights(net)), 1e-5)
