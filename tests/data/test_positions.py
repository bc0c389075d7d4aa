"""The position in the data. A run that resumes at another world size reads every sample of an epoch once."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import trainwright as tw
from trainwright.checkpoint.codec import decode, encode
from trainwright.data.combined import CombinedLoader, shard
from trainwright.data.stateful_iterable import ONCE

SEED, EPOCH = 3, 2


Plans = Sequence[Sequence[tuple[int, int | None]]]
"""For plans and parts of an epoch: the number of ranks, and the number of batches (None: to its end)."""


class Uneven(Sampler[list[int]]):
    """A user's batch sampler: batches of 1, 2, 3, 1, 2, 3 ... samples, in a special order."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[list[int]]:
        order, size = random.sample(range(self.count), self.count), 1
        while order:
            yield order[:size]
            order, size = order[size:], size % 3 + 1

    def __len__(self) -> int:
        return len(list(iter(self)))


def numbers(count: int, first: int = 0) -> TensorDataset:
    return TensorDataset(torch.arange(first, first + count))


def samples(batch: Any) -> list[int]:
    """Return the numbers in a nested batch. None stands for a loader that has ended."""
    if isinstance(batch, torch.Tensor):
        return [int(each) for each in batch.reshape(-1)]
    return [number for part in batch if part is not None for number in samples(part)]


