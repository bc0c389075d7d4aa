"""A tensor has one name, its key in the state_dict, in averages, checks, resumes and callbacks, whatever wraps its module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET, assert_close, assert_equal, weights
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from trainwright.callbacks.model_summary import LayerSummary
from trainwright.gradient_norms import grad_norm
from trainwright.tensor_names import names_of

FORMS = ["plain", "wrapped"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.lin(x)))


class Net(tw.Module):
    def __init__(self, form: str = "plain", bad_step: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.bad_step = form, bad_step
        blocks = [Block() for _ in range(2)]
        self.backbone = nn.Sequential(*(checkpoint_wrapper(block) if form == "wrapped" else block for block in blocks))
        self.head = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = (self.head(self.backbone(batch[0])) - 1).square().mean()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.global_step == self.bad_step:
            next(p for n, p in self.named_parameters() if "lin.weight" in n).grad.fill_(torch.nan)  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def trained(net: nn.Module) -> dict[str, Tensor]:
    """Return the weights. Recomputed batch norms count every batch twice in their statistics, as in plain torch."""
    return {name: value for name, value in weights(net).items() if "running" not in name and "num_batches" not in name}


def loader(batch_size: int = 2) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(1))), batch_size)


def fit(net: Net, epochs: int, *callbacks: Any, ckpt_path: Any = None, **options: Any) -> tw.Trainer:
    trainer = tw.Trainer(max_epochs=epochs, callbacks=list(callbacks), **{**QUIET, "devices": 1, **options})
    trainer.fit(net, loader(), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("form", FORMS)
def test_names_are_the_keys_of_the_state_dict(form: str) -> None:
    net = Net(form)
    names = names_of(net)
    assert set(names.values()) == set(Net().state_dict())
    assert names[net.head.weight] == "head.weight"
    assert {names[p] for p in net.parameters()} == {name for name, _ in Net().named_parameters()}


def test_averages_of_wrapped_blocks_are_the_plain_blocks() -> None:
    for make in (
        lambda: tw.EMAWeightAveraging(decay=0.5),
        lambda: tw.StochasticWeightAveraging(0.1, swa_epoch_start=1),
    ):
        plain, wrapped = Net(), Net("wrapped")
        for net in (plain, wrapped):
            fit(net, 3, make())
        assert_equal(trained(wrapped), trained(plain))


@pytest.mark.parametrize("form", FORMS)
def test_a_nan_in_a_wrapped_block_keeps_the_earlier_checkpoint(form: str, tmp_path: Path) -> None:
    saver = tw.ModelCheckpoint(tmp_path)
    with pytest.warns(UserWarning, match=r"NaN or infinity in 'backbone\.0\.lin\.weight'"):
        fit(Net(form, bad_step=15), 2, saver, enable_checkpointing=True)
    stored = torch.nn.Module.state_dict(Net.load_from_checkpoint(saver.best_model_path, form=form))
    assert all(value.isfinite().all() for value in stored.values())


@pytest.mark.parametrize(("before", "after"), [("plain", "wrapped"), ("wrapped", "plain")])
def test_a_resume_with_other_wrappers_is_exact(before: str, after: str, tmp_path: Path) -> None:
    whole, again = Net(before), Net(after)
    first = fit(Net(before), 2, tw.EMAWeightAveraging(decay=0.5))
    first.save_checkpoint(tmp_path / "half")
    fit(whole, 4, tw.EMAWeightAveraging(decay=0.5))
    fit(again, 4, tw.EMAWeightAveraging(decay=0.5), ckpt_path=tmp_path / "half")
    assert_equal(trained(again), trained(whole))


def test_wrapped_layers_have_plain_names_in_reports() -> None:
    net = Net("wrapped")
    net.training_step([torch.ones(2, 4)], 0).backward()
    assert "grad_2.0_norm/backbone.0.lin.weight" in grad_norm(net, 2)
    assert "backbone.0.lin  " in str(LayerSummary(net, -1))
    assert "_checkpoint_wrapped_module" not in str(LayerSummary(net, -1))


def switched(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, strategy in enumerate(("ddp", "fsdp")):
        chosen: Any = tw.FSDPStrategy(auto_wrap_policy={Block}) if strategy == "fsdp" else strategy
        for form, other in (("plain", "wrapped"), ("wrapped", "plain")):
            place = folder / f"{number}-{form}"
            options = {"strategy": chosen, "devices": 2}
            fit(Net(form), 2, tw.EMAWeightAveraging(decay=0.5), **options).save_checkpoint(place)
            for name, net in (("whole", Net(form)), ("again", Net(other))):
                fit(net, 4, tw.EMAWeightAveraging(decay=0.5), ckpt_path=None if name == "whole" else place, **options)
                found[f"{strategy} {form} {name}"] = trained(tw.gather_module(net, all_ranks=True))  # type: ignore[arg-type]
    return found


def test_wrappers_change_nothing_on_two_ranks(tmp_path: Path) -> None:
    for rank in run_job(switched, 2, tmp_path):
        for strategy in ("ddp", "fsdp"):
            for form in ("plain", "wrapped"):
                assert_equal(rank[f"{strategy} {form} again"], rank[f"{strategy} {form} whole"])
            assert_close(rank[f"{strategy} wrapped whole"], rank[f"{strategy} plain whole"])
