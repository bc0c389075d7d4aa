"""A loop through the Accelerator: windows, clipping, schedulers, several loaders, saves and resumes."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle  # nothing is read by it but what it wrote here: prepared models are pickled as they are copied
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from fuzz.kind import Config, processes
from fuzz.sample_stream import SampleStream

WIDTHS = (5, 6)
"""Of the first net and the second."""


def make_net(config: Config, number: int) -> nn.Module:
    torch.manual_seed(config["seed"] + number)
    return nn.Sequential(nn.Linear(4, WIDTHS[number]), nn.Tanh(), nn.Linear(WIDTHS[number], 2))


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, 0.1, momentum=0.9)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name](parameters, 0.02, eps=1e-3)


def make_all(config: Config) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the nets, their optimizers, and their schedulers or None."""
    numbers = range(config["models"])
    nets = [make_net(config, number) for number in numbers]
    optimizers = [make_optimizer(config["optimizers"][number], nets[number].parameters()) for number in numbers]
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(optimizers[number], 0.9) if config["schedulers"][number] else None
        for number in numbers
    ]
    return nets, optimizers, schedulers


def make_data(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=generator)
    return TensorDataset(x, torch.randint(0, 2, (samples,), generator=generator))


def make_loader(config: Config, batch: int) -> DataLoader[Any]:
    """Return the loader: whole global batches on several ranks, and a shorter last one on one process."""
    samples = config["batch"] * processes() * config["rounds"] + (config["tail"] if processes() == 1 else 0)
    data = make_data(samples, config["seed"])
    return DataLoader(SampleStream(data) if config["kind"] == "stream" else data, batch_size=batch)


def make_loss(config: Config, model: Any, number: int, batch: Any, count: int) -> Tensor:
    loss = nn.functional.cross_entropy(model(batch[0]).float(), batch[1])
    return loss * float("inf") if config["overflow"] == [count, number] else loss


def is_in_turn(config: Config, number: int, count: int) -> bool:
    """Whether a model is trained on this batch: the second one only on every n-th, if it has separate windows."""
    return number == 0 or config["contexts"] == "one" or count % config["every"] == 0


def weights_of(nets: list[Any]) -> dict[str, list[float]]:
    """Return the nets' weights by name, prefixed with the number of the net."""
    return {
        f"{number}.{name}": value.detach().flatten().tolist()
        for number, net in enumerate(nets)
        for name, value in net.state_dict().items()
    }


