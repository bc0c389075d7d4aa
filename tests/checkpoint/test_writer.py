"""Saves in the background: their files, their failures, and saves that the process leaves behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deadlines import deadline
from held import held

from trainwright.checkpoint import store
from trainwright.checkpoint.discovery import find_checkpoints
from trainwright.checkpoint.filesystem import sweep_temporaries
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.checkpoint.store import CheckpointWriter
from trainwright.checkpoint.tensors import Piece
from trainwright.distributed.ranks import Ranks
from trainwright.errors import CheckpointError


class Run:
    """A writer, and the state of a run that goes on."""

    def __init__(self) -> None:
        self.weight, self.average = torch.zeros(40, 30), torch.zeros(3)
        self.history: dict[str, Any] = {"losses": [], "average": self.average}
        self.writer = CheckpointWriter(Ranks(), lambda: False)
        self.step = 0

    def train(self) -> None:
        self.step += 1
        self.weight.add_(1.0)
        self.average.add_(0.5)
        self.history["losses"].append(float(self.step))

    def save(self, path: str, blocking: bool = False, **more: Any) -> None:
        self.writer.save(
            path,
            sections={"model": [Piece("weight", (40, 30), 0, self.weight)]},
            state={**self.history, **more},
            rank_state={"step": self.step, "average": self.average},
            header={"step": self.step, "epoch": 0, "strategy": "none"},
            blocking=blocking,
        )

    def check(self, path: str, step: int) -> None:
        checkpoint = open_checkpoint(path)
        assert checkpoint.step == step
        assert torch.equal(checkpoint.read_tensor("model", "weight"), torch.full((40, 30), float(step)))
        state = checkpoint.run_state()
        assert state["losses"] == [float(each) for each in range(1, step + 1)]
        assert torch.equal(state["average"], torch.full((3,), 0.5 * step))
        assert checkpoint.rank_state(0)["step"] == step


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run()
    yield made
    made.writer.drop()


def files_of(path: str) -> dict[str, Any]:
    manifest = open_checkpoint(path)._manifest
    return {"files": manifest.files, "sections": manifest.sections}


def test_what_is_written_is_what_a_blocking_save_writes(run: Run, tmp_path: Path) -> None:
    now, later = f"held://{tmp_path}/now.ckpt", f"held://{tmp_path}/later.ckpt"
    run.train()
    run.save(now, blocking=True)
    with held() as files:
        run.save(later)
        save = run.writer.in_flight
        assert save is not None
        assert files.waits.wait(deadline(20))
        for _ in range(3):
            run.train()  # while it is written
        run.history["losses"].append("a change")
        assert not save.is_committed
        assert [entry.path for entry in find_checkpoints(f"held://{tmp_path}")] == [now]
        assert files.writers == {"trainwright-save-remote"}  # started by the background save
    run.writer.finish()
    assert save.is_committed
    run.check(later, 1)
    assert files_of(later) == files_of(now)
    assert run.writer.in_flight is None


def test_one_is_in_flight(run: Run, tmp_path: Path) -> None:
    """The next save, whichever it is, begins when the one before has committed, and with the state as it is then."""
    first, second = f"held://{tmp_path}/1.ckpt", f"held://{tmp_path}/2.ckpt"
    for blocking in (False, True):
        with held() as files:
            run.train()
            run.save(f"{first}{blocking}")
            assert files.waits.wait(deadline(20))
            opener = threading.Timer(0.3, files.gate.set)
            opener.start()
            run.train()
            step = run.step
            run.save(f"{second}{blocking}", blocking)  # it waits for the opener
            assert files.gate.is_set()
            run.check(f"{first}{blocking}", step - 1)
            opener.join()
        run.writer.finish()
        run.check(f"{second}{blocking}", step)


def test_memory_is_allocated_once(run: Run, tmp_path: Path) -> None:
    places = set()
    for _ in range(4):
        run.train()
        run.save(f"{tmp_path}/{run.step}.ckpt")
        run.writer.finish()
        places.add(run.writer._memory._memory.data_ptr())
    assert len(places) == 1
    run.check(f"{tmp_path}/4.ckpt", 4)
    run.writer.release()
    assert run.writer._memory._memory.numel() == 0


def test_a_failure_comes_out_once_and_changes_nothing(run: Run, tmp_path: Path) -> None:
    run.train()
    run.save(f"held://{tmp_path}/good.ckpt", blocking=True)
    for outlet in ("finish", "the next save", "the next blocking save"):
        with held() as files:
            files.is_full = True
            files.gate.set()
            run.save(f"held://{tmp_path}/bad.ckpt")
            ask = partial(run.save, f"held://{tmp_path}/next.ckpt", blocking=outlet == "the next blocking save")
            with pytest.raises(
                CheckpointError, match=r"bad\.ckpt was not written: .*the disk is full.* bytes\) are free"
            ):
                (run.writer.finish if outlet == "finish" else ask)()
        run.writer.finish()
        assert [entry.path for entry in find_checkpoints(f"held://{tmp_path}")] == [f"held://{tmp_path}/good.ckpt"]
    run.save(f"held://{tmp_path}/next.ckpt")
    run.writer.finish()
    run.check(f"held://{tmp_path}/next.ckpt", 1)


def test_what_cannot_be_stored_comes_out_alike(run: Run, tmp_path: Path) -> None:
    """Not at once on the rank that has it: the others learn of it too, when they wait."""
    run.save(f"{tmp_path}/a.ckpt", hook=print)
    with pytest.raises(CheckpointError, match=r"a\.ckpt was not written: state\.hook is a builtins"):
        run.writer.finish()
    assert os.listdir(tmp_path) == []


def test_the_next_one_may_be_given_up(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "DROP_SECONDS", deadline(60.0))
    with held() as files:
        run.train()
        run.save(f"held://{tmp_path}/a.ckpt")
        assert files.waits.wait(deadline(20))
        threading.Timer(0.2, files.gate.set).start()
        run.writer.drop()  # it ends within the time that is left to it
    assert run.writer.in_flight is None
    run.check(f"held://{tmp_path}/a.ckpt", 1)


def interrupted_in(callers: list[str], call: Callable[[], None]) -> None:
    """Make the call, and send a Ctrl-C when this thread waits within all of the callers."""

    def waits_in(name: str) -> bool:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        if frame.f_code.co_filename != threading.__file__:
            return False
        names = set()
        while frame is not None:
            names.add(frame.f_code.co_name)
            frame = frame.f_back  # type: ignore[assignment]
        return name in names

    limit = deadline(20)

    def interrupt() -> None:
        end = time.monotonic() + limit
        for name in callers:
            while not waits_in(name):
                if time.monotonic() > end:
                    return
                time.sleep(0.001)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    interrupter.join()


@pytest.mark.parametrize("callers", [["finish"], ["finish", "drop"]], ids=str)
def test_an_interrupted_wait_commits_nothing(callers: list[str], run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    """The next background save does not overwrite data that is still being written."""
    monkeypatch.setattr(store, "DROP_SECONDS", 0.01 if len(callers) == 1 else deadline(60.0))
    first, second = f"held://{tmp_path}/1.ckpt", f"held://{tmp_path}/2.ckpt"
    with held() as files:
        run.train()
        run.save(first)
        save = run.writer.in_flight
        assert save is not None
        assert files.waits.wait(deadline(20))
        interrupted_in(callers, run.writer.finish)
        assert not save.is_committed
        assert not save.wait(0.0)
        assert run.writer.in_flight is None
        run.train()
        run.save(second)
    run.writer.finish()
    assert save.wait(deadline(20))
    assert save.is_committed
    run.check(first, 1)
    run.check(second, 2)


SCRIPT = """
import os, resource, sys, time
from test_writer import Run
from pathlib import Path
folder, ending = Path(sys.argv[1]), sys.argv[2]
run = Run()
run.train()
run.save(f"{folder}/first.ckpt", blocking=True)
run.train()
sync = os.fsync
def slow(descriptor):
    if ending == "killed":
        time.sleep(600)
    time.sleep(0.1)
    sync(descriptor)
