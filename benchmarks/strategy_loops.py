"""One rank of a job of benchmarks/strategies.py: a loop that trains under a strategy at the benchmark's command.

The strategy written by hand, by trainwright and by Lightning, with the same model, batches, optimizer and engine settings. The
rank sends its measurements to the benchmark over a socket, one JSON object per line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


@dataclass(frozen=True)
class Size:
    """The dimensions of the model and of a rank's batch."""

    width: int
    layers: int
    vocabulary: int
    batch: int
    length: int


SIZES = {
    "small": Size(width=32, layers=2, vocabulary=64, batch=2, length=8),
    "cpu": Size(width=512, layers=6, vocabulary=1024, batch=2, length=32),  # 20 M parameters
    "gpu": Size(width=512, layers=6, vocabulary=1024, batch=32, length=512),
}


class Net(nn.Module):
    """A small transformer that predicts a token for each token."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                size.width, 4, 4 * size.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(size.layers)
        )
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        output: Tensor = self.head(hidden)
        return output


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """Batches made beforehand. The target of each token is a function of it, so the loss shows learning."""

    def __init__(self, count: int, size: Size) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, size.vocabulary, (count, size.batch, size.length), generator=generator)
        self.targets = torch.randperm(size.vocabulary, generator=generator)[self.tokens]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index], self.targets[index]


def loss_of(net: Callable[[Tensor], Tensor], batch: Any) -> Tensor:
    return nn.functional.cross_entropy(net(batch[0]).flatten(0, 1), batch[1].flatten())


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def deepspeed_config(stage: int, precision: str) -> dict[str, Any]:
    """Return the configuration that the strategy passes to DeepSpeed."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**12,
        "zero_optimization": {"stage": stage, "overlap_comm": False, "memory_efficient_linear": False},
    }
    if precision in DTYPES:
        config["fp16" if precision == "16-mixed" else "bf16"] = {"enabled": True}
    return config


class Job:
    """Receives commands for a loop and sends its measurements.

    A turn is a few steps; between turns the ranks wait while other loops have theirs. The first turn is the warm-up.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.strategy, self.precision, self.size = options.strategy, options.precision, SIZES[options.size]
        self.device = torch.device("cuda", 0) if options.size == "gpu" else torch.device("cpu")
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.lengths = [options.warmup] + [options.steps] * options.rounds
        self.loss: Tensor | None = None
        """The latest step's."""
        self._channel = socket.create_connection(("127.0.0.1", options.port)).makefile("rw")
        self._waiting = list(self.lengths)
        self._left = 0
        self._began = 0.0, 0.0
        self._memory = 0

    def make_net(self) -> Net:
        """Make the model; the memory of the process is measured from here on."""
        importlib.import_module("torch._dynamo.eval_frame")  # which some loops would import later, and some have by now
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._memory = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # lets VmHWM begin anew
            self._memory = resident("VmRSS")
        return Net(self.size)

    def make_loader(self) -> DataLoader[Any]:
        return DataLoader(Batches(sum(self.lengths) * self.world_size, self.size), batch_size=None)

    def make_share(self) -> DataLoader[Any]:
        """Return this rank's shard of the loader."""
        data = self.make_loader().dataset
        sampler = DistributedSampler(data, self.world_size, self.rank, shuffle=False)
        return DataLoader(data, batch_size=None, sampler=sampler)

    def begin(self) -> None:
        """Report that everything is set up, and wait for the first turn."""
        self.tell(rank=self.rank)
        self._wait()

    def after_step(self) -> None:
        """Count a step; at the end of a turn, report how long it took and wait for the next."""
        self._left -= 1
        if self._left == 0:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter(), time.process_time()
            self.tell(seconds=now[0] - self._began[0], cpu_seconds=now[1] - self._began[1])
            self._wait()

    def tell(self, **values: Any) -> None:
        self._channel.write(json.dumps(values) + "\n")
        self._channel.flush()

    def _wait(self) -> None:
        if not self._channel.readline():
            sys.exit("the benchmark has ended")
        self._left = self._waiting.pop(0) if self._waiting else 0
        self._began = time.perf_counter(), time.process_time()

    def tell_results(self, optimizer: torch.optim.Optimizer) -> None:
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else resident("VmHWM")
        assert self.loss is not None
        self.tell(memory=peak - self._memory, optimizer=optimizer_bytes(optimizer), loss=self.loss.item())


