"""Jobs of several machines, one of which is lost in the middle of the training: the rest train on from the last commit."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from deadlines import deadline, wait_until
from forked import interpret, run_ranks
from machines import ADDRESSES, Network, machines
from small import assert_equal
from started import Started, python

pytestmark = [pytest.mark.launch, pytest.mark.slow]
SAMPLES, EPOCHS = 96, 2
SCRIPT = f"""
import glob, json, os, sys, time
import torch
import trainwright as tw
from small import QUIET, make_net, weights

kind, folder = sys.argv[1:]
start, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
os.makedirs(folder, exist_ok=True)
log = open(os.path.join(folder, f"used-{{start}}-{{rank}}"), "w", buffering=1)


class Numbered(torch.utils.data.Dataset):
    def __len__(self):
        return {SAMPLES}

    def __getitem__(self, index):
        return torch.full((8,), index / {SAMPLES}), index


def loss_of(net, batch, epoch, step):
    print(json.dumps({{"start": int(start), "step": step, "epoch": epoch, "used": batch[1].tolist()}}), file=log)
    print(f"start {{start}} step {{step}}.", flush=True)
    time.sleep(float(os.environ.get("PACE", "0.1")) if start == "1" else 0.1)
    return net(batch[0]).square().mean()


class Net(tw.Module):
    def __init__(self):
        super().__init__()
        self.net = make_net()

    def training_step(self, batch, batch_idx):
        return loss_of(self.net, batch, self.trainer.current_epoch, self.trainer.global_step)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


loader = torch.utils.data.DataLoader(Numbered(), batch_size=2, shuffle=True)
if kind == "trainer":
    saves = tw.ModelCheckpoint(dirpath=os.path.join(folder, "saves"), every_n_train_steps=3, save_top_k=-1)
    trainer = tw.Trainer(max_epochs={EPOCHS}, **(QUIET | {{"enable_checkpointing": True}}), callbacks=[saves])
    module = Net()
    trainer.fit(module, loader, ckpt_path="auto")
    net = module.net
else:
    accelerator = tw.Accelerator()
    net = make_net()
    net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01), loader)
    if saves := sorted(glob.glob(os.path.join(folder, "step=*.ckpt")), key=lambda path: int(path[:-5].rpartition("=")[2])):
        accelerator.load_state(saves[-1])
    for epoch in range(loader.epoch, {EPOCHS}):
        for batch in loader:
            accelerator.backward(loss_of(net, batch, epoch, accelerator.step_count))
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.step_count % 3 == 0:
                accelerator.save_state(os.path.join(folder, f"step={{accelerator.step_count}}.ckpt"))
    net = accelerator.unwrap_model(net)
if rank == "0":
    torch.save(weights(net), os.path.join(folder, "weights.pt"))
