"""Several loaders at once, in every mode and from any batch on. The ranks together have the batches of one process."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from starts import Starts, some_or_every
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from trainwright.data.combined import CombinedLoader, ShardedCombination, evaluation_loaders, in_proportion, shard
from trainwright.data.loaders import ShardedLoader, with_last

MODES: list[Any] = ["min_size", "max_size", "max_size_cycle"]
Pair = namedtuple("Pair", "left right")
NO_PROPORTION = "ignore:the . ranks cannot divide a round:UserWarning"


def numbers(first: int, count: int, size: int = 1, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(first, first + count)), batch_size=size, **options)


def plain(value: Any) -> Any:
    """Return a batch as lists of numbers."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return plain(value[0]) if len(value) == 1 else [plain(each) for each in value]
    return value


def read(share: Any, epoch: int = 0, start: int = 0, seed: int = 1) -> list[Any]:
    share.set_epoch(seed, epoch, start)
    return [plain(batch) for batch in share]


def combination(loaders: Any, mode: Any, *, rank: int = 0, world_size: int = 1, kind: Any = "train") -> Any:
    return ShardedCombination(CombinedLoader(loaders, mode), rank=rank, world_size=world_size, mode=kind)


class Drawing(IterableDataset[Any]):
    """Samples drawn from python's generator."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor(random.randrange(10**6)) for _ in range(self.count))


class Unsized(Sampler[int]):
    """Shuffles its samples, and has no length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.count).tolist())


class Counting(IterableDataset[Any]):
    """Numbers in order, without a length."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.first, self.first + self.count))


def evaluated(loaders: Any, mode: Any, rank: int, world_size: int) -> list[tuple[Any, bool]]:
    """Return an evaluation's batches on a rank, and whether they count."""
    share = combination(loaders, mode, rank=rank, world_size=world_size, kind="padded")
    share.set_epoch(1, 0)
    got = []
    for number, batch in enumerate(share):
        got.append((str(plain(batch)), share.real_length is None or number < share.real_length))
    return got


def unsized(first: int, count: int, size: int = 1) -> DataLoader[Any]:
    dataset = TensorDataset(torch.arange(first, first + count))
    return DataLoader(dataset, batch_sampler=BatchSampler(Unsized(count), size, False))


def test_the_modes_as_a_user_iterates_them() -> None:
    loaders = {"a": range(3), "b": [10, 11]}
    a, b, none = [0, 1, 2], [10, 11], None

    def items(mode: Any) -> list[Any]:
        combined = CombinedLoader(loaders, mode)
        got = list(combined)
        assert len(got) == len(combined)
        assert list(combined) == got
        return got

    assert items("min_size") == [({"a": 0, "b": 10}, 0, 0), ({"a": 1, "b": 11}, 1, 0)]
    assert items("max_size")[2] == ({"a": 2, "b": none}, 2, 0)
    assert items("max_size_cycle")[2] == ({"a": 2, "b": 10}, 2, 0)
    whole = [(each, number, index) for index, part in enumerate((a, b)) for number, each in enumerate(part)]
    assert items("sequential") == whole
    assert CombinedLoader(loaders).mode == "min_size"
    assert CombinedLoader(loaders).iterables is loaders
    assert CombinedLoader(loaders).flattened == [range(3), [10, 11]]
    endless = CombinedLoader([itertools.count(), [1, 2]], "min_size")
    assert [batch for batch, _, _ in endless] == [[0, 1], [1, 2]]
    with pytest.raises(TypeError, match="no len"):
        len(endless)
    with pytest.raises(RuntimeError, match="yielded no batches when it was restarted"):
        list(CombinedLoader([[1, 2], []], "max_size_cycle"))


def test_a_batch_has_the_structure_of_the_collection() -> None:
    a, b, c = (numbers(10 * index, 1) for index in range(3))
    structures: list[Any] = [
        [a, b], (a, b), {"x": a, "y": b}, Pair(a, b), OrderedDict(y=a, x=b), {"x": [a, (b,)], "y": c},
    ]  # fmt: skip
    for structure in structures:
        (batch,) = list(combination(structure, "min_size"))
        assert type(batch) is type(structure)
    assert plain(batch) == {"x": [[0], [10]], "y": [20]}
    assert isinstance(batch["x"][1], tuple)
    assert plain(list(combination(a, "max_size"))) == [0]


