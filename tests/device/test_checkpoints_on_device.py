"""Checkpoints of an accelerator: written while the next steps change the weights, and read on the CPU and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import ON_DEVICE, TOLERANCE, on_host
from held import held
from small import QUIET, Classifier, assert_close, assert_equal, make_loader, weights
from torch import Tensor, nn

import trainwright as tw
from trainwright.checkpoint.reader import open_checkpoint

pytestmark = pytest.mark.gpu


class Large(Classifier):
    """16 MB of weights, all changed by every step, and an average of them in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 1 << 18), nn.Tanh(), nn.Linear(1 << 18, 3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def state_of(trainer: Any, module: Any) -> dict[str, Tensor]:
    found = {f"model/{name}": value for name, value in weights(module).items()}
    names = {parameter: name for name, parameter in module.named_parameters()}
    for parameter, state in trainer.optimizers[0].state.items():
        found |= {f"optimizer/0/{names[parameter]}/{key}": value.clone() for key, value in state.items()}
    return on_host(found)


class SavesAside(tw.Callback):
    """Saves in the background after the third step, and lets the writer through after the seventh."""

    def __init__(self, path: str, files: Any = None) -> None:
        self.path, self.files = path, files
        self.expected: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            self.expected = state_of(trainer, module)  # before, as it waits for the device
            trainer.save_checkpoint(self.path, blocking=False)
        if trainer.global_step == 7 and self.files is not None:
            self.files.gate.set()


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_save_in_the_background_holds_the_weights_of_its_step(tmp_path: Path, precision: str) -> None:
    path = tmp_path / "three.ckpt"
    module = Large()
    with held() as files:
        saver = SavesAside(f"held://{path}", files)
        trainer = tw.Trainer(max_steps=9, precision=precision, callbacks=[saver], **ON_DEVICE)
        trainer.fit(module, make_loader())
    checkpoint = open_checkpoint(str(path))
    for name, expected in saver.expected.items():
        section, _, own = name.partition("/")
        assert torch.equal(checkpoint.read_tensor(section, own), expected), name
    assert int(module.steps) == 9
    assert int(saver.expected["model/steps"]) == 3


def trained(accelerator: str, epochs: int, folder: Path, ckpt_path: Any = None) -> tuple[dict[str, Tensor], Path]:
    module = Classifier()
    trainer = tw.Trainer(max_epochs=epochs, **{**QUIET, "accelerator": accelerator, "devices": 1})
    trainer.fit(module, make_loader(), ckpt_path=ckpt_path and str(ckpt_path))
    path = folder / f"{accelerator}-{epochs}.ckpt"
    trainer.save_checkpoint(str(path))
    steps = {value.device.type for state in trainer.optimizers[0].state.values() for value in state.values()}
    assert steps <= {trainer.engine.device.type, "cpu"}
    return state_of(trainer, module), path


def test_a_run_goes_to_the_cpu_and_back(tmp_path: Path) -> None:
    whole, _ = trained("cpu", 3, tmp_path)
    _, first = trained("gpu", 1, tmp_path)
    _, second = trained("cpu", 2, tmp_path, first)
    there, _ = trained("gpu", 3, tmp_path, second)
    assert_close(there, whole, TOLERANCE)


def test_a_checkpoint_holds_what_the_device_holds(tmp_path: Path) -> None:
    state, path = trained("gpu", 1, tmp_path)
    here, copied = trained("cpu", 1, tmp_path, path)  # nothing is left to train
    assert_equal(here, state)
    there, _ = trained("gpu", 1, tmp_path / "again", copied)
    assert_equal(there, state)


def test_weights_are_loaded_onto_whatever_is_there(tmp_path: Path, device: torch.device) -> None:
    state, path = trained("gpu", 1, tmp_path)
    module = Classifier.load_from_checkpoint(str(path))
    assert {each.device.type for each in module.parameters()} == {"cpu"}
    assert_equal({f"model/{name}": each for name, each in weights(module).items()}, {
        name: each for name, each in state.items() if name.startswith("model/")
    })  # fmt: skip
    (here,) = tw.Trainer(**QUIET).test(Classifier(), make_loader(), ckpt_path=str(path), verbose=False)
    (there,) = tw.Trainer(**ON_DEVICE).test(Classifier(), make_loader(), ckpt_path=str(path), verbose=False)
    assert there == pytest.approx(here, rel=TOLERANCE)


def test_a_resume_restores_the_scale_and_skipped_steps(tmp_path: Path, device: torch.device) -> None:
    from trainwright.devices.abilities import autocasts
    from trainwright.precision.mixed import MixedPrecision

    if not autocasts(device.type, torch.float16):
        pytest.skip(f"{device.type} has no autocast in float16")

    def train(epochs: int, ckpt_path: str | None = None) -> tuple[dict[str, Tensor], Any]:
        precision = MixedPrecision(
            "16-mixed", device.type, torch.amp.GradScaler(device.type, init_scale=2.0**26, growth_interval=5)
        )
        module = Classifier()
        trainer = tw.Trainer(max_epochs=epochs, precision=precision, **ON_DEVICE)
        trainer.fit(module, make_loader(), ckpt_path=ckpt_path)
        return state_of(trainer, module), trainer

    whole, uncut = train(3)
    _, cut = train(1)
    cut.save_checkpoint(str(tmp_path / "one.ckpt"))
    resumed, trainer = train(3, str(tmp_path / "one.ckpt"))
    assert_equal(resumed, whole)
    assert trainer.engine.precision.state_dict() == uncut.engine.precision.state_dict()
    assert 0 < trainer.state.skipped_steps == uncut.state.skipped_steps
