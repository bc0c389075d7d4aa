"""Moving batches of any structure."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainwright.data.transfer import map_tensors, to_device

Pair = namedtuple("Pair", "left right")


@dataclass
class Own:
    value: Tensor

    def to(self, device: Any) -> Own:
        return Own(self.value.to(device))


def test_every_structure_keeps_its_kind() -> None:
    batch = {
        "pair": Pair(torch.zeros(1), "text"),
        "ordered": OrderedDict(a=torch.zeros(2)),
        "list": [torch.zeros(3), (4, None)],
        "own": Own(torch.zeros(4)),
        "class": Own,
    }
    moved = to_device(batch, torch.device("meta"))
    assert isinstance(moved["pair"], Pair)
    assert isinstance(moved["ordered"], OrderedDict)
    assert moved["pair"].left.is_meta
    assert moved["pair"].right == "text"
    assert moved["ordered"]["a"].is_meta
    assert moved["list"][0].is_meta
    assert moved["list"][1] == (4, None)
    assert moved["own"].value.is_meta
    assert moved["class"] is Own


def test_map_tensors_leaves_the_rest() -> None:
    assert map_tensors(lambda tensor: tensor + 1, [torch.zeros(()), "a", {"b": torch.ones(())}]) == [1, "a", {"b": 2}]
