"""Loops through the Accelerator against the same by hand (torch only), the Trainer, and themselves resumed.

On one process, and then on two ranks under a strategy against the hand-written loop on the same global batches. `ALONE` and
`TOGETHER` list what is compared within a tolerance rather than bit for bit.
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import torch
from torch import nn

import trainwright as tw
from fuzz.bare_trainer import bare_trainer
from fuzz.comparison import first_difference
from fuzz.kind import Config, processes
from fuzz.raw_loop import Loop, is_in_turn, make_all, make_loader, make_loss, make_net, make_optimizer, weights_of
from fuzz.refusal import refusals
from trainwright.distributed.collectives import gather_object

NAME = "raw"
PROCESSES = (1, 2)
LIMIT = 60.0
STRATEGIES = ["ddp", "fsdp", "ddp_sharded", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
ALONE = {"no": 2e-6, "bf16": 2e-5, "fp16": 2e-5}
TOGETHER = {"no": 5e-6, "bf16": 2e-2}
SIMPLEST: dict[str, list[Any]] = {
    "seed": [0],
    "strategy": STRATEGIES,
    "models": [1, 2],
    "precision": ["no", "bf16", "fp16"],
    "window": [1],
    "order": ["clear last", "clear first"],
    "contexts": ["one", "own"],
    "optimizers": [["sgd", "sgd"], ["adam", "adam"]],
    "clip": [None, "norm"],
    "schedulers": [[None, None]],
    "batch": [1],
    "rounds": [1],
    "tail": [0],
    "kind": ["map"],
    "epochs": [1],
    "break": [None],
    "overflow": [None],
    "validate": [None],
    "copies": [False],
    "save_at": [0],
    "every": [1],
}


def draw(random: random.Random) -> Config:
    models, batch, rounds = random.choice([1, 1, 2]), random.randint(1, 4), random.randint(2, 11)
    precision = random.choice(["no", "no", "bf16", "fp16"])
    overflows = precision == "fp16" and random.random() < 0.7
    return {
        "seed": random.randrange(10_000),
        "strategy": random.choice(STRATEGIES),
        "models": models,
        "precision": precision,
        "window": random.randint(1, 4),
        "order": random.choice(["clear first", "clear last", "clear all first"]),
        "contexts": random.choice(["one", "own"]) if models == 2 else "one",
        "optimizers": [random.choice(["sgd", "adam", "adamw"]) for _ in range(2)],
        "clip": random.choice([None, "norm", "value", "step norm"]),
        "schedulers": [random.choice([None, "step", "epoch"]) for _ in range(2)],
        "batch": batch,
        "rounds": rounds,
        "tail": random.randint(0, batch - 1),
        "kind": random.choice(["map", "map", "stream"]),
        "epochs": random.randint(1, 3),
        "break": random.choice([None, None, random.randint(1, rounds)]),
        "overflow": [random.randint(0, 12), random.randrange(models)] if overflows else None,
        "validate": random.choice([None, "nested", "kept"]),
        "copies": random.random() < 0.3,
        "save_at": random.randint(0, 12),
        "every": random.choice([1, 1, 2]) if models == 2 else 1,
    }


def on_ranks(config: Config) -> Config:
    """Return the part of a configuration that several ranks run."""
    settled = dict(config)
    if config["precision"] == "fp16":
        settled["precision"] = "no"  # a rank's smaller batch has larger gradients, which may overflow by themselves
    if settled["precision"] == "no":
        settled["overflow"] = None
    if config["strategy"] != "ddp":
        settled["copies"] = False  # a model that an engine holds is copied by tw.gather_module
    if config["strategy"].startswith("deepspeed"):
        settled |= {"models": 1, "contexts": "one", "every": 1}  # DeepSpeed trains one optimizer
    return settled


class ByHand:
    """The same loop in plain torch, on global batches."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.nets, self.optimizers, self.schedulers = make_all(config)
        self.scaler = torch.amp.GradScaler("cpu", enabled=config["precision"] == "fp16")
        self.made = [0] * config["models"]

    def run(self) -> tuple[dict[str, list[float]], list[list[float]]]:
        """Return the weights and the rates after each epoch."""
        config, rates, count = self.config, list[list[float]](), 0
        batches = list(make_loader(config, config["batch"] * processes()))
        stop = len(batches) if config["break"] is None else min(config["break"], len(batches))
        windows: list[list[Any]] = [[] for _ in self.nets]
        planned = [0] * len(self.nets)
        for _ in range(config["epochs"]):
            if config["break"] is not None and config["break"] <= len(batches):
                windows = [[] for _ in self.nets]
            for index in range(stop):
                for number, window in enumerate(windows):
                    if is_in_turn(config, number, count):
                        if not window:
                            planned[number] = self._planned(len(batches) - index)
                        window.append((batches[index], count))
                        if len(window) == config["window"] or index == len(batches) - 1:
                            self._step(number, window, planned[number])
                            window.clear()
                count += 1
            for number, scheduler in enumerate(self.schedulers):
                if config["schedulers"][number] == "epoch" and self.made[number]:
                    scheduler.step()  # it leaves out what its optimizer has left out
                    self.made[number] = 0
            rates.append([each.param_groups[0]["lr"] for each in self.optimizers])
        return weights_of(self.nets), rates

    def _planned(self, left: int) -> int:
        """Return the planned length of a window that starts now, given the number of batches left in the loader.

        Losses are divided by it, and gradients corrected if the window turns out to have another length. In 16 bits that rounds
        differently from dividing by the true length.
        """
        return self.config["window"] if self.config["kind"] == "stream" else min(self.config["window"], left)

    def _step(self, number: int, window: list[Any], planned: int) -> None:
        net, optimizer = self.nets[number], self.optimizers[number]
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.config["precision"])
        optimizer.zero_grad()
        for batch, count in window:
            with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
                loss = make_loss(self.config, net, number, batch, count)
            self.scaler.scale(loss / planned).backward()
        self.scaler.unscale_(optimizer)
        if len(window) != planned:
            for each in net.parameters():
                each.grad *= planned / len(window)
        if self.config["clip"] in ("norm", "step norm"):
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        elif self.config["clip"] == "value":
            nn.utils.clip_grad_value_(net.parameters(), 0.01)
        is_finite = all(bool(each.grad.isfinite().all()) for each in net.parameters())
        self.scaler.step(optimizer)
        self.scaler.update()
        self.made[number] += is_finite
        if self.config["schedulers"][number] == "step" and is_finite:
            self.schedulers[number].step()


