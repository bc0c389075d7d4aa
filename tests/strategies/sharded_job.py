"""The checks of ddp_sharded with optimizers of every kind, as functions for every rank and for one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_job import quiet
from everyday_job import Regresses, everyday, loader, trainer
from small import QUIET
from torch import Tensor, nn
from torch.nn import functional as F

import trainwright as tw
from trainwright.strategies.base import Strategy
from trainwright.strategies.ddp.strategy import DDPStrategy
from trainwright.strategies.oss.strategy import ShardedDDPStrategy


class Signs(torch.optim.Optimizer):
    """An optimizer that torch does not have, with an attribute and a plain value in its state."""

    def __init__(self, params: Any, lr: float, *, decay: float) -> None:
        super().__init__(params, {"lr": lr})
        self.decay = decay

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["mean"] = state.get("mean", torch.zeros_like(parameter)) * self.decay + parameter.grad
                parameter -= group["lr"] * state["mean"].tanh() / state["count"]


NO_NEW_GROUPS = r"divides parameters among the ranks.*groups cannot be added later"
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.02, eps=1e-3, amsgrad=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05, eps=1e-3),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, eps=1e-3, momentum=0.5),
    "signs": partial(Signs, lr=0.05, decay=0.5),
}


class Steps(Regresses):
    """Steps two groups by any optimizer, at different learning rates."""

    def __init__(self, make: Any, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.make = make

    def configure_optimizers(self) -> Any:
        lr = self.make.keywords["lr"]
        groups = [{"params": self.body.parameters()}, {"params": self.head.parameters(), "lr": lr / 2}]
        optimizer = self.make(groups)
        factors = [lambda step: 0.9**step, lambda step: 1.0 / (1 + step)]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Leaves(Regresses):
    """Skips a layer in every other step, and trains another from the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(5, 3)
        self.late = nn.Linear(5, 3)

    def on_train_epoch_start(self) -> None:
        self.late.requires_grad_(self.current_epoch > 0)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.body(batch[0]) + self.late(batch[0])
        if batch_idx % 2:
            hidden = hidden + self.side(batch[0])
        return F.mse_loss(self.head(hidden.tanh()), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-3, weight_decay=0.3)


