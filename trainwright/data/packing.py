"""Packing: rows of one length that contain several documents, masks that separate them, and a check of a model with both."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from trainwright.data.buckets import check_integer, integer_lengths
from trainwright.errors import a_type_of
from trainwright.rank_zero import rank_zero_info


class PackedDataset(Dataset[dict[str, Tensor]]):
    """A map-style dataset whose rows have one length and contain several documents, for causal language models.

    Best-fit decreasing (D. S. Johnson, "Near-optimal bin packing algorithms", 1973) assigns documents to rows: from the longest
    to the shortest, each is added to the fullest row with room. Only the lengths determine the rows, so samplers, ranks and
    resumed runs treat them as any dataset. Shuffle them: the longest documents are in the first. Empty documents are omitted.

    A row is a dict of int64 tensors of shape [length]. `input_ids` has the tokens. `position_ids` starts at 0 in every
    document, and `document_ids` counts them from 1. All three are 0 at the padding. `labels` equals `input_ids`, not
    shifted, because transformers' models shift it. It is -100 at the padding and at a document's first token, which the
    previous document must not predict.

    Args:
        dataset: a map-style dataset or a list of documents. A document is a list or tensor of tokens, or a dict with
            `input_ids` and optional `labels`, which are -100 at tokens that are not trained, such as a prompt.
        length: the number of tokens in a row.
        lengths: the number of tokens of every document. None reads all documents once to count them.
        too_long: "raise" an error for a document of more than `length` tokens, "truncate" it, or "drop" it. `num_too_long`
            counts them.

    Raises:
        TypeError: `length` or one of `lengths` is not an integer, the dataset has no length, or a document no tokens.
        ValueError: `too_long` is unknown, a document is too long, none remains, or `lengths` does not fit the dataset.

    >>> rows = tw.PackedDataset([[1, 2, 3], [4, 5, 6, 7], [8, 9]], length=6)
    >>> rows[0]["input_ids"], rows[0]["document_ids"], rows[0]["labels"]
    (tensor([4, 5, 6, 7, 8, 9]), tensor([1, 1, 1, 1, 2, 2]), tensor([-100,    5,    6,    7, -100,    9]))
    >>> len(rows), rows.padding_share
    (2, 0.25)
    """

    def __init__(
        self,
        dataset: Any,
        length: int,
        *,
        lengths: Sequence[int] | None = None,
        too_long: Literal["raise", "truncate", "drop"] = "raise",
    ) -> None:
        if too_long not in ("raise", "truncate", "drop"):
            raise ValueError(f"too_long={too_long!r} is unknown. Choose raise, truncate or drop.")
        self.dataset, self.length = dataset, check_integer("length", length)
        if not hasattr(dataset, "__len__"):
            raise TypeError(
                f"dataset is {a_type_of(dataset)}, without a length. Pass a map-style dataset, or list(dataset) of an iterable."
            )
        if lengths is None:
            lengths = [len(self._document(index)[0]) for index in range(len(dataset))]
        sizes: list[int] = integer_lengths(lengths).tolist()
        if len(sizes) != len(dataset):
            raise ValueError(f"lengths has {len(sizes)} numbers, but the dataset has {len(dataset)} documents.")
        long = [index for index, size in enumerate(sizes) if size > length]
        if long and too_long == "raise":
            raise ValueError(
                f"document {long[0]} has {sizes[long[0]]} tokens, and {len(long)} documents have more than length={length}. "
                "Pass a larger length, or too_long='truncate' or 'drop'."
            )
        self._sizes, self.num_too_long = sizes, len(long)
        sizes = [size if size <= length else length * (too_long == "truncate") for size in sizes]
        self.rows = best_fit_decreasing(sizes, length)
        """The indices of the documents of every row."""
        if not self.rows:
            raise ValueError(f"no document has 1 to {length} tokens. Pass other documents or a larger length.")
        self.padding_share = 1 - sum(sizes) / (length * len(self.rows))
        """The share of padding in all rows, from 0 to 1. A Trainer logs it when an epoch ends."""
        text = "PackedDataset: %d documents in %d rows of %d tokens, %.1f %% padding. %d were too long (too_long=%r)."
        rank_zero_info(text, len(sizes), len(self), length, 100 * self.padding_share, self.num_too_long, too_long)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, positions, numbers = torch.zeros(3, self.length, dtype=torch.long)
        targets = torch.full((self.length,), -100)  # which torch's cross_entropy ignores
        start = 0
        for number, document_index in enumerate(self.rows[index], start=1):
            tokens, labels = self._document(document_index)
            if len(tokens) != (expected := self._sizes[document_index]):
                raise ValueError(f"document {document_index} has {len(tokens)} tokens, but its length was {expected}.")
            size = min(len(tokens), self.length)
            part = slice(start, start := start + size)
            ids[part], positions[part], numbers[part] = tokens[:size], torch.arange(size), number
            targets[part] = labels[:size]
            targets[part.start] = -100
        return {"input_ids": ids, "position_ids": positions, "document_ids": numbers, "labels": targets}

    def _document(self, index: int) -> tuple[Tensor, Tensor]:
        document = self.dataset[index]
        if isinstance(document, str) or (isinstance(document, Mapping) and "input_ids" not in document):
            keys = f" with the keys {', '.join(map(repr, document))}" if isinstance(document, Mapping) else ""
            raise TypeError(
                f"document {index} is {a_type_of(document)}{keys}; expected tokens, or a dict with 'input_ids'. Tokenize the "
                "texts first, for example [tokenizer(text)['input_ids'] for text in texts]."
            )
        tokens = torch.as_tensor(document["input_ids"] if isinstance(document, Mapping) else document)
        labels = torch.as_tensor(document.get("labels", tokens)) if isinstance(document, Mapping) else tokens
        if len(labels) != len(tokens):
            raise ValueError(
                f"document {index} has {len(tokens)} tokens and {len(labels)} labels; expected one for each."
            )
        return tokens, labels


def best_fit_decreasing(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Return rows of indices, where a row's sizes add up to at most `length`. A size of 0 is omitted."""
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(length)]  # the rows by their number of free tokens
    rooms: list[int] = []  # the numbers of free tokens that some row has, in order
    for index in sorted((index for index, size in enumerate(sizes) if size), key=lambda index: -sizes[index]):
        place, room, number = bisect_left(rooms, sizes[index]), length, len(rows)
        if place == len(rooms):
            rows.append([])
        else:
            room = rooms[place]
            number = by_room[room].pop()
            if not by_room[room]:
                del rooms[place]
        rows[number].append(index)
        room -= sizes[index]
        if room and not by_room[room]:
            insort(rooms, room)
        by_room[room].append(number)
    return rows


