"""A raw loop on an accelerator: the loop by hand, its resume, and the objects that the Accelerator moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import CASES, DTYPES, ON_DEVICE, adamw, on_host, train_by_hand
from small import Classifier, assert_close, assert_equal, loss_of, make_loader, make_net, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader

import trainwright as tw
from trainwright.devices.abilities import autocasts
from trainwright.precision.mixed import MixedPrecision

pytestmark = pytest.mark.gpu


def loop(accelerator: tw.Accelerator, net: nn.Module, case: dict[str, Any], epochs: int = 2) -> Tensor:
    model, optimizer, loader = accelerator.prepare(net, adamw(net), make_loader())
    losses = []
    for _ in range(epochs):
        for batch in loader:
            assert {each.device for each in batch} == {accelerator.device}
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                if "clip_value" in case:
                    accelerator.clip_grad_value_(model.parameters(), case["clip_value"])
                if "clip_norm" in case:
                    accelerator.clip_grad_norm_(model.parameters(), case["clip_norm"])
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
    return torch.stack(losses).float().cpu()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_it_equals_the_loop_by_hand(device: torch.device, precision: str, name: str) -> None:
    if precision in DTYPES and not autocasts(device.type, DTYPES[precision]):
        pytest.skip(f"{device.type} has no autocast in {DTYPES[precision]}")
    net, plain, case = make_net(), make_net(), CASES[name]
    accelerator = tw.Accelerator(
        accelerator="gpu", devices=[0], precision=precision, gradient_accumulation_steps=case.get("accumulate", 1)
    )
    assert accelerator.device == device
    losses = loop(accelerator, net, case)
    # A prepared model's outputs are float32, and the loss is computed of them.
    by_hand = train_by_hand(plain, make_loader(), device, precision=precision, loss_in_autocast=False, **case)
    torch.testing.assert_close(losses, by_hand.losses, rtol=1e-5, atol=1e-5)
    assert_close(on_host(weights(net)), on_host(weights(plain)), 1e-5)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_resumed_loop_is_the_loop_that_was_never_cut(device: torch.device, tmp_path: Path, precision: str) -> None:
    if precision in DTYPES and not autocasts(device.type, DTYPES[precision]):
        pytest.skip(f"{device.type} has no autocast in {DTYPES[precision]}")

    def train(load: str | None = None, save: str | None = None, *, blocking: bool = True) -> dict[str, Tensor]:
        tw.seed_everything(1 if load is None else 9)
        accelerator = tw.Accelerator(devices=1, precision=precision)
        net = make_net(dropout=0.4)
        model, optimizer, loader = accelerator.prepare(net, adamw(net), make_loader(shuffle=True))
        if load is not None:
            accelerator.load_state(load)
        for _ in range(loader.epoch, 2):
            for batch in loader:
                noise = 0.1 * torch.randn_like(batch[0])
                accelerator.backward(loss_of(model, (batch[0] + noise, batch[1])))
                optimizer.step()
                optimizer.zero_grad()
                if save is not None and accelerator.step_count == 5:
                    accelerator.save_state(save, blocking=blocking)
        accelerator.finish_save()
        states = optimizer.state_dict()["state"]
        state = {f"{i}/{key}": torch.as_tensor(value) for i, each in states.items() for key, value in each.items()}
        return on_host({**weights(net), **state})

    for number, blocking in enumerate((True, False)):
        path = str(tmp_path / f"{number}.ckpt")
        whole = train(save=path, blocking=blocking)
        assert_equal(train(load=path), whole)


def test_it_takes_up_a_run_of_the_trainer(tmp_path: Path, device: torch.device) -> None:
    module = Classifier()
    trainer = tw.Trainer(max_epochs=1, **ON_DEVICE)
    trainer.fit(module, make_loader())
    trainer.save_checkpoint(str(tmp_path / "one.ckpt"))
    whole = Classifier()
    tw.Trainer(max_epochs=2, **ON_DEVICE).fit(whole, make_loader())
    again = Classifier()
    accelerator = tw.Accelerator(devices=1)
    _, optimizer, loader = accelerator.prepare(again, adamw(again), make_loader())
    accelerator.load_state(str(tmp_path / "one.ckpt"))
    for _ in range(loader.epoch, 2):
        for batch in loader:
            accelerator.backward(loss_of(again.net, batch))
            optimizer.step()
            optimizer.zero_grad()
    assert_close(on_host(weights(again)), on_host(weights(whole)), 1e-6)


@pytest.mark.parametrize("options", [{}, {"pin_memory": True}, {"num_workers": 2, "pin_memory": True}])
def test_batches_arrive_whole(options: dict[str, Any]) -> None:
    rows = torch.arange(48.0).repeat_interleave(1 << 14).reshape(48, -1)
    accelerator = tw.Accelerator(devices=1)
    weight = nn.Linear(256, 256).to(accelerator.device)
    loader = accelerator.prepare(DataLoader([(each, "text") for each in rows], batch_size=2, **options))  # type: ignore[arg-type]
    sums = []
    for _ in range(2):
        for batch, texts in loader:
            assert texts == ["text", "text"] or texts == ("text", "text")
            values = batch.reshape(-1, 256)
            for _ in range(4):
                values = torch.tanh(weight(values))
            sums.append(batch.mean(dim=1))
    assert torch.cat(sums).cpu().tolist() == 2 * list(range(48))


def test_what_is_gathered_stays_on_the_device(device: torch.device) -> None:
    accelerator = tw.Accelerator(devices=1)
    tensor = torch.arange(3.0, device=device)
    gathered = accelerator.gather({"x": tensor})["x"]
    assert gathered.device == device
    assert gathered.tolist() == [0, 1, 2]
    assert accelerator.reduce(tensor, "mean").device == device


def test_training_continues_after_an_overflow(device: torch.device) -> None:
    if not autocasts(device.type, torch.float16):
        pytest.skip(f"{device.type} has no autocast in float16")
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**26, growth_interval=4)
    accelerator = tw.Accelerator(devices=1, precision=MixedPrecision("16-mixed", device.type, scaler))
    net = make_net()
    model, optimizer, loader = accelerator.prepare(net, adamw(net), make_loader())
    skipped = 0
    for _ in range(4):
        for batch in loader:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            skipped += accelerator.optimizer_step_was_skipped
            optimizer.zero_grad()
    assert 2 < skipped < 22
    assert all(each.isfinite().all() for each in net.parameters())
    assert not torch.equal(net[0].weight.cpu(), make_net()[0].weight)
