"""Two ranks on separate simulated devices: collectives in the order of streams, and DDP and FSDP2 over them."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

if not hasattr(torch, "sim"):
    pytest.skip("the simulated device is not loaded; run make test-device", allow_module_level=True)

pytestmark = pytest.mark.device
STEPS = 4


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
    )


def batches(rank: int, world: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(4 * world, 6, generator=generator)[rank::world] for _ in range(STEPS)]


def train(net: torch.nn.Module, inputs: list[torch.Tensor], device: str) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in inputs:
        loss = net(batch.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def collectives(rank: int, device: str) -> dict[str, Any]:
    """Return the results of all collectives on this rank."""
    sim = torch.sim  # type: ignore[attr-defined]
    mine = torch.arange(4.0, device=device) + 10 * rank
    done: dict[str, Any] = {}
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has new names for some of these, which 2.11 lacks

    late = mine.clone()
    work = dist.all_reduce(late, async_op=True)
    sim.raise_violations(False)
    done["before the wait"] = (late + 0).cpu()
    done["said"] = sim.violations()
    sim.clear_violations()
    sim.raise_violations(True)
    work.wait()
    done["sum"] = late.cpu()
    for op in (dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        value = mine.clone()
        dist.all_reduce(value, op)
        done[str(op)] = value.cpu()
    low = mine.to(torch.bfloat16)
    dist.all_reduce(low)
    done["bfloat16"] = low.float().cpu()

    value = mine.clone()
    dist.broadcast(value, 1)
    done["broadcast"] = value.cpu()
    parts = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(parts, mine)
    done["all_gather"] = torch.cat(parts).cpu()
    whole = torch.empty(8, device=device)
    dist.all_gather_into_tensor(whole, mine)
    done["all_gather_into_tensor"] = whole.cpu()
    half = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(half, mine)
    done["reduce_scatter_tensor"] = half.cpu()
    dist.reduce_scatter_tensor(half, mine, op=dist.ReduceOp.AVG)
    done["reduce_scatter_tensor avg"] = half.cpu()
    dist.reduce_scatter(half, list(mine.chunk(2)))
    done["reduce_scatter"] = half.cpu()
    with dist._coalescing_manager(device=torch.device(device), async_ops=True) as manager:
        first, second = torch.empty(8, device=device), torch.empty(8, device=device)
        dist.all_gather_into_tensor(first, mine)
        dist.all_gather_into_tensor(second, mine * 2)
    manager.wait()
    done["coalesced"] = (first + second).cpu()
    if rank == 0:
        dist.send(mine, 1)
    else:
        received = torch.empty(4, device=device)
        dist.recv(received, 0)
        done["recv"] = received.cpu()
    value = mine.clone()
    dist.reduce(value, 0)
    done["reduce"] = value.cpu() if rank == 0 else None
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    done["objects"] = objects
    dist.barrier(device_ids=[rank])
    return done


def forgotten_record(device: str) -> list[str]:
    """Write to memory that a collective still reads."""
    sim = torch.sim  # type: ignore[attr-defined]
    value = torch.ones(4, device=device)
    work = dist.all_reduce(value, async_op=True)
    sim.raise_violations(False)
    value.zero_()
    found: list[str] = sim.violations()
    sim.clear_violations()
    sim.raise_violations(True)
    work.wait()
    return found


def both_ranks(folder: Path) -> dict[str, Any]:
    """Run every collective, and train under DDP and FSDP2, on both ranks."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = f"sim:{rank}"
    torch.accelerator.set_device_index(rank)
    dist.init_process_group("cpu:gloo,sim:simccl", timeout=timedelta(seconds=100))
    try:
        done = collectives(rank, device)
        done["backend"] = dist.get_default_backend_for_device("sim")
        done["forgotten"] = forgotten_record(device)

        net = model().to(device)
        losses = train(torch.nn.parallel.DistributedDataParallel(net, device_ids=[rank]), batches(rank, world), device)
        done["ddp"] = (losses, [each.detach().cpu() for each in net.parameters()])

        for name, policy in {
            "fsdp": MixedPrecisionPolicy(),
            "fsdp bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        }.items():
            net = model().to(device)
            mesh = dist.init_device_mesh("sim", (world,))
            for layer in (net[0], net[2], net[4]):  # type: ignore[index]
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(net, mesh=mesh, mp_policy=policy)
            losses = train(net, batches(rank, world), device)
            full = [each.full_tensor().detach().cpu() for each in net.parameters()]  # type: ignore[attr-defined]
            done[name] = (losses, full)
        done["violations"] = torch.sim.violations()  # type: ignore[attr-defined]
    finally:
        dist.destroy_process_group()
    return done


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return jobs.run_job(both_ranks, 2, tmp_path_factory.mktemp("ranks"))


def test_results_are_there_after_the_wait_alone(ranks: list[dict[str, Any]]) -> None:
    for done in ranks:
        assert done["backend"] == "simccl"
        assert done["before the wait"].isnan().all()
        assert "nothing waits for it" in done["said"][0]
        assert "aten::zero_ writes" in done["forgotten"][0]
        assert done["sum"].tolist() == [10, 12, 14, 16]
        assert done["violations"] == []


def test_collectives_are_correct(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    for done in ranks:
        assert done["RedOpType.AVG"].tolist() == [5, 6, 7, 8]
        assert done["RedOpType.MAX"].tolist() == [10, 11, 12, 13]
        assert done["bfloat16"].tolist() == [10, 12, 14, 16]
        assert done["broadcast"].tolist() == [10, 11, 12, 13]
        assert done["all_gather"].tolist() == done["all_gather_into_tensor"].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
        assert done["coalesced"].tolist() == [0, 3, 6, 9, 30, 33, 36, 39]
        assert done["objects"] == [{"rank": 0}, {"rank": 1}]
    assert first["reduce_scatter_tensor"].tolist() == first["reduce_scatter"].tolist() == [10, 12]
    assert second["reduce_scatter_tensor"].tolist() == second["reduce_scatter"].tolist() == [14, 16]
    assert second["reduce_scatter_tensor avg"].tolist() == [7, 8]
    assert second["recv"].tolist() == [0, 1, 2, 3]
    assert first["reduce"].tolist() == [10, 12, 14, 16]


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp bf16"])
def test_training_equals_one_process_of_the_host(ranks: list[dict[str, Any]], kind: str) -> None:
    both = zip(batches(0, 2), batches(1, 2), strict=True)
    net = model()
    losses = train(net, [torch.cat(pair) for pair in both], "cpu")
    tolerance = 0.02 if kind == "fsdp bf16" else 1e-5
    means = [(first + second) / 2 for first, second in zip(ranks[0][kind][0], ranks[1][kind][0], strict=True)]
    assert means == pytest.approx(losses, abs=tolerance)
    for done in ranks:
        for mine, whole in zip(done[kind][1], net.parameters(), strict=True):
            torch.testing.assert_close(mine, whole.detach(), atol=tolerance, rtol=tolerance)
