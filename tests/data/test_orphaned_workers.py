"""A loader worker whose parent is killed, however early, ends too and leaves no temporary folder."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from deadlines import deadline
from started import Started, python

KILLED_AT_ONCE = """
import os, signal, time
from torch.utils.data import DataLoader
from trainwright.data.loaders import ShardedLoader

parent = os.getpid()


def wait_for_its_end():
    while os.getppid() == parent:
        time.sleep(0.01)


os.register_at_fork(after_in_child=wait_for_its_end, after_in_parent=lambda: os.kill(parent, signal.SIGKILL))
shard = ShardedLoader(DataLoader(range(8), num_workers=2), rank=0, world_size=1, mode="train")
shard.set_epoch(1, 0)
next(iter(shard))
"""


@pytest.mark.launch
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_worker_whose_parent_was_killed_at_once_ends(tmp_path: Path) -> None:
    job = Started(python("-c", KILLED_AT_ONCE), tmp_path)
    try:
        assert job.process.wait(timeout=deadline(60)) == -signal.SIGKILL
        job.check_nothing_left()
    finally:
        job.close()
