"""Prepared loaders under every option: every sample is gathered once, and a pass resumes exactly, on one rank to four.

One job per number of ranks makes all examples: rank 0 draws them and sends them to the others.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from jobs import run_job
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

import trainwright as tw

EXAMPLES = {1: 60, 2: 15, 3: 60, 4: 60}
"""By number of ranks. The job in the fast set has few examples."""
CASES = st.fixed_dictionaries(
    {
        "samples": st.integers(0, 41),
        "batch_size": st.integers(1, 5),
        "drop_last": st.booleans(),
        "split_batches": st.booleans(),
        "even_batches": st.booleans(),
        "kind": st.sampled_from(["indices", "shuffled", "own batches", "iterable", "once"]),
        "stop": st.integers(1, 4),
        "inner": st.integers(0, 7),
    }
)
Case = dict[str, Any]


class Stream(IterableDataset[int]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.samples))


class Once(IterableDataset[int]):
    """Can be read once."""

    def __init__(self, samples: int) -> None:
        self.numbers = iter(range(samples))

    def __iter__(self) -> Iterator[int]:
        return self.numbers


class Numbers(Dataset[int]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


def test_skipped_batches_have_the_length_of_their_iteration() -> None:
    accelerator = tw.Accelerator(cpu=True, devices=1)
    plain = DataLoader(Numbers(10), batch_size=2)
    for loader in (plain, accelerator.prepare(plain), accelerator.skip_first_batches(plain, 0)):
        skipped = accelerator.skip_first_batches(loader, 2)
        assert [len(skipped) for _ in skipped] == [3, 3, 3]
        assert [len(skipped) for _ in skipped] == [5, 5, 5, 5, 5]
        left = accelerator.skip_first_batches(loader, 2)
        for _ in left:
            break
        assert len(left) == len(list(left)) == 5


class Lengths(BatchSampler):
    """Batches of one sample, of two and of three, in turn, from a user's batch sampler."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[list[int]]:
        numbers, sizes = iter(range(self.samples)), itertools.cycle([1, 2, 3])
        while batch := list(itertools.islice(numbers, next(sizes))):
            yield batch

    def __len__(self) -> int:
        return len(list(iter(self)))


def made(case: Case, size: int) -> DataLoader[int]:
    samples, options = case["samples"], {"batch_size": size, "drop_last": case["drop_last"]}
    if case["kind"] == "own batches":
        return DataLoader(Numbers(samples), batch_sampler=Lengths(samples))
    if case["kind"] in ("iterable", "once"):
        return DataLoader(Stream(samples) if case["kind"] == "iterable" else Once(samples), **options)
    return DataLoader(Numbers(samples), shuffle=case["kind"] == "shuffled" and samples > 0, **options)


@cache
def accelerator_of(split: bool, even: bool) -> tw.Accelerator:
    config = tw.DataLoaderConfiguration(split, even_batches=even, data_seed=5)
    return tw.Accelerator(cpu=True, dataloader_config=config)


def is_possible(case: Case, ranks: int) -> bool:
    if case["kind"] == "once" and ranks > 1:
        return False
    return not (case["kind"] == "own batches" and case["split_batches"] and ranks > 1)


def gathered(accelerator: tw.Accelerator, batch: torch.Tensor, case: Case) -> list[int]:
    """Return the samples of a round, after a check that everything else that is gathered agrees with them."""
    own = batch.tolist()
    results = accelerator.gather_for_metrics(
        {"ids": batch, "nested": (batch * 2, [batch.float().unsqueeze(1)]), "count": torch.tensor(len(own))}
    )
    ids: list[int] = results["ids"].tolist()
    assert results["nested"][0].tolist() == [2 * each for each in ids]
    assert results["nested"][1][0].squeeze(1).tolist() == ids
    assert results["count"].sum().item() == len(ids)
    objects = accelerator.gather_for_metrics([{"id": each} for each in own], use_gather_object=True)
    assert objects == [{"id": each} for each in ids]
    ragged = accelerator.gather_for_metrics([torch.full((each % 3,), each) for each in own], use_gather_object=True)
    assert [each.tolist() for each in ragged] == [[each] * (each % 3) for each in ids]
    assert accelerator.gather_for_metrics([str(each) for each in own]) == [str(each) for each in ids]
    return ids


