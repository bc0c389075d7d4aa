"""Submodules become groups by size, class or function, and tied weights are never in two groups."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from trainwright.strategies.fsdp2.wrap_policy import choose_groups


class Block(nn.Module):
    """Has 72 parameters in every leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)


class Called(Block):
    def forward(self, x: Any) -> Any:
        return self.down(self.up(x))


def names(module: nn.Module, policy: Any = None, least: int = 1) -> list[str]:
    found = {each: name for name, each in module.named_modules()}
    return [found[group] for group in choose_groups(module, policy, least)]


def model() -> nn.Module:
    net = nn.Module()
    net.embed = nn.Embedding(100, 8)
    net.blocks = nn.ModuleList(Called() for _ in range(2))
    net.pair = nn.Sequential(Called(), nn.Linear(8, 8))
    net.head = nn.Linear(8, 100)
    return net


def test_large_callable_blocks_become_groups() -> None:
    """Groups are callable and large enough without inner groups. Leaves, lists and the root are never groups."""
    assert names(model()) == ["blocks.0", "blocks.1", "pair.0", "pair"]
    assert names(model(), least=144) == ["blocks.0", "blocks.1", "pair.0"]
    assert names(model(), least=145) == ["pair"]
    assert names(model(), least=217) == []
    assert names(nn.Linear(8, 8)) == []


def test_modules_that_read_inner_weights_are_not_divided() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
    net = nn.Sequential(encoder, nn.Sequential(nn.MultiheadAttention(8, 2)))
    assert names(net) == ["0.layers.0", "0.layers.1", "1.0"]
    assert sorted(names(encoder, {nn.Linear})) == [f"layers.{n}.linear{m}" for n in (0, 1) for m in (1, 2)]


def test_tied_weights_keep_a_block_from_being_a_group() -> None:
    net = model()
    net.blocks[0].up.weight = net.pair[1].weight
    assert names(net) == ["blocks.1", "pair.0"]
    with pytest.raises(
        ValueError, match=r"makes 'blocks.0' a group, but its parameter 'up.weight' is also used outside"
    ):
        names(net, {Called})
    inside = model()
    inside.blocks[0].up.weight = inside.blocks[0].down.weight
    assert "blocks.0" in names(inside)


def test_a_layer_that_two_blocks_call_is_in_neither_of_their_groups() -> None:
    net = model()
    net.blocks[0].up = net.blocks[1].up
    assert names(net) == ["pair.0", "pair"]
    with pytest.raises(
        ValueError, match=r"'up.weight' is also used outside of it \(tied weights or a shared submodule\)"
    ):
        names(net, {Called})
    assert len(names(net, {Called, nn.Linear})) == 3 + 7  # the layer is a group, gathered wherever it is called
    net.blocks[0].up = net.blocks[1].up = nn.Identity()
    assert "blocks.0" in names(net)


def test_a_module_under_two_names_is_one_group() -> None:
    net = model()
    net.again = net.blocks[0]
    assert len(choose_groups(net, None, 1)) == len(set(choose_groups(net, None, 1)))
    assert len(choose_groups(net, {Called})) == 3


def test_classes_and_functions_are_wrap_policies() -> None:
    assert sorted(names(model(), {Called})) == ["blocks.0", "blocks.1", "pair.0"]
    assert sorted(names(model(), Block)) == ["blocks.0", "blocks.1", "pair.0"]
    assert names(model(), lambda module: isinstance(module, nn.Embedding)) == ["embed"]
    nested = names(model(), (nn.Sequential, Called))
    assert nested.index("pair.0") < nested.index("pair")  # inner ones first


@pytest.mark.parametrize(("policy", "kind", "text"), [
    ("Block", TypeError, r"auto_wrap_policy='Block' is not a policy. Pass Module classes"),
    ({nn.Linear, int}, TypeError, r"is not a policy"),
    (3, TypeError, r"auto_wrap_policy=3 is not a policy"),
    ([], TypeError, r"is not a policy"),
    ({nn.Conv2d}, ValueError, r"chooses no submodule of Module, whose classes are Called, Embedding, Linear"),
    (lambda module: False, ValueError, r"chooses no submodule"),
    ({nn.ModuleList}, ValueError, r"makes 'blocks' a group, but a ModuleList cannot be called"),
])  # fmt: skip
def test_wrong_wrap_policies_are_rejected(policy: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        names(model(), policy)
