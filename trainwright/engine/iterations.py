"""Iterations: the prepared loaders that a loop is reading, and which of them its batch at hand is from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainwright.engine.prepared_loader import PreparedLoader


class Iteration:
    """One pass over a loader."""

    def __init__(self, loader: PreparedLoader, moment: int) -> None:
        self.loader = loader
        self.is_left = False
        """Whether it was given up before its end."""
        self.began = self.latest = moment
        """When it began, and when it gave its latest batch, counted in batches of all loaders."""


class Iterations:
    """The passes that are under way.

    A loop may read several loaders: a validation within an epoch, pairs of two loaders, an iterator that is kept and asked
    now and then. What counts is the loader that the loop is over.
    """

    def __init__(self) -> None:
        self._open: list[Iteration] = []
        self._moment = 0
        self._looked = 0
        """When `at_hand` was asked last."""
        self._outer: PreparedLoader | None = None
        self._found: tuple[Iteration | None, bool] = (None, True)

    def begin(self, loader: PreparedLoader) -> Iteration:
        """Note that a pass over a loader begins, which ends an earlier one over the same loader."""
        for each in [each for each in self._open if each.loader is loader]:
            self.end(each, is_left=True)
        self._moment += 1
        self._open.append(Iteration(loader, self._moment))
        return self._open[-1]

    def give(self, iteration: Iteration) -> None:
        """Note that a pass gives its next batch."""
        self._moment += 1
        iteration.latest = self._moment

    def end(self, iteration: Iteration, is_left: bool) -> None:
        """Note that a pass is over."""
        if iteration in self._open:
            self._open.remove(iteration)
            iteration.is_left = is_left

    def at_hand(self) -> tuple[Iteration | None, bool]:
        """Return the pass that the loop is over, and whether that is certain.

        It is one that gave a batch since the last time that this was asked: the one of then, else the first of them; or one
        that began after that one's latest batch, a loop within the loop.
        """
        if self._looked == self._moment and self._found[0] in self._open:
            return self._found
        fresh = sorted((each for each in self._open if each.latest > self._looked), key=lambda each: each.latest)
        self._looked = self._moment
        if not fresh:
            self._found = (self._open[-1] if self._open else None, True)
            return self._found
        outer = next((each for each in fresh if each.loader is self._outer), None)
        found = fresh[0] if outer is None else outer
        self._outer = found.loader
        for each in fresh:
            if each.began > found.latest:
                found = each
        self._found = (found, len(fresh) == 1 or found is outer)
        return self._found
