"""The cost of a training step against a hand-written loop: trainwright and every installed peer, in one run.

All do the same work: an MLP 32-64-10, batches of 8 that are collated beforehand, AdamW with torch's default flags, one
thread. The Trainers log the loss in each step if they can log. They have neither progress bar nor checkpoint, except for the
trainwright variants with everything on. The rounds are interleaved, so that noise hits everyone, and the median of each counts.
Only the steps are timed. ddp_overhead.py does the same on two processes.

    python benchmarks/overhead.py [--rounds 7] [--steps 1000] [--only hand_written,trainwright_trainer]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn

warnings.filterwarnings("ignore")  # the peers' advice on logging intervals and loader workers
logging.disable(logging.WARNING)


class Batches(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Batches of 8, made beforehand."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(count, 8, 32, generator=generator)
        self.targets = torch.randint(0, 10, (count, 8), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def make_loader(steps: int) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(Batches(steps), batch_size=None)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def hand_written(steps: int, fused: bool | None = None) -> float:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    loader = make_loader(steps)
    began = time.perf_counter()
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
    return time.perf_counter() - began


def trainwright_trainer(steps: int, log: bool = True, **settings: Any) -> float:
    """With the optimizer's flags unchanged; `settings` replace the bare Trainer's."""
    import trainwright as tw

    class Net(tw.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = loss_of(self.net, batch)
            if log:
                self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self)

    class Clock(tw.Callback):
        began = seconds = 0.0

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.began = time.perf_counter()

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.seconds = time.perf_counter() - self.began

    clock = Clock()
    bare = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "fused_optimizers": False,
    }
    trainer = tw.Trainer(max_epochs=1, accelerator="cpu", devices=1, callbacks=[clock], **(settings or bare))
    trainer.fit(Net(), make_loader(steps))
    return clock.seconds


def trainwright_trainer_silent(steps: int) -> float:
    return trainwright_trainer(steps, log=False)


def trainwright_trainer_fused(steps: int) -> float:
    """Bare, with the optimizer fused, as the Trainer does by default."""
    return trainwright_trainer(steps, logger=False, enable_checkpointing=False, enable_progress_bar=False)


def trainwright_trainer_dressed(steps: int) -> float:
    """With progress bar, CSV logger, summary and a checkpoint; the optimizer's flags unchanged."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        with contextlib.redirect_stderr(io.StringIO()):
            return trainwright_trainer(steps, default_root_dir=folder, fused_optimizers=False)


def trainwright_trainer_out_of_the_box(steps: int) -> float:
    """With every argument at its default: bar, logger, summary, a checkpoint, and the optimizer fused."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        with contextlib.redirect_stderr(io.StringIO()):
            return trainwright_trainer(steps, default_root_dir=folder)


def hand_written_fused(steps: int) -> float:
    """The hand-written loop with fused=True, for comparison."""
    return hand_written(steps, fused=True)


def trainwright_accelerator(steps: int, fused: bool = False) -> float:
    """With the optimizer's flags unchanged, or fused, as the Accelerator does by default."""
    import trainwright as tw

    accelerator = tw.Accelerator(cpu=True, devices=1, fused_optimizers=fused)
    plain = make_model()
    model, optimizer, loader = accelerator.prepare(plain, make_optimizer(plain), make_loader(steps))
    began = time.perf_counter()
    for batch in loader:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
    return time.perf_counter() - began


def trainwright_accelerator_out_of_the_box(steps: int) -> float:
    """With every argument at its default."""
    return trainwright_accelerator(steps, fused=True)


def lightning_trainer(steps: int) -> float:
    import lightning.pytorch as pl

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = loss_of(self.net, batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self)

    class Clock(pl.Callback):
        began = seconds = 0.0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.began = time.perf_counter()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.seconds = time.perf_counter() - self.began

    clock = Clock()
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    trainer.fit(Net(), make_loader(steps))
    return clock.seconds


