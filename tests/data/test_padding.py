"""Padding: the sequences of a batch get one length."""

from __future__ import annotations

import pickle
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import trainwright as tw

Pair = namedtuple("Pair", "text label")


def rows(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def test_keys_get_their_padding() -> None:
    samples = [
        {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1], "labels": [1, 2, 3], "name": "a", "score": 0.5},
        {"input_ids": [4], "attention_mask": [1], "labels": [4], "name": "b", "score": 1.5},
    ]
    batch = tw.PadCollate({"input_ids": 9})(samples)
    assert {key: rows(value) for key, value in batch.items()} == {
        "input_ids": [[1, 2, 3], [4, 9, 9]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "labels": [[1, 2, 3], [4, -100, -100]],
        "name": ["a", "b"],
        "score": [0.5, 1.5],
    }
    assert rows(tw.PadCollate(7)(samples)["input_ids"]) == [[1, 2, 3], [4, 7, 7]]
    assert rows(tw.PadCollate({"labels": -1})(samples)["labels"]) == [[1, 2, 3], [4, -1, -1]]


def test_samples_keep_their_structure() -> None:
    collate = tw.PadCollate({1: 5})
    texts, labels = collate([([1, 2], torch.tensor([1])), ([3], torch.tensor([2, 3]))])
    assert rows(texts) == [[1, 2], [3, 0]]
    assert rows(labels) == [[1, 5], [2, 3]]
    pair = collate([Pair(np.array([1, 2]), 0), Pair(np.array([3]), 1)])
    assert isinstance(pair, Pair)
    assert rows(pair.text) == [[1, 2], [3, 0]]
    assert rows(tw.PadCollate(-1)([torch.ones(2, 2), torch.zeros(1, 2)])) == [[[1, 1], [1, 1]], [[0, 0], [-1, -1]]]
    assert rows(collate([[1, 2], [3]])) == [[1, 2], [3, 0]]
    assert rows(collate([[], [3]])) == [[0], [3]]


def test_lengths_of_text_are_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [{"pixels": torch.ones(3, 2, 2), "input_ids": [1] * 5, "labels": [2] * 5, "classes": torch.ones(3)}] * 2
    shapes = {key: list(value.shape) for key, value in tw.PadCollate(multiple_of=8)(samples).items()}
    assert shapes == {"pixels": [2, 3, 2, 2], "input_ids": [2, 8], "labels": [2, 8], "classes": [2, 3]}
    monkeypatch.setattr("trainwright.devices.cuda.is_available", lambda: True)
    assert tw.PadCollate()(samples)["input_ids"].shape == (2, 8)
    monkeypatch.setattr("trainwright.devices.cuda.is_available", lambda: False)
    assert tw.PadCollate()(samples)["input_ids"].shape == (2, 5)


def test_a_worker_returns_padded_batches() -> None:
    collate = pickle.loads(pickle.dumps(tw.PadCollate({"input_ids": 9}, multiple_of=4)))
    data: Any = [{"input_ids": [1] * size} for size in (1, 2, 3, 4, 5, 6)]
    loader = DataLoader(data, 2, collate_fn=collate, num_workers=1, multiprocessing_context="fork")
    assert [batch["input_ids"].shape[1] for batch in loader] == [4, 4, 8]


def test_wrong_values_are_refused() -> None:
    with pytest.raises(TypeError, match=r"padding_value=\{'labels': 'x'\}: expected a number, or a dict"):
        tw.PadCollate({"labels": "x"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="multiple_of=0: expected an integer of at least 1"):
        tw.PadCollate(multiple_of=0)
    with pytest.raises(ValueError, match=r"sample 1 of the batch has the keys \['b'\], and sample 0 has \['a'\]"):
        tw.pad_collate([{"a": 1}, {"b": 2}])
    with pytest.raises(RuntimeError, match="equal size"):
        tw.PadCollate()([torch.ones(2, 2), torch.ones(2, 3)])
