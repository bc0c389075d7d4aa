"""Loaders that give no batch, which only reading shows of those without a length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from small import QUIET, Classifier, make_data, make_loader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import trainwright as tw


class Stream(IterableDataset[Any]):
    """Has no length."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        yield from make_data(self.samples)


class Evaluated(Classifier):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])


def run(call: str, loaders: Any, module: tw.Module | None = None, **settings: Any) -> Any:
    trainer = tw.Trainer(**{"max_epochs": 1, "devices": "auto", **QUIET, **settings})
    module = Evaluated() if module is None else module
    if call == "fit":
        trainer.fit(module, make_loader(16), loaders)
        return trainer.global_step
    return getattr(trainer, call)(module, loaders)


def stream(samples: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Stream(samples), batch_size=4, **options)


@pytest.mark.parametrize(
    ("call", "stage"), [("fit", "validation"), ("validate", "validation"), ("test", "test"), ("predict", "predict")]
)
def test_a_stream_that_yields_nothing_is_refused(call: str, stage: str) -> None:
    match = (
        rf"the {stage} loader yielded no batches \(its dataset yields nothing, drop_last.*Give it data, or leave it out"
    )
    for loader in (stream(0), stream(3, drop_last=True)):
        with pytest.raises(RuntimeError, match=match):
            run(call, loader, num_sanity_val_steps=2)
    limit = {"fit": "val", "validate": "val"}.get(call, call)
    with pytest.raises(RuntimeError, match=match):
        run(call, stream(0), num_sanity_val_steps=0, **{f"limit_{limit}_batches": 1})
    with pytest.raises(RuntimeError, match=f"the {stage} loader 'b' yielded no batches"):
        run(call, {"a": stream(8), "b": stream(0)})
    run(call, {"a": stream(8), "b": stream(1)})
    run(call, {"a": stream(8), "b": stream(0)}, **{f"limit_{limit}_batches": 0})


def test_a_hook_may_return_an_empty_one() -> None:
    class Empty(Evaluated):
        def val_dataloader(self) -> Any:
            return stream(0)

        test_dataloader = predict_dataloader = val_dataloader

    assert run("fit", None, Empty()) == 4
    for call in ("validate", "test"):
        assert run(call, None, Empty()) == [{}]
    assert run("predict", None, Empty()) == []
