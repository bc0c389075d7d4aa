"""Generators and other iterables that can be read only once, where one pass is all that is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from small import QUIET, Classifier, assert_equal, make_loader, weights

import trainwright as tw


def batches(samples: int = 16) -> Iterator[Any]:
    yield from make_loader(samples)


def fit(train: Any, val: Any = None, **settings: Any) -> tuple[tw.Trainer, Any]:
    trainer, module = tw.Trainer(**{"max_epochs": 1, **QUIET, **settings}), Classifier()
    trainer.fit(module, train, val)
    return trainer, module


def test_one_pass_over_a_generator_is_what_a_list_gives(tmp_path: Path) -> None:
    _, expected = fit(list(batches()), list(batches(8)), num_sanity_val_steps=0)
    for once in (batches(), map(tuple, batches()), zip(*zip(*batches(), strict=True), strict=True)):
        trainer, module = fit(once, batches(8), num_sanity_val_steps=0)
        assert_equal(weights(module), weights(expected))
    trainer, module = fit(batches(), max_epochs=None, max_steps=3)
    trainer.save_checkpoint(str(tmp_path / "3.ckpt"))
    again = tw.Trainer(max_epochs=1, **QUIET)
    rest = Classifier()
    again.fit(rest, batches(), ckpt_path=str(tmp_path / "3.ckpt"))
    assert_equal(weights(rest), weights(expected))
    assert trainer.validate(module, batches(8)) == trainer.validate(module, list(batches(8)))
    assert trainer.test(module, {"a": batches(8), "b": batches(8)}) == trainer.test(
        module, {"a": list(batches(8)), "b": list(batches(8))}
    )
    module.predict_step = lambda batch, batch_idx: batch[0]
    assert len(trainer.predict(module, batches(8))) == 2


def test_a_hook_may_make_a_generator_each_time() -> None:
    class Makes(Classifier):
        def train_dataloader(self) -> Any:
            return batches(8)

        def val_dataloader(self) -> Any:
            return batches(4)

    trainer = tw.Trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1, num_sanity_val_steps=0, **QUIET)
    trainer.fit(Makes())
    assert trainer.global_step == 6


def test_more_than_one_pass_is_refused() -> None:
    for train, val, settings in (
        (batches(), None, {"max_epochs": 2}),
        (make_loader(), batches(), {"max_epochs": 2}),
        (batches(8), None, {"max_epochs": None, "max_steps": 3}),
        (make_loader(), batches(), {"num_sanity_val_steps": 0, "val_check_interval": 2}),
        (make_loader(), {"a": batches()}, {"num_sanity_val_steps": 0, "max_epochs": 2}),
    ):
        with pytest.raises(RuntimeError, match="the generator yields no batches: an iterator can be read only once"):
            fit(train, val, **settings)
    with pytest.raises(TypeError, match="max_size_cycle restarts shorter loaders"):
        fit({"a": batches(), "b": make_loader()})
    once = batches(8)
    trainer, module = fit(make_loader(8))
    trainer.validate(module, once)
    with pytest.raises(RuntimeError, match="yields no batches: an iterator can be read only once"):
        trainer.validate(module, once)


def test_a_number_of_batches_takes_the_next_ones_in_each_pass() -> None:
    class Notes(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.trained: list[int] = []
            self.validated: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.trained.append(batch)
            return self.net[0].weight.sum()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.validated.append(batch)

    module = Notes()
    trainer = tw.Trainer(max_epochs=2, limit_train_batches=3, limit_val_batches=2, **QUIET)
    trainer.fit(module, count(), count(10))
    assert module.trained == [0, 1, 2, 3, 4, 5]
    assert module.validated == [10, 11, 12, 13]  # no sanity check
