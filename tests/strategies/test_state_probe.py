"""What a try of an optimizer's first step tells of its state, and that it leaves the run as it was."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy
import pytest
import torch
from small import make_net
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trainwright.strategies.state_probe import LARGEST, state_of_a_step
from trainwright.strategies.step_probe import refuse_uneven_steps


class Noisy(torch.optim.SGD):
    """Draws from every generator in its step, and holds what it is given."""

    def __init__(self, *args: Any, held: Any = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.held = held

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["noise"] = torch.rand(2) * random.random() * numpy.random.rand()
        return super().step(closure)


class Uncopied(nn.Module):
    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("a module is copied")


def draws() -> list[float]:
    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]


def test_a_try_leaves_generators_and_hooks_alone() -> None:
    optimizer = Noisy(make_net().parameters(), lr=0.1)
    calls: list[Any] = []
    hooks = [
        register(lambda *args: calls.append(args))
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    try:
        states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        wanted = draws()
        for attempt in (
            lambda: list(state_of_a_step(optimizer)),
            lambda: refuse_uneven_steps(optimizer, torch.device("cpu"), "some", flat=True),
        ):
            random.setstate(states[0])
            numpy.random.set_state(states[1])
            torch.set_rng_state(states[2])
            attempt()
            assert draws() == wanted
        assert calls == []
        optimizer.step()
        assert calls, "they are called again"  # twice where SGD itself was made before, whose step is called too
    finally:
        for hook in hooks:
            hook.remove()


def test_what_is_large_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.zeros(LARGEST + 1)

    def tried(held: Any) -> bool:
        return "noise" in [key for key, _ in state_of_a_step(Noisy(make_net().parameters(), lr=0.1, held=held))]

    copied: list[Any] = []
    plain = copy.deepcopy
    monkeypatch.setattr(copy, "deepcopy", lambda *args: copied.append(args) or plain(*args))
    net = make_net()
    for held in (Uncopied(), large, [{"a": (large,)}], Uncopied().forward, {1: numpy.zeros(LARGEST)}, [net.parameters]):
        assert not tried(held)
    assert copied == []
    around = Noisy(make_net().parameters(), lr=0.1)
    for held in (None, [torch.zeros(3)], {"a": numpy.zeros(3)}, lambda: large, around, {1, 2}, torch.float32):
        assert tried(held), held
