"""Locks: the checkpoint folders that a fit holds from its beginning to its end, so that no other run writes there."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from trainwright.checkpoint.lock import FolderLock, lock_folder
from trainwright.distributed.ranks import Ranks


class FolderLocks:
    """The locks of one fit; rank 0's process holds them."""

    def __init__(self, ranks: Ranks, say: Callable[[str], None]) -> None:
        self._ranks, self._say = ranks, say
        self._locks: dict[str, FolderLock] = {}

    def take(self, folders: Iterable[str | None]) -> None:
        """Hold those of the folders that are known (not None) and not held yet. Collective.

        Raises:
            CheckpointError: on every rank, if another run holds one.
        """
        wanted = [folder for folder in dict.fromkeys(folders) if folder is not None and folder not in self._locks]
        if not wanted:
            return

        def take() -> list[str]:
            for folder in wanted:
                self._locks[folder] = lock_folder(folder)
            return [self._locks[folder].previous_holder for folder in wanted]

        holders = self._ranks.decide(take, "the locks of the checkpoints' folders")
        for folder, earlier in zip(wanted, holders, strict=True):
            self._locks.setdefault(folder, FolderLock(folder, None))  # rank 0's, as the other ranks know it
            if earlier:
                self._say(f"{folder} was held by {earlier}, which has ended; this run takes it over.")

    def release(self) -> None:
        while self._locks:  # a lock leaves the dict first, so that an error here does not release it twice
            self._locks.popitem()[1].release()