class Freezes(Regresses):
    """Freezes a layer in the second epoch, where momentum and decay must not change it."""

    def on_train_epoch_start(self) -> None:
        self.body[0].requires_grad_(self.current_epoch != 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


class Norms(Regresses):
    """Has running statistics, which differ between ranks until an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body.append(nn.BatchNorm1d(3))


def steps(strategy: Any, ranks: int, name: str, path: Path) -> list[float]:
    used = trainer(strategy, accumulate_grad_batches=2, gradient_clip_val=0.5)
    used.fit(Steps(OPTIMIZERS[name]), loader(22, ranks))
    used.save_checkpoint(str(path))
    return [group["lr"] for group in used.optimizers[0].param_groups]


def leaves(strategy: Any, ranks: int, folder: Path) -> None:
    for kind in (Leaves, Freezes):
        used = trainer(strategy, max_epochs=3)
        used.fit(kind(), loader(16, ranks))
        used.save_checkpoint(str(folder / f"{kind.__name__}.ckpt"))


def resumed_steps(folder: Path, name: str) -> None:
    """Save a whole run, and a run resumed within its second epoch."""
    for end, settings in (("whole", {}), ("half", {"max_steps": 8})):
        torch.manual_seed(7)
        used = trainer("ddp_sharded", max_epochs=2, **settings)
        used.fit(Steps(OPTIMIZERS[name], 0.3), loader(22, 1, shuffle=True))
        used.save_checkpoint(str(folder / f"{name}-{end}.ckpt"))
    used = trainer("ddp_sharded", max_epochs=2)
    used.fit(Steps(OPTIMIZERS[name], 0.3), loader(22, 1, shuffle=True), ckpt_path=str(folder / f"{name}-half.ckpt"))
    used.save_checkpoint(str(folder / f"{name}-resumed.ckpt"))


def norms(path: Path) -> dict[str, Any]:
    module = Norms()
    used = trainer("ddp_sharded")
    used.fit(module, loader(16, 1), loader(9, 1))
    used.save_checkpoint(str(path))
    return {"mean": module.body[-1].running_mean.clone(), "val_loss": float(used.callback_metrics["val_loss"])}


def half_the_bytes() -> list[Tensor]:
    """Return the weights after float32 and float16 communication."""
    found = []
    for reduce_fp16 in (False, True):
        module = Regresses()
        trainer(lambda half=reduce_fp16: ShardedDDPStrategy(reduce_fp16=half)).fit(module, loader(16, 1))
        found.append(torch.cat([p.detach().reshape(-1) for p in module.parameters()]))
    return found


def adversaries(backward: Any, maker: Any, judge: Any, made: Any, judged: Any, x: Tensor, y: Tensor) -> None:
    """The maker's loss leaves gradients in the judge, which the judge's next step includes."""
    fake = maker(x)
    backward(F.softplus(-judge(y)).mean() + F.softplus(judge(fake.detach())).mean())
    judged.step()
    judged.zero_grad()
    backward(F.softplus(-judge(fake)).mean())
    made.step()
    made.zero_grad()


def repeated(backward: Any, maker: Any, judge: Any, made: Any, judged: Any, x: Tensor, y: Tensor) -> None:
    """Several backwards before a step, two of them after one forward, and gradients that the model drops."""
    maker.zero_grad()
    out = maker(x)
    backward(out.square().mean(), retain_graph=True)
    backward(out.sin().mean())
    backward(F.mse_loss(maker(x + 1), y))
    made.step()


def one_for_both(backward: Any, maker: Any, judge: Any, made: Any, judged: Any, x: Tensor, y: Tensor) -> None:
    """One optimizer steps two models with separate losses."""
    backward(F.softplus(judge(y)).mean())
    backward(F.mse_loss(maker(x), y))
    made.step()
    made.zero_grad()


def backwards_in_any_order() -> None:
    """Loops in which a backward adds to gradients that are averaged already end as on one process."""
    x, y = torch.randn(12, 4, generator=torch.manual_seed(5)), torch.randn(12, 2)
    rank = torch.distributed.get_rank()
    for train in (adversaries, repeated, one_for_both):
        strategies: tuple[Strategy, ...] = ShardedDDPStrategy(), ShardedDDPStrategy(reduce_buffer_size=0), DDPStrategy()
        for given in strategies:
            ends = []
            for strategy in (None, given):
                torch.manual_seed(2)
                maker, judge = nn.Linear(4, 2), nn.Linear(2, 1)
                models: list[Any] = [maker, judge]
                stepped = [*maker.parameters()] + [*judge.parameters()] * (train is one_for_both)
                judged = [torch.optim.SGD(judge.parameters(), 0.1)] * (train is not one_for_both)
                parts: list[Any] = [*models, torch.optim.SGD(stepped, 0.1), *judged]
                share, backward = slice(None), torch.Tensor.backward
                if strategy is not None:
                    used = tw.Accelerator(strategy=strategy, cpu=True)
                    parts, share, backward = list(used.prepare(*parts)), slice(rank, None, 2), used.backward
                for step in range(3):
                    train(backward, *(*parts, None)[:4], x[4 * step :][:4][share], y[4 * step :][:4][share])
                ends.append(torch.cat([p.detach().reshape(-1) for each in models for p in each.parameters()]))
            torch.testing.assert_close(ends[1], ends[0], msg=f"{train.__name__}, {given.name}: {ends}")


def refusals() -> None:
    mixed = Regresses()
    mixed.head.double()
    with pytest.raises(ValueError, match=r"this AdamW steps parameters in float32, float64. Convert the module"):
        trainer("ddp_sharded").fit(mixed, loader(4, 1))

    class Closes(Regresses):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises((ValueError, RuntimeError), match=r"LBFGS"):
        trainer("ddp_sharded").fit(Closes(), loader(4, 1))

    class Keeps(Regresses):
        def __init__(self) -> None:
            super().__init__()
            self.kept = torch.optim.Adam(self.parameters())

        def configure_optimizers(self) -> Any:
            return self.kept

    keeps = Keeps()
    trainer("ddp_sharded").fit(keeps, loader(4, 1))
    with pytest.raises(ValueError, match=r"this Adam was prepared before, under strategy='ddp_sharded'.*Make a new"):
        trainer("ddp_sharded").fit(keeps, loader(4, 1))

    used, model = tw.Accelerator(strategy="ddp_sharded", cpu=True), Regresses()
    _, optimizer = used.prepare(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    with pytest.raises(RuntimeError, match=NO_NEW_GROUPS):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def sharded_everyday(folder: Path) -> dict[str, Any]:
    """Make the checks of every strategy."""
    quiet()
    return everyday("ddp_sharded", folder)


def sharded(folder: Path) -> dict[str, Any]:
    """Make every check, on this rank."""
    quiet()
    found: dict[str, Any] = {
        "lr": {name: steps("ddp_sharded", 1, name, folder / f"{name}.ckpt") for name in OPTIMIZERS}
    }
    leaves("ddp_sharded", 1, folder)
    for name in ("sgd", "adam", "signs"):
        resumed_steps(folder, name)
    found["norms"] = norms(folder / "norms.ckpt")
    found["half"] = half_the_bytes()
    backwards_in_any_order()
    refusals()
    used = tw.Trainer(strategy="ddp_sharded", max_epochs=1, **QUIET)
    used.fit(Regresses(), loader(8, 1))
    found["held"] = sum(1 for _ in used.optimizers[0].state)
    return found
