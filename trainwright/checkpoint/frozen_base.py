"""The frozen base: digests of the parameters that a checkpoint of only the trained parameters omits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch

from trainwright.checkpoint.shards import check_storable
from trainwright.checkpoint.tensors import DTYPE_NAMES, DTYPES, Piece, assign_writers
from trainwright.checkpoint.weight_files import CHUNK_ELEMENTS
from trainwright.distributed.ranks import Ranks
from trainwright.errors import CheckpointError

FROZEN_BASE = "frozen_base"
"""The key of the base in the state of a checkpoint."""
Base = dict[str, tuple[str, list[int], int]]
"""The dtype, the shape and the digest of every frozen parameter."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STEP, _FACTOR = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64)


def describe_base(pieces: Sequence[Piece], ranks: Ranks) -> Base:
    """Return the dtypes, shapes and digests of frozen parameters. Collective: call on every rank."""
    found = _digests_of_ranks(pieces, ranks)
    return {piece.name: (DTYPE_NAMES[piece.tensor.dtype], [*piece.shape], found[piece.name]) for piece in pieces}


def check_base(path: str, base: Base, pieces: Sequence[Piece], ranks: Ranks) -> None:
    """Raise CheckpointError on every rank if the pieces differ from the base. Collective: call on every rank."""
    found = _digests_of_ranks(pieces, ranks, base)
    unlike = [piece for piece in pieces if found[piece.name] != base[piece.name][2]]
    if not unlike:
        return
    first, here = unlike[0].name, unlike[0].tensor.dtype
    there = DTYPES[base[first][0]]
    dtypes = f", {DTYPE_NAMES[there]} there and {DTYPE_NAMES.get(here, here)} here" if there != here else ""
    cause = "Construct the module with the same pretrained weights"
    if there != here and there.itemsize >= here.itemsize:  # the digest is of digits that the tensor no longer has
        cause = f"A model in {here} cannot be compared with one in {there}: use the precision of the saved run"
    raise CheckpointError(
        f"{path} stores only the trained parameters, and the base model ({len(base)} frozen tensors) differs from the one of "
        f"the saved run in {len(unlike)} of them, first in {first!r}{dtypes}. {cause}, or save without trained_only. To load "
        "onto another base, call module.load_state_dict(tw.load_weights(path), strict=False)."
    )


def _digests_of_ranks(pieces: Sequence[Piece], ranks: Ranks, base: Base | None = None) -> dict[str, int]:
    """Return the digests of whole tensors. Every rank reads the pieces that it would write. Collective."""
    local = assign_writers(pieces, ranks.rank, ranks.world_size)
    found = ranks.run_on_all(partial(digests, local, base), "the comparison of the frozen parameters")
    return {piece.name: sum(part.get(piece.name, 0) for part in found) % (1 << 64) for piece in pieces}


@torch.no_grad()
def digests(pieces: Iterable[Piece], base: Base | None = None) -> dict[str, int]:
    """Return a 64-bit digest of every piece, so that the pieces of a tensor add up to its digest.

    It detects mistakes, such as other pretrained weights, not attacks. Pieces of a `base` are converted to its dtypes first.
    """
    found = {}
    for piece in pieces:
        check_storable(piece.name, piece.tensor)
        flat = piece.tensor.detach().reshape(-1)
        dtype = DTYPES[base[piece.name][0]] if base else flat.dtype
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        for start in range(0, flat.numel(), CHUNK_ELEMENTS):
            chunk = flat[start : start + CHUNK_ELEMENTS]
            bits = chunk.to(dtype).view(_INTEGERS[dtype.itemsize]).to(torch.int64)
            first = piece.start + start + 1
            # A position enters every bit of its term, so that elements that are exchanged change the sum.
            term = torch.arange(first, first + len(chunk), device=chunk.device).mul_(_STEP).bitwise_xor_(bits)
            term.bitwise_xor_(term >> 31).mul_(_FACTOR).bitwise_xor_(term >> 29).mul_(_STEP)
            total += term.sum()
        found[piece.name] = int(total)
    return found
