"""The weights of a save: a checkpoint never gives its place to weights that are not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from trainwright.trainer.trainer import Trainer


class WeightsCheck:
    """Keeps weights that are not finite out of a ModelCheckpoint's folder, and says so once, until they are finite again."""

    def __init__(self) -> None:
        self._has_warned = False

    def refuses(self, trainer: Trainer, kept: str) -> bool:
        """Return, alike on every rank, whether a save is left out. Collective: call on every rank.

        Args:
            trainer: whose weights are to be saved.
            kept: the newest checkpoint, which stays; empty where there is none.
        """
        fault = trainer.engine.finiteness.fault()
        if fault and not self._has_warned:
            stays = f"{kept} stays as the newest one" if kept else "There is none to go on from"
            rank_zero_warn(
                f"ModelCheckpoint saves nothing in epoch {trainer.current_epoch}, at step {trainer.global_step}: {fault}. "
                f"{stays}, and nothing is saved until the weights are finite again.",
                stacklevel=2,
            )
        self._has_warned = bool(fault)
        return bool(fault)