def document_mask(document_ids: Tensor, flex: bool = False) -> Any:
    """Return a causal mask in which a token attends to tokens of its document only, and padding to padding.

    Args:
        document_ids: the documents' numbers of shape [batch, length], as in a batch of a `PackedDataset`.
        flex: return a BlockMask for torch's `flex_attention`, which skips blocks between documents on a GPU. Otherwise return
            a boolean tensor of shape [batch, 1, length, length], True where a token attends. It is an `attn_mask` of
            `scaled_dot_product_attention`, and an `attention_mask` of transformers' models with `attn_implementation="sdpa"`.

    >>> tw.document_mask(torch.tensor([[1, 1, 2]])).int()
    tensor([[[[1, 0, 0],
              [1, 1, 0],
              [0, 0, 1]]]], dtype=torch.int32)
    """
    if not flex:
        return (document_ids[:, None, :, None] == document_ids[:, None, None, :]).tril()
    from torch.nn.attention.flex_attention import create_block_mask

    def attends(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document_ids[row, query] == document_ids[row, key])

    batch, length = document_ids.shape
    return create_block_mask(attends, batch, None, length, length, device=str(document_ids.device))


@torch.no_grad()
def check_packing(
    model_fn: Callable[[dict[str, Tensor]], Tensor], batch: Mapping[str, Tensor], tolerance: float = 1e-3
) -> None:
    """Raise ValueError unless all documents of a packed batch have the logits that they have in rows by themselves.

    A model fails if a document attends to another, or if it has absolute positions and ignores `position_ids`. Call this once,
    with the model in evaluation mode.

    Args:
        model_fn: takes a batch of rows of a `PackedDataset`, and returns logits of shape [batch, length, ...].
        batch: one or a few rows, of which one has several documents.
        tolerance: the largest difference of two logits, as a fraction of the largest logit.

    Raises:
        ValueError: logits differ, or no row has several documents.

    >>> rows = DataLoader(tw.PackedDataset([[1, 2], [3]], length=4))
    >>> embedding = nn.Embedding(4, 4)
    >>> tw.check_packing(lambda batch: embedding(batch["input_ids"]), next(iter(rows)))
    """
    documents = batch["document_ids"]
    if int(documents.max()) < 2:
        raise ValueError(
            "no row of the batch has several documents. Pass other rows, such as the last ones of the dataset."
        )
    packed = model_fn(dict(batch))
    limit = tolerance * float(packed.abs().max())
    for row, numbers in enumerate(documents):
        for number in range(1, int(numbers.max()) + 1):
            place = torch.nonzero(numbers == number).flatten()
            end = (0, len(numbers) - len(place))
            logits = model_fn({name: pad(values[row, place], end)[None] for name, values in batch.items()})
            difference = float((logits[0, : len(place)] - packed[row, place]).abs().max())
            if not difference <= limit:  # also if it is NaN
                raise ValueError(
                    f"the logits of document {number} in row {row} change by {difference:.3g} in a row by itself, by more than "
                    f"{limit:.3g}. Pass document_mask(document_ids) and position_ids to the model, after model.eval()."
                )
