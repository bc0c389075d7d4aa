"""Exact resume of the data: the samples that are read and trained on, and the places where a run can resume."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import run_job
from small import ON_HOST, QUIET, Classifier, assert_equal, make_loader, weights
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import trainwright as tw

COUNT = 26


class Recorded(Dataset[Tensor]):
    """Numbers with a random augmentation. Indices are recorded in a file when they are read, in workers too."""

    def __init__(self, log: Path, first: int = 0, count: int = COUNT) -> None:
        self.log, self.first, self.count = str(log), first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        record(self.log, self.first + index)
        return torch.tensor([float(self.first + index), random.random(), torch.rand(()).item()])


def record(log: str, number: int) -> None:
    file = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(file, f"{number}\n".encode())
    os.close(file)


def read(log: Path) -> list[int]:
    numbers = [int(each) for each in log.read_text().split()] if log.exists() else []
    log.unlink(missing_ok=True)
    return numbers


class Pairs(Sampler[list[int]]):
    """A user's batch sampler: uneven batches in an unusual order."""

    def __iter__(self) -> Iterator[list[int]]:
        order = random.sample(range(COUNT), COUNT)
        while order:
            size = 1 + len(order) % 3
            yield order[:size]
            order = order[size:]

    def __len__(self) -> int:
        return len(list(iter(self)))


class Permuted(Sampler[int]):
    """Draws from a generator of the sampler."""

    def __init__(self) -> None:
        self.rng = np.random.RandomState()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rng.permutation(COUNT).tolist())

    def __len__(self) -> int:
        return COUNT


