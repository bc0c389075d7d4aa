"""The collectives, in one process and on two gloo ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from jobs import run_job

from trainwright.distributed import collectives
from trainwright.distributed.connection import open_process_group
from trainwright.distributed.environment import Environment


def job(folder: Path) -> int:
    """Make all checks that need two ranks. All assertions run on both."""
    environment = Environment.detect()
    open_process_group(environment, "gloo")
    rank = environment.rank

    own = torch.arange(4).reshape(2, 2).t() + rank
    assert torch.equal(torch.stack(collectives.all_gather(own)), torch.stack([own - rank, own - rank + 1]))
    flags = collectives.all_gather(torch.tensor([rank == 0, True]))
    assert [flag.tolist() for flag in flags] == [[True, True], [False, True]]

    sizes = (3, 0)
    parts = collectives.gather_uneven(torch.full((sizes[rank], 2), float(rank)))
    assert [tuple(part.shape) for part in parts] == [(3, 2), (0, 2)]
    parts = collectives.gather_uneven(torch.arange(rank + 1))
    assert [part.tolist() for part in parts] == [[0], [0, 1]]
    assert collectives.gather_uneven(torch.zeros(0, 5))[1].shape == (0, 5)
    with pytest.raises(ValueError, match=r"differ beyond the first dimension .rank 0: .1, 2., rank 1: .1, 3.."):
        collectives.gather_uneven(torch.zeros(1, 2 + rank))
    with pytest.raises(TypeError, match=r"a different dtype on rank.s. .1."):
        collectives.gather_uneven(torch.zeros(1, dtype=(torch.float32, torch.float64)[rank]))

    sent = {"rank": rank, "text": "x" * (10 * rank), "loss": float("nan"), "none": [None, True]}
    objects = collectives.gather_object(sent)
    assert [entry["rank"] for entry in objects] == [0, 1]
    assert [len(entry["text"]) for entry in objects] == [0, 10]

    value = torch.tensor([1.0, 4.0]) * (1 + rank)
    for op, expected in {"sum": [3.0, 12.0], "mean": [1.5, 6.0], "min": [1.0, 4.0], "max": [2.0, 8.0]}.items():
        assert collectives.all_reduce(value, op).tolist() == expected
    assert value.tolist() == [1.0 + rank, 4.0 + 4 * rank]
    assert collectives.broadcast(torch.tensor([rank]), source=1).tolist() == [1]
    with pytest.raises(ValueError, match="source=2 is not a rank; choose from 0 to 1"):
        collectives.broadcast(value, source=2)
    return rank


def test_collectives_are_correct_on_two_ranks(tmp_path: Path) -> None:
    assert run_job(job, 2, tmp_path) == [0, 1]


def test_one_process_is_the_identity() -> None:
    tensor = torch.tensor([1.0, 2.0])
    assert collectives.all_gather(tensor)[0] is tensor
    assert collectives.gather_uneven(tensor)[0] is tensor
    for result in (collectives.all_reduce(tensor, "mean"), collectives.broadcast(tensor)):
        assert torch.equal(result, tensor)
        assert result is not tensor
    assert collectives.gather_object({"a": [1, None]}) == [{"a": [1, None]}]


def test_bad_arguments_are_refused_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match="op='product' is unknown; choose from sum, mean, min, max"):
        collectives.all_reduce(torch.ones(1), "product")
    with pytest.raises(TypeError, match=r"op='mean' got a torch.int64 tensor"):
        collectives.all_reduce(torch.ones(1, dtype=torch.int64), "mean")
    with pytest.raises(ValueError, match="tensor of 0 dimensions"):
        collectives.gather_uneven(torch.tensor(1.0))


def test_plain_numbers_survive() -> None:
    (result,) = collectives.gather_object([math.inf, -0.0, 2**70, True])
    assert result == [math.inf, -0.0, 2**70, True]
