"""Gathering: the collectives of a raw loop's processes, as methods and as functions.

The functions are for code of a job that has no Accelerator to call. `engine/nests.py` does the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainwright.arguments import refuses_unknown
from trainwright.devices import hardware
from trainwright.distributed.collectives import all_reduce
from trainwright.distributed.connection import open_connection
from trainwright.distributed.environment import Environment
from trainwright.distributed.ranks import Ranks
from trainwright.distributed.vendor import count_issued
from trainwright.engine import nests
from trainwright.engine.engine import Engine
from trainwright.raw_loop.dataloaders import SkippedBatches, skip_first_batches, synchronize
from trainwright.raw_loop.job_states import PartialState, Processes


class Collectives(Processes):
    """The collectives of an Engine's job. Call its methods on every rank."""

    def __init__(self, engine: Engine, folder: str | None) -> None:
        super().__init__(engine)
        engine.hangs.locate_by(_position, folder)
        self._is_triggered = False

    def gather(self, tensor: Any) -> Any:
        """Return a tensor, or a nest of them, with the rows of all ranks, rank by rank. Collective: call on every rank.

        Tensors are joined along their first dimension, which may differ. A tensor without dimensions becomes a row.

        Raises:
            TypeError: the structure contains something else. On every rank, if the tensors have different dtypes.
            ValueError: on every rank, if shapes differ beyond the first dimension: `pad_across_processes` makes them equal.
        """
        self.engine.use()
        return nests.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False, *, loader: Any = None) -> Any:
        """Gather the results for a batch, except from ranks without samples in the last round.

        So every sample of the loader occurs once. Collective: call on every rank, for every batch, before the next one.

        Args:
            input_data: tensors as for `gather`, or any plain data.
            use_gather_object: return a list with the items of all ranks' lists, rank by rank, and join no tensors, as always
                if there is more than tensors. Something that is not a list counts as one item.
            loader: the prepared loader that the batch is from, where a loop reads several at once, by default the first.

        Raises:
            TypeError, ValueError: see `gather`.
        """
        self.engine.use()
        keep = self._ranks_with_samples(loader)
        if use_gather_object or not all(isinstance(leaf, torch.Tensor) for leaf in nests.leaves_of(input_data)):
            return nests.gather_objects(input_data, keep, self.device)
        return nests.gather(input_data, keep)

    @refuses_unknown
    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return a nested structure with the sum, mean, min or max over the ranks, of numbers and tensor elements.

        Collective: call on every rank.

        Args:
            scale: a factor of the results.

        Raises:
            TypeError: the structure holds something else.
            ValueError: the reduction is unknown, or on every rank shapes differ.
        """
        self.engine.use()
        return nests.reduce(tensor, reduction, self.engine.ranks, scale)

    def broadcast(self, obj: Any, from_process: int = 0) -> Any:
        """Return one process's plain data and tensors on every process. Collective: call on every rank."""
        return self.engine.broadcast(obj, from_process)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Return a nested structure whose tensors are as long in a dimension as the longest of all ranks.

        A tensor without that dimension is unchanged. Collective: call on every rank.

        Args:
            dim: the dimension to pad.
            pad_index: the value to pad with.
            pad_first: pad at the beginning instead of the end.

        Raises:
            TypeError: the structure holds something else than tensors.
            ValueError: on every rank, if a tensor has more dimensions on some rank.
        """
        self.engine.use()
        return nests.pad(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Let the next `check_trigger` return True on every rank. This call communicates nothing."""
        self._is_triggered = True

    def check_trigger(self) -> bool:
        """Return whether a rank has called `set_trigger` since the last check. Collective: call on every rank."""
        found = all_reduce(torch.tensor(int(self._is_triggered), device=self.device), "max", with_all=True)
        self._is_triggered = False
        # NOTE: waits for the device.
        return bool(found.item())

    @contextmanager
    def join_uneven_inputs(self, joinables: Iterable[nn.Module], even_batches: bool | None = None) -> Iterator[None]:
        """Return a context that does nothing: prepared loaders give every rank equally many batches.

        In the last round a rank without a sample works on another rank's, with weight zero in `backward`. So no rank waits for
        one that has ended. This holds under every strategy and with either value of `even_batches`.
        """
        # A Sequential would pass for a list of models.
        if isinstance(joinables, nn.Module) or not all(isinstance(each, nn.Module) for each in joinables):
            raise TypeError("join_uneven_inputs takes a list of models, such as [model].")
        yield

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> SkippedBatches:
        """Return a loader whose first iteration begins at this batch of the epoch. See the function of this name."""
        return skip_first_batches(dataloader, num_batches)

    def _ranks_with_samples(self, loader: Any) -> Sequence[bool] | None:
        """Return by rank whether it has new samples in a loader's current batch, or None if all have."""
        return None


def _position() -> tuple[tuple[int, ...], str]:
    """Return how far this rank's loop is: a rank that has made more collectives has skipped a call that others wait in."""
    return (count_issued(in_all=True) or 0,), ""


def gather(tensor: Any) -> Any:
    """Return a tensor, or a nest of them, with the rows of all ranks, rank by rank. Collective: call on every rank.

    Args:
        tensor: tensors of shape (n, ...), which are joined along their first dimension. One without dimensions becomes a row.

    Raises:
        TypeError: the structure contains something else. On every rank, if the tensors have different dtypes.
        ValueError: on every rank, if shapes differ beyond the first dimension: `pad_across_processes` makes them equal.

    >>> accelerator = tw.Accelerator(devices=2)
    >>> tw.gather(torch.tensor([accelerator.process_index])).tolist()
    [0, 1]
    """
    _ranks()  # joins the job, if nothing has yet
    return nests.gather(tensor)


# "mean" is the default of Accelerate's function, and "sum" of its method.
@refuses_unknown
def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Return the mean, sum, min or max over the ranks. Collective: call on every rank.

    Args:
        tensor: tensors, numbers, or a nest of them. A tensor has the same shape on every rank, and is reduced elementwise.
        reduction: "mean", "sum", "min" or "max".
        scale: a factor of the results.

    Raises:
        TypeError: the structure holds something else.
        ValueError: the reduction is unknown, or on every rank shapes differ.

    >>> accelerator = tw.Accelerator(devices=2)
    >>> tw.reduce({"loss": 1.0 + accelerator.process_index}, "mean")
    {'loss': 1.5}
    """
    return nests.reduce(tensor, reduction, _ranks(), scale)


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
    return nests.broadcast(tensor, from_process, _ranks(), hardware.current() or torch.device("cpu"))


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
    return nests.pad(tensor, dim, pad_index, pad_first)


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
