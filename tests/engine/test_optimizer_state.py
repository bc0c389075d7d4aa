"""An optimizer's restored state is on the device of its parameter, in any nest of lists."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Adam, Optimizer
from torch.utils._pytree import tree_leaves

from trainwright.checkpoint.codec import decode, encode
from trainwright.checkpoint.contents import describe_optimizer, restore_optimizer
from trainwright.checkpoint.tensors import TensorEntry
from trainwright.strategies.base import UNSAVED_KEYS

META = torch.device("meta")


class Nested(Optimizer):
    """Stores its state like second-order optimizers: factors in lists of dicts, and a history."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            factors = [{"left": torch.eye(size), "step": torch.tensor(1.0)} for size in parameter.shape]
            self.state[parameter] = {"factors": factors, "order": (torch.arange(3), None, 0.5)}
        self.state["history"] = [torch.ones(4), torch.get_rng_state(), torch.tensor(2)]


def stepped(kind: type[Optimizer], dtype: torch.dtype = torch.float32) -> tuple[Optimizer, Any, dict[str, TensorEntry]]:
    net = nn.Linear(3, 2, dtype=dtype)
    optimizer = kind(net.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(4, 3, dtype=dtype)).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)  # type: ignore[arg-type]
    names = {parameter: name for name, parameter in net.named_parameters()}
    described = decode(*encode(describe_optimizer(optimizer, names, UNSAVED_KEYS)))
    model = {name: TensorEntry(tuple(each.shape), each.dtype, ()) for name, each in net.named_parameters()}
    return optimizer, described, model


def restored(described: Any, model: dict[str, TensorEntry], kind: Any, dtype: torch.dtype = torch.float32) -> Optimizer:
    net = nn.Linear(3, 2, dtype=dtype, device=META)
    optimizer: Optimizer = kind(net.parameters())
    restore_optimizer(optimizer, {parameter: name for name, parameter in net.named_parameters()}, described, model)
    return optimizer


def test_lists_of_tensors_lie_where_the_parameter_does() -> None:
    optimizer, described, model = stepped(LBFGS)
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["old_dirs"]
    resumed = restored(described, model, LBFGS)
    state = resumed.state[resumed.param_groups[0]["params"][0]]
    for key in ("old_dirs", "old_stps", "ro"):
        assert {each.device for each in state[key]} == {META}, key


def test_nests_lie_where_torch_puts_them() -> None:
    optimizer, described, model = stepped(Nested)
    resumed = restored(described, model, Nested)
    by_torch = Nested(nn.Linear(3, 2, device=META).parameters())
    by_torch.load_state_dict(optimizer.state_dict())
    for parameter, other in zip(resumed.param_groups[0]["params"], by_torch.param_groups[0]["params"], strict=True):
        ours, theirs = (tree_leaves(each) for each in (resumed.state[parameter], by_torch.state[other]))
        assert [str(getattr(one, "device", one)) for one in ours] == [
            str(getattr(one, "device", one)) for one in theirs
        ]
        assert resumed.state[parameter]["order"][0].dtype is torch.int64  # torch makes a float of it
    numbers, generator, count = resumed.state["history"]
    assert (numbers.device, generator.device.type, count.device.type) == (META, "cpu", "cpu")


def test_another_precision_takes_state_of_the_parameters_dtype() -> None:
    _, described, model = stepped(Nested, torch.float32)
    model = {name: TensorEntry(each.shape, torch.float32, ()) for name, each in model.items()}
    resumed = restored(described, model, Nested, torch.bfloat16)
    factors = resumed.state[resumed.param_groups[0]["params"][0]]["factors"]
    assert [each["left"].dtype for each in factors] == [torch.bfloat16, torch.bfloat16]
    assert [each["step"].dtype for each in factors] == [torch.float32, torch.float32]
    kept = restored(described, {}, Nested, torch.bfloat16)
    assert kept.state[kept.param_groups[0]["params"][0]]["factors"][0]["left"].dtype is torch.float32


def test_tensors_of_a_group_lie_where_they_did() -> None:
    """A learning rate that is a tensor on the device, as a captured step wants it, stays there."""

    def make(parameters: Any) -> Optimizer:
        optimizer = Adam(parameters, capturable=True, foreach=False)
        there = {"lr": torch.tensor(0.1, device=META), "betas": (torch.tensor(0.9, device=META), 0.99)}
        optimizer.param_groups[0].update(there)
        return optimizer

    _, described, model = stepped(Adam)
    described["groups"][0] |= {"lr": torch.tensor(0.2), "betas": (torch.tensor(0.8), 0.99)}
    group = restored(described, model, make).param_groups[0]
    assert (group["lr"].device, group["betas"][0].device, group["betas"][1]) == (META, META, 0.99)