def own(share: Any, rank: int, number: int, batch: Any) -> list[int]:
    """Return the numbers in a batch, except another rank's samples, which have weight zero, in an uneven round."""
    sizes = [part.uneven.get(number) for part in getattr(share, "parts", [share])]
    several = len(sizes) > 1  # every loader has another hundred
    return [each for each in samples(batch) if (part := sizes[each // 100 if several else 0]) is None or part[rank]]


def segment(
    loader: Any, ranks: int, batch: int, state: Any, most: int | None, **options: Any
) -> tuple[list[list[int]], int, Any, list[int | None]]:
    """Train on some batches of an epoch. Return the ranks' batches, and the position after them."""
    had, ends, lengths = [], [], []
    for rank in range(ranks):
        share = shard(loader() if callable(loader) else loader, rank=rank, world_size=ranks, mode="train", **options)
        if state is not None:
            share.load_state_dict(state)
        share.set_epoch(SEED, EPOCH, batch)
        lengths.append(share.length)
        kept = [own(share, rank, number, each) for number, each in enumerate(islice(share, most), start=batch)]
        had.append([number for each in kept for number in each])
        ends.append(batch + len(kept))
        state_after = share.state_dict(batch + len(kept))
        share.close()
    assert len(set(ends)) == 1, "every rank makes the same number of rounds"
    return had, ends[0], decode(*encode(state_after)), lengths


def epoch(loader: Any, plan: Sequence[tuple[int, int | None]], **options: Any) -> list[int]:
    """Return the batches of an epoch that was trained in parts, on different numbers of ranks."""
    batch, state, seen = 0, None, []
    for ranks, most in plan:
        had, batch, state, lengths = segment(loader, ranks, batch, state, most, **options)
        seen += [number for each in had for number in each]
        if most is None and lengths[0] is not None:
            assert lengths == [batch] * ranks, "the length is known before the epoch is read"
    return seen


PLANS = [
    [(first, 2), (second, None)] for first, second in itertools.product((1, 2, 3, 4), repeat=2) if first != second
] + [[(2, 1), (3, 1), (1, 2), (4, 1), (2, None)], [(3, 2), (3, 1), (2, None)]]
SOME_PLANS = [PLANS[0], PLANS[3], PLANS[8], PLANS[10], *PLANS[-2:]]
"""From one rank to two and back, from three to four, from four to two, and in several parts."""
some_or_all_plans = pytest.mark.parametrize("plans", [SOME_PLANS, pytest.param(PLANS, marks=pytest.mark.slow)], ids=len)


def samplers(count: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(9)
    data = numbers(count)
    return {
        "in order": DataLoader(data, batch_size=2),
        "shuffled": DataLoader(data, batch_size=2, shuffle=True),
        "single items": DataLoader(data, batch_size=None, shuffle=True),
        "a generator": DataLoader(data, batch_size=2, sampler=RandomSampler(data, generator=generator)),
        "a part": DataLoader(data, batch_size=2, sampler=SubsetRandomSampler(range(0, count, 2))),
        "batches of one's own": DataLoader(data, batch_sampler=Uneven(count)),
        "length buckets": DataLoader(
            data, batch_sampler=tw.LengthBucketSampler(([1, 5, 2, 7, 3] * count)[:count], max_tokens=12)
        ),
        "weighted": DataLoader(data, batch_size=3, sampler=WeightedRandomSampler(torch.rand(count).tolist(), count)),
    }


@some_or_all_plans
@pytest.mark.parametrize("kind", list(samplers(3)))
def test_every_sample_comes_once_at_any_world_size(kind: str, plans: Plans) -> None:
    for count, plan in itertools.product((23, 24, 29), plans):
        loader = samplers(count)[kind]
        whole = epoch(loader, [(1, None)])
        assert len(whole) >= 12
        assert Counter(epoch(loader, plan)) == Counter(whole), (count, plan)


def test_at_the_same_world_size_nothing_changes() -> None:
    for kind, loader in samplers(29).items():
        for ranks, start in itertools.product((1, 2, 3), (1, 2, 3)):
            whole = [segment(loader, ranks, 0, None, None)[0][rank] for rank in range(ranks)]
            had, batch, state, _ = segment(loader, ranks, 0, None, start)
            again, batch, state, _ = segment(loader, ranks, batch, state, 1)
            rest, *_ = segment(loader, ranks, batch, state, None)
            for rank in range(ranks):
                assert had[rank] + again[rank] + rest[rank] == whole[rank], (kind, ranks, start)


@some_or_all_plans
def test_drop_last_drops_no_more_than_a_round(plans: Plans) -> None:
    for count, plan in itertools.product((40, 41, 47), plans):
        loader = DataLoader(numbers(count), batch_size=2, shuffle=True, drop_last=True)
        seen = epoch(loader, plan)
        assert len(set(seen)) == len(seen)
        assert len(seen) > count - 2 * plan[-1][0] - 1


def test_another_batch_size_reads_every_sample_once() -> None:
    for count, old, new in itertools.product((23, 24), (2, 3, 4), (1, 2, 3, 5, 7)):
        for before, after in ((1, 1), (2, 1), (1, 2), (2, 3)):
            loader = DataLoader(numbers(count), batch_size=old, shuffle=True)
            had, batch, state, _ = segment(loader, before, 0, None, 2)
            loader = DataLoader(numbers(count), batch_size=new, shuffle=True)
            rest, *_, lengths = segment(loader, after, batch, state, None)
            seen = [number for each in had + rest for number in each]
            assert sorted(seen) == list(range(count)), (count, old, new, before, after)
            assert len(set(lengths)) == 1


@pytest.mark.filterwarnings("ignore:the . ranks cannot divide a round:UserWarning")
@some_or_all_plans
@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_combined_loaders_are_resumed_at_any_world_size(mode: Any, plans: Plans) -> None:
    def loader() -> CombinedLoader:
        return CombinedLoader(
            [
                DataLoader(numbers(26), batch_size=2, shuffle=True),
                DataLoader(numbers(7, 100), batch_size=1, shuffle=True),
                DataLoader(numbers(17, 200), batch_size=4),
            ],
            mode,
        )

    firsts = range(26), range(100, 107), range(200, 217)
    for plan in plans:
        seen = Counter(epoch(loader(), plan))
        if mode == "min_size":
            assert max(seen.values()) == 1
            assert any(all(seen[number] for number in each) for each in firsts), "one of them to its end"
        elif mode == "max_size_cycle":
            assert any(all(seen[number] == 1 for number in each) for each in firsts), "the longest once"
            for each in firsts:
                times = {seen[number] for number in each}
                assert max(times) - min(times) <= 1, "pass after pass"
        else:
            assert seen == Counter(itertools.chain(*firsts))


class Stream(IterableDataset[Any]):
    """Numbers through a shuffle buffer. Every worker reads a part of them, and records its items."""

    def __init__(self, count: int, log: list[int] | None = None) -> None:
        self.count, self.log = count, log
        self.next, self.buffer = 0, []

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        place, parts = (info.id, info.num_workers) if info is not None else (0, 1)
        while True:
            while self.next < self.count and len(self.buffer) < 4:
                if self.next % parts == place:
                    if self.log is not None:
                        self.log.append(self.next)
                    self.buffer.append(self.next)
                self.next += 1
            if not self.buffer:
                break
            yield self.buffer.pop(random.randrange(len(self.buffer)))
        self.next = 0


class Telling(Stream):
    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next, self.buffer = state["next"], state["buffer"]


def stream(kind: Any, count: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(kind(count), batch_size=2, **options)


@some_or_all_plans
def test_a_dataset_without_indices_is_read_once_at_any_world_size(plans: Plans) -> None:
    for kind, count, plan in itertools.product((Stream, Telling), (23, 24), plans):
        seen = epoch(partial(stream, kind, count), plan)
        assert sorted(seen) == list(range(count)), (kind, count, plan)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_a_dataset_goes_on_from_its_state(options: dict[str, Any]) -> None:
    loader = partial(stream, Telling, 32, **options)
    for ranks in (1, 2):
        whole, *_ = segment(loader, ranks, 0, None, None)
        for start in (1, 4, 6):
            had, batch, state, _ = segment(loader, ranks, 0, None, start)
            again, batch, state, _ = segment(loader, ranks, batch, state, 1)
            rest, *_ = segment(loader, ranks, batch, state, None)
            for rank in range(ranks):
                assert had[rank] + again[rank] + rest[rank] == whole[rank], (ranks, start)


def test_no_item_is_read_twice() -> None:
    log: list[int] = []
    _, batch, state, _ = segment(DataLoader(Telling(30, log), batch_size=2), 1, 0, None, 5)
    read = list(log)
    assert max(read) == 12, "ten were consumed, and three wait in the buffer"
    log.clear()
    loader = DataLoader(Telling(30, log), batch_size=2)
    share = shard(loader, rank=0, world_size=1, mode="train")
    share.load_state_dict(state)
    share.set_epoch(SEED, EPOCH, batch)
    list(share)
    assert read + log == list(range(30))
    share.set_epoch(SEED, EPOCH + 1)
    assert sorted(samples(list(share))) == list(range(30)), "the next epoch begins at the start"


def test_persistent_workers_are_restarted_after_the_resumed_epoch() -> None:
    loader = DataLoader(Telling(24), batch_size=2, num_workers=2, persistent_workers=True)
    share = shard(loader, rank=0, world_size=1, mode="train")
    share.set_epoch(SEED, EPOCH)
    read = iter(share)
    had = [samples(next(read)) for _ in range(3)]
    state = share.state_dict(3)
    rest = [samples(each) for each in read]
    share.set_epoch(SEED, EPOCH + 1)
    following = [samples(each) for each in share]
    share.load_state_dict(state)
    share.set_epoch(SEED, EPOCH, 3)
    assert [samples(each) for each in share] == rest
    share.set_epoch(SEED, EPOCH + 1)
    assert [samples(each) for each in share] == following
    assert sorted(itertools.chain(*had, *rest)) == list(range(24))
    share.close()


class OwnLoader:
    """A user's loader with a state, like torchdata's StatefulDataLoader."""

    def __init__(self) -> None:
        self.place, self.read = 0, []

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.place < 10:
            self.place += 1
            self.read.append(self.place)
            yield torch.tensor([self.place])
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def test_a_loader_with_state_is_resumed_from_it() -> None:
    _, batch, state, _ = segment(OwnLoader(), 1, 0, None, 4)
    loader = OwnLoader()
    rest, *_ = segment(loader, 1, batch, state, None)
    assert rest == [[5, 6, 7, 8, 9, 10]]
    assert loader.read == [5, 6, 7, 8, 9, 10]


def test_what_is_read_again_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    loader = DataLoader(Stream(20), batch_size=2)
    _, batch, state, _ = segment(loader, 1, 0, None, 4)
    segment(loader, 1, batch, state, None)
    assert capsys.readouterr().err == (
        "trainwright: skipping the first 4 batches of this epoch: a Stream has no state_dict(), so they have to be re-read.\n"
    )
    with pytest.raises(ValueError, match=r"saved after 4 batches of 2 samples, .* batches of 3, .* batch_size=2"):
        segment(DataLoader(Stream(20), batch_size=3), 1, batch, state, None)
    with pytest.raises(ValueError, match=r"belongs to 1 loaders, but now there are 2\. Resume with the loaders"):
        segment([loader, loader], 1, batch, state, None)


def test_a_place_beyond_the_data_is_seen() -> None:
    _, batch, state, _ = segment(DataLoader(numbers(20), batch_size=2), 2, 0, None, 4)
    share = shard(DataLoader(numbers(14), batch_size=2), rank=0, world_size=1, mode="train")
    share.load_state_dict(state)
    share.set_epoch(SEED, EPOCH, batch)
    assert share.starts_beyond
    share = shard(DataLoader(numbers(16), batch_size=2), rank=0, world_size=1, mode="train")
    share.load_state_dict(state)
    with pytest.warns(
        UserWarning, match="of a SequentialSampler of 20 samples, .* of 16 samples. .* come twice or not at all"
    ):
        share.set_epoch(SEED, EPOCH, batch)
    assert not share.starts_beyond
    assert list(share) == []
    sampler = BatchSampler(RandomSampler(numbers(20)), 2, drop_last=False)
    assert not shard(DataLoader(numbers(20), batch_sampler=sampler), rank=0, world_size=1, mode="train").starts_beyond


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_belongs_to_the_planned_batch(num_workers: int) -> None:
    for ranks in (1, 2, 3):
        share = shard(
            DataLoader(Telling(48), batch_size=2, num_workers=num_workers), rank=0, world_size=ranks, mode="train"
        )
        share.plan_states([(ONCE, 3)])
        share.set_epoch(SEED, EPOCH)
        list(islice(share, 3))
        state = share.state_dict(3)
        (place,), (source,) = state["places"], state["sources"]
        assert source["items"] == place["items"] == 3 * ranks, "though more was read"
        share.close()
