"""State such as a count of steps is on the device where its kernel reads it, under DeepSpeed too.

In this file the masters are on the meta device, in place of a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adagrad, AdamW, NAdam, Optimizer

from trainwright.checkpoint.tensors import TensorEntry
from trainwright.strategies.base import Strategy
from trainwright.strategies.divided_optimizers import refuse_divided
from trainwright.strategies.zero import master_optimizer
from trainwright.strategies.zero.deepspeed_config import refuse_strangers, refuse_what_cannot_be_sharded
from trainwright.strategies.zero.master_optimizer import MasterOptimizer, Shard
from trainwright.strategies.zero.zero_optimizer import Part

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
    master_optimizer.allocate(master, {parameter: "weight"}, ENTRIES)
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
    """Adagrad makes its state in the constructor, on the device of the parameter rather than of the master."""
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


def test_an_optimizer_gets_its_parameters_back_and_is_not_taken_again() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    optimizer = AdamW([parameter], 0.1)
    mastered(optimizer, parameter, "cpu").release("deepspeed_stage_2")
    assert optimizer.param_groups[0]["params"] == [parameter]
    with pytest.raises(
        ValueError, match=r"AdamW was prepared before, under .*'deepspeed_stage_2'.*configure_optimizers"
    ):
        refuse_divided([optimizer])


def test_a_tensor_that_is_not_the_modules_is_named() -> None:
    module = nn.Linear(2, 2)
    optimizer = AdamW([*module.parameters(), torch.zeros(4, 5, requires_grad=True)], 0.1)
    with pytest.raises(
        ValueError,
        match=r"AdamW trains parameters of no prepared module, the first of shape \[4, 5\], .*an nn\.Parameter",
    ):
        refuse_strangers(optimizer, set(module.parameters()))


def test_a_submodule_that_the_user_compiled_is_named_under_stage_3() -> None:
    module = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 2), backend="eager"))
    refuse_what_cannot_be_sharded(Part([module]), 2)
    with pytest.raises(ValueError, match=r"'1' is compiled by torch.compile, and .* or choose stage 2 or 'fsdp'"):
        refuse_what_cannot_be_sharded(Part([module]), 3)
