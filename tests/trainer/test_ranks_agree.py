"""Ranks with different data or callbacks decide together, and take the same steps as one process.

The job of two gloo ranks starts once. The tests train the same on one process, with the batches of both ranks as one.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import run_job
from small import QUIET, Classifier, assert_close, assert_equal, loss_of, make_loader, weights
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

import trainwright as tw

SETTINGS = {**QUIET, "precision": "64-true"}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def fit(module: tw.Module, loader: Any, *, epochs: int = 1, val: Any = None, **settings: Any) -> tw.Trainer:
    trainer = tw.Trainer(max_epochs=epochs, **{**SETTINGS, **settings})
    trainer.fit(module, loader, val)
    return trainer


class Plain(Classifier):
    """Plain SGD, so that a gradient that is too large shows in the weights."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class Followed(Plain):
    """A plateau scheduler follows a step's value that differs by rank and gets better or worse with the epochs."""

    def __init__(self, slope: float, logging_rank: int | None, strict: bool) -> None:
        super().__init__()
        self.slope, self.logging_rank, self.strict = slope, logging_rank, strict

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.logging_rank in (None, rank()):
            self.log("own", self.slope * (self.current_epoch + 1) * (-1 if rank() else 1), on_step=True, on_epoch=False)
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
        return [optimizer], [{"scheduler": plateau, "monitor": "own", "strict": self.strict}]


FOLLOWED = {
    (1.0, None, True): 0.005, (-1.0, None, True): 0.5, (1.0, None, False): 0.005, (1.0, 0, True): 0.005,
    (1.0, 0, False): 0.005, (-1.0, 1, False): 0.5,
}  # fmt: skip
"""The slope of rank 0's value (rank 1's is its negative), the logging rank (None: both), strict, and the resulting
rate."""


def followed(slope: float, logging_rank: int | None, strict: bool) -> tuple[float, dict[str, Tensor]]:
    module = Followed(slope, logging_rank, strict)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ReduceLROnPlateau follows 'own', which was not logged")
        trainer = fit(module, make_loader(8, 2), epochs=3)
    return trainer.optimizers[0].param_groups[0]["lr"], weights(module)


