"""Length buckets: a batch sampler that puts samples of similar length into a batch, so that little of it is padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import index

import torch
from torch import Tensor
from torch.utils.data import Sampler

from trainwright.data.seeding import derive_seed
from trainwright.errors import a_type_of


class LengthBucketSampler(Sampler[list[int]]):
    """A batch sampler whose batches contain samples of similar length, in an order that (seed, epoch) determines.

    In every epoch it shuffles the samples, cuts them into chunks, sorts a chunk by length, cuts it into batches, and shuffles
    these. The batch with the most tokens comes first, so that too little memory shows in the first step, and a short one last.

    The Trainer and the Accelerator divide the batches over the ranks, call `set_epoch`, and resume within an epoch. With
    `max_tokens` the number of batches differs a little between epochs, and the mean over ranks weights all batches equally.

    Args:
        lengths: the number of tokens of every sample, in the order of the dataset.
        batch_size: the number of samples in a batch. Pass this or `max_tokens`.
        max_tokens: the most tokens in a batch with its padding: its longest length times its number of samples.
        seed: the seed of the order, the same on every rank.
        drop_last: drop random samples that fill no batch, and on several ranks a last round without a batch for every rank.
        bucket_batches: the number of batches in a chunk, limited to a quarter of an epoch (or to 2 if that is less). A larger
            number means less padding, and batches that differ less between epochs.

    Raises:
        TypeError: a length or another number is not an integer.
        ValueError: both or none of `batch_size` and `max_tokens` are passed, a number is too small, or a sample too long.

    >>> sampler = tw.LengthBucketSampler([3, 90, 5, 80, 4, 85], batch_size=3)
    >>> sorted(sorted(batch) for batch in sampler)
    [[0, 2, 4], [1, 3, 5]]
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int | None = None,
        max_tokens: int | None = None,
        *,
        seed: int = 0,
        drop_last: bool = False,
        bucket_batches: int = 50,
    ) -> None:
        self.lengths = integer_lengths(lengths)
        if (batch_size is None) == (max_tokens is None):
            raise ValueError(f"batch_size={batch_size} and max_tokens={max_tokens}: pass exactly one of them.")
        check_integer("bucket_batches", bucket_batches)
        check_integer("seed", seed, least=0)
        size = check_integer("batch_size", 1 if batch_size is None else batch_size)
        if max_tokens is not None:
            longest = int(self.lengths.argmax())
            if self.lengths[longest] > check_integer("max_tokens", max_tokens):
                raise ValueError(
                    f"sample {longest} has {self.lengths[longest]} tokens, more than max_tokens={max_tokens}. Pass a larger "
                    "max_tokens, or truncate or drop longer samples."
                )
            size = max(1, max_tokens * len(self.lengths) // max(1, int(self.lengths.sum())))
        self.batch_size, self.max_tokens, self.seed, self.drop_last = batch_size, max_tokens, seed, drop_last
        self._chunk = size * min(bucket_batches, max(2, len(self.lengths) // (4 * size)))  # samples to sort together
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration, and the length and the share of padding with it."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        order = torch.randperm(len(self.lengths), generator=generator)
        if self.drop_last and self.batch_size is not None:
            order = order[: len(order) // self.batch_size * self.batch_size]
        chunk = torch.arange(len(order)) // self._chunk
        self._order = order[torch.argsort(chunk * (int(self.lengths.max()) + 1) - self.lengths[order], stable=True)]
        self._batches = self._cut(self.lengths[self._order].tolist(), generator)
        """The start and end of every batch in the order. A batch begins with its longest sample."""

    def _cut(self, lengths: list[int], generator: torch.Generator) -> list[tuple[int, int]]:
        """Return the start and end of every batch in random order, the largest first and a short one last."""
        batches, end = [], 0
        while end < len(lengths):
            start, chunk_end = end, (end // self._chunk + 1) * self._chunk
            end = min(
                start + (self.batch_size or (self.max_tokens or 0) // max(1, lengths[start])), chunk_end, len(lengths)
            )
            batches.append((start, end))
        last = [batches.pop()] if self.batch_size is not None and len(lengths) % self.batch_size else []
        batches = [batches[number] for number in torch.randperm(len(batches), generator=generator).tolist()]
        tokens = [lengths[start] * (end - start) for start, end in batches]
        if tokens:
            batches.insert(0, batches.pop(tokens.index(max(tokens))))
        return batches + last

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order
        return (order[start:end].tolist() for start, end in self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def padding_share(self) -> float:
        """Return the share of padding in the current epoch, from 0 to 1. A Trainer logs it when an epoch ends."""
        lengths = self.lengths[self._order]
        return 1 - int(lengths.sum()) / max(1, sum(int(lengths[start]) * (end - start) for start, end in self._batches))

    def check_dataset(self, dataset: object) -> None:
        """Raise ValueError if the dataset has another number of samples than `lengths`."""
        if hasattr(dataset, "__len__") and (count := len(dataset)) != len(self.lengths):
            text = f"LengthBucketSampler has {len(self.lengths)} lengths, but the loader's dataset has {count} samples."
            raise ValueError(f"{text} Pass the length of every sample of this dataset, in its order.")


def check_integer(name: str, value: object, least: int = 1) -> int:
    """Return the value of an argument (TypeError or ValueError unless it is an integer of at least `least`)."""
    if type(value) is not int or value < least:
        raise (ValueError if type(value) is int else TypeError)(
            f"{name}={value!r}: expected an integer of at least {least}."
        )
    return value


def integer_lengths(lengths: Sequence[int] | Tensor) -> Tensor:
    """Return lengths as a tensor (TypeError unless they are integers, ValueError if one is negative or there is none)."""
    text = f"lengths is {a_type_of(lengths)}. Expected the number of tokens of at least one sample"
    try:
        values = torch.tensor(list(map(index, lengths.tolist() if hasattr(lengths, "tolist") else lengths)))
    except TypeError as error:
        raise TypeError(f"{text}, as integers: {error}.") from error
    if len(values) == 0 or values.min() < 0:
        raise ValueError(f"{text}, and none below 0.")
    return values
