"""A Trainer with batches of all kinds."""

from __future__ import annotations

import dataclasses
import types
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from small import QUIET, Classifier, loss_of, make_data
from torch import Tensor
from torch.utils.data import DataLoader

import trainwright as tw

pytestmark = pytest.mark.slow


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Row:
    x: Tensor
    y: Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    y: Tensor


class Strict(dict[str, Any]):
    """A dict whose constructor wants arguments."""

    def __init__(self, data: Any, name: str) -> None:
        super().__init__(data)
        self.name = name


KINDS: dict[str, Any] = {
    "namedtuple": Pair,
    "dataclass": Row,
    "frozen dataclass": Frozen,
    "SimpleNamespace": lambda x, y: types.SimpleNamespace(x=x, y=y),
    "OrderedDict": lambda x, y: OrderedDict(x=x, y=y),
    "defaultdict": lambda x, y: defaultdict(list, x=x, y=y),
    "MappingProxyType": lambda x, y: types.MappingProxyType({"x": x, "y": y}),
    "strict dict": lambda x, y: Strict({"x": x, "y": y}, "strict"),
    "BatchEncoding": lambda x, y: made_by("BatchEncoding", x, y),
    "BatchFeature": lambda x, y: made_by("BatchFeature", x, y),
    "ModelOutput": lambda x, y: made_by("modeling_outputs.SequenceClassifierOutput", x, y),
}


def made_by(name: str, x: Tensor, y: Tensor) -> Any:
    transformers = pytest.importorskip("transformers")
    if "." in name:
        return transformers.modeling_outputs.SequenceClassifierOutput(logits=x, loss=y)
    return getattr(transformers, name)({"x": x, "y": y})


def parts(batch: Any) -> tuple[Tensor, Tensor]:
    if hasattr(batch, "logits"):
        return batch.logits, batch.loss
    return (batch["x"], batch["y"]) if hasattr(batch, "keys") else (batch.x, batch.y)


class Takes(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self.net, parts(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_all_kinds_are_trained_and_predicted(kind: str) -> None:
    def collated(rows: Any) -> Any:
        return KINDS[kind](torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows]))

    loader: Any = DataLoader(make_data(12), batch_size=4, collate_fn=collated)
    trainer, module = tw.Trainer(max_epochs=1, **QUIET), Takes()
    trainer.fit(module, loader)
    predicted = trainer.predict(module, loader)
    assert [type(each) for each in predicted] == [type(next(iter(loader)))] * 3
    assert torch.equal(torch.cat([parts(each)[0] for each in predicted]), make_data(12).tensors[0])
