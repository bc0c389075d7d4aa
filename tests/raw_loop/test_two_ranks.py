"""The Accelerator's arguments on two ranks, against one process on the same global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import ON_HOST
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw

pytestmark = pytest.mark.skipif(not ON_HOST, reason="starts ranks on the CPU")
PLUGINS: dict[str, dict[str, Any]] = {
    "ddp": {"kwargs_handlers": [tw.DistributedDataParallelKwargs(gradient_as_bucket_view=True)]},
    "each batch": {"gradient_accumulation_plugin": tw.GradientAccumulationPlugin(2, sync_each_batch=True)},
    "fsdp": {"fsdp_plugin": tw.FullyShardedDataParallelPlugin(sharding_strategy="SHARD_GRAD_OP", min_num_params=1)},
    "deepspeed": {"deepspeed_plugin": tw.DeepSpeedPlugin(zero_stage=2)},
}
TYPES = {"ddp": "MULTI_CPU", "each batch": "MULTI_CPU", "fsdp": "FSDP", "deepspeed": "DEEPSPEED"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs)
        return outputs

    def score(self, inputs: Tensor) -> Tensor:
        return self(inputs).square().mean()


def make(accelerator: tw.Accelerator, rows: int) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    net = Net()
    data = TensorDataset(torch.randn(24, 4), torch.randn(24, 3))
    # The seed of the data's order is torch's. `rows` is the batch of one rank.
    return accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1), DataLoader(data, batch_size=rows))  # type: ignore[no-any-return]


def train(accelerator: tw.Accelerator, net: Any, optimizer: Any, loader: Any) -> dict[str, Tensor]:
    for inputs, targets in loader:
        with accelerator.accumulate(net):
            accelerator.backward(nn.functional.mse_loss(net(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    whole = tw.gather_module(accelerator.unwrap_model(net), all_ranks=True)
    return {name: each.detach().clone() for name, each in whole.named_parameters()}


def on_ranks(folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name, arguments in PLUGINS.items():
        steps = {} if "gradient_accumulation_plugin" in arguments else {"gradient_accumulation_steps": 2}
        accelerator = tw.Accelerator(cpu=True, **steps, **arguments)
        seen[f"type {name}"] = str(accelerator.distributed_type)
        seen[name] = train(accelerator, *make(accelerator, 2))
        accelerator.free_memory()
    accelerator = tw.Accelerator(cpu=True, scale_schedulers=True)
    net, optimizer, loader = make(accelerator, 2)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=9)
    scheduler = accelerator.prepare(cycle)
    with pytest.raises(ValueError, match="that a method of a prepared model made"):
        accelerator.backward(net.score(torch.ones(1, 4)))
    with pytest.raises(
        ValueError, match=r"or the model as it was before prepare.*Call the model that accelerator.prepare"
    ):
        accelerator.backward(accelerator.unwrap_model(net)(torch.ones(1, 4)).sum())
    for strategy in ("fsdp", "ddp_sharded", "deepspeed_stage_2"):
        without = tw.Accelerator(cpu=True, strategy=strategy)
        alone = without.prepare(Net())
        with pytest.raises(ValueError, match=rf"not prepared; under strategy='{strategy}'.*Pass the optimizer to acc"):
            without.backward(alone(torch.ones(1, 4)).sum())
        without.free_memory()
    for inputs, targets in loader:
        accelerator.backward(nn.functional.mse_loss(net(inputs), targets))
        optimizer.step()
        scheduler.step()
    seen["steps of the schedule"] = scheduler.last_epoch
    seen["turns"] = [
        accelerator.on_last_process(lambda: "last")(),
        accelerator.on_process(lambda: "0", process_index=0)(),
    ]
    seen["teacher"] = teach()
    halves = tw.Accelerator(cpu=True, scale_schedulers=True, split_batches=True)
    net, optimizer, loader = make(halves, 2)
    once = halves.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 9))
    optimizer.step()
    once.step()
    assert once.last_epoch == 1
    return seen


def teach() -> list[bool]:
    """Train a student and a teacher with two Accelerators."""
    for_teacher, for_student = tw.Accelerator(cpu=True), tw.Accelerator(cpu=True, mixed_precision="bf16")
    teacher = for_teacher.prepare_model(Net(), evaluation_mode=True)
    student, optimizer, loader = make(for_student, 2)
    before = [parameter.detach().clone() for parameter in teacher.parameters()]
    begun = [parameter.detach().clone() for parameter in student.parameters()]
    for inputs, _ in loader:
        with torch.no_grad():
            targets = teacher(inputs)
        for_student.backward(nn.functional.mse_loss(student(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    is_kept = all(torch.equal(*each) for each in zip(before, teacher.parameters(), strict=True))
    return [is_kept, any(torch.equal(*each) for each in zip(begun, student.parameters(), strict=True))]


def test_plugins_train_what_one_process_does(tmp_path: Path) -> None:
    alone = tw.Accelerator(cpu=True, gradient_accumulation_steps=2)
    expected = train(alone, *make(alone, 4))
    for rank, seen in enumerate(run_job(on_ranks, 2, tmp_path)):
        for name in PLUGINS:
            assert seen[f"type {name}"] == TYPES[name]
            torch.testing.assert_close(seen[name], expected, msg=lambda text, name=name: f"{name}: {text}")
        assert seen["steps of the schedule"] == 9  # of 12, its last
        assert seen["turns"] == [[None, "0"], ["last", None]][rank]
        assert seen["teacher"] == [True, False]
