"""Accumulation windows: which batch ends one, whose gradients are kept, and which loader the loop is over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import ON_HOST, assert_close, loss_of, make_data, make_loader, make_net, weights
from torch import nn
from torch.utils.data import DataLoader

import trainwright as tw


def two_models(steps: int, lr: float = 0.3) -> tuple[Any, ...]:
    accelerator = tw.Accelerator(cpu=ON_HOST, gradient_accumulation_steps=steps)
    left, right = make_net(), make_net()
    optimizers = [torch.optim.SGD(each.parameters(), lr, momentum=0.9) for each in (left, right)]
    loader = DataLoader(make_data(24), batch_size=6 // steps)
    return accelerator, *accelerator.prepare(left, right, *optimizers, loader)


@pytest.mark.parametrize("order", ["clear, backward, step", "backward, step, clear", "clear both first"])
@pytest.mark.parametrize("contexts", ["one", "each its own"])
def test_each_of_two_optimizers_has_its_own_window(order: str, contexts: str) -> None:
    def train(steps: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        accelerator, left, right, *optimizers, loader = two_models(steps)
        pairs = list(zip((left, right), optimizers, strict=True))
        for batch in (
            [each for _ in range(2) for each in loader] if steps == 1 else (b for _ in range(2) for b in loader)
        ):
            if contexts == "one":
                with accelerator.accumulate(left, right):
                    if order == "clear both first":
                        for _, optimizer in pairs:
                            optimizer.zero_grad()
                    for model, optimizer in pairs:
                        turn(accelerator, model, optimizer, batch)
            else:
                for model, optimizer in pairs:
                    with accelerator.accumulate(model):
                        if order == "clear both first":
                            optimizer.zero_grad()
                        turn(accelerator, model, optimizer, batch)
        assert accelerator.step_count == 16
        return weights(left), weights(right)

    def turn(accelerator: Any, model: nn.Module, optimizer: Any, batch: Any) -> None:
        if order.startswith("clear, "):
            optimizer.zero_grad()
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        if order.endswith("clear"):
            optimizer.zero_grad()

    for whole, parts in zip(train(1), train(3), strict=True):
        assert_close(whole, parts)


def steps_of(accelerator: Any, model: nn.Module, optimizer: Any, loader: Any, at: dict[int, Any]) -> list[int]:
    """Train over a loader and return the batches at which the optimizer stepped. `at` has calls before a batch's step."""
    made = []
    for index, batch in enumerate(loader):
        if index in at and at[index]() == "break":
            break
        before = accelerator.step_count
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.step_count > before:
            made.append(index)
    return made


def accumulating(steps: int, samples: int = 20) -> tuple[Any, ...]:
    accelerator = tw.Accelerator(cpu=ON_HOST, gradient_accumulation_steps=steps)
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    return accelerator, *accelerator.prepare(net, optimizer, make_loader(samples, 4))


@pytest.mark.parametrize("when", ["before", "within", "at each batch"])
def test_an_iterator_of_another_loader_leaves_the_window_alone(when: str) -> None:
    plain = accumulating(4)
    assert steps_of(*plain, {}) == [3, 4]
    accelerator, model, optimizer, loader = accumulating(4)
    for count in (7, 3):
        other = accelerator.prepare(make_loader(4 * count, 4))
        kept = [iter(other)] if when != "within" else []

        def take(kept: list[Any] = kept, other: Any = other) -> None:
            if not kept:
                kept.append(iter(other))
            next(kept[0], None)

        indices = range(5) if when == "at each batch" else [0]
        assert steps_of(accelerator, model, optimizer, loader, dict.fromkeys(indices, take)) == [3, 4]
        if count == 7:
            assert_close(weights(model), weights(plain[1]))
        del kept


def test_metrics_are_those_of_the_loop_that_is_left_for_a_moment() -> None:
    accelerator = tw.Accelerator(cpu=ON_HOST)
    outer, inner = (accelerator.prepare(make_loader(size, 4)) for size in (10, 6))
    kept = iter(inner)
    next(kept)
    assert [len(accelerator.gather_for_metrics(batch[1])) for batch in outer] == [4, 4, 2]
    for _ in outer:
        assert [len(accelerator.gather_for_metrics(batch[1])) for batch in inner] == [4, 2]
    del kept


