"""A resume into changed settings: the checkpoint's are used and the difference is named, or `fresh` takes the script's."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jobs import run_job
from small import ON_HOST, SAVING, Classifier, assert_close, loss_of, make_loader, weights
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, OneCycleLR, SequentialLR, StepLR

import trainwright as tw

Schedule = Callable[[Optimizer], Any]


def linear(step: int, total: int) -> float:
    return max(0.0, 1 - step / total)


SCHEDULES: dict[str, Schedule] = {
    "LambdaLR": lambda each: lr_scheduler.LambdaLR(each, partial(linear, total=30)),  # as transformers does
    "MultiplicativeLR": lambda each: lr_scheduler.MultiplicativeLR(each, lambda _: 0.9),
    "StepLR": lambda each: StepLR(each, 2),
    "MultiStepLR": lambda each: lr_scheduler.MultiStepLR(each, [1, 13]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": LinearLR,
    "ExponentialLR": lambda each: ExponentialLR(each, 0.9),
    "SequentialLR": lambda each: SequentialLR(each, [LinearLR(each), CosineAnnealingLR(each, 5)], [2]),
    "CosineAnnealingLR": lambda each: CosineAnnealingLR(each, 25),
    "ChainedScheduler": lambda each: lr_scheduler.ChainedScheduler([LinearLR(each), ExponentialLR(each, 0.9)]),
    "ReduceLROnPlateau": lambda each: lr_scheduler.ReduceLROnPlateau(each, patience=0),
    "CyclicLR": lambda each: lr_scheduler.CyclicLR(each, 0.01, 0.2, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda each: lr_scheduler.CosineAnnealingWarmRestarts(each, 2),
    "OneCycleLR": lambda each: OneCycleLR(each, 0.1, total_steps=30),
    "PolynomialLR": lambda each: lr_scheduler.PolynomialLR(each, 30),
}


class Rated(Classifier):
    """Records the learning rate and the momentum of every step."""

    def __init__(self, schedule: Schedule | None = None, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__()
        self.schedule, self.options, self.rates = schedule, {"lr": lr, "weight_decay": weight_decay}, list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        [group] = self.optimizers().param_groups
        self.rates.append((group["lr"], group["momentum"], group["weight_decay"]))
        loss = loss_of(self.net, batch)
        self.log("loss", loss, on_step=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), momentum=0.9, **self.options)
        if self.schedule is None:
            return optimizer
        return [optimizer], [{"scheduler": self.schedule(optimizer), "interval": "step", "monitor": "loss"}]


def fit(folder: Path, module: Rated, epochs: int, ckpt_path: str | None = None, **options: Any) -> Rated:
    """Train, save a checkpoint after every epoch as epoch=N.ckpt, and return the module."""
    settings = {**SAVING, **options.pop("settings", {})}
    batch_size = 4 // settings.get("devices", 1)
    callback = tw.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    trainer = tw.Trainer(max_epochs=epochs, callbacks=callback, **settings)
    trainer.fit(module, make_loader(44, batch_size), ckpt_path=ckpt_path, **options)
    return module


@pytest.mark.parametrize("name", sorted(set(lr_scheduler.__all__) - {"LRScheduler"}))
def test_an_unchanged_resume_says_nothing_of_settings(name: str, tmp_path: Path) -> None:
    """Warnings are errors here."""
    whole = fit(tmp_path, Rated(SCHEDULES[name]), 2)
    resumed = fit(tmp_path, Rated(SCHEDULES[name]), 2, f"{tmp_path}/epoch=0.ckpt")
    assert whole.rates[11:] == resumed.rates


def test_a_rate_that_training_has_changed_is_no_difference(tmp_path: Path) -> None:
    class Halved(Rated):
        def on_train_epoch_end(self) -> None:
            self.optimizers().param_groups[0]["lr"] /= 2

    fit(tmp_path, Halved(), 1)
    assert fit(tmp_path, Halved(), 2, f"{tmp_path}/epoch=0.ckpt").rates[0][0] == 0.05


@pytest.mark.parametrize(("saved", "changed", "match"), [
    (Rated(lr=0.1), Rated(lr=0.01),
     "lr of group 0 of optimizer 0 is 0.1 there and 0.01 here.* fresh='optimizer_settings'"),
    (Rated(), Rated(weight_decay=0.1), "weight_decay of group 0 of optimizer 0 is 0.0 there and 0.1 here"),
    (Rated(lambda each: OneCycleLR(each, 0.1, total_steps=40)),
     Rated(lambda each: OneCycleLR(each, 0.1, total_steps=80)),
     "are used: total_steps of scheduler 0 is 40 there and 80 here.*'schedulers' to start the schedulers at step 0.$"),
    (Rated(SCHEDULES["SequentialLR"]),
     Rated(lambda each: SequentialLR(each, [LinearLR(each), CosineAnnealingLR(each, 50)], [2]), lr=0.2),
     "T_max of scheduler 2 is 5 there and 50 here; initial_lr of .* is 0.1 there and 0.2 here"),
    (Rated(SCHEDULES["MultiStepLR"]), Rated(lambda each: lr_scheduler.MultiStepLR(each, [5])),
     "milestones of scheduler 0 is"),
])  # fmt: skip
def test_a_resume_names_the_settings_that_differ(saved: Rated, changed: Rated, match: str, tmp_path: Path) -> None:
    whole = fit(tmp_path, saved, 2)
    with pytest.warns(UserWarning, match=match) as caught:
        fit(tmp_path, changed, 2, f"{tmp_path}/epoch=0.ckpt")
    assert len(caught) == 1
    assert changed.rates == whole.rates[11:]
    # The settings in effect are stored, so the next resume compares with them.
    with pytest.warns(UserWarning, match=match):
        fit(tmp_path, changed, 3, f"{tmp_path}/epoch=1-v1.ckpt")


@pytest.mark.parametrize(("other", "match"), [
    ("StepLR", "saved with CosineAnnealingLR as schedulers, and this run has StepLR.*fresh='schedulers'"),
    (None, "saved with CosineAnnealingLR as schedulers, and this run has 0.*fresh='schedulers'"),
])  # fmt: skip
def test_another_scheduler_is_rejected_unless_it_begins_at_step_zero(other: Any, match: str, tmp_path: Path) -> None:
    fit(tmp_path, Rated(SCHEDULES["CosineAnnealingLR"]), 1)
    path, schedule = f"{tmp_path}/epoch=0.ckpt", None if other is None else SCHEDULES[other]
    with pytest.raises(tw.CheckpointError, match=match):
        fit(tmp_path, Rated(schedule), 2, path)
    resumed = fit(tmp_path, Rated(schedule, lr=0.3), 2, path, fresh="schedulers")
    assert resumed.rates == fit(tmp_path, Rated(schedule, lr=0.3), 1).rates  # from the script's rate, at step 0


@pytest.mark.parametrize("name", ["LambdaLR", "StepLR", "SequentialLR", "CosineAnnealingLR", "ExponentialLR"])
def test_a_schedule_goes_on_from_the_rate_of_the_script(name: str, tmp_path: Path) -> None:
    fit(tmp_path, Rated(SCHEDULES[name]), 1)
    whole = fit(tmp_path, Rated(SCHEDULES[name], lr=0.4, weight_decay=0.1), 2)
    changed = Rated(SCHEDULES[name], lr=0.4, weight_decay=0.1)
    fit(tmp_path, changed, 2, f"{tmp_path}/epoch=0.ckpt", fresh="optimizer_settings")
    assert changed.rates == [pytest.approx(each) for each in whole.rates[11:]]


def test_fresh_rejects_other_names_and_repeated_commands(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fresh='lr' is not accepted; pass 'schedulers', 'optimizer_settings', or"):
        fit(tmp_path, Rated(), 1, fresh="lr")
    with pytest.raises(ValueError, match="would apply at each start with ckpt_path='auto'"):
        fit(tmp_path, Rated(), 1, "auto", fresh=("schedulers",))
    with pytest.raises(ValueError, match="fresh=True is not accepted"):
        tw.Accelerator(cpu=ON_HOST).load_state(str(tmp_path), fresh=True)  # type: ignore[arg-type]


def test_settings_are_compared_in_the_raw_loop(tmp_path: Path) -> None:
    fit(tmp_path, Rated(SCHEDULES["CosineAnnealingLR"]), 1)
    path = f"{tmp_path}/epoch=0.ckpt"

    def loaded(name: str, **options: Any) -> tuple[Any, Any]:
        accelerator, module = tw.Accelerator(cpu=ON_HOST), Rated(SCHEDULES[name], lr=0.2)
        [optimizer], [config] = module.configure_optimizers()
        _, optimizer, scheduler = accelerator.prepare(module, optimizer, config["scheduler"])
        accelerator.load_state(path, **options)
        accelerator.save_state(str(tmp_path / f"{name}.ckpt"), overwrite=True)
        return optimizer, scheduler

    with pytest.warns(UserWarning, match="initial_lr of group 0 of optimizer 0 is 0.1 there and 0.2 here"):
        optimizer, scheduler = loaded("CosineAnnealingLR")
    assert (optimizer.param_groups[0]["initial_lr"], scheduler.last_epoch) == (0.1, 11)
    with pytest.raises(tw.CheckpointError, match="saved with CosineAnnealingLR as schedulers, and this run has StepLR"):
        loaded("StepLR")
    optimizer, scheduler = loaded("StepLR", fresh=("schedulers", "optimizer_settings"))
    assert (optimizer.param_groups[0]["lr"], scheduler.last_epoch) == (0.2, 0)
    assert optimizer.state_dict()["state"], "the momentum is the checkpoint's"
    # The saved settings are the script's then, so the same loop resumes without a word.
    path = str(tmp_path / "StepLR.ckpt")
    loaded("StepLR")


def test_a_resume_names_the_callback_states_that_nobody_loads(tmp_path: Path) -> None:
    def run(epochs: int, *callbacks: tw.Callback, path: str | None = None) -> None:
        trainer = tw.Trainer(max_epochs=epochs, callbacks=list(callbacks), **SAVING)
        trainer.fit(Rated(), make_loader(), ckpt_path=path)

    run(1, tw.ModelCheckpoint(tmp_path, "{epoch}"), tw.EarlyStopping("loss"))
    with pytest.warns(
        UserWarning,
        match=r"states that no callback loads, so this run continues without them: EarlyStopping\(monitor=loss, mode=min\)",
    ):
        run(2, tw.ModelCheckpoint(tmp_path, "{step}"), path=f"{tmp_path}/epoch=0.ckpt")


def resumed_fits(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Resume three times: as saved, with the script's rate, and with its scheduler. Return the trained modules."""
    is_first = os.environ.get("RANK", "0") == "0"
    fit(folder, Rated(SCHEDULES["ExponentialLR"]), 1, settings=settings)
    found: dict[str, Any] = {}
    for fresh in ((), ("optimizer_settings",), ("schedulers", "optimizer_settings")):
        module = Rated(SCHEDULES["ExponentialLR"], lr=0.02, weight_decay=0.1)
        with pytest.warns(UserWarning, match="0.1 there and 0.02 here") if is_first and not fresh else nullcontext():
            fit(folder / str(len(fresh)), module, 2, f"{folder}/epoch=0.ckpt", fresh=fresh, settings=settings)
        found[str(fresh)] = {"rates": [each[::2] for each in module.rates]}
        if settings["strategy"] != "fsdp":
            found[str(fresh)]["weights"] = weights(module)
    return found


def resumed_job(folder: Path) -> dict[str, Any]:
    return resumed_fits(folder, {"strategy": folder.name, "devices": 2})


@pytest.mark.parametrize(
    "strategy",
    ["ddp", "ddp_sharded", "fsdp", *(pytest.param(f"deepspeed_stage_{n}", marks=pytest.mark.slow) for n in (2, 3))],
)
def test_strategies_resume_with_settings_as_one_process(strategy: str, tmp_path: Path) -> None:
    alone = resumed_fits(tmp_path / "alone", {"strategy": "single_device"})
    for rank in run_job(resumed_job, 2, tmp_path / strategy):
        for fresh, expected in alone.items():
            assert rank[fresh]["rates"] == [pytest.approx(each) for each in expected["rates"]]
            if "weights" in rank[fresh]:
                assert_close(rank[fresh]["weights"], expected["weights"], 1e-5)
