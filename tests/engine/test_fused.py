"""Fused by default: which groups, the same numbers, late gradients, checkpoints either way, and the loss scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small import assert_close, assert_equal, loss_of, make_data, make_net, weights
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainwright.checkpoint.tensors import TensorEntry
from trainwright.devices import abilities
from trainwright.engine.optimizers import may_use_closure, needs_closure, use_fused
from trainwright.precision.mixed import MixedPrecision
from trainwright.strategies import Strategy
from trainwright.strategies.base import Clipping

MAKERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": lambda p: AdamW(p, 0.01),
    "adam amsgrad": lambda p: Adam(p, 0.01, amsgrad=True, weight_decay=0.1),
    "sgd": lambda p: SGD(p, 0.05),
    "sgd momentum": lambda p: SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": lambda p: Adagrad(p, 0.05, initial_accumulator_value=0.1),
}
DATA = make_data(8)[:]


def train(net: nn.Module, optimizer: Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(net, DATA).backward()
        optimizer.step()


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_numbers_are_those_of_the_unfused(make: Callable[..., Optimizer]) -> None:
    nets = make_net(), make_net()
    optimizers = [make(net.parameters()) for net in nets]
    assert use_fused(optimizers[0], [nets[0]])
    for net, optimizer in zip(nets, optimizers, strict=True):
        train(net, optimizer, 200)
    assert optimizers[0].param_groups[0]["fused"]
    assert not optimizers[1].param_groups[0]["fused"]
    assert_close(weights(nets[0]), weights(nets[1]), 1e-6)


class Stepping(AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Renamed(AdamW):
    pass


@pytest.mark.parametrize(("make", "expected"), [
    (lambda p: AdamW(p, fused=False), False),
    (lambda p: AdamW(p, foreach=True), False),
    (lambda p: AdamW(p, foreach=False), False),
    (lambda p: AdamW(p, lr=torch.tensor(0.1)), False),
    (lambda p: Adam(p, differentiable=True), False),
    (lambda p: SGD(p, 0.1, momentum=0.9, dampening=0.5), False),
    (RMSprop, False),
    (Stepping, False),
    (Renamed, True),
    (lambda p: AdamW(p, fused=True), True),
])  # fmt: skip
def test_what_the_user_chose_stays(make: Callable[..., Optimizer], expected: bool) -> None:
    assert use_fused(make(make_net().parameters())) is expected


def test_the_compiler_once_loaded_changes_nothing() -> None:
    torch.compile(nn.Linear(1, 1), backend="eager")(torch.ones(1, 1))  # from now on it stands in torch's optimizers
    for make in MAKERS.values():
        assert use_fused(make(make_net().parameters()))
    assert needs_closure(torch.optim.LBFGS(make_net().parameters()))
    assert not may_use_closure(AdamW(make_net().parameters()))


@pytest.mark.parametrize(("make", "tensor", "expected"), [
    (Adam, torch.zeros(40, dtype=torch.bfloat16), True),
    (Adam, torch.zeros(40, dtype=torch.float64), True),
    (SGD, torch.zeros(40, dtype=torch.float16), False),
    (Adagrad, torch.zeros(40, dtype=torch.complex64), False),
    (Adam, torch.zeros(7, 5).t(), True),
    (Adam, torch.zeros(5, 14)[:, ::2], False),
    (Adam, torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
])  # fmt: skip
def test_kernels_get_only_tensors_that_they_step_right(make: Any, tensor: Tensor, expected: bool) -> None:
    assert use_fused(make([nn.Parameter(tensor)])) is expected


def test_groups_of_sparse_embeddings_are_not_fused() -> None:
    embedding, linear = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)
    optimizer = SGD([{"params": embedding.parameters()}, {"params": linear.parameters()}], lr=0.1)
    assert use_fused(optimizer, [nn.ModuleList([embedding, linear])])
    assert [bool(group["fused"]) for group in optimizer.param_groups] == [False, True]


def test_a_parameter_may_get_its_first_gradient_late() -> None:
    """Unfrozen after the first steps, as in finetuning. Torch's kernel rejects momentum buffers if some are missing."""
    ends = []
    for fused in (False, True):
        net = make_net()
        net[0].requires_grad_(False)
        optimizer = SGD(net.parameters(), 0.05, momentum=0.9)
        assert use_fused(optimizer, [net]) if fused else True
        train(net, optimizer, 3)
        net[0].requires_grad_(True)
        train(net, optimizer, 3)
        ends.append(weights(net))
    assert_close(*ends, 1e-6)


