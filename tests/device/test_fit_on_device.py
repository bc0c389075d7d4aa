"""fit, validate, test and predict give the same on an accelerator as on the CPU, and the device of a run."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from by_hand import ON_DEVICE, TOLERANCE, on_host
from small import QUIET, Classifier, assert_close, make_data, make_loader, weights
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw

pytestmark = pytest.mark.gpu

WORDS, WIDTH = 11, 8
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation and norm": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5},
    "value": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
}


class Sentences(tw.Module):
    """A transformer with every kind of state: embedding, attention, running statistics, a buffer, a 0-dim parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, dim_feedforward=16, dropout=0.0, batch_first=True)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.embed(words)).mean(dim=1))) * self.temperature

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen += len(batch[0])
        outputs = self(batch[0])
        loss = F.cross_entropy(outputs, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("host", batch_idx, on_step=False, on_epoch=True)
        self.log("worst", loss, reduce_fx="max", on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        outputs = self(batch[0])
        self.log("val_loss", F.cross_entropy(outputs, batch[1]))
        self.log("val_acc", (outputs.argmax(1) == batch[1]).float().mean())
        self.log("count", len(batch[0]), reduce_fx="sum")

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Any]:
        return {"outputs": self(batch[0]), "words": batch[0]}

    def configure_optimizers(self) -> Any:
        # Momentum's steps are as large as the gradients. Adam's would consist of rounding errors for zero gradients.
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}]