os.fsync = slow
if ending == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
run.save(f"{folder}/second.ckpt")
run.train()
print("begun", flush=True)
if ending == "error":
    raise ValueError("of the program")
if ending == "killed":
    time.sleep(600)
"""


@pytest.mark.launch
def test_an_exiting_process_waits_for_its_save_unless_killed(tmp_path: Path) -> None:
    places = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    script, started = f"import sys\nsys.path[:0] = {places!r}\n{SCRIPT}", {}
    for ending in ("plain", "error", "full", "killed"):
        (tmp_path / ending).mkdir()
        started[ending] = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", script, str(tmp_path / ending), ending],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    for ending, process in started.items():
        folder = tmp_path / ending
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        if ending == "killed":
            process.send_signal(signal.SIGKILL)
        _, said = process.communicate(timeout=deadline(60))
        assert process.returncode == {"error": 1, "killed": -9}.get(ending, 0), said
        latest = find_checkpoints(str(folder))[-1]
        # The interpreter has waited for the second one, where that could be written.
        assert latest.path == f"{folder}/{'second' if ending in ('plain', 'error') else 'first'}.ckpt"
        Run().check(latest.path, 2 if ending in ("plain", "error") else 1)
        assert ("File too large" in said) == (ending == "full")
        assert len(sweep_temporaries(str(folder))) == (ending == "killed")
        assert sorted(os.listdir(folder)) == sorted({"first.ckpt", Path(latest.path).name})


def test_nothing_is_left_of_a_writer(tmp_path: Path) -> None:
    run = Run()
    run.save(f"{tmp_path}/a.ckpt")
    run.writer.finish()
    writer = weakref.ref(run.writer)
    del run
    gc.collect()
    assert writer() is None
    assert not any(thread.name == "trainwright-save" for thread in threading.enumerate())