def test_a_window_that_was_left_is_dropped() -> None:
    accelerator, model, optimizer, loader = accumulating(4, samples=32)
    assert steps_of(accelerator, model, optimizer, loader, {2: lambda: "break"}) == []
    with pytest.warns(
        UserWarning, match="the loop left its loader after 2 of the 4 batches of an accumulation"
    ) as told:
        assert steps_of(accelerator, model, optimizer, loader, {2: lambda: "break"}) == []
    assert [each.filename for each in told] == [__file__]
    alone = accumulating(4, samples=32)
    with pytest.warns(UserWarning, match="after 2 of the 4"):
        steps = steps_of(accelerator, model, optimizer, loader, {})
    assert steps == steps_of(*alone, {}) == [3, 7]
    assert_close(weights(model), weights(alone[1]), 0.0)


def test_the_length_of_windows_can_be_set() -> None:
    accelerator, model, optimizer, loader = accumulating(1, samples=32)

    def set_to(length: int) -> Any:
        return lambda: setattr(accelerator, "gradient_accumulation_steps", length)

    assert accelerator.gradient_accumulation_steps == 1
    assert steps_of(accelerator, model, optimizer, loader, {2: set_to(3), 3: set_to(2), 7: set_to(1)}) == [
        0, 1, 4, 6, 7,
    ]  # fmt: skip
    for wrong in (0, 1.5, True, "2"):
        with pytest.raises(ValueError, match="integer of at least 1"):
            accelerator.gradient_accumulation_steps = wrong


def test_a_window_that_is_open_keeps_its_gradients_when_the_length_is_set_to_1() -> None:
    accelerator = tw.Accelerator(cpu=ON_HOST, gradient_accumulation_steps=4)
    net = nn.Linear(4, 1, bias=False)
    before = net.weight.detach().clone()
    loader = DataLoader(torch.eye(4), batch_size=1)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=4.0), loader)
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            if number == 1:
                accelerator.gradient_accumulation_steps = 1
            optimizer.step()
            optimizer.zero_grad()
    assert_close({"w": before - net.weight.detach()}, {"w": torch.ones(1, 4)})


