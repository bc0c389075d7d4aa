"""Prepared loaders: this rank's part of a user's loader, for raw loops, and which of several loaders a loop iterates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from trainwright.data.batch_stream import sample_counts
from trainwright.data.first_draws import compare_first_draws
from trainwright.data.loaders import with_last
from trainwright.data.source_state import SPACING
from trainwright.data.transfer import to_device
from trainwright.engine.engine import Engine


class PreparedLoader:
    """This rank's part of a loader, batch by batch on the device. Every iteration is the next epoch.

    Every rank has the same number of batches. Some of the last ones may be smaller, and a rank without a sample repeats a batch
    of another: `last_sizes` has the numbers of new samples by rank. Other attributes (`dataset`, `batch_size`, `sampler`) come
    from the user's loader.
    """

    def __init__(
        self,
        engine: Engine,
        loader: Any,
        iterations: Iterations,
        *,
        splits: bool = False,
        moves: bool = True,
        continues: bool = False,
        before_epoch: Callable[[], None] | None = None,
    ) -> None:
        self.loader = loader
        self.is_at_end = False
        """Whether the current batch is the epoch's last."""
        self._splits, self._moves, self._before_epoch = splits, moves, before_epoch
        self._continues, self._is_resumed = continues, False
        self._sharded = engine.prepare_loader(loader, "train", splits=splits)
        compare_first_draws(self._sharded, engine.ranks, "prepared")
        self._sharded.plan_states([(SPACING, 0)])  # `save_state` may be called after any batch
        self._engine = engine
        self._iterations = iterations
        self._epoch = self._batch = self._skipped = 0
        self._is_begun = False
        self._has_read_epoch = False
        """Whether the loop has read `epoch` since the latest `load_state`."""

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        if self._is_begun:  # the previous pass was abandoned
            self._end_epoch()
        self._is_begun, self.is_at_end = True, False
        self._engine.refresh_trainable(if_changed=True)  # a raw loop may freeze layers between epochs
        skipped = self._take_start()
        if self._before_epoch is not None and not self._batch:
            self._before_epoch()
        self._sharded.set_epoch(self._engine.seed, self._epoch, self._batch)
        device = self._engine.device
        moves = self._moves and device.type != "cpu"
        iteration, is_left = self._iterations.begin(self), True
        try:
            for batch, is_last in with_last(self._sharded, self._batch, self._sharded.exact_length):
                self.is_at_end = is_last
                self._batch += 1
                if self._batch <= skipped:
                    continue
                self._iterations.note_batch(iteration, batch)
                yield to_device(batch, device) if moves else batch
            self._end_epoch()
            self._is_begun = self.is_at_end = is_left = False
        finally:  # also when the loop breaks and drops the iterator
            self._iterations.end(iteration, is_left)

    def _take_start(self) -> int:
        """Determine the first batch of the pass. Return how many batches of its epoch to read and skip."""
        skipped, self._skipped = self._skipped, 0
        if self._is_resumed and self._batch and not skipped:
            self._choose_start()
        if skipped and not self._batch and self._sharded.seeks:
            self._batch = skipped
        return skipped

    @property
    def epoch(self) -> int:
        """Return the number of the next batch's epoch; a loop that reads it resumes within that epoch."""
        self._has_read_epoch = True
        return self._epoch

    def resume(self, state: dict[str, Any]) -> None:
        """Begin at a checkpoint's position if the loop resumes within an epoch, and at the epoch's start otherwise."""
        self.load_state_dict(state)
        self._is_resumed, self._has_read_epoch = True, False

    def _choose_start(self) -> None:
        """Begin a resumed epoch at its start if the loop has not read `epoch`, because loops for Accelerate skip batches."""
        position = f"batch {self._batch} of epoch {self._epoch}"
        text = f"load_state: the loader continues at {position}."
        if not (self._continues or self._has_read_epoch):
            self.load_state_dict({"epoch": self._epoch, "batch": 0})
            text = f"load_state: the loader begins with batch 0, as in Accelerate, though it was saved at {position}. "
            text += "A loop that skips no batches itself continues there with skip_first_batches or range(loader.epoch, ...)."
        if self._engine.rank == 0:
            print(text)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, which begins at its start. The current epoch continues from its position."""
        at = self._epoch + (self._is_begun and self._batch > 0)
        if epoch != at:
            self.load_state_dict({"epoch": epoch, "batch": 0})

    def skip(self, num_batches: int) -> None:
        """Begin the next iteration at this batch of its epoch."""
        if not self._is_begun and self._batch > num_batches:
            self.load_state_dict({"epoch": self._epoch, "batch": 0})
        self._skipped = num_batches

    def _end_epoch(self) -> None:
        """End the epoch here, so that the sources' present states begin the next one."""
        self._sharded.load_state_dict(self._sharded.state_dict(self._batch, is_over=True))
        self._epoch, self._batch = self._epoch + 1, 0

    def __len__(self) -> int:
        return len(self._sharded)

    @property
    def batches_left(self) -> int | None:
        """Return how many batches of the epoch remain, with the current one, or None if the length is unknown."""
        length = self._sharded.exact_length
        return None if length is None else length - self._batch + 1

    @property
    def total_batch_size(self) -> int | None:
        """Return the number of samples in all ranks' batches, or None if the loader has no batch size."""
        size = getattr(self.loader, "batch_size", None)
        return size if size is None or self._splits else size * self._engine.num_data_ranks

    @property
    def total_dataset_length(self) -> int:
        """Return the number of samples in the dataset (TypeError if it has no length)."""
        return len(self.loader.dataset)

    @property
    def last_sizes(self) -> list[int] | None:
        """Return how many samples of the current batch are new, by rank, or None if all ranks have equally many."""
        return self._sharded.uneven.get(self._batch - 1)

    @property
    def weight(self) -> float:
        """Return this rank's samples in the current round, relative to an equal part."""
        return self._sharded.weight_at(self._batch - 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch, the same on every rank except for "sources"."""
        is_over = self.is_at_end and self._batch > 0
        epoch, batch = (self._epoch + 1, 0) if is_over else (self._epoch, self._batch)
        return {"epoch": epoch, "batch": batch, **self._sharded.state_dict(self._batch, is_over=is_over)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next iteration at a position that was saved at any world size."""
        self._epoch, self._batch = int(state["epoch"]), int(state["batch"])
        self._is_begun = self.is_at_end = self._is_resumed = False
        self._sharded.load_state_dict({"places": state.get("places", ()), "sources": state.get("sources", ())})


class Iteration:
    """One pass over a loader."""

    def __init__(self, loader: PreparedLoader, moment: int) -> None:
        self.loader = loader
        self.is_left = False
        """Whether it was abandoned."""
        self.began = self.latest = moment
        """The times of its beginning and of its latest batch, counted in batches of all loaders."""


class Iterations:
    """The passes under way, and which of them the loop iterates, because a loop may read several loaders."""

    def __init__(self, observer: Any = None) -> None:
        self._observer = observer
        self._open: list[Iteration] = []
        self._moment = 0
        self._looked = 0
        """The time of the last call of `current`."""
        self._outer: PreparedLoader | None = None
        self._found: Iteration | None = None

    def begin(self, loader: PreparedLoader) -> Iteration:
        """Record the beginning of a pass over a loader, which ends an earlier pass over the same loader."""
        for earlier in [iteration for iteration in self._open if iteration.loader is loader]:
            self.end(earlier, is_left=True)
        self._moment += 1
        if self._observer is not None:
            self._observer.note_pass()
        self._open.append(Iteration(loader, self._moment))
        return self._open[-1]

    def note_batch(self, iteration: Iteration, batch: Any) -> None:
        self._moment += 1
        iteration.latest = self._moment
        if self._observer is not None:
            self._observer.note_batch(next(iter(sample_counts(batch)), None))

    def note_training(self) -> None:
        """Record a backward or a step."""
        if self._observer is not None:
            self._observer.note_training()

    def end(self, iteration: Iteration, is_left: bool) -> None:
        """End a pass, if it is under way."""
        if iteration in self._open:
            self._open.remove(iteration)
            iteration.is_left = is_left

    def current(self) -> Iteration | None:
        """Return the pass that the loop iterates.

        Of the passes with a batch since the last call, it is the previous result, or else the first. If another pass began
        after the latest batch of that pass, it is an inner loop and wins.
        """
        if self._looked == self._moment and self._found in self._open:
            return self._found
        fresh = [iteration for iteration in self._open if iteration.latest > self._looked]
        fresh.sort(key=lambda iteration: iteration.latest)
        self._looked = self._moment
        if not fresh:
            self._found = self._open[-1] if self._open else None
            return self._found
        found = next((iteration for iteration in fresh if iteration.loader is self._outer), fresh[0])
        self._outer = found.loader
        for iteration in fresh:
            if iteration.began > found.latest:
                found = iteration
        self._found = found
        return found
