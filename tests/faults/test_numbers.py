"""Values that are not finite: the warning without a policy, and the effects of policies."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_rows import record_row
from jobs import run_job
from safetensors.torch import load_file
from small import QUIET, Classifier, assert_equal, fit, loss_of, make_data, make_net, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw

pytestmark = pytest.mark.faults

SKIPPING = ("skip", "rollback")
FAST = (
    ("skip", "ddp", 1), ("skip", "ddp", 2), ("rollback", "ddp", 1), ("skip", "ddp_sharded", 1), ("skip", "fsdp", 2),
    ("rollback", "fsdp", 1),
)  # fmt: skip
SLOW = (
    ("skip", "deepspeed_stage_1", 1),
    ("skip", "deepspeed_stage_2", 2),
    ("skip", "deepspeed_stage_3", 1),
    ("rollback", "deepspeed_stage_3", 1),
)


class Normed(Classifier):
    """Has dropout and batch norm, and keeps its losses."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.net.insert(1, nn.BatchNorm1d(13))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = loss_of(self.net, batch)
        self.losses.append(loss.item())
        return loss


def loader_without(dropped: tuple[int, ...], bad: int | None, num_batches: int = 16) -> DataLoader[Any]:
    """Return batches of 4 samples without some of them, and with a NaN in one."""
    inputs, targets = make_data(4 * num_batches).tensors
    inputs = inputs.clone()
    if bad is not None:
        inputs[4 * bad, 0] = math.nan
    chosen = [4 * batch + row for batch in range(num_batches) if batch not in dropped for row in range(4)]
    return DataLoader(TensorDataset(inputs[chosen], targets[chosen]), batch_size=4)


def losses_of(strategy: str, accumulate: int, loader: Any, **settings: Any) -> tuple[list[float], list[str]]:
    torch.manual_seed(5)
    module = Normed()
    options = {"devices": 2, "strategy": strategy, "max_epochs": 1, "accumulate_grad_batches": accumulate}
    trainer = tw.Trainer(**{**QUIET, **options, **settings})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader)
    return module.losses, [str(each.message) for each in caught if "not finite" in str(each.message)]


