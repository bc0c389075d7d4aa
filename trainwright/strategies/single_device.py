"""single_device: one process on one device, which the base of strategies implements."""

from __future__ import annotations

from typing import Any

from trainwright.strategies.base import Strategy
from trainwright.strategies.replaced_options import refuse_options


class SingleDeviceStrategy(Strategy):
    """One process on one device."""

    def __init__(self, **unknown: Any) -> None:
        super().__init__()
        device = "pass accelerator= to the Trainer, and devices=[index] for any but the first"
        refuse_options(SingleDeviceStrategy, unknown, {"device": device})
