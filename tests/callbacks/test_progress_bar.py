"""The progress bar: plain lines where the output is no terminal, tqdm where it is."""

from __future__ import annotations

import copy
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small import QUIET, Classifier, Stream, make_data, make_loader
from torch.utils.data import DataLoader, IterableDataset
from tqdm import tqdm

import trainwright as tw
from trainwright.rank_zero import warn

SETTINGS = {**QUIET, "enable_progress_bar": True}


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        data = make_data(8)
        while True:
            yield from (data[at] for at in range(8))


class Shown(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("shown", 0.123456, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_shown", 2.0, prog_bar=True)


def test_bar_writes_one_plain_line_an_epoch_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    tw.Trainer(max_epochs=2, **SETTINGS).fit(Shown(), make_loader(), make_loader())
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" in ")[0] for line in lines] == ["epoch 0: 11/11 batches", "epoch 1: 11/11 batches"]
    assert all("val_shown 2" in line for line in lines)


def test_bar_writes_lines_within_a_long_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = tw.Trainer(max_epochs=1, callbacks=[tw.TQDMProgressBar(line_seconds=0.0)], **SETTINGS)
    trainer.fit(Shown(), make_loader())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 12
    assert "shown 0.1235" in lines[4]


def test_bar_is_live_in_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    trainer = tw.Trainer(max_epochs=2, callbacks=[tw.TQDMProgressBar(refresh_seconds=0.0)], **SETTINGS)
    trainer.fit(Shown(), make_loader(), make_loader())
    trainer.test(Shown(), make_loader())
    shown = capsys.readouterr().err
    for text in ("Sanity check", "Epoch 0: 100%", "Epoch 1: 100%", "11/11", "shown=0.123", "val_shown=2", "Test"):
        assert text in shown


class Predictor(Shown):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_shown", 2.0, prog_bar=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[1]


def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)


class Own(tw.TQDMProgressBar):
    """Makes a bar for every stage, and records which."""

    def __init__(self, leave: bool) -> None:
        super().__init__(refresh_seconds=0.0, leave=leave)
        self.made: list[str] = []

    def init_train_tqdm(self) -> Any:
        self.made.append("train")
        bar = super().init_train_tqdm()
        bar.bar_format = "[{desc} {n_fmt} of {total_fmt}{postfix}]"
        return bar

    def init_sanity_tqdm(self) -> Any:
        self.made.append("sanity")
        return tqdm(file=sys.stderr, bar_format="<{desc} {n_fmt}/{total_fmt}>", desc="mine")

    def init_validation_tqdm(self) -> Any:
        self.made.append("validation")
        return tqdm(disable=True)

    def init_test_tqdm(self) -> Any:
        self.made.append("test")
        return super().init_test_tqdm()

    def init_predict_tqdm(self) -> Any:
        self.made.append("predict")
        return tqdm(file=sys.stdout)


@pytest.mark.parametrize("leave", [False, True])
def test_subclass_makes_other_bars(capsys: Any, monkeypatch: pytest.MonkeyPatch, leave: bool) -> None:
    """The results of `init_train_tqdm` and the others are shown, with the callback's counts and metrics."""
    terminal(monkeypatch)
    bar = Own(leave)
    trainer = tw.Trainer(max_epochs=2, callbacks=[bar], **SETTINGS)
    trainer.fit(Predictor(), make_loader(), make_loader(8))
    trainer.test(Predictor(), make_loader(8))
    trainer.predict(Predictor(), make_loader(16))
    an_epoch = ["train", "validation"]
    fitted = [*an_epoch, *an_epoch] if leave else [*an_epoch, "validation"]
    assert bar.made == ["sanity", *fitted, "test", "predict"]
    shown = capsys.readouterr()
    assert "<Sanity check 2/2>" in shown.err
    assert "Validation" not in shown.err
    assert "[Epoch 1 11 of 11, shown=0.123, val_shown=2" in shown.err
    assert "Test: 100%" in shown.err
    assert "Predict" in shown.out
    assert "4/4" in shown.out


