"""The Trainer: the training loop and what surrounds it."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "Trainer":  # as `from lightning.pytorch.trainer import Trainer`, once the import is changed
        from trainwright.trainer.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
