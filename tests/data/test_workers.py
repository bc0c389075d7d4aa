"""Random augmentation in loader workers depends on (seed, epoch, batch) only."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from deadlines import deadline, wait_until
from forked import run_python
from interpreters import run_command, search_path
from small import QUIET, Classifier, make_loader
from torch.utils.data import DataLoader, Dataset, get_worker_info

import trainwright as tw
from trainwright.data.combined import CombinedLoader
from trainwright.data.loaders import ShardedLoader


class Augmented(Dataset[Any]):
    """Draws from every generator for every item, and checks the worker info."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> list[float]:
        info = get_worker_info()
        assert info is not None
        assert isinstance(info.dataset, Augmented)
        return [index, random.random(), float(np.random.rand()), torch.rand(()).item()]


class InGroups(Augmented):
    def __getitems__(self, indices: list[int]) -> list[list[float]]:
        return [self[index] for index in indices]


def on_start(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Augmented)
    random.seed(worker_id)  # has no effect on the items


def drawn(shard: ShardedLoader, epoch: int, start: int = 0) -> list[Any]:
    shard.set_epoch(5, epoch, start)
    return [[part.tolist() for part in batch] if isinstance(batch, list) else batch.tolist() for batch in shard]


@pytest.fixture(params=["plain", "groups", "unbatched"])
def loaders(request: pytest.FixtureRequest) -> list[DataLoader[Any]]:
    dataset = InGroups() if request.param == "groups" else Augmented()
    settings: dict[str, Any] = {"batch_size": None if request.param == "unbatched" else 4, "worker_init_fn": on_start}
    if request.param == "unbatched":
        settings["collate_fn"] = torch.tensor
    made = [
        DataLoader(dataset, num_workers=2, persistent_workers=True, **settings),
        DataLoader(dataset, num_workers=1, **settings),
    ]
    return made


def test_augmentation_is_the_same_after_a_resume_and_with_other_workers(loaders: list[DataLoader[Any]]) -> None:
    persistent, single = (ShardedLoader(loader, rank=0, world_size=1, mode="train") for loader in loaders)
    first, second = drawn(persistent, 0), drawn(persistent, 1)
    assert first != second
    assert drawn(single, 1) == second
    assert drawn(single, 1, start=3) == second[3:]
    assert drawn(persistent, 0) == first
    items = [tuple(item) for item in torch.tensor(first).reshape(24, -1).tolist()] if len(first) == 24 else first
    assert len({str(item) for item in items}) == len(items)
    iterator = persistent._source._iterator  # type: ignore[attr-defined]
    iterator._shutdown_workers()


FAILING = """
import sys
from forked import run_python
from small import QUIET, Classifier, make_loader
import trainwright as tw

class Broken(Classifier):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and self.current_epoch == 1:
            raise ArithmeticError("boom")
        return super().training_step(batch, batch_idx)

loader = make_loader(num_workers=2, persistent_workers=True)
tw.Trainer(devices=2, max_epochs=3, **QUIET).fit(Broken(), loader)
"""