def lightning_fabric(steps: int) -> float:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    plain = make_model()
    model, optimizer = fabric.setup(plain, make_optimizer(plain))
    loader = fabric.setup_dataloaders(make_loader(steps))
    began = time.perf_counter()
    for batch in loader:
        optimizer.zero_grad()
        fabric.backward(loss_of(model, batch))
        optimizer.step()
    return time.perf_counter() - began


def hf_accelerate(steps: int) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    plain = make_model()
    model, optimizer, loader = accelerator.prepare(plain, make_optimizer(plain), make_loader(steps))
    began = time.perf_counter()
    for batch in loader:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
    return time.perf_counter() - began


def hf_trainer(steps: int) -> float:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            outputs = self.net(inputs)
            return {"loss": nn.functional.cross_entropy(outputs, labels), "logits": outputs}

    class Ready(Batches):
        def __getitem__(self, index: int) -> Any:
            return {"inputs": self.inputs[index], "labels": self.targets[index]}

    class Clock(TrainerCallback):
        began = seconds = 0.0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.perf_counter()

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            self.seconds = time.perf_counter() - self.began

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=1,  # of batches that are ready
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            num_train_epochs=1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        Trainer(
            model=Net(),
            args=settings,
            train_dataset=Ready(steps),
            data_collator=lambda batches: batches[0],
            callbacks=[clock],
        ).train()
    return clock.seconds


def ignite_engine(steps: int) -> float:
    from ignite.engine import Engine

    model = make_model()
    optimizer = make_optimizer(model)

    def update(engine: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    engine, loader = Engine(update), make_loader(steps)
    began = time.perf_counter()
    engine.run(loader, max_epochs=1)
    return time.perf_counter() - began


LOOPS: tuple[Callable[[int], float], ...] = (
    hand_written,
    hand_written_fused,
    trainwright_trainer,
    trainwright_trainer_silent,
    trainwright_trainer_fused,
    trainwright_trainer_dressed,
    trainwright_trainer_out_of_the_box,
    trainwright_accelerator,
    trainwright_accelerator_out_of_the_box,
    ignite_engine,
    lightning_fabric,
    hf_accelerate,
    hf_trainer,
    lightning_trainer,
)


GOALS = {
    "trainwright_trainer": 1.07,
    "trainwright_trainer_out_of_the_box": 0.70,
    "trainwright_accelerator": 1.03,
    "trainwright_accelerator_out_of_the_box": 0.75,
}
"""The highest ratios that a loop is meant to have; nothing fails above them."""


def installed(loops: list[Callable[[int], float]]) -> Iterator[Callable[[int], float]]:
    """Yield the loops whose packages are installed, after a short warm-up."""
    for loop in loops:
        try:
            loop(100)
        except ImportError as error:
            print(f"{loop.__name__}: left out, {error.name} is not installed")
        else:
            yield loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds; the median counts")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps a round")
    parser.add_argument("--only", default="", help="names of loops, comma-separated")
    options = parser.parse_args()
    torch.set_num_threads(1)
    wanted = [loop for loop in LOOPS if not options.only or loop.__name__ in options.only.split(",")]
    loops = list(installed(wanted))
    seconds: dict[str, list[float]] = {loop.__name__: [] for loop in loops}
    for _ in range(options.rounds):
        for loop in loops:
            seconds[loop.__name__].append(loop(options.steps))
    if hand_written.__name__ not in seconds:
        raise SystemExit("the ratios need hand_written among --only")
    micros = {name: [1e6 * each / options.steps for each in times] for name, times in seconds.items()}
    base = micros[hand_written.__name__]
    print(
        f"\n{'loop':39s} {'us a step':>10s} {'ratio':>7s} {'goal':>6s} {'lowest':>7s} {'highest':>8s}"
        f"   ({options.rounds} rounds)"
    )
    for name, times in micros.items():
        ratios = [each / reference for each, reference in zip(times, base, strict=True)]  # within the same round
        goal = f"{GOALS[name]:.2f}" if name in GOALS else ""
        print(
            f"{name:39s} {statistics.median(times):10.1f} {statistics.median(ratios):7.3f} {goal:>6s} "
            f"{min(ratios):7.3f} {max(ratios):8.3f}"
        )


if __name__ == "__main__":
    main()
