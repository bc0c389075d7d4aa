"""The job of test_written.py: a user's code writes parameters under every strategy."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contract_job import quiet
from small import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from trainwright.checkpoint.foreign_formats import read_weights
from trainwright.strategies.fsdp2.strategy import FSDPStrategy
from trainwright.strategies.zero.strategy import DeepSpeedStrategy

WIDTH = 6
SAMPLES = 24
RANK_BATCH = 2
PLACES = ("step", "forward", "hook")
FORMS = ("in place", "foreach", "data in place", "data")


class Block(nn.Module):
    """A block, which fsdp gathers separately."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Counted(nn.Module):
    """A block that writes a parameter in its forward, in a chosen form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.calls = nn.Parameter(torch.zeros(3, 2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.form:
            write([self.calls], [torch.ones(3, 2)], self.form.removeprefix("gathered "), 0.5)
        return x * (1 + 0.1 * self.calls.mean())


def written(targets: Iterable[Any], sources: Iterable[Any], form: str, rate: float = 0.1) -> None:
    """Write within GatheredParameters, as DeepSpeed's users do."""
    import deepspeed

    targets, sources = list(targets), list(sources)
    with deepspeed.zero.GatheredParameters([*targets, *sources], modifier_rank=0):
        write(targets, sources, form, rate)


def write(targets: Iterable[Any], sources: Iterable[Any], form: str, rate: float = 0.1) -> None:
    """Move parameters towards others, in one of several usual forms."""
    with torch.no_grad():
        if form == "foreach":
            torch._foreach_lerp_(list(targets), [each.detach() for each in sources], rate)
            return
        for target, source in zip(targets, sources, strict=True):
            if form == "in place":
                target.lerp_(source, rate)
            elif form == "data in place":
                target.data.mul_(1 - rate).add_(source.data * rate)
            else:
                target.data = target.data * (1 - rate) + source.data * rate


class Teaches(tw.Module):
    """A net and a frozen copy that follows it, written at a chosen place in a chosen form."""

    def __init__(self, place: str, form: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.place, self.form = place, form
        self.online = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.counted = Counted(form if place == "forward" else "")
        self.alone = nn.Parameter(torch.zeros(WIDTH, 2), requires_grad=False)
        self.ones = nn.Parameter(torch.ones(WIDTH, 2), requires_grad=False)

    def follow(self) -> None:
        form, way = self.form.removeprefix("gathered "), written if self.form.startswith("gathered ") else write
        way(self.target.parameters(), self.online.parameters(), form)
        way([self.alone], [self.ones], form)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.place == "step":
            self.follow()
        x = self.counted(batch[0])
        out = self.online(x)
        return (out - batch[0].sin()).square().mean() + (out - self.target(x)).square().mean() + 0 * self.alone.sum()

    def on_before_backward(self, loss: Tensor) -> None:
        if self.place == "loss":
            self.follow()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.online(self.target(batch[0]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.place == "hook":
            self.follow()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.2, momentum=0.5)


class Clips(tw.Module):
    """Clips its trained weights after every step or in every forward."""

    def __init__(self, place: str, form: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.place, self.form = place, form
        self.net = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH))

    def clip(self) -> None:
        with torch.no_grad():
            for parameter in self.net.parameters():
                if self.form == "in place":
                    parameter.clamp_(-0.25, 0.25)
                else:
                    parameter.data.clamp_(-0.25, 0.25)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.place == "step":
            self.clip()
        return (self.net(batch[0]) - batch[0].sin()).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.place == "hook":
            self.clip()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.5)


STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    "ddp_sharded": "ddp_sharded",
    "fsdp": partial(FSDPStrategy, auto_wrap_policy=[Block, Counted]),
    "fsdp, one group": "fsdp",
    "fsdp, gathered once": partial(FSDPStrategy, auto_wrap_policy=[Block, Counted], reshard_after_forward=False),
    "deepspeed_stage_1": "deepspeed_stage_1",
    "deepspeed_stage_2": "deepspeed_stage_2",
    "deepspeed_stage_3": "deepspeed_stage_3",
    "deepspeed_stage_3, parted": partial(DeepSpeedStrategy, stage=3, stage3_param_persistence_threshold=0),
}


def data(ranks: int) -> DataLoader[Any]:
    torch.manual_seed(5)
    return DataLoader(TensorDataset(torch.randn(SAMPLES, WIDTH)), batch_size=RANK_BATCH * ranks)