class TrainedNet(tw.Module):
    """The first net's loop as a module."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.net = config, make_net(config, 0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]).float(), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.config["optimizers"][0], self.parameters())
        interval = self.config["schedulers"][0]
        if not interval:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": interval}]


def by_trainer(config: Config) -> dict[str, list[float]]:
    """Return the weights after training with the Trainer."""
    module = TrainedNet(config)
    bare_trainer(
        devices=1,
        max_epochs=config["epochs"],
        precision={"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[config["precision"]],
        accumulate_grad_batches=config["window"],
        gradient_clip_val={"norm": 0.1, "step norm": 0.1, "value": 0.01}.get(config["clip"]),
        gradient_clip_algorithm="value" if config["clip"] == "value" else "norm",
        fused_optimizers=False,
    ).fit(module, make_loader(config, config["batch"]))
    return weights_of([module.net])


def alike_on_all_ranks(loop: Loop) -> bool:
    """Return whether all ranks have the same replicas. Collective."""
    local = [weights_of([loop.accelerator.unwrap_model(each)]) for each in loop.models]
    return all(each == local for each in gather_object(local))


def differences(config: Config, folder: Path) -> list[str]:
    is_alone = processes() == 1
    config = config if is_alone else on_ranks(config)
    loop, tried = Loop(config, folder), dict[str, str]()
    with refusals(loop):
        loop.prepare()
        loop.run()
    weights = loop.weights()
    hand, hand_rates = ByHand(config).run()
    tolerance = (ALONE if is_alone else TOGETHER)[config["precision"]]
    tried["by hand"] = first_difference(hand, weights, tolerance)
    tried["rates by hand"] = first_difference(hand_rates, loop.rates, 0.0)
    if config["strategy"] in ("ddp", "ddp_sharded", "deepspeed_stage_1", "deepspeed_stage_2") and not is_alone:
        tried["replicas"] = "" if alike_on_all_ranks(loop) else "the ranks' weights differ"
    cut = Loop(config, folder, cut=True)
    cut.prepare()
    if cut.run():
        again = Loop(config, folder, resume=True)
        again.prepare()
        again.run()
        tried["resumed"] = first_difference(weights, again.weights(), 0.0)
        tried["resumed rates"] = first_difference(loop.rates, again.rates, 0.0)
    if is_alone and config["models"] == 1 and config["break"] is None and config["overflow"] is None:
        exact = config["kind"] == "map"
        tried["Trainer"] = first_difference(by_trainer(config), weights, 0.0 if exact else tolerance)
    return [f"{name}: {text}" for name, text in tried.items() if text]
