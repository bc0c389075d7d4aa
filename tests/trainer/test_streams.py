"""Streams with a state: a run that is cut anywhere resumes as if it had not been cut."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small import ON_HOST, QUIET, fit
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import trainwright as tw
from trainwright.data.source_state import SPACING


class Endless(IterableDataset[Tensor]):
    """Never ends. Workers take every n-th number."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        while True:
            self.place += 1
            if self.place % workers == worker:
                yield torch.tensor([float(self.place), random.random()])

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Forgets(IterableDataset[Tensor]):
    """Begins at the start in every iteration, except after a state was loaded."""

    def __init__(self) -> None:
        self.place, self.start = 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        start, self.start = self.start, 0
        for number in range(start, 14):
            self.place = number + 1
            if number % workers == worker:
                yield torch.tensor([float(number), random.random()])

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["place"]


class Epochs(Forgets):
    """Accepts a state only in its epoch, and has a new order in every epoch, as HF's datasets do."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch, self.loaded = 0, None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        is_taken = self.loaded is not None and self.loaded["epoch"] == self.epoch
        order = random.Random(self.epoch).sample(range(14), 14)
        for place in range(self.loaded["place"] if is_taken else 0, 14):
            self.place = place + 1
            if place % workers == worker:
                yield torch.tensor([float(order[place]), random.random()])

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class Buffered(Epochs):
    """The same behind a shuffle buffer, of which its state says nothing."""

    def __iter__(self) -> Iterator[Tensor]:
        draw, buffer = random.Random(self.epoch + 7), []
        for item in super().__iter__():
            buffer.append(item)
            if len(buffer) == 4:
                yield buffer.pop(draw.randrange(4))
        yield from draw.sample(buffer, len(buffer))


class Passes(Forgets):
    """Counts its passes in its state, and has a new order in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        while self.place < 14:
            order = random.Random(self.passes).sample(range(14), 14)
            self.place += 1
            if self.place % workers == worker:
                yield torch.tensor([float(order[self.place - 1]), random.random()])
        self.passes, self.place = self.passes + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place, "passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.passes = state["place"], state["passes"]


