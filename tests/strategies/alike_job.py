"""Corner cases of a step that must agree under every strategy, as functions that run on every rank."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contract_job import quiet
from small import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw

WIDTH = 6
STRATEGIES = ("ddp", "ddp_sharded", "fsdp")
ZERO = ("deepspeed_stage_1", "deepspeed_stage_3")
LATE = ("ddp", "fsdp")
"""Strategies under which a module makes parameters after the setup."""


def accepting(strategy: str) -> Any:
    """Return a strategy that accepts an optimizer not known to be elementwise."""
    if strategy == "fsdp":
        return tw.FSDPStrategy(elementwise=True)
    return tw.DeepSpeedStrategy(stage=int(strategy[-1]), elementwise=True) if strategy in ZERO else strategy


def data(samples: int = 24) -> DataLoader[Any]:
    torch.manual_seed(5)
    return DataLoader(TensorDataset(torch.randn(samples, WIDTH)), batch_size=2)


def whole(module: nn.Module) -> dict[str, Tensor]:
    """Return the whole parameters. Collective."""
    named = {name: each.detach() for name, each in module.named_parameters()}
    return {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).float().clone()
        for name, each in named.items()
    }


class Buffers(tw.Module):
    """Has buffers that its step reads and writes: one in place, one by another tensor, one of a layer."""

    def __init__(self, is_automatic: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.automatic_optimization = is_automatic
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, WIDTH))
        self.register_buffer("center", torch.zeros(WIDTH))
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.seen: list[list[float]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        x = batch[0]
        self.seen.append([*self.center.tolist(), self.scale.item(), *self.net[1].running_mean.tolist()])
        out = self.net(x - self.center) * self.scale.detach()
        with torch.no_grad():
            self.center.mul_(0.9).add_(0.1 * x.mean(0))
            self.scale = self.scale * 0.9 + 0.1 * x.abs().mean()
        loss = (out - x).square().mean()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def buffers(strategy: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode, is_automatic, accumulate in (("automatic", True, 1), ("manual", False, 1), ("windows", True, 2)):
        module = Buffers(is_automatic)
        tw.Trainer(strategy=strategy, max_epochs=1, accumulate_grad_batches=accumulate, **QUIET).fit(module, data())
        found[mode] = module.seen
    return found


class Copies(tw.Module):
    """Learns to copy its input, by an optimizer that `make` makes."""

    def __init__(self, make: Any = torch.optim.SGD) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net, self.head, self.make = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH), make

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x).tanh())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self(batch[0]) - batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("error", (self(batch[0]) - batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters(), lr=0.1)


class Late(Copies):
    """Makes parameters after the setup, with other values on every rank, and clips."""

    def __init__(self) -> None:
        super().__init__()
        del self.head
        self.made_in_an_epoch = False

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + self.shift if self.made_in_an_epoch else out

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.made_in_an_epoch = True
            self.shift = nn.Parameter(torch.full((WIDTH,), float(dist.get_rank())))
            self.trainer.optimizers[0].add_param_group({"params": [self.shift]})

    def configure_optimizers(self) -> Any:
        torch.manual_seed(dist.get_rank())
        self.head = nn.Linear(4, WIDTH)
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def late(strategy: str, folder: Path) -> dict[str, Any]:
    module = Late()
    trainer = tw.Trainer(strategy=strategy, max_epochs=2, gradient_clip_val=1.0, **QUIET)
    trainer.fit(module, data())
    trainer.save_checkpoint(folder / f"late-{strategy}.ckpt")
    return whole(module)


class Tempered(tw.Module):
    """Has scalar and larger parameters, and clips in both batches before a step."""

    def __init__(self, is_automatic: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.automatic_optimization = is_automatic
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = (self.net(batch[0]) * self.temperature - batch[0]).float().square().mean()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.5)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.5)


def tempered(strategy: str) -> dict[str, Any]:
    found = {}
    for precision in ("32-true", "16-mixed"):
        for is_automatic in (True, False):
            module = Tempered(is_automatic)
            clip = 0.5 if is_automatic else None
            tw.Trainer(strategy=strategy, precision=precision, max_epochs=1, gradient_clip_val=clip, **QUIET).fit(
                module, data()
            )
            found[f"{precision} {is_automatic}"] = whole(module)
    return found


class Keeping(torch.optim.Optimizer):
    """Keeps state other than tensors: a number, a tuple, a list."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            state["pair"] = (state["count"], float("inf"))
            state["history"] = [*state.get("history", []), parameter.grad.clone()][-2:]
            parameter -= 0.1 / state["pair"][0] * sum(state["history"])