class Takes(tw.Module):
    """Trains on the numbers, and records the batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(3, 1)
        self.taken: list[list[list[float]]] = []

    def forward(self, rows: Tensor) -> Tensor:
        return self.net(rows / COUNT).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = list(batch) if isinstance(batch, (list, tuple)) else [batch]
        self.taken.append([row for part in parts if part is not None for row in part.tolist()])
        return sum(self(part) for part in parts if part is not None)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    @property
    def numbers(self) -> list[int]:
        return [int(row[0]) for batch in self.taken for row in batch]


def loaders(kind: str, log: Path) -> Any:
    data, workers = Recorded(log), {"num_workers": 2, "batch_size": 2}
    if kind == "workers":
        return DataLoader(data, shuffle=True, **workers)
    if kind == "workers that stay":
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(4))
        return DataLoader(data, sampler=sampler, persistent_workers=True, **workers)
    if kind == "weighted":
        return DataLoader(data, batch_size=2, sampler=WeightedRandomSampler([1.0, 2.0] * (COUNT // 2), COUNT))
    if kind == "a part":
        return DataLoader(data, batch_size=2, sampler=SubsetRandomSampler(range(3, COUNT - 1)))
    if kind == "a generator of its own":
        return DataLoader(data, batch_size=2, sampler=Permuted())
    if kind == "batches of one's own":
        return DataLoader(data, batch_sampler=Pairs(), num_workers=2)
    other = DataLoader(Recorded(log, 100, 7), shuffle=True, batch_size=1, num_workers=1)
    return tw.CombinedLoader([DataLoader(data, batch_size=2, shuffle=True), other], kind)


def train(loader: Any, steps: int, path: Path | None, ckpt_path: Path | None = None) -> Takes:
    """Train two epochs or up to a number of steps, and save where the run stops."""
    tw.seed_everything(5 if ckpt_path is None else 6, verbose=False)
    trainer, module = tw.Trainer(max_epochs=2, max_steps=steps, **QUIET), Takes()
    trainer.fit(module, loader, ckpt_path=None if ckpt_path is None else str(ckpt_path))
    if path is not None:
        trainer.save_checkpoint(str(path))
    return module


KINDS = ["workers", "workers that stay", "weighted", "a part", "batches of one's own", "a generator of its own"]
MODES = ["min_size", "max_size", "max_size_cycle"]


@pytest.mark.parametrize("kind", KINDS + MODES)
def test_no_item_is_read_twice_or_left_out(kind: str, tmp_path: Path) -> None:
    log = tmp_path / "reads"
    whole = train(loaders(kind, log), -1, None)
    all_read = read(log)
    batches = len(whole.taken) // 2
    assert Counter(all_read) == Counter(whole.numbers)
    taken, path = [], None
    for steps in (3, 5, batches + 4, -1):  # twice within the first epoch, once within the second
        part = train(loaders(kind, log), steps, tmp_path / f"{steps}.ckpt", path)
        assert part.taken == whole.taken[len(taken) : None if steps < 0 else steps], "augmentation and all"
        reads, here = read(log), [row[0] for batch in part.taken for row in batch]
        behind = Counter(int(row[0]) for batch in whole.taken[: len(taken)] for row in batch)
        to_come = Counter(whole.numbers) - behind
        assert not Counter(reads) - to_come, "nothing is read that was consumed before"
        assert not Counter(int(each) for each in here) - Counter(reads)
        taken += part.taken
        path = tmp_path / f"{steps}.ckpt"
    assert taken == whole.taken
    assert_equal(weights(part), weights(whole))


def test_a_run_can_resume_at_every_batch(tmp_path: Path) -> None:
    """One run requests a save in every batch and every validation batch. Runs resume from all of them, bitwise."""

    class SavesAll(tw.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.save_checkpoint(str(tmp_path / f"{trainer.state.total_batches:03d}-train.ckpt"))

        def on_validation_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            if not trainer.sanity_checking and rest[-1] == 0:
                trainer.save_checkpoint(str(tmp_path / f"{trainer.state.total_batches:03d}-validation.ckpt"))

    class Scheduled(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def run(saves: bool, ckpt_path: Path | None = None) -> tuple[tw.Trainer, tw.Module]:
        tw.seed_everything(2 if ckpt_path is None else 3, verbose=False)
        stop = tw.EarlyStopping("val_loss", patience=9)
        trainer = tw.Trainer(
            max_epochs=2,
            accumulate_grad_batches=2,
            val_check_interval=3,
            callbacks=[stop, *([SavesAll()] if saves else [])],
            **QUIET,
        )
        module = Scheduled(0.3)
        path = None if ckpt_path is None else str(ckpt_path)
        trainer.fit(module, make_loader(26, 4, shuffle=True), make_loader(8, 4), ckpt_path=path)
        return trainer, module

    whole, expected = run(False)
    _, module = run(True)
    assert_equal(weights(module), weights(expected))
    checkpoints = sorted(tmp_path.glob("*.ckpt"))
    assert len(checkpoints) == 2 * 7 + 2 * 2
    for path in checkpoints:
        trainer, module = run(False, path)
        assert_equal(weights(module), weights(expected))
        counts = [each.state.state_dict() for each in (trainer, whole)]
        assert counts[0] | {"saves": 0} == counts[1], path
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        assert metrics == {name: float(value) for name, value in whole.callback_metrics.items()}, path
        assert trainer.callbacks[0].state_dict() == whole.callbacks[0].state_dict(), path
        assert (
            trainer.lr_scheduler_configs[0].scheduler.state_dict()
            == whole.lr_scheduler_configs[0].scheduler.state_dict()
        )


def rest_of_an_epoch(folder: Path) -> dict[str, Any]:
    """Take up an epoch of one process on two."""
    trainer, module = tw.Trainer(max_epochs=1, **QUIET), Takes()
    drawn: list[float] = []
    module.on_train_batch_start = lambda *_: drawn.append(torch.rand(()).item())  # type: ignore[method-assign]
    trainer.fit(module, make_data_loader(folder), ckpt_path=str(folder / "alone.ckpt"))
    return {"seen": module.numbers, "length": trainer.num_training_batches, "drawn": drawn}


def make_data_loader(folder: Path) -> Any:
    return DataLoader(Recorded(folder / "reads"), batch_size=2, shuffle=True)


def test_an_epoch_of_one_process_goes_on_on_two(tmp_path: Path) -> None:
    first = train(make_data_loader(tmp_path), 5, tmp_path / "alone.ckpt")
    results = run_job(rest_of_an_epoch, 2, tmp_path)
    seen = [number for result in results for number in result["seen"]]
    assert [result["length"] for result in results] == [5 + 4] * 2
    assert len(seen) == len(set(seen)) == 26 - 10
    assert not set(seen) & set(first.numbers)
    assert results[0]["drawn"] != results[1]["drawn"], "the second rank's generators are its own"


class Tells(IterableDataset[Tensor]):
    """Numbers with random numbers. Workers have parts of them, and the state is the position."""

    def __init__(self, log: Path) -> None:
        self.log, self.place = str(log), 0

    def __iter__(self) -> Iterator[Tensor]:
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        while self.place < COUNT:
            self.place += 1
            if self.place % workers == worker:
                record(self.log, self.place)
                yield torch.tensor([float(self.place), random.random(), torch.rand(()).item()])
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_iterable_dataset_goes_on_from_its_state(num_workers: int, tmp_path: Path) -> None:
    log = tmp_path / "reads"

    def loader() -> Any:
        return DataLoader(Tells(log), batch_size=2, num_workers=num_workers)

    whole = train(loader(), -1, None)
    read(log)
    first = train(loader(), 4, tmp_path / "1.ckpt")
    read(log)
    second = train(loader(), 7, tmp_path / "2.ckpt", tmp_path / "1.ckpt")
    assert not set(read(log)) & set(first.numbers)
    third = train(loader(), -1, None, tmp_path / "2.ckpt")
    assert first.taken + second.taken + third.taken == whole.taken
    assert_equal(weights(third), weights(whole))


def part_of_an_epoch(folder: Path) -> dict[str, Any]:
    """Resume from the newest checkpoint for two batches, then save, with a Trainer and an Accelerator."""
    ranks = tw.Accelerator(cpu=ON_HOST).num_processes
    found: dict[str, Any] = {}
    for kind in ("Trainer", "iterable", "Accelerator"):
        place = folder / kind
        place.mkdir(exist_ok=True)
        number = len(list(place.glob("*.ckpt")))
        path = place / f"{number - 1}.ckpt" if number else None
        log = folder / "reads"
        data: Any = Tells(log) if kind == "iterable" else Recorded(log)
        loader: Any = DataLoader(data, batch_size=2, shuffle=None if kind == "iterable" else True)
        if kind == "Accelerator":
            found[kind] = own_loop(loader, path, place / f"{number}.ckpt")
            continue
        tw.seed_everything(5, verbose=False)
        steps = (number + 1) * 2
        trainer, module = tw.Trainer(max_steps=steps if ranks != 1 else -1, max_epochs=1, **QUIET), Takes()
        trainer.fit(module, loader, ckpt_path=None if path is None else str(path))
        trainer.save_checkpoint(str(place / f"{number}.ckpt"))
        found[kind] = (module.numbers, trainer.state.batch, trainer.num_training_batches)
    return found


def own_loop(loader: Any, path: Path | None, target: Path) -> Any:
    tw.seed_everything(5, verbose=False)
    accelerator, module = tw.Accelerator(cpu=ON_HOST), Takes()
    model, optimizer, data = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1), loader)
    if path is not None:
        accelerator.load_state(str(path))
    assert data.epoch == 0  # a loop that reads it continues at the saved batch
    seen, batch = [], 0
    for number, rows in enumerate(data, start=1):
        seen += accelerator.gather_for_metrics(rows[:, 0]).int().tolist()
        accelerator.backward(model(rows))
        optimizer.step()
        optimizer.zero_grad()
        batch = number
        if accelerator.num_processes != 1 and number == 2:
            break
    accelerator.save_state(str(target))
    accelerator.engine.close()
    return seen, batch, None


@pytest.mark.slow
def test_an_epoch_can_continue_on_other_world_sizes(tmp_path: Path) -> None:
    seen: dict[str, list[int]] = {"Trainer": [], "iterable": [], "Accelerator": []}
    for ranks in (2, 3, 1):
        results = run_job(part_of_an_epoch, ranks, tmp_path)
        for kind, numbers in seen.items():
            if kind == "Accelerator":
                numbers += results[0][kind][0]
            else:
                numbers += [number for result in results for number in result[kind][0]]
    assert sorted(seen["Trainer"]) == list(range(COUNT))
    assert sorted(seen["iterable"]) == list(range(1, COUNT + 1))
    assert sorted(seen["Accelerator"]) == list(range(COUNT))
    assert results[0]["Trainer"][2] == 2 + 2 + 3, "of 13 batches, ten lie behind: four of two ranks, and six of three"