class Reached(tw.TQDMProgressBar):
    """Reaches its bars from hooks, and records their classes."""

    def __init__(self) -> None:
        super().__init__(refresh_seconds=0.0)
        self.found: list[tuple[str, bool, int]] = []

    def note(self, bar: Any) -> None:
        self.found.append((bar.desc, bool(bar.disable), bar.n))

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        super().on_validation_start(trainer, module)
        self.val_progress_bar.set_description("Valid")
        self.note(self.val_progress_bar)
        if trainer.sanity_checking:
            self.train_progress_bar.set_description("not yet")

    def on_train_start(self, trainer: Any, module: Any) -> None:
        super().on_train_start(trainer, module)
        self.note(self.train_progress_bar)
        self.train_progress_bar.unit = "batch"

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        super().on_train_epoch_start(trainer, module)
        self.train_progress_bar.set_description(f"E{trainer.current_epoch}")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        super().on_train_epoch_end(trainer, module)
        self.note(self.train_progress_bar)
        self.train_progress_bar.set_postfix(extra=1)

    def on_test_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        super().on_test_batch_end(trainer, module, *args)
        self.test_progress_bar.set_postfix_str(f"seen {args[2]}")

    def on_predict_end(self, trainer: Any, module: Any) -> None:
        self.note(self.predict_progress_bar)
        super().on_predict_end(trainer, module)


@pytest.mark.parametrize("is_live", [True, False])
def test_bars_are_available_in_hooks_of_a_subclass(capsys: Any, monkeypatch: pytest.MonkeyPatch, is_live: bool) -> None:
    if is_live:
        terminal(monkeypatch)
    bar = Reached()
    trainer = tw.Trainer(max_epochs=1, callbacks=[bar], **SETTINGS)
    trainer.fit(Predictor(), make_loader(), make_loader(8))
    assert bar.test_progress_bar.disable
    trainer.test(Predictor(), make_loader(8))
    trainer.predict(Predictor(), make_loader(8))
    fitted, predicted = (11, 2) if is_live else (0, 0)
    assert [(name.removesuffix(": "), is_hidden, n) for name, is_hidden, n in bar.found] == [
        ("Valid", not is_live, 0),
        ("Epoch 0", not is_live, 0),
        ("Valid", not is_live, 0),
        ("E0", not is_live, fitted),
        ("Predict", not is_live, predicted),
    ]
    copied = copy.deepcopy(bar)
    assert copied.train_progress_bar.disable
    shown = capsys.readouterr().err
    for text in ("E0: 100%", "batch/s", "extra=1", "seen 1", "Valid: "):
        assert (text in shown) is is_live
    assert ("epoch 0: 11/11 batches" in shown) is not is_live


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_stream_that_max_steps_ends_has_a_total(capsys: Any, monkeypatch: Any, accumulate: int) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    stream = DataLoader(Endless(), 4)
    trainer = tw.Trainer(
        max_epochs=-1,
        max_steps=6,
        accumulate_grad_batches=accumulate,
        callbacks=tw.TQDMProgressBar(leave=True),
        **SETTINGS,
    )
    trainer.fit(Shown(), stream)
    assert f"{6 * accumulate}/{6 * accumulate} [" in capsys.readouterr().err


