"""A module with submodules that somebody compiled: its state_dict's names are clean, and it loads both forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import assert_equal
from torch import nn

from trainwright.tensor_names import clean_name, register_clean_names


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def forward(self, x: Any) -> Any:
        return self.layers(x)


class Root(nn.Module):
    """Stands for a tw.Module, which registers itself in its constructor."""

    def __init__(self, *compiled: str) -> None:
        super().__init__()
        register_clean_names(self)
        self.net, self.blocks = Inner(), nn.ModuleList([Inner(), Inner()])
        self.my_orig_mod = nn.Linear(1, 1)
        if "net" in compiled:
            self.net = torch.compile(self.net, backend="eager")
        if "within" in compiled:
            self.blocks[1].layers = torch.compile(self.blocks[1].layers, backend="eager")


@pytest.mark.parametrize("compiled", [(), ("net",), ("within",), ("net", "within")])
@pytest.mark.parametrize("other", [(), ("net",), ("within",)])
def test_one_loads_what_the_other_saved(compiled: tuple[str, ...], other: tuple[str, ...]) -> None:
    plain = Root()
    clean = list(plain.state_dict())
    module = Root(*compiled)
    state = module.state_dict()
    assert list(state) == clean
    into = Root(*other)
    into.load_state_dict(state)
    assert_equal(into.state_dict(), state)
    raw = {name: torch.full_like(value, 3) for name, value in nn.Module.named_parameters(module)}
    assert any("_orig_mod" in name.split(".") for name in raw) == bool(compiled)
    missing, unexpected = into.load_state_dict(raw, strict=False)
    assert unexpected == []
    assert {name.rpartition(".")[2] for name in missing} == {"running_mean", "running_var"}
    assert all(bool((value == 3).all()) for value in into.parameters())


def test_a_name_of_the_users_own_stays() -> None:
    assert clean_name("net._orig_mod.0._orig_mod.weight") == "net.0.weight"
    assert clean_name("my_orig_mod.weight") == "my_orig_mod.weight"
