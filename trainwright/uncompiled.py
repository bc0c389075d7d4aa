"""What a compiled graph leaves to Python. Imported in a graph alone, because the decorator imports torch's compiler."""

from __future__ import annotations

from typing import Any

import torch


@torch.compiler.disable  # type: ignore[untyped-decorator]
def log(module: Any, name: str, value: Any, settings: tuple[Any, ...], batch_size: Any) -> None:
    """Call `Module.log` with its arguments in their order."""
    module.log(name, value, *settings[:-2], batch_size, *settings[-2:])