def test_messages_appear_above_the_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin on an empty line: the bar is erased before it, and drawn again after it."""

    class Warns(Shown):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", 2.0)

        def on_validation_epoch_end(self) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                # pytest records warnings, and Python writes them.
                warnings.showwarning = lambda message, *_: print(message, file=sys.stderr)  # type: ignore[assignment]
                warn("a warning of ours")

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    stopping = tw.EarlyStopping("val_loss", patience=1, min_delta=9.0, verbose=True)
    trainer = tw.Trainer(max_epochs=3, callbacks=[stopping, tw.TQDMProgressBar()], **SETTINGS)
    trainer.fit(Warns(), make_loader(), make_loader(8))
    frames = re.split(r"[\r\n]", capsys.readouterr().err)
    messages = ("val_loss improved", "val_loss has not improved", "a warning of ours")
    for message in messages:
        at = next(at for at, frame in enumerate(frames) if message in frame)
        assert "it/s" not in frames[at]
        assert not frames[at - 1].strip()


def test_bars_show_several_loaders_and_predictions(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(monkeypatch)
    trainer = tw.Trainer(max_epochs=1, callbacks=[tw.TQDMProgressBar(refresh_seconds=0.0)], **SETTINGS)
    trainer.fit(Predictor(), make_loader(), [make_loader(8), make_loader(20)])
    trainer.validate(Predictor(), [make_loader(8), make_loader(20)])
    trainer.predict(Predictor(), make_loader(16))
    shown = capsys.readouterr().err
    for text in ("Sanity check DataLoader 1: 100%", "Validation DataLoader 0: 100%", "Validation DataLoader 1:  20%"):
        assert text in shown
    assert "5/5" in shown
    assert "Predict: 100%" in shown
    assert "4/4" in shown


def test_bar_works_without_a_known_length(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(monkeypatch)
    trainer = tw.Trainer(max_epochs=2, callbacks=[tw.TQDMProgressBar(refresh_seconds=0.0)], **SETTINGS)
    trainer.fit(Shown(), DataLoader(Stream(12), batch_size=4))
    shown = capsys.readouterr().err
    assert "Epoch 1: 3it" in shown
    assert "%" not in shown


def test_a_resumed_bar_goes_on_where_it_was(tmp_path: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tw.Trainer(max_steps=7, **QUIET)
    trainer.fit(Shown(), make_loader())
    trainer.save_checkpoint(str(tmp_path / "run.ckpt"))
    terminal(monkeypatch)
    bar = tw.TQDMProgressBar(refresh_seconds=0.0)
    tw.Trainer(max_epochs=1, callbacks=[bar], **SETTINGS).fit(
        Shown(), make_loader(), ckpt_path=str(tmp_path / "run.ckpt")
    )
    shown = capsys.readouterr().err
    assert "8/11" in shown
    assert "11/11" in shown
    assert not any(f" {count}/11" in shown for count in range(7))


def test_subclass_shows_other_metrics_and_prints(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bar(tw.TQDMProgressBar):
        def get_metrics(self, trainer: Any, module: Any) -> dict[str, Any]:
            self.print("a line above")
            items = super().get_metrics(trainer, module)
            assert items.pop("v_num") == 7
            return {**items, "tensor": torch.tensor(0.5), "text": "yes", "count": 3}

    class Versioned(tw.Logger):
        version = 7

    terminal(monkeypatch)
    trainer = tw.Trainer(max_epochs=1, callbacks=[Bar(refresh_seconds=0.0)], **{**SETTINGS, "logger": Versioned()})
    trainer.fit(Shown(), make_loader())
    captured = capsys.readouterr()
    assert "tensor=0.5, text=yes, count=3" in captured.err
    assert "v_num" not in captured.err
    assert "a line above" in captured.out


def test_metrics_are_read_at_an_update_only(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []

    class Bar(tw.TQDMProgressBar):
        def get_metrics(self, trainer: Any, module: Any) -> dict[str, Any]:
            reads.append(trainer.state.batch)
            return super().get_metrics(trainer, module)

    terminal(monkeypatch)
    for kwargs, expected in (
        ({"refresh_seconds": 3600.0}, [11]),
        ({"refresh_seconds": 0.0, "refresh_rate": 4}, [4, 8, 11]),
        ({"refresh_rate": 0}, []),
    ):
        reads.clear()
        tw.Trainer(max_epochs=1, callbacks=[Bar(**kwargs)], **SETTINGS).fit(Shown(), make_loader())
        assert reads == expected


def test_nothing_is_shown_when_it_is_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    switched = tw.TQDMProgressBar(line_seconds=0.0)
    switched.disable()
    assert switched.is_disabled
    for bar in (tw.TQDMProgressBar(refresh_rate=0, line_seconds=0.0), switched):
        tw.Trainer(max_epochs=1, callbacks=[bar], **SETTINGS).fit(Shown(), make_loader(), make_loader())
    assert capsys.readouterr().err == ""
    switched.enable()
    assert switched.is_enabled
    with pytest.raises(ValueError, match="refresh_rate=-1 is not accepted"):
        tw.TQDMProgressBar(-1)


def test_evaluations_write_lines(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = tw.Trainer(callbacks=[tw.TQDMProgressBar(line_seconds=0.0)], **SETTINGS)
    trainer.test(Shown(), make_loader(8))
    trainer.predict(Predictor(), make_loader(8))
    lines = [line.split(" in ")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["test: 1/2 batches", "test: 2/2 batches", "predict: 1/2 batches", "predict: 2/2 batches"]


def test_a_bar_is_copied_without_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    copies_callback = tw.LambdaCallback(on_train_batch_end=lambda *_: copies.append(copy.deepcopy(bar)))
    terminal(monkeypatch)
    copies: list[tw.TQDMProgressBar] = []
    bar = tw.TQDMProgressBar(refresh_seconds=0.0)
    tw.Trainer(max_epochs=1, callbacks=[bar, copies_callback], **SETTINGS).fit(Shown(), make_loader(8))
    assert [(each._training.bar, each.refresh_rate) for each in copies] == [(None, bar.refresh_rate)] * 2


def test_a_bar_that_the_trainer_is_to_leave_out() -> None:
    with pytest.raises(ValueError, match=r"enable_progress_bar=False, but callbacks= holds a TQDMProgressBar. Omit"):
        tw.Trainer(callbacks=[tw.TQDMProgressBar()], enable_progress_bar=False)
