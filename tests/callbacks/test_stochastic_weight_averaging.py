"""StochasticWeightAveraging on one process: its rates, its average, batch norm's statistics, and exact resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import small
import torch
from small import QUIET, Classifier, assert_close, assert_equal, loss_of, make_loader, weights
from torch import Tensor
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

import trainwright as tw
from trainwright.checkpoint.reader import open_checkpoint

EPOCHS, START = 6, 3


class Normed(Classifier):
    """Its batch norm is behind a layer that trains. A batch norm of a frozen part keeps its statistics."""

    def __init__(self, decays: bool = False) -> None:
        super().__init__()
        self.decays, self.rates = decays, list[float]()
        self.net.insert(1, torch.nn.BatchNorm1d(13))
        self.frozen = torch.nn.BatchNorm1d(8).requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.frozen.eval()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 0 and torch.is_grad_enabled():
            self.rates += [group["lr"] for group in self.trainer.optimizers[0].param_groups]
        self.frozen(batch[0])
        loss = loss_of(self.net, batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return ([optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]) if self.decays else optimizer


def swa(**options: Any) -> tw.StochasticWeightAveraging:
    return tw.StochasticWeightAveraging(**{"swa_lrs": 0.02, "swa_epoch_start": START, "annealing_epochs": 3, **options})


def fit(average: tw.Callback, *others: tw.Callback, decays: bool = False, **options: Any) -> tuple[tw.Trainer, Normed]:
    path, module = options.pop("ckpt_path", None), options.pop("module", None) or Normed(decays)
    settings = {**QUIET, "max_epochs": EPOCHS, "callbacks": [average, *others], **options}
    trainer = tw.Trainer(**settings)
    torch.manual_seed(0)
    trainer.fit(module, make_loader(16, shuffle=True), make_loader(8), ckpt_path=path)
    return trainer, module


def test_stochastic_average_equals_torchs() -> None:
    """A loop by hand, with torch's AveragedModel, SWALR and update_bn."""
    module = Normed()
    optimizer = torch.optim.SGD(module.net.parameters(), lr=0.1, momentum=0.9)
    averaged, annealing, rates = AveragedModel(module.net), None, []
    loader = make_loader()
    for epoch in range(EPOCHS):
        if epoch >= START - 1:
            averaged.update_parameters(module.net)
            annealing = annealing or SWALR(optimizer, 0.02, 3, "linear")
        rates.append(optimizer.param_groups[0]["lr"])
        for batch in loader:
            optimizer.zero_grad()
            loss_of(module.net, batch).backward()
            optimizer.step()
        if annealing is not None:
            annealing.step()
    update_bn(loader, averaged)
    found = Normed()
    trainer = tw.Trainer(
        max_epochs=EPOCHS, callbacks=[swa(annealing_strategy="linear")], fused_optimizers=False, **QUIET
    )
    trainer.fit(found, make_loader(), make_loader(20))
    assert_close(weights(found.net), weights(averaged.module))
    assert found.rates == pytest.approx(rates)
    assert torch.equal(found.frozen.running_mean, torch.zeros_like(found.frozen.running_mean))  # type: ignore[arg-type]
    assert isinstance(trainer.lr_scheduler_configs[0].scheduler, SWALR)
    # The pass over the data has logged nothing, and changed neither the counters nor the mode of the layers.
    assert trainer.global_step == 11 * EPOCHS
    assert found.net[1].momentum == 0.1


@pytest.mark.parametrize("decays", [False, True])
def test_when_it_begins(decays: bool) -> None:
    for start, epoch in ((START, START - 1), (0.5, 2), (1, 0), (0.0, 0), (1.0, EPOCHS - 1)):
        average = swa(swa_epoch_start=start, annealing_epochs=0)
        _, module = fit(average, decays=decays)
        assert average.n_averaged == EPOCHS - epoch
        own = [0.1 * 0.9**each if decays else 0.1 for each in range(epoch)]
        assert module.rates == pytest.approx([*own, *[0.02] * (EPOCHS - epoch)])