def test_a_group_added_later_is_fused() -> None:
    net = make_net()
    optimizer = AdamW(net[3].parameters(), 0.01)
    use_fused(optimizer, [net])
    train(net, optimizer, 2)
    optimizer.add_param_group({"params": net[0].parameters()})
    train(net, optimizer, 2)
    assert [group["fused"] for group in optimizer.param_groups] == [True, None]
    use_fused(optimizer, [net])
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]
    train(net, optimizer, 2)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_state_goes_from_one_kind_to_the_other(make: Callable[..., Optimizer], before: bool, after: bool) -> None:
    def made(fused: bool) -> tuple[nn.Module, Optimizer, dict[Tensor, str]]:
        net = make_net()
        optimizer = make(net.parameters())
        assert use_fused(optimizer, [net]) if fused else True
        return net, optimizer, {parameter: name for name, parameter in net.named_parameters()}

    strategy = Strategy()
    net, optimizer, names = made(before)
    train(net, optimizer, 3)
    other, resumed, other_names = made(after)
    other.load_state_dict(net.state_dict())
    pieces = {piece.name: piece.tensor for piece in strategy.optimizer_pieces(optimizer, names)}
    entries = {name: TensorEntry(tuple(tensor.shape), tensor.dtype) for name, tensor in pieces.items()}
    strategy.allocate_optimizer_state(resumed, other_names, entries)
    for piece in strategy.optimizer_pieces(resumed, other_names):
        piece.tensor.copy_(pieces[piece.name])
    train(net, optimizer, 3)
    train(other, resumed, 3)
    if before == after:
        assert_equal(weights(net), weights(other))
    else:
        assert_close(weights(net), weights(other), 1e-6)


def test_a_fused_optimizer_works_with_loss_scale_and_clipping() -> None:
    ends = []
    for fused in (False, True):
        net = make_net()
        optimizer = AdamW(net.parameters(), 0.01)
        assert use_fused(optimizer, [net]) if fused else True
        precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**12))
        strategy = Strategy()
        strategy.connect(0, 1, torch.device("cpu"), precision)
        norms = []
        for step in range(6):
            optimizer.zero_grad()
            with precision.forward_context():
                loss = loss_of(net, DATA)
            strategy.backward(loss * (float("inf") if step == 2 else 1.0))
            before = weights(net)
            result = strategy.step(optimizer, Clipping(norm=0.1))
            assert result.skipped == (step == 2)
            if result.skipped:
                assert_equal(before, weights(net))
            norms.append(result.norm)
        assert precision.state_dict()["scale"] == 2.0**11
        assert 0.1 < norms[0] < 10.0  # of the unscaled gradients
        ends.append(weights(net))
    assert_close(*ends, 1e-6)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_group_that_began_lazy_stays_as_it_is() -> None:
    """Else it would depend on when a run was resumed which steps are fused."""
    net = nn.LazyLinear(2)
    optimizer = SGD(net.parameters(), 0.05)
    assert not use_fused(optimizer, [net])
    net(torch.ones(1, 3))
    assert not use_fused(optimizer, [net])
    assert use_fused(SGD(net.parameters(), 0.05), [net])


def test_the_trial_of_a_fused_step_calls_no_hook_of_the_user() -> None:
    seen: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda *given: seen.append(given))
    abilities.fuses.cache_clear()
    assert abilities.fuses("cpu", "Adam", torch.float32)
    handle.remove()
    assert seen == []