"""


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    (tmp_path / "train.py").write_text(SCRIPT)
    with machines(tmp_path) as network:
        yield network


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of the same training on two processes of one machine."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        run_ranks(interpret, (["train.py", "trainer", "alone"],), 2, folder, 120.0)
    found: dict[str, torch.Tensor] = torch.load(folder / "alone/weights.pt")
    return found


def start(network: Network, node: int, *options: str, kind: str = "trainer", **variables: str) -> Started:
    place = ["--main-address", ADDRESSES[0], "--main-port", "29521", "--cpu", "--max-restarts", "3"]
    return network.start(
        node, [*python("-m", "trainwright", "launch"), *place, *options, "../train.py", kind, "../kept"], **variables
    )


def start_both(network: Network, kind: str = "trainer") -> list[Started]:
    """Start a job of one or two nodes on both. The main node begins last, since it waits half a minute for a second one."""
    second = start(network, 1, "--nodes", "1:2", kind=kind)
    second.wait_for_message("trainwright launch: ")
    return [start(network, 0, "--nodes", "1:2", kind=kind), second]


@pytest.fixture(scope="module", autouse=True)
def cut_off(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Network, list[Started]]]:
    """A job whose second node was cut off while it trained. Begun first, because a node is given up after half a minute."""
    folder = tmp_path_factory.mktemp("cut")
    (folder / "train.py").write_text(SCRIPT)
    with machines(folder) as network:
        jobs = start_both(network)
        jobs[0].wait_for("start 0 step 8.")
        network.cut(1)
        yield network, jobs


def check_used_once(folder: Path) -> set[int]:
    """Check that the history that led to the end used every sample of every epoch once. Return the starts it took."""
    entries = [json.loads(line) for path in folder.glob("used-*") for line in path.read_text().splitlines()]
    begins = {
        each: min(entry["step"] for entry in entries if entry["start"] == each)
        for each in {e["start"] for e in entries}
    }
    kept = [
        entry
        for entry in entries
        if all(entry["step"] < step for later, step in begins.items() if later > entry["start"])
    ]
    for epoch in range(EPOCHS):
        # A rank without samples computes on a batch of another rank.
        batches = {(entry["step"], *entry["used"]) for entry in kept if entry["epoch"] == epoch}
        used = Counter(index for _, *indices in batches for index in indices)
        assert used == Counter(range(SAMPLES))
    assert min(begins.values()) == 0
    assert all(step > 0 for each, step in begins.items() if each)  # a checkpoint was resumed from
    return set(begins)


def check_no_step_was_lost(folder: Path, start: int) -> None:
    """Check that a start begins with the step after the last one of the start before."""
    before, after = ((folder / f"used-{each}-0").read_text().splitlines() for each in (start - 1, start))
    assert json.loads(after[0])["step"] == json.loads(before[-1])["step"] + 1


def test_one_of_three_nodes_is_lost_and_another_one_joins(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with machines(tmp_path, 3) as network:
        pace = {"PACE": str(deadline(0.7))}  # so that the other one comes in time
        others = [start(network, node, "--nodes", "1:3", **pace) for node in (1, 2)]
        for job in others:
            job.wait_for_message("trainwright launch: ")
        jobs = [start(network, 0, "--nodes", "1:3", **pace), *others]
        jobs[0].wait_for("start 0 step 8.")
        lost = jobs[2]
        lost.process.send_signal(signal.SIGKILL)
        lost.check_nothing_left()
        jobs[0].wait_for("start 1 step ")
        new = start(network, 2, "--nodes", "1:3", **pace)
        jobs[2] = new
        for job in jobs:
            assert job.wait() == 0, job.stderr
            job.check_nothing_left()
        for job in jobs:
            if job is not new:
                assert "failed first (its node was lost: the launcher there has ended or cannot" in job.stderr
                assert "; restarting all ranks on 2 node(s), restart 1 of 3.\n" in job.stderr
                assert "trainwright: a node has joined; restarting all ranks on 3 node(s).\n" in job.stderr
                assert "Traceback" not in job.stderr
        assert "trainwright: this node joins as node 2; restarting all ranks on 3 node(s), restart 1 of 3" in new.stderr
        assert check_used_once(tmp_path / "kept") == {0, 1, 2}
        check_no_step_was_lost(tmp_path / "kept", 2)


@pytest.mark.parametrize("is_range", [True, False])
def test_a_node_that_comes_back_ends_with_the_weights_of_an_uninterrupted_run(
    network: Network, is_range: bool, uninterrupted: dict[str, torch.Tensor]
) -> None:
    place = [["--nodes", "2"]] * 2 if is_range else [["--num-nodes", "2", "--node-rank", str(node)] for node in (0, 1)]
    jobs = [start(network, node, *place[node]) for node in (0, 1)]
    jobs[0].wait_for("start 0 step 8.")
    jobs[1].process.send_signal(signal.SIGKILL)
    jobs[1].check_nothing_left()
    back = start(network, 1, *place[1])
    for job in (jobs[0], back):
        assert job.wait() == 0, job.stderr
    assert "restarting all ranks on 2 node(s), restart 1 of 3.\n" in jobs[0].stderr
    assert "trainwright: this node joins as node 1; restarting all ranks on 2 node(s), restart 1 of 3.\n" in back.stderr
    assert check_used_once(network.folder / "kept") == {0, 1}
    assert_equal(torch.load(network.folder / "kept/weights.pt"), uninterrupted)


def test_a_failed_rank_restarts_all_nodes(network: Network) -> None:
    jobs = start_both(network, "accelerator")
    jobs[0].wait_for("start 0 step 8.")
    (rank,) = [each for each in jobs[1].processes() if "RANK" in each.environ() and each.name() != "sh"][-1:]
    rank.kill()
    for job in jobs:
        assert job.wait() == 0, job.stderr
        assert "failed first (killed by SIGKILL" in job.stderr
        assert "restarting all ranks on 2 node(s), restart 1 of 3.\n" in job.stderr
    assert check_used_once(network.folder / "kept") == {0, 1}


def test_a_node_that_is_told_to_stop_leaves_the_others_training(network: Network) -> None:
    jobs = start_both(network)
    jobs[0].wait_for("start 0 step 8.")
    while jobs[1].process.poll() is None:  # also after its supervisor has ended
        jobs[1].process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    assert jobs[1].wait() == 75, jobs[1].stderr
    assert jobs[0].wait() == 0, jobs[0].stderr
    assert "trainwright: SIGTERM stopped node 1 (" in jobs[0].stderr
    assert "restarting all ranks on 1 node(s), restart 1 of 3.\n" in jobs[0].stderr
    check_no_step_was_lost(network.folder / "kept", 1)
    assert check_used_once(network.folder / "kept") == {0, 1}


def test_a_node_that_cannot_be_reached_ends_and_the_main_node_trains_on(
    cut_off: tuple[Network, list[Started]],
) -> None:
    network, jobs = cut_off
    assert jobs[0].wait(seconds=180) == 0, jobs[0].stderr
    assert "its node was lost" in jobs[0].stderr
    assert jobs[1].wait() == 1
    assert "trainwright: the launcher of node 0, the main node, has ended or cannot be reached" in jobs[1].stderr
    wait_until(lambda: not jobs[1].processes(), 60)
    assert check_used_once(network.folder / "kept") == {0, 1}