class Overflowing(nn.Module):
    """Its gradient is not finite for one of its calls."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.weight, self.calls, self.at = nn.Parameter(torch.ones(1)), -1, at

    def forward(self) -> torch.Tensor:
        self.calls += 1
        return self.weight * (float("inf") if self.calls == self.at else 1.0)


def test_a_skipped_step_holds_back_its_own_scheduler_alone() -> None:
    accelerator = tw.Accelerator(cpu=ON_HOST, mixed_precision="fp16")
    models = [Overflowing(9), Overflowing(1)]
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in models]
    halving = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in optimizers]
    models, optimizers, halving = (list(accelerator.prepare(*each)) for each in (models, optimizers, halving))
    rates: list[list[float]] = [[], []]
    for index in range(6):
        for number, (model, optimizer, scheduler) in enumerate(zip(models, optimizers, halving, strict=True)):
            if number == 1 and index > 2:
                continue  # from here on only the first is trained
            optimizer.zero_grad()
            accelerator.backward(model().sum())
            optimizer.step()
            scheduler.step()
            rates[number].append(scheduler.get_last_lr()[0])
    assert rates[0] == [0.1 * 0.5**step for step in range(1, 7)]
    assert rates[1] == [0.05, 0.05, 0.025]
    assert optimizers[1].step_was_skipped is False
    assert halving[0].last_epoch == 6
    assert halving[0].optimizer is optimizers[0].optimizer


def test_a_scheduler_of_epochs_steps_though_the_last_step_was_skipped() -> None:
    accelerator = tw.Accelerator(cpu=ON_HOST, mixed_precision="fp16")
    model = Overflowing(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, scheduler = accelerator.prepare(
        model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    )
    for _ in range(3):
        optimizer.zero_grad()
        accelerator.backward(model().sum())
        optimizer.step()
    assert optimizer.step_was_skipped
    scheduler.step()
    assert scheduler.get_last_lr() == [0.05]


def test_a_step_that_is_skipped_leaves_the_gradients_of_the_others_to_scale() -> None:
    """The first model's overflow changes the loss scale in the middle of the second one's windows."""
    accelerator = tw.Accelerator(cpu=ON_HOST, mixed_precision="fp16", gradient_accumulation_steps=2)
    models = [Overflowing(2), Overflowing(-1)]
    optimizers = [torch.optim.SGD(each.parameters(), 0.5) for each in models]
    models, optimizers = (list(accelerator.prepare(*each)) for each in (models, optimizers))
    scaler = accelerator.engine.precision.scaler
    scales = []
    for _ in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            with accelerator.accumulate(model):
                accelerator.backward(model().sum())
                optimizer.step()
                optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales == [65536.0, 65536.0, 65536.0, 32768.0]
    assert [model.module.weight.item() for model in models] == [0.5, 0.0]


def test_losses_are_divided_by_the_usual_length_in_a_loop_that_counts_batches() -> None:
    accelerator, model, optimizer, loader = accumulating(5)
    whole, plain = tw.Accelerator(cpu=ON_HOST), make_net()
    plain, stepper = whole.prepare(plain, torch.optim.SGD(plain.parameters(), 0.5))
    for number, batch in enumerate(loader):
        accelerator.backward(loss_of(model, batch))
        whole.backward(loss_of(plain, batch) / 5)
        if number == 2:  # such as for a loss that is not finite
            for each in (optimizer, stepper):
                each.zero_grad()
    optimizer.step()
    stepper.step()
    assert_close(weights(model), weights(plain), 1e-6)


@pytest.mark.parametrize("when", ["instead of a backward", "after a backward", "after clipping", "before a step"])
def test_gradients_that_are_cleared_at_a_windows_end_are_gone(when: str) -> None:
    accelerator, model, optimizer, loader = accumulating(2, samples=32)
    before = weights(model)
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            if number == 3 and when == "instead of a backward":
                optimizer.zero_grad()
                continue
            accelerator.backward(loss_of(model, batch) * (float("nan") if number in (2, 3) else 1.0))
            if number == 3:
                if when == "after clipping":
                    assert accelerator.clip_grad_norm_(model.parameters(), 1.0).isnan()
                optimizer.zero_grad()
                if when != "before a step":
                    continue
            optimizer.step()
            optimizer.zero_grad()
    assert all(each.isfinite().all() and not each.equal(before[name]) for name, each in weights(model).items())
    assert accelerator.step_count == 4 - (when != "before a step")


def test_gradients_of_chosen_optimizers_are_unscaled() -> None:
    accelerator = tw.Accelerator(cpu=ON_HOST, mixed_precision="fp16")
    models = [Overflowing(-1), Overflowing(-1)]
    optimizers = [torch.optim.SGD(each.parameters(), 0.5) for each in models]
    models, optimizers = (list(accelerator.prepare(*each)) for each in (models, optimizers))
    for model in models:
        accelerator.backward(model().sum())
    accelerator.unscale_gradients(optimizers[1:])
    assert [model.module.weight.grad.item() for model in models] == [65536.0, 1.0]
    accelerator.unscale_gradients()
    assert [model.module.weight.grad.item() for model in models] == [1.0, 1.0]
    with pytest.raises(ValueError, match="was not prepared"):
        accelerator.unscale_gradients(torch.optim.SGD(make_net().parameters(), 0.5))


def test_gradients_of_another_models_loss_are_cleared_between_windows() -> None:
    """As in examples/raw_loop/gan.py: the generator's loss reaches the critic, whose gradients are cleared after its step."""
    accelerator, left, right, *optimizers, loader = two_models(3)
    plain = [make_net(), make_net()]
    steppers = [torch.optim.SGD(each.parameters(), 0.3, momentum=0.9) for each in plain]
    for number, batch in enumerate(b for _ in range(2) for b in loader):
        with accelerator.accumulate(right):
            accelerator.backward(loss_of(right, batch))
            optimizers[1].step()
            optimizers[1].zero_grad()
        with accelerator.accumulate(left):
            accelerator.backward(loss_of(left, batch) - loss_of(right, batch))
            optimizers[0].step()
            optimizers[0].zero_grad()
        optimizers[1].zero_grad()

        is_at_end = number % 3 == 2
        (loss_of(plain[1], batch) / 3).backward()
        if is_at_end:
            steppers[1].step()
            steppers[1].zero_grad()
        ((loss_of(plain[0], batch) - loss_of(plain[1], batch)) / 3).backward()
        if is_at_end:
            steppers[0].step()
            for each in steppers:
                each.zero_grad()
    assert accelerator.step_count == 16
    for trained, by_hand in zip((left, right), plain, strict=True):
        assert_close(weights(trained), weights(by_hand), 1e-6)
