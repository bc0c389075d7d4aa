"""Gather and reduce of structures and objects, in one process."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch

import trainwright as tw

Pair = namedtuple("Pair", "left right")


def test_structures_keep_their_types() -> None:
    accelerator = tw.Accelerator(cpu=True)
    gathered = accelerator.gather(Pair(torch.tensor(1.0), [torch.ones(2, 3), None]))
    assert isinstance(gathered, Pair)
    assert (gathered.left.tolist(), gathered.right[0].shape, gathered.right[1]) == ([1.0], (2, 3), None)
    for value, expected in (
        (["a", "b"], ["a", "b"]),
        (("a", "b"), ["a", "b"]),
        ({"id": 1}, [{"id": 1}]),
        ([{"id": 1}, {"id": 2, "x": None}], [{"id": 1}, {"id": 2, "x": None}]),
    ):
        assert accelerator.gather_for_metrics(value) == expected


def test_numbers_are_reduced() -> None:
    accelerator = tw.Accelerator(cpu=True)
    value = {"loss": 1.5, "count": [3, True], "none": None}
    assert accelerator.reduce(value) == {"loss": 1.5, "count": [3, 1], "none": None}
    assert isinstance(accelerator.reduce(3, "mean"), float)


def test_other_objects_are_rejected() -> None:
    accelerator = tw.Accelerator(cpu=True)
    for value in (object(), 3, ["text"], [torch.ones(1), "text"]):
        with pytest.raises(TypeError, match=r"gather was given an? .* expected tensors, or nests of them"):
            accelerator.gather(value)
    with pytest.raises(TypeError, match=r"the list of objects\[0\] is a builtins.object"):
        accelerator.gather_for_metrics(object())
    with pytest.raises(TypeError, match="reduce was given a str; expected tensors and numbers"):
        accelerator.reduce("text")
    with pytest.raises(TypeError, match="pad_across_processes was given a float; expected tensors"):
        accelerator.pad_across_processes([1.0])
    with pytest.raises(ValueError, match="reduction='product' is unknown; choose from sum, mean, min, max"):
        accelerator.reduce(1.0, "product")
