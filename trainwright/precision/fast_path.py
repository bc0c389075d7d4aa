"""Torch's attention fast path: one kernel per layer in evaluation, with nested tensors for padded samples."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


class NoFastPath(AbstractContextManager[None]):
    """Disables the fast path where it cannot work; reentrant."""

    def __init__(self) -> None:
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before.append(torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)

    def __exit__(self, *error: object) -> None:
        torch.backends.mha.set_fastpath_enabled(self._before.pop())
