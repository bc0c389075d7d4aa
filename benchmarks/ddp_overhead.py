"""The cost of a ddp step on two processes against torch's DistributedDataParallel in a hand-written loop.

All train the same small model in the same two processes, in interleaved rounds; the median of the ratios counts. The Trainer
and the Accelerator fuse AdamW by default, so their goal is a ratio to the hand-written loop with `fused=True`, whose flags are
the same; the ratio to the one with torch's default flags stands beside it.

    python benchmarks/ddp_overhead.py [--rounds 9] [--steps 300]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def make_loader(steps: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    count = 16 * steps * 2
    data = TensorDataset(
        torch.randn(count, 64, generator=generator), torch.randint(0, 10, (count,), generator=generator)
    )
    return DataLoader(data, batch_size=16)


def hand_written(steps: int, fused: bool | None = None) -> float:
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    data = make_loader(steps)
    sampler = torch.utils.data.DistributedSampler(data.dataset, shuffle=False)  # type: ignore[arg-type, var-annotated]
    loader = DataLoader(data.dataset, batch_size=16, sampler=sampler)
    dist.barrier()
    began = time.perf_counter()
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    dist.barrier()
    return time.perf_counter() - began


class Net(tw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Clock(tw.Callback):
    began = seconds = 0.0

    def on_train_start(self, trainer: tw.Trainer, module: tw.Module) -> None:
        dist.barrier()
        self.began = time.perf_counter()

    def on_train_end(self, trainer: tw.Trainer, module: tw.Module) -> None:
        dist.barrier()
        self.seconds = time.perf_counter() - self.began


def make_trainer(clock: Clock) -> tw.Trainer:
    return tw.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )


def trainwright_trainer(steps: int) -> float:
    clock = Clock()
    make_trainer(clock).fit(Net(), make_loader(steps))
    return clock.seconds


def trainwright_accelerator(steps: int) -> float:
    accelerator = tw.Accelerator(cpu=True, strategy="ddp")
    model = make_model()
    prepared = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), make_loader(steps))
    model, optimizer, loader = prepared
    dist.barrier()
    began = time.perf_counter()
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
    dist.barrier()
    return time.perf_counter() - began


LOOPS: dict[str, Callable[[int], float]] = {
    "hand-written": hand_written,
    "hand-written, fused": lambda steps: hand_written(steps, fused=True),
    "Trainer": trainwright_trainer,
    "Accelerator": trainwright_accelerator,
}


GOALS = {"Trainer": 1.03, "Accelerator": 1.03}
"""The highest ratios to the hand-written loop with the same flags; nothing fails above them."""
SAME_FLAGS = "hand-written, fused"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    trainer = make_trainer(Clock())  # starts the two processes
    torch.set_num_threads(1)
    rounds = [{name: loop(options.steps) for name, loop in LOOPS.items()} for _ in range(options.rounds + 1)]
    trainer.print(
        f"\n{'loop on two processes':28s} {'us a step':>10s} {'ratio':>7s} {'same flags':>11s} {'goal':>6s} {'lowest':>7s} "
        f"{'highest':>8s}   ({options.rounds} rounds)"
    )
    for name in LOOPS:
        times = [each[name] for each in rounds[1:]]  # the first round warms up
        ratio = statistics.median(each[name] / each["hand-written"] for each in rounds[1:])
        ratios = [each[name] / each[SAME_FLAGS] for each in rounds[1:]]
        goal = f"{GOALS[name]:.2f}" if name in GOALS else ""
        trainer.print(
            f"{name:28s} {1e6 * statistics.median(times) / options.steps:10.1f} {ratio:7.3f} {statistics.median(ratios):11.3f} "
            f"{goal:>6s} {min(ratios):7.3f} {max(ratios):8.3f}"
        )


if __name__ == "__main__":
    main()
