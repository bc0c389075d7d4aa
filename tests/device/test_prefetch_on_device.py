"""Batches on their way from pinned memory to an accelerator: whole, in order, and in whatever shape they come."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from by_hand import ON_DEVICE
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import trainwright as tw

pytestmark = pytest.mark.gpu

BATCHES, SIZE = 24, 1 << 16


class Numbered(Dataset[Any]):
    """Sample n is a row of the number n."""

    def __init__(self, count: int = 2 * BATCHES) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((SIZE,), float(index))


class Pair(NamedTuple):
    rows: Tensor
    text: str


class Own:
    """A batch that pins itself, moves itself, and says which stream uses its memory."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def to(self, device: torch.device) -> Own:
        return Own(self.rows.to(device, non_blocking=True))

    def pin_memory(self) -> Own:
        return Own(self.rows.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        self.rows.record_stream(stream)


def as_own(rows: list[Tensor]) -> Own:
    return Own(torch.stack(rows))


def as_dict(rows: list[Tensor]) -> dict[str, Any]:
    return {"x": {"rows": torch.stack(rows)}, "count": len(rows)}


def as_pair(rows: list[Tensor]) -> Pair:
    return Pair(torch.stack(rows), "text")


def as_tensor(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows)


COLLATES = {"dict": as_dict, "tuple": as_pair, "own": as_own}


def rows_of(batch: Any) -> Tensor:
    if isinstance(batch, dict):
        batch = batch["x"]
    found: Tensor = batch if isinstance(batch, Tensor) else batch["rows"] if isinstance(batch, dict) else batch.rows
    return found


class Sums(tw.Module):
    """Keeps the device busy, and then looks at all of a batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(256, 256)
        self.sums: list[Tensor] = []
        self.devices: set[torch.device] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = rows_of(batch)
        self.devices.add(rows.device)
        values = rows.reshape(-1, 256)
        for _ in range(4):  # the next copy has come long before these are done
            values = torch.tanh(self.net(values))
        # In two numbers: a whole row of one sample, and of the other.
        self.sums.append(rows.view(-1, SIZE).mean(dim=1))
        return values.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def numbers(self) -> list[float]:
        return torch.cat(self.sums).cpu().tolist()


def loader_of(collate: Any = as_tensor, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbered(), batch_size=2, collate_fn=collate, **options)


def fitted(loader: Any, module: Sums | None = None, **settings: Any) -> Sums:
    module = module or Sums()
    tw.Trainer(**{"max_epochs": 1, **ON_DEVICE, **settings}).fit(module, loader)
    return module


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"pin_memory": True}], ids=["here", "workers", "pinned"])
def test_every_batch_arrives_whole_and_in_order(device: torch.device, options: dict[str, Any]) -> None:
    module = fitted(loader_of(**options))
    assert module.numbers() == list(range(2 * BATCHES))
    assert module.devices == {device}


@pytest.mark.parametrize("kind", COLLATES)
def test_batches_of_any_kind_are_prefetched(device: torch.device, kind: str) -> None:
    module = fitted(loader_of(COLLATES[kind]), max_epochs=2)
    assert module.numbers() == 2 * list(range(2 * BATCHES))
    assert module.devices == {device}


def test_a_module_moves_its_batches_itself(device: torch.device) -> None:
    class Moves(Sums):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.calls.append(f"before {rows_of(batch).device.type}")
            return batch

        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            self.calls.append(f"move to {device.type}")
            return Own(batch.rows.to(device) + 100)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.calls.append(f"after {rows_of(batch).device.type}")
            return batch

    module = fitted(loader_of(as_own), Moves())
    assert isinstance(module, Moves)
    assert module.numbers() == list(range(100, 100 + 2 * BATCHES))
    assert module.calls == BATCHES * ["before cpu", f"move to {device.type}", f"after {device.type}"]


def test_a_hook_on_the_device_gets_whole_batches(device: torch.device) -> None:
    """It runs when the batch's turn has come, not while it is copied."""

    class Adds(Sums):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            assert batch.device == device
            return batch + 1

    assert fitted(loader_of(), Adds()).numbers() == list(range(1, 1 + 2 * BATCHES))


class Reused(IterableDataset[Tensor]):
    """Returns one block of memory again and again, with other numbers in it, like a reader with a buffer."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned

    def __iter__(self) -> Iterator[Tensor]:
        block = torch.empty(2, SIZE, pin_memory=self.pinned)
        for index in range(BATCHES):
            block[0], block[1] = 2.0 * index, 2.0 * index + 1
            yield block


def test_a_reader_may_use_its_buffer_again(device: torch.device) -> None:
    """The copy is made from separate memory, so later changes by the reader do not matter."""
    assert fitted(DataLoader(Reused(pinned=False), batch_size=None)).numbers() == list(range(2 * BATCHES))


def test_evaluation_gets_whole_batches(device: torch.device) -> None:
    class Evaluates(Sums):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.training_step(batch, batch_idx)

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return rows_of(batch).mean(dim=1)

    module = Evaluates()
    trainer = tw.Trainer(**ON_DEVICE)
    trainer.validate(module, loader_of(num_workers=2), verbose=False)
    assert module.numbers() == list(range(2 * BATCHES))
    predictions = trainer.predict(module, loader_of())
    assert torch.cat([each.cpu() for each in predictions]).tolist() == list(range(2 * BATCHES))


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}], ids=["here", "workers"])
def test_a_resumed_run_gets_the_batches_that_were_not_trained_on(tmp_path: Path, options: dict[str, Any]) -> None:
    """One more batch has been prefetched when the checkpoint is made. It belongs to the resumed run."""

    class Stops(tw.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 7:
                trainer.save_checkpoint(str(tmp_path / "seven.ckpt"))

    whole = fitted(loader_of(shuffle=True, **options), callbacks=[Stops()])
    resumed = Sums()
    trainer = tw.Trainer(max_epochs=1, **ON_DEVICE)
    trainer.fit(resumed, loader_of(shuffle=True, **options), ckpt_path=str(tmp_path / "seven.ckpt"))
    assert resumed.numbers() == whole.numbers()[14:]
    assert sorted(whole.numbers()) == list(range(2 * BATCHES))
