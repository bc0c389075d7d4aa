"""Shards and whole parameters of a group are stepped separately, because kernels take one kind of tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainwright.strategies.base import with_gradients
from trainwright.strategies.fsdp2.split_groups import by_kind, split_groups


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def parameters(mesh: DeviceMesh | None) -> list[nn.Parameter]:
    values = [torch.arange(6.0), torch.tensor(2.0), torch.ones(4), torch.arange(2.0)]
    sharded = {0, 2}
    made = []
    for place, value in enumerate(values):
        tensor = distribute_tensor(value, mesh, [Shard(0)]) if mesh is not None and place in sharded else value
        made.append(nn.Parameter(tensor))
        made[-1].grad = torch.ones_like(made[-1]) * (place + 1)
    return made


def plain(tensor: Any) -> Tensor:
    return tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


def test_a_step_of_both_kinds_is_that_of_whole_parameters(mesh: DeviceMesh) -> None:
    found = []
    for where in (mesh, None):
        own = parameters(where)
        groups = [{"params": own[:3], "lr": 0.1}, {"params": own[3:], "lr": 0.2}]
        optimizer = torch.optim.AdamW(groups, foreach=True)
        groups = list(optimizer.param_groups)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        seen: list[int] = []

        def closure(seen: list[int] = seen, optimizer: torch.optim.Optimizer = optimizer) -> float:
            seen.append(len(optimizer.param_groups))
            return 0.0

        for _ in range(3):
            with split_groups(optimizer):
                optimizer.step(closure)
            scheduler.step()
        assert seen == [2 if where is None else 3] * 3
        assert all(one is other for one, other in zip(optimizer.param_groups, groups, strict=True))
        assert [group["lr"] for group in groups] == [0.0125, 0.025]
        assert len(groups[0]["params"]) == 3
        found.append([plain(each) for each in own])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_torch_itself_takes_one_kind(mesh: DeviceMesh) -> None:
    """Once it takes both, this module has had its day."""
    with pytest.raises(RuntimeError, match="mixed"):
        torch.optim.AdamW(parameters(mesh), foreach=True).step()


def test_what_a_step_writes_into_its_groups_is_kept(mesh: DeviceMesh) -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["steps"] = group.get("steps", 0) + 1
            return super().step(closure)

    own = parameters(mesh)
    optimizer = Counting([(str(place), each) for place, each in enumerate(own)], 0.1, foreach=True)
    for _ in range(2):
        with split_groups(optimizer):
            optimizer.step()
    (group,) = optimizer.param_groups
    assert group["steps"] == 2
    assert group["param_names"] == ["0", "1", "2", "3"]
    assert group["params"] == own


def test_step_hooks_are_called_with_whole_groups(mesh: DeviceMesh) -> None:
    own, late = parameters(mesh), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD(own, 0.1, foreach=True)
    seen = []

    def look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        seen.append(len(optimizer.param_groups))

    def add(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        optimizer.add_param_group({"params": [late]})

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    optimizer.register_step_post_hook(add)
    before = [each.detach().clone() for each in own]
    with split_groups(optimizer):
        optimizer.step()
    assert seen == [1, 1]
    assert [len(group["params"]) for group in optimizer.param_groups] == [len(own), 1]
    assert not any(torch.equal(each, was) for each, was in zip(own, before, strict=True))


def test_an_optimizer_without_hooks_is_split(mesh: DeviceMesh) -> None:
    class Around(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner, self.defaults, self.state = inner, inner.defaults, inner.state

        @property
        def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
            return self.inner.param_groups

        @param_groups.setter
        def param_groups(self, groups: list[dict[str, Any]]) -> None:
            self.inner.param_groups = groups

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    own = parameters(mesh)
    around = Around(torch.optim.SGD(own, 0.1, foreach=True))
    groups = around.param_groups
    with split_groups(around):
        around.step()
    assert around.param_groups is groups


def test_a_step_that_raises_leaves_whole_groups(mesh: DeviceMesh) -> None:
    optimizer = torch.optim.SGD(parameters(mesh), 0.1, foreach=True)
    groups = optimizer.param_groups

    def closure() -> float:
        assert len(optimizer.param_groups) == 2
        raise ArithmeticError

    with pytest.raises(ArithmeticError), split_groups(optimizer):
        optimizer.step(closure)
    assert optimizer.param_groups is groups


def test_groups_of_one_kind_and_those_stepped_one_by_one_stay_as_they_are(mesh: DeviceMesh) -> None:
    for foreach, where in ((True, None), (False, mesh), (None, mesh)):
        optimizer = torch.optim.AdamW(parameters(where), foreach=foreach)
        groups = optimizer.param_groups
        with split_groups(optimizer):
            assert optimizer.param_groups is groups
            optimizer.step()


def test_gradients_are_grouped_by_kind(mesh: DeviceMesh) -> None:
    own = parameters(mesh)
    own[2].grad = None
    kinds = by_kind(with_gradients(torch.optim.SGD(own, 0.1)))
    assert [[id(p) for p in kind] for kind in kinds] == [[id(own[0])], [id(own[1]), id(own[3])]]
