"""Checks that need a device: the place of state after a resume, late copies, and the host memory in use."""

from __future__ import annotations

import gc
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import ON_DEVICE
from jobs import run_alone
from small import Classifier, make_loader
from torch import nn
from torch.optim import LBFGS, SGD, Adagrad, AdamW, Optimizer

import trainwright as tw
from trainwright.checkpoint.contents import HostMemory
from trainwright.checkpoint.tensors import Piece
from trainwright.devices.abilities import collective_backend, has_pinned_memory
from trainwright.engine.engine import Engine
from trainwright.precision import resolve_precision
from trainwright.strategies.base import Optimization

pytestmark = pytest.mark.gpu


def busy(device: torch.device) -> None:
    """Keep the device busy for a while, so that its next work is late."""
    big = torch.ones(2048, 2048, device=device) if device.type == "cuda" else torch.ones(8, 8, device=device)
    for _ in range(40):
        big = big @ big * 1e-4


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "lbfgs": lambda p: LBFGS(p, 0.1, max_iter=3, history_size=4),
    "adamw": lambda p: AdamW(p, 0.01),
    "adagrad": lambda p: Adagrad(p, 0.01),
    "sgd": lambda p: SGD(p, 0.1, momentum=0.9),
}


class Stepped(Classifier):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.name](self.parameters())


def assert_equal_states(left: nn.Module, right: nn.Module) -> None:
    for name, value in left.state_dict().items():
        assert torch.equal(value.cpu(), right.state_dict()[name].cpu()), name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_is_the_uninterrupted_one(device: torch.device, tmp_path: Path, name: str) -> None:
    path = tmp_path / "half.ckpt"
    whole = Stepped(name)
    tw.Trainer(**ON_DEVICE, max_steps=9).fit(whole, make_loader())
    half = tw.Trainer(**ON_DEVICE, max_steps=4)
    half.fit(Stepped(name), make_loader())
    half.save_checkpoint(path)
    resumed = Stepped(name)
    trainer = tw.Trainer(**ON_DEVICE, max_steps=9)
    trainer.fit(resumed, make_loader(), ckpt_path=path)
    assert_equal_states(whole, resumed)


@pytest.mark.parametrize("value", [3.0, float("inf")])
def test_gradients_in_host_memory_are_unscaled_by_a_scale_that_has_arrived(device: torch.device, value: float) -> None:
    """As under fsdp with cpu_offload=True: the loss is on the device, the shards' gradients on the host."""
    precision = resolve_precision("16-mixed", device.type)
    offloaded = nn.Parameter(torch.zeros(300))
    whole = nn.Parameter(torch.zeros((), device=device))
    optimizer = SGD([offloaded, whole], 1.0)
    precision.backward(whole * 2.0)
    scale = precision.state_dict()["scale"]
    offloaded.grad = torch.full((300,), value * scale)
    busy(device)
    precision.unscale(optimizer)
    assert torch.equal(offloaded.grad, torch.full((300,), value))
    assert precision.step(optimizer) == (value == float("inf"))
    assert precision.state_dict()["scale"] == (scale if value == 3.0 else scale / 2)
    assert whole.item() == (-2.0 if value == 3.0 else 0.0)


def alone(folder: Path, name: str) -> None:
    """Run a function of the job in a separate process, which opens its process group."""
    lines = f"""
        import warnings; warnings.simplefilter("ignore")  # of other packages, as they are imported
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import deepspeed_device, offloading_job, pathlib
        {"deepspeed_device.let_deepspeed_know()" if name == "deepspeed" else ""}
        offloading_job.{name}(pathlib.Path({str(folder)!r}))
    """
    run_alone(textwrap.dedent(lines), folder, seconds=200.0)


def test_shards_in_host_memory_are_trained_as_those_on_the_device(device: torch.device, tmp_path: Path) -> None:
    if collective_backend(device.type) is None:
        pytest.skip(f"{device.type} has no process group in torch")
    alone(tmp_path, "fsdp")


def test_deepspeed_on_a_device_whose_number_is_not_the_local_rank(device: torch.device, tmp_path: Path) -> None:
    """Resumed bitwise, with the counts of a fused AdamW where its kernel reads them, and no buffer of 2 GB."""
    pytest.importorskip("deepspeed")
    if device.type not in ("cuda", "sim") or collective_backend(device.type) is None:
        pytest.skip(f"DeepSpeed does not know {device.type}, or torch has no process group for it")
    alone(tmp_path, "deepspeed")


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(7, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LSTM(4, 3), nn.MultiheadAttention(4, 2)
    )


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_meta_module_starts_as_a_plain_one(device: torch.device, precision: str) -> None:
    """With the values that it would have had, and the host's generator where it would have been."""
    states, numbers = [], []
    for place in ("cpu", "meta"):
        torch.manual_seed(3)
        with torch.device(place):
            module = layers()
        if place == "meta":
            torch.manual_seed(3)
        before = torch.get_device_module(device).get_rng_state()
        engine = Engine(accelerator="gpu", devices=1, precision=precision)
        engine.prepare_module(module, Optimization())
        assert torch.equal(torch.get_device_module(device).get_rng_state(), before)
        assert {each.device for each in (*module.parameters(), *module.buffers())} == {engine.device}
        states.append({name: each.cpu() for name, each in module.state_dict().items()})
        numbers.append(torch.rand(1))
    assert torch.equal(*numbers)
    for name, each in states[0].items():
        assert torch.equal(each, states[1][name]), name


def test_a_background_save_takes_as_much_memory_as_it_writes(device: torch.device) -> None:
    """Page-locked, so that the device copies without the host. The next save of the same size takes no memory."""
    if not has_pinned_memory(device.type):
        pytest.skip(f"{device.type} has no page-locked memory")
    pieces = [Piece("w", (5_000_003,), 0, torch.randn(5_000_003, device=device)), Piece("n", (), 0, torch.tensor(3))]
    memory = HostMemory()
    stats = torch.cuda.host_memory_stats if device.type == "cuda" else dict
    before = stats().get("allocated_bytes.current", 0)
    copies = memory.copy([pieces])[0]
    place = copies[0].tensor.data_ptr()
    assert copies[0].tensor.is_pinned()
    assert stats().get("allocated_bytes.current", 0) == before  # not from torch's allocator, which rounds up
    kept = pieces[0].tensor.clone()
    busy(device)
    pieces[0].tensor.mul_(2.0)
    again = memory.copy([pieces])[0][0].tensor
    pieces[0].tensor.zero_()
    assert again.data_ptr() == place
    assert torch.equal(again, (kept * 2.0).cpu())
    larger = [Piece("w", (9_000_001,), 0, torch.ones(9_000_001, device=device))]
    del copies, again
    assert memory.copy([larger])[0][0].tensor.sum().item() == 9_000_001
    memory.release()
    gc.collect()
    assert memory.copy([pieces])[0][1].tensor.item() == 3
    memory.release()
