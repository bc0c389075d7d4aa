"""Predictions: every sample once, in the order of the dataset, on one process and on two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET, make_net
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import trainwright as tw

SAMPLES = 21  # in batches of 4: two ranks have three batches, and the last one has one sample


class Forward(tw.Module):
    """Has no predict_step, so forward makes the predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, numbers: Tensor) -> Tensor:
        return self.net(numbers.float().reshape(-1, 1).repeat(1, 8))


class Nested(Forward):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        assert not torch.is_grad_enabled()
        assert not self.training
        return {"numbers": batch, "pair": [self(batch), (dataloader_idx, "text", None, 1.5)], "empty": batch[:0]}


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


def numbers(samples: int = SAMPLES, start: int = 0, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(list(range(start, start + samples)), batch_size=4, **kwargs)


def predictions(folder: Path) -> dict[str, Any]:
    """All predictions on this rank, which include the other ranks'."""
    trainer = tw.Trainer(**{**QUIET, "devices": "auto"})
    found = {
        "forward": trainer.predict(Forward(), numbers()),
        "nested": trainer.predict(Nested(), numbers()),
        "several": trainer.predict(Nested(), [numbers(), numbers(3, 100)]),
        "shuffled": trainer.predict(Nested(), numbers(shuffle=True)),
        "one batch": trainer.predict(Forward(), numbers(2)),
        "not returned": trainer.predict(Nested(), numbers(), return_predictions=False),
    }
    found["unmeasured"] = trainer.predict(Forward(), DataLoader(Numbers(), batch_size=4))
    trainer = tw.Trainer(limit_predict_batches=2, **{**QUIET, "devices": "auto"})
    found["limited"] = trainer.predict(Forward(), numbers(16))
    objects = Objects()
    try:
        tw.Trainer(**{**QUIET, "devices": "auto"}).predict(objects, numbers())
    except TypeError as error:
        found["refused"] = f"{objects.calls} {error}"
    return found


class Objects(Forward):
    calls = 0

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return object()


def check(found: dict[str, Any], ranks: int) -> None:
    module = Forward()
    expected = [module(batch).detach() for batch in numbers()]
    assert [len(each) for each in found["forward"]] == [4, 4, 4, 4, 4, 1]
    for name in ("forward", "unmeasured"):
        assert all(torch.equal(left, right) for left, right in zip(found[name], expected, strict=True)), name
    shuffled = torch.cat([each["numbers"] for each in found["shuffled"]]).tolist()
    assert shuffled != sorted(shuffled) == list(range(SAMPLES))
    for place, batches in enumerate([found["nested"], *found["several"]]):
        numbers_seen = torch.cat([each["numbers"] for each in batches]).tolist()
        assert numbers_seen == list(range(100, 103) if place == 2 else range(SAMPLES))
        assert all(each["pair"][1] == (max(place - 1, 0), "text", None, 1.5) for each in batches)
        assert all(each["empty"].shape == (0,) for each in batches)
        assert torch.equal(batches[0]["pair"][0], module(batches[0]["numbers"]))
    assert [len(each) for each in found["one batch"]] == [2]
    assert found["not returned"] is None
    assert len(found["limited"]) == 2 * ranks
    assert ("refused" in found) is (ranks > 1)
    if ranks > 1:
        assert found["refused"].startswith("1 ")  # at the first batch
        assert "On several ranks predictions are gathered as such" in found["refused"]


def test_one_process_returns_predictions_in_order(tmp_path: Path) -> None:
    check(predictions(tmp_path), 1)


def test_two_ranks_return_all_predictions(tmp_path: Path) -> None:
    for found in run_job(predictions, 2, tmp_path):
        check(found, 2)


def test_a_module_without_forward_cannot_predict() -> None:
    class Silent(tw.Module):
        pass

    with pytest.raises(NotImplementedError, match=r"missing the required .forward. function"):
        tw.Trainer(**QUIET).predict(Silent(), numbers())
    with pytest.raises(TypeError, match="given no dataloaders"):
        tw.Trainer(**QUIET).predict(Forward())
