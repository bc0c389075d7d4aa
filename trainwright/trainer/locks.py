"""Locks: the folders of checkpoints that a fit holds from its beginning to its end, so that no other run writes there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.checkpoint.lock import FolderLock, lock_folder

if TYPE_CHECKING:
    from trainwright.trainer.trainer import Trainer


class FolderLocks:
    """The locks of one fit, in rank 0's process; an evaluation and a trial run (fast_dev_run) hold nothing.

    Args:
        trainer: whose ModelCheckpoints save there.
        stage: the call.
    """

    def __init__(self, trainer: Trainer, stage: str) -> None:
        self._trainer = trainer
        self._callbacks = trainer.checkpoint_callbacks if stage == "fit" and not trainer.fast_dev_run else []
        self._locks: dict[str, FolderLock] = {}

    def take(self, *, started: bool) -> None:
        """Hold the folders that are known: before the loggers are `started`, those that were given. Collective.

        Raises:
            CheckpointError: another run holds one, on every rank alike.
        """
        folders = [each.folder_in(self._trainer) if started else each.given_dirpath for each in self._callbacks]
        wanted = {folder: None for folder in folders if folder is not None and folder not in self._locks}
        if not wanted:
            return

        def take() -> list[str]:
            for folder in wanted:
                self._locks[folder] = lock_folder(folder)
            return [self._locks[folder].previous_holder for folder in wanted]

        holders = self._trainer.engine.ranks.decide(take, "the locks of the checkpoints' folders")
        for folder, earlier in zip(wanted, holders, strict=True):
            self._locks.setdefault(folder, FolderLock(folder, None))  # rank 0's, as the others know it
            if earlier:
                self._trainer.print(f"{folder} was held by {earlier}, which has ended; this run takes it over.")

    def release(self) -> None:
        """Give all of them back."""
        while self._locks:
            self._locks.popitem()[1].release()