@pytest.mark.filterwarnings(NO_PROPORTION)
@some_or_every
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_from_any_batch_on_it_is_the_uninterrupted_stream(mode: Any, world_size: int, starts: Starts) -> None:
    collections: list[tuple[Any, bool]] = [
        ([numbers(0, 23, 2, shuffle=shuffle), numbers(100, 7, 1), numbers(200, 11, 4, shuffle=shuffle)], True)
        for shuffle in (False, True)
    ]
    collections += [([unsized(0, 13, 2), numbers(100, 5, 1, shuffle=True)], False)]
    if world_size == 1:
        batches = [torch.tensor([number]) for number in range(4)]
        collections += [({"a": DataLoader(Drawing(9)), "b": DataLoader(Drawing(4)), "c": batches}, False)]
    for (loaders, is_exact), kind in itertools.product(collections, ("train", "evaluate")):
        for rank in range(world_size):
            share = combination(loaders, mode, rank=rank, world_size=world_size, kind=kind)
            whole = read(share, epoch=2)
            assert whole
            assert share.exact_length == (len(whole) if is_exact else None)
            state = random.getstate()
            lengths = [part.length or 0 for part in share.parts]
            for start in starts(len(whole), *lengths, *itertools.accumulate(lengths)):
                assert read(share, epoch=2, start=start) == whole[start:], (mode, kind, rank, start)
            assert random.getstate() == state, "what is drawn to get there is drawn aside"
            assert read(share, epoch=2) == whole


def test_orders_of_loaders_differ_and_are_repeatable() -> None:
    """The first loader keeps its usual order. Loaders, passes and epochs differ, and all orders are repeatable."""
    loaders = [numbers(0, 30, shuffle=True), numbers(0, 10, shuffle=True), numbers(0, 30, shuffle=True)]
    alone = read(ShardedLoader(loaders[0], rank=0, world_size=1, mode="train"))
    share = combination(loaders, "max_size_cycle")
    first, cycled, third = zip(*read(share), strict=True)
    assert list(first) == alone != list(third)
    passes = [cycled[:10], cycled[10:20], cycled[20:]]
    assert [sorted(number for batch in each for number in batch) for each in passes] == [list(range(10))] * 3
    assert len(set(map(str, passes))) == 3
    second_epoch = read(share, epoch=1)
    assert [batch[1] for batch in second_epoch] != list(cycled)
    assert read(share, epoch=1) == second_epoch


