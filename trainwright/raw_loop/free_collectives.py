"""Free collectives: the Accelerator's collectives as functions, for code of a job that has no Accelerator to call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from trainwright.arguments import refuses_unknown
from trainwright.devices import accelerator
from trainwright.distributed import collectives
from trainwright.distributed.connection import open_connection
from trainwright.distributed.environment import Environment
from trainwright.distributed.ranks import Ranks
from trainwright.engine import gathering
from trainwright.raw_loop.dataloaders import synchronize
from trainwright.raw_loop.job_states import PartialState


def gather(tensor: Any) -> Any:
    """Return a nested structure with the values of all ranks, rank by rank. Collective: call on every rank.

    Args:
        tensor: tensors, lists of plain data, numbers and texts, or a nest of them. Tensors of shape (n, ...) are joined along
            their first dimension, and one without dimensions becomes a row; lists are joined, and a number or a text becomes a
            list with one item per rank.

    Raises:
        TypeError: the structure holds something else; on every rank, if the tensors have different dtypes.
        ValueError: on every rank, if shapes differ beyond the first dimension: `pad_across_processes` makes them equal.

    >>> accelerator = tw.Accelerator(devices=2)
    >>> tw.gather(torch.tensor([accelerator.process_index])).tolist()
    [0, 1]
    """
    ranks = _ranks()

    def join(each: torch.Tensor, structure: int) -> torch.Tensor:
        return gathering.join(each, None, structure)

    return gathering.gather(tensor, join, None, lambda value: ranks.exchange(value, "gather"))


# "mean" is the default of Accelerate's function, "sum" that of its method.
@refuses_unknown
def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Return the mean, sum, min or max over the ranks. Collective: call on every rank.

    Args:
        tensor: tensors, numbers, or a nest of them; each tensor has the same shape on every rank, and is reduced elementwise.
        reduction: "mean", "sum", "min" or "max".
        scale: a factor of the results.

    Raises:
        TypeError: the structure holds something else.
        ValueError: the reduction is unknown; or, on every rank, shapes differ.

    >>> accelerator = tw.Accelerator(devices=2)
    >>> tw.reduce({"loss": 1.0 + accelerator.process_index}, "mean")
    {'loss': 1.5}
    """
    ranks = _ranks()
    results = gathering.reduce(
        tensor,
        reduction,
        lambda each: collectives.all_reduce(each, reduction),
        lambda value: ranks.exchange(value, "reduce"),
    )
    return gathering.scaled(results, scale)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Return one process's plain data and tensors on every process. Collective: call on every rank.

    Args:
        tensor: plain data, tensors, or a nest of them; on other ranks than `from_process` it is ignored.
        from_process: the rank whose data is returned.

    Raises:
        TypeError: on every rank, if it is more than plain data and tensors.

    >>> accelerator = tw.Accelerator(devices=2)
    >>> tw.broadcast({"folder": f"run-{accelerator.process_index}"})
    {'folder': 'run-0'}
    """
    return gathering.broadcast(tensor, from_process, _ranks(), accelerator.current() or torch.device("cpu"))


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Return tensors as long in a dimension as the longest of all ranks. Collective: call on every rank.

    Args:
        tensor: a tensor, or a nest of them; one without the dimension is unchanged.
        dim: the dimension to pad.
        pad_index: the value to pad with.
        pad_first: pad at the beginning instead of the end.

    Raises:
        TypeError: the structure holds something else than tensors.
        ValueError: on every rank, if a tensor has more dimensions on some rank.

    >>> accelerator = tw.Accelerator(devices=2)
    >>> tokens = torch.ones(1, 3 + accelerator.process_index)
    >>> tw.gather(tw.pad_across_processes(tokens, dim=1)).tolist()
    [[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
    """
    # It joins the job, if nothing has yet.
    _ranks()
    return gathering.pad(tensor, dim, pad_index, pad_first)


def synchronize_rng_states(rng_types: Iterable[Any], generator: torch.Generator | None = None) -> None:
    """Set this process's generators to the state that they have on rank 0. Collective: call on every rank.

    Args:
        rng_types: "torch", "generator", or the kind of accelerator in use, such as "cuda".
        generator: the generator that "generator" means.

    Raises:
        TypeError: not a list.
        ValueError: another name, or "generator" without one.

    >>> accelerator = tw.Accelerator(devices=2)
    >>> tw.synchronize_rng_states(["torch"])
    >>> first, second = tw.gather(torch.rand(1))
    >>> bool(first == second)
    True
    """
    synchronize(rng_types, generator, broadcast)


def _ranks() -> Ranks:
    """Return the ranks of this process's job, which is joined if that has not happened."""
    connection = open_connection()
    if connection is None and Environment.detect().world_size > 1:
        PartialState()
        connection = open_connection()
    return Ranks(None if connection is None else connection.channel)
