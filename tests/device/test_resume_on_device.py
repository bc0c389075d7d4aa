"""An interrupted run on an accelerator ends as the uninterrupted one, bitwise, though its steps draw on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import DTYPES, ON_DEVICE, on_host
from small import Classifier, assert_equal, loss_of, make_loader, weights
from torch import Tensor

import trainwright as tw
from trainwright.data import seeding
from trainwright.devices.abilities import autocasts
from trainwright.devices.generators import device_state, set_device_state

pytestmark = pytest.mark.gpu

STEPS = 22
"""Of two epochs."""


class Noisy(Classifier):
    """Draws on the device and on the host, in its steps and before an epoch."""

    def __init__(self) -> None:
        super().__init__(dropout=0.4)

    def on_train_epoch_start(self) -> None:
        self.shift = torch.randn(8, device=self.device) * 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noise = 0.1 * torch.randn_like(batch[0]) + self.shift + 0.1 * torch.rand(()).item()
        loss = loss_of(self.net, (batch[0] + noise, batch[1]))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.net, (batch[0] + torch.randn_like(batch[0]), batch[1])))


def run(folder: Path, ckpt_path: str | None = None, seed: int = 3, **settings: Any) -> tuple[dict[str, Tensor], Any]:
    """Train two epochs, or the rest of them, and return weights, optimizer state and logged values."""
    tw.seed_everything(seed)
    saver = tw.ModelCheckpoint(str(folder), save_top_k=-1, every_n_train_steps=5)
    module = Noisy()
    settings = {**ON_DEVICE, "enable_checkpointing": True, "max_epochs": 2, **settings}
    trainer = tw.Trainer(callbacks=[saver], **settings)
    trainer.fit(module, make_loader(shuffle=True), make_loader(8), ckpt_path=ckpt_path)
    states = trainer.optimizers[0].state_dict()["state"]
    state = {f"{i}/{key}": torch.as_tensor(value) for i, each in states.items() for key, value in each.items()}
    logged = {name: torch.as_tensor(value) for name, value in trainer.callback_metrics.items() if "step" not in name}
    return on_host({**weights(module), **state, **logged, "drawn": torch.rand(3, device=module.device)}), trainer


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_a_resumed_run_is_the_run_that_was_never_cut(device: torch.device, tmp_path: Path, precision: str) -> None:
    if precision in DTYPES and not autocasts(device.type, DTYPES[precision]):
        pytest.skip(f"{device.type} has no autocast in {DTYPES[precision]}")
    whole, trainer = run(tmp_path / "whole", precision=precision)
    assert trainer.global_step == STEPS
    places = sorted(
        (tmp_path / "whole").glob("*.ckpt"), key=lambda path: int(path.name.split("step=")[1].split(".")[0])
    )
    assert len(places) >= 4
    for number, place in enumerate((places[0], places[2])):  # within the first epoch, and within the second
        resumed, _ = run(tmp_path / f"{number}", str(place), seed=77, precision=precision)
        assert_equal(resumed, whole)


@pytest.mark.parametrize("stops", [False, True], ids=["saved within an epoch", "stopped within it"])
def test_a_run_of_the_cpu_goes_on_with_draws_of_its_own_seed(tmp_path: Path, stops: bool) -> None:
    """It has no generator of the device, whose numbers then follow the run's seed, not earlier draws of the process."""
    saved = tmp_path / "host" / "saved.ckpt"
    _, trainer = run(tmp_path / "host", accelerator="cpu", devices=1, max_steps=8 if stops else -1)
    if stops:
        trainer.save_checkpoint(str(saved))
    else:
        saved = next((tmp_path / "host").glob("*step=5.ckpt"))
    first, _ = run(tmp_path / "first", str(saved), seed=5)
    second, _ = run(tmp_path / "second", str(saved), seed=6)
    assert_equal(second, first)


def test_a_resumed_run_is_exact_with_workers_and_windows(tmp_path: Path) -> None:
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}

    def train(folder: str, ckpt_path: str | None = None) -> dict[str, Tensor]:
        tw.seed_everything(3 if ckpt_path is None else 5)
        module = Noisy()
        saver = tw.ModelCheckpoint(str(tmp_path / folder), save_top_k=-1, every_n_train_steps=4, async_save=True)
        trainer = tw.Trainer(max_epochs=2, callbacks=[saver], **{**ON_DEVICE, "enable_checkpointing": True}, **settings)
        trainer.fit(module, make_loader(shuffle=True, num_workers=2), ckpt_path=ckpt_path)
        return on_host(weights(module))

    whole = train("whole")
    assert_equal(train("part", str(next((tmp_path / "whole").glob("*step=4.ckpt")))), whole)


def test_what_a_loop_draws_on_the_device_follows_the_seed(device: torch.device) -> None:
    drawn = []
    for seed in (3, 3, 4):
        tw.seed_everything(seed)
        drawn.append(torch.rand(5, device=device).cpu())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_generators_of_missing_devices_are_skipped(device: torch.device, tmp_path: Path, monkeypatch: Any) -> None:
    """A checkpoint may come from a machine with more devices. Only the run's generator is restored."""
    whole, _ = run(tmp_path / "whole")
    gone = torch.accelerator.device_count() + 3

    def of_many() -> Any:
        state = device_state()
        return {**state, "others": {str(gone): state["state"]}}

    with monkeypatch.context() as patch:
        patch.setattr(seeding, "device_state", of_many)
        patch.setattr(seeding, "set_device_state", lambda state: set_device_state({**state, "others": {}}))
        run(tmp_path / "many")
    place = next((tmp_path / "many").glob("*step=5.ckpt"))
    resumed, _ = run(tmp_path / "few", str(place), seed=9)
    assert_equal(resumed, whole)