class Takes(tw.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(2, 1)
        self.taken: list[tuple[int, list[list[float]]]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.taken.append((self.current_epoch, batch.tolist()))
        return self.net(batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("seen", batch.mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def numbers(self, epoch: int) -> list[int]:
        return [int(row[0]) for when, batch in self.taken if when == epoch for row in batch]


class SavesAll(tw.Callback):
    """Saves after every batch, or at the ends and beginnings of epochs, at unforeseen times."""

    def __init__(self, folder: Path, at_ends: bool) -> None:
        self.folder, self.at_ends, self.steps = folder, at_ends, {}

    def save(self, trainer: Any) -> None:
        path = str(self.folder / f"{len(self.steps)}.ckpt")
        self.steps[path] = trainer.global_step
        trainer.save_checkpoint(path)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.at_ends:
            self.save(trainer)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if self.at_ends:
            self.save(trainer)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if self.at_ends:
            self.save(trainer)


def train(data: Any, options: Any, callbacks: Any = (), ckpt_path: str | None = None, **settings: Any) -> Takes:
    tw.seed_everything(5 if ckpt_path is None else 6, verbose=False)
    module = Takes()
    loader = DataLoader(data, batch_size=2, **options)
    trainer = tw.Trainer(**{"max_epochs": 3, **QUIET, **settings}, callbacks=list(callbacks))
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return module


READERS = {
    "here": {},
    "workers": {"num_workers": 2},
    "workers that stay": {"num_workers": 2, "persistent_workers": True},
}
KINDS = [Endless, Forgets, Epochs, Buffered, Passes]


def cut_everywhere(kind: Any, options: dict[str, Any], folder: Path, every: int = 1, **settings: Any) -> Takes:
    """Train once, and again from checkpoints of all moments. Return the first module."""
    for at_ends in (False, True):
        saves = SavesAll(folder / str(at_ends), at_ends)
        whole = train(kind(), options, [saves], **settings)
        for path, step in list(saves.steps.items())[::every]:
            rest = train(kind(), options, ckpt_path=path, **settings)
            assert rest.taken == whole.taken[step:], (at_ends, step)
    assert train(kind(), options, **settings).taken == whole.taken, "with saves and without"
    return whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_goes_on_from_every_moment(kind: Any, tmp_path: Path) -> None:
    for limit in (None, 4):
        if kind is Endless and limit is None:
            continue
        whole = cut_everywhere(kind, {}, tmp_path / str(limit), every=3, limit_train_batches=limit)
        if limit is None:
            assert all(sorted(whole.numbers(epoch)) == list(range(14)) for epoch in range(3))
        elif kind is Endless:
            assert [each for epoch in range(3) for each in whole.numbers(epoch)] == list(range(1, 25))
        if kind in (Epochs, Passes, Buffered):
            assert len({tuple(whole.numbers(epoch)) for epoch in range(3)}) == 3, "another order each epoch"


def test_a_stream_goes_on_in_workers_from_an_epochs_end_and_within(tmp_path: Path) -> None:
    for kind, limit in ((Endless, 4), (Epochs, None), (Passes, None)):
        options = READERS["workers that stay" if kind is Passes else "workers"]
        whole = train(kind(), options, limit_train_batches=limit)
        path = tmp_path / f"{kind.__name__}.ckpt"
        for steps in (4, 6):  # the end of an epoch of four batches, and within one
            trainer = tw.Trainer(max_epochs=3, max_steps=steps, limit_train_batches=limit, **QUIET)
            tw.seed_everything(5, verbose=False)
            module = Takes()
            trainer.fit(module, DataLoader(kind(), batch_size=2, **options))
            trainer.save_checkpoint(str(path), overwrite=True)
            rest = train(kind(), options, ckpt_path=str(path), limit_train_batches=limit)
            assert module.taken + rest.taken == whole.taken, (kind, steps)


def test_what_a_buffer_lost_is_read_anew_and_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for reader in ("here", "workers"):
        path = tmp_path / f"{reader}.ckpt"
        whole = train(Buffered(), READERS[reader])
        tw.seed_everything(5, verbose=False)
        trainer = fit(Takes(), DataLoader(Buffered(), batch_size=2, **READERS[reader]), max_epochs=3, max_steps=3)
        trainer.save_checkpoint(str(path))
        capsys.readouterr()
        assert train(Buffered(), READERS[reader], ckpt_path=str(path)).taken == whole.taken[3:]
        error = capsys.readouterr().err
        assert "skipping the first 3 batches of this epoch: a Buffered yields a different batch after" in error
        assert error.count("have to be re-read") == 1


def test_a_save_that_nobody_foresees_takes_the_state_of_an_earlier_batch(tmp_path: Path) -> None:
    """The batches in between are read again, up to a hundred."""
    batches = SPACING + 30

    class SavesOnce(tw.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == SPACING + 9:
                trainer.save_checkpoint(str(tmp_path / "once.ckpt"))

    settings: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": batches, "enable_checkpointing": True}
    saver = tw.ModelCheckpoint(dirpath=tmp_path / "ends")
    whole = train(Endless(), {}, [SavesOnce(), saver], **settings)
    rest = train(Endless(), {}, ckpt_path=str(tmp_path / "once.ckpt"), **{**settings, "enable_checkpointing": False})
    assert rest.taken == whole.taken[SPACING + 10 :]


def test_a_loop_resumes_within_a_stream(tmp_path: Path) -> None:
    accelerator = tw.Accelerator(cpu=ON_HOST)
    _, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(Endless(), batch_size=2))
    told = []
    for number, batch in zip(range(SPACING + 31), loader, strict=False):
        told.append(batch.tolist())
        if number == SPACING + 9:
            accelerator.save_state(str(tmp_path / "loop.ckpt"))
    again = tw.Accelerator(cpu=ON_HOST)
    _, loader = again.prepare(nn.Linear(1, 1), DataLoader(Endless(), batch_size=2))
    again.load_state(str(tmp_path / "loop.ckpt"))
    assert loader.epoch == 0  # a loop that reads it continues at the saved batch
    assert [batch.tolist() for batch, _ in zip(loader, range(21), strict=False)] == told[SPACING + 10 :]


def test_overfitting_repeats_the_same_batches_of_a_stream() -> None:
    for reader in ("here", "workers"):
        module = train(Endless(), READERS[reader], overfit_batches=2)
        assert module.numbers(0) == module.numbers(1) == module.numbers(2)


def test_another_number_of_workers_begins_anew_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = tw.Trainer(max_epochs=2, max_steps=3, **QUIET)
    tw.seed_everything(5, verbose=False)
    trainer.fit(Takes(), DataLoader(Forgets(), batch_size=2))
    trainer.save_checkpoint(str(tmp_path / "1.ckpt"))
    capsys.readouterr()
    module = train(Forgets(), READERS["workers"], ckpt_path=str(tmp_path / "1.ckpt"), max_epochs=1)
    assert len(module.taken) == 8 - 3, "of seven numbers each, in four batches"
    assert "a Forgets was read by 0 workers, whose states do not fit 2" in capsys.readouterr().err