def expected(case: Case, ranks: int, size: int) -> int:
    """Return how many samples an epoch has."""
    samples: int = case["samples"]
    if not case["drop_last"] or case["kind"] == "own batches":
        return samples
    whole = size if case["split_batches"] else size * ranks
    return samples // whole * whole


def run(case: Case) -> Case:
    """Make one example on this rank. Return the state for a resume at another world size."""
    accelerator = accelerator_of(case["split_batches"], case["even_batches"])
    ranks = accelerator.num_processes
    size = case["batch_size"] * (ranks if case["split_batches"] else 1)
    batches = case["samples"] // case["batch_size"]
    if case["kind"] in ("indices", "shuffled") and case["drop_last"] and 0 < batches < ranks:
        with pytest.raises(ValueError, match="drop_last drops a short round"):
            accelerator.prepare(made(case, size))
        return {"done": None}
    loader = accelerator.prepare(made(case, size))
    inner = accelerator.prepare(DataLoader(Numbers(case["inner"]), batch_size=2 * ranks)) if case["inner"] else None
    seen: list[int] = []
    own: list[list[int]] = []
    state, done = None, 0
    for number, batch in enumerate(loader, start=1):
        own.append(batch.tolist())
        if inner is not None and number == 2:  # a validation within the epoch
            found = [each for one in inner for each in gathered(accelerator, one, case)]
            assert sorted(found) == list(range(case["inner"]))
        seen += gathered(accelerator, batch, case)
        if number == case["stop"]:
            state, done = loader.state_dict(), len(seen)
    in_order = case["kind"] != "shuffled"
    assert (seen if in_order else sorted(seen)) == (list(range(len(seen))) if in_order else sorted({*seen})), seen
    assert len(seen) == expected(case, ranks, size), seen
    if case["kind"] == "once" or state is None or state["epoch"]:  # the last one is the next epoch's start
        return {"done": None}
    again = accelerator.prepare(made(case, size))
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == own[case["stop"] :]
    for _ in range(2):
        skipped = accelerator.skip_first_batches(accelerator.prepare(made(case, size)), case["stop"])
        assert [batch.tolist() for batch in skipped] == own[case["stop"] :]
        assert [len(batch) for batch in skipped] == list(map(len, own))
    rest = sorted(seen[done:]) if not case["drop_last"] else None
    return {"done": sorted(seen[:done]), "rest": rest, "state": {**state, "sources": []}, "size": size}


def run_examples(folder: Path) -> list[tuple[Case, Case]]:
    """Make all examples of one world size. Return them with the states for a resume at another."""
    ranks = accelerator_of(False, True).engine.ranks
    made_here: list[tuple[Case, Case]] = []

    def attempt(case: Case) -> None:
        outcome, reason = {}, ""
        try:
            outcome = run(case)
        except Exception as error:
            reason = "".join(traceback.format_exception(error)[-2:])
            if ranks.world_size == 1:
                raise
        reasons = ranks.exchange(reason, "the outcome")
        assert not any(reasons), (case, reasons)
        made_here.append((case, outcome))

    @hypothesis.settings(
        max_examples=EXAMPLES[ranks.world_size],
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )
    @hypothesis.given(CASES)
    def check(case: Case) -> None:
        hypothesis.assume(is_possible(case, ranks.world_size))
        ranks.broadcast(case, "the next example")
        attempt(case)

    if ranks.rank == 0:
        try:
            check()
        finally:
            ranks.broadcast(None, "the next example")
    else:
        while (case := ranks.broadcast(None, "the next example")) is not None:
            try:
                attempt(case)
            except AssertionError:
                continue  # rank 0 reports it, after it has looked for a smaller one
    return made_here


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 3))])
def test_each_sample_is_gathered_once(ranks: int, tmp_path: Path) -> None:
    results = run_examples(tmp_path) if ranks == 1 else run_job(run_examples, ranks, tmp_path)[0]
    assert any(outcome["done"] is not None for _, outcome in results)
    for case, outcome in results if ranks > 1 else ():
        if outcome["done"] is None or outcome["rest"] is None:
            continue
        # One process resumes the passes of several.
        accelerator = accelerator_of(False, True)
        loader = accelerator.prepare(made(case, case["batch_size"]))
        loader.load_state_dict(outcome["state"])
        rest = sorted(each for batch in loader for each in batch.tolist())
        assert rest == outcome["rest"], case
