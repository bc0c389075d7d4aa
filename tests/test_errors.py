"""The names of types in the texts of errors."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import trainwright as tw
from trainwright.checkpoint.contents import encode_state
from trainwright.data.loaders import ShardedLoader
from trainwright.errors import a_type_of


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "an int"),
        ("", "a str"),
        (nn.Identity(), "an Identity"),
        (torch.zeros(1), "a Tensor"),
        (type("OneHot", (), {})(), "a OneHot"),
        (type("", (), {})(), "a "),
    ],
)
def test_types_get_their_articles(value: Any, text: str) -> None:
    assert a_type_of(value) == text


class Each(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


def test_they_are_in_the_texts() -> None:
    with pytest.raises(TypeError, match="this loader cannot be sharded over 2 ranks: an Each is not a DataLoader"):
        ShardedLoader(Each(), rank=0, world_size=2, mode="train")
    with pytest.raises(TypeError, match="register_for_checkpointing was given an int without state_dict"):
        tw.Accelerator(cpu=True).register_for_checkpointing(3)
    with pytest.raises(tw.CheckpointError, match=r"is an argparse\.Namespace; expected"):
        encode_state({"options": argparse.Namespace()}, "the state")
