"""Collectives: what the processes of a raw loop give each other: values gathered, reduced, padded and broadcast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from trainwright.arguments import refuses_unknown
from trainwright.distributed.collectives import count_issued
from trainwright.engine import gathering
from trainwright.engine.engine import Engine
from trainwright.raw_loop.dataloaders import SkippedBatches, skip_first_batches
from trainwright.raw_loop.job_states import Processes


class Collectives(Processes):
    """What the processes of an Engine's job give each other. Every method is collective: call it on every rank."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        engine.ranks.locate_by(_position)
        self._is_triggered = False

    def gather(self, tensor: Any) -> Any:
        """Return a nested structure with the values of all ranks, rank by rank. Collective: call on every rank.

        Tensors are joined along their first dimension, which may differ; a tensor without dimensions becomes a
        row. Lists of plain data, and tuples of numbers and texts, are joined item by item. A number or a text becomes a list
        with one item per rank. None stays None.

        Raises:
            TypeError: the structure holds something else; on every rank, if the tensors have different dtypes.
            ValueError: on every rank, if shapes differ beyond the first dimension: `pad_across_processes` makes them equal.
        """
        return gathering.gather(tensor, partial(_join, None), None, self._exchange)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False, *, loader: Any = None) -> Any:
        """Gather the results for a batch, without those of ranks that had no sample left in the last round.

        So each sample of the loader is there once. Collective: call on every rank, for each batch, before the next one.

        Args:
            input_data: see `gather`.
            use_gather_object: return a list with the items of all ranks' lists, rank by rank, and join no tensors: for plain
                data, and tensors whose shapes differ. Something that is not a list counts as one item.
            loader: the prepared loader that the batch is from, where a loop reads several at once; by default the first.

        Raises:
            TypeError, ValueError: see `gather`.
        """
        keep = self._ranks_with_samples(loader)
        if use_gather_object:
            return gathering.gather_objects(input_data, keep, self.device)
        return gathering.gather(input_data, partial(_join, keep), keep, self._exchange)

    @refuses_unknown
    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return a nested structure with the sum, mean, min or max over the ranks of each number and each tensor element.

        Collective: call on every rank.

        Args:
            scale: a factor of the results.

        Raises:
            TypeError: the structure holds something else.
            ValueError: the reduction is unknown; or, on every rank, shapes differ.
        """
        results = gathering.reduce(tensor, reduction, lambda each: self.engine.reduce(each, reduction), self._exchange)
        return gathering.scaled(results, scale)

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
        return gathering.pad(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Let the next `check_trigger` return True on every rank; this call communicates nothing."""
        self._is_triggered = True

    def check_trigger(self) -> bool:
        """Return whether a rank has called `set_trigger` since the last check. Collective: call on every rank."""
        found = self.engine.reduce(torch.tensor(int(self._is_triggered), device=self.device), "max")
        self._is_triggered = False
        # NOTE: waits for the device.
        return bool(found.item())

    @contextmanager
    def join_uneven_inputs(self, joinables: Iterable[nn.Module], even_batches: bool | None = None) -> Iterator[None]:
        """Return a context that does nothing: prepared loaders give every rank equally many batches.

        In the last round a rank without a sample works on another rank's, with weight zero in `backward`, so no rank waits
        for one that has ended, under every strategy and with either value of `even_batches`.
        """
        # A Sequential would pass for a list of models.
        if isinstance(joinables, nn.Module) or not all(isinstance(each, nn.Module) for each in joinables):
            raise TypeError("join_uneven_inputs takes a list of models, such as [model].")
        yield

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> SkippedBatches:
        """Return a loader whose first iteration begins at this batch of the epoch; see the function of this name."""
        return skip_first_batches(dataloader, num_batches)

    def _ranks_with_samples(self, loader: Any) -> Sequence[bool] | None:
        """Return whether each rank has new samples in a loader's current batch; None if all have."""
        return None

    def _exchange(self, value: Any) -> list[Any]:
        return self.engine.ranks.exchange(value, "gather or reduce of plain data")


def _position() -> tuple[tuple[int, ...], str]:
    """Return how far this rank's loop is: a rank that has made more collectives has left out a call that others wait in."""
    return (count_issued(in_all=True) or 0,), ""


def _join(keep: Sequence[bool] | None, tensor: torch.Tensor, structure: int) -> torch.Tensor:
    return gathering.join(tensor, keep, structure)
