"""The callbacks that watch a run: its speed, its device, exceptions."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET, Classifier, Rows, make_loader
from torch import Tensor

import trainwright as tw
from trainwright.checkpoint.reader import open_checkpoint


class Memory(Rows):
    def with_name(self, name: str) -> list[tuple[int | None, dict[str, float]]]:
        return [row for row in self.rows if any(name in each for each in row[1])]


def fit(callbacks: Any, module: tw.Module | None = None, data: Any = None, **settings: Any) -> Memory:
    memory = Memory()
    settings = {**QUIET, "logger": memory, "max_epochs": 1, "log_every_n_steps": 2, **settings}
    tw.Trainer(callbacks=callbacks, **settings).fit(module or Classifier(), data or make_loader())  # 11 batches of 4
    return memory


def test_throughput_is_logged() -> None:
    monitor = tw.ThroughputMonitor(lambda batch: len(batch[0]), lambda batch: batch[0].numel(), available_flops=1e12)
    rows = fit(monitor, max_epochs=2).with_name("train/device")
    assert [step for step, _ in rows] == list(range(3, 22, 2))
    assert "train/device/mfu" not in rows[0][1]
    for _, row in rows:
        rate = row["train/device/batches_per_sec"]
        assert row["train/device/samples_per_sec"] == pytest.approx(4 * rate)
        assert row["train/device/items_per_sec"] == pytest.approx(32 * rate)
        assert row["train/samples_per_sec"] == row["train/device/samples_per_sec"]
        assert 0.0 <= row["train/data_wait"] <= 1.0


def test_throughput_uses_given_flops() -> None:
    class Known(Classifier):
        flops_per_batch = 10.0

    rows = fit(tw.ThroughputMonitor(lambda batch: 1, available_flops=1e12), Known()).with_name("flops")
    flops = rows[0][1]["train/device/flops_per_sec"]
    assert flops == 10.0 * rows[0][1]["train/device/batches_per_sec"]
    assert rows[0][1]["train/device/mfu"] == pytest.approx(flops / 1e12)
    assert not fit(tw.ThroughputMonitor(lambda batch: 1, flops_per_batch=0)).with_name("flops")


def test_throughput_rejects_wrong_settings() -> None:
    with pytest.raises(TypeError, match="pass functions"):
        tw.ThroughputMonitor(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs 2 rows or more"):
        tw.ThroughputMonitor(len, window_size=1)
    with pytest.raises(ValueError, match="ThroughputMonitor writes to the trainer's loggers, but logger=False"):
        fit(tw.ThroughputMonitor(len), logger=False)


def test_throughput_writes_rows_of_windows_of_batches() -> None:
    both = [tw.ThroughputMonitor(len), tw.DeviceStatsMonitor(cpu_stats=True)]
    memory = fit(both, log_every_n_steps=1, accumulate_grad_batches=4)  # 3 windows
    assert [step for step, _ in memory.with_name("train/device")] == [1, 2]
    for hook in ("start", "end"):
        assert [step for step, _ in memory.with_name(f"on_train_batch_{hook}")] == [0, 1, 2]


def test_saving_is_no_wait_for_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)

    class Takes(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            clock.now += 1.0
            return super().training_step(batch, batch_idx)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            clock.now += 50.0

    monkeypatch.setattr("trainwright.trainer.timeline.perf_counter", lambda: clock.now)
    saving = tw.ModelCheckpoint(tmp_path, every_n_train_steps=1)
    memory = fit([tw.ThroughputMonitor(len), saving], Takes(), enable_checkpointing=True)
    row = memory.with_name("train/device")[-1][1]
    assert (row["train/data_wait"], row["train/batches_per_sec"]) == (0.0, 1.0)


@pytest.mark.parametrize(("name", "peak"), [
    ("NVIDIA A100-SXM4-80GB", 312e12),
    ("NVIDIA H100 NVL", 835e12),
    ("NVIDIA A10G", 70e12),
    ("Tesla T4", 65e12),
    ("NVIDIA RTX A1000", None),
    ("NVIDIA T400 4GB", None),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
])  # fmt: skip
def test_peaks_of_devices_are_known(monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None) -> None:
    device = SimpleNamespace(get_device_name=lambda device: name)
    monkeypatch.setattr(torch, "get_device_module", lambda device: device_module)
    device_module = device
    rows = fit(tw.ThroughputMonitor(len, flops_per_batch=1.0)).with_name("train/device")
    rate = rows[0][1]["train/device/flops_per_sec"]
    assert rows[0][1].get("train/device/mfu") == (None if peak is None else pytest.approx(rate / peak))


def test_flops_come_from_a_method_if_a_step_empties_its_batch() -> None:
    class Pops(Classifier):
        def flops_per_batch(self) -> float:
            return 10.0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return torch.nn.functional.cross_entropy(self.net(batch.pop("x")), batch.pop("y"))

    data = [{"x": x, "y": y} for x, y in make_loader()]
    row = fit(tw.ThroughputMonitor(lambda batch: len(batch["x"])), Pops(), data).with_name("train/device")[0][1]
    assert row["train/device/flops_per_sec"] == 10.0 * row["train/device/batches_per_sec"]
    assert row["train/samples_per_sec"] == pytest.approx(4 * row["train/device/batches_per_sec"])


def test_statistics_of_the_processor_are_logged() -> None:
    rows = fit(tw.DeviceStatsMonitor(cpu_stats=True)).with_name("DeviceStatsMonitor")
    assert [step for step, _ in rows] == [1, 1, 3, 3, 5, 5, 7, 7, 9, 9]
    assert {f"DeviceStatsMonitor.on_train_batch_start/{name}" for name in ("cpu_percent", "cpu_vm_percent")} < set(
        rows[0][1]
    )
    assert not [name for _, row in fit(tw.DeviceStatsMonitor(False)).rows for name in row if "cpu" in name]
    with pytest.raises(ValueError, match="DeviceStatsMonitor writes to the trainer's loggers, but logger=False"):
        fit(tw.DeviceStatsMonitor(), logger=False)


def test_statistics_are_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def memory_stats(device: torch.device) -> dict[str, int]:
        given.append(device.type)
        return {"allocated": 7}

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "memory_stats", memory_stats)
    monitor = tw.DeviceStatsMonitor()
    trainer = tw.Trainer(**{**QUIET, "logger": Memory()}, callbacks=monitor)
    strategy = SimpleNamespace(device=torch.device("cuda"))
    rows = Memory()
    options = {"fast_dev_run": False, "log_every_n_steps": 1, "is_global_zero": True}
    run = SimpleNamespace(strategy=strategy, loggers=[rows], state=trainer.state, **options)
    monitor.setup(run, Classifier(), "fit")  # type: ignore[arg-type]  # the module is on the CPU
    monitor.on_train_batch_start(run, Classifier(), None, 0)  # type: ignore[arg-type]
    assert given == ["cuda"]
    assert rows.rows == [(0, {"DeviceStatsMonitor.on_train_batch_start/allocated": 7.0})]


def two_ranks(folder: Path) -> Any:
    memory = fit(tw.ThroughputMonitor(lambda batch: len(batch[0])), devices="auto", log_every_n_steps=1)
    return [sorted(row) for _, row in memory.with_name("train/")]


def test_throughput_of_two_ranks_is_logged_by_the_first(tmp_path: Path) -> None:
    first, second = run_job(two_ranks, 2, tmp_path)
    assert "train/samples_per_sec" in first[0]
    assert second == []


class Breaks(Classifier):
    def __init__(self, fails: bool) -> None:
        super().__init__(dropout=0.2)
        self.fails = fails

    def on_train_epoch_start(self) -> None:
        if self.fails and self.current_epoch == 1:
            raise RuntimeError("broken")


def test_a_run_is_saved_when_it_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(fails: bool, ckpt_path: str | None = None) -> tuple[Any, dict[str, Tensor]]:
        torch.manual_seed(1)
        callback = tw.OnExceptionCheckpoint(tmp_path)
        module = Breaks(fails)
        trainer = tw.Trainer(**QUIET, max_epochs=2, callbacks=[callback])
        if fails:
            with pytest.raises(RuntimeError, match="broken"):
                trainer.fit(module, make_loader(shuffle=True))
        else:
            trainer.fit(module, make_loader(shuffle=True), ckpt_path=ckpt_path)
        return callback, module.state_dict()

    _, whole = run(False)
    callback, _ = run(True)
    assert callback.ckpt_path == f"{tmp_path}/on_exception.ckpt"
    assert f"OnExceptionCheckpoint: the run was saved as {tmp_path}/on_exception.ckpt" in capsys.readouterr().err
    assert open_checkpoint(callback.ckpt_path).step == 11
    resumed = run(False, callback.ckpt_path)[1]
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    run(True)  # the checkpoint of an earlier run is replaced
    assert os.listdir(tmp_path) == ["on_exception.ckpt"]
    (tmp_path / "on_exception.ckpt" / "notes").write_text("mine")
    callback, _ = run(True)  # a folder that holds other files is not
    assert callback.ckpt_path == f"{tmp_path}/on_exception-v1.ckpt"
    assert sorted(os.listdir(tmp_path)) == ["on_exception-v1.ckpt", "on_exception.ckpt"]
    with pytest.raises(ValueError, match="filename='' is empty"):
        tw.OnExceptionCheckpoint(tmp_path, "")


class FailsOnce(Classifier):
    """Fails in one batch of the second epoch, on the last rank, wherever it is told to."""

    def __init__(self, place: str = "", step: int = 15) -> None:
        super().__init__()
        self.place, self.step = place, step
        self.seen: list[int] = []

    def fail(self, place: str) -> None:
        is_last = self.trainer.global_rank == self.trainer.world_size - 1
        if is_last and place == self.place and self.trainer.state.total_batches == self.step:
            raise ValueError("a bad sample")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(self.trainer.global_step)
        loss = super().training_step(batch, batch_idx)
        self.fail("training_step")
        return loss

    def on_after_backward(self) -> None:
        self.fail("on_after_backward")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.fail("on_train_batch_start")


def trained(module: FailsOnce, folder: Path, **settings: Any) -> FailsOnce:
    saver = tw.OnExceptionCheckpoint(folder)
    path = saver.ckpt_path if folder.exists() else None
    trainer = tw.Trainer(callbacks=[saver], **{**QUIET, "max_epochs": 2, **settings})
    torch.manual_seed(1)
    trainer.fit(module, make_loader(shuffle=True), ckpt_path=path)
    return module


@pytest.mark.parametrize("place", ["training_step", "on_after_backward", "on_train_batch_start"])
def test_a_batch_that_fails_is_trained_again(tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    whole = trained(FailsOnce(), tmp_path / "none")
    with pytest.raises(ValueError, match="a bad sample"):
        trained(FailsOnce(place), tmp_path / "run")
    said = capsys.readouterr().err
    assert f"saved as {tmp_path}/run/on_exception.ckpt, as before batch 4, which a resumed run trains again" in said
    assert said.rstrip().endswith("From that batch remain: the RNG state, the logged values and changes of buffers.")
    again = trained(FailsOnce(), tmp_path / "run")
    assert again.seen == list(range(15, 22))
    assert all(torch.equal(again.state_dict()[name], value) for name, value in whole.state_dict().items())


def test_a_batch_that_has_changed_weights_or_gradients_is_not_saved(tmp_path: Path, capsys: Any) -> None:
    class Breaks(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            raise ValueError("a bad sample")

    class InStep(FailsOnce):
        def configure_optimizers(self) -> Any:
            return Breaks(self.parameters(), 0.1)

    class Adversarial(FailsOnce):
        def __init__(self) -> None:
            super().__init__("optimizer 1", 7)
            self.automatic_optimization = False
            self.norm = torch.nn.BatchNorm1d(8)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.norm(batch[0])
            for number, optimizer in enumerate(self.optimizers()):
                self.fail(f"optimizer {number}")
                optimizer.zero_grad()
                self.manual_backward(super(FailsOnce, self).training_step(batch, batch_idx))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(each.parameters(), 0.1) for each in (self.net[0], self.net[-1])]

    def said(module: FailsOnce, *callbacks: tw.Callback, **settings: Any) -> str:
        saver = tw.OnExceptionCheckpoint(tmp_path / "run")
        trainer = tw.Trainer(callbacks=[saver, *callbacks], **{**QUIET, "max_epochs": 2, **settings})
        with pytest.raises(ValueError, match="a bad sample"):
            trainer.fit(module, make_loader())
        return str(capsys.readouterr().err)

    stepped = "nothing is saved: the run failed in a batch, during or after its optimizer step"
    assert f"{stepped}; no earlier checkpoint exists." in said(InStep())
    assert stepped in said(Adversarial())  # the first optimizer has stepped
    kept = tw.ModelCheckpoint(tmp_path / "kept")
    window = said(FailsOnce("training_step", 14), kept, accumulate_grad_batches=2, enable_checkpointing=True)
    assert f"an accumulation window; the last complete checkpoint is {tmp_path}/kept/epoch=0-step=6.ckpt." in window
    assert not (tmp_path / "run").exists()
    module = Adversarial()
    module.place = "optimizer 0"
    assert "as before batch 7, which a resumed run trains again" in said(module)


def two_ranks_of_which_one_fails(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    place = "" if (folder / "run").exists() or (folder / "whole").exists() else "training_step"
    module = FailsOnce(place, 4)
    failure = ""
    try:
        trained(module, folder / ("none" if (folder / "whole").exists() else "run"), devices=2, max_epochs=2)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    return {"failure": failure, "weights": dict(module.state_dict()), "seen": module.seen}


def test_a_rank_that_fails_under_ddp_saves_for_all(tmp_path: Path) -> None:
    failed = run_job(two_ranks_of_which_one_fails, 2, tmp_path)
    assert failed[1]["failure"] == "ValueError: a bad sample"
    assert os.listdir(tmp_path / "run") == ["on_exception.ckpt"]
    resumed = run_job(two_ranks_of_which_one_fails, 2, tmp_path)
    (tmp_path / "whole").mkdir()
    whole = run_job(two_ranks_of_which_one_fails, 2, tmp_path)
    for rank in (0, 1):
        assert (resumed[rank]["failure"], resumed[rank]["seen"]) == ("", whole[rank]["seen"][4:])
        assert all(torch.equal(value, whole[0]["weights"][name]) for name, value in resumed[rank]["weights"].items())


def test_names_of_rates_have_a_prefix() -> None:
    rows = fit(tw.LearningRateMonitor("step", log_momentum=True, log_key_prefix="optim/")).with_name("optim/")
    assert {name for name in rows[0][1] if name != "epoch"} == {"optim/lr-AdamW", "optim/lr-AdamW-momentum"}
