"""The checks of DeepSpeed's engines, as functions that run on every rank of a job and on one process."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_job import Players, quiet
from everyday_job import RANK_BATCH, Regresses, everyday, loader, numbers, trainer
from small import QUIET, Averaging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import trainwright as tw
from trainwright.strategies.zero.strategy import DeepSpeedStrategy

STAGES = (1, 2, 3)
EVERYDAY_STAGES = (2, 3)
FROZEN = "'head.bias' of Thaws was frozen or unfrozen"


class Plain(Regresses):
    """Steps by a given optimizer without a scheduler, and has a scalar parameter."""

    def __init__(self, make: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.3))
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters()) if self.make is not None else None


MAKERS: dict[str, Callable[..., Any]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam, fused": partial(torch.optim.Adam, lr=0.02, eps=1e-3, fused=True),
    "adamw, foreach": partial(torch.optim.AdamW, lr=0.02, eps=1e-3, foreach=True),
}
OWN = {
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.1, "warmup_num_steps": 8, "warmup_type": "linear"},
    },
}
"""An optimizer and a scheduler in DeepSpeed's configuration."""


class Closes(Regresses):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Thaws(Regresses):
    def on_train_epoch_start(self) -> None:
        self.head.requires_grad_(self.current_epoch == 0)


def fitted(strategy: Any, module: tw.Module, ranks: int, path: Path, **settings: Any) -> tw.Trainer:
    used = trainer(strategy, **settings)
    used.fit(module, loader(21, ranks), loader(9, ranks))
    used.save_checkpoint(str(path))
    return used


def equal_cases(stage: int) -> dict[str, Any]:
    """Return runs that match one process: (options of the strategy, module, settings, settings on one process)."""
    window = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
    said = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.3}
    cases = {name: ({}, Plain(make), window, window) for name, make in MAKERS.items()}
    cases["config"] = ({"config": said}, Plain(MAKERS["sgd"]), {}, window)
    cases["scheduled"] = ({}, Regresses(), {"accumulate_grad_batches": 3}, {"accumulate_grad_batches": 3})
    mid = {"val_check_interval": 1, "accumulate_grad_batches": 3}
    cases["validated within"] = ({"stage": stage}, Plain(MAKERS["sgd"]), mid, mid)
    return cases


def run_equal(stage: int, folder: Path, alone: bool = False) -> dict[str, Any]:
    found = {}
    for name, (options, module, settings, plain) in equal_cases(stage).items():
        path = folder / f"{name}-{stage}.ckpt"
        strategy = "single_device" if alone else partial(DeepSpeedStrategy, **{"stage": stage, **options})
        used = fitted(strategy, module, 2 if alone else 1, path, **(plain if alone else settings))
        found[name] = (used.global_step, used.optimizers[0].param_groups[0]["lr"])
    return found


def own_optimizer(stage: int, folder: Path) -> dict[str, Any]:
    """The configuration's optimizer and scheduler, also resumed."""
    make = partial(DeepSpeedStrategy, stage=stage, config=OWN)
    found = {}
    used = fitted(make, Plain(), 1, folder / f"own-{stage}.ckpt", max_epochs=2)
    found["lr"] = used.optimizers[0].param_groups[0]["lr"]
    half = fitted(make, Plain(), 1, folder / f"own-half-{stage}.ckpt", max_steps=4)
    found["half lr"] = half.optimizers[0].param_groups[0]["lr"]
    used = trainer(make, max_epochs=2)
    used.fit(Plain(), loader(21, 1), loader(9, 1), ckpt_path=str(folder / f"own-half-{stage}.ckpt"))
    used.save_checkpoint(str(folder / f"own-resumed-{stage}.ckpt"))
    found["steps"] = used.global_step
    return found


def told(make: Callable[[], Any], **settings: Any) -> list[str]:
    """Return the warnings of making a Trainer and fitting with it."""
    with warnings.catch_warnings(record=True) as caught:
        quiet()
        warnings.filterwarnings("always", ".*", UserWarning)
        used = trainer(make, **settings)
        used.fit(Plain(MAKERS["sgd"]), loader(8, 1))
    return [str(each.message) for each in caught if "DeepSpeed" in str(each.message)]


def disagreements(folder: Path) -> dict[str, list[str]]:
    path = folder / f"config-{os.environ['RANK']}.json"
    settings: Any = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5, "gradient_accumulation_steps": 2}
    settings |= {"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}
    path.write_text(json.dumps(settings))
    return {
        "all": told(partial(DeepSpeedStrategy, stage=2, config=path), gradient_clip_val=1.0, accumulate_grad_batches=4),
        "agree": told(
            partial(DeepSpeedStrategy, stage=1, config=settings), gradient_clip_val=0.5, accumulate_grad_batches=2
        ),
        "silent": told(partial(DeepSpeedStrategy, config=settings)),
        "bf16": told(partial(DeepSpeedStrategy, config={"bf16": {"enabled": True}}), precision="16-mixed"),
        "fp16": told("deepspeed", precision="16-true"),
        "mixed": told("deepspeed", precision=16),
        "none": told("deepspeed", precision="bf16-mixed"),
    }


def backwards_of_torch() -> None:
    """A backward of torch is rejected before DeepSpeed reduces anything. torch.autograd.grad is accepted."""
    for stage in STAGES:
        used = tw.Accelerator(strategy=f"deepspeed_stage_{stage}", cpu=True)
        net = nn.Linear(4, 2)
        net, optimizer = used.prepare(net, torch.optim.AdamW(net.parameters()))
        inputs = torch.ones(2, 4, requires_grad=True)
        torch.autograd.grad(net(inputs).sum(), inputs)
        used.backward(net(inputs).square().mean())
        optimizer.step()
        with pytest.raises(
            RuntimeError, match=rf"under strategy 'deepspeed_stage_{stage}'.*accelerator.backward\(loss\)"
        ):
            net(inputs).square().mean().backward()


def refusals() -> None:
    """Check the errors for everything that DeepSpeed cannot do."""
    refused: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
        (partial(DeepSpeedStrategy, config=OWN), Regresses(), {}, ValueError,
         "has an 'optimizer' section. Return None"),
        (partial(DeepSpeedStrategy, config={"zero_optimization": {"stag": 2}}), Regresses(), {}, ValueError, "stag"),
        (partial(DeepSpeedStrategy, nonsense=3), Regresses(), {}, ValueError, "nonsense"),
        (partial(DeepSpeedStrategy, config={"gradient_clipping": 0.5}), Players(), {}, ValueError,
         "Clip and accumulate in training_step"),
        ("deepspeed", Closes(), {}, ValueError, "LBFGS"),
        ("deepspeed", Thaws(), {"max_epochs": 2}, RuntimeError, FROZEN),
    ]  # fmt: skip
    for strategy, module, settings, kind, text in refused:
        with pytest.raises(kind, match=text):
            trainer(strategy, **settings).fit(module, loader(8, 1))


