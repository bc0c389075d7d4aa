"""The times of a fit, and the line at its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small import QUIET, Classifier, make_loader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import trainwright as tw

SHOWN = {**QUIET, "enable_model_summary": True}


class Clock:
    """The timeline's clock, which only the parts of a test advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def spend(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("trainwright.trainer.timeline.perf_counter", lambda: clock.now)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4))
    return clock


class Read(Dataset[Any]):
    """Eight samples, which take time to read."""

    def __init__(self, read: Callable[[], None]) -> None:
        self.read = read

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.read()
        return torch.full((8,), float(index)), 0


class Timed(Classifier):
    """Spends time in every phase."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.clock.spend(4.0)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.spend(6.0)
        super().validation_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.clock.spend(2.0)

    def on_validation_end(self) -> None:
        if self.trainer.training or not self.trainer.sanity_checking:
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir, "saved"), weights_only=True)

    def on_train_epoch_end(self) -> None:
        self.clock.spend(1.0)


def line_of(capsys: pytest.CaptureFixture[str]) -> str:
    return next((line for line in capsys.readouterr().out.splitlines() if line.startswith("trained for")), "")


def test_phases_add_up_and_contain_no_phase_within_them(clock: Clock, tmp_path: Path, capsys: Any) -> None:
    settings = {**SHOWN, "max_epochs": 2, "default_root_dir": tmp_path, "num_sanity_val_steps": 1}
    trainer = tw.Trainer(**settings)
    loaders = DataLoader(Read(lambda: clock.spend(0.5)), batch_size=2), make_loader(4)
    trainer.fit(Timed(clock), *loaders)
    timeline = trainer.state.timeline
    expected = {"data": 8.0, "step": 32.0, "validation": 12.0, "checkpoints": 4.0, "other": 2.0}
    assert timeline.seconds == expected
    assert (timeline.steps, timeline.batches, timeline.samples, timeline.tokens) == (8, 8, 16, 0)
    assert line_of(capsys) == (
        "trained for 58 s: 0.20 steps/s, 0.40 samples/s. Time: data 14%, step 55%, validation 21%, checkpoints 7%, other 3%. "
        "The loader has num_workers=0, and this process has 4 cores. Pass num_workers=2 to it."
    )
    trainer.validate(dataloaders=make_loader(4), verbose=False)
    assert timeline.seconds == expected


def test_a_validation_within_an_epoch_is_no_step(clock: Clock, tmp_path: Path) -> None:
    settings = {**QUIET, "max_epochs": 1, "default_root_dir": tmp_path}
    settings |= {"val_check_interval": 2, "num_sanity_val_steps": 0}
    trainer = tw.Trainer(**settings)
    trainer.fit(Timed(clock), DataLoader(Read(int), batch_size=2), make_loader(4))
    seconds = {"data": 0.0, "step": 16.0, "validation": 12.0, "checkpoints": 4.0, "other": 1.0}
    assert trainer.state.timeline.seconds == seconds


@pytest.mark.parametrize(("seconds", "cores", "options", "advice"), [
    (0.2, 4, {}, ""),
    (1.0, 1, {}, "num_workers=0, and this process has 1 core(s): prepare the data before training."),
    (1.0, 4, {}, "num_workers=0, and this process has 4 cores. Pass num_workers=2 to it."),
])  # fmt: skip
def test_advice_fits_the_loader(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seconds: float, cores: int,
    options: dict[str, Any], advice: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores))
    loader = DataLoader(Read(lambda: clock.spend(seconds)), batch_size=2, **options)
    tw.Trainer(**SHOWN, max_epochs=1).fit(Timed(clock), loader)
    line = line_of(capsys)
    assert line.endswith(advice if advice else "%.")
    assert ("The loader has" in line) == bool(advice)


def test_workers_that_each_epoch_starts_are_named(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    class Slow(DataLoader[Any]):
        def __iter__(self) -> Any:
            clock.spend(3.0)
            return super().__iter__()

    tw.Trainer(**SHOWN, max_epochs=2).fit(Timed(clock), Slow(Read(int), batch_size=2, num_workers=1))
    assert line_of(capsys).endswith("num_workers=1, which each epoch starts again. Pass persistent_workers=True to it.")


class Tokens(Classifier):
    flops_per_batch = 2e9

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.clock.spend(1.0)  # type: ignore[operator, union-attr]
        return self.net(batch["input_ids"][:, :8].float()).sum()  # type: ignore[no-any-return]


def test_line_counts_tokens_and_known_flops(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    samples = [{"mask": torch.ones(9), "input_ids": torch.arange(9)}] * 8
    module = Tokens()
    module.clock = clock  # type: ignore[assignment]
    monitor = tw.ThroughputMonitor(len, available_flops=1e10)
    settings = {**SHOWN, "max_epochs": 1, "logger": tw.CSVLogger(), "enable_report": False}
    tw.Trainer(**settings, callbacks=monitor).fit(module, DataLoader(samples, batch_size=4))  # type: ignore[arg-type]
    line = line_of(capsys)
    assert line == "trained for 2 s: 1.00 steps/s, 4.00 samples/s, 36.00 tokens/s, MFU 20.0%. Time: step 100%."


def test_batches_of_several_forms_have_no_rate_of_samples(capsys: pytest.CaptureFixture[str]) -> None:
    class Mixed(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch["x"] if isinstance(batch, dict) else batch[0]).sum()  # type: ignore[no-any-return]

    batches = [[torch.ones(2, 8)], {"x": torch.ones(2, 8)}, [torch.ones(2, 8)]]
    trainer = tw.Trainer(**SHOWN, max_epochs=2)
    trainer.fit(Mixed(), batches)
    assert trainer.global_step == 6
    assert "samples/s" not in line_of(capsys)


def test_line_is_printed_with_the_summary_of_the_model_only(capsys: pytest.CaptureFixture[str]) -> None:
    class Fails(Classifier):
        def on_train_end(self) -> None:
            raise RuntimeError("the end")

    tw.Trainer(**QUIET, max_epochs=1).fit(Classifier(), make_loader())
    tw.Trainer(**SHOWN, fast_dev_run=True).fit(Classifier(), make_loader())
    with pytest.raises(RuntimeError, match="the end"):
        tw.Trainer(**SHOWN, max_epochs=1).fit(Fails(), make_loader())
    assert line_of(capsys) == ""
    tw.Trainer(**SHOWN, max_steps=3).fit(Classifier(), make_loader())
    assert capsys.readouterr().out.count("trained for") == 1


@pytest.mark.host
def test_detect_syncs_says_that_a_cpu_has_nothing_to_detect() -> None:
    with pytest.warns(UserWarning, match="detect_syncs=True finds nothing on cpu.* Run it on a GPU, or omit") as said:
        tw.Trainer(**QUIET, max_epochs=2, detect_syncs=True).fit(Classifier(), make_loader())
    assert len(said) == 1