class Loop:
    """The loop, run once.

    Args:
        config: its configuration.
        folder: where it saves.
        cut: end at the first possible save after batch `save_at`.
        resume: resume from such a save.
    """

    def __init__(self, config: Config, folder: Path, *, cut: bool = False, resume: bool = False) -> None:
        self.config, self.folder, self.cut, self.resume = config, folder, cut, resume
        self.steps_begun = 0
        self.count = self.first = self.done = 0
        self.rates: list[list[float]] = []
        self._kept: list[Any] = []

    def prepare(self) -> None:
        """Make everything, and let the Accelerator prepare it."""
        config = self.config
        self.accelerator = tw.Accelerator(
            cpu=True,
            fused_optimizers=False,
            mixed_precision=config["precision"],
            gradient_accumulation_steps=config["window"],
            strategy=config["strategy"] if processes() > 1 else "auto",
        )
        nets, optimizers, schedulers = make_all(config)
        loader, used = make_loader(config, config["batch"]), [each for each in schedulers if each is not None]
        *prepared, self.loader = self.accelerator.prepare(*nets, *optimizers, *used, loader)
        count = len(nets)
        self.models, self.optimizers, rest = prepared[:count], prepared[count : 2 * count], prepared[2 * count :]
        self.schedulers = [rest.pop(0) if each is not None else None for each in schedulers]
        self.validation = self.accelerator.prepare(DataLoader(make_data(5, config["seed"]), batch_size=2))

    def run(self) -> bool:
        """Run the loop, from the cut if it resumes; return whether it was cut."""
        self.info = self.folder / f"cut-{processes()}-{self.accelerator.process_index}.json"
        if self.resume:
            self.accelerator.load_state(str(self.folder / f"cut-{processes()}"))
            _ = self.loader.epoch  # a loop that reads it continues at the saved batch
            told = json.loads(self.info.read_text())
            self.count, self.first, self.done = told["count"], told["epoch"], told["index"]
            self.rates = told["rates"]
        return any(self._epoch(epoch) for epoch in range(self.first, self.config["epochs"]))

    def weights(self) -> dict[str, list[float]]:
        """Return the weights of whole copies of all models. Collective."""
        plain = [tw.gather_module(self.accelerator.unwrap_model(each), all_ranks=True) for each in self.models]
        return weights_of(plain)

    def _epoch(self, epoch: int) -> bool:
        index = self.done if self.resume and epoch == self.first else 0
        end = self.config["break"]
        for batch in [] if end is not None and index >= end else self.loader:
            for number in range(self.config["models"]):
                if is_in_turn(self.config, number, self.count):
                    self._train(number, batch)
            self.steps_begun += 1
            self.count, index = self.count + 1, index + 1
            self._aside()
            is_end = self.loader.is_at_end or (end is not None and index >= end)
            if not is_end and self._saved(epoch, index):
                return True
            if end is not None and index >= end:
                break
        for number, scheduler in enumerate(self.schedulers):
            if self.config["schedulers"][number] == "epoch":
                scheduler.step()
        self.rates.append([each.param_groups[0]["lr"] for each in self.optimizers])
        return (end is None or end > index) and self._saved(epoch + 1, 0)

    def _train(self, number: int, batch: Any) -> None:
        config, optimizer = self.config, self.optimizers[number]
        model = self.models[number]
        has_own = config["contexts"] == "own"
        clears_all = config["order"] == "clear all first"
        if clears_all and not has_own and number == 0:
            for each in self.optimizers:
                each.zero_grad()
        context: Any = contextlib.nullcontext()
        if has_own or number == 0:
            context = self.accelerator.accumulate(*([model] if has_own else self.models))
        with context:
            if config["order"] == "clear first" or (clears_all and has_own):
                optimizer.zero_grad()
            self.accelerator.backward(make_loss(config, model, number, batch, self.count))
            if config["clip"] == "norm":
                self.accelerator.clip_grad_norm_(model.parameters(), 0.1)
            elif config["clip"] == "value":
                self.accelerator.clip_grad_value_(model.parameters(), 0.01)
            if config["clip"] == "step norm":
                self.accelerator.step(optimizer, max_norm=0.1)
            else:
                optimizer.step()
            if config["schedulers"][number] == "step":
                self.schedulers[number].step()
            if config["order"] == "clear last":
                optimizer.zero_grad()

    def _aside(self) -> None:
        """Validate, or copy the models, in the middle of training."""
        if self.config["validate"] == "nested" and self.count % 3 == 0:
            seen = sum(len(self.accelerator.gather_for_metrics(batch[1])) for batch in self.validation)
            assert seen == 5, f"the validation saw {seen} samples"
        elif self.config["validate"] == "kept" and self.count % 2 == 0:
            if not self._kept:
                self._kept.append(iter(self.validation))
            if next(self._kept[0], None) is None:
                self._kept.clear()
        if self.config["copies"] and self.count % 4 == 1:
            for model in self.models:
                check_copies(model)

    def _saved(self, epoch: int, index: int) -> bool:
        """Save at the planned cut, unless a window is open; return whether it saved."""
        if not self.cut or self.count <= self.config["save_at"]:
            return False
        try:
            self.accelerator.save_state(str(self.folder / f"cut-{processes()}"), overwrite=True)
        except RuntimeError as error:
            if "within an accumulation window" not in str(error):
                raise
            return False
        told = {"count": self.count, "epoch": epoch, "index": index, "rates": self.rates}
        self.info.write_text(json.dumps(told))
        return True


def check_copies(model: Any) -> None:
    """Copy a prepared model, average it, and pickle it; the model must not change."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for each in other.parameters():
            each.mul_(3.0)
        other(torch.ones(2, 4))
    torch.optim.swa_utils.AveragedModel(model).update_parameters(model)
    read = pickle.loads(pickle.dumps(model))
    assert read.state_dict().keys() == model.state_dict().keys()
