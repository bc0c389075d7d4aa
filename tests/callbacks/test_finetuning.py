"""BaseFinetuning and BackboneFinetuning: which layers train when, and a resumed run equals the uninterrupted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET, SAVING, Classifier, make_data, make_loader
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR
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


def test_finetuning_trains_the_unfrozen_layers() -> None:
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


def test_finetuning_rejects_wrong_modules_and_strategies() -> None:
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
def test_resumed_finetuning_is_bitwise_equal_on_two_ranks(tmp_path: Path) -> None:
    first, second = run_job(two_ranks, 2, tmp_path)
    for name in ("ddp", "fsdp"):
        assert all(torch.equal(value, first[f"{name} resumed"][key]) for key, value in first[name].items()), name
    for key in first["ddp"]:
        if "running" not in key and "num_batches" not in key:
            assert torch.equal(first["ddp"][key], second["ddp"][key]), key
    for name in ("ddp_sharded", "deepspeed"):
        assert f"which strategy '{name}" in first[name]
        assert first[name] == second[name]


def scheduled(make: Any) -> Any:
    """Return a module whose optimizer has a scheduler."""

    class Scheduled(Pretrained):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()[0][0]
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), "monitor": "loss"}}

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_epoch=True)
            return loss

    torch.manual_seed(0)
    return Scheduled()


class Adds(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.01)


@pytest.mark.parametrize(("make", "rates"), [
    (lambda each: schedulers.LambdaLR(each, lambda epoch: 0.5**epoch), [(0.0125, 6), (0.00125, 4)]),
    (lambda each: schedulers.MultiplicativeLR(each, lambda epoch: 0.5), [(0.0125, 6), (0.0025, 4)]),
    (lambda each: schedulers.StepLR(each, 1, 0.5), [(0.0125, 6), (0.0025, 4)]),
    (
        lambda each: schedulers.SequentialLR(
            each, [schedulers.ConstantLR(each, 1.0), schedulers.LambdaLR(each, lambda epoch: 0.5**epoch)], [2]
        ),
        [(0.05, 6), (0.005, 4)],
    ),
    (lambda each: schedulers.ChainedScheduler([schedulers.MultiplicativeLR(each, lambda epoch: 0.5)], each),
     [(0.0125, 6), (0.0025, 4)]),
], ids=["lambda", "multiplicative", "step", "sequential", "chained"])  # fmt: skip
def test_schedulers_set_the_rates_of_new_groups(tmp_path: Path, make: Any, rates: Any) -> None:
    def run(ckpt_path: str | None = None) -> tw.Trainer:
        saving = tw.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
        settings: dict[str, Any] = {**SAVING, "max_epochs": 3}
        trainer = tw.Trainer(**settings, callbacks=[Adds(), saving])
        trainer.fit(scheduled(make), DataLoader(make_data(8), 4), ckpt_path=ckpt_path)
        return trainer

    assert groups(run()) == [(round(rate, 6), count) for rate, count in rates]
    assert groups(run(f"{tmp_path}/epoch=1.ckpt")) == [(round(rate, 6), count) for rate, count in rates]


@pytest.mark.parametrize(("make", "name"), [
    (lambda each: schedulers.OneCycleLR(each, 0.1, total_steps=9), "OneCycleLR"),
    (lambda each: SWALR(each, 0.01), "SWALR"),
    (
        lambda each: schedulers.SequentialLR(
            each, [schedulers.ConstantLR(each), schedulers.CyclicLR(each, 0.01, 0.1, cycle_momentum=False)], [2]
        ),
        "CyclicLR",
    ),
])  # fmt: skip
def test_schedulers_with_plans_for_each_group_are_refused(make: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"Adds adds parameter groups during training, and {name} has settings"):
        tw.Trainer(**QUIET, max_epochs=1, callbacks=Adds()).fit(scheduled(make), make_loader())


def fit_backbone(module: Any, *callbacks: tw.Callback, epochs: int = 4) -> list[Any]:
    trainer = tw.Trainer(**QUIET, max_epochs=epochs, callbacks=list(callbacks))
    trainer.fit(module, DataLoader(make_data(8), 4))
    return [[round(group["lr"], 6) for group in each.param_groups] for each in trainer.optimizers]


def test_only_added_groups_get_the_backbones_rate() -> None:
    class All(Pretrained):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([{"params": self.backbone.parameters()}, {"params": self.net.parameters()}], lr=0.1)

    with pytest.warns(UserWarning, match="4 of the 4 parameters to unfreeze are in the optimizer already"):
        assert fit_backbone(All(), BackboneFinetuning(1)) == [[0.1, 0.1]]

    class AddsMore(Adds):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.extra)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.extra, optimizer, lr=0.5)

    module = Pretrained()
    module.extra = nn.Linear(2, 2)
    rates = fit_backbone(module, BackboneFinetuning(1, backbone_initial_lr=0.01, should_align=False), AddsMore())
    assert rates == [[0.1, 0.04, 0.5]]


def test_the_backbones_first_rate_is_aligned() -> None:
    assert fit_backbone(Pretrained(), BackboneFinetuning(1, backbone_initial_lr=1.0), epochs=2) == [[0.1, 0.1]]
    free = BackboneFinetuning(1, backbone_initial_lr=1.0, should_align=False)
    assert fit_backbone(Pretrained(), free, epochs=2) == [[0.1, 1.0]]


def test_batch_norms_stay_frozen() -> None:
    module = Pretrained()
    fit_backbone(module, BackboneFinetuning(1, train_bn=False), epochs=2)
    assert not any(each.requires_grad for each in module.backbone[1].parameters())
    assert module.backbone[0].weight.requires_grad