def precisions(folder: Path) -> dict[str, Any]:
    """Run one module in several precisions, one after another."""
    found: dict[str, Any] = {}
    for stage in (2, 3):
        strategy = f"deepspeed_stage_{stage}"
        module = Regresses()
        for precision in ("bf16-true", "bf16-mixed"):
            module = module if stage == 2 else Regresses()
            used = trainer(strategy, precision=precision)
            used.fit(module, loader(8, 1), loader(8, 1))
            (tested,) = used.test(module, loader(9, 1), verbose=False)
            found[f"{precision}-{stage}"] = (float(used.callback_metrics["val_loss"]), used.precision)
            assert 0.0 < tested["val_loss"] < 20.0
    used = trainer("deepspeed")
    used.fit(module := Regresses(), loader(8, 1))
    found["dtype"] = str(module.head.weight.dtype)
    return found


def own_loop(stage: int) -> list[float]:
    """Run a raw loop with clipping and accumulation, and return the norms."""
    used = tw.Accelerator(strategy=f"deepspeed_stage_{stage}", cpu=True, gradient_accumulation_steps=2)
    module = Plain()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    model, prepared, data = used.prepare(module, optimizer, DataLoader(numbers(16), batch_size=RANK_BATCH))
    norms = []
    for x, y in data:
        with used.accumulate(model):
            used.backward(F.mse_loss(model(x), y))
            if used.sync_gradients:
                norms.append(float(used.clip_grad_norm_(model.parameters(), 0.5)))
            prepared.step()
            prepared.zero_grad()
    return norms


class Moves(Regresses):
    """Tells its optimizer when it is trained and when it is evaluated."""

    def configure_optimizers(self) -> Any:
        return Averaging(self.parameters(), 0.02, momentum=0.9)

    def on_train_epoch_start(self) -> None:
        self.optimizers().train()

    def on_train_epoch_end(self) -> None:
        self.trainer.optimizers[0].eval()


def configured_loop(strategy: Any, path: Path) -> None:
    """Run a raw loop whose clipping differs from the strategy's configuration, which wins."""
    configured = isinstance(strategy, DeepSpeedStrategy)
    used = tw.Accelerator(strategy=strategy, cpu=True, gradient_accumulation_steps=1 if configured else 4)
    module = Plain()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    model, prepared, data = used.prepare(module, optimizer, DataLoader(numbers(16), batch_size=2))
    for x, y in data:
        with used.accumulate(model):
            used.backward(F.mse_loss(model(x), y))
            used.clip_grad_norm_(model.parameters(), 9.0 if configured else 0.01)
            prepared.step()
            prepared.zero_grad()
    for x, y in data:
        with used.accumulate(model):
            used.backward(F.mse_loss(model(x), y))
            used.step(prepared, max_norm=None if configured else 0.01)
            prepared.zero_grad()
    assert used.step_count == 4
    used.save_state(str(path))


def one_loop() -> list[float]:
    """Run the same loop in plain torch, on the batches of both ranks."""
    module = Plain()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    batches, norms = list(DataLoader(numbers(16), batch_size=2 * RANK_BATCH)), []
    for index in range(0, len(batches), 2):
        optimizer.zero_grad()
        for x, y in batches[index : index + 2]:
            (F.mse_loss(module(x), y) / 2).backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.5)))
        optimizer.step()
    return norms


def deepspeed(folder: Path) -> dict[str, Any]:
    """Make every check, on this rank."""
    quiet()
    found: dict[str, Any] = {"equal": {}, "own": {}, "loop": {}}
    for stage in STAGES:
        found["equal"][stage] = run_equal(stage, folder)
        found["own"][stage] = own_optimizer(stage, folder)
        found["loop"][stage] = own_loop(stage)
    found["told"] = disagreements(folder)
    backwards_of_torch()
    refusals()
    found["precisions"] = precisions(folder)
    trainer("deepspeed", compile={"backend": "aot_eager"}).fit(Regresses(), loader(8, 1))
    with pytest.raises(ValueError, match=r"compile=True cannot hold .* choose 'fsdp' or stage 2"):
        tw.Trainer(strategy="deepspeed_stage_3", compile=True, **QUIET)
    return found


def deepspeed_everyday(folder: Path) -> dict[str, Any]:
    """Make the checks of every strategy, in stages 2 and 3."""
    quiet()
    return {stage: everyday(f"deepspeed_stage_{stage}", folder / str(stage)) for stage in EVERYDAY_STAGES}
