"""A batch's fingerprint, by which a resumed run recognizes the batch."""

from __future__ import annotations

import torch

from trainwright.data.source_state import fingerprint


def test_equal_batches_are_equal_and_others_differ() -> None:
    batch = {"inputs": torch.arange(6.0), "names": ["a", "b"], "count": 3}
    assert fingerprint(batch) == fingerprint({"inputs": torch.arange(6.0), "names": ["a", "b"], "count": 3})
    assert fingerprint(batch) != fingerprint({**batch, "names": ["a", "c"]})
    assert fingerprint(batch) != fingerprint({**batch, "inputs": torch.arange(6.0) + 1})


def test_more_elements_than_float32_counts() -> None:
    many = torch.zeros(2**24 + 4, dtype=torch.uint8)
    assert fingerprint(many) == fingerprint(many.clone())
