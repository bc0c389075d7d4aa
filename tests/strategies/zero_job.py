"""Optimizers under DeepSpeed's stages, as functions that run on every rank of a job and on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_job import quiet
from everyday_job import RANK_BATCH, Regresses, loader, numbers, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import trainwright as tw
from trainwright.strategies.fsdp2.strategy import FSDPStrategy
from trainwright.strategies.zero.strategy import DeepSpeedStrategy

STAGES = (1, 2, 3)
WINDOW = 512


class Counts(torch.optim.Optimizer):
    """Keeps numbers beside tensors: one per parameter and one per group."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["number"] = state.get("number", 0) + 1
                state.setdefault("mean", torch.zeros_like(parameter)).mul_(0.9).add_(parameter.grad)
                parameter.sub_(state["mean"] * group["lr"] / (state["number"] + 0.1 * group["steps"]))
            group["steps"] += 1


class Layers(torch.optim.SGD):
    """Scales a step by its tensor's norm, as LAMB and LARS do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.sub_(0.01 * parameter.grad * parameter.norm() / parameter.grad.norm())


UNKNOWN = "{} is not known to step every element .* strategy='deepspeed_stage_"
UNKNOWN_TO_FSDP = "Layers is not known to step every element independently, and strategy='fsdp'"
MAKERS: dict[str, Callable[..., Any]] = {
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1, lr_decay=0.01, fused=False),
    "AdamW": partial(torch.optim.AdamW, lr=0.02, eps=1e-3, weight_decay=0.3),
    "Counts": partial(Counts, lr=0.02),
}


class Grouped(Regresses):
    """Has a frozen group, a group with an unused parameter, and a schedule per group."""

    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        self.cold = nn.Linear(3, 3).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3, 3))
        self.gain = nn.Parameter(torch.tensor(1.3))
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain

    def configure_optimizers(self) -> Any:
        rest = [*self.head.parameters(), self.unused, self.gain]
        parts: list[Any] = [self.cold.parameters(), self.body.parameters(), rest]
        optimizer = self.make([{"params": list(part)} for part in parts])
        rates = [lambda step: 1.0, lambda step: 0.8**step, lambda step: 1.0 / (step + 1)]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Thaws(Regresses):
    """The body joins after an epoch, so that its count of steps is behind the head's."""

    def on_train_epoch_start(self) -> None:
        self.body.requires_grad_(self.current_epoch > 0)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-3)


class Thawed(Thaws):
    def on_train_epoch_start(self) -> None:
        pass


class Kept(Regresses):
    """Its optimizer is made once, for every fit."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.3))
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain

    def configure_optimizers(self) -> Any:
        return self.optimizer


class Sums(tw.Module):
    """A batch's gradient is 1/512, and 512 of them cannot be summed in sixteen bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        nn.init.zeros_(self.layer.bias)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(torch.zeros(1, 2, dtype=self.layer.weight.dtype)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.layer.bias], lr=1.0)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (numbers(20)[index] for index in range(20))


def fit(strategy: Any, module: tw.Module, ranks: int, path: Path, resume: Path | None = None, **settings: Any) -> None:
    used = trainer(strategy, **{"max_epochs": 2, "gradient_clip_val": 0.5, **settings})
    used.fit(module, loader(12, ranks), ckpt_path=None if resume is None else str(resume))
    used.save_checkpoint(str(path))


def resumed(strategy: Any, name: str, folder: Path, ranks: int, settings: dict[str, Any], said: str = "") -> None:
    """Save a whole run, its first half, and a run resumed from the half."""
    make, path = partial(Grouped, MAKERS[name]), folder / f"{said}{name}"
    fit(strategy, make(), ranks, path.with_suffix(".whole"), **settings)
    fit(strategy, make(), ranks, path.with_suffix(".half"), **settings, max_epochs=1)
    fit(strategy, make(), ranks, path.with_suffix(".resumed"), path.with_suffix(".half"), **settings)


def again(strategy: str) -> None:
    """A second fit with an optimizer whose state is sharded is an error."""
    module = Kept()
    trainer(strategy).fit(module, loader(8, 1))
    for other in (strategy, "ddp")[: 1 if strategy == "deepspeed_stage_3" else 2]:
        with pytest.raises(
            ValueError, match=rf"was prepared before, under strategy='{strategy}'.*Make a new optimizer"
        ):
            trainer(other).fit(module, loader(8, 1))


def windows(strategy: Any, precision: str) -> float:
    """Return a bias that was 0 before one window."""
    module = Sums()
    used = trainer(strategy, precision=precision, accumulate_grad_batches=WINDOW, max_steps=1, max_epochs=-1)
    used.fit(module, DataLoader(torch.zeros(2 * WINDOW, 1), batch_size=1))  # type: ignore[arg-type]
    return float(module.layer.bias.float().detach()) if module.layer.bias.numel() else float("nan")


