"""Modules with lazy layers: saved once these have run, resumed bitwise before they run again, and refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small import ON_HOST, QUIET, assert_equal, loss_of, make_loader, weights
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import trainwright as tw

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")


def lazy_net(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Unflatten(1, (2, 4)),
        nn.LazyConv1d(6, 2),
        nn.Flatten(),
        nn.LazyLinear(5),
        nn.LazyBatchNorm1d(),
        nn.Dropout(0.3),
        nn.LazyLinear(outputs),
    )


class Lazy(tw.Module):
    def __init__(self, outputs: int = 3, kind: str = "sgd", unused: bool = False) -> None:
        super().__init__()
        self.net, self.kind = lazy_net(outputs), kind
        if unused:
            self.unused = nn.LazyLinear(2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self.net, batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.net, batch))

    def configure_optimizers(self) -> Any:
        if self.kind == "adam":
            return torch.optim.Adam(self.parameters(), lr=0.05)
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def fit(module: Lazy, steps: int, **kwargs: Any) -> tw.Trainer:
    trainer = tw.Trainer(max_steps=steps, **QUIET)
    trainer.fit(module, make_loader(shuffle=True), **kwargs)
    return trainer


def state_of(trainer: tw.Trainer) -> dict[str, Tensor]:
    states = (trainer.optimizers[0].state[each] for each in trainer.optimizers[0].param_groups[0]["params"])
    return {
        f"{number}.{key}": value
        for number, state in enumerate(states)
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("lazy") / "a.ckpt")
    torch.manual_seed(1)
    fit(Lazy(), 4).save_checkpoint(path)
    return path


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_run_goes_on_as_if_it_had_not_been_stopped(kind: str, tmp_path: Path) -> None:
    """Also bitwise: whether its optimizer is fused does not change where the run is taken up, in an epoch or between two."""
    torch.manual_seed(1)
    whole = Lazy(kind=kind)
    expected = state_of(fit(whole, 30))
    torch.manual_seed(1)
    path = None
    for steps in (4, 11, 17, 30):
        part = Lazy(kind=kind)
        trainer = fit(part, steps, ckpt_path=path)
        path = str(tmp_path / f"{steps}.ckpt")
        trainer.save_checkpoint(path)
        torch.manual_seed(99)  # of another process
    assert_equal(weights(whole), weights(part))
    assert_equal(expected, state_of(trainer))
    assert len(expected) >= len(list(whole.parameters()))


def test_evaluations_and_raw_loops_load_lazy_weights(saved: str) -> None:
    module, trainer = Lazy(), tw.Trainer(**QUIET)
    trainer.validate(module, make_loader(8), ckpt_path=saved)
    accelerator = tw.Accelerator(cpu=ON_HOST)
    own: Any = Lazy()
    own, _ = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.05, momentum=0.9))
    accelerator.load_state(saved)
    assert_equal(weights(module), weights(own))
    assert_equal(weights(module), weights(Lazy.load_from_checkpoint(saved)))


def test_a_layer_that_has_not_run_is_not_saved(tmp_path: Path) -> None:
    accelerator = tw.Accelerator(cpu=ON_HOST)
    accelerator.prepare(nn.LazyLinear(3))
    text = (
        "checkpoint .* was not written: 'weight' is an uninitialised lazy tensor, .* stores tensors with a shape. "
        "Save after a forward that reaches the layer"
    )
    with pytest.raises(tw.CheckpointError, match=text):
        accelerator.save_state(str(tmp_path / "a.ckpt"))
    trainer = fit(Lazy(unused=True), 2)
    with pytest.raises(tw.CheckpointError, match=r"'unused\.weight' is an uninitialised"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_lacks_a_lazy_layer_is_rejected(saved: str) -> None:
    with pytest.raises(tw.CheckpointError, match=r"(?s)Lazy cannot load it: .*Missing key.*unused"):
        tw.Trainer(**QUIET).validate(Lazy(unused=True), make_loader(8), ckpt_path=saved)
    module = Lazy(unused=True)
    module.strict_loading = False
    tw.Trainer(**QUIET).validate(module, make_loader(8), ckpt_path=saved)
    assert [name for name, each in module.named_parameters() if is_lazy(each)] == ["unused.weight", "unused.bias"]
