"""The checks of memory_snapshot, and the time of its file. The record itself is a fake, since only CUDA makes one."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from small import QUIET, Classifier, make_loader

import trainwright as tw
from trainwright.callbacks.memory_snapshot import MemorySnapshot
from trainwright.cli import TrainwrightCLI
from trainwright.devices import cuda


@pytest.mark.host
def test_a_snapshot_needs_a_device_that_records() -> None:
    for when in ("on_oom", 3):
        with pytest.raises(ValueError, match=rf"memory_snapshot={when!r} needs CUDA, .* runs on cpu. Omit it"):
            tw.Trainer(**QUIET, memory_snapshot=when)


@pytest.mark.parametrize("when", [0, -1, True, 1.5, "oom"])
def test_a_wrong_snapshot_is_named(when: Any) -> None:
    with pytest.raises(ValueError, match="expected 'on_oom', a number of optimizer steps of at least 1, or None"):
        tw.Trainer(**QUIET, memory_snapshot=when)


def test_a_snapshot_is_no_file_of_a_trial_run() -> None:
    with pytest.raises(ValueError, match="fast_dev_run writes no file, but memory_snapshot=2 asks for one"):
        tw.Trainer(**QUIET, memory_snapshot=2, fast_dev_run=True)


class Fails(Classifier):
    error: Exception | None = None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.error is not None and batch_idx == 4:
            raise self.error


@pytest.mark.parametrize(("when", "error", "step"), [
    ("on_oom", torch.OutOfMemoryError("full"), 5),
    ("on_oom", ValueError("other"), None),
    ("on_oom", None, None),
    (2, None, 2),
    (20, None, 11),
    (20, ValueError("other"), 5),
])  # fmt: skip
def test_snapshot_is_written_once_when_it_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str | int, error: Exception | None, step: int | None
) -> None:
    calls: list[Any] = []

    def save(path: str) -> None:
        calls.append(trainer.global_step)
        Path(path).write_bytes(b"record")

    monkeypatch.setattr(cuda, "record_memory", calls.append)
    monkeypatch.setattr(cuda, "save_memory_record", save)
    module = Fails()
    module.error = error
    trainer = tw.Trainer(
        **{**QUIET, "logger": tw.CSVLogger(tmp_path, name=None)}, max_epochs=1, callbacks=MemorySnapshot(when)
    )
    with nullcontext() if error is None else pytest.raises(type(error)):
        trainer.fit(module, make_loader())
    written = list(tmp_path.rglob("memory-rank0.pickle"))
    assert calls[0] is True
    assert calls[-1] is False
    assert [call for call in calls if not isinstance(call, bool)] == ([] if step is None else [step])
    assert [path.read_bytes() for path in written] == ([] if step is None else [b"record"])
    assert all(path.parent.name == "version_0" for path in written)


@pytest.mark.host
def test_a_command_line_takes_a_number_of_steps_as_an_integer(capsys: pytest.CaptureFixture[str]) -> None:
    for text, expected in (("on_oom", "'on_oom'"), ("3", "3")):
        with pytest.raises(SystemExit):
            TrainwrightCLI(Classifier, args=[f"--trainer.memory_snapshot={text}"], trainer_defaults=QUIET, run=False)
        assert f"memory_snapshot={expected} needs CUDA" in capsys.readouterr().err
