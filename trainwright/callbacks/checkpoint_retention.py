"""What follows a save once it has committed: its name, and the checkpoints that it takes the place of go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainwright.callbacks.checkpoint_place import remove_replaced
from trainwright.callbacks.decision import decided
from trainwright.checkpoint.replacement import replace_checkpoint
from trainwright.checkpoint.store import open_checkpoint, same_path
from trainwright.errors import CheckpointError

if TYPE_CHECKING:
    from trainwright.checkpoint.writer import BackgroundSave
    from trainwright.trainer.trainer import Trainer


def found_again(
    kept: Mapping[str, float],
    last: str,
    replaced: Sequence[str],
    unrenamed: tuple[str, str, float | None],
    steps: Mapping[str, int],
    source: str,
) -> tuple[dict[str, float], str, list[str]]:
    """Return the kept checkpoints and their scores, the newest, and what they take the place of, where a run resumes.

    A path may hold another save than the one that was meant: its own waits elsewhere for its path, or a later one that the
    resumed run knows nothing of has taken it. Such a path is not among the kept ones, and the next save may have it.

    Args:
        kept, last, replaced: as the checkpoint says it.
        unrenamed: where the newest was written, which path it was to get, and its score; empty where that is the same.
        steps: the optimizer steps of what was saved at each path, as far as the checkpoint says it.
        source: the checkpoint that the run is resumed from.
    """
    found = dict(kept)
    place, path, score = unrenamed
    if place and (same_path(place, source) or (path in steps and _step_of(place) == steps[path])):
        found.pop(path, None)
        found, last, replaced = ({**found, place: score} if score is not None else found), place, [*replaced, path]
    own = {each: of for each, of in found.items() if each not in steps or _step_of(each) == steps[each]}
    return own, last, [*replaced]


def _step_of(path: str) -> int | None:
    """Return the optimizer steps of a checkpoint; None where none is."""
    try:
        return open_checkpoint(path, "off").step
    except CheckpointError:
        return None


@dataclass
class PendingSave:
    """A save that was begun; in the background, where `save` is not None.

    Args:
        path: the path that it is to have.
        place: where it is written, elsewhere than at the path if it replaces the checkpoint there.
        dropped: the checkpoints that go for it.
        save: the save in its thread; None for one that was made within the call.
        put_back: makes what is said of the kept checkpoints what it was before this save.
        keep: is given those of `dropped` that have to stay for now.
        report: what to print once it is there; nothing if empty.
    """

    path: str
    place: str
    dropped: list[str]
    save: BackgroundSave | None
    put_back: Callable[[], None]
    keep: Callable[[list[str]], None]
    report: str

    @property
    def is_committed(self) -> bool:
        """Whether the checkpoint is there, durably."""
        return self.save is None or self.save.is_committed

    def conclude(self, trainer: Trainer) -> None:
        """Wait for the commit, then give it its path and let the others go. Collective.

        Raises:
            CheckpointError: the save failed, on every rank alike; the kept checkpoints are those of before.
        """
        try:
            trainer.engine.finish_save()
            if self.is_committed and self.place != self.path:
                # Decided: no rank looks for it before rank 0 has done it.
                decided(trainer.engine, "a save of ModelCheckpoint", lambda: replace_checkpoint(self.place, self.path))
                self.place = self.path
        except BaseException:
            self.put_back()
            raise
        if not self.is_committed:  # which whoever asked for another save has been told
            self.put_back()
            return
        if self.report:
            trainer.print(self.report)
        self.remove_dropped(trainer)

    def conclude_alone(self, trainer: Trainer) -> None:
        """Do the same once an error has ended the run, with no word to the other ranks and no wait."""
        if not self.is_committed:
            self.put_back()
            return
        if self.place != self.path:
            if trainer.is_global_zero:
                replace_checkpoint(self.place, self.path)
            self.place = self.path
        self.remove_dropped(trainer)

    def remove_dropped(self, trainer: Trainer) -> None:
        """Remove what goes, once and on rank 0; the checkpoint that the run was resumed from stays."""
        dropped, self.dropped = self.dropped, []
        self.keep(remove_replaced(dropped, self.place, trainer))
