"""A full disk, or a limit on files: one clear error alike on both ranks, the old checkpoint whole, nothing left over."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from interpreters import run_command
from jobs import run_job
from torch import nn

import trainwright as tw
from trainwright.checkpoint.reader import open_checkpoint

SPACE = "space"
MIB = 1 << 20


def attempt(accelerator: tw.Accelerator, path: Path) -> str:
    """Save, and return the error's text."""
    with pytest.raises(tw.CheckpointError) as raised:
        accelerator.save_state(str(path))
    return str(raised.value)


def limited(accelerator: tw.Accelerator, path: Path, ranks: tuple[int, ...]) -> str:
    """Save while files of these ranks may not become longer than 64 KiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if accelerator.process_index in ranks:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        return attempt(accelerator, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fill(folder: Path) -> dict[str, Any]:
    """Save under all faults, on all ranks. `folder/space` may be a small file system."""
    accelerator = tw.Accelerator(cpu=True)
    module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))  # of 2 MiB, half of it by one rank
    prepared = accelerator.prepare(module)
    space = folder / SPACE
    space.mkdir(exist_ok=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(space / "old.ckpt"))
    before = {name: value.clone() for name, value in prepared.state_dict().items()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    found: dict[str, Any] = {
        "limit on both": limited(accelerator, space / "new.ckpt", (0, 1)),
        "limit on rank 1": limited(accelerator, space / "new.ckpt", (1,)),
        "limit on rank 0": limited(accelerator, space / "new.ckpt", (0,)),
    }
    if space.is_mount():
        if accelerator.is_main_process:
            (space / "filler").write_bytes(bytes(MIB))  # so that one rank's half finds room and the other's does not
        accelerator.wait_for_everyone()
        found["full"] = attempt(accelerator, space / "new.ckpt")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (space / "filler").unlink()
    accelerator.wait_for_everyone()
    found["left"] = sorted(os.listdir(space))
    accelerator.load_state(str(space / "old.ckpt"), weights_only=True)
    found["is intact"] = all(torch.equal(value, before[name]) for name, value in prepared.state_dict().items())
    accelerator.save_state(str(space / "new.ckpt") if not space.is_mount() else str(folder / "new.ckpt"))
    return found


def check(ranks: list[dict[str, Any]], space: Path, *, is_mounted: bool) -> None:
    assert ranks[0] == ranks[1]  # the errors are alike to the letter
    found = ranks[0]
    target = space / "new.ckpt"
    for case, failing in (("limit on both", 0), ("limit on rank 1", 1), ("limit on rank 0", 0)):
        assert found[case].startswith(f"checkpoint {target} was not written: rank {failing}: ")
        assert f"model-0000{failing}.safetensors: a file may not become that large (OSError: [Errno 27]" in found[case]
        assert " bytes) are free). Raise this process's limit (ulimit -f) or write" in found[case]
        assert "Earlier checkpoints are unchanged." in found[case]
        assert ("(ranks 1 failed too)" in found[case]) == (case == "limit on both")
    if is_mounted:
        assert found["full"].startswith(f"checkpoint {target} was not written: rank ")
        assert "the disk is full (OSError: [Errno 28] No space left on device; " in found["full"]
        assert "MiB (" in found["full"]
        assert "Free space there or write checkpoints to another directory" in found["full"]
    assert ("full" in found) == is_mounted
    assert found["left"] == ["old.ckpt"]
    assert found["is intact"]


def test_a_limit_on_file_sizes_fails_the_save_on_all_ranks(tmp_path: Path) -> None:
    check(run_job(fill, 2, tmp_path), tmp_path / SPACE, is_mounted=False)
    assert open_checkpoint(str(tmp_path / SPACE / "new.ckpt")).extra_files == []


MOUNT = "mount -t tmpfs -o size=5m tmpfs space"


def can_mount(folder: Path) -> bool:
    """Return whether this user may mount a small file system in a separate namespace."""
    (folder / SPACE).mkdir()
    done = subprocess.run(["unshare", "--mount", "sh", "-c", MOUNT], cwd=folder, capture_output=True, check=False)
    return done.returncode == 0


@pytest.mark.launch
def test_a_save_on_a_full_disk_fails_on_all_ranks(tmp_path: Path) -> None:
    if not can_mount(tmp_path):
        pytest.skip("no small file system can be mounted here; the limit on files above shows the same error path")
    work = [sys.executable, "-W", "error", jobs.__file__, __file__, fill.__name__, str(tmp_path)]
    command = [sys.executable, "-m", "trainwright.launch.processes", '{"num_processes": 2}', *work]
    mounted = ["unshare", "--mount", "sh", "-c", f'{MOUNT} && exec "$@"', "sh", *command]
    done = run_command(mounted, folder=tmp_path, seconds=180)
    assert done.returncode == 0, done.stderr[-3000:]
    check([torch.load(tmp_path / f"result-{rank}.pt") for rank in range(2)], tmp_path / SPACE, is_mounted=True)
