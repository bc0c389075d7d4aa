"""The loop of docs/accelerator.md, as it stands there, under every way to start it: python, trainwright launch, torchrun,
notebook_launcher, and with every strategy that launch passes on."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from forked import interpret, run_python, run_ranks
from interpreters import run_command, search_path
from safetensors.torch import load_file
from small import ON_HOST
from started import ROOT

from trainwright.strategies import STRATEGIES, VARIANTS, resolve_strategy

pytestmark = [
    pytest.mark.launch,
    pytest.mark.slow,
    pytest.mark.skipif(not ON_HOST, reason="starts processes on the CPU"),
]
SCRIPT = """
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw

GLOBAL_BATCH = 8


class Net(nn.Module):
    # In float32 within the loop's bf16, whose gradients depend on how a batch is divided among processes. It has no linear
    # layers, which fsdp gathers in bf16.
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(8, 3))

    def forward(self, inputs):
        with torch.autocast(inputs.device.type, enabled=False):
            return (inputs @ self.hidden).tanh() @ self.out


def train(folder, processes):
    torch.manual_seed(0)
    model = Net()
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    data = TensorDataset(torch.randn(80, 4), torch.randint(0, 3, (80,)))
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // processes)
{loop}
    accelerator.save_model(model, folder)
    accelerator.print("trained:", accelerator.num_processes, accelerator.distributed_type, accelerator.step_count)


if __name__ == "__main__":
    if sys.argv[2:] == ["notebook"]:
        tw.notebook_launcher(train, (sys.argv[1], 2), num_processes=2)
    else:
        train(sys.argv[1], {processes})
"""
LAUNCH = ["-m", "trainwright", "launch", "--cpu", "--devices", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
KINDS = {
    **dict.fromkeys((name for name in STRATEGIES if name != "single_device"), "MULTI_CPU"),
    "fsdp": "FSDP",
    "deepspeed_stage_1": "DEEPSPEED",
    "deepspeed": "DEEPSPEED",
    "deepspeed_stage_3": "DEEPSPEED",
}
"""The distributed_type of the strategies that are started here. `deepspeed` is deepspeed_stage_2 (a test checks it)."""
STARTS: dict[str, tuple[list[str], list[str], str]] = {
    "python": ([], [], "MULTI_CPU"),
    **{name: ([*LAUNCH, "--strategy", name], [], KINDS[name]) for name in ("ddp", "deepspeed")},
    "torchrun": (TORCHRUN, [], "MULTI_CPU"),
    "notebook_launcher": ([], ["notebook"], "MULTI_CPU"),
}
FORKED = [name for name in KINDS if name not in STARTS]
"""Strategies whose ranks are forked, as if launch had started them. Fresh interpreters would show nothing new."""


def loop_of_the_guide() -> str:
    """Return the first block of the guide to the raw loop."""
    block = re.search(r"^```python\n(.*?)^```$", (ROOT / "docs/accelerator.md").read_text(), re.MULTILINE | re.DOTALL)
    return block[1]


def script_of(loop: str, processes: int) -> str:
    return SCRIPT.replace("{loop}", textwrap.indent(loop, "    ")).replace("{processes}", str(processes))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of the same loop in one process, whose batch is the global batch."""
    folder = tmp_path_factory.mktemp("one")
    loop, changes = re.subn(r"devices=2\b", "devices=1", loop_of_the_guide())
    assert changes == 1
    (folder / "train.py").write_text(script_of(loop, 1))
    done = run_python("train.py", "model", folder=folder, variables={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    assert "trained: 1 NO 3\n" in done.stdout  # windows of 4, 4 and 2 batches
    return weights_of(folder / "model")


@pytest.mark.parametrize("name", STARTS)
def test_weights_are_those_of_one_process(tmp_path: Path, name: str, one_process: dict[str, torch.Tensor]) -> None:
    (tmp_path / "train.py").write_text(script_of(loop_of_the_guide(), 2))
    launcher, more, kind = STARTS[name]
    variables = {"PYTHONPATH": search_path(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = run_command([sys.executable, *launcher, "train.py", "model", *more], folder=tmp_path, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"trained: 2 {kind} 3\n" in done.stdout
    torch.testing.assert_close(weights_of(tmp_path / "model"), one_process)


def train_on_rank() -> None:
    with open(f"rank{os.environ['RANK']}.txt", "w") as output, contextlib.redirect_stdout(output):
        interpret(["train.py", "model"])


@pytest.mark.parametrize("name", FORKED)
def test_weights_under_other_strategies_are_the_same(
    tmp_path: Path, name: str, one_process: dict[str, torch.Tensor]
) -> None:
    (tmp_path / "train.py").write_text(script_of(loop_of_the_guide(), 2))
    run_ranks(train_on_rank, (), 2, tmp_path, 120.0, passed_on={"strategy": name})
    assert f"trained: 2 {KINDS[name]} 3\n" in (tmp_path / "rank0.txt").read_text()
    torch.testing.assert_close(weights_of(tmp_path / "model"), one_process)


def test_every_strategy_is_started() -> None:
    """The other strategies are these under another name, without an option that needs a GPU to matter."""
    stages = {name for name in VARIANTS if re.fullmatch(r"deepspeed_stage_\d", name)}
    assert stages | set(STRATEGIES) == {*KINDS, "deepspeed_stage_2", "single_device"}
    named, default = (vars(resolve_strategy(name, 2)) for name in ("deepspeed_stage_2", "deepspeed"))
    assert {key: value for key, value in named.items() if isinstance(value, (bool, int, str))} == {
        key: value for key, value in default.items() if isinstance(value, (bool, int, str))
    }
