"""Forwards, backwards and optimizers within a manual step, in every precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import ON_HOST, QUIET, loss_of, make_loader, make_net
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trainwright as tw

LOW = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


class FourSteps(tw.Module):
    """Steps four times in one training_step, in the way that `way` names, and keeps the losses."""

    automatic_optimization = False

    def __init__(self, way: str) -> None:
        super().__init__()
        self.net = make_net()
        self.way = way
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        if self.way == "raw":
            optimizer = torch.optim.SGD(self.net.parameters(), lr=0.3)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(self.net, batch)
            self.losses.append(loss.item())
            if self.way == "raw":
                loss.backward()
            else:
                self.manual_backward(loss)
            return loss

        if self.way == "closure":
            optimizer.step(closure)
            return
        for _ in range(4):
            closure()
            if self.way == "by hand":
                with torch.no_grad():
                    for parameter in self.net.parameters():
                        parameter.sub_(0.3 * parameter.grad)
            else:
                optimizer.step()

    def configure_optimizers(self) -> Any:
        if self.way == "closure":
            return torch.optim.LBFGS(self.parameters(), lr=0.3, max_iter=4)
        return torch.optim.SGD(self.parameters(), lr=0.3)


def losses_by_hand(dtype: torch.dtype, batch: Any, way: str) -> list[float]:
    """The same with a context per forward."""
    net, losses = make_net(), []
    kinds: dict[str, Any] = {"closure": lambda p: torch.optim.LBFGS(p, lr=0.3, max_iter=4)}
    optimizer = kinds.get(way, lambda p: torch.optim.SGD(p, lr=0.3))(net.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = loss_of(net, batch)
        losses.append(loss.item())
        loss.backward()
        return loss

    for _ in range(1 if way == "closure" else 4):
        optimizer.step(closure)
    return losses


@pytest.mark.host
@pytest.mark.parametrize("way", ["prepared", "raw", "by hand", "closure"])
def test_a_forward_sees_what_changed_before_it_in_the_same_step(way: str) -> None:
    module = FourSteps(way)
    loader = make_loader(4)
    tw.Trainer(max_epochs=1, precision="bf16-mixed", fused_optimizers=False, **QUIET).fit(module, loader)
    expected = losses_by_hand(torch.bfloat16, next(iter(loader)), way)
    assert module.losses == expected
    assert len(set(expected)) >= 4


def test_a_forward_sees_a_step_under_a_loss_scale() -> None:
    module = FourSteps("prepared")
    loader = make_loader(4)
    tw.Trainer(max_epochs=1, precision="16-mixed", fused_optimizers=False, **QUIET).fit(module, loader)
    assert module.losses == pytest.approx(losses_by_hand(torch.float16, next(iter(loader)), "prepared"), rel=2e-3)


class Telling(torch.optim.SGD):
    """Records the dtype of its arithmetic."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.seen: set[Any] = set()

    def step(self, closure: Any = None) -> Any:
        self.seen.add(
            (conditions(), (torch.ones(2, 2, dtype=torch.float32) @ torch.ones(2, 2, dtype=torch.float32)).dtype)
        )
        loss = None if closure is None else closure()
        super().step()
        return loss


def conditions() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cpu"), torch.get_default_dtype()


class Conditions(tw.Module):
    """Records the dtypes of its forward, its gradients' hooks and its optimizer."""

    def __init__(self, is_automatic: bool) -> None:
        super().__init__()
        self.automatic_optimization = is_automatic
        self.net = make_net()
        self.in_forward: set[Any] = set()
        self.in_backward: set[Any] = set()
        self.before_step: set[Any] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.in_forward.add(conditions())
        loss = loss_of(self.net, batch)
        loss.register_hook(lambda _: self.in_backward.add(conditions()))
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.in_forward.add(conditions())
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.before_step.add(conditions())

    def configure_optimizers(self) -> Any:
        self.optimizer = Telling(self.parameters())
        return self.optimizer


@pytest.mark.host
@pytest.mark.parametrize("is_automatic", [True, False])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "bf16-true", "64-true"])
def test_an_optimizers_arithmetic_is_its_own(precision: str, is_automatic: bool) -> None:
    module = Conditions(is_automatic)
    tw.Trainer(max_epochs=1, precision=precision, **QUIET).fit(module, make_loader(8))
    default = {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(precision, torch.float32)
    assert module.in_forward == {(precision in LOW, default)}
    assert module.in_backward == {(False, default)}
    assert module.before_step == {(False, torch.float32)}
    assert module.optimizer.seen == {((False, torch.float32), torch.float32)}
    assert conditions() == (False, torch.float32)


class Recomputing(Conditions):
    """Makes tensors in a part that is computed again in backward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        def part(x: Tensor) -> Tensor:
            return (self.net(x) + torch.ones(3)) * torch.tensor(0.5)

        loss = nn.functional.cross_entropy(checkpoint(part, batch[0], use_reentrant=False), batch[1])
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        self.optimizers().step()
        return None


@pytest.mark.host
@pytest.mark.parametrize("is_automatic", [True, False])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_what_is_computed_again_has_the_dtypes_of_the_first_time(precision: str, is_automatic: bool) -> None:
    tw.Trainer(max_epochs=1, precision=precision, **QUIET).fit(Recomputing(is_automatic), make_loader(8))


class Closing(Conditions):
    """Lets its optimizer call for the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            self.in_forward.add(conditions())
            optimizer.zero_grad()
            loss = loss_of(self.net, batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


class Averaged(tw.Module):
    """Validates its weights, and then others in their place."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("own", loss_of(self.net, batch))
        kept = [parameter.detach().clone() for parameter in self.net.parameters()]
        for parameter in self.net.parameters():
            parameter.data.mul_(0.5)
        self.log("average", loss_of(self.net, batch))
        for parameter, value in zip(self.net.parameters(), kept, strict=True):
            parameter.data.copy_(value)


@pytest.mark.host
def test_a_closure_runs_in_the_steps_precision() -> None:
    for precision, expected in (("bf16-mixed", (True, torch.float32)), ("64-true", (False, torch.float64))):
        module = Closing(False)
        tw.Trainer(max_epochs=1, precision=precision, **QUIET).fit(module, make_loader(8))
        assert module.in_forward == {expected}
        assert module.optimizer.seen == {((False, torch.float32), torch.float32)}


@pytest.mark.host
def test_an_evaluation_sees_weights_that_its_step_puts_in_place() -> None:
    module, loader = Averaged(), make_loader(4)
    found = tw.Trainer(precision="bf16-mixed", **QUIET).validate(module, loader)[0]
    batch = next(iter(loader))
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            own = loss_of(module.net, batch).item()
        for parameter in module.net.parameters():
            parameter.mul_(0.5)
        with torch.autocast("cpu", torch.bfloat16):
            average = loss_of(module.net, batch).item()
    assert own != average
    assert found == pytest.approx({"own": own, "average": average})


@pytest.mark.host
def test_a_raw_loop_may_step_within_autocast() -> None:
    accelerator = tw.Accelerator(cpu=ON_HOST, mixed_precision="bf16")
    net = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(net, Telling(net.parameters()))
    outputs = []
    for _ in range(2):
        with accelerator.autocast():
            for _ in range(2):
                loss = model(torch.ones(4, 2)).sum()
                outputs.append(loss.item())
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    assert len(set(outputs)) == 4
    assert optimizer.optimizer.seen == {((False, torch.float32), torch.float32)}
