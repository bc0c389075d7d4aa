"""Calls that start processes: from this test, a REPL, -c code, and a script without a guard."""

from __future__ import annotations

import gc
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from deadlines import deadline, wait_until
from interpreters import search_path
from small import make_data, make_loader
from started import GONE_SECONDS, ROOT, processes_of
from torch import Tensor, nn
from torch.utils.data import DataLoader

import trainwright as tw
from trainwright.errors import WorkerFailed


class Net(tw.Module):
    """In a module that no other process could import."""

    def __init__(self, failing_rank: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3))
        self.failing_rank = failing_rank
        self.notes: list[Any] = []
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(()), persistent=False)
        self.steps: Tensor
        self.scratch: Tensor

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.failing_rank == self.global_rank:
            raise ValueError("no such batch")
        self.steps += 1
        self.scratch += 2
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def on_train_epoch_end(self) -> None:
        self.notes.append(self.current_epoch)
        self.print(f"epoch {self.current_epoch} is over")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class History(tw.Callback):
    def __init__(self) -> None:
        self.lock: Any = None
        self.told = SimpleNamespace(validations=0)

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.lock = threading.Lock()  # cannot come back, and need not

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.told.validations += 1

    def state_dict(self) -> dict[str, Any]:
        return {"validations": self.told.validations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.told.validations = state["validations"]


class Ran(NamedTuple):
    trainer: tw.Trainer
    module: Net
    callbacks: list[Any]
    parameter: Tensor
    output: Any
    footprints: list[Any]


def footprint() -> Any:
    """Return what a call may not leave behind in this process."""
    process = psutil.Process()
    listening = [connection.laddr for connection in process.net_connections() if connection.status == "LISTEN"]
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    return dict(os.environ), threading.enumerate(), process.children(), listening, handlers, gc.isenabled()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """A fit on two processes, called from here: under a test runner."""
    patch = pytest.MonkeyPatch()
    capture = pytest.MonkeyPatch()
    shown: list[str] = []
    patch.setenv("OMP_NUM_THREADS", "1")
    capture.setattr(sys, "stdout", Recorder(shown))
    callbacks = [tw.EarlyStopping("val_loss"), tw.ModelCheckpoint(monitor="val_loss"), History()]
    module = Net()
    parameter = module.net[0].weight
    options = {"enable_progress_bar": False, "num_sanity_val_steps": 0, "callbacks": callbacks}
    folder = tmp_path_factory.mktemp("run")
    trainer = tw.Trainer(devices=2, accelerator="cpu", max_epochs=2, default_root_dir=folder, **options)
    assert trainer.world_size == 2
    try:
        before = footprint()
        trainer.fit(module, make_loader(24, 2), make_loader(24, 5))
        after = footprint()
        capture.undo()
        yield Ran(trainer, module, callbacks, parameter, "".join(shown), [before, after])
    finally:
        capture.undo()
        patch.undo()


class Recorder:
    """A stream like a notebook's, which is not a file."""

    def __init__(self, shown: list[str]) -> None:
        self._shown = shown

    def write(self, text: str) -> None:
        self._shown.append(text)

    def flush(self) -> None:
        pass


@pytest.mark.launch
def test_the_weights_come_back_into_the_same_module(ran: Ran, tmp_path: Path) -> None:
    alone = Net()
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    tw.Trainer(devices=1, accelerator="cpu", max_epochs=2, **quiet).fit(alone, make_loader(24, 4))
    assert ran.module.net[0].weight is ran.parameter
    for name, value in alone.net.state_dict().items():
        torch.testing.assert_close(ran.module.net.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    assert (ran.module.steps.item(), ran.module.scratch.item()) == (12.0, 24.0)


@pytest.mark.launch
def test_a_call_leaves_nothing_in_this_process(ran: Ran) -> None:
    assert ran.footprints[0] == ran.footprints[1]


@pytest.mark.launch
def test_counters_metrics_and_callbacks_come_back(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, (stopping, checkpoint, history) = ran.trainer, ran.callbacks
    assert (trainer.global_step, trainer.current_epoch, trainer.should_stop, trainer.interrupted) == (
        12,
        2,
        False,
        False,
    )
    assert sorted(trainer.callback_metrics) == ["loss", "val_loss"]
    assert sorted(trainer.logged_metrics) == ["loss", "val_loss"]
    assert list(trainer.progress_bar_metrics) == ["loss"]
    assert ran.module.trainer is trainer
    assert trainer.log_dir is not None
    assert Path(trainer.log_dir, "metrics.csv").read_text().count("\n") > 1
    assert tw.CSVLogger.__name__ == type(trainer.logger).__name__
    assert ran.module.notes == [], "attributes stay in the workers"
    assert Path(checkpoint.best_model_path, "manifest.json").is_file()
    assert checkpoint.best_model_score == pytest.approx(float(stopping.best_score))
    assert (stopping.wait_count, history.told.validations, history.lock) == (0, 2, None)
    assert "epoch 1 is over\n" in ran.output
    assert not torch.distributed.is_initialized()


@pytest.mark.launch
def test_later_calls_start_from_the_trained_weights(ran: Ran, tmp_path: Path, capsys: Any) -> None:
    trainer, module = ran.trainer, ran.module
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    with torch.no_grad():
        module.net[0].weight.zero_()
    predicted = trainer.predict(module, make_loader(21, 4), ckpt_path="best")
    assert [len(each) for each in predicted] == [4, 4, 4, 4, 4, 1]
    with torch.no_grad():
        expected = module.net(make_data(21).tensors[0])  # the best checkpoint's weights are in the module too
    torch.testing.assert_close(torch.cat(predicted), expected)
    for name, value in weights.items():
        torch.testing.assert_close(module.state_dict()[name], value)
    with pytest.warns(UserWarning, match="writes the weights only, from which no fit resumes"):
        assert trainer.save_checkpoint(tmp_path / "final.ckpt")
    assert Net.load_from_checkpoint(str(tmp_path / "final.ckpt")).steps == 12
    assert capsys.readouterr().err == ""


@pytest.mark.launch
def test_a_failing_rank_is_an_error_here(ran: Ran, capsys: pytest.CaptureFixture[str]) -> None:
    module = Net(failing_rank=1)
    with pytest.raises(
        WorkerFailed,
        match=r"trainer\.fit: rank 1 of 2 failed first \(ValueError: no such batch; In training_step, with batch 0",
    ) as caught:
        ran.trainer.fit(module, make_loader(8, 2))
    assert "On rank 1:\nTraceback (most recent call last):\n" in str(caught.value)
    assert 'raise ValueError("no such batch")\nValueError: no such batch' in str(caught.value)  # the line of the step
    printed = capsys.readouterr().err
    assert "[rank1] ValueError: no such batch" in printed
    assert module.net[0].weight.equal(Net().net[0].weight)


@pytest.mark.launch
def test_what_cannot_be_copied_to_the_workers_is_named(ran: Ran) -> None:
    loader: DataLoader[Any] = make_loader(8, 2)
    vars(loader.dataset)["guard"] = threading.Lock()
    with pytest.raises(
        TypeError, match=r"trainer\.fit runs in new processes.* train_dataloaders\.dataset\.guard \(lock\) cannot be"
    ):
        ran.trainer.fit(Net(), loader)
    with pytest.raises(TypeError, match=r"trainer\.test was given no dataloaders"):
        ran.trainer.test(Net())


def test_a_hand_written_loop_needs_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        tw.LaunchError, match=r"devices=2 needs .*test runner \(pytest\).*trainwright\.notebook_launcher\("
    ):
        tw.Accelerator(devices=2, cpu=True)
    with pytest.raises(TypeError, match=r"was given an int. Expected a function"):
        tw.notebook_launcher(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"num_processes=0 is not accepted. Pass an integer of at least 1"):
        tw.notebook_launcher(print, num_processes=0)
    assert tw.notebook_launcher(pow, (2, 5), num_processes=1) == 32
    monkeypatch.setattr("multiprocessing.parent_process", lambda: "another process")
    assert tw.notebook_launcher(pow, (2, 5), num_processes=1) == 32


PROGRAM = """
import os, pickle, signal, time, torch, sys
import trainwright as tw
from torch.utils.data import DataLoader, TensorDataset

class Net(tw.Module):
    def __init__(self, seconds=0):
        super().__init__()
        self.net, self.seconds = torch.nn.Linear(2, 1), seconds
        torch.nn.init.zeros_(self.net.weight)  # so that the distance moved is exact
    def training_step(self, batch, batch_idx):
        if self.seconds and batch_idx == 1:
            print("at", "work", flush=True)
        time.sleep(self.seconds)
        return scaled(self.net(batch[0]).mean())
    def test_step(self, batch, batch_idx):
        self.log("size", float(len(batch[0])), reduce_fx="sum")
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

def scaled(value):
    return 3 * value

def loop(start):
    accelerator = tw.Accelerator(devices=2, cpu=True)
    assert type(pickle.loads(pickle.dumps(Net()))) is Net  # loader workers return such objects
    total = accelerator.reduce(torch.tensor(start + accelerator.process_index))
    return {"total": total, "rank": accelerator.process_index}

def ignore_interrupts():
    signal.signal(signal.SIGINT, lambda *_: print("not", "now", flush=True))
    tw.Accelerator().wait_for_everyone()
    print("at", "work", flush=True)
    time.sleep(600)

QUIET = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
net = Net()
"""
FIT = """
trainer = tw.Trainer(devices=2, accelerator="cpu", max_epochs=1, strategy=STRATEGY, **QUIET)
before = net.net.weight.detach().clone()
trainer.fit(net, loader)
print("moved by", (before - net.net.weight).mean().item(), "in", trainer.global_step)
"""
STOPPED = """
def stop():
    if os.environ["RANK"] == "0":
        os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(600)

try:
    tw.notebook_launcher(stop, num_processes=2)
except tw.RunStopped as error:
    print("stopped with", error.code)
"""
LOOP = 'print("loop", tw.notebook_launcher(loop, (10,), num_processes=2))\n'


class Program:
    """A program in a separate process, all of whose processes are found by a tag."""

    def __init__(self, folder: Path) -> None:
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.tag = uuid.uuid4().hex
        place = {"PYTHONPATH": search_path(ROOT), "TMPDIR": str(self.temporary), "TEST_TAG": self.tag}
        self.environment = {**os.environ, **place, "OMP_NUM_THREADS": "1", "PYTHON_BASIC_REPL": "1"}

    def run(self, arguments: list[str], text: str | None = None) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            input=text or "",
            capture_output=True,
            text=True,
            timeout=deadline(120),
            check=False,
            env=self.environment,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        self.check_nothing_left()
        assert list(self.temporary.iterdir()) == []
        return done.stdout

    def processes(self) -> list[psutil.Process]:
        return processes_of(self.tag)

    def check_nothing_left(self, but: int = 0) -> None:
        wait_until(lambda: len(self.processes()) <= but, GONE_SECONDS)
        assert len(self.processes()) == but


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path)
    yield program
    for process in program.processes():
        process.kill()


@pytest.mark.launch
@pytest.mark.slow
def test_code_of_the_command_line_trains(started: Program) -> None:
    output = started.run(["-c", PROGRAM + FIT.replace("STRATEGY", "'auto'") + LOOP + STOPPED])
    assert "moved by 6.0 in 2\n" in output
    assert "loop {'total': tensor(21), 'rank': 0}\n" in output
    assert "stopped with 143\n" in output


@pytest.mark.launch
@pytest.mark.slow
def test_a_script_without_a_guard_runs_once(started: Program, tmp_path: Path) -> None:
    script = PROGRAM + "print('the script')\n" + FIT.replace("STRATEGY", "'ddp_spawn'")
    (tmp_path / "train.py").write_text(script)
    output = started.run(["train.py"])
    assert output.count("the script\n") == 1
    assert "moved by 6.0 in 2\n" in output


class Terminal:
    """An interactive interpreter in a terminal."""

    def __init__(self, started: Program) -> None:
        self.main, child = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-i", "-c", PROGRAM],
            stdin=child,
            stdout=child,
            stderr=child,
            env=started.environment,
            start_new_session=True,
            preexec_fn=lambda: _take_terminal(child),
        )
        os.close(child)
        self.seen = ""

    def type(self, line: str) -> None:
        self.seen = ""
        os.write(self.main, line.encode())

    def wait_for(self, text: str, seconds: float = 60.0) -> None:
        end = time.monotonic() + deadline(seconds)
        while text not in self.seen:
            assert time.monotonic() < end, self.seen
            if select.select([self.main], [], [], 0.2)[0]:
                self.seen += os.read(self.main, 1 << 16).decode(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.main)


