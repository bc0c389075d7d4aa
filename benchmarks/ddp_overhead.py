"""The cost of a ddp step on two processes against torch's DistributedDataParallel in a hand-written loop.

Both train the same small model in the same two processes, in interleaved rounds; the median of each counts.

    python benchmarks/ddp_overhead.py [--rounds 9] [--steps 300]
"""

from __future__ import annotations

import argparse
import statistics
import time
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


def hand_written(steps: int) -> float:
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    trainer = make_trainer(Clock())  # starts the two processes
    torch.set_num_threads(1)
    ratios, micros = [], []
    for _ in range(options.rounds + 1):
        by_hand, ours = hand_written(options.steps), trainwright_trainer(options.steps)
        ratios.append(ours / by_hand)
        micros.append((1e6 * by_hand / options.steps, 1e6 * ours / options.steps))
    by_hand, ours = (statistics.median(each) for each in zip(*micros[1:], strict=True))  # the first round warms up
    trainer.print(
        f"\nhand-written ddp {by_hand:.0f} us a step, trainwright {ours:.0f} us a step, "
        f"ratio {statistics.median(ratios[1:]):.3f} ({options.rounds} rounds, {min(ratios[1:]):.3f} to {max(ratios[1:]):.3f})"
    )


if __name__ == "__main__":
    main()