class Looks(tw.Callback):
    """Reads the epoch's values at its end."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen.append(("train", "loss_epoch" in trainer.callback_metrics))

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen.append(("validation", "val_loss" in trainer.callback_metrics))

    def on_test_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen.append(("test", "count" in trainer.callback_metrics))


def watched_by_one_rank() -> dict[str, Any]:
    """Only rank 0 has a callback, and its hooks need values over all ranks."""
    module, looks = Plain(), Looks()
    trainer = tw.Trainer(max_epochs=2, num_sanity_val_steps=0, callbacks=[] if rank() else [looks], **SETTINGS)
    trainer.fit(module, make_loader(10, 2), make_loader(5, 2))
    metrics = {name: float(trainer.callback_metrics[name]) for name in ("loss_epoch", "val_loss", "count")}
    tested = trainer.test(module, make_loader(7, 2), verbose=False)
    return {"seen": looks.seen, "metrics": metrics, "tested": tested, "weights": weights(module)}


class Stops(tw.Callback):
    """Only rank 1 requests the end, in a hook."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.stop)

    def stop(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step >= 3 and trainer.global_rank == trainer.world_size - 1:
            trainer.should_stop = True


def stopped(hook: str) -> tuple[int, int]:
    trainer = fit(Plain(), make_loader(16, 2), epochs=50, val=make_loader(4, 2), callbacks=[Stops(hook)])
    return trainer.global_step, trainer.current_epoch


STOPS = {
    "on_train_batch_end": None,
    "on_validation_end": (4, 1),
    "on_train_epoch_end": (4, 1),
    "on_train_epoch_start": (4, 2),
}
"""The hook in which rank 1 requests a stop, and the (steps, epochs) after which all ranks stop. None means soon."""


LAST_ROUNDS = (3, 5, 7)
"""Samples in batches of two: the two ranks share the last round as 2 and 1, as 1 and none, and as 2 and 1."""


class Leaves(tw.Callback):
    """Ends the first epoch in the middle of a window."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> int | None:
        return -1 if trainer.current_epoch == 0 and batch_idx == 3 else None


def left_in_a_window(batch_size: int) -> dict[str, Tensor]:
    module = Plain()
    scheduler = tw.GradientAccumulationScheduler({0: 2, 1: 1})
    trainer = fit(module, make_loader(32, batch_size), epochs=3, callbacks=[scheduler, Leaves()])
    return {**weights(module), "steps": torch.tensor(trainer.global_step)}


class Asks(torch.optim.SGD):
    """Requests the loss twice in a step, and records the losses and gradients."""

    def __init__(self, parameters: Any, notes: list[Any]) -> None:
        super().__init__(parameters, lr=0.3)
        self.notes = notes

    def step(self, closure: Any = None) -> Any:
        for _ in range(2):
            with torch.enable_grad():
                loss = closure()
            gradients = [each.grad.clone() for group in self.param_groups for each in group["params"]]
            self.notes.append(torch.cat([loss.reshape(1), *(each.flatten() for each in gradients)]))
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(0.0)  # as if it had looked elsewhere, and come back
        return super().step()


class Searching(Classifier):
    """Trained by an optimizer that asks for the loss in its step."""

    def __init__(self, notes: list[Any] | None) -> None:
        super().__init__()
        self.notes = notes

    def configure_optimizers(self) -> Any:
        if self.notes is not None:
            return Asks(self.parameters(), self.notes)
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=3)


def searched(batch_size: int, samples: int) -> dict[str, Any]:
    notes: list[Tensor] = []
    found = {}
    for name, module in (("asks", Searching(notes)), ("lbfgs", Searching(None))):
        fit(module, make_loader(samples, batch_size), epochs=2)
        found[name] = weights(module)
    return {**found, "notes": torch.stack(notes)}


def used_after_training(batch_size: int) -> dict[str, Any]:
    """Predict, test and validate with the module that was just trained, and once more after another training."""
    trainer, module = tw.Trainer(max_epochs=1, **SETTINGS), Plain()
    trainer.fit(module, make_loader(12, batch_size))
    found: dict[str, Any] = {}
    for turn in ("first", "second"):
        predictions = trainer.predict(module, make_loader(7, 2))
        found[turn] = {
            "predicted": torch.cat(predictions),
            "sizes": [len(each) for each in predictions],
            "tested": trainer.test(module, make_loader(7, 2), verbose=False),
            "validated": trainer.validate(module, make_loader(3, 2), verbose=False),
        }
        trainer.fit(module, make_loader(12, batch_size))
    return {**found, "weights": weights(module)}


def job(folder: Path) -> dict[str, Any]:
    return {
        "followed": {case: followed(*case) for case in FOLLOWED},
        "watched": watched_by_one_rank(),
        "left in a window": left_in_a_window(2),
        "searched": {samples: searched(2, samples) for samples in LAST_ROUNDS},
        "used": used_after_training(2),
        "stopped": {hook: stopped(hook) for hook in STOPS},
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_job(job, 2, tmp_path_factory.mktemp("ranks_agree"))


@pytest.mark.parametrize("case", FOLLOWED)
def test_a_plateau_follows_rank_zeros_value(results: list[dict[str, Any]], case: Any) -> None:
    (rate, trained), (other_rate, others) = (result["followed"][case] for result in results)
    assert rate == other_rate == pytest.approx(FOLLOWED[case])
    assert_equal(trained, others)


def test_a_callback_of_one_rank_is_no_trap(results: list[dict[str, Any]]) -> None:
    zero, one = (result["watched"] for result in results)
    assert zero["seen"] == [*[("validation", True), ("train", True)] * 2, ("test", True)]
    assert one["seen"] == []
    for name in ("metrics", "tested"):
        assert zero[name] == one[name]
    assert (zero["metrics"]["count"], zero["tested"][0]["count"]) == (5, 7)
    assert_equal(zero["weights"], one["weights"])
    expected = Plain()
    fit(expected, make_loader(10, 4), epochs=2)
    assert_close(zero["weights"], weights(expected))


@pytest.mark.parametrize("hook", STOPS)
def test_one_rank_may_ask_for_the_end(results: list[dict[str, Any]], hook: str) -> None:
    ends = [result["stopped"][hook] for result in results]
    assert ends[0] == ends[1]
    assert STOPS[hook] is None or ends[0] == STOPS[hook]
    assert 3 <= ends[0][0] < 400


def test_ranks_agree_on_an_epoch_that_a_hook_ends_within_a_window(results: list[dict[str, Any]]) -> None:
    trained, others = (result["left in a window"] for result in results)
    assert_equal(trained, others)
    assert_close(trained, left_in_a_window(4))
    assert trained["steps"] == 1 + 8 + 8


@pytest.mark.parametrize("samples", LAST_ROUNDS)
def test_an_optimizer_that_asks_again_has_the_loss_of_all_ranks(results: list[dict[str, Any]], samples: int) -> None:
    """This holds in an uneven last round too, and for the first and the second call of a closure."""
    found, others = (result["searched"][samples] for result in results)
    expected = searched(4, samples)
    for name in ("asks", "lbfgs"):
        assert_equal(found[name], others[name])
        assert_close(found[name], expected[name])
    assert torch.equal(found["notes"], others["notes"])
    torch.testing.assert_close(found["notes"], expected["notes"])
    torch.testing.assert_close(found["notes"][::2], found["notes"][1::2])


def test_evaluations_after_a_training_are_exact(results: list[dict[str, Any]]) -> None:
    zero, one = (result["used"] for result in results)
    expected = used_after_training(4)
    assert_equal(zero["weights"], one["weights"])
    assert_close(zero["weights"], expected["weights"])
    for turn in ("first", "second"):
        assert torch.equal(zero[turn]["predicted"], one[turn]["predicted"])
        torch.testing.assert_close(zero[turn]["predicted"], expected[turn]["predicted"])
        assert zero[turn]["sizes"] == [2, 2, 2, 1]
        for name, count in (("tested", 7), ("validated", 3)):
            assert zero[turn][name] == one[turn][name]
            assert zero[turn][name][0] == pytest.approx(expected[turn][name][0])
            assert zero[turn][name][0]["count"] == count
