"""The progress bar: plain lines where the output is no terminal, tqdm where it is."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from small import QUIET, Classifier, make_loader

import trainwright as tw

SETTINGS = {**QUIET, "enable_progress_bar": True}


class Shown(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("shown", 0.123456, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_shown", 2.0, prog_bar=True)


def test_one_plain_line_an_epoch_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    tw.Trainer(max_epochs=2, **SETTINGS).fit(Shown(), make_loader(), make_loader())
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" in ")[0] for line in lines] == ["epoch 0: 11/11 batches", "epoch 1: 11/11 batches"]
    assert all("val_shown 2" in line for line in lines)


def test_lines_within_a_long_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = tw.Trainer(max_epochs=1, callbacks=[tw.TQDMProgressBar(line_seconds=0.0)], **SETTINGS)
    trainer.fit(Shown(), make_loader())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 12
    assert "shown 0.1235" in lines[4]


def test_a_bar_in_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    trainer = tw.Trainer(max_epochs=2, callbacks=[tw.TQDMProgressBar(refresh_seconds=0.0)], **SETTINGS)
    trainer.fit(Shown(), make_loader(), make_loader())
    trainer.test(Shown(), make_loader())
    shown = capsys.readouterr().err
    for text in ("Sanity check", "Epoch 0: 100%", "Epoch 1: 100%", "11/11", "shown=0.1235", "val_shown=2", "Test"):
        assert text in shown


def test_the_summary_counts_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    module = Classifier()
    module.net[0].requires_grad_(False)
    tw.Trainer(max_epochs=1, callbacks=[tw.ModelSummary(max_depth=2)], **QUIET).fit(module, make_loader())
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["Name", "Type", "Parameters"]
    assert lines[1:3] == [["net", "Sequential", "159"], ["net.0", "Linear", "117"]]
    assert lines[-1][:5] == ["159", "parameters,", "42", "of", "them"]
    with pytest.raises(ValueError, match="max_depth=-1 is below 0"):
        tw.ModelSummary(max_depth=-1)
