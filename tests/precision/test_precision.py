"""Precisions: names, the dtype of a forward, and the loss scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trainwright.precision import Precision, resolve_precision
from trainwright.precision.mixed import MixedPrecision


@pytest.mark.parametrize(("given", "name"), [
    (None, "32-true"),
    (32, "32-true"),
    ("32", "32-true"),
    (16, "16-mixed"),
    ("16", "16-mixed"),
    ("bf16", "bf16-mixed"),
    ("BF16-mixed", "bf16-mixed"),
    (64, "64-true"),
    ("64", "64-true"),
    ("double", "64-true"),
    ("16-true", "16-true"),
    ("bf16-true", "bf16-true"),
])  # fmt: skip
def test_names_give_their_precisions(given: Any, name: str) -> None:
    assert resolve_precision(given, "cpu").name == name


@pytest.mark.parametrize(("given", "error", "match"), [
    ("fp16", ValueError, "choose from 64-true, 32-true, 16-mixed.*Did you mean '16-mixed'"),
    ("bfloat16", ValueError, "Did you mean 'bf16-mixed'"),
    ("b16-true", ValueError, "Did you mean 'bf16-true'"),
    (8, ValueError, "precision=8 is unknown"),
    (True, TypeError, "is a bool"),
    (16.0, TypeError, "is a float; expected a name, 16, 32, 64"),
    (Precision, TypeError, "is a type"),
])  # fmt: skip
def test_unknown_names_raise(given: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        resolve_precision(given, "cpu")


def test_the_forward_runs_in_its_dtype() -> None:
    layer = nn.Linear(2, 2)
    for name, dtype in (("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)):
        context = resolve_precision(name, "cpu").forward_context()
        assert context is not None
        for _ in range(2):  # the same object is entered again
            with context:
                assert layer(torch.zeros(1, 2)).dtype == dtype
    assert resolve_precision(32, "cpu").forward_context() is None


def test_two_optimizers_after_one_backward_are_unscaled_by_the_scale_of_their_loss() -> None:
    """The scale grows at every step here. Growth between the two steps would halve the second step's gradients."""
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1))
    left, right = (nn.Parameter(torch.zeros(())) for _ in range(2))
    optimizers = [torch.optim.SGD([parameter], lr=1.0) for parameter in (left, right)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        precision.backward(left + right)
        results = [precision.step(optimizer) for optimizer in optimizers]
        assert not any(results)
    assert (left.item(), right.item()) == (-2.0, -2.0)
    assert precision.state_dict()["scale"] == 16.0


def test_a_step_with_an_inf_is_skipped_and_halves_the_scale() -> None:
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    parameter = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    precision.backward(parameter * float("inf"))
    assert precision.step(optimizer)
    assert parameter.item() == 0.0
    again = MixedPrecision("16-mixed", "cpu")
    again.load_state_dict(precision.state_dict())
    assert again.state_dict()["scale"] == 2.0


def test_a_step_without_gradients_is_no_error() -> None:
    precision = resolve_precision(16, "cpu")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
    assert not precision.step(optimizer)
    precision.backward(nn.Parameter(torch.zeros(())) * 1.0)


def test_a_scaler_is_refused_where_it_has_no_use() -> None:
    with pytest.raises(ValueError, match="needs no loss scale"):
        MixedPrecision("bf16-mixed", "cpu", torch.amp.GradScaler("cpu"))


def test_the_scale_counts_gradients_dropped_after_clipping() -> None:
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    parameter = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    precision.backward(parameter * float("inf"))
    precision.unscale(optimizer)  # a loop that looks at the norm, and leaves the step out
    optimizer.zero_grad()
    precision.release(optimizer)
    precision.backward(parameter * 3.0)
    precision.unscale(optimizer)
    assert parameter.grad == 3.0
    assert precision.scaler is not None
    assert precision.scaler.get_scale() == 2.0


@pytest.mark.parametrize("name", [32, "bf16-mixed", "16-mixed", "bf16-true"])
def test_a_loss_is_sent_by_the_callers_own_backward(name: Any) -> None:
    precision = resolve_precision(name, "cpu")
    sent: list[Any] = []
    parameter = nn.Parameter(torch.ones(()))
    precision.backward(parameter * 2, lambda loss, **options: sent.append((loss.item(), options)), retain_graph=True)
    assert sent == [(2.0 * 2**16 if name == "16-mixed" else 2.0, {"retain_graph": True})]
    loss = parameter * 2
    precision.backward(loss, retain_graph=True)
    precision.backward(loss, inputs=[parameter])
    assert parameter.grad is not None
    assert precision.takes_closure == (name != "16-mixed")


@pytest.mark.parametrize("name", [32, "16-mixed"])
def test_a_closure_is_called_by_the_optimizer_or_before_it_under_a_scale(name: Any) -> None:
    precision = resolve_precision(name, "cpu")
    parameter = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = parameter * 3
        precision.backward(loss)
        return loss

    with torch.no_grad():
        assert not precision.step(optimizer, closure)
    assert calls == [True]
    assert parameter.item() == -3.0


def scaled(**options: Any) -> tuple[MixedPrecision, nn.Parameter, torch.optim.Optimizer]:
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0, **options))
    parameter = nn.Parameter(torch.zeros(()))
    return precision, parameter, torch.optim.SGD([parameter], lr=1.0)


