"""The checks of FSDP2, as functions that run on every rank of a job and on one process."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_job import quiet
from everyday_job import RANK_BATCH, everyday, trainer
from small import QUIET, Classifier, make_loader
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from trainwright.strategies.fsdp2.strategy import FSDPStrategy

WIDTH = 6


class Block(nn.Module):
    """A block that counts its forwards and has other methods."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.norm = nn.BatchNorm1d(7) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(7, WIDTH)
        self.calls = 0
        self.seen: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.add(f"{self.up.weight.dtype}, {getattr(self.norm, 'weight', x).dtype}")
        return x + self.down(self.dropout(self.norm(self.up(x)).tanh()))

    def encode(self, x: Tensor) -> Tensor:
        """Use parameters outside of the forward."""
        return F.linear(x, self.up.weight).sum(dim=1, keepdim=True)

    def twice(self, x: Tensor) -> Tensor:
        """Call the block twice."""
        return self(self(x))


class Blocks(tw.Module):
    """A stack of blocks, with a `mode` that adds work to the step."""

    def __init__(self, mode: str = "", dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.mode = mode
        self.blocks = nn.ModuleList(Block(dropout, norm) for _ in range(3))
        self.out = nn.Linear(WIDTH, 1)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        loss = (self(x) - x.sum(dim=1, keepdim=True)).square().mean()
        if self.mode == "methods":
            encoded = self.blocks[0].encode(x) + self.blocks[1].twice(x)
            loss = loss + 0.1 * (encoded + self.out.weight.square().sum()).square().mean()
        if self.mode == "bare":
            loss = loss + (x @ self.blocks[1].up.weight.t()).mean()
        if self.mode == "penalty":
            loss = loss + 0.01 * sum(p.square().sum() for p in self.parameters())
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("encoded", self.blocks[2].encode(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.02, eps=1e-3)


class Zoo(tw.Module):
    """Parameters of every kind that are shared, used without a call, or shaped in unusual ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(12)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 7, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.first = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))
        self.second = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))
        self.second[0].weight = self.first[0].weight  # tied between two blocks
        self.again = self.first  # one module under two names
        self.recomputed = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))
        self.turned = nn.Linear(WIDTH, WIDTH)
        self.turned.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t() * 0.3)  # not contiguous
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.gated = Gated()
        self.alone = nn.Parameter(torch.tensor([0.3]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x[:, None, :].expand(-1, 3, -1))
        x = self.attention(x, x, x, need_weights=False)[0].mean(dim=1)
        x = self.again(self.second(self.first(x)))
        x = checkpoint(self.recomputed, x, use_reentrant=False)
        return self.gated(self.turned(x) * self.gain + self.alone)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self(batch[0]) - batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("error", (self(batch[0]) - batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.02, eps=1e-3)


class Gated(nn.Module):
    """A block with a parameter that has no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.line(x)


class Thaws(Blocks):
    """Trains its head first, then a block too, and then freezes the head."""

    def on_train_epoch_start(self) -> None:
        self.blocks.requires_grad_(False)
        self.blocks[1].requires_grad_(self.current_epoch > 0)
        self.out.requires_grad_(self.current_epoch < 2)


class Made(Blocks):
    """Makes its layers in configure_model, on the meta device or on the CPU."""

    def __init__(self, device: str) -> None:
        tw.Module.__init__(self)
        self.mode, self.made_on, self.losses = "", device, []

    def configure_model(self) -> None:
        if hasattr(self, "blocks"):
            return
        torch.manual_seed(13)
        with torch.device(self.made_on):
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.out = nn.Linear(WIDTH, 1)
        torch.manual_seed(13)  # values of meta modules are drawn later on


class Nested(nn.Module):
    """A group with a layer before its inner group."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x))


class EndsInBlock(Made):
    """Has its last meta layer in a separate group."""

    def configure_model(self) -> None:
        if hasattr(self, "blocks"):
            return
        torch.manual_seed(12)
        self.out = nn.Linear(WIDTH, 1)
        torch.manual_seed(13)
        with torch.device(self.made_on):
            self.stem = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList([Nested()])
        torch.manual_seed(13)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks[0](self.stem(x)))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("mean", self(batch[0]).mean())


def rows(samples: int, ranks: int) -> DataLoader[Any]:
    x = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(14))
    return DataLoader(TensorDataset(x), batch_size=RANK_BATCH * ranks)


def fitted(strategy: Any, module: tw.Module, ranks: int, path: Path, **settings: Any) -> dict[str, Any]:
    used = trainer(strategy, **settings)
    used.fit(module, rows(20, ranks), rows(9, ranks))
    used.save_checkpoint(str(path))
    return {name: float(value) for name, value in used.callback_metrics.items()}


def by_blocks(**options: Any) -> FSDPStrategy:
    return FSDPStrategy(auto_wrap_policy={Block}, **options)


def equal_cases(parallel: bool) -> dict[str, Any]:
    """Return runs that must match one process: (function of the strategy, function of the module, settings)."""
    window = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}
    cases: dict[str, Any] = {
        "methods": (by_blocks, partial(Blocks, "methods"), {}),
        "small groups": (partial(FSDPStrategy, min_parameters=1), Zoo, {}),
        "one group": (FSDPStrategy, Zoo, {"gradient_clip_val": 0.3}),
        "by function": (partial(FSDPStrategy, auto_wrap_policy=lambda m: isinstance(m, Block)), Blocks, {}),
        "kept gathered": (partial(by_blocks, reshard_after_forward=False), Blocks, window),
        "synced once": (partial(by_blocks, sync_every_batch=False), partial(Blocks, "methods"), window),
        "synced once, scalars": (partial(FSDPStrategy, min_parameters=1, sync_every_batch=False), Zoo, window),
        "recomputed": (partial(by_blocks, activation_checkpointing_policy=True), partial(Blocks, "methods"), {}),
        "thawed": (by_blocks, Thaws, {"max_epochs": 3}),
        "thawed, synced once": (partial(by_blocks, sync_every_batch=False), Thaws, {"max_epochs": 3, **window}),
    }
    return {name: (case[0] if parallel else "single_device", *case[1:]) for name, case in cases.items()}


def run_equal(parallel: bool, folder: Path) -> dict[str, Any]:
    return {
        name: fitted(strategy, module(), 1 if parallel else 2, folder / f"{name}.ckpt", **settings)
        for name, (strategy, module, settings) in equal_cases(parallel).items()
    }


def recomputing(folder: Path) -> dict[str, Any]:
    """Checkpointing changes how often a forward runs and nothing else, random draws included."""
    found: dict[str, Any] = {}
    for name, policy in (("kept", None), ("by class", {Block})):
        torch.manual_seed(15)
        module = Blocks(dropout=0.4)
        fitted(partial(by_blocks, activation_checkpointing_policy=policy), module, 1, folder / f"{name}.ckpt")
        found[name] = (module.losses, module.blocks[1].calls)
    return found


def on_meta(folder: Path) -> dict[str, Any]:
    """Modules of the meta device match modules on the CPU, and values set in other ways are rejected by name."""

    class Custom(Made):
        def configure_model(self) -> None:
            super().configure_model()
            nn.init.ones_(self.out.weight)

    losses = {}
    for device in ("cpu", "meta"):
        module, ending = Made(device), EndsInBlock(device)
        fitted(by_blocks, module, 1, folder / f"{device}.ckpt")
        nested = partial(FSDPStrategy, auto_wrap_policy={Block, Nested})
        fitted(nested, ending, 1, folder / f"{device} bfloat16.ckpt", precision="bf16-true")
        assert {each.dtype for each in ending.parameters()} == {torch.bfloat16}
        losses[device] = (module.losses, ending.losses)
    with pytest.raises(ValueError, match=r"'out.weight' of Custom was made on the meta device"):
        trainer(by_blocks).fit(Custom("meta"), rows(4, 1))
    return losses


def low_precision(folder: Path) -> dict[str, Any]:
    """Batch norms keep float32 within a model that computes in bfloat16."""
    module = Blocks(norm=True)
    fitted(by_blocks, module, 1, folder / "norms.ckpt", precision="bf16-mixed")
    true = Blocks()
    fitted(by_blocks, true, 1, folder / "true.ckpt", precision="bf16-true")
    return {"losses": module.losses, "seen": sorted(module.blocks[0].seen), "true": sorted(true.blocks[0].seen)}


def refusals() -> None:
    """Check that every error names the cause."""
    with pytest.raises(RuntimeError, match=r"the step used a parameter itself.*Call the module, or a method"):
        trainer(by_blocks).fit(Blocks("bare"), rows(4, 1))
    with pytest.raises(RuntimeError, match=r"the step used a parameter itself.*use the optimizer's weight_decay"):
        trainer(by_blocks).fit(Blocks("penalty"), rows(4, 1))
    module = Blocks()
    trainer(by_blocks).fit(module, rows(4, 1))
    assert isinstance(module.blocks[0].up.weight, DTensor)
    with pytest.raises(ValueError, match=r"parameter 'blocks.0.up.weight' of Blocks was sharded by fsdp"):
        trainer("ddp").fit(module, rows(4, 1))
    mixed = Blocks()
    mixed.blocks[2].down.double()
    with pytest.raises(ValueError, match=r"in one dtype, but here are 'up.bias' in float32, 'down.bias' in float64"):
        trainer(by_blocks).fit(mixed, rows(4, 1))
    with pytest.raises(ValueError, match=r"chooses no submodule of Blocks, whose classes are Block, Dropout"):
        trainer(partial(FSDPStrategy, auto_wrap_policy={nn.Conv2d})).fit(Blocks(), rows(4, 1))
    with pytest.raises(ValueError, match=r"makes 'second' a group, but its parameter '0.weight' is also used outside"):
        trainer(partial(FSDPStrategy, auto_wrap_policy={nn.Sequential})).fit(Zoo(), rows(4, 1))

    class Lazy(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.LazyLinear(1)

    with pytest.raises(ValueError, match=r"'out.weight' of Lazy is lazy"):
        trainer(by_blocks).fit(Lazy(), rows(4, 1))


class LogsNorm(tw.Module):
    """Logs a value that it computes from its weights, whatever holds them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("norm", self.net[0].weight.norm())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Samples(Blocks):
    def on_train_epoch_start(self) -> None:
        self.out(torch.ones(2, WIDTH))


def called_in_hook() -> list[str]:
    """Return the notes of the error of a hook that calls a submodule."""
    loader = DataLoader(TensorDataset(torch.ones(4, WIDTH)), batch_size=1)
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor") as caught:
        tw.Trainer(strategy="fsdp", max_epochs=1, **QUIET).fit(Samples(), loader)
    return caught.value.__notes__


class Drawn(Blocks):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def on_train_epoch_end(self) -> None:
        weight = self.out.weight.detach()
        weight.numpy() if self.where == "hook" else torch.histogram(weight, 5)


def drawn() -> list[list[str]]:
    """Return the notes of the errors where a weight becomes an array or a histogram."""
    loader, notes = DataLoader(TensorDataset(torch.ones(4, WIDTH)), batch_size=1), []
    for where in ("hook", "histogram"):
        with pytest.raises(RuntimeError) as caught:
            tw.Trainer(strategy="fsdp", max_epochs=1, **QUIET).fit(Drawn(where), loader)
        notes.append(caught.value.__notes__)
    return notes


def called_after_fit(folder: Path) -> float:
    """Call a module outside of a step: without gradients as on one process, with them refused."""
    loader = DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=1)
    module = LogsNorm()
    trainer = tw.Trainer(strategy=FSDPStrategy(min_parameters=1), max_epochs=1, **QUIET)
    trainer.fit(module, loader)
    with pytest.raises(RuntimeError, match=r"was called outside of a step with gradients.*under torch.no_grad"):
        module(torch.ones(2, 3))
    with torch.no_grad():
        here = module(torch.ones(2, 3))
    path = folder / "called.ckpt"
    trainer.save_checkpoint(str(path))
    with pytest.raises(TypeError, match=r"log\('norm', \.\.\.\) got a value of sharded parameters"):
        tw.Trainer(strategy=FSDPStrategy(min_parameters=1), **QUIET).validate(module, loader, verbose=False)
    whole = LogsNorm.load_from_checkpoint(str(path))
    return float((whole(torch.ones(2, 3)).detach() - here).abs().max())


def fsdp_everyday(folder: Path) -> dict[str, Any]:
    """Make the checks of every strategy."""
    quiet()
    return everyday(partial(FSDPStrategy, min_parameters=1), folder)


def fsdp(folder: Path) -> dict[str, Any]:
    """Make every check, on this rank."""
    quiet()
    found: dict[str, Any] = {"equal": run_equal(True, folder)}
    found["recomputing"] = recomputing(folder)
    found["meta"] = on_meta(folder)
    found["low"] = low_precision(folder)
    refusals()
    found["called"] = called_after_fit(folder)
    found["in a hook"] = called_in_hook()
    found["drawn"] = drawn()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        tw.Trainer(strategy="fsdp_cpu_offload", **QUIET)
    found["told"] = [str(each.message) for each in told]
    return found


class Unfreezes(Classifier):
    """Trains its first layer from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        self.get_submodule("net.0").requires_grad_(self.current_epoch > 0)


def unfreeze(folder: Path) -> bool:
    """Return whether a group that was frozen in its first forward trains in mixed precision."""
    quiet()
    module, strategy = Unfreezes(), tw.FSDPStrategy(auto_wrap_policy={nn.Linear})
    tw.Trainer(strategy=strategy, devices=2, precision="bf16-mixed", max_epochs=2, **QUIET).fit(module, make_loader())
    whole = tw.gather_module(module, all_ranks=True)
    assert whole is not None
    name = "net.0.weight"
    return not torch.equal(whole.get_parameter(name).cpu(), Unfreezes().get_parameter(name))