def trained(
    strategy: Any, module: tw.Module, ranks: int, path: Path, val: Any = None, **settings: Any
) -> dict[str, Tensor]:
    """Return the weights in the checkpoint that a run ends with."""
    made = strategy() if callable(strategy) else strategy
    trainer = tw.Trainer(strategy=made, max_epochs=1, **QUIET, **settings)
    trainer.fit(module, data(ranks), val)
    trainer.save_checkpoint(path)
    return read_weights(path).state_dict


CASES: dict[str, list[tuple[type[Any], str, str]]] = {
    "ddp": [(Teaches, "step", "data in place")],
    "fsdp": [
        *[(Teaches, "step", form) for form in ("in place", "data in place", "data")],
        *[(Teaches, "forward", form) for form in ("foreach", "data in place", "data")],
        *[(Teaches, "hook", form) for form in ("in place", "foreach", "data")],
        *[(Clips, place, "data in place") for place in ("step", "hook")],
    ],
    "fsdp, one group": [
        *[(Teaches, "step", form) for form in ("foreach", "data in place", "data")],
        (Clips, "step", "in place"),
        (Teaches, "loss", "in place"),
    ],
    "fsdp, gathered once": [(Teaches, "step", "data in place"), (Teaches, "loss", "in place")],
    "deepspeed_stage_1": [(Clips, "step", "data in place"), (Clips, "hook", "in place")],
    "deepspeed_stage_2": [(Teaches, "step", "data"), (Clips, "hook", "data in place")],
    "deepspeed_stage_3": [(Teaches, "hook", "gathered in place")],
    "deepspeed_stage_3, parted": [
        (Teaches, "hook", "gathered data"),
        (Teaches, "hook", "gathered in place"),
    ],
}
REFUSED: dict[str, list[tuple[type[Any], str, str]]] = {
    name: [
        (Teaches, "step", "in place"),
        (Teaches, "hook", "foreach"),
        (Teaches, "forward", "in place"),
        (Clips, "hook", "in place"),
    ]
    for name in ("deepspeed_stage_3", "deepspeed_stage_3, parted")
}


def alone(folder: Path) -> dict[Any, dict[str, Tensor]]:
    """Return the weights of one process that does the work of two ranks."""
    cases = {(kind, place, form.removeprefix("gathered ")) for each in CASES.values() for kind, place, form in each}
    ordered = sorted(cases, key=str)
    return {
        (kind.__name__, place, form): trained("auto", kind(place, form), 2, folder / f"{number}.ckpt")
        for number, (kind, place, form) in enumerate(ordered)
    }


def left_by_runs() -> dict[str, Any]:
    """Return a module's state after an unsaved run under fsdp whose last hook has written."""
    module = Teaches("hook", "in place")
    with torch.no_grad():
        module.counted.calls.fill_(float("nan"))  # which nobody writes
    module.counted.forward = lambda x: x  # type: ignore[method-assign]
    tw.Trainer(strategy="fsdp", max_epochs=1, precision="bf16-mixed", **QUIET).fit(module, data(1))
    whole = tw.gather_module(module, all_ranks=True)
    return {
        "alone": (whole.alone.detach().clone(), str(module.alone.data.dtype), module.alone.data.is_contiguous()),
        "moved": [str(next(move().parameters()).dtype) for move in (module.cpu, module.double)],
    }


def written_everywhere(folder: Path) -> dict[str, Any]:
    quiet()
    found: dict[str, Any] = {"kept": {}, "refused": {}, "low": {}}
    for name, cases in CASES.items():
        for number, (kind, place, form) in enumerate(cases):
            path = folder / f"{name}-{number}.ckpt"
            found["kept"][name, kind.__name__, place, form] = trained(STRATEGIES[name], kind(place, form), 1, path)
    for name, cases in REFUSED.items():
        for kind, place, form in cases:
            try:
                trained(STRATEGIES[name], kind(place, form), 1, folder / "refused.ckpt")
            except RuntimeError as error:
                found["refused"][name, kind.__name__, place, form] = str(error)
    for form in ("in place", "data in place", "data"):
        try:
            trained("fsdp", Teaches("step", form), 1, folder / "low.ckpt", precision="bf16-mixed", val=data(1))
        except RuntimeError as error:
            found["low"][form] = str(error)
    found["left"] = left_by_runs()
    path = folder / "exact.ckpt"
    found["exact"] = trained(STRATEGIES["fsdp"], Teaches("hook", "in place"), 1, path, precision="bf16-mixed")
    return found
