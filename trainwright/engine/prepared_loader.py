"""A prepared loader: this rank's share of a user's loader, for loops that iterate it themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainwright.data.loaders import with_last
from trainwright.data.source_state import SPACING
from trainwright.data.transfer import to_device
from trainwright.engine.engine import Engine
from trainwright.engine.iterations import Iterations


class PreparedLoader:
    """This rank's share of a loader, batch by batch on the device; each iteration is the next epoch.

    Every rank has equally many batches. Of the last ones some may be smaller, and a rank that is left without a sample works on
    another's: `last_sizes` tells how many samples each rank has. What else the loader has (`dataset`, `batch_size`,
    `sampler`), this one has: it is that of the whole loader, as it was given.

    Args:
        engine: whose share, and which device.
        loader: the user's own, to be had back as `.loader`.
        iterations: told of each pass over it.
    """

    def __init__(self, engine: Engine, loader: Any, iterations: Iterations) -> None:
        self.loader = loader
        self.epoch = 0
        """The number of the epoch that the next batch belongs to."""
        self.is_at_end = False
        """Whether the batch at hand is the epoch's last."""
        self._sharded = engine.prepare_loader(loader, "train")
        self._sharded.plan_states([(SPACING, 0)])  # nobody knows when `save_state` will be called
        self._engine = engine
        self._iterations = iterations
        self._batch = 0
        self._is_begun = False

    def __getattr__(self, name: str) -> Any:
        """Return what the loader has."""
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        if self._is_begun:  # the epoch before was left in its middle
            self._leave_epoch()
        self._is_begun, self.is_at_end = True, False
        self._engine.refresh_trainable(if_changed=True)
        device = self._engine.device
        self._sharded.set_epoch(self._engine.seed, self.epoch, self._batch)
        length, on_host = self._sharded.exact_length, device.type == "cpu"
        iteration, is_left = self._iterations.begin(self), True
        try:
            for batch, is_last in with_last(self._sharded, self._batch, length):
                self.is_at_end = is_last
                self._batch += 1
                self._iterations.give(iteration)
                yield batch if on_host else to_device(batch, device)
            self._leave_epoch()
            self._is_begun = self.is_at_end = is_left = False
        finally:
            self._iterations.end(iteration, is_left)

    def _leave_epoch(self) -> None:
        """Let the next epoch follow on this one, as far as it was read."""
        self._sharded.load_state_dict(self._sharded.state_dict(self._batch, is_over=True))
        self.epoch, self._batch = self.epoch + 1, 0

    def __len__(self) -> int:
        return len(self._sharded)

    @property
    def batches_left(self) -> int | None:
        """Return how many batches the epoch still has, the one at hand among them; None without a known length."""
        length = self._sharded.exact_length
        return None if length is None else length - self._batch + 1

    @property
    def last_sizes(self) -> list[int] | None:
        """Return, per rank, how many samples of the batch at hand are its own; None where all are, and equally many."""
        return self._sharded.uneven.get(self._batch - 1)

    @property
    def weight(self) -> float:
        """Return this rank's part in the round of the batch at hand, beside an equal part."""
        return self._sharded.weight_at(self._batch - 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch: "sources" as this rank sees them, the rest the same on every rank."""
        is_over = self.is_at_end and self._batch > 0
        epoch, batch = (self.epoch + 1, 0) if is_over else (self.epoch, self._batch)
        return {"epoch": epoch, "batch": batch, **self._sharded.state_dict(self._batch, is_over=is_over)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration begin at a position that was saved at any world size."""
        self.epoch, self._batch = int(state["epoch"]), int(state["batch"])
        self._is_begun = self.is_at_end = False
        self._sharded.load_state_dict({"places": state.get("places", ()), "sources": state.get("sources", ())})
