"""The fixture of the checkpoint format, and the program that made it: `python tests/checkpoint_format.py`.

It has two checkpoints of two ranks, and the values that the objects had at the save (not as they are read back). A
fixture is made once per version of the format and kept forever, since users have such files.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import pathlib
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import trainwright as tw
from trainwright.checkpoint.manifest import FORMAT_VERSION

FIXTURES = Path(__file__).parent / "checkpoint" / "fixtures"
SAVED_STEP, LAST_STEP = 3, 6
PLAIN: dict[str, Any] = {
    "nothing": None,
    "numbers": [True, -7, 2**70, 0.1, math.inf, -0.0],
    "text": "é \ud800 \x00",
    "bytes": b"\x00\xff",
    "tuple": (1, ("a",)),
    "sets": [{1, 2}, frozenset({"x"})],
    "keys": {1: "int", (2, "b"): None, "$tuple": 3},
    "size": torch.Size([2, 3]),
    "kinds": [torch.bfloat16, torch.device("cpu"), pathlib.Path("a/b.txt")],
    "time": datetime.timedelta(days=-1, seconds=5, microseconds=7),
    "scalar": np.float32(0.1),
}
"""One value of every kind of plain data, without tensors and arrays."""


class Memory(tw.Callback):
    """A callback whose state has every kind of value in it."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {**PLAIN, "array": np.arange(3, dtype=np.int16), "tensor": torch.arange(3.0).bfloat16()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


class Kinds(tw.Module):
    """Tensors of every kind that a model may have, some of them trained."""

    def __init__(self, width: int = 2, layers: tuple[int, ...] = (1, 2), config: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(3, width), nn.Linear(3, width, bias=False)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.tensor([0.5, -2.0]).bfloat16(), requires_grad=False)
        self.narrow = nn.Parameter(torch.tensor([[1.0], [2.0]]).half(), requires_grad=False)
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("precise", torch.tensor([1 / 3], dtype=torch.float64))
        self.register_buffer("count", torch.tensor(2**40))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("octets", torch.tensor([0, 255], dtype=torch.uint8))
        self.register_buffer("transposed", torch.arange(6.0).reshape(2, 3).t())
        self.mean = MeanMetric()

    def get_extra_state(self) -> Any:
        return {"note": "kept", "numbers": (1, 2.5)}

    def set_extra_state(self, state: Any) -> None:
        assert state == self.get_extra_state()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (
            self.first(batch[0]) - self.second(batch[0].flip(1)) * self.scale
        ).square().mean() + self.first.bias.sum()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.mean.update(batch[0])
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Saving(tw.Callback):
    """Saves after the third step, and records the values of that moment."""

    def __init__(self, path: Path) -> None:
        self.path, self.values = path, {}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == SAVED_STEP and not self.path.exists():
            torch.rand(trainer.global_rank + 1)  # so that the ranks differ
            assert trainer.save_checkpoint(self.path)
            self.values = {**values_of(module, trainer.optimizers[0]), "generators": generators()}


def plain(value: Any) -> dict[str, Any]:
    """Return a tensor as JSON-able data that tells every bit: a float is written so that it comes back."""
    tensor = torch.as_tensor(value)
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    kept = tensor.detach().double() if tensor.is_floating_point() else tensor.detach()
    return {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "values": kept.reshape(-1).tolist()}


def generators() -> dict[str, str]:
    """Return digests of the generators' states in this process."""
    name, keys, *rest = np.random.get_state()
    states = {
        "torch": torch.get_rng_state().tolist(),
        "python": repr(random.getstate()),
        "numpy": [name, np.asarray(keys).tolist(), *map(float, rest)],
    }
    return {key: hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16] for key, state in states.items()}


def values_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return every tensor of a model and its optimizer, under the names that a checkpoint has for them."""
    state = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    names: dict[Any, str] = {}
    for name, parameter in module.named_parameters():
        names.setdefault(parameter, name)
    moments = {
        f"0/{names[parameter]}/{key}": value
        for parameter, items in optimizer.state.items()
        for key, value in items.items()
    }
    return {
        "model": {name: plain(value) for name, value in state.items()},
        "optimizer": {name: plain(value) for name, value in moments.items()},
    }


def data() -> DataLoader[Any]:
    samples = torch.arange(36.0).reshape(12, 3) / 36
    return DataLoader(TensorDataset(samples), batch_size=1)


def train(path: Path, ckpt_path: Path | None = None) -> dict[str, Any]:
    """Train one epoch of six steps on two ranks, and save within it. Return the values at the save and at the end."""
    tw.seed_everything(3, verbose=False)
    module, saving, memory = Kinds(config={"a": None}), Saving(path), Memory()
    trainer = tw.Trainer(max_epochs=1, strategy="ddp", callbacks=[saving, memory], **QUIET)
    trainer.fit(module, data(), ckpt_path=ckpt_path)
    assert trainer.global_step == LAST_STEP
    return {
        "at the save": saving.values,
        "at the end": values_of(module, trainer.optimizers[0]),
        "mean": float(trainer.callback_metrics["mean"]),
        "is loaded": memory.loaded.keys() == memory.state_dict().keys() and memory.loaded["sets"] == PLAIN["sets"],
    }


def train_sharded(path: Path) -> dict[str, Any]:
    """Make two steps with an Accelerator under fsdp, whose ranks have rows of the matrices, and save."""
    tw.seed_everything(4, verbose=False)
    accelerator = tw.Accelerator(cpu=True, strategy="fsdp")
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1, bias=False))
    net, optimizer = accelerator.prepare(module, torch.optim.Adam(module.parameters(), 0.1))
    for index in range(2):
        accelerator.backward(net(torch.full((2, 3), float(index + accelerator.process_index))).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(path))
    return values_of(module, accelerator.engine.optimizers[0])


def make(folder: Path) -> dict[str, Any]:
    """Write both checkpoints, on every rank."""
    return {"ddp": train(folder / "ddp.ckpt"), "fsdp": train_sharded(folder / "fsdp.ckpt")}


def main() -> None:
    from jobs import run_job

    target = FIXTURES / f"format-{FORMAT_VERSION}"
    if target.exists():
        sys.exit(f"{target} is there already, and is kept for good; raise FORMAT_VERSION to make another.")
    with tempfile.TemporaryDirectory() as folder:
        expected = run_job(make, 2, Path(folder))
        assert expected[0]["fsdp"] == expected[1]["fsdp"]
        for name in ("ddp.ckpt", "fsdp.ckpt"):
            shutil.copytree(Path(folder) / name, target / name)
    expected[0]["generators"] = [each["ddp"]["at the save"].pop("generators") for each in expected]
    (target / "expected.json").write_text(json.dumps(expected[0], indent=1) + "\n")


if __name__ == "__main__":
    main()
