"""The host copy of a rank's pieces gives the same files, whatever happens to the originals."""

from __future__ import annotations

import pytest
import torch

from trainwright.checkpoint.contents import HostMemory
from trainwright.checkpoint.tensors import Piece, tied_groups
from trainwright.errors import CheckpointError


def odd_pieces() -> list[Piece]:
    shared = torch.arange(6.0)
    tensors = {
        "plain": torch.randn(3, 5),
        "transposed": torch.randn(4, 3).t(),
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "small": torch.tensor(7, dtype=torch.int8),
        "empty": torch.empty(0, 3),
        "also empty": torch.empty(0, 3),
        "halves": torch.randn(5).to(torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "tied": shared,
        "its twin": shared,
        "read otherwise": shared.view(2, 3),
    }
    whole = [Piece(name, tuple(tensor.shape), 0, tensor) for name, tensor in tensors.items()]
    return [*whole, Piece("a range", (4, 5), 3, torch.randn(7), 0)]


def test_copies_are_equal_and_stand_alone() -> None:
    memory, pieces = HostMemory(), odd_pieces()
    expected = [piece.tensor.clone() for piece in pieces]
    first, second = memory.copy([pieces[:4], pieces[4:]])
    copies = [*first, *second]
    for piece in pieces:
        piece.tensor.zero_()
    for piece, copy, value in zip(pieces, copies, expected, strict=True):
        assert (copy.name, copy.shape, copy.start, copy.writer) == (piece.name, piece.shape, piece.start, piece.writer)
        assert torch.equal(copy.tensor, value)
        assert copy.tensor.dtype == value.dtype
        assert copy.tensor.is_contiguous()
    groups = [[piece.name for piece in group] for group in tied_groups(copies)]
    assert groups == [[piece.name for piece in group] for group in tied_groups(pieces)]
    assert ["tied", "its twin"] in groups


def test_memory_is_used_again() -> None:
    memory = HostMemory()
    tensor = torch.randn(1000)
    pieces = [Piece("w", (1000,), 0, tensor)]
    with torch.inference_mode():  # a save within a validation makes memory for those outside of one too
        place = memory.copy([pieces])[0][0].tensor.data_ptr()
    tensor.add_(1.0)
    copy = memory.copy([pieces, [Piece("step", (), 0, torch.tensor(3))]])[0][0].tensor
    assert copy.data_ptr() == place
    assert torch.equal(copy, tensor)
    big = torch.randn(2_000_000)
    assert torch.equal(memory.copy([[Piece("w", (2_000_000,), 0, big)]])[0][0].tensor, big)
    memory.release()
    assert torch.equal(memory.copy([pieces])[0][0].tensor, tensor)


def test_what_cannot_be_stored_is_refused() -> None:
    for tensor, text in (
        (torch.eye(3).to_sparse(), r"'w' is torch\.sparse_coo .* dense tensors"),
        (torch.zeros(2, dtype=torch.complex128), r"'w' is torch\.complex128; a checkpoint stores"),
    ):
        with pytest.raises(CheckpointError, match=text):
            HostMemory().copy([[Piece("w", tuple(tensor.shape), 0, tensor)]])
