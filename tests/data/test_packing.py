"""Packing: rows of documents train a model as single documents do."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import default_collate

import trainwright as tw
from trainwright.data.packing import best_fit_decreasing

VOCABULARY, LENGTH = 17, 24
SIZES = [9, 24, 3, 1, 14, 6, 5, 20, 7, 2, 11, 8]
DOCUMENTS = [torch.randint(1, VOCABULARY, (size,), generator=torch.Generator().manual_seed(size)) for size in SIZES]


class Transformer(nn.Module):
    """One causal block with learned or rotary positions, which uses or ignores the documents."""

    def __init__(self, is_rotary: bool, ignores: str = "") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.is_rotary, self.ignores = is_rotary, ignores
        self.embedding, self.positions = nn.Embedding(VOCABULARY, 8), nn.Embedding(LENGTH, 8)
        self.inner, self.outer, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, VOCABULARY)
        self.double()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        ids, documents, positions = (batch[name] for name in ("input_ids", "document_ids", "position_ids"))
        if self.ignores == "positions":
            positions = torch.arange(ids.shape[1]).expand_as(ids)
        hidden = self.embedding(ids) if self.is_rotary else self.embedding(ids) + self.positions(positions)
        query, key, value = self.inner(hidden)[:, None].chunk(3, dim=-1)
        if self.is_rotary:
            query, key = rotated(query, positions), rotated(key, positions)
        mask = tw.document_mask(torch.ones_like(documents) if self.ignores == "mask" else documents)
        return self.head(hidden + self.outer(scaled_dot_product_attention(query, key, value, mask)[:, 0]))  # type: ignore[no-any-return]


def rotated(states: Tensor, positions: Tensor) -> Tensor:
    angles = positions[:, None, :, None] * torch.tensor([1.0, 0.3, 0.1, 0.03], dtype=torch.double)
    first, second = states.chunk(2, dim=-1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], dim=-1
    )


def batch_of(documents: list[Tensor]) -> dict[str, Tensor]:
    rows = tw.PackedDataset(documents, LENGTH)
    return default_collate([rows[index] for index in range(len(rows))])  # type: ignore[no-any-return]


def losses_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the losses of all tokens. transformers' models shift the labels in the same way."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none").view(len(labels), -1)


def test_rows_contain_every_document_once() -> None:
    rows = tw.PackedDataset([{"input_ids": document.tolist()} for document in DOCUMENTS] + [[]], LENGTH)
    assert len(rows) == 5, "110 tokens need 5 rows of 24"
    assert rows.padding_share == pytest.approx(1 - sum(SIZES) / (5 * LENGTH))
    seen = []
    for index, indices in enumerate(rows.rows):
        row = rows[index]
        assert all(value.shape == (LENGTH,) and value.dtype == torch.long for value in row.values())
        for number, document in enumerate(indices, start=1):
            place = row["document_ids"] == number
            assert torch.equal(row["input_ids"][place], DOCUMENTS[document])
            assert row["labels"][place].tolist() == [-100, *DOCUMENTS[document][1:].tolist()]
            assert row["position_ids"][place].tolist() == list(range(SIZES[document]))
        padding = row["document_ids"] == 0
        assert {(0, 0, -100)} >= set(
            zip(*(row[name][padding].tolist() for name in ("input_ids", "position_ids", "labels")), strict=True)
        )
        seen += indices
    assert sorted(seen) == list(range(len(SIZES)))


def test_documents_fill_the_fullest_row_with_room() -> None:
    assert best_fit_decreasing([5, 7, 3, 2, 3], 10) == [[1, 2], [0, 4, 3]]
    sizes = random.Random(0).choices(range(1, 41), k=2000)
    rows = best_fit_decreasing(sizes, 64)
    assert sorted(index for row in rows for index in row) == list(range(2000))
    assert max(sum(sizes[index] for index in row) for row in rows) <= 64
    assert len(rows) <= 1.01 * sum(sizes) / 64


def test_long_documents_are_truncated_dropped_or_refused() -> None:
    documents = [list(range(1, 8)), [1, 2], [3] * 6]
    with pytest.raises(ValueError, match=r"document 0 has 7 tokens, and 2 documents have more than length=5\. Pass"):
        tw.PackedDataset(documents, 5)
    rows = tw.PackedDataset(documents, 5, too_long="truncate")
    assert rows.num_too_long == 2
    assert rows[0]["input_ids"].tolist() == [1, 2, 3, 4, 5]
    assert rows[0]["labels"].tolist() == [-100, 2, 3, 4, 5]
    assert tw.PackedDataset(documents, 5, too_long="drop").rows == [[1]]
    with pytest.raises(ValueError, match="no document has 1 to 1 tokens"):
        tw.PackedDataset(documents, 1, too_long="drop")
    with pytest.raises(ValueError, match="too_long='cut' is unknown"):
        tw.PackedDataset(documents, 5, too_long="cut")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lengths has 2 numbers, but the dataset has 3 documents"):
        tw.PackedDataset(documents, 9, lengths=[7, 2])
    with pytest.raises(ValueError, match="document 1 has 2 tokens, but its length was 3"):
        tw.PackedDataset(documents, 9, lengths=[7, 3, 6])[1]
    with pytest.raises(TypeError, match=r"document 0 is a str; expected tokens.*Tokenize the texts first"):
        tw.PackedDataset(["a text"], 5)
    with pytest.raises(TypeError, match="dataset is a generator, without a length"):
        tw.PackedDataset((document for document in documents), 5)
    with pytest.raises(TypeError, match=r"length=2\.5: expected an integer"):
        tw.PackedDataset(documents, 2.5)  # type: ignore[arg-type]


def test_labels_of_documents_keep_their_ignored_tokens() -> None:
    rows = tw.PackedDataset([{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}, {"input_ids": [5, 6]}], 6)
    assert rows[0]["labels"].tolist() == [-100, -100, 3, 4, -100, 6]


@pytest.mark.parametrize("is_rotary", [False, True])
def test_losses_and_gradients_equal_those_of_single_documents(is_rotary: bool) -> None:
    model, packed = Transformer(is_rotary), batch_of(DOCUMENTS)
    losses = losses_of(model(packed), packed["labels"])
    losses.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    singles = []
    for document in DOCUMENTS:
        single = {"input_ids": document[None], "position_ids": torch.arange(len(document))[None]}
        logits = model({**single, "document_ids": torch.ones_like(document)[None]})
        singles.append(cross_entropy(logits[0, :-1], document[1:], reduction="none"))
        singles[-1].sum().backward()
    rows = tw.PackedDataset(DOCUMENTS, LENGTH).rows
    for index, indices in enumerate(rows):
        for number, document in enumerate(indices, start=1):
            of_document = (packed["document_ids"][index, 1:] == number) & (packed["labels"][index, 1:] != -100)
            torch.testing.assert_close(losses[index][of_document], singles[document], rtol=0, atol=1e-12)
    assert losses.sum().item() == pytest.approx(sum(single.sum().item() for single in singles), rel=1e-12)
    for gradient, parameter in zip(gradients, (p for p in model.parameters() if p.grad is not None), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=1e-10)


def test_a_changed_document_changes_no_other_logits() -> None:
    model, batch = Transformer(is_rotary=False), batch_of(DOCUMENTS)
    before = model(batch)
    others = batch["document_ids"] != 2
    changed = {**batch, "input_ids": torch.where(others, batch["input_ids"], VOCABULARY - batch["input_ids"])}
    assert not others.all()
    assert torch.equal(model(changed)[others], before[others])
    assert not torch.equal(model(changed), before)


@pytest.mark.parametrize("is_rotary", [False, True])
def test_the_check_finds_a_model_that_mixes_documents(is_rotary: bool) -> None:
    batch = batch_of(DOCUMENTS)
    tw.check_packing(Transformer(is_rotary), batch)
    with pytest.raises(ValueError, match=r"the logits of document 2 in row 1 change by .*Pass document_mask"):
        tw.check_packing(Transformer(is_rotary, "mask"), batch)
    if is_rotary:  # which has relative positions
        tw.check_packing(Transformer(is_rotary, "positions"), batch)
    else:
        with pytest.raises(ValueError, match="the logits of document 2 in row 1"):
            tw.check_packing(Transformer(is_rotary, "positions"), batch)
    with pytest.raises(ValueError, match="change by nan"):
        tw.check_packing(lambda batch: Transformer(is_rotary)(batch) * float("nan"), batch)
    with pytest.raises(ValueError, match="no row of the batch has several documents"):
        tw.check_packing(Transformer(is_rotary), batch_of([DOCUMENTS[0]]))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_block_mask_equals_the_mask_of_booleans() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    torch.manual_seed(0)
    documents = torch.tensor([[1] * 70 + [2] * 60 + [3] * 120 + [0] * 6, [1] * 200 + [2] * 56])
    query, key, value = torch.randn(3, 2, 2, 256, 16)
    blocks = tw.document_mask(documents, flex=True)
    expected = scaled_dot_product_attention(query, key, value, tw.document_mask(documents))
    result: Any = flex_attention(query, key, value, block_mask=blocks)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)
    assert blocks.sparsity() > 0
