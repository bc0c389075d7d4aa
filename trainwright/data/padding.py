"""Padding: a collate function that pads the sequences of a batch to one length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import default_collate

from trainwright.data.buckets import check_integer
from trainwright.devices import cuda


class PadCollate:
    """A collate function that pads the sequences of a batch with values at their ends.

    Samples are tensors, lists of numbers, or dicts or tuples of them. Sequences are padded in their first dimension, to the
    longest of the batch. `attention_mask` is padded with 0 and `labels` with -100, so that models and losses ignore the
    padding. Numbers, texts and other values are collated by torch's `default_collate`. No key is added.

    Args:
        padding_value: the padding of all other keys, or a dict of it by key (by position in a tuple), by default 0.
        multiple_of: round the length up to a multiple of this number, for values whose lengths differ in the batch and values
            as long as `input_ids`, or else as the sample's first row of integers. None means 8 if torch sees a CUDA device,
            whose matrix products are then faster, and otherwise 1.

    Raises:
        TypeError: `padding_value` is not a number or a dict of numbers, or `multiple_of` is not an integer.
        ValueError: `multiple_of` is below 1.
        ValueError: the samples of a batch have different keys.
        RuntimeError: sequences of a batch differ in more than the first dimension.

    >>> collate = tw.PadCollate(multiple_of=4)
    >>> collate([{"input_ids": [5, 6, 7], "labels": 1}, {"input_ids": [8], "labels": 0}])
    {'input_ids': tensor([[5, 6, 7, 0],
            [8, 0, 0, 0]]), 'labels': tensor([1, 0])}
    """

    def __init__(self, padding_value: float | Mapping[str | int, float] = 0, *, multiple_of: int | None = None) -> None:
        by_key, self._default = (padding_value, 0.0) if isinstance(padding_value, Mapping) else ({}, padding_value)
        self._by_key = dict[object, float]([("attention_mask", 0), ("labels", -100), *by_key.items()])
        if not all(isinstance(value, (int, float)) for value in (self._default, *self._by_key.values())):
            raise TypeError(f"padding_value={padding_value!r}: expected a number, or a dict with a number for a key.")
        # Chosen here, because a worker process may not see the device.
        chosen = (8 if cuda.is_available() else 1) if multiple_of is None else multiple_of
        self.multiple_of = check_integer("multiple_of", chosen)

    def __call__(self, samples: Sequence[Any]) -> object:
        """Return the batch of these samples, with the structure of the first."""
        first = samples[0]
        if isinstance(first, Mapping):
            for number, sample in enumerate(samples):
                if sample.keys() != first.keys():
                    raise ValueError(
                        f"sample {number} of the batch has the keys {list(sample)}, and sample 0 has {list(first)}. Return the "
                        "same keys for every sample."
                    )
            return self._collated({key: [sample[key] for sample in samples] for key in first})
        if not isinstance(first, (tuple, list)) or _as_sequence(first) is not None:
            return self._collated({None: samples})[None]
        parts: Iterable[Any] = self._collated(dict(enumerate(zip(*samples, strict=True)))).values()
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)

    def _collated(self, columns: Mapping[object, Sequence[object]]) -> dict[object, object]:
        """Return the values of every key as one value."""
        first_lengths: list[int] | None = None
        batch: dict[object, object] = {}
        for key in sorted(columns, key=lambda key: key != "input_ids"):  # first, as the reference
            values = columns[key]
            sequences = [part for part in map(_as_sequence, values) if part is not None]
            lengths = [len(part) for part in sequences]
            if len(sequences) < len(values):
                batch[key] = default_collate(list(values))
                continue
            if first_lengths is None and sequences[0].dim() == 1 and not sequences[0].is_floating_point():
                first_lengths = lengths
            is_text = lengths == first_lengths or len(set(lengths)) > 1
            length = max(lengths) + (-max(lengths) % self.multiple_of if is_text else 0)
            dtype, value = sequences[lengths.index(max(lengths))].dtype, self._by_key.get(key, self._default)
            ends = [[0] * (2 * part.dim() - 1) + [length - len(part)] for part in sequences]
            padded = [pad(part.to(dtype), end, value=value) for part, end in zip(sequences, ends, strict=True)]
            batch[key] = torch.stack(padded)
        return {key: batch[key] for key in columns}


def _as_sequence(value: object) -> Tensor | None:
    is_list = isinstance(value, list) and all(isinstance(item, (int, float)) for item in value[:1])
    if not is_list and not hasattr(value, "__array__"):
        return None
    tensor = torch.as_tensor(value)
    return tensor if tensor.dim() else None


def pad_collate(samples: Sequence[Any]) -> object:
    """Return the batch of these samples, padded as by `PadCollate()`: pass it as `collate_fn`.

    >>> tw.pad_collate([torch.tensor([1, 2, 3]), torch.tensor([4])])
    tensor([[1, 2, 3],
            [4, 0, 0]])
    """
    return PadCollate()(samples)
