"""Gather and reduce of structures, plain data and numbers, in one process as in several."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

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


def test_what_cannot_be_sent_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"gather: gather\[0\]\[0\].* is a builtins.object"):
        gathered([[object()], [1]])


def test_unlike_structures_are_named() -> None:
    with pytest.raises(ValueError, match=r"different structures: rank 0 has plain data at .*, rank 1 at"):
        gathered([{"a": 1}, {"b": 1}])


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


@pytest.mark.parametrize("value", [object(), {"a": {1, 2}}, [object()], [torch.ones(1), object()]])
def test_what_cannot_be_gathered_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match="gather"):
        tw.Accelerator(cpu=True).gather(value)


@pytest.mark.parametrize("value", ["text", [b"bytes"], {"a": {1, 2}}, object()])
def test_what_cannot_be_reduced_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=r"reduce was given an? .* expected tensors, numbers, or lists"):
        tw.Accelerator(cpu=True).reduce(value)
    with pytest.raises(ValueError, match="reduction='product' is unknown; choose from sum, mean, min, max"):
        tw.Accelerator(cpu=True).reduce(1.0, "product")