def sentences(samples: int, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    words = torch.randint(0, WORDS, (samples, 5), generator=torch.Generator().manual_seed(samples))
    return DataLoader(TensorDataset(words, words[:, 0]), batch_size=batch_size, **options)


def everything(accelerator: str, **settings: Any) -> dict[str, Any]:
    """Fit, validate, test and predict. Return the results in host memory."""
    torch.manual_seed(5)
    module = Sentences()
    trainer = tw.Trainer(max_epochs=2, **{**QUIET, "accelerator": accelerator, "devices": 1, **settings})
    trainer.fit(module, sentences(26, shuffle=True), sentences(10))
    found: dict[str, Any] = {"logged": {name: float(value) for name, value in trainer.callback_metrics.items()}}
    assert {value.device.type for value in module.state_dict().values()} == {trainer.engine.device.type}
    found["weights"] = on_host(weights(module))
    found["validate"] = trainer.validate(module, sentences(13), verbose=False)
    found["test"] = trainer.test(module, sentences(13), verbose=False)
    predictions = trainer.predict(module, sentences(13))
    found["outputs"] = {"outputs": torch.cat([each["outputs"].cpu() for each in predictions])}
    found["words"] = torch.cat([each["words"].cpu() for each in predictions])
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_all_calls_give_what_they_give_on_the_cpu(name: str) -> None:
    there, here = (everything(accelerator, **SETTINGS[name]) for accelerator in ("gpu", "cpu"))
    assert_close(there["weights"], here["weights"], TOLERANCE)
    assert there["weights"]["seen"] == 52
    for call in ("validate", "test"):
        ((on_device,), (on_cpu,)) = there[call], here[call]
        assert on_device == pytest.approx(on_cpu, rel=TOLERANCE, abs=TOLERANCE)
        assert on_device["count"] == 13
    assert there["logged"] == pytest.approx(here["logged"], rel=TOLERANCE, abs=TOLERANCE)
    assert_close(there["outputs"], here["outputs"], TOLERANCE)
    assert torch.equal(there["words"], here["words"])


def test_modules_already_on_the_device_are_trained_there(device: torch.device) -> None:
    """An optimizer may hold the parameters of a module that its user has moved already."""
    module, plain = Classifier().to(device), Classifier()
    for each in (module, plain):
        tw.Trainer(max_epochs=1, **ON_DEVICE).fit(each, make_loader())
    assert_close(weights(module), weights(plain), 1e-6)
    tw.Trainer(max_epochs=1, **QUIET).fit(module, make_loader())  # and come back
    assert {each.device.type for each in module.parameters()} == {"cpu"}


class Players(tw.Module):
    """Two optimizers that it steps by itself."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.critic = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 1))
        self.maker = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 8))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        critic, maker = self.optimizers()
        made = self.maker(batch[0])
        with self.toggled_optimizer(critic):
            critic.zero_grad()
            self.manual_backward(
                F.softplus(-self.critic(batch[0])).mean() + F.softplus(self.critic(made.detach())).mean()
            )
            critic.step()
        with self.toggled_optimizer(maker):
            maker.zero_grad()
            self.manual_backward(F.softplus(-self.critic(made)).mean())
            self.clip_gradients(maker, 0.05)
            maker.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.critic.parameters(), 0.5), torch.optim.SGD(self.maker.parameters(), 0.5)]


def test_manual_optimization_gives_what_it_gives_on_the_cpu() -> None:
    found = []
    for settings in (ON_DEVICE, QUIET):
        module = Players()
        tw.Trainer(max_epochs=2, **settings).fit(module, make_loader())
        found.append(on_host(weights(module)))
    assert_close(*found, tolerance=TOLERANCE)


def test_devices_are_chosen_by_number(device: torch.device) -> None:
    trainer = tw.Trainer(max_epochs=1, **{**ON_DEVICE, "devices": [0]})
    assert trainer.engine.device == torch.device(device.type, 0)
    module = Classifier()
    trainer.fit(module, make_loader(8))
    assert {each.device for each in module.parameters()} == {torch.device(device.type, 0)}
    for name in ("auto", device.type):
        assert tw.Trainer(**{**ON_DEVICE, "accelerator": name}).engine.device == trainer.engine.device
    assert tw.Trainer(**QUIET).engine.device.type == "cpu"


def test_a_run_can_use_another_device_than_the_first(device: torch.device) -> None:
    count = torch.accelerator.device_count()
    if count < 2:
        pytest.skip(f"torch sees one {device.type} device here")
    module = Classifier()
    try:
        trainer = tw.Trainer(max_epochs=1, **{**ON_DEVICE, "devices": [1]})
        trainer.fit(module, make_loader(), make_loader(8))
        (metrics,) = trainer.test(module, make_loader(8), verbose=False)
    finally:
        torch.accelerator.set_device_index(0)
    assert {each.device for each in module.parameters()} == {torch.device(device.type, 1)}
    first = Classifier()
    tw.Trainer(max_epochs=1, **ON_DEVICE).fit(first, make_loader())
    assert_close(on_host(weights(module)), on_host(weights(first)), 1e-6)
    assert metrics["count"] == 8


def test_a_device_that_is_not_there_is_refused(device: torch.device) -> None:
    count = torch.accelerator.device_count()
    with pytest.raises(ValueError, match=rf"torch sees no '{device.type}' {count}; choose from 0"):
        tw.Trainer(**{**ON_DEVICE, "devices": [count]})
    more = rf"devices={count + 1} is more than the {count} of|has no process group"
    with pytest.raises(ValueError, match=more):
        tw.Trainer(**{**ON_DEVICE, "devices": count + 1})
    other = "xpu" if device.type != "xpu" else "mps"
    with pytest.raises(
        RuntimeError, match=rf"accelerator='{other}' was requested, but torch .* has '{device.type}' here"
    ):
        tw.Trainer(**{**ON_DEVICE, "accelerator": other})


def test_a_run_lets_go_of_its_memory(device: torch.device, clean_memory: None) -> None:
    """After a run whose module and trainer are gone, the device's memory is as before."""

    def run() -> None:
        module = Classifier()
        module.net.append(nn.Linear(3, 1 << 18))
        trainer = tw.Trainer(max_epochs=1, **ON_DEVICE)
        trainer.fit(Sums(module), make_loader(8))
        trainer.validate(Sums(module), make_loader(8), verbose=False)

    run()  # libraries take their workspaces
    gc.collect()
    before = torch.accelerator.memory_allocated()
    run()
    gc.collect()
    assert torch.accelerator.memory_allocated() - before < 1 << 20


class Sums(tw.Module):
    """Trains its submodule to small outputs."""

    def __init__(self, inner: Classifier) -> None:
        super().__init__()
        self.net = inner.net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def test_lbfgs_calls_its_closure_on_the_device() -> None:
    class Quasi(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    found = []
    for settings in (ON_DEVICE, QUIET):
        module = Quasi()
        tw.Trainer(max_epochs=1, **settings).fit(module, DataLoader(make_data(44), batch_size=44))
        found.append(on_host(weights(module)))
    assert_close(*found, tolerance=TOLERANCE)


def test_metric_objects_count_on_the_device() -> None:
    """The metric moves with the module."""
    classification = pytest.importorskip("torchmetrics.classification", exc_type=ImportError)

    class Metered(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = classification.MulticlassAccuracy(3, average="micro")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.accuracy(self.net(batch[0]), batch[1])
            self.log("acc", self.accuracy)

    there, here = (tw.Trainer(**each).validate(Metered(), make_loader(), verbose=False) for each in (ON_DEVICE, QUIET))
    assert there[0]["acc"] == pytest.approx(here[0]["acc"], abs=1e-6)