def test_clipped_gradients_are_scaled_again() -> None:
    """Gradients clipped after every one of several backwards are the same as without a scale, even if the scale has grown."""
    precision, parameter, optimizer = scaled(growth_interval=1)
    other = nn.Parameter(torch.zeros(()))
    often = torch.optim.SGD([other], lr=1.0)
    seen = []
    for _ in range(3):
        precision.backward(parameter * 3.0 + other)
        precision.unscale(optimizer)
        precision.unscale(optimizer)
        assert parameter.grad is not None
        seen.append(parameter.grad.item())
        assert not precision.step(often)
        often.zero_grad()
    assert seen == [3.0, 6.0, 9.0]
    assert not precision.step(optimizer)
    assert parameter.item() == -9.0
    assert other.item() == -3.0
    assert precision.state_dict()["scale"] == 32.0


def test_an_inf_that_clipping_has_removed_still_skips_the_step() -> None:
    precision, parameter, optimizer = scaled()
    precision.backward(parameter * float("inf"))
    precision.unscale(optimizer)
    torch.nn.utils.clip_grad_value_([parameter], 1.0)
    precision.backward(parameter * 1.0)
    assert precision.step(optimizer)
    assert precision.state_dict()["scale"] == 2.0
    optimizer.zero_grad()
    precision.backward(parameter * 1.0)
    assert not precision.step(optimizer)
    assert parameter.item() == -1.0
    assert precision.state_dict()["scale"] == 2.0


def test_no_state_remains_of_gradients_dropped_after_clipping() -> None:
    precision, parameter, optimizer = scaled()
    precision.backward(parameter * float("inf"))
    precision.unscale(optimizer)
    parameter.grad = None  # as the module's zero_grad does
    precision.backward(parameter * 3.0)
    assert not precision.step(optimizer)
    assert parameter.item() == -3.0
    assert precision.state_dict()["scale"] == 2.0


def test_two_steps_may_use_the_same_gradients() -> None:
    precision, parameter, optimizer = scaled(growth_interval=1)
    precision.backward(parameter * 3.0)
    for _ in range(2):
        precision.step(optimizer)
    assert parameter.item() == -6.0
    precision.backward(parameter * 3.0)  # added to those, as without a scale
    precision.step(optimizer)
    assert parameter.item() == -12.0
    assert precision.state_dict()["scale"] == 16.0


def test_an_optimizer_without_gradients_is_clipped_and_cleared() -> None:
    precision, parameter, optimizer = scaled()
    idle = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
    for _ in range(2):
        precision.backward(parameter * 3.0)
        precision.unscale(idle)
        idle.zero_grad()
        precision.release(idle)
        for _ in range(2):
            assert not precision.step(idle)
        precision.step(optimizer)
        optimizer.zero_grad()
    assert parameter.item() == -6.0


def test_sparse_gradients_go_on_under_the_scale() -> None:
    precision = scaled()[0]
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    for _ in range(2):
        precision.backward(embedding(torch.tensor([1, 1, 2])).sum())
        precision.unscale(optimizer)
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.to_dense()[:, 0].tolist() == [0.0, 4.0, 2.0, 0.0]
