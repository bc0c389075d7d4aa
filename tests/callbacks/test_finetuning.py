"""BaseFinetuning and BackboneFinetuning: what trains when, and that a resumed run ends as the uninterrupted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET, Classifier, make_data, make_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader

import trainwright as tw
from trainwright.callbacks import BackboneFinetuning, BaseFinetuning


class Pretrained(Classifier):
    """Its backbone has a batch norm."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        torch.manual_seed(5)
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Sequential(nn.Linear(8, 8)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        trained = [each for each in self.parameters() if each.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)][:0]


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone[2], optimizer)
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.backbone[:2], optimizer, lr=0.01, train_bn=False)


def fit(make: Any, folder: Path | None = None, ckpt_path: str | None = None, **settings: Any) -> tuple[tw.Trainer, Any]:
    torch.manual_seed(0)
    module = Pretrained()
    callbacks = [make()]
    if folder is not None:
        callbacks.append(tw.ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1))
    settings = {
        **QUIET,
        "enable_checkpointing": folder is not None,
        "max_epochs": 4,
        "callbacks": callbacks,
        **settings,
    }
    trainer = tw.Trainer(**settings)
    trainer.fit(module, DataLoader(make_data(28), 4, shuffle=True), ckpt_path=ckpt_path)  # 7 batches
    return trainer, module


def groups(trainer: tw.Trainer) -> list[tuple[float, int]]:
    return [(round(group["lr"], 6), len(group["params"])) for group in trainer.optimizers[0].param_groups]


def test_what_trains() -> None:
    frozen = Pretrained().backbone.state_dict()
    trainer, module = fit(Unfreezes, max_epochs=1)
    assert groups(trainer) == [(0.1, 4)]
    assert all(torch.equal(value, frozen[name]) for name, value in module.backbone.state_dict().items())
    trainer, module = fit(Unfreezes, max_epochs=3)
    assert groups(trainer) == [(0.1, 4), (0.01, 2), (0.01, 2)]
    assert not torch.equal(module.backbone[0].weight, frozen["0.weight"])
    assert torch.equal(module.backbone[1].weight, frozen["1.weight"])
    assert module.backbone[1].track_running_stats


def test_a_backbone_catches_up() -> None:
    def make() -> BackboneFinetuning:
        return BackboneFinetuning(1, lambda epoch: 3.0, backbone_initial_ratio_lr=0.1)

    assert groups(fit(make, max_epochs=1)[0]) == [(0.1, 6)]  # the batch norm trains from the beginning
    assert groups(fit(make, max_epochs=2)[0]) == [(0.1, 6), (0.01, 4)]
    assert groups(fit(make, max_epochs=3)[0]) == [(0.1, 6), (0.03, 4)]
    assert groups(fit(make, max_epochs=5)[0]) == [(0.1, 6), (0.1, 4)]


@pytest.mark.parametrize("make", [Unfreezes, lambda: BackboneFinetuning(1)])
def test_a_resumed_run_ends_the_same(tmp_path: Path, make: Any) -> None:
    trainer, whole = fit(make, tmp_path)
    for step in (3, 6, 9, 15, 24):  # before, at and after the unfreezing, within an epoch
        again, module = fit(make, ckpt_path=f"{tmp_path}/step={step}.ckpt")
        assert groups(again) == groups(trainer), step
        assert all(torch.equal(value, module.state_dict()[name]) for name, value in whole.state_dict().items()), step


def test_what_is_refused() -> None:
    class Adds(BaseFinetuning):
        pass

    with pytest.raises(TypeError, match=r"Classifier has no module of that name; assign .* to self\.backbone"):
        tw.Trainer(**QUIET, max_epochs=1, callbacks=BackboneFinetuning()).fit(Classifier(), make_loader())
    with pytest.raises(NotImplementedError, match="Override freeze_before_training"):
        tw.Trainer(**QUIET, max_epochs=1, callbacks=Adds()).fit(Classifier(), make_loader())
    net = nn.Linear(2, 2).requires_grad_(False)
    with pytest.warns(UserWarning, match="2 of the 2 parameters to unfreeze are in the optimizer already"):
        BaseFinetuning.unfreeze_and_add_param_group(net, torch.optim.SGD(net.parameters(), 0.1))


def two_ranks(folder: Path) -> Any:
    found: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp"):
        _, module = fit(Unfreezes, folder / strategy, devices="auto", strategy=strategy, use_distributed_sampler=True)
        found[strategy] = {name: _whole(value) for name, value in module.state_dict().items()}
        path = f"{folder}/{strategy}/step=6.ckpt"  # 4 steps an epoch
        _, module = fit(Unfreezes, None, path, devices="auto", strategy=strategy)
        found[f"{strategy} resumed"] = {name: _whole(value) for name, value in module.state_dict().items()}
    for strategy in ("ddp_sharded", "deepspeed"):
        try:
            fit(Unfreezes, None, devices="auto", strategy=strategy)
        except ValueError as error:
            found[strategy] = str(error)
    return found


def _whole(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    first, second = run_job(two_ranks, 2, tmp_path)
    for name in ("ddp", "fsdp"):
        assert all(torch.equal(value, first[f"{name} resumed"][key]) for key, value in first[name].items()), name
    for key in first["ddp"]:
        if "running" not in key and "num_batches" not in key:
            assert torch.equal(first["ddp"][key], second["ddp"][key]), key
    for name in ("ddp_sharded", "deepspeed"):
        assert f"which strategy '{name}" in first[name]
        assert first[name] == second[name]
