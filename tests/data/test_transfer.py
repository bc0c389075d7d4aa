"""Moving batches of any structure."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, make_dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright.data.loaders import ShardedLoader, with_last
from trainwright.data.transfer import Prefetcher, map_tensors, pinned, to_device

Pair = namedtuple("Pair", "left right")


@dataclass
class Own:
    value: Tensor

    def to(self, device: Any) -> Own:
        return Own(self.value.to(device))


def test_every_structure_keeps_its_kind() -> None:
    batch = {
        "pair": Pair(torch.zeros(1), "text"),
        "ordered": OrderedDict(a=torch.zeros(2)),
        "list": [torch.zeros(3), (4, None)],
        "own": Own(torch.zeros(4)),
        "class": Own,
    }
    moved = to_device(batch, torch.device("meta"))
    assert isinstance(moved["pair"], Pair)
    assert isinstance(moved["ordered"], OrderedDict)
    assert moved["pair"].left.is_meta
    assert moved["pair"].right == "text"
    assert moved["ordered"]["a"].is_meta
    assert moved["list"][0].is_meta
    assert moved["list"][1] == (4, None)
    assert moved["own"].value.is_meta
    assert moved["class"] is Own


class Strict(dict[str, Any]):
    """A dict whose constructor requires a name."""

    def __init__(self, data: Any, name: str) -> None:
        super().__init__(data)
        self.name = name


ROWS = {"x": torch.zeros(2), "y": torch.zeros(3)}
FROZEN: Any = make_dataclass("Frozen", ["x", "y"], frozen=True)


@pytest.mark.parametrize("batch", [defaultdict(list, ROWS), MappingProxyType(ROWS), Strict(ROWS, "strict")])
def test_mappings_of_other_kinds_are_moved(batch: Any) -> None:
    moved = to_device(batch, torch.device("meta"))
    assert type(moved) is type(batch)
    assert (moved["x"].is_meta, moved["x"].shape, getattr(moved, "name", "strict")) == (True, (2,), "strict")


@pytest.mark.parametrize("batch", [FROZEN(**ROWS), SimpleNamespace(**ROWS)])
def test_objects_without_a_method_to_move_are_passed_on(batch: Any) -> None:
    assert to_device(batch, torch.device("meta")) is batch


def test_map_tensors_leaves_the_rest() -> None:
    assert map_tensors(lambda tensor: tensor + 1, [torch.zeros(()), "a", {"b": torch.ones(())}]) == [1, "a", {"b": 2}]


class RecordingStream:
    """Stands for the stream of a device, and records its calls in order."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.copies = 0
        self.is_open = False

    def pin(self, batch: Any) -> Any:
        self.events.append("pin")
        return batch

    @contextmanager
    def copying(self) -> Iterator[None]:
        self.is_open = True
        yield
        self.is_open = False

    def mark(self) -> int:
        self.copies += 1
        return self.copies - 1

    def wait_for(self, mark: int) -> None:
        assert not self.is_open
        self.events.append(f"wait {mark}")

    def keep(self, leaf: Any) -> None:
        assert not self.is_open
        self.events.append("keep")

    def wait_for_training(self) -> None:
        assert not self.is_open  # within, the current stream is the stream of the copies
        self.events.append("after training")


def prefetch(batches: list[Any], *, ahead: bool, most: int | None = None) -> list[str]:
    """Return the events, in order, while a loop trains on the batches."""
    events: list[str] = []
    stream = RecordingStream(events)

    def read() -> Iterator[tuple[Any, bool]]:
        try:
            for index, batch in enumerate(batches):
                events.append(f"read {index}")
                yield batch, index == len(batches) - 1
        finally:
            events.append("closed")

    def transfer(batch: Any, device: torch.device) -> Any:
        assert stream.is_open
        events.append(f"copy {stream.copies}")
        return to_device(batch, device)

    pairs = Prefetcher(read(), torch.device("meta"), ahead=ahead, transfer=transfer, stream=stream)  # type: ignore[arg-type]
    for index, (_, is_last) in enumerate(pairs):
        assert is_last == (index == len(batches) - 1)
        events.append(f"train {index}")
        if most == index + 1:
            break
    return events


def test_the_next_copy_starts_before_this_batch_trains() -> None:
    batches = [torch.zeros(2), torch.zeros(2), torch.zeros(2)]
    assert prefetch(batches, ahead=True) == [
        *("read 0", "pin", "copy 0"),
        *("read 1", "pin", "copy 1", "wait 0", "keep", "train 0"),
        *("read 2", "pin", "copy 2", "wait 1", "keep", "train 1"),
        *("closed", "wait 2", "keep", "train 2"),
    ]
    assert prefetch([], ahead=True) == ["closed"]


def test_nothing_is_read_ahead_where_reading_draws() -> None:
    batches = [torch.zeros(2), torch.zeros(2)]
    assert prefetch(batches, ahead=False) == [
        *("read 0", "pin", "copy 0", "wait 0", "keep", "train 0"),
        *("read 1", "pin", "copy 1", "wait 1", "keep", "train 1"),
        "closed",
    ]


@pytest.mark.parametrize("ahead", [True, False])
def test_a_loop_that_is_left_closes_its_batches(ahead: bool) -> None:
    events = prefetch([torch.zeros(2)] * 5, ahead=ahead, most=2)
    assert events[-2:] == ["train 1", "closed"]
    assert f"read {2 + ahead}" not in events


def test_each_tensor_is_kept_and_an_object_that_hides_them_waits() -> None:
    nested = {"a": torch.zeros(2), "b": [torch.zeros(2), "text", 3]}
    assert prefetch([nested], ahead=True) == ["read 0", "pin", "copy 0", "closed", "wait 0", "keep", "keep", "train 0"]
    events = prefetch([Own(torch.zeros(2))], ahead=False)
    assert events == ["read 0", "pin", "after training", "copy 0", "wait 0", "train 0", "closed"]


def test_objects_pin_themselves() -> None:
    class Pinning(Own):
        def pin_memory(self) -> str:
            return "pinned"

    assert pinned({"x": [Pinning(torch.zeros(1)), "text"], "y": Own(torch.zeros(1))})["x"] == ["pinned", "text"]
    sparse = torch.eye(2).to_sparse()
    assert pinned(sparse) is sparse


@pytest.mark.gpu
@pytest.mark.parametrize("num_workers", [0, 2])
def test_training_on_a_gpu_gets_every_batch_whole(num_workers: int) -> None:
    """The memory of batches is reused at once, while long kernels still read it."""
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    device = torch.device(kind.type, torch.accelerator.current_device_index())
    data = torch.arange(64.0).repeat_interleave(1 << 18).reshape(64, -1)
    loader = DataLoader(TensorDataset(data), batch_size=2, num_workers=num_workers)
    share = ShardedLoader(loader, rank=0, world_size=1, mode="train", pin_memory=True)
    share.set_epoch(1, 0)
    weight = nn.Linear(1 << 9, 1 << 9, device=device)
    sums = []
    for batch, is_last in Prefetcher(with_last(share, 0, 32), device, ahead=share.may_read_ahead):
        assert batch[0].device == device
        value = batch[0].reshape(-1, 1 << 9)
        for _ in range(5):
            weight(value)
        sums.append(value.sum(dtype=torch.float64))
        assert is_last == (len(sums) == 32)
    assert [float(each) for each in sums] == [float((4 * index + 1) * (1 << 18)) for index in range(32)]
