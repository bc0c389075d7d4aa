"""A collective call by only one rank of a raw loop while the other trains on: an error that names both, no hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import ON_HOST, loss_of, make_loader, make_net

import trainwright as tw

pytestmark = pytest.mark.skipif(not ON_HOST, reason="starts ranks on the CPU")


def train(folder: Path, call: str) -> str:
    """Make a call, or leave the loop, only on rank 0. Return the error on this rank."""
    accelerator = tw.Accelerator(cpu=True)
    net = make_net()
    net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), make_loader(64))
    try:
        for number, batch in enumerate(loader):
            accelerator.backward(loss_of(net, batch))
            optimizer.step()
            optimizer.zero_grad()
            if number == 1 and accelerator.is_main_process:
                if call == "leave":
                    break
                if call == "save_state":
                    accelerator.save_state(str(folder / "a.ckpt"))
                else:
                    accelerator.wait_for_everyone()
        if call == "leave":
            accelerator.wait_for_everyone()
    except RuntimeError as error:
        return str(error)
    return ""


def save_under_ddp(folder: Path) -> str:
    return train(folder, "save_state")


def wait_under_ddp(folder: Path) -> str:
    return train(folder, "wait_for_everyone")


def leave_early(folder: Path) -> str:
    return train(folder, "leave")


@pytest.mark.parametrize(("job", "call"), [(save_under_ddp, "a save of step 2"), (wait_under_ddp, "wait_for_everyone")])
def test_a_rank_that_calls_alone_is_told_so(job: Any, call: str, tmp_path: Path) -> None:
    told = run_job(job, 2, tmp_path)
    assert told[0].startswith(f"rank 0 makes a call in which rank 1 is missing: {call}. Rank 1 is elsewhere"), told
    assert "the averaging of gradients in a backward. Make such calls on all ranks" in told[0]
    assert "if accelerator.is_main_process:" in told[0]
    assert told[1]


def test_a_rank_that_leaves_the_loop_alone_is_told_so(tmp_path: Path) -> None:
    told = run_job(leave_early, 2, tmp_path)
    assert told[0].startswith("rank 0 makes a call in which rank 1 is missing: wait_for_everyone."), told
    assert told[0].endswith("Leave a loop on all ranks at the same batch.")
    assert "already past" not in told[0] + told[1]
