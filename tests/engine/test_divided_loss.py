"""A loss divided by its window: all batches weigh the same, in any dtype of the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import ON_HOST, QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import trainwright as tw
from trainwright.engine.window import divisor_of


class Stream(IterableDataset[Tensor]):
    """Of a length that nobody knows."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return iter(torch.ones(self.length, 1))


class Slope(tw.Module):
    """A weight whose gradient is 1 in every batch, by a loss in some dtype. The first batch may be skipped."""

    def __init__(self, dtype: torch.dtype, skips: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.dtype_of_loss, self.skips = dtype, skips
        self.gradients: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if self.skips and batch_idx == 0:
            return None
        return (self.weight.to(self.dtype_of_loss) * 1.0).sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(self.weight.grad.item())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 7])
def test_a_window_weighs_what_its_mean_does(dtype: torch.dtype, window: int) -> None:
    ends = [1.0] * (10 // window) + [1.0] * (10 % window > 0)
    for data in (DataLoader(torch.ones(10, 1)), DataLoader(Stream(10))):
        module = Slope(dtype)
        tw.Trainer(max_epochs=1, accumulate_grad_batches=window, **QUIET).fit(module, data)
        assert module.gradients == pytest.approx(ends, abs=1e-6)
        accelerator = tw.Accelerator(cpu=ON_HOST, gradient_accumulation_steps=window)
        model = Slope(dtype)
        optimizer, loader = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0), data)
        weights = []
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model.training_step(batch, 1))
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    weights.append(model.weight.item())
        assert weights == pytest.approx([-sum(ends[: count + 1]) for count in range(len(ends))], abs=1e-5)


def test_losses_are_divided_after_a_skipped_batch_and_in_other_windows() -> None:
    module = Slope(torch.bfloat16, skips=True)
    windows = tw.GradientAccumulationScheduler({0: 3, 1: 1, 2: 2})
    tw.Trainer(max_epochs=3, callbacks=windows, **QUIET).fit(module, DataLoader(torch.ones(3, 1)))
    assert module.gradients == pytest.approx([2 / 3, 1.0, 1.0, 0.5, 1.0], abs=1e-6)


def test_divisors_are_exact_in_the_losses_dtype() -> None:
    assert [divisor_of(length, torch.float32) for length in (1, 3, 7)] == [1, 3, 7]
    for length in (1, 2, 3, 5, 64, 1000):
        reciprocal = 1.0 / divisor_of(length, torch.bfloat16)
        assert torch.tensor(reciprocal, dtype=torch.bfloat16).item() == pytest.approx(reciprocal, rel=1e-12)


class Sums(Slope):
    """Its loss is the sum over the rows of a batch, of which it may return no number."""

    def __init__(self, num_tokens: Any = None) -> None:
        super().__init__(torch.float32)
        self.num_tokens = num_tokens

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        count = len(batch) if self.num_tokens is None else self.num_tokens
        return {"loss": (self.weight * batch).sum(), "num_tokens": count}


@pytest.mark.parametrize("window", [1, 3])
def test_tokens_of_unequal_batches_weigh_the_same(window: int) -> None:
    rows = torch.arange(11.0)[:, None]
    batches = [rows[:1], rows[1:5], rows[5:6], rows[6:]]
    module = Sums()
    settings = {"accumulate_by": "tokens", "accumulate_grad_batches": window, "max_epochs": 1}
    tw.Trainer(**settings, **QUIET).fit(module, batches)
    ends = [batches[i : i + window] for i in range(0, 4, window)]
    assert module.gradients == pytest.approx([float(torch.cat(batch).mean()) for batch in ends])


@pytest.mark.parametrize("num_tokens", [0.5, -1, "3", True, torch.ones(2)])
def test_a_loss_by_tokens_needs_their_number(num_tokens: Any) -> None:
    with pytest.raises(ValueError, match=r"accumulate_by='tokens' was given num_tokens=.* Expected the number"):
        tw.Trainer(accumulate_by="tokens", max_epochs=1, **QUIET).fit(Sums(num_tokens), DataLoader(torch.ones(4, 1)))
    accelerator = tw.Accelerator(cpu=ON_HOST, accumulate_by="tokens")
    module = Sums()
    model = accelerator.prepare(module)
    with pytest.raises(ValueError, match=r"given num_tokens=None"):
        accelerator.backward((model.weight * 2.0).sum())


def test_wrong_units_of_accumulation_are_rejected() -> None:
    for make in (tw.Trainer, lambda **settings: tw.Accelerator(cpu=ON_HOST, **settings)):
        with pytest.raises(ValueError, match="accumulate_by='words'"):
            make(accumulate_by="words")
    module = Sums()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="accumulate_by and gradient_clip_val need automatic optimization"):
        tw.Trainer(accumulate_by="tokens", max_epochs=1, **QUIET).fit(module, DataLoader(torch.ones(4, 1)))
    accelerator = tw.Accelerator(cpu=ON_HOST)
    model = accelerator.prepare(Sums())
    with pytest.raises(ValueError, match="pass accumulate_by='tokens' to the Accelerator"):
        accelerator.backward(model.weight.sum(), num_tokens=3)


def test_a_number_of_tokens_without_its_setting_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="'num_tokens', which has no effect: the loss is trained as it is"):
        tw.Trainer(max_epochs=1, **QUIET).fit(Sums(), DataLoader(torch.ones(2, 1)))


def test_a_window_without_tokens_has_no_gradient() -> None:
    module = Sums(0)
    tw.Trainer(accumulate_by="tokens", max_epochs=1, **QUIET).fit(module, DataLoader(torch.ones(2, 1)))
    assert module.gradients == [0.0, 0.0]
