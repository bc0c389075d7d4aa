"""State that is no part of a parameter (a count of steps) lies where the kernel that reads it wants it, under DeepSpeed too.

The masters of this file lie on the meta device, as they would on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adagrad, AdamW, NAdam, Optimizer

from trainwright.checkpoint.tensors import TensorEntry
from trainwright.strategies import zero_state
from trainwright.strategies.base import Strategy
from trainwright.strategies.master_optimizer import MasterOptimizer, Shard

ENTRIES = {
    "weight/exp_avg": TensorEntry((2, 3), torch.float32),
    "weight/step": TensorEntry((), torch.float64),
    "weight/mu_product": TensorEntry((), torch.float32),
}


def mastered(optimizer: Optimizer, parameter: Any, device: str) -> MasterOptimizer:
    master = MasterOptimizer(optimizer)
    flat = torch.zeros(parameter.numel(), device=device)
    master.attach([Shard(parameter, flat, 0, 0, parameter.numel(), tuple(parameter.shape), 0)])
    return master


def state_of(master: MasterOptimizer) -> dict[str, Tensor]:
    return dict(master.own.state[master.own.param_groups[0]["params"][0]])


@pytest.mark.parametrize("options", [{"fused": True}, {"capturable": True, "foreach": True}, {"foreach": False}, {}])
def test_a_resume_makes_the_state_where_the_step_reads_it(options: dict[str, Any]) -> None:
    parameter = nn.Parameter(torch.zeros(2, 3, device="meta"))
    master = mastered(AdamW([parameter], 0.1), parameter, "meta")
    group = master.own.param_groups[0]
    group.update(options)
    zero_state.allocate(master, {parameter: "weight"}, ENTRIES)
    made = state_of(master)
    on_device = bool(options.get("fused") or options.get("capturable"))
    assert made["step"].device.type == ("meta" if on_device else "cpu")
    assert made["step"].dtype is (torch.float32 if on_device else torch.float64)
    assert {made[key].device.type for key in ("exp_avg", "mu_product")} == {"meta"}
    # Without DeepSpeed it is the same.
    plain = AdamW([parameter], 0.1)
    plain.param_groups[0].update(options)
    Strategy().allocate_optimizer_state(plain, {parameter: "weight"}, ENTRIES)
    for key, value in plain.state[parameter].items():
        assert (value.device, value.dtype) == (made[key].device, made[key].dtype), key


def test_a_count_that_a_constructor_has_made_follows_the_master() -> None:
    """Adagrad makes its state when it is constructed, where the parameter is by then, and not where an offloaded master is."""
    parameter = nn.Parameter(torch.zeros(2, 3))
    optimizer = Adagrad([parameter], 0.1)
    optimizer.param_groups[0]["fused"] = True
    taken = state_of(mastered(optimizer, parameter, "meta"))
    assert {key: value.device.type for key, value in taken.items()} == {"step": "meta", "sum": "meta"}


def test_state_of_before_lies_where_the_masters_do() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    optimizer = NAdam([parameter], 0.1)
    parameter.grad = torch.ones(2, 3)
    optimizer.step()
    taken = state_of(mastered(optimizer, parameter, "meta"))
    assert {key: value.device.type for key, value in taken.items()} == {
        "step": "cpu", "mu_product": "meta", "exp_avg": "meta", "exp_avg_sq": "meta"
    }  # fmt: skip


def test_lists_of_tensors_lie_where_the_masters_do() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    master = mastered(AdamW([parameter], 0.1), parameter, "meta")
    view = master.views[parameter].tensor
    master.own.state[view] = {
        "factors": [torch.ones(2, dtype=torch.bfloat16), {"count": torch.ones(2, dtype=torch.int64)}]
    }
    zero_state.move_plain(master)
    first, second = master.own.state[view]["factors"]
    assert (first.device.type, first.dtype) == ("meta", torch.float32)
    assert (second["count"].device.type, second["count"].dtype) == ("meta", torch.int64)
