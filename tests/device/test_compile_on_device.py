"""Compiled runs on an accelerator equal eager ones, also with CUDA graphs, whose replays overwrite their memory."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from by_hand import DTYPES, ON_DEVICE, on_host
from small import assert_close, make_loader, weights
from torch import Tensor, nn
from torch.nn import functional as F

import trainwright as tw
from trainwright.devices.abilities import autocasts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _fresh_graphs() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def inductor(cuda: torch.device) -> None:
    """The requirement of torch.compile's default backend."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed, which torch.compile needs on CUDA")
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler is here, which triton needs")


class Net(nn.Module):
    """Computes its loss, so that the logged value comes out of the graph. `seen` counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 3))

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.layers(inputs)
        return outputs, F.cross_entropy(outputs.float(), targets)


class Compiles(tw.Module):
    """Logs losses of graphs and keeps a step's result until its batch is over."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.net = Net()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        outputs, loss = self.net(*batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("worst", loss.detach(), on_step=False, on_epoch=True, reduce_fx="max")
        return {"loss": loss, "outputs": outputs.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("mean", outputs["outputs"].float().mean(), on_step=False, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        outputs, loss = self.net(*batch)
        self.log("val_loss", loss)
        self.log("val_acc", (outputs.argmax(1) == batch[1]).float().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs: Tensor = self.net(*batch)[0]
        return outputs

    def configure_optimizers(self) -> Any:
        # At a higher rate the losses rise, and with them the differences in the last digits.
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def run(compile: Any, **settings: Any) -> dict[str, Any]:
    module = Compiles()
    trainer = tw.Trainer(max_epochs=3, compile=compile, log_every_n_steps=2, **{**ON_DEVICE, **settings})
    trainer.fit(module, make_loader(), make_loader(8))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    (validated,) = trainer.validate(module, make_loader(12), verbose=False)
    predictions = torch.cat([each.cpu() for each in trainer.predict(module, make_loader(20))])
    return {"weights": on_host(weights(module)), "numbers": {**logged, **validated}, "predictions": predictions}


def compare(compile: Any, tolerance: float, **settings: Any) -> None:
    eager, compiled = run(False, **settings), run(compile, **settings)
    assert_close(compiled["weights"], eager["weights"], tolerance)
    assert compiled["numbers"] == pytest.approx(eager["numbers"], rel=tolerance, abs=tolerance)
    torch.testing.assert_close(
        compiled["predictions"].float(), eager["predictions"].float(), rtol=tolerance, atol=tolerance
    )


def test_traced_graphs_give_what_eager_steps_give() -> None:
    compare({"backend": "aot_eager"}, 1e-5, accumulate_grad_batches=2, gradient_clip_val=0.5)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_traced_graphs_are_right_under_autocast(device: torch.device, precision: str) -> None:
    if not autocasts(device.type, DTYPES[precision]):
        pytest.skip(f"{device.type} has no autocast in {DTYPES[precision]}")
    compare({"backend": "aot_eager"}, 1e-2, precision=precision)


@pytest.mark.usefixtures("inductor")
@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-4), ("bf16-mixed", 3e-2), ("16-mixed", 1e-2)])
def test_a_compiled_run_gives_eager_losses(precision: str, tolerance: float) -> None:
    compare(True, tolerance, precision=precision)


@pytest.mark.usefixtures("inductor")
@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [({}, 1e-4), ({"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}, 1e-4), ({"precision": "bf16-mixed"}, 3e-2)],
    ids=["plain", "accumulation", "bf16-mixed"],
)
def test_a_run_of_cuda_graphs_gives_eager_losses(settings: dict[str, Any], tolerance: float) -> None:
    compare({"mode": "reduce-overhead"}, tolerance, **settings)


@pytest.mark.usefixtures("inductor")
def test_cuda_graphs_do_not_overwrite_kept_outputs() -> None:
    """Later graphs do not change predictions and step values that a logger writes later."""

    class Keeps(Compiles):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[float] = []

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(outputs, batch, batch_idx)
            self.kept.append(float(outputs["loss"]))

    kept = []
    for compile in (False, {"mode": "reduce-overhead"}):
        module = Keeps()
        tw.Trainer(max_epochs=2, compile=compile, **ON_DEVICE).fit(module, make_loader())
        kept.append(module.kept)
    assert kept[1] == pytest.approx(kept[0], rel=1e-4)
