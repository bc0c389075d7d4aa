"""RichProgressBar in a pseudo-terminal, in a notebook and elsewhere, and RichModelSummary."""

from __future__ import annotations

import copy
import fcntl
import os
import pickle
import pty
import re
import struct
import sys
import termios
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deadlines import deadline
from jobs import run_job
from small import QUIET, Classifier, Stream, make_loader

import trainwright as tw
from trainwright.callbacks.rich_progress_bar import RichProgressBarTheme

SETTINGS = {**QUIET, "enable_progress_bar": True}
COLORS = re.compile(r"\x1b\[[0-9;]*m")


class Shown(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("shown", 0.123456, prog_bar=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if dataloader_idx == 0:
            self.log("val_shown", 2.0, prog_bar=True, add_dataloader_idx=False)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[1]


class Terminal:
    """A pseudo-terminal for stdout and stderr, the text written to it, and the lines that it shows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
        monkeypatch.setenv("TERM", "xterm")
        for name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            monkeypatch.delenv(name, raising=False)
        self._leader, self._follower = pty.openpty()
        fcntl.ioctl(self._follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        self._streams = [os.fdopen(os.dup(self._follower), "w") for _ in range(2)]
        monkeypatch.setattr(sys, "stdout", self._streams[0])
        monkeypatch.setattr(sys, "stderr", self._streams[1])
        monkeypatch.setattr("rich.console._STDERR_FILENO", self._follower)  # where rich asks for the size
        monkeypatch.setattr("rich.console._STD_STREAMS", (self._follower,))
        self._read = b""
        self._thread = threading.Thread(target=self._follow, daemon=True)  # or a full buffer would stop the run
        self._thread.start()

    def _follow(self) -> None:
        try:
            while part := os.read(self._leader, 1 << 16):
                self._read += part
        except OSError:  # the last writer has closed it
            return

    def close(self) -> str:
        """Return all that was written."""
        for stream in self._streams:
            stream.close()
        os.close(self._follower)
        self._thread.join(deadline(30))
        os.close(self._leader)
        return self._read.decode()


def screen(text: str) -> list[str]:
    """Return the lines that a terminal shows after it was written this."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", COLORS.sub("", text)):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part.endswith("A"):
            row -= int(part[2:-1])
        elif part not in ("\r", "\x1b[?25l", "\x1b[?25h"):  # the cursor is hidden and shown
            assert not part.startswith("\x1b"), part
            lines[row] = part if lines[row] == "" else lines[row] + part
    return [line.rstrip() for line in lines]


def in_terminal(monkeypatch: pytest.MonkeyPatch, work: Callable[[], Any], columns: int = 120) -> str:
    with monkeypatch.context() as patch:
        terminal = Terminal(patch, columns)
        try:
            work()
        finally:
            shown = terminal.close()
    return shown


def test_prints_appear_above_the_bars_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Speaks(Shown):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 5:
                print("printed [bold]as is[/bold]", self.current_epoch)
                self.trainer.print("by the trainer")
            return super().training_step(batch, batch_idx)

    def work() -> None:
        bar = tw.RichProgressBar(refresh_seconds=0.0)
        trainer = tw.Trainer(max_epochs=2, callbacks=[bar], **SETTINGS)
        assert trainer.progress_bar_callback is bar
        assert not any(isinstance(each, tw.TQDMProgressBar) for each in trainer.callbacks)
        streams = sys.stdout, sys.stderr
        trainer.fit(Speaks(), make_loader(), make_loader(8))
        trainer.test(Speaks(), make_loader(8), verbose=False)
        trainer.predict(Speaks(), make_loader(12))
        assert streams == (sys.stdout, sys.stderr)

    shown = in_terminal(monkeypatch, work)
    lines = screen(shown)
    said = ["printed [bold]as is[/bold] 0", "by the trainer"]
    assert lines[:4] == [*said, *(line.replace("0", "1") for line in said)]
    starts = ["Epoch 1 ", "Test ", "Predict "]
    assert [line.startswith(start) for line, start in zip(lines[4:], starts, strict=False)] == [True] * 3
    assert [line.split("it/s")[-1].strip() for line in lines[4:7]] == ["shown=0.123 val_shown=2", "", ""]
    assert [re.search(r"\d+/\d+", line)[0] for line in lines[4:7]] == ["11/11", "2/2", "3/3"]  # type: ignore[index]
    assert lines[7:] == [""]
    plain = COLORS.sub("", shown)
    assert "Sanity check" in plain
    assert re.search(r"Epoch 0 .*\r?\n.*Validation .* 1/2", plain)


def test_loop_that_ends_at_its_first_update_shows_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        bar = tw.RichProgressBar(refresh_seconds=1e3)
        tw.Trainer(callbacks=[bar], **SETTINGS).test(Shown(), make_loader(8), verbose=False)

    [line, _] = screen(in_terminal(monkeypatch, work))
    assert float(re.search(r" 2/2 .* ([\d.]+)it/s", line)[1]) > 0  # type: ignore[index]


def test_bars_keep_epochs_and_show_unknown_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        bar = tw.RichProgressBar(
            leave=True, theme=RichProgressBarTheme(metrics_format=".1f", metrics_text_delimiter=" | ")
        )
        loader = torch.utils.data.DataLoader(Stream(12), batch_size=4)
        trainer = tw.Trainer(max_epochs=2, callbacks=[bar], **SETTINGS)
        trainer.fit(Shown(), loader, [make_loader(4), make_loader(4)])

    lines = screen(in_terminal(monkeypatch, work))
    assert len(lines) == 3
    for epoch, line in enumerate(lines[:2]):
        assert re.fullmatch(rf"Epoch {epoch} .* 3/\? .*it/s shown=0.1( \| val_shown=2.0)?", line), line


def test_a_run_that_fails_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(Shown):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            if not self.trainer.sanity_checking:
                raise RuntimeError("it fails")

    def work() -> None:
        streams = sys.stdout, sys.stderr
        trainer = tw.Trainer(max_epochs=1, callbacks=[tw.RichProgressBar(refresh_seconds=0.0)], **SETTINGS)
        with pytest.raises(RuntimeError, match="it fails"):
            trainer.fit(Fails(), make_loader(8), make_loader(8))
        assert streams == (sys.stdout, sys.stderr)
        print("after it")

    first, second, third = screen(in_terminal(monkeypatch, work, columns=60))
    assert first.startswith("Epoch 0 ")
    assert (second, third) == ("after it", "")


def test_it_prints_to_a_file_what_tqdm_does(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a log with colors has no cursor
    lines = []
    for bar in (tw.RichProgressBar(), tw.TQDMProgressBar()):
        trainer = tw.Trainer(max_epochs=2, callbacks=[bar], **SETTINGS)
        trainer.fit(Shown(), make_loader(), make_loader(8))
        lines.append([re.sub(r"in \S+ s", "", line) for line in capsys.readouterr().err.splitlines()])
    assert len(lines[0]) == 2
    assert lines[0] == lines[1]


def test_subclass_sets_columns_and_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.progress import TextColumn

    class Own(tw.RichProgressBar):
        def configure_columns(self, trainer: Any) -> list[Any]:
            return [TextColumn("{task.description}: {task.completed}"), *super().configure_columns(trainer)[:0]]

        def get_metrics(self, trainer: Any, module: Any) -> dict[str, Any]:
            return {**super().get_metrics(trainer, module), "tensor": torch.tensor(0.5), "count": 3}

    def work() -> None:
        tw.Trainer(max_epochs=1, callbacks=[Own()], **SETTINGS).fit(Shown(), make_loader(8))

    assert screen(in_terminal(monkeypatch, work))[0] == "Epoch 0: 2 shown=0.123 tensor=0.5 count=3"


def test_a_bar_of_ones_own_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    class Percent(tw.ProgressBar):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
            assert self.total_val_batches == 5
            self.print(f"{(batch_idx + 1) / self.total_train_batches:.0%}", self.get_metrics(trainer, module))

        def on_validation_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            if self.has_dataloader_changed(args[3]):
                totals.append(self.total_val_batches_current_dataloader)

        def on_test_batch_end(self, *args: Any) -> None:
            totals.append(self.total_test_batches_current_dataloader)

        def on_predict_batch_end(self, *args: Any) -> None:
            totals.append(self.total_predict_batches_current_dataloader)

    totals: list[Any] = []
    bar = Percent()
    trainer = tw.Trainer(max_epochs=1, callbacks=[bar], **SETTINGS)
    assert trainer.progress_bar_callback is bar
    trainer.fit(Shown(), make_loader(8), [make_loader(12), make_loader(8)])
    bar.reset_dataloader_idx_tracker()
    trainer.test(Shown(), make_loader(4), verbose=False)
    trainer.predict(Shown(), make_loader(4))
    assert totals == [2, 2, 3, 2, 1, 1]  # the sanity check takes two batches of every loader
    assert capsys.readouterr().out == "50% {'shown': 0.123456}\n100% {'shown': 0.123456}\n"
    bar.disable()
    assert bar.is_disabled
    bar.enable()
    assert bar.is_enabled


def test_rich_rejects_wrong_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="time='no style' of the theme is not a style"):
        tw.RichProgressBar(theme=RichProgressBarTheme(time="no style"))
    with pytest.raises(ValueError, match="refresh_rate=-1 is not accepted"):
        tw.RichProgressBar(-1)
    monkeypatch.setitem(sys.modules, "rich", None)
    for kind in (tw.RichProgressBar, tw.RichModelSummary):
        with pytest.raises(ImportError, match=r'pip install "trainwright\[rich\]"'):
            kind()


def test_a_copy_has_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    copies_callback = tw.LambdaCallback(
        on_train_batch_end=lambda *_: copies.extend([copy.deepcopy(bar), pickle.loads(pickle.dumps(bar))])
    )
    copies: list[Any] = []
    bar = tw.RichProgressBar(refresh_seconds=0.0)
    trainer = tw.Trainer(max_epochs=1, callbacks=[bar, copies_callback], **SETTINGS)
    in_terminal(monkeypatch, lambda: trainer.fit(Shown(), make_loader(4)))
    assert len(copies) == 2


def on_ranks(folder: Path) -> Any:
    """Show bars on both ranks of a job, where the second has to show nothing."""
    import io

    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream, bar = Stream(), tw.RichProgressBar(console_kwargs={"file": (file := Stream())})
    summary = tw.RichModelSummary()
    os.environ["TERM"] = "xterm"
    sys.stdout = stream
    try:
        tw.Trainer(max_epochs=1, devices=2, strategy="ddp", callbacks=[bar, summary], **SETTINGS).fit(
            Shown(), make_loader(16)
        )
    finally:
        sys.stdout = sys.__stdout__
    return {"bar": file.getvalue(), "summary": stream.getvalue(), "is_enabled": bar.is_enabled}


def test_rank_0_alone_shows_them(tmp_path: Path) -> None:
    first, second = run_job(on_ranks, 2, tmp_path / "job")
    assert "Epoch 0" in first["bar"]
    assert "Sequential" in first["summary"]
    assert second == {"bar": "", "summary": "", "is_enabled": False}


def test_rich_summary_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    module = Classifier()
    for kind in (tw.ModelSummary, tw.RichModelSummary):
        trainer = tw.Trainer(max_epochs=1, callbacks=[kind(max_depth=2)], **QUIET)
        assert sum(isinstance(each, tw.ModelSummary) for each in trainer.callbacks) == 1
        trainer.fit(module, make_loader(8))
    text = re.sub(r"^trained for .*\n", "", capsys.readouterr().out, flags=re.MULTILINE)
    plain, _, drawn = text.partition("MiB\n")
    rows = [[cell for cell in re.split(r"[^\w.:\[\]]+", line) if cell] for line in drawn.splitlines()]
    assert [row for row in rows if row][:-1] == [line.split() for line in plain.splitlines()[:-1]]
    assert drawn.splitlines()[-1] + "\n" == plain.splitlines()[-1] + "MiB\n"


NOTEBOOK = """
import sys
sys.path.insert(0, {tests!r})
import trainwright as tw
from callbacks.test_rich import SETTINGS, Shown, make_loader
trainer = tw.Trainer(max_epochs=1, callbacks=[tw.RichProgressBar(leave=True), tw.RichModelSummary()], **SETTINGS)
trainer.fit(Shown(), make_loader(), make_loader(8))
print("printed")
"""


@pytest.mark.slow
@pytest.mark.launch
def test_bars_are_live_in_a_notebook() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the clients
        import nbformat
        from notebook_client import run_notebook

        source = NOTEBOOK.format(tests=str(Path(__file__).parents[1]))
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
        run_notebook(notebook)
    widgets = notebook.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    shown = [output["data"]["text/plain"] for each in widgets.values() for output in each["state"].get("outputs", ())]
    assert any(re.search(r"Epoch 0 .* 11/11 .*shown=0.123", COLORS.sub("", text)) for text in shown), shown
    outputs = notebook.cells[0].outputs
    assert any("Sequential" in str(each.get("data")) for each in outputs)
    assert any(each.get("text") == "printed\n" for each in outputs)
