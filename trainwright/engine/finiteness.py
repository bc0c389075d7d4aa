"""Finiteness: a check of each save for NaN and infinity in trained tensors, with the same result on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from trainwright.checkpoint.discovery import is_checkpoint
from trainwright.checkpoint.store import SAVE
from trainwright.checkpoint.tensors import Piece
from trainwright.distributed.ranks import Ranks
from trainwright.engine.named_state import prefix_of
from trainwright.errors import CheckpointError
from trainwright.rank_zero import rank_zero_warn
from trainwright.tensor_names import named_tensors

DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
STATISTICS = ("running_mean", "running_var")


class Finiteness:
    """Looks for NaN and infinity in trained parameters and in the running statistics of norms.

    Other buffers and frozen parameters may contain such values by design (a mask of -inf), and so may tensors that contained
    them before the training: these are not checked. `read` returns the modules, and this rank's pieces of their tensors.
    """

    def __init__(self, ranks: Ranks, read: Callable[[], tuple[Sequence[nn.Module], Sequence[Piece]]]) -> None:
        self._ranks, self._read = ranks, read
        self._exempt: set[str] = set()
        self._is_known = False
        """Whether the weights have been found finite for the next save, equal on all ranks."""

    def begin(self) -> None:
        """Exempt the tensors that are not finite before the training."""
        modules, pieces = self._read()
        self._exempt = set(_found(_trained(modules), pieces))

    def fault(self) -> str:
        """Return a text that names tensors that are not finite on any rank. Collective.

        If it is empty, the next save does not check again.
        """
        return self._fault(*self._read())

    def look(
        self,
        path: str,
        overwrite: bool,
        modules: Sequence[nn.Module],
        pieces: Sequence[Piece],
        are_others: bool = False,
    ) -> None:
        """Warn of weights in a save that are not finite, unless `fault` has just checked them. Collective.

        With `are_others` the pieces are not the modules' tensors, so `fault` has not checked them.

        Raises:
            CheckpointError: they are not finite, and would replace another checkpoint.
        """
        fault = "" if self._is_known and not are_others else self._fault(modules, pieces)
        self._is_known = False
        if not fault:
            return
        if overwrite and self._ranks.broadcast(is_checkpoint(path), SAVE):
            raise CheckpointError(f"checkpoint {path} was not written: {fault}, and the one that is there stays.")
        rank_zero_warn(f"{fault}; checkpoint {path} is written with them.", stacklevel=4)

    def _fault(self, modules: Sequence[nn.Module], pieces: Sequence[Piece]) -> str:
        found = self._ranks.exchange(_found(_trained(modules) - self._exempt, pieces), SAVE)
        names = list(dict.fromkeys(name for local in found for name in local))
        self._is_known = not names
        more = f" and {len(names) - 1} more" if names[1:] else ""
        return f"the weights are not finite (NaN or infinity in {names[0]!r}{more})" if names else ""


def _trained(modules: Iterable[nn.Module]) -> set[str]:
    """Return the names, in a checkpoint, of the tensors to check."""
    return {
        prefix_of(number) + name
        for number, module in enumerate(modules)
        for name, tensor in named_tensors(module)
        if tensor.requires_grad or name.rpartition(".")[2] in STATISTICS
    }


@torch.no_grad()
def _found(names: set[str], pieces: Iterable[Piece]) -> list[str]:
    """Return the names of the pieces that are not finite, with one read from each device."""
    checks: dict[torch.device, dict[str, Tensor]] = {}
    for piece in pieces:
        tensor = piece.tensor.detach()
        if piece.name in names and tensor.numel() > 0 and tensor.dtype in DTYPES and not tensor.is_meta:
            # On the CPU ten times as fast as a norm. An extreme is NaN where any element is.
            extremes = torch.stack(torch.aminmax(tensor))
            checks.setdefault(tensor.device, {})[piece.name] = extremes.isfinite().all()
    return [
        name
        for found in checks.values()
        for name, is_finite in zip(found, torch.stack([*found.values()]).tolist(), strict=True)
        if not is_finite
    ]
