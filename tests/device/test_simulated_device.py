"""The simulated device: wrong programs fail on it, and right programs work."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from interpreters import run_command
from torch import nn
from torch.nn import functional

if not hasattr(torch, "sim"):
    pytest.skip("the simulated device is not loaded; run make test-device", allow_module_level=True)

pytestmark = pytest.mark.device
sim: Any = torch.sim  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    sim.synchronize()
    sim.clear_violations()
    yield
    sim.refuse_sync(False)
    sim.raise_violations(True)
    sim.refuse_float64(False)
    sim.synchronize()
    left = sim.violations()
    sim.clear_violations()
    assert left == []


@pytest.fixture
def counted() -> None:
    """Violations are collected, and none raises."""
    sim.raise_violations(False)


def found() -> list[str]:
    """Take the violations so far."""
    all_of_them: list[str] = sim.violations()
    sim.clear_violations()
    return all_of_them


def in_process(script: str, **environment: str) -> str:
    done = run_command([sys.executable, "-W", "error", "-c", script], **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---- loading and devices


def test_torch_alone_loads_it() -> None:
    assert (
        in_process("import torch; print(torch.sim.device_count(), torch.accelerator.current_accelerator())") == "2 sim"
    )
    assert in_process("import torch; print(torch.sim.device_count())", SIM_DEVICES="3") == "3"


def test_two_simulated_devices_are_separate() -> None:
    first, second = torch.ones(2, device="sim"), torch.ones(2, device="sim:1")
    assert (first.device.index, second.device.index) == (0, 1)
    with pytest.raises(RuntimeError, match="same device"):
        first + second
    assert (first.to("sim:1") + second).device == torch.device("sim:1")
    assert torch.equal((second * 3).to("sim:0").cpu(), torch.full((2,), 3.0))
    with sim.device(1):
        assert torch.zeros(1, device="sim").device.index == 1
        assert torch.accelerator.current_device_index() == 1
    assert sim.current_device() == 0
    with torch.device("sim:1"):
        assert torch.zeros(1).device.index == 1
    with pytest.raises(RuntimeError, match="does not exist; there are 2"):
        torch.zeros(1, device="sim:2")


def test_tensors_of_the_host_do_not_mix() -> None:
    there, here = torch.ones(3, device="sim"), torch.ones(3)
    for mixed in (
        lambda: there + here,
        lambda: here + there,
        lambda: there.add_(here),
        lambda: here.add_(there),
        lambda: torch.cat([there, here]),
        lambda: torch.stack([there[0], here[0]]),
        lambda: functional.mse_loss(there, here),
        lambda: there.index_copy_(0, torch.arange(3), there),
        lambda: there.index_add_(0, torch.arange(3), there),
        lambda: there.gather(0, torch.arange(3)),
        lambda: here[torch.arange(3, device="sim")],
        lambda: functional.embedding(torch.arange(2), torch.ones(3, 2, device="sim")),
        lambda: torch.zeros(()).add_(there[0]),
        lambda: torch._foreach_add_([there], [here]),
        lambda: torch.where(torch.ones(3, dtype=torch.bool), there, there),
        lambda: nn.Linear(3, 1)(there),
    ):
        with pytest.raises((RuntimeError, IndexError, ValueError)):
            mixed()
    assert there[torch.tensor([0, 2])].tolist() == [1, 1]
    there[torch.tensor([0])] = 5
    assert (there * torch.tensor(2.0)).tolist() == [10, 2, 2]
    torch._foreach_copy_([there], [here])
    assert there.tolist() == [1, 1, 1]


# ---- streams


def test_a_forgotten_wait_is_a_wrong_number_and_an_error() -> None:
    source = torch.arange(4.0).pin_memory()
    side = sim.Stream()
    with sim.stream(side):
        there = source.to("sim", non_blocking=True)
    assert not side.query()
    with pytest.raises(RuntimeError, match="nothing waits for it"):
        there + 1
    sim.clear_violations()
    sim.raise_violations(False)
    with sim.stream(side):
        there = source.to("sim", non_blocking=True)
    assert (there + 1).isnan().all()
    assert "nothing waits for it" in found()[0]
    sim.current_stream().wait_stream(side)
    there.record_stream(sim.current_stream())
    assert (there + 1).tolist() == [1, 2, 3, 4]


def test_the_same_stream_needs_no_wait() -> None:
    there = torch.arange(4.0).pin_memory().to("sim", non_blocking=True)
    assert sim.pending() == 1
    assert (there * 2).tolist() == [0, 2, 4, 6]
    assert sim.pending() == 0


@pytest.mark.parametrize("wait", ["event", "wait_event", "synchronize", "device", "query", "item"])
def test_what_a_wait_is(wait: str) -> None:
    side = sim.Stream()
    with sim.stream(side):
        there = torch.arange(4.0).to("sim", non_blocking=True)
        event = side.record_event()
        if wait == "item":
            assert there[3].item() == 3
    if wait == "event":
        event.synchronize()
    elif wait == "wait_event":
        sim.current_stream().wait_event(event)
    elif wait == "synchronize":
        side.synchronize()
    elif wait == "device":
        torch.accelerator.synchronize()
    elif wait == "query":
        while not event.query():
            pass
    assert there.tolist() == [0, 1, 2, 3]


def test_a_pinned_source_is_caught_when_used_again_too_early(counted: None) -> None:
    source = torch.arange(4.0).pin_memory()
    there = source.to("sim", non_blocking=True)
    source.fill_(9)
    assert there.tolist() == [9, 9, 9, 9]
    assert "changed pinned memory" in found()[0]
    # Also where another stream has waited for the copy, which the host knows nothing of.
    side = sim.Stream()
    with sim.stream(side):
        there = source.to("sim", non_blocking=True)
    sim.current_stream().wait_stream(side)
    assert sim.pending() == 0
    source.fill_(5)
    sim.synchronize()
    assert "changed pinned memory" in found()[0]
    there.record_stream(sim.current_stream())
    source.fill_(6)
    sim.synchronize()
    assert found() == []


def test_a_copy_to_the_host_is_there_after_the_wait_alone() -> None:
    there = torch.arange(4.0, device="sim")
    here = there.to("cpu", non_blocking=True)
    assert here.is_pinned()
    assert here.isnan().all()
    there.add_(1)
    assert here.isnan().all()  # carried out, but the host does not know
    sim.current_stream().synchronize()
    assert here.tolist() == [0, 1, 2, 3]


def test_a_source_is_caught_when_changed_under_a_copy(counted: None) -> None:
    there = torch.ones(4, device="sim")
    side = sim.Stream()
    side.wait_stream(sim.current_stream())
    with sim.stream(side):
        here = there.to("cpu", non_blocking=True)
    there.fill_(2)
    assert "aten::fill_ writes" in found()[0]
    side.synchronize()
    assert here.tolist() == [2, 2, 2, 2]


# ---- memory


def test_freed_memory_is_poisoned_and_handed_out_again() -> None:
    first = torch.ones(1000, device="sim")
    where = first.data_ptr()
    del first
    again = torch.empty(1000, device="sim")
    assert again.data_ptr() == where
    assert again.isnan().all()


def copied_on_the_side(record: bool) -> torch.Tensor:
    side = sim.Stream()
    big = torch.ones(5000, device="sim")
    side.wait_stream(sim.current_stream())
    with sim.stream(side):
        result = big * 2
    if record:
        big.record_stream(side)
    del big  # before this stream has waited for the other stream's use of it
    torch.zeros(5000, device="sim")
    sim.current_stream().wait_stream(side)
    result.record_stream(sim.current_stream())
    return result


def test_memory_of_another_stream_is_caught_without_record_stream(counted: None) -> None:
    copied_on_the_side(record=True)
    assert found() == []
    copied_on_the_side(record=False)
    assert "record_stream is missing" in found()[0]


def test_pinned_memory_can_be_told() -> None:
    pinned = torch.ones(3).pin_memory()
    assert pinned.is_pinned()
    assert pinned[1:].is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert not torch.ones(3).is_pinned()
    where = pinned.data_ptr()
    there = pinned.to("sim", non_blocking=True)
    del pinned
    gc.collect()
    assert torch.ones(3).pin_memory().data_ptr() != where  # a copy still reads it
    assert there.tolist() == [1, 1, 1]
    assert torch.ones(3).pin_memory().data_ptr() == where


# ---- abilities that a device may lack


def test_a_device_without_float64_raises() -> None:
    sim.refuse_float64(True)
    for made in (
        lambda: torch.zeros(2, dtype=torch.float64, device="sim"),
        lambda: torch.zeros(2, dtype=torch.float64).to("sim"),
        lambda: torch.zeros(2, device="sim").double(),
        lambda: torch.zeros(2, device="sim").sum(dtype=torch.float64),
        lambda: torch.zeros(2, dtype=torch.complex128).to("sim"),
    ):
        with pytest.raises(TypeError, match="float32 instead"):
            made()
    assert (torch.ones(2, device="sim") * 2.5).tolist() == [2.5, 2.5]
    assert torch.tensor(1.5, dtype=torch.float64).to("sim", torch.float32).item() == 1.5


# ---- reads by the host


def test_reads_are_counted() -> None:
    there = torch.ones(4).to("sim")
    before = sim.counts()
    there.cpu()
    there[0].item()
    float(there.sum())
    torch.ones(2).to("sim")
    (there + 1).mul_(2)
    assert [after - earlier for earlier, after in zip(before, sim.counts(), strict=True)] == [1, 1, 2, 8, 16]


def test_reads_are_refused() -> None:
    there = torch.ones(4, device="sim")
    sim.refuse_sync(True)
    for read in (
        lambda: there[0].item(),
        lambda: there.cpu(),
        lambda: there.tolist(),
        lambda: bool(there[0] > 0),
        lambda: there.nonzero(),
        lambda: there[there > 0],
        lambda: torch.masked_select(there, there > 0),
        lambda: there.unique(),
        lambda: sim.synchronize(),
        lambda: sim.current_stream().synchronize(),
        lambda: sim.current_stream().record_event().synchronize(),
    ):
        with pytest.raises(RuntimeError, match="the host waits for the device"):
            read()
    torch.ones(3).to("sim")
    here = there.to("cpu", non_blocking=True)
    there[torch.tensor([0])]
    sim.refuse_sync(False)
    sim.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="a copy to the device"):
        torch.ones(3).to("sim")
    torch.ones(3).to("sim", non_blocking=True)
    sim.set_sync_debug_mode("warn")
    with pytest.warns(UserWarning, match="called a synchronizing sim operation"):
        there[0].item()
    sim.set_sync_debug_mode("default")
    sim.synchronize()
    assert here.tolist() == [1, 1, 1, 1]


# ---- training


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.conv(self.embedding(tokens).transpose(1, 2))).transpose(1, 2)
        hidden = self.gru(self.lstm(self.attention(hidden))[0])[0]
        logits: torch.Tensor = self.head(hidden.mean(1))
        return logits


OPTIMIZERS = {
    "adam": lambda weights, **how: torch.optim.Adam(weights, lr=0.01, **how),
    "adamw": lambda weights, **how: torch.optim.AdamW(weights, lr=0.01, **how),
    "sgd": lambda weights, **how: torch.optim.SGD(weights, lr=0.1, momentum=0.9, **how),
    "adagrad": lambda weights, **how: torch.optim.Adagrad(weights, lr=0.1, **how),
}


def train(net: nn.Module, device: str, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        tokens, target = torch.randint(10, (6, 5), generator=generator), torch.randint(4, (6,), generator=generator)
        loss = functional.cross_entropy(net(tokens.to(device)), target.to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_trains_as_on_the_host(name: str) -> None:
    start = Net()
    for how in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        here, there = copy.deepcopy(start), copy.deepcopy(start).to("sim")
        losses = train(here, "cpu", OPTIMIZERS[name](here.parameters(), **how))
        assert train(there, "sim", OPTIMIZERS[name](there.parameters(), **how)) == pytest.approx(losses, abs=1e-5), how


def test_autocast_computes_in_its_dtype() -> None:
    linear, inputs = nn.Linear(4, 4).to("sim"), torch.randn(2, 4, device="sim")
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("sim", dtype):
            hidden = linear(inputs)
            assert hidden.dtype == dtype
            assert (hidden @ hidden.t()).dtype == dtype
            assert nn.Conv1d(2, 2, 1).to("sim")(torch.ones(1, 2, 4, device="sim")).dtype == dtype
            assert functional.scaled_dot_product_attention(inputs[None], inputs[None], inputs[None]).dtype == dtype
            assert functional.softmax(hidden, -1).dtype == torch.float32
            assert functional.layer_norm(hidden, (4,)).dtype == torch.float32
            assert functional.mse_loss(hidden, inputs).dtype == torch.float32
            assert (
                functional.cross_entropy(hidden, torch.zeros(2, dtype=torch.long, device="sim")).dtype == torch.float32
            )
            assert hidden.sum().dtype == torch.float32
            assert torch.cat([hidden, inputs]).dtype == torch.float32
            assert hidden.relu().dtype == dtype
            with pytest.raises(RuntimeError, match="unsafe to autocast"):
                functional.binary_cross_entropy(hidden.sigmoid(), inputs)