@pytest.mark.filterwarnings("ignore:an? .* is an IterableDataset:UserWarning")
@pytest.mark.parametrize("kind", ["evaluate", "padded"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("mode", MODES)
def test_ranks_together_evaluate_what_one_process_does(mode: Any, world_size: int, kind: Any) -> None:
    for sizes in [(7, 3), (3, 8), (5, 5), (1, 2), (9, 1)]:
        loaders = [numbers(100 * index, size, shuffle=bool(index)) for index, size in enumerate(sizes)]
        alone = read(combination(loaders, mode, kind=kind))
        shares = [combination(loaders, mode, rank=rank, world_size=world_size, kind=kind) for rank in range(world_size)]
        parts = [read(share) for share in shares]
        assert [len(part) for part in parts] == [len(share) for share in shares]
        if kind == "padded":
            assert len(set(map(len, parts))) == 1
            real = [len(share) if share.real_length is None else share.real_length for share in shares]
            ghosts = [part[count:] for part, count in zip(parts, real, strict=True)]
            assert sum(map(len, ghosts)) < world_size
            parts = [part[:count] for part, count in zip(parts, real, strict=True)]
            unknown = [DataLoader(Counting(100 * index, size)) for index, size in enumerate(sizes)]
            told = [evaluated(unknown, mode, rank, world_size) for rank in range(world_size)]
            in_order = [numbers(100 * index, size) for index, size in enumerate(sizes)]
            known = [evaluated(in_order, mode, rank, world_size) for rank in range(world_size)]
            assert told == known, "without lengths it is the same"
        rounds = itertools.zip_longest(*parts)
        assert [batch for each in rounds for batch in each if batch is not None] == alone


def test_sequential_evaluation_is_loader_by_loader() -> None:
    loaders = {"clean": numbers(0, 5), "noisy": numbers(10, 3)}
    for given in (loaders, CombinedLoader(loaders, "sequential")):
        parts = [evaluation_loaders(given, rank=rank, world_size=2, mode="evaluate") for rank in range(2)]
        assert [name for name, _ in parts[0]] == ["clean", "noisy"]
        together = [
            sorted(number for part in parts for batch in read(part[index][1]) for number in batch) for index in (0, 1)
        ]
        assert together == [list(range(5)), [10, 11, 12]]
    (single,) = evaluation_loaders(loaders["clean"], rank=0, world_size=1, mode="evaluate")
    assert single[0] is None
    assert [name for name, _ in evaluation_loaders(list(loaders.values()), rank=0, world_size=1, mode="padded")] == [
        None
    ] * 2
    nested = {"a": [numbers(0, 1), numbers(0, 1)], "b": numbers(0, 1)}
    names = [name for name, _ in evaluation_loaders(nested, rank=0, world_size=1, mode="evaluate")]
    assert names == ["a/0", "a/1", "b"]
    ((name, together_loader),) = evaluation_loaders(
        CombinedLoader(loaders, "max_size"), rank=0, world_size=1, mode="evaluate"
    )
    assert name is None
    assert read(together_loader)[3] == {"clean": [3], "noisy": None}


def test_a_parted_round_is_refused_where_it_is_run() -> None:
    share = combination({"a": numbers(0, 5), "b": numbers(0, 8)}, "max_size", world_size=2, kind="padded")
    for limit in (0, 1, 2):
        share.refuse_parted_rounds(limit)  # only one rank has a batch of the third round
    for limit in (3, 4, None):
        with pytest.raises(ValueError, match=r"loader 'a' of a CombinedLoader.'max_size'. has 5 batches"):
            share.refuse_parted_rounds(limit)


@pytest.mark.filterwarnings(NO_PROPORTION)
@pytest.mark.parametrize("mode", MODES)
def test_training_rounds_are_alike_and_lose_nothing(mode: Any) -> None:
    """All samples of the longest loader are read, and every rank makes the same number of steps."""
    for (first, second), size in itertools.product([(21, 9), (8, 30), (10, 10)], (1, 4)):
        shares = [
            combination(
                [numbers(0, first, size, shuffle=True), numbers(100, second, size)], mode, rank=rank, world_size=3
            )
            for rank in range(3)
        ]
        parts = [read(share) for share in shares]
        assert {len(part) for part in parts} == {len(shares[0])}
        seen: set[int] = set()
        for batch in itertools.chain.from_iterable(parts):
            for numbers_of_one in batch:
                seen.update(numbers_of_one or [])
        if mode != "min_size":
            assert seen == {*range(first), *range(100, 100 + second)}


@pytest.mark.parametrize("mode", MODES)
def test_combined_loaders_are_cut_in_one_proportion_or_it_is_said(mode: Any) -> None:
    def parts(sizes: tuple[int, int], world_size: int) -> list[list[Any]]:
        loaders = {"a": numbers(0, sizes[0], 2), "b": numbers(100, sizes[1], 2)}
        shares = [combination(loaders, mode, rank=rank, world_size=world_size) for rank in range(world_size)]
        got = [read(share) for share in shares]
        last = len(got[0]) - 1
        return [[part[last], share.weight_at(last)] for part, share in zip(got, shares, strict=True)]

    whole = {"a": [4], "b": [104, 105, 106]}
    assert parts((5, 7), 2) == [[whole, 2.0], [whole, 0.0]], "no more in all than two full batches"
    assert parts((6, 8), 2) == [[{"a": [4], "b": [104, 105]}, 1.0], [{"a": [5], "b": [106, 107]}, 1.0]]
    assert in_proportion([3, 6], 2, [4, 4]) == [[2, 1], [4, 2]]
    with pytest.warns(UserWarning, match="one proportion: they have 2 and 1 of loader 'a', 2 and 2 of loader 'b'"):
        combination({"a": numbers(0, 7, 2), "b": numbers(100, 8, 2)}, mode, world_size=2).set_epoch(1, 0)
    unknown = {"a": unsized(0, 7, 2), "b": numbers(100, 8, 2)}
    with pytest.warns(UserWarning, match="they have 2 and 1 of loader 'a', equally many of loader 'b'"):
        read(combination(unknown, mode, world_size=2))


@pytest.mark.filterwarnings(NO_PROPORTION)
def test_a_round_weighs_what_its_loaders_agree_on() -> None:
    def weights(mode: Any, *loaders: Any) -> list[float]:
        shares = [combination(list(loaders), mode, rank=rank, world_size=2) for rank in range(2)]
        return [share.weight_at(len(read(share)) - 1) for share in shares]

    uneven = [3 * 2 / 5, 2 * 2 / 5]  # 13 samples: 4 + 4, then 3 + 2
    assert weights("max_size", numbers(0, 13, 4), numbers(0, 13, 4)) == uneven
    assert weights("min_size", numbers(0, 13, 4), numbers(0, 16, 4)) == [1.0, 1.0]
    assert weights("max_size", numbers(0, 13, 4), numbers(0, 8, 4)) == uneven, "the other is exhausted"
    assert weights("max_size_cycle", numbers(0, 13, 4), numbers(0, 6, 4)) == [1.0, 1.0]
    assert weights("max_size_cycle", numbers(0, 13, 4), numbers(0, 5, 4)) == uneven, "its second pass ends as unevenly"


class Augmented(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> float:
        return index + random.random()


def test_workers_draw_anew_in_each_pass_and_alike_after_a_resume() -> None:
    loaders = [DataLoader(Augmented(9), num_workers=1), DataLoader(Augmented(3), num_workers=2)]
    share = combination(loaders, "max_size_cycle")
    assert share.may_read_ahead
    whole = read(share)
    assert len({str(batch[1]) for batch in whole}) == 9, "every pass draws differently"
    assert [int(batch[1][0]) for batch in whole] == [0, 1, 2] * 3
    assert read(share, start=4) == whole[4:]
    assert not combination([loaders[0], numbers(0, 3)], "min_size").may_read_ahead


def test_endless_loaders_are_combined() -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(itertools.count())

    loaders = [DataLoader(Endless()), numbers(0, 3)]
    assert [batch[0][0] for batch in read(combination(loaders, "min_size"))] == [0, 1, 2]
    share = combination(loaders, "max_size_cycle")
    assert share.length is None
    share.set_epoch(1, 0, 5)
    pairs = list(with_last(share, 5, None, most=8))
    assert [(plain(batch), is_last) for batch, is_last in pairs] == [
        ([[5], [2]], False),
        ([[6], [0]], False),
        ([[7], [1]], True),
    ]


def test_with_last_knows_the_end_of_a_combination() -> None:
    share = combination([numbers(0, 5), numbers(0, 3)], "max_size")
    share.set_epoch(1, 0, 2)
    assert [is_last for _, is_last in with_last(share, 2, share.exact_length)] == [False, False, True]
    share = combination([unsized(0, 5), numbers(0, 3)], "max_size_cycle")
    share.set_epoch(1, 0, 2)
    assert [is_last for _, is_last in with_last(share, 2, None)] == [False, False, True]


def test_several_loaders_are_told_from_one() -> None:
    loader = numbers(0, 4)

    def kind(given: Any) -> Any:
        share = shard(given, rank=0, world_size=1, mode="train")
        return share.combination if isinstance(share, ShardedCombination) else "one"

    assert kind(loader) == "one"
    assert kind([torch.zeros(2), torch.zeros(2)]) == "one"
    assert kind([(torch.zeros(2), 1), (torch.zeros(2), 2)]) == "one"
    assert kind([{"x": torch.zeros(2)}]) == "one"
    assert kind([loader, [torch.zeros(2)]]) == kind({"a": [torch.zeros(2)], "b": loader}) == "max_size_cycle"
    assert kind([{"a": loader}]) == "max_size_cycle"
    assert kind(CombinedLoader([loader, loader])) == "min_size"


def test_what_cannot_be_combined_is_refused() -> None:
    with pytest.raises(ValueError, match="mode='longest' is unknown; choose from min_size, max_size"):
        CombinedLoader([[1]], "longest")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got an empty dict"):
        CombinedLoader({})
    for wrong in (3, "text", torch.zeros(2)):
        with pytest.raises(TypeError, match=f"the collection's 'b' is an? {type(wrong).__name__}"):
            CombinedLoader({"a": [1], "b": wrong})
    with pytest.raises(TypeError, match="cannot be combined again"):
        shard([CombinedLoader([[1]])], rank=0, world_size=1, mode="train")
    with pytest.raises(TypeError, match="can be read only once"):
        combination({"a": iter([1])}, "max_size_cycle")
    with pytest.raises(ValueError, match="max_size_cycle cannot restart it"):
        combination([numbers(0, 3), numbers(0, 0)], "max_size_cycle")
    with pytest.raises(RuntimeError, match="an empty loader cannot be cycled"):
        read(combination([numbers(0, 3), DataLoader(Drawing(0))], "max_size_cycle"))
    with pytest.raises(ValueError, match=r"sequential'. is for validation, test and predict.*ConcatDataset"):
        combination([numbers(0, 3), numbers(0, 3)], "sequential")
    with pytest.raises(TypeError, match="has no length"):
        len(combination([numbers(0, 3), unsized(0, 3)], "min_size"))
