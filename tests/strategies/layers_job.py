"""Kinds of layers under every strategy in mixed precision, and the module after a run, for test_layers.py."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_job import quiet
from small import QUIET
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from trainwright.strategies.fsdp2.strategy import FSDPStrategy
from trainwright.strategies.fsdp2.wrap_policy import SMALL

STRATEGIES = ("ddp", "ddp_sharded", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
SHARDED = ("fsdp", "deepspeed_stage_3")
PRECISIONS = ("bf16-mixed", "16-mixed")
WIDTH = 8
SHIFT = 2.0**-8
"""The factor of every loss. Without it such small nets overflow in float16, in other batches on two ranks."""


class Padded(nn.Module):
    """A text model with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        words = (x * 3).long().clamp(-5, 5) + 5
        padding = torch.arange(WIDTH) > words[:, :1] % 5 + 2
        return self.head(self.blocks(self.embed(words), src_key_padding_mask=padding)[:, 0])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(11, 2)
        self.cell = nn.GRU(2, 5, batch_first=True)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        words = (x * 3).long().clamp(-5, 5) + 5
        return self.head(torch.cat([self.cell(x.view(-1, 4, 2))[0][:, -1], self.bag(words)], dim=1))


class Follows(nn.Module):
    """A frozen layer, an average in a buffer, and a bare matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, 6).requires_grad_(False)
        self.matrix = nn.Parameter(torch.eye(6))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.frozen(x) @ torch.linalg.matrix_exp(self.matrix / 8))
        x = self.head(x)
        if self.training:
            with torch.no_grad():
                self.count += 1
                self.mean.lerp_(torch.ones(3), 1e-4)
        return x + self.mean


def batch_norms() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 6), nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3))


def other_norms() -> nn.Module:
    unflat = nn.Unflatten(1, (2, 4))
    return nn.Sequential(
        nn.LayerNorm(WIDTH),
        unflat,
        nn.InstanceNorm1d(2, affine=True),
        nn.GroupNorm(2, 2),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def computed() -> nn.Module:
    first = parametrizations.weight_norm(nn.Linear(WIDTH, 6))
    return nn.Sequential(first, parametrizations.orthogonal(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3))


NETS = {
    "batch norms": batch_norms, "other norms": other_norms, "computed": computed, "padded": Padded,
    "recurrent": Recurrent, "follows": Follows,
}  # fmt: skip


class Net(tw.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = NETS[name]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.body(batch[0]), batch[1]) * SHIFT

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.body(batch[0]), batch[1]).double())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1 / SHIFT)


def loader(ranks: int) -> DataLoader[Any]:
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(5))
    return DataLoader(TensorDataset(x, torch.arange(16) % 3), batch_size=4 // ranks)


def trained(name: str, strategy: Any, precision: str, ranks: int) -> tuple[tw.Trainer, Net, float]:
    used, module = tw.Trainer(strategy=strategy, precision=precision, max_epochs=1, **QUIET), Net(name)
    used.fit(module, loader(ranks), loader(ranks))
    return used, module, float(used.callback_metrics["val_loss"])


def alone() -> dict[Any, Any]:
    """Return the weights and the score of every net on one process."""
    found = {}
    for name in NETS:
        for precision in PRECISIONS:
            _, module, loss = trained(name, "single_device", precision, 1)
            found[name, precision] = ({k: v.clone() for k, v in module.state_dict().items()}, loss)
    return found


def scores(name: str, strategy: Any, precision: str, path: str) -> tuple[Any, tw.Module, list[float]]:
    """Train, save, and return the saved weights, the module, and its scores in the run, after it and in a new run."""
    used, module, loss = trained(name, strategy() if callable(strategy) else strategy, precision, 2)
    used.save_checkpoint(path)
    again = used.validate(module, loader(2), verbose=False)[0]["val_loss"]
    other = tw.Trainer(strategy=strategy() if callable(strategy) else strategy, precision=precision, **QUIET)
    read = other.validate(Net(name), loader(2), ckpt_path=path, verbose=False)[0]["val_loss"]
    return Net.load_from_checkpoint(path, name=name).state_dict(), module, [loss, again, read]


def look(module: tw.Module, plain: nn.Module, saved: dict[str, Tensor]) -> None:
    """Check a module after a run, or the whole copy of a sharded module."""
    for key, value in plain.state_dict().items():
        assert value.dtype == saved[key].dtype, key
        assert torch.equal(value, saved[key]) or key in dict(plain.named_buffers()), key  # rank 0's are saved
    for parameter in plain.parameters():
        assert type(parameter) is nn.Parameter
        assert not parameter.__dict__
    assert repr(plain)
    if not any("parametrizations" in key for key in saved):  # torch cannot copy and pickle these
        copy.deepcopy(plain)
        pickle.dumps(plain)
        torch.save(plain, io.BytesIO())
    x, y = next(iter(loader(2)))
    plain.train()
    F.cross_entropy(plain.body(x), y).backward()  # type: ignore[operator]
    assert all(p.grad is not None for p in plain.parameters() if p.requires_grad)


def layers(folder: Path) -> dict[Any, Any]:
    """Make every check, on this rank."""
    quiet()
    found: dict[Any, Any] = {}
    for strategy in STRATEGIES:
        for precision in PRECISIONS:
            for name in NETS:
                path = str(folder / f"{name}-{strategy}-{precision}.ckpt")
                saved, module, told = scores(name, strategy, precision, path)
                found[strategy, name, precision] = (saved, told)
                whole = tw.gather_module(module, all_ranks=True) if strategy in SHARDED else module
                assert isinstance(whole, Net)
                look(module, whole, saved)
    assert (tw.gather_module(Net("follows")) is None) == (torch.distributed.get_rank() > 0)
    groups()
    return found


class Large(tw.Module):
    """A large float32 layer, blocks with activation checkpointing, and a hook of the user."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(SMALL // 8 + 1, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        self.seen: list[str] = []
        self.block.register_forward_hook(self.note)

    def note(self, *_: Any) -> None:
        self.seen.append(str(self.table.weight.dtype))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = self.table(torch.arange(len(batch[0])))
        assert rows.dtype == torch.float32
        return F.cross_entropy(self.block(rows), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def groups() -> None:
    """Gather fsdp's groups of several kinds on rank 0."""
    make = partial(FSDPStrategy, auto_wrap_policy={nn.Sequential}, activation_checkpointing_policy=True)
    module = Large()
    tw.Trainer(strategy=make(), precision="bf16-mixed", max_epochs=1, **QUIET).fit(module, loader(2))
    whole = tw.gather_module(module)
    assert (whole is None) == (torch.distributed.get_rank() > 0)
    with pytest.raises(ValueError, match=r"was sharded by fsdp or ZeRO stage 3.*tw.gather_module\(module"):
        tw.Trainer(strategy="ddp", max_epochs=1, **QUIET).fit(module, loader(2))
    if isinstance(whole, Large):
        assert type(whole.block) is nn.Sequential
        assert pickle.loads(pickle.dumps(whole)).block[1].weight.shape == (8,)
        count = len(whole.seen)
        whole.block(whole.table(torch.arange(3))).sum().backward()
        assert len(whole.seen) == count + 1
        assert len(module.seen) == count