@pytest.mark.parametrize(("step", "decays"), [(8, True), (14, False), (14, True), (24, True)])
def test_resumed_run_has_the_same_stochastic_average(tmp_path: Path, decays: bool, step: int) -> None:
    saving = tw.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=step, save_top_k=-1)
    _, whole = fit(swa(), saving, decays=decays, enable_checkpointing=True)
    path = tmp_path / f"step={step}.ckpt"
    trainer, resumed = fit(swa(), decays=decays, ckpt_path=path)
    assert_equal(weights(resumed), weights(whole))
    assert open_checkpoint(str(path)).sections == ["average", "model", "optimizer"][step < 9 :]
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    assert_equal(weights(Normed.load_from_checkpoint(tmp_path / "end.ckpt")), weights(whole))
    # A longer run continues from the trained weights, with the statistics of the training.
    _, longer = fit(swa(), decays=decays, ckpt_path=tmp_path / "end.ckpt", max_epochs=EPOCHS + 1)
    _, wanted = fit(swa(), decays=decays, max_epochs=EPOCHS + 1)
    assert_equal(weights(longer), weights(wanted))


class Failing(Normed):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not torch.is_grad_enabled() and batch_idx == 2:
            raise RuntimeError("no more")
        return super().training_step(batch, batch_idx)


def test_failed_pass_keeps_the_module_as_it_was() -> None:
    latest: dict[str, Tensor] = {}
    keeps = tw.LambdaCallback(on_train_batch_end=lambda trainer, module, *_: latest.update(weights(module)))
    module = Failing()
    with pytest.raises(RuntimeError, match="no more"):
        fit(swa(), keeps, module=module)
    assert_equal(weights(module), latest)


def test_stochastic_averaging_works_in_other_runs() -> None:
    average = swa(swa_epoch_start=1)
    fit(average, max_epochs=-1, max_steps=9)
    assert average.n_averaged == 3
    fit(average, max_epochs=1, limit_train_batches=3)
    _, module = fit(average, fast_dev_run=2)
    assert int(module.net[1].num_batches_tracked) == 2
    with pytest.warns(
        UserWarning, match="averaged nothing: it begins after 1 epochs, and the run had 1; pass a smaller"
    ):
        _, module = fit(swa(swa_epoch_start=2), max_epochs=1)
    assert int(module.net[1].num_batches_tracked) == 4
    module = Normed()
    module.unused = torch.nn.BatchNorm1d(2)
    small.fit(module, list(make_loader()), callbacks=[average])
    assert int(module.net[1].num_batches_tracked) == 11
    assert torch.equal(weights(module)["unused.running_var"], torch.ones(2))


class Manual(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def test_stochastic_averaging_rejects_wrong_settings() -> None:
    for wrong in (0, -0.1, "0.1", [], [0.1, 0.0], True, float("inf")):
        with pytest.raises(ValueError, match="pass a rate above 0"):
            swa(swa_lrs=wrong)
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match=r"swa_epoch_start=.* pass the number of an epoch"):
            swa(swa_epoch_start=wrong)
    with pytest.raises(ValueError, match="annealing_epochs=-1"):
        swa(annealing_epochs=-1)
    with pytest.raises(ValueError, match="choose from cos, linear"):
        swa(annealing_strategy="log")
    with pytest.raises(TypeError, match="avg_fn='mean' cannot be called"):
        swa(avg_fn="mean")
    with pytest.raises(ValueError, match="the optimizer has 1 parameter groups"):
        fit(swa(swa_lrs=[0.1, 0.2]))
    with pytest.raises(ValueError, match="max_epochs sets no limit"):
        fit(swa(swa_epoch_start=0.5), max_epochs=-1, max_steps=4)
    with pytest.raises(ValueError, match="automatic_optimization = False"):
        fit(swa(), module=Manual())


def test_start_may_be_a_fraction_of_the_epochs() -> None:
    average = tw.StochasticWeightAveraging(0.01, swa_epoch_start=0.29)  # 100 * 0.29 is 28.999999999999996
    with pytest.warns(UserWarning, match="it begins after 28 epochs, and the run had"):
        fit(average, max_epochs=100, max_steps=1)