def resident(name: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes. Not ru_maxrss, which a process inherits from the one that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def optimizer_bytes(optimizer: Any) -> int:
    """Return the size in bytes of an optimizer's state on this rank."""
    tensors = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return sum(each.numel() * each.element_size() for each in local)


def by_hand(job: Job) -> torch.optim.Optimizer:
    dist.init_process_group("nccl" if job.device.type == "cuda" else "gloo")
    loader = job.make_share()
    if job.strategy.startswith("deepspeed"):
        return train_deepspeed(job, loader)
    net = job.make_net().to(job.device)
    if job.strategy == "ddp_sharded":
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim import OSS

        oss = OSS(net.parameters(), optim=torch.optim.AdamW, lr=1e-3, fused=True)
        train_by_hand(job, ShardedDataParallel(net, oss), oss, loader)
        return oss.optim
    if job.strategy == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        dtype = DTYPES.get(job.precision)
        low = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        policy = MixedPrecisionPolicy() if dtype is None else low
        mesh = dist.init_device_mesh(job.device.type, (job.world_size,))
        for layer in net.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(net, mesh=mesh, mp_policy=policy)
        model: nn.Module = net
    else:
        model = nn.parallel.DistributedDataParallel(net)
    optimizer = make_optimizer(model.parameters())
    train_by_hand(job, model, optimizer, loader)
    return optimizer


def autocast(job: Job) -> contextlib.AbstractContextManager[Any]:
    dtype = DTYPES.get(job.precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(job.device.type, dtype)


def train_by_hand(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> None:
    scaler = torch.amp.GradScaler(job.device.type) if job.precision == "16-mixed" else None
    # ShardedDDP's own drops the gradients in its buckets too.
    zero_grad = model.zero_grad if job.strategy == "ddp_sharded" else optimizer.zero_grad
    job.begin()
    for batch in loader:
        zero_grad(set_to_none=True)
        with autocast(job):
            loss = loss_of(model, [each.to(job.device) for each in batch])
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        job.loss = loss.detach()
        job.after_step()


def train_deepspeed(job: Job, loader: DataLoader[Any]) -> torch.optim.Optimizer:
    import deepspeed

    without_shared_memory()
    net = job.make_net()
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=make_optimizer(net.parameters()),
        config=deepspeed_config(int(job.strategy[-1]), job.precision),
        dist_init_required=False,
    )
    job.begin()
    for batch in loader:
        with autocast(job):
            loss = loss_of(engine, [each.to(job.device) for each in batch])
        engine.backward(loss)
        engine.step()
        job.loss = loss.detach()
        job.after_step()
    optimizer: torch.optim.Optimizer = engine.optimizer.optimizer
    return optimizer


def without_shared_memory() -> None:
    """Make DeepSpeed use gloo, as the strategy does: its compiled CPU backend leaves shared memory behind."""
    import deepspeed.comm.torch

    deepspeed.comm.torch.build_shm_op = lambda: None


def measured(job: Job, module_class: Any, callback_class: Any) -> tuple[Any, Any]:
    """Return the model and the timing callback, for a framework with these base classes."""

    class Model(module_class):
        def __init__(self) -> None:
            super().__init__()
            self.net = job.make_net()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = loss_of(self.net, batch)
            job.loss = loss.detach()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self.parameters())

    class Clock(callback_class):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            job.begin()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            job.after_step()

    return Model, Clock


def trainwright(job: Job) -> torch.optim.Optimizer:
    import trainwright as tw

    if job.strategy.startswith("deepspeed"):
        import deepspeed  # noqa: F401  # before memory is measured, as by hand

    Model, Clock = measured(job, tw.Module, tw.Callback)
    strategy: Any = job.strategy
    if strategy == "fsdp":
        strategy = tw.FSDPStrategy(auto_wrap_policy={nn.TransformerEncoderLayer})  # a small model's too
    trainer = tw.Trainer(strategy=strategy, **trainer_settings(job), callbacks=[Clock()])
    trainer.fit(Model(), job.make_loader())
    return trainer.optimizers[0]


def trainer_settings(job: Job) -> dict[str, Any]:
    return {
        "accelerator": job.device.type,
        "devices": job.world_size,
        "precision": job.precision,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


def lightning(job: Job) -> torch.optim.Optimizer:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

    Plain, Clock = measured(job, pl.LightningModule, pl.Callback)

    class Model(Plain):
        def configure_model(self) -> None:
            from torch.distributed.fsdp import fully_shard

            if isinstance(self.trainer.strategy, ModelParallelStrategy):  # which leaves the sharding to the user
                mesh = self.device_mesh["data_parallel"]
                for layer in self.net.layers:
                    fully_shard(layer, mesh=mesh)
                fully_shard(self.net, mesh=mesh)

    strategy: Any = job.strategy
    if strategy.startswith("deepspeed"):
        strategy = DeepSpeedStrategy(config=deepspeed_config(int(strategy[-1]), job.precision))
    elif strategy == "fsdp" and job.device.type == "cuda":
        strategy = FSDPStrategy(auto_wrap_policy={nn.TransformerEncoderLayer})
    elif strategy == "fsdp":
        strategy = ModelParallelStrategy(data_parallel_size=job.world_size, tensor_parallel_size=1)
    # Its own sampler would shuffle.
    trainer = pl.Trainer(strategy=strategy, **trainer_settings(job), callbacks=[Clock()], use_distributed_sampler=False)
    trainer.fit(Model(), job.make_share())
    return trainer.optimizers[0]


LOOPS = {loop.__name__: loop for loop in (by_hand, trainwright, lightning)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop", choices=LOOPS)
    parser.add_argument("--strategy")
    parser.add_argument("--precision")
    parser.add_argument("--size", choices=SIZES)
    for name in ("--rounds", "--steps", "--warmup", "--port"):
        parser.add_argument(name, type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # the peers' advice, and torch's to them
    logging.disable(logging.WARNING)
    job = Job(options)
    job.tell_results(LOOPS[options.loop](job))


if __name__ == "__main__":
    main()
