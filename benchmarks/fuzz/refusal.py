"""Which errors of a case are refusals: trainwright's, of a setting before any training, and torch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.kind import Refused

DTYPES = {"16": torch.float16, "bf16": torch.bfloat16, "32": torch.float32, "64": torch.float64}


@contextmanager
def refusals(module: Any) -> Iterator[None]:
    """Raise `Refused` for an error about a setting before the module's first training step.

    An error about a write that only a step can reveal may come in the first one. The module counts its training steps in
    `steps_begun`.
    """
    try:
        yield
    except RuntimeError as error:
        if module.steps_begun != 1 or not str(error).startswith("the step wrote the parameter "):
            raise
        raise Refused(f"{type(error).__name__}: {error}") from error
    except (ValueError, TypeError) as error:
        if module.steps_begun:
            raise
        raise Refused(f"{type(error).__name__}: {error}") from error


def refuse_what_torch_cannot(net: nn.Module, loss: Any, precision: str, batch: tuple[Tensor, Tensor]) -> None:
    """Raise `Refused` if torch itself cannot compute a net's gradients in a precision on one process.

    `loss` is called with the net's outputs and the targets.
    """
    width, kind = precision.split("-")
    x, y = batch
    try:
        if kind == "mixed":
            with torch.autocast("cpu", DTYPES[width]):
                found = loss(net(x), y)
        else:
            net.to(DTYPES[width])
            found = loss(net(x.to(DTYPES[width]) if x.is_floating_point() else x), y)
        found.backward()
    except (RuntimeError, ValueError, TypeError) as error:
        raise Refused(f"torch itself: {type(error).__name__}: {error}") from error
