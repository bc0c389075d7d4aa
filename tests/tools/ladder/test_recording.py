"""The record of a process under a rung: steps, rates, memory and metrics, of a Trainer and of a loop."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from rungs import set_rung
from small import ACCELERATOR, DEVICE, QUIET, Classifier, loss_of, make_loader, make_net
from torch.utils.data import DataLoader

import trainwright as tw
from trainwright.overrides import OverrideFile
from trainwright.tools.ladder.attempt import RungRecord
from trainwright.tools.ladder.recorder import LadderObserver
from trainwright.tools.ladder.recording import MOST_UNREAD, StepClock, peak_bytes, steady_rate


def test_the_steady_rate_skips_slow_steps() -> None:
    # A step takes 1 s. The first three take longer, one compiles again, and an evaluation comes before another.
    took = [9.0, 5.0, 4.0, 1.0, 1.0, 30.0, 1.0, 4.0, 1.0]
    ends = [sum(took[: at + 1]) for at in range(len(took))]
    steady = [True] * 7 + [False, True]
    assert steady_rate(ends, [8] * 9, steady) == pytest.approx(8.0)
    assert steady_rate(ends[:2], [8, 8], [True, True]) == pytest.approx(8 / 5)
    assert steady_rate(ends[:2], [8, 8], [False, False]) == pytest.approx(8 / 5)  # there is nothing else
    assert steady_rate(ends[:1], [8], [True]) is None
    assert steady_rate([], [], []) is None


def test_a_clock_reads_all_marks() -> None:
    clock = StepClock(torch.device("cpu"))
    for _ in range(MOST_UNREAD + 5):
        clock.mark()
    seconds = clock.read()
    assert len(seconds) == MOST_UNREAD + 6
    assert seconds[0] == 0.0
    assert seconds == sorted(seconds)
    assert clock.read() == seconds


def test_a_trainer_is_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_rung(monkeypatch, tmp_path / "rung", steps=15)
    trainer = tw.Trainer(max_epochs=9, accumulate_grad_batches=2, **QUIET)
    made = RungRecord.read(tmp_path / "rung")
    assert made is not None
    assert (made.owner, made.steps, made.points) == ("Trainer", 0, ())
    trainer.fit(Classifier(), make_loader(), make_loader(8))
    trainer.test(dataloaders=make_loader(8), verbose=False)
    record = RungRecord.read(tmp_path / "rung")
    assert record is not None
    assert record.steps == len(record.points) == trainer.global_step == 15
    assert [step for step, _ in record.points] == list(range(1, 16))
    assert record.seconds >= record.points[-1][1]
    assert record.samples_per_second is not None
    assert record.batches_per_second is not None
    # 5 windows of 8 samples and one of 4, so about 4 samples a batch
    assert record.samples_per_second / record.batches_per_second == pytest.approx(4, rel=0.01)
    assert record.metrics["test"].keys() == {"val_loss", "count"}
    assert record.metrics["validation"]["count"] == 8
    assert record.facts == {"strategy": "single_device", "precision": "32-true", "processes": 1, "device": DEVICE.type}
    middle = record.seconds_to(7)
    assert middle is not None
    assert record.points[5][1] < middle <= record.points[6][1]
    assert record.seconds_to(16) is None
    assert record.planned_steps == 54  # 9 epochs of 6 windows
    assert record.seconds_to_end is not None
    assert record.steps_per_second is not None
    assert record.seconds_to_end == pytest.approx(record.seconds + 39 / record.steps_per_second)


class Fitting(tw.Callback):
    """Trains another model after an epoch."""

    def on_train_epoch_end(self, trainer: tw.Trainer, module: tw.Module) -> None:
        tw.Trainer(max_epochs=1, **QUIET).fit(Classifier(), make_loader(12), make_loader(4))


def test_a_fit_within_a_fit_is_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_rung(monkeypatch, tmp_path / "rung")
    trainer = tw.Trainer(max_epochs=3, callbacks=Fitting(), **QUIET)
    with pytest.raises(RuntimeError, match="within the fit of another, whose speed the ladder cannot measure"):
        trainer.fit(Classifier(), make_loader(8), make_loader(8))


def fit_alone() -> None:
    tw.Trainer(max_epochs=1, **QUIET).fit(Classifier(), make_loader(16))


def evaluate_alone() -> None:
    tw.Trainer(**QUIET).test(Classifier(), make_loader(8), verbose=False)


@pytest.mark.host
def test_a_test_in_another_process_keeps_the_record_of_the_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_rung(monkeypatch, tmp_path / "rung")
    for target in (fit_alone, evaluate_alone):  # as strategy="ddp_spawn" does
        process = multiprocessing.get_context("fork").Process(target=target)
        process.start()
        process.join()
    record = RungRecord.read(tmp_path / "rung")
    assert record is not None
    assert (record.steps, len(record.points)) == (4, 4)
    assert record.metrics["test"]["count"] == 8


class Loop:
    """A loop with two optimizers, a test in every epoch, and a log."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.accelerator = tw.Accelerator(accelerator=ACCELERATOR, log_with="csv", project_dir=folder, **options)
        self.net, self.other = make_net(), make_net()
        self.optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.net, self.other)]

    def run(self, loader: DataLoader[Any]) -> None:
        accelerator = self.accelerator
        accelerator.init_trackers("loop")
        net, other, first, second, loader, test = accelerator.prepare(
            self.net, self.other, *self.optimizers, loader, make_loader(8)
        )
        for batch in loader:
            for model, optimizer in ((net, first), (other, second)):
                optimizer.zero_grad()
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
        with torch.no_grad():
            correct = sum(int((net(inputs).argmax(1) == targets).sum()) for inputs, targets in test)
        accelerator.load_state(accelerator.save_state())  # as of the best weights, which is no resume
        accelerator.log({"test_acc": torch.tensor(correct / 8)})
        accelerator.end_training()