def _take_terminal(child: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(child, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the tests may run where it is ignored


@pytest.mark.launch
@pytest.mark.slow
def test_a_terminal_is_interrupted_and_killed(started: Program) -> None:
    terminal = Terminal(started)
    try:
        terminal.wait_for(">>> ")
        terminal.type("trainer = tw.Trainer(devices=2, accelerator='cpu', max_epochs=99, **QUIET)\n")
        terminal.type("trainer.fit(Net(0.2), loader)\n")
        terminal.wait_for("at work")
        assert len(started.processes()) >= 3  # this one, two workers
        terminal.type("\x03")  # Ctrl-C
        terminal.wait_for("KeyboardInterrupt")
        terminal.wait_for(">>> ")
        started.check_nothing_left(but=1)
        terminal.type("trainer.interrupted, 20 + 3\n")
        terminal.wait_for("(True, 23)")
        assert list(started.temporary.iterdir()) == []
        terminal.type("tw.notebook_launcher(ignore_interrupts, num_processes=2)\n")
        terminal.wait_for("at work")
        terminal.type("\x03")
        terminal.wait_for("not now")
        terminal.type("\x03")
        terminal.wait_for("second Ctrl-C; the ranks were killed")
        terminal.wait_for("KeyboardInterrupt")
        started.check_nothing_left(but=1)
        terminal.type("trainer.fit(Net(0.2), loader)\n")
        terminal.wait_for("at work")
        terminal.process.send_signal(signal.SIGKILL)
        terminal.process.wait()
        started.check_nothing_left()
    finally:
        terminal.close()


LAUNCHERS = """
import sys
import trainwright as tw

def settings():
    accelerator = tw.Accelerator()
    environment = accelerator.engine.environment
    return [accelerator.num_processes, accelerator.mixed_precision, str(accelerator.device), environment.num_nodes]
"""


@pytest.mark.launch
def test_the_arguments_of_the_launchers_are_accelerates(tmp_path: Path) -> None:
    calls = "tw.debug_launcher(settings), tw.notebook_launcher(settings, (), 2, 'bf16', use_port='29500')"
    printed = Program(tmp_path).run(["-c", f"{LAUNCHERS}\nprint('found', ({calls}))"])
    assert "found ([2, 'no', 'cpu', 1], [2, 'bf16', 'cpu', 1])" in printed


@pytest.mark.launch
def test_a_search_in_started_processes_returns_its_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = tw.Trainer(devices=2, accelerator="cpu", max_epochs=1, **settings)
    search = tw.Tuner(trainer).lr_find(Net(), make_loader(24, 2), num_training=15, update_attr=False)
    assert search is not None
    assert len(search.results["lr"]) == len(search.results["loss"]) == 15