def compared(folder: Path, cases: tuple[tuple[str, str, int], ...] = FAST) -> list[Any]:
    """Train with a NaN in the fourth batch of rank 1, and without the batches that the policy drops."""
    results = []
    for policy, strategy, accumulate in cases:
        place = folder / f"{policy}-{strategy}-{accumulate}"
        dropped = range(6, 8) if (policy, accumulate) == ("skip", 1) else range(4, 8)  # of both ranks
        saves = tw.ModelCheckpoint(place, every_n_train_steps=2, save_top_k=-1)
        settings = {"callbacks": saves, "enable_checkpointing": True} if policy == "rollback" else {}
        loader, rest = loader_without((), 7), loader_without(tuple(dropped), None)
        losses, texts = losses_of(strategy, accumulate, loader, nan_policy=policy, default_root_dir=place, **settings)
        del losses[dropped.start // 2 : 4]
        results.append(
            (losses, losses_of(strategy, accumulate, rest)[0], texts, sorted(p.name for p in place.iterdir()))
        )
    return results


def the_slow_ones(folder: Path) -> list[Any]:
    return compared(folder, SLOW)


@pytest.mark.parametrize("job", [compared, pytest.param(the_slow_ones, marks=pytest.mark.slow)])
def test_a_skipped_batch_of_one_rank_leaves_no_trace_in_the_other_steps(job: Any, tmp_path: Path) -> None:
    ranks = run_job(job, 2, tmp_path)
    for case, first, second in zip(FAST if job is compared else SLOW, *ranks, strict=True):
        policy, _, accumulate = case
        for losses, expected, _, _ in (first, second):
            assert len(losses) >= 4
            assert losses == expected, case
        step = 3 // accumulate
        [text], names = first[2], first[3]
        assert text.startswith(
            f"the loss of rank 1 is not finite at step {step} (epoch 0, batch 3). The step is skipped"
        ), case
        assert f"bad-batch-{step}-rank1.safetensors" in names, case
        assert not any("rank0" in name for name in names)
        assert second[2] == [], case
        assert ("and the run returns to " in text) == (policy == "rollback")
        record_row(
            f"NaN in a batch of rank 1, nan_policy={policy!r} ({case[1]}, {accumulate} batches a step)",
            0.0,
            text,
            "the batch",
        )


def raised(folder: Path) -> Any:
    class Root(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return value.sqrt()

    class Breaks(Normed):
        """The output of one layer is NaN on rank 1."""

        def __init__(self) -> None:
            super().__init__()
            self.root = Root()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            is_bad = batch_idx == 5 and self.trainer.global_rank
            return super().training_step(batch, batch_idx) + self.root(torch.tensor(-1.0 if is_bad else 1.0))

    torch.manual_seed(5)
    module = Breaks()
    options = {"devices": 2, "max_epochs": 1, "log_every_n_steps": 3, "nan_policy": "raise", "default_root_dir": folder}
    trainer = tw.Trainer(**{**QUIET, **options})
    before = None
    try:
        trainer.fit(module, loader_without((), None))
    except FloatingPointError as error:
        before = str(error)
    accelerator = tw.Accelerator(nan_policy="skip", project_dir=folder / "loop")
    torch.manual_seed(5)
    net, optimizer, loader = accelerator.prepare(*loop_parts(loader_without((), 7)))
    skipped = [accelerate_step(accelerator, net, optimizer, batch) for batch in loader]
    return before, skipped, weights(accelerator.unwrap_model(net))


def loop_parts(loader: Any) -> tuple[Any, ...]:
    net = make_net(dropout=0.3).insert(1, nn.BatchNorm1d(13))
    return net, torch.optim.AdamW(net.parameters(), lr=0.05), loader


def accelerate_step(accelerator: Any, net: Any, optimizer: Any, batch: Any) -> bool:
    with warnings.catch_warnings(action="ignore"):
        accelerator.backward(loss_of(net, batch))
        optimizer.step()
    optimizer.zero_grad()
    assert accelerator.optimizer_step_was_skipped == optimizer.step_was_skipped
    return bool(optimizer.step_was_skipped)


def test_two_ranks_end_by_one_decision_and_a_raw_loop_skips(tmp_path: Path) -> None:
    first, second = run_job(raised, 2, tmp_path)
    assert first[0] == second[0]
    assert first[0].startswith(
        "the loss of rank 1 is nan, found at step 5 (epoch 0, batch 5); it was not there at step 2. "
    )
    assert "The first such value of rank 1 is an output of 'root' (Root). " in first[0]
    assert "bad-batch-5-rank1.safetensors; with log_every_n_steps=1 it is" in first[0]
    assert first[1] == second[1] == [number == 3 for number in range(8)]
    assert (tmp_path / "loop" / "bad-batch-3-rank1.safetensors").exists()
    assert all(bool(each.isfinite().all()) for each in first[2].values())


def test_a_run_without_a_policy_warns_once_and_counts_as_failed(tmp_path: Path) -> None:
    results = []
    ends = tw.LambdaCallback(on_run_end=lambda trainer, module, result, *_: results.append(result))
    with pytest.warns(UserWarning, match="the loss is nan|the run has ended") as caught:
        fit(Normed(), loader_without((), 5), callbacks=ends, log_every_n_steps=4)
    texts = [str(each.message) for each in caught]
    assert len(texts) == 2
    assert texts[0].startswith("the loss is nan at step 8 (epoch 0, batch 8), so the weights become NaN")
    assert texts[1].startswith("the run has ended, and the weights are not finite (NaN or infinity in 'net.0.weight'")
    assert results == ["failed"]


def test_an_optimizer_state_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    class Spoils(tw.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            state = trainer.optimizers[0].state[module.net[0].weight]
            state["step"].fill_(math.inf)  # of one element: it may be infinite
            if batch_idx == 7:
                state["exp_avg_sq"][0, 0] = math.inf

    saves = tw.ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    with pytest.warns(UserWarning, match="the optimizer's state is not finite .*'0/net.0.weight/exp_avg_sq'"):
        fit(Normed(), loader_without((), None), callbacks=[Spoils(), saves], enable_checkpointing=True)
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["epoch=0-step=4.ckpt"]


class Explodes(Normed):
    """Its gradients are not finite from a batch on, while its losses are."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + (self.net[0].weight.sum() * 0.0).sqrt() if batch_idx >= 4 else loss


class Stumbles(Normed):
    """Its gradients are not finite in some batches of the second epoch."""

    bad: Any = (5, 15, 25)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        is_bad = self.current_epoch == 1 and batch_idx in self.bad
        return loss + (self.net[0].weight.sum() * 0.0).sqrt() if is_bad else loss


def test_a_run_returns_ten_times_to_one_checkpoint(tmp_path: Path) -> None:
    module, settings = Stumbles(), {"max_epochs": 2, "nan_policy": "rollback", "enable_checkpointing": True}
    with warnings.catch_warnings(action="ignore"):
        fit(module, loader_without((), None, 32), default_root_dir=tmp_path / "three", **settings)
        module.bad = range(0, 32, 2)
        with pytest.raises(FloatingPointError, match=r"step 52 .*, after 10 returns to .*epoch=0-step=32.ckpt"):
            fit(module, loader_without((), None, 32), default_root_dir=tmp_path / "many", **settings)


def test_a_policy_ends_a_run_without_progress(tmp_path: Path) -> None:
    saves = tw.ModelCheckpoint(tmp_path, every_n_train_steps=3)
    for policy, callbacks, text, num in (
        ("skip", None, "a gradient is not finite at step 14 .*, after 10 skipped steps in a row", 11),
        ("rollback", saves, "a gradient is not finite at step 14 .*, after 10 skipped steps in a row", 11),
    ):
        module, settings = Explodes(), {"default_root_dir": tmp_path / policy, "callbacks": callbacks}
        with warnings.catch_warnings(action="ignore"), pytest.raises(FloatingPointError, match=text):
            fit(module, loader_without((), None), nan_policy=policy, enable_checkpointing=bool(callbacks), **settings)
        assert len(list((tmp_path / policy).glob("bad-batch-*"))) == num
        assert all(bool(each.isfinite().all()) for each in module.state_dict().values())
    stored = load_file(tmp_path / "skip" / "bad-batch-4.safetensors")
    assert_equal(stored, dict(zip("01", make_data(64)[16:20], strict=True)))


def test_a_loss_scale_keeps_its_own_skips(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="the loss is not finite at step 5"):
        trainer = fit(
            Normed(), loader_without((), 5), precision="16-mixed", nan_policy="skip", default_root_dir=tmp_path
        )
    scale = trainer.engine.precision.scaler.get_scale()  # type: ignore[attr-defined]
    plain = fit(Normed(), loader_without((5,), None), precision="16-mixed").engine.precision
    assert scale == plain.scaler.get_scale()  # type: ignore[attr-defined]  # a loss that is not finite does not lower it
    module = Explodes()
    trainer = fit(module, loader_without((), None), precision="16-mixed", nan_policy="skip", default_root_dir=tmp_path)
    assert trainer.engine.precision.scaler.get_scale() < scale  # type: ignore[attr-defined]


def test_a_policy_that_cannot_hold_is_rejected_before_training(tmp_path: Path) -> None:
    class Manual(Normed):
        automatic_optimization = False

    class Closure(Normed):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ValueError, match="nan_policy='stop': expected None, 'raise', 'skip' or 'rollback'"):
        tw.Trainer(nan_policy="stop", **QUIET)
    for policy in ("rollback", "stop"):
        with pytest.raises(
            ValueError, match=f"nan_policy='{policy}' is not accepted by the Accelerator; pass None, 'raise'"
        ):
            tw.Accelerator(nan_policy=policy)
    for policy, module, text in (
        ("rollback", Normed(), "Add a ModelCheckpoint, or pass 'skip'"),
        ("skip", Manual(), "nan_policy='skip' needs automatic optimization"),
        ("skip", Closure(), "nan_policy='skip' cannot skip a step of LBFGS"),
    ):
        with pytest.raises(ValueError, match=text):
            fit(module, nan_policy=policy)
        assert module.losses == []
    accelerator = tw.Accelerator(nan_policy="skip")
    net, optimizer = accelerator.prepare(*loop_parts(None)[:2])
    with pytest.raises(
        TypeError, match="step was given a closure, but nan_policy='skip' needs the gradients before step"
    ):
        optimizer.step(lambda: net(torch.zeros(4, 8)).sum())


def test_a_raw_loop_ends_at_a_check(tmp_path: Path) -> None:
    accelerator = tw.Accelerator(nan_policy="raise", project_dir=tmp_path)
    net, optimizer, loader = accelerator.prepare(*loop_parts(loader_without((), 40, 60)))

    def loop() -> None:
        for batch in loader:
            accelerate_step(accelerator, net, optimizer, batch)

    with pytest.raises(FloatingPointError, match="the loss is nan, found at step 49; no earlier step was checked"):
        loop()
    with torch.no_grad():
        accelerator.unwrap_model(net)[0].weight[0, 0] = math.inf
    with pytest.warns(UserWarning, match="the weights are not finite"):  # after the error, whose handling may save
        accelerator.save_state(tmp_path / "state")