def streams(strategy: Any, path: Path, **settings: Any) -> None:
    """Train on a stream whose last window is short."""
    used = trainer(strategy, accumulate_grad_batches=4, **settings)
    used.fit(Thawed(), DataLoader(Stream(), batch_size=RANK_BATCH))
    used.save_checkpoint(str(path))


def sharded_rows(folder: Path) -> None:
    """Under fsdp an unknown optimizer needs elementwise=True, and Adafactor is rejected."""

    class Other(Regresses):
        def __init__(self, make: Callable[..., Any]) -> None:
            super().__init__()
            self.make = make

        def configure_optimizers(self) -> Any:
            return self.make(self.parameters(), lr=0.05)

    taken = partial(FSDPStrategy, elementwise=True)
    fit(taken, Other(Layers), 1, folder / "layers.fsdp")
    with pytest.raises(ValueError, match=UNKNOWN_TO_FSDP):
        trainer("fsdp").fit(Other(Layers), loader(8, 1))
    with pytest.raises(ValueError, match=r"Adafactor does not compute on the sharded parameters .DTensors. that"):
        trainer(taken).fit(Other(torch.optim.Adafactor), loader(8, 1))
    fit("ddp", Other(Layers), 1, folder / "layers.ddp")
    fit("ddp_sharded", Other(Layers), 1, folder / "layers.ddp_sharded")


def refusals() -> None:
    """Settings that would train other weights are rejected by name on every rank."""

    class Other(Regresses):
        def __init__(self, make: Callable[..., Any], parameter: Tensor | None = None) -> None:
            super().__init__()
            self.make = make
            if parameter is not None:
                self.odd = nn.Parameter(parameter)

        def configure_optimizers(self) -> Any:
            return self.make([p for p in self.parameters() if p.dim() == 2])

    sgd = partial(torch.optim.SGD, lr=0.1)
    refused = [
        *((Other(kind), UNKNOWN.format(kind.__name__)) for kind in (torch.optim.Adafactor, Layers, torch.optim.LBFGS)),
        (Other(torch.optim.Muon), "Muon steps whole matrices, .* strategy='deepspeed_stage_.*'ddp', or 'ddp_sharded'"),
        (Other(sgd, torch.zeros(2, 2, dtype=torch.complex64)), "'odd' in complex64.*but DeepSpeed"),
        (Other(sgd, torch.zeros(2, 2, dtype=torch.float64)), "'odd' in float64.*but DeepSpeed"),
    ]
    for module, text in refused:
        for stage in STAGES:
            with pytest.raises(ValueError, match=text):
                trainer(f"deepspeed_stage_{stage}").fit(module, loader(8, 1))
    untested = partial(DeepSpeedStrategy, config={"zero_allow_untested_optimizer": True})
    trainer(untested).fit(Other(Layers), loader(8, 1))


def zero(folder: Path) -> dict[str, Any]:
    """Make every check, on this rank."""
    quiet()
    found: dict[str, Any] = {}
    fit("ddp", Thaws(), 1, folder / "thaws-2.ckpt")
    fit("ddp", Thaws(), 1, folder / "thaws-3.ckpt", max_epochs=3)
    for stage in STAGES:
        strategy, own = partial(DeepSpeedStrategy, stage=stage, elementwise=True), folder / str(stage)
        for name in MAKERS:
            for precision in ("32-true", "bf16-mixed") if name != "Counts" else ("32-true",):
                resumed(strategy, name, own, 1, {"precision": precision}, "low " if precision != "32-true" else "")
            one = (folder / "alone" / name).with_suffix(".half")
            fit(strategy, Grouped(MAKERS[name]), 1, own / f"{name}.across", one)
        fit(strategy, Thawed(), 1, own / "thawed.ckpt", folder / "thaws-2.ckpt", max_epochs=3)
        again(f"deepspeed_stage_{stage}")
        found[stage] = [windows(strategy, precision) for precision in ("bf16-mixed", "bf16-true")]
        if stage < 3:
            config = {"data_types": {"grad_accum_dtype": "bf16"}}
            found[stage].append(windows(partial(DeepSpeedStrategy, stage=stage, config=config), "bf16-true"))
        offload = partial(
            DeepSpeedStrategy, stage=stage, config={"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
        )
        streams(offload, own / "stream.ckpt", gradient_clip_val=0.3)
        with pytest.raises(RuntimeError, match=r"under offloading DeepSpeed keeps gradients where .* Clip by norm"):
            streams(offload, own / "value.ckpt", gradient_clip_val=0.01, gradient_clip_algorithm="value")
    streams("ddp", folder / "stream.ckpt", gradient_clip_val=0.3)
    refusals()
    sharded_rows(folder)
    return found


def alone(folder: Path) -> None:
    """Make one process's runs, which the ranks go on with."""
    for name in MAKERS:
        resumed("single_device", name, folder / "alone", 2, {})