def write_record(file: OverrideFile) -> None:
    """Write the record of a loop, as at the end of its process."""
    assert isinstance(file.observer, LadderObserver)
    file.observer.recording.write()


def test_a_loop_is_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = set_rung(monkeypatch, tmp_path / "rung")
    Loop(tmp_path).run(make_loader(40))
    write_record(file)
    record = RungRecord.read(tmp_path / "rung")
    assert record is not None
    assert (record.owner, record.steps) == ("Accelerator", 20)
    assert [step for step, _ in record.points] == [
        1,
        3,
        5,
        7,
        9,
        11,
        13,
        15,
        17,
        19,
    ]  # the second steps have no new batch
    assert record.samples_per_second is not None
    assert record.batches_per_second is not None
    assert record.samples_per_second == pytest.approx(4 * record.batches_per_second)
    assert record.logged.keys() == {"test_acc"}
    assert not record.is_cut


def test_a_loop_is_ended_after_its_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    set_rung(monkeypatch, tmp_path / "rung", steps=6)
    with pytest.raises(SystemExit) as caught:
        Loop(tmp_path).run(make_loader(40))
    assert caught.value.code == 0
    assert "the rung ends this loop after 6 steps" in capsys.readouterr().err
    record = RungRecord.read(tmp_path / "rung")
    assert record is not None
    assert record.is_cut
    assert record.steps == 6
    assert record.logged == {}


def test_new_outputs_are_listed_for_the_ladder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The ladder moves new files away after the run, and no file that existed before."""
    saver = tw.ModelCheckpoint(tmp_path / "saved", filename="best", save_last="link")
    trainer = tw.Trainer(max_epochs=1, accelerator=ACCELERATOR, devices=1, logger=False, callbacks=saver)
    trainer.fit(Classifier(), make_loader())
    set_rung(monkeypatch, tmp_path / "rung")
    saver = tw.ModelCheckpoint(tmp_path / "saved", filename="best", save_last="link")
    trainer = tw.Trainer(max_epochs=1, accelerator=ACCELERATOR, devices=1, logger=False, callbacks=saver)
    module = Classifier()
    trainer.fit(module, make_loader())
    trainer.save_checkpoint(tmp_path / "final.ckpt")
    module.export(tmp_path / "model.safetensors")
    listed = (tmp_path / "rung/new_paths.txt").read_text().splitlines()
    assert [str(Path(line).relative_to(tmp_path)) for line in listed] == [
        "saved/best-v1.ckpt", "final.ckpt", "model.safetensors",
    ]  # fmt: skip


def test_memory_and_new_paths_are_recorded(tmp_path: Path) -> None:
    peak = peak_bytes(torch.device("cpu"))
    assert peak is not None
    assert 1 << 20 < peak < 1 << 40
    assert RungRecord.read(tmp_path) is None
