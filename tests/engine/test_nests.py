"""Gather and reduce of structures, plain data and numbers, in one process as in several."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch

import trainwright as tw
from trainwright.distributed.ranks import Ranks
from trainwright.engine import nests

Pair = namedtuple("Pair", "left right")


class Recorder(Ranks):
    """Records the messages of ranks that run one after another, and gives all of them to a last call."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Any] = []
        self.is_last = False

    def exchange(self, value: Any, call: str) -> list[Any]:
        if self.is_last:
            return self.sent
        self.sent.append(value)
        raise StopIteration


def gathered(values: list[Any], keep: list[bool] | None = None) -> Any:
    """Return the result of rank 0 for the ranks' values, which are plain data."""
    ranks = Recorder()
    for value in values:
        with pytest.raises(StopIteration):
            nests.gather(value, ranks, keep)
    ranks.is_last = True
    return nests.gather(values[0], ranks, keep)


def test_plain_data_is_joined_by_rank() -> None:
    assert gathered([["a", "b"], ["c"]]) == ["a", "b", "c"]
    assert gathered([("a", "b"), ("c",)]) == ("a", "b", "c")
    assert gathered([3, 4]) == [3, 4]
    assert gathered([[[1, 2], [3]], [[4]]]) == [[1, 2], [3], [4]]
    assert gathered([[{"id": 1}], [{"id": 2, "x": None}]]) == [{"id": 1}, {"id": 2, "x": None}]
    assert gathered([{"text": ["a"], "loss": 0.5, "none": None}, {"text": ["b"], "loss": 1.5, "none": None}]) == {
        "text": ["a", "b"],
        "loss": [0.5, 1.5],
        "none": None,
    }
    assert gathered([(["a"], ["b"]), (["c"], ["d"])]) == (["a", "c"], ["b", "d"])
    assert gathered([Pair("a", 1), Pair("b", 2)]) == Pair(["a", "b"], [1, 2])


def test_ranks_without_samples_give_nothing() -> None:
    assert gathered([["a", "b"], ["c", "c"]], [True, False]) == ["a", "b"]
    assert gathered([("a", "b"), ("c", "c")], [False, True]) == ("c", "c")
    assert gathered([1, 2], [True, False]) == [1]


def test_numbers_are_reduced() -> None:
    accelerator = tw.Accelerator(cpu=True)
    assert accelerator.reduce({"loss": 1.5, "count": [3, True], "none": None}) == {
        "loss": 1.5,
        "count": [3, 1],
        "none": None,
    }
    assert accelerator.reduce(3, "mean") == 3.0
    assert isinstance(accelerator.reduce(3, "mean"), float)
    assert accelerator.gather((torch.tensor(1.0), ["x"], 2)) == (torch.tensor([1.0]), ["x"], [2])


def test_other_objects_are_rejected() -> None:
    accelerator = tw.Accelerator(cpu=True)
    for value in (object(), [object()], [torch.ones(1), object()]):
        with pytest.raises(TypeError, match=r"gather.* is a builtins.object"):
            accelerator.gather(value)
    with pytest.raises(TypeError, match="gather was given numpy arrays; convert them to tensors"):
        accelerator.gather([np.ones(1)])
    with pytest.raises(TypeError):
        accelerator.reduce("text")
    with pytest.raises(TypeError, match="pad_across_processes was given a float; expected tensors"):
        accelerator.pad_across_processes([1.0])
    with pytest.raises(ValueError, match="reduction='product' is unknown; choose from sum, mean, min, max"):
        accelerator.reduce(1.0, "product")
