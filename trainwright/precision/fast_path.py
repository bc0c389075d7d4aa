"""The fast path of torch's attention: one kernel for a layer in evaluation, and nested tensors where samples are padded."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


class NoFastPath(AbstractContextManager[None]):
    """Attention as in training, where the fast path cannot work; it may be entered within itself."""

    def __init__(self) -> None:
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before.append(torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)

    def __exit__(self, *error: object) -> None:
        torch.backends.mha.set_fastpath_enabled(self._before.pop())
