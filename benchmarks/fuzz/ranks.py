"""One process against two and three, under each strategy: samples, counters, metrics, weights, test and predictions.

One process runs with a global batch, each of several with its part. Combined loaders that cannot be cut in one proportion
warn; for those only the number of steps is compared, since their rounds consist of different samples.
"""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import trainwright as tw
from fuzz.bare_trainer import bare_trainer
from fuzz.comparison import first_difference
from fuzz.kind import Config, processes
from fuzz.refusal import refusals
from fuzz.sample_stream import SampleStream
from trainwright.checkpoint.foreign_formats import read_weights
from trainwright.distributed.collectives import gather_object

NAME = "ranks"
PROCESSES = (1, 2, 3)
LIMIT = 90.0
STRATEGIES = ["ddp", "fsdp", "ddp_sharded", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
LOADERS = ["plain", "shuffle", "weighted", "stream"]
COMBINED = ["min_size", "max_size", "max_size_cycle"]
TOLERANCE = 1e-6
INEXACT = "cannot divide a round of the combined"
"""Rank 0 says so."""
SIMPLEST: dict[str, list[Any]] = {
    "strategy": STRATEGIES,
    "processes": [2, 3],
    "batch": [1],
    "count": [1],
    "second": [1],
    "kind": LOADERS + COMBINED,
    "pair": [["plain", "plain"]],
    "workers": [0, 2],
    "manual": [False],
    "accumulate": [1],
    "clip": [None],
    "optimizer": ["sgd", "adam"],
    "scheduler": [None, "epoch", "step"],
    "limit_train": [None, 1],
    "limit_val": [None, 1],
    "check_val_every_n_epoch": [1],
    "communicates": [False],
    "epochs": [1],
    "val_count": [1],
    "val_kind": ["plain"],
    "pred_count": [1],
}


def draw(random: random.Random) -> Config:
    kind = random.choice([*LOADERS, *COMBINED])
    pair = [random.choice(LOADERS), random.choice(LOADERS)]
    val_kind = random.choice(["plain", "shuffle", "stream", "dict", "max_size", "max_size"])  # min_size ends by batches
    has_stream = kind == "stream" or (kind in COMBINED and "stream" in pair)
    limits, manual = [None, None, None, 2] + ([] if has_stream else [0.6]), random.random() < 0.4
    return {
        "strategy": random.choice(STRATEGIES),
        "processes": random.choice([2, 2, 3]),
        "batch": random.choice([1, 2, 2, 4]),
        "count": random.randint(2, 26),
        "second": random.randint(2, 26),
        "kind": kind,
        "pair": pair,
        "workers": random.choice([0, 0, 0, 2]),
        "manual": manual,
        "accumulate": random.choice([1, 1, 2, 3]),
        "clip": None if manual else random.choice([None, None, 0.1]),
        "optimizer": random.choice(["sgd", "sgd", "adam"]),
        "scheduler": None if manual else random.choice([None, "epoch", "step"]),
        "limit_train": random.choice(limits),
        "limit_val": random.choice([None, 2] if val_kind == "stream" else [None, 0.5, 0.3, 2]),
        "check_val_every_n_epoch": random.choice([1, 1, 2]),
        "communicates": random.random() < 0.5,
        "epochs": random.choice([1, 2]),
        "val_count": random.randint(1, 17),
        "val_kind": val_kind,
        "pred_count": random.randint(1, 17),
    }


def data(count: int, seed: int) -> TensorDataset:
    """Return samples of inputs, targets and numbers from 1 on."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    y = x.sum(1, keepdim=True) + torch.randn(count, 1, generator=generator)
    return TensorDataset(x, y, torch.arange(1.0, count + 1))


def loader(config: Config, kind: str, count: int, seed: int) -> DataLoader[Any]:
    """Return a loader of a kind, with this process's part of the global batch."""
    dataset = data(count, seed)
    size = config["batch"] * (config["processes"] if processes() == 1 else 1)
    if kind == "stream":
        return DataLoader(SampleStream(dataset), batch_size=size)
    sampler = None
    if kind == "weighted":
        weights = torch.rand(count, generator=torch.Generator().manual_seed(4)).tolist()
        sampler = WeightedRandomSampler(weights, count)
    return DataLoader(
        dataset, batch_size=size, sampler=sampler, shuffle=kind == "shuffle", num_workers=config["workers"]
    )


def training_loader(config: Config) -> Any:
    if config["kind"] not in COMBINED:
        return loader(config, config["kind"], config["count"], 1)
    first, second = config["pair"]
    both = {"a": loader(config, first, config["count"], 1), "b": loader(config, second, config["second"], 2)}
    return tw.CombinedLoader(both, config["kind"])


def validation_loader(config: Config) -> Any:
    if config["val_kind"] not in ("max_size", "dict"):
        return loader(config, config["val_kind"], config["val_count"], 3)
    both = {"a": loader(config, "plain", config["val_count"], 3), "b": loader(config, "plain", config["second"], 4)}
    return both if config["val_kind"] == "dict" else tw.CombinedLoader(both, "max_size")


class Net(tw.Module):
    """A net that logs sums, means and torchmetrics of its inputs, and keeps the samples' numbers."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
        self.automatic_optimization = not config["manual"]
        self.config = config
        self.seen: list[float] = []
        self.steps_begun = 0
        self.metrics = nn.ModuleDict()
        for stage in ("train", "val", "test"):
            self.metrics[f"{stage}_mean"] = torchmetrics.MeanMetric()
            self.metrics[f"{stage}_max"] = torchmetrics.MaxMetric()
        self.synced = torchmetrics.MeanMetric(dist_sync_on_step=True)

    def loss(self, batch: Any, log: str) -> Any:
        loss: Any = 0.0
        mean, largest = self.metrics[f"{log}_mean"], self.metrics[f"{log}_max"]
        for name, (x, y, ids) in parts(batch).items():
            mine = nn.functional.mse_loss(self.net(x), y)
            loss = loss + mine
            self.seen += ids.tolist()
            mean.update(ids)
            largest.update(ids)
            self.log(f"{log}_sum{name}", ids.sum(), on_step=False, on_epoch=True, reduce_fx="sum")
            self.log(f"{log}_loss{name}", mine, on_step=False, on_epoch=True, batch_size=len(ids))
        self.log(f"{log}_metric", mean, on_step=False, on_epoch=True)
        self.log(f"{log}_max", largest, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps_begun += 1
        loss = self.loss(batch, "train")
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        self.manual_backward(loss)
        if (batch_idx + 1) % self.config["accumulate"] == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        count = sum(len(ids) for _, _, ids in parts(batch).values())
        self.log("end", float(count), on_step=False, on_epoch=True, reduce_fx="sum")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch, "val")
        if self.config["communicates"]:
            self.all_gather(torch.ones(1) if isinstance(batch, dict) else batch[2])
            self.synced(torch.ones(1))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        made = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[self.config["optimizer"]]
        # A sum in another order is amplified by a division by a root near zero.
        more: dict[str, float] = {"eps": 1e-2} if self.config["optimizer"] == "adam" else {}
        optimizer = made(self.parameters(), lr=0.05, **more)
        if not self.config["scheduler"]:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": self.config["scheduler"]}]


def parts(batch: Any) -> dict[str, Any]:
    """Return the parts of a batch by the names of their loaders, "" for a single one."""
    return {key: each for key, each in batch.items() if each is not None} if isinstance(batch, dict) else {"": batch}


class Samples(tw.Callback):
    """Keeps the numbers of the samples of all training batches."""

    def __init__(self) -> None:
        self.ids: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for _, _, ids in () if trainer.is_dummy_batch else parts(batch).values():
            self.ids += ids.tolist()


def everywhere(values: list[float]) -> list[float]:
    """Return the values of all ranks, sorted. Collective: call on every rank."""
    return sorted(each for rank in gather_object(values) for each in rank)


def run(config: Config, folder: Path) -> dict[str, Any]:
    """Fit, test and predict, and return the results."""
    module, samples = Net(config), Samples()
    torch.manual_seed(0)
    tw.seed_everything(config["count"])
    with warnings.catch_warnings(record=True) as caught, refusals(module):
        warnings.simplefilter("always")
        trainer = bare_trainer(
            max_epochs=config["epochs"],
            strategy=config["strategy"] if processes() > 1 else "auto",
            accumulate_grad_batches=1 if config["manual"] else config["accumulate"],
            gradient_clip_val=config["clip"],
            num_sanity_val_steps=0,
            callbacks=[samples],
            limit_train_batches=config["limit_train"],
            limit_val_batches=config["limit_val"],
            check_val_every_n_epoch=config["check_val_every_n_epoch"],
        )
        trainer.fit(module, training_loader(config), validation_loader(config))
    found: dict[str, Any] = {
        "step": trainer.global_step,
        "seen": everywhere(module.seen),
        "samples": everywhere(samples.ids),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "is_inexact": any(gather_object(any(INEXACT in str(each.message) for each in caught))),
    }
    path = str(folder / f"weights-{processes()}.ckpt")
    trainer.save_checkpoint(path)
    state = read_weights(path).state_dict
    found["weights"] = {name: value.flatten().tolist() for name, value in state.items() if name.startswith("net")}
    found["test"] = trainer.test(module, loader(config, "plain", config["val_count"], 6), verbose=False)
    predictions = trainer.predict(module, loader(config, "plain", config["pred_count"], 7))
    found["predictions"] = torch.cat(predictions).flatten().tolist() if predictions else []
    return found


def differences(config: Config, folder: Path) -> list[str]:
    found, path = run(config, folder), folder / "one.json"
    if processes() == 1:
        path.write_text(json.dumps(found))
        return []
    one = json.loads(path.read_text())
    names = ["step", "seen", "samples", "metrics", "rates", "weights", "test", "predictions"]
    if found["is_inexact"]:
        names = ["step"]
    tried = ((name, first_difference(one[name], found[name], TOLERANCE)) for name in names)
    return [f"{name}: {text}" for name, text in tried if text]
