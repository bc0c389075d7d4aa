"""Gradients are cleared like in the optimizer's zero_grad."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trainwright.engine.optimizers import clear_gradients


def with_gradients() -> nn.Module:
    net = nn.Linear(2, 1)
    net(torch.ones(1, 2)).sum().backward()
    return net


def test_the_gradients_of_all_groups_become_none() -> None:
    net = with_gradients()
    other = with_gradients()
    optimizer = torch.optim.AdamW([{"params": [net.weight]}, {"params": [net.bias], "lr": 0.1}])
    clear_gradients(optimizer)
    assert [each.grad for each in net.parameters()] == [None, None]
    assert all(each.grad is not None for each in other.parameters())


def test_an_optimizers_own_way_is_called() -> None:
    called: list[str] = []

    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            called.append("class")

    net = with_gradients()
    clear_gradients(Own(net.parameters(), 0.1))
    patched: Any = torch.optim.SGD(net.parameters(), 0.1)
    patched.zero_grad = lambda set_to_none=True: called.append("object")
    clear_gradients(patched)
    assert called == ["class", "object"]
    assert net.weight.grad is not None


def test_a_patched_class_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", lambda self, set_to_none=True: called.append(self))
    optimizer = torch.optim.SGD(with_gradients().parameters(), 0.1)
    clear_gradients(optimizer)
    assert called == [optimizer]


def test_a_profile_shows_it_under_torchs_name() -> None:
    optimizer = torch.optim.SGD(with_gradients().parameters(), 0.1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorder:
        clear_gradients(optimizer)
    assert "Optimizer.zero_grad#SGD.zero_grad" in {each.key for each in recorder.key_averages()}  # type: ignore[no-untyped-call]