@pytest.mark.launch
def test_a_failed_job_with_workers_leaves_no_folder(tmp_path: Path) -> None:
    """Every worker has a temporary folder, which a killed worker leaves behind."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    with tempfile.TemporaryDirectory() as temporary:  # not pytest's, which may be too deep for workers
        place = {"TMPDIR": temporary, "PYTHONPATH": search_path(Path(__file__).parents[1])}
        done = run_command([sys.executable, script], **place)
        assert done.returncode == 1, done.stderr
        assert "rank 1 of 2 failed first (ArithmeticError: boom)" in done.stderr
        assert list(Path(temporary).glob("pymp-*")) == []


@pytest.mark.parametrize("persistent", [False, True])
def test_no_worker_outlives_its_run(persistent: bool) -> None:
    """Neither persistent workers nor the workers of an epoch that ended early, and nothing waits for them later."""

    def loader() -> DataLoader[Any]:
        return make_loader(40, 4, num_workers=2, persistent_workers=persistent)

    class Broken(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.current_epoch == 1 and batch_idx == 3:
                raise ArithmeticError("no such luck")
            return super().training_step(batch[0], batch_idx)

    tw.Trainer(max_epochs=2, **QUIET).fit(Classifier(), loader(), {"a": loader(), "b": loader()})
    assert multiprocessing.active_children() == []
    with pytest.raises(ArithmeticError):
        tw.Trainer(max_epochs=2, **QUIET).fit(Broken(), CombinedLoader([loader(), loader()]), loader())
    assert multiprocessing.active_children() == []
    tw.Trainer(limit_test_batches=2, **QUIET).test(Classifier(), loader())
    assert multiprocessing.active_children() == []
    began = time.monotonic()
    gc.collect()
    assert time.monotonic() - began < deadline(4 * 5)  # a wait for a worker takes 5 s


BLOCKED = """
import time, torch
from torch.utils.data import DataLoader, IterableDataset
from small import QUIET, Classifier
import trainwright as tw

class Blocked(IterableDataset):
    def __iter__(self):
        yield from [(torch.zeros(8), torch.tensor(0))] * 2
        time.sleep(1000)

tw.Trainer(max_steps=1, **QUIET).fit(Classifier(), DataLoader(Blocked(), num_workers=1))
"""


@pytest.mark.launch
def test_a_process_ends_although_its_worker_is_blocked(tmp_path: Path) -> None:
    script = tmp_path / "blocked.py"
    script.write_text(BLOCKED)
    environment = {**os.environ, "PYTHONPATH": search_path(Path(__file__).parents[1])}
    subprocess.run([sys.executable, str(script)], env=environment, timeout=deadline(60), check=True)


SIGNALLED = """
import os, signal, sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
from trainwright.data.loaders import ShardedLoader

data = TensorDataset(torch.arange(40.0))
persistent = sys.argv[1] == "persistent"
loader = ShardedLoader(DataLoader(data, num_workers=2, persistent_workers=persistent), rank=0, world_size=1, mode="train")
loader.set_epoch(0, 0)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, lambda *_: None)
batches = iter(loader)  # the workers begin here
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT) * 3:
    os.killpg(0, number)
    next(batches)
    time.sleep(0.02)
workers = list(next(iter(loader._with_workers))._workers)
assert all(worker.is_alive() for worker in workers)
print(*(worker.pid for worker in workers), flush=True)
if sys.argv[2] == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "leaves at once":
    os._exit(3)
if sys.argv[2] == "closes":
    loader.close()
"""


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("kept", ["persistent", "not"])
@pytest.mark.parametrize(
    "end", ["closes", pytest.param("ends", marks=pytest.mark.launch), "leaves at once", "is killed"]
)
def test_workers_live_through_signals_and_end_with_their_parent(kept: str, end: str, tmp_path: Path) -> None:
    temporary = Path(tempfile.mkdtemp(prefix="tw"))
    script = tmp_path / "signalled.py"
    script.write_text(SIGNALLED)
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": search_path(Path(__file__).parents[2])}
    if end == "ends":  # with the interpreter
        command = [sys.executable, str(script), kept, end]
        settings: dict[str, Any] = {"capture_output": True, "text": True, "start_new_session": True}
        done = subprocess.run(command, env=environment, timeout=deadline(100), check=False, **settings)
    else:
        done = run_python(script, kept, end, variables=environment)
    assert done.returncode == {"leaves at once": 3, "is killed": -9}.get(end, 0), done.stderr
    for pid in done.stdout.split():
        wait_until(lambda pid=pid: has_ended(int(pid)), 20.0)  # four times as long as torch's workers
    assert list(temporary.glob("pymp-*")) == []
    shutil.rmtree(temporary)
