"""Which optimizers may step shares of the parameters, told without touching the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from small import make_net
from torch import nn
from zero_job import Counts, Layers

from trainwright.strategies.step_probe import refuse_uneven_steps, steps_elements

CPU = torch.device("cpu")


class Clips(torch.optim.SGD):
    """Clips all gradients by their common norm first."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.01)
        return super().step(closure)


class DecaysMatrices(torch.optim.SGD):
    """Looks at the number of dimensions."""

    def step(self, closure: Any = None) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.dim() > 1):
            parameter.data.mul_(0.9)
        return super().step(closure)


class Signs(torch.optim.Optimizer):
    """Its state is made when it is constructed, and float64 is none of its dtypes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter]["mean"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.dtype == torch.float32
                mean = self.state[parameter]["mean"].mul_(0.9).add_(parameter.grad)
                parameter.sub_(group["lr"] * mean.sign())


class Around(torch.optim.Optimizer):
    """Steps another optimizer, whose groups are its own."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, base.defaults)
        self.param_groups = base.param_groups

    def step(self, closure: Any = None) -> None:
        self.base.step()


Make = Callable[[Any], torch.optim.Optimizer]
BY_ELEMENT: dict[str, Make] = {
    "counts": partial(Counts, lr=0.1),
    "signs": Signs,
    "around": lambda parameters: Around(torch.optim.AdamW(parameters)),
}
BY_TENSOR: dict[str, Make] = {
    "layers": partial(Layers, lr=0.1),
    "Adafactor": torch.optim.Adafactor,
    "decays matrices": partial(DecaysMatrices, lr=0.1),
    "around layers": lambda parameters: Around(Layers(parameters, lr=0.1)),
}


def tried(make: Make, *, flat: bool) -> None:
    """Try an optimizer whose rate a scheduler has set to 0 for the first step; it has to stay as it is."""
    net = make_net()
    optimizer = make(net.parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before, draws = [p.detach().clone() for p in net.parameters()], torch.get_rng_state()
    state = len(optimizer.state)
    try:
        refuse_uneven_steps(optimizer, CPU, "some", flat=flat)
    finally:
        assert all(torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))
        assert len(optimizer.state) == state
        assert torch.equal(draws, torch.get_rng_state())
        assert optimizer.param_groups[0]["lr"] == 0.0
        assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_steps_by_element_are_taken(name: str) -> None:
    tried(BY_ELEMENT[name], flat=True)
    tried(BY_ELEMENT[name], flat=False)


@pytest.mark.parametrize("name", BY_TENSOR)
def test_steps_by_tensor_need_whole_tensors(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"gives each rank flat pieces of parameters alone: .* ddp_sharded, which keeps"
    ):
        tried(BY_TENSOR[name], flat=True)
    tried(BY_TENSOR[name], flat=False)


def test_steps_by_all_tensors_need_all() -> None:
    for flat in (True, False):
        with pytest.raises(
            ValueError, match="Clips steps an element by others too, and strategy='some' gives each rank"
        ):
            tried(partial(Clips, lr=0.1), flat=flat)


def test_torchs_own_are_known() -> None:
    class Same(torch.optim.AdamW):
        pass

    class Other(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    net = make_net()
    assert steps_elements(Same(net.parameters()))
    assert not steps_elements(Other(net.parameters()))
    for kind in (torch.optim.SGD, torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD):
        assert steps_elements(kind(net.parameters(), lr=0.1))
    assert not steps_elements(torch.optim.Adafactor(net.parameters()))
