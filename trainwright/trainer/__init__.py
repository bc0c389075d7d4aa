"""The Trainer: the training loop and what surrounds it."""

import sys
from typing import Any

from trainwright.import_paths import missing


def __getattr__(name: str) -> Any:
    if name == "Trainer":  # as `from lightning.pytorch.trainer import Trainer`, once the import is changed
        from trainwright.trainer.trainer import Trainer

        return Trainer
    if name == "seed_everything":
        from trainwright.data.seeding import seed_everything

        return seed_everything
    raise missing(name, __name__, sys._getframe(1))
