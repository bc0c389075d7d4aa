"""Two ranks save without a pause and are killed at random moments: a fresh look finds the newest that was committed, whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked import run_python

JOB = """
import json, os, random, signal, socket, sys, time
import torch
torch.set_num_threads(1)
import trainwright as tw
import trainwright.raw_loop.accelerator, trainwright.strategies.ddp.strategy
from trainwright.checkpoint.discovery import find_checkpoints, remove_checkpoint
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.checkpoint.filesystem import sweep_temporaries

def save_forever(folder, rank, port, step, returned):
    # As a launcher would start it; a fork of a process that has imported torch starts at once.
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update({name: str(value) for name, value in place.items()})
    accelerator = tw.Accelerator(cpu=True)
    net = torch.nn.Linear(400, 400)
    net, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters()))
    accelerator.backward(net(torch.ones(1, 400)).sum())
    optimizer.step()
    inner = accelerator.engine.optimizers[0]
    tensors = [*net.state_dict().values(), *(value for state in inner.state.values() for value in state.values())]
    while True:
        step += 1
        for tensor in tensors:
            tensor.detach().fill_(step)
        accelerator.engine.save(f"{folder}/step={step}.ckpt", step=step, epoch=0, state={"step": step},
                                rank_state={"step": step})
        os.write(returned, b"%d\\n" % step)

def check(folder, returned):
    found = find_checkpoints(folder)
    newest = found[-1].step
    assert newest >= returned, (newest, returned)
    for entry in found:
        checkpoint = open_checkpoint(entry.path)
        for section in ("model", "optimizer"):
            for name in checkpoint.tensors(section):
                assert bool((checkpoint.read_tensor(section, name) == entry.step).all()), (entry, section, name)
        assert checkpoint.run_state()["step"] == entry.step
        assert [checkpoint.rank_state(rank)["step"] for rank in range(2)] == [entry.step] * 2
    for entry in found[:-1]:
        remove_checkpoint(entry.path)
    return newest

def free_port():
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]

folder, kills, draws = sys.argv[1], int(sys.argv[2]), random.Random(int(sys.argv[3]))
step, within = 0, 0
for number in range(kills):
    port, (reader, writer), pids = free_port(), os.pipe(), []
    for rank in range(2):
        pids.append(os.fork())
        if pids[-1] == 0:
            signal.alarm(600)
            save_forever(folder, rank, port, step, writer)
    os.close(writer)
    started = os.read(reader, 100)  # the first save has returned
    assert started, "a rank ended by itself"
    time.sleep(draws.uniform(0.0, 0.1))
    while number % 2 and not any(name.startswith(".") for name in os.listdir(folder)):
        time.sleep(0.0002)  # half of the kills come while a save writes, however slow the machine is
    draws.shuffle(pids)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        time.sleep(draws.choice((0.0, draws.uniform(0.0, 0.03))))
    assert os.WTERMSIG(os.waitpid(pids[0], 0)[1]) == signal.SIGKILL
    os.waitpid(pids[1], 0)  # it may have left by itself: it sees that the other is gone
    told = started
    while more := os.read(reader, 10_000):
        told += more
    os.close(reader)
    left = [name for name in os.listdir(folder) if name.startswith(".")]
    step = check(folder, max(map(int, told.split())))
    assert sorted(sweep_temporaries(folder)) == sorted(left)
    assert os.listdir(folder) == [f"step={step}.ckpt"]
    within += bool(left)
print(json.dumps({"within": within, "step": step}))
"""


@pytest.mark.launch
@pytest.mark.parametrize(("kills", "within"), [(8, 1), pytest.param(20, 6, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_of_a_save_loses_nothing(kills: int, within: int, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    done = run_python("-c", JOB, tmp_path / "runs", kills, "0", folder=tmp_path, seconds=220.0)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["within"] >= within  # the others fell between two saves, or after the rename
    assert found["step"] > kills