def kept(strategy: str, folder: Path) -> dict[str, Any]:
    """Whole, and in three parts."""
    module = Copies(Keeping)
    tw.Trainer(strategy=strategy, max_epochs=3, **QUIET).fit(module, data())
    path = None
    for epochs in (1, 2, 3):
        again = Copies(Keeping)
        trainer = tw.Trainer(strategy=strategy, max_epochs=epochs, **QUIET)
        trainer.fit(again, data(), ckpt_path=path)
        path = folder / f"kept-{strategy}-{epochs}.ckpt"
        trainer.save_checkpoint(path)
    return {"whole": whole(module), "in parts": whole(again)}


class Unstorable(Copies):
    def configure_optimizers(self) -> Any:
        optimizer = Keeping(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(self._put)
        return optimizer

    def _put(self, optimizer: Any, *_: Any) -> None:
        mine = [p for p in optimizer.state if p is self.head.bias]
        for parameter in mine:
            optimizer.state[parameter]["odd"] = object()


class Words(tw.Module):
    """Has an embedding with these options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(9, WIDTH, **options)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.words((batch[0].abs() * 3).long().clamp(max=8)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def outlived(strategy: str) -> list[bool]:
    """Whether a module and its trainer are still there when a run is over and nobody holds them."""

    def run(*calls: str) -> list[Any]:
        module = Copies(torch.optim.AdamW)
        trainer = tw.Trainer(strategy=strategy, max_epochs=1, **QUIET)
        for call in calls:
            getattr(trainer, call)(module, data())
        return [weakref.ref(module), weakref.ref(trainer)]

    left = run("fit", "validate") + run("validate") + run("fit")
    gc.collect()
    return [each() is not None for each in left]


def told(work: Any) -> str:
    """Return the error that the work raises."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Hooked(Copies):
    """Records the calls of its parameters' hooks."""

    def configure_optimizers(self) -> Any:
        self.calls: list[bool] = []
        self.net.weight.register_post_accumulate_grad_hook(lambda p: self.calls.append(bool(p.grad.any())))
        self.net.bias.register_hook(lambda gradient: self.calls.append(bool(gradient.any())))
        return super().configure_optimizers()


def hooked(folder: Path) -> dict[str, Any]:
    """Return the hooks' calls in a run, and in two runs resumed from its end, of which the second trains."""
    found = {}
    for name, epochs, path in (("first", 1, None), ("ended", 1, "hooked.ckpt"), ("more", 2, "hooked.ckpt")):
        module = Hooked()
        trainer = tw.Trainer(strategy="ddp", max_epochs=epochs, **QUIET)
        trainer.fit(module, data(), ckpt_path=None if path is None else folder / path)
        found[name] = module.calls
        if path is None:
            trainer.save_checkpoint(folder / "hooked.ckpt")
    return found


class Apart(Copies):
    """Excludes a parameter and a buffer from synchronization."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.full((WIDTH,), float(dist.get_rank())))
        self.register_buffer("place", torch.full((), float(dist.get_rank())))
        self._ddp_params_and_buffers_to_ignore = ["own", "place"]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self(batch[0]) + self.own - batch[0]).square().mean()


def apart() -> dict[str, Any]:
    module = Apart()
    trainer = tw.Trainer(strategy="ddp", max_epochs=1, **QUIET)
    trainer.fit(module, data())
    trainer.validate(module, data(), verbose=False)
    return {**whole(module), "place": module.place}


class Scheduled(Copies):
    """Its learning rate is halved every epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def rates(strategy: str, folder: Path) -> dict[str, list[float]]:
    """Return the learning rates that were logged, by name."""
    monitor = tw.LearningRateMonitor()
    settings = {**QUIET, "logger": tw.CSVLogger(folder / f"rates {strategy}"), "log_every_n_steps": 1}
    tw.Trainer(strategy=strategy, max_epochs=2, callbacks=[monitor], **settings).fit(Scheduled(), data())
    return monitor.lrs


class Telling(torch.optim.SGD):
    """Records autocast and the default dtype of its steps."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.seen: set[Any] = set()

    def step(self, closure: Any = None) -> Any:
        self.seen.add((torch.is_autocast_enabled("cpu"), str(torch.get_default_dtype())))
        return super().step(closure)


def arithmetic(strategy: str) -> dict[str, Any]:
    found = {}
    for precision in ("bf16-mixed", "bf16-true"):
        for is_automatic in (True, False):
            module, seen = Tempered(is_automatic), set()
            module.configure_optimizers = lambda m=module, s=seen: _telling(m, s)
            tw.Trainer(strategy=accepting(strategy), precision=precision, max_epochs=1, **QUIET).fit(module, data())
            found[f"{precision} {is_automatic}"] = seen
    return found


class Norms(Copies):
    """Has layers that autocast computes in a low precision, and some whose weights it leaves in float32."""

    def __init__(self) -> None:
        super().__init__()
        encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        convolution = nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 1, 3, padding=1), nn.Flatten())
        norms = [nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.BatchNorm1d(8), nn.PReLU()]
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), *norms, convolution, encoder, nn.Linear(8, 4))


def norms(strategy: str) -> dict[str, Any]:
    found = {}
    for precision in ("16-mixed", "bf16-mixed"):
        module = Norms()
        tw.Trainer(strategy=strategy, precision=precision, max_epochs=2, **QUIET).fit(module, data())
        found[precision] = whole(module)
    return found


def _telling(module: nn.Module, seen: set[Any]) -> Telling:
    optimizer = Telling(module.parameters(), lr=0.1)
    optimizer.seen = seen
    return optimizer


class Whole(torch.optim.SGD):
    """Takes its parameters for whole ones."""

    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.data.add_(torch.zeros(parameter.shape))


def alike(folder: Path) -> dict[str, Any]:
    """Make every check, on this rank."""
    quiet()
    found: dict[str, Any] = {
        "buffers": {}, "late": {}, "tempered": {}, "kept": {}, "arithmetic": {}, "norms": {}, "refused": {},
    }  # fmt: skip
    for strategy in (*STRATEGIES, *ZERO):
        found["buffers"][strategy] = buffers(strategy)
        found["arithmetic"][strategy] = arithmetic(strategy)
    for strategy in STRATEGIES:
        found["tempered"][strategy] = tempered(strategy)
        found["kept"][strategy] = kept(strategy, folder) if strategy != "fsdp" else {}
    for strategy in LATE:
        found["late"][strategy] = late(strategy, folder)
        found["norms"][strategy] = norms(strategy)
    found["rates"] = {strategy: rates(strategy, folder) for strategy in (*STRATEGIES, *ZERO)}
    found["hooked"] = hooked(folder)
    found["apart"] = apart()
    found["outlived"] = {strategy: outlived(strategy) for strategy in (*STRATEGIES, *ZERO)}
    refused = found["refused"]
    trainer = tw.Trainer(strategy="ddp_sharded", max_epochs=1, **QUIET)
    trainer.fit(Unstorable(), data())
    refused["unstorable"] = told(lambda: trainer.save_checkpoint(folder / "unstorable.ckpt"))
    for strategy in ("ddp_sharded", "fsdp"):
        refused[f"apart {strategy}"] = told(
            lambda strategy=strategy: tw.Trainer(strategy=strategy, max_epochs=1, **QUIET).fit(Apart(), data())
        )
    for strategy in (*STRATEGIES, *ZERO):
        refused[f"row norms {strategy}"] = told(
            lambda strategy=strategy: tw.Trainer(strategy=strategy, max_epochs=1, **QUIET).fit(
                Words(max_norm=1.0), data()
            )
        )
        refused[f"sparse {strategy}"] = told(
            lambda strategy=strategy: tw.Trainer(strategy=strategy, max_epochs=1, **QUIET).fit(
                Words(sparse=True), data()
            )
        )
    module = Copies()
    tw.Trainer(strategy="fsdp", precision="bf16-mixed", max_epochs=1, **QUIET).fit(module, data())
    for call in ("fit", "validate"):
        for precision in ("32-true", "16-mixed"):
            trainer = tw.Trainer(strategy="fsdp", precision=precision, max_epochs=1, **QUIET)
            refused[f"{call} {precision}"] = told(lambda t=trainer, call=call: getattr(t, call)(module, data()))
    refused["copy"] = told(lambda: copy.deepcopy(module))
    parted = Copies()
    tw.Trainer(strategy="deepspeed_stage_3", max_epochs=1, **QUIET).fit(parted, data())
    refused["copy of stage 3"] = told(lambda: copy.deepcopy(parted))
    for kind in (torch.optim.Adafactor, torch.optim.Rprop, Whole):
        refused[kind.__name__] = told(
            lambda kind=kind: tw.Trainer(strategy=accepting("fsdp"), max_epochs=1, **QUIET).fit(Copies(kind), data())
        )
    return found
