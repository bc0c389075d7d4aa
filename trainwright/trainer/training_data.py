"""Training data: this rank's shard of the training loaders, loaded when first needed, and the lengths that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from trainwright.data.combined import ShardedCombination, shard
from trainwright.data.first_draws import compare_first_draws
from trainwright.data.loader_state import NOT_BEGUN, LoaderState
from trainwright.data.loaders import ShardedLoader
from trainwright.data.source_state import SPACING
from trainwright.data.stateful_iterable import ONCE
from trainwright.engine.engine import Engine
from trainwright.trainer.run_position import Position
from trainwright.trainer.settings import Settings
from trainwright.trainer.sources import LoaderSource, limited

if TYPE_CHECKING:
    from trainwright.callbacks.model_checkpoint import ModelCheckpoint


class TrainData:
    """The training data of one fit. Its loader owns the position in the data, the run's state the epoch and the batch.

    `options` go to `shard`. `note` is called with the user's loaders and this rank's batches in an epoch, whenever they change.
    """

    def __init__(
        self,
        source: LoaderSource,
        engine: Engine,
        settings: Settings,
        state: Position,
        options: dict[str, bool],
        *,
        note: Callable[[Any, int | float], None],
    ) -> None:
        self._source, self._engine, self._settings, self.state = source, engine, settings, state
        self._options, self._note, self._validates = options, note, False
        self._loader: ShardedLoader | ShardedCombination | None = None
        self._users: Any = None
        self._loaded = NOT_BEGUN
        """The position that was loaded before the loader was made."""
        self.num_batches: int | None = None
        """Batches of this rank in an epoch, within the limit. None if unknown until the loader ends."""
        self.most_batches: int | None = None
        self.validate_every: int | None = None
        """Batches between two validations. None to validate at an epoch's end, or by time."""

    @property
    def loader(self) -> ShardedLoader | ShardedCombination:
        assert self._loader is not None, "the training data is not loaded"
        return self._loader

    def load(self) -> None:
        """Load and shard the data, if not loaded yet. Collective."""
        if self._loader is None:
            self._load(self._loaded)

    def plan_validation(self) -> None:
        """Compute the interval between validations too (ValueError if it does not fit), at once if the data is loaded."""
        self._validates = True
        if self._loader is not None:
            length = limited(self._loader.length, self._settings.limit_train_batches)
            self.validate_every = _validation_interval(self._settings, length)

    def reload_if_due(self) -> bool:
        """Call the loader hook, if there is one, in every n-th epoch; return whether it is one. Collective.

        New loaders start from the beginning, except in a run that resumes within such an epoch: its position belongs to
        loaders that were new at the epoch's start.
        """
        every, epoch = self._settings.reload_dataloaders_every_n_epochs, self.state.epoch
        is_due = bool(every and epoch and epoch % every == 0)
        if is_due and self._source.owner is not None:
            self._load(self.state_dict() if self.state.batch else NOT_BEGUN)  # a batch is done: a resumed epoch
        return is_due

    def _load(self, position: LoaderState) -> None:
        """Make and shard the loaders, and compute the epoch's length and the interval between validations.

        Raises:
            ValueError: no batches, different lengths across ranks, or an interval that does not fit.
        """
        settings, engine = self._settings, self._engine
        self._users = self._source.load()
        self.close()  # the old workers end before new ones start
        self._loader = loader = self._shard("train")
        loader.load_state_dict(position)
        length, limit = limited(loader.length, settings.limit_train_batches), settings.limit_train_batches
        # Compared before the first batch: a rank that ended early would leave the others waiting in a collective.
        lengths = engine.ranks.exchange(str(loader.length), "the start of the data")
        if len(set(lengths)) > 1:
            raise ValueError(
                f"The training loaders have different lengths across ranks ({', '.join(lengths)} batches), which would "
                "deadlock. Pass the same data on every rank, which is sharded for you, or separate loaders of equal length."
            )
        if length == 0 and limit != 0:
            raise ValueError(
                "the training loader has no batches (its dataset is empty, drop_last dropped all, or limit_train_batches is "
                "too small). Give it data."
            )
        compare_first_draws(loader, engine.ranks, "training")
        if self._validates:
            self.plan_validation()
        self._measure()

    def again(self) -> ShardedLoader | ShardedCombination:
        """Return another shard of the same loaders, at the start of the next epoch's order, as evaluations shard them."""
        loader = self._shard("padded")
        loader.set_epoch(self._engine.seed, self.state.epoch)
        return loader

    def _shard(self, mode: Any) -> ShardedLoader | ShardedCombination:
        engine = self._engine
        return shard(self._users, rank=engine.data_rank, world_size=engine.num_data_ranks, mode=mode, **self._options)

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()

    def state_dict(self) -> LoaderState:
        """Return the position in the epoch's data, between two epochs the end of the last one."""
        if self._loader is None:
            return self._loaded
        return self._loader.state_dict(self.state.batch, is_over=self.state.epoch_ended)

    def load_state_dict(self, position: LoaderState) -> None:
        """Set the position at which the next epoch begins, even before the loaders are made."""
        self._loaded = position
        if self._loader is not None:
            self._loader.load_state_dict(position)

    def seek(self, origin: str | None) -> None:
        """Begin the epoch's data at the loaded position.

        Raises:
            ValueError: the position, of the checkpoint `origin`, is beyond the end of the data.
        """
        state, loader = self.state, self.loader
        loader.set_epoch(self._engine.seed, state.epoch, state.batch)
        # Again: an epoch that resumes at a different world size has another length.
        self._measure()
        if loader.starts_beyond or (self.num_batches is not None and state.batch > self.num_batches):
            whole = limited(loader.whole_length, self._settings.limit_train_batches)
            raise ValueError(
                f"{origin} was saved after batch {state.batch} of its epoch, but the training loader has {whole} batches. "
                "Resume with the data that it was saved with, or from a checkpoint of an epoch's end."
            )

    def plan_states(self, window: int, callbacks: Iterable[ModelCheckpoint]) -> None:
        """Plan after which batches the loader keeps its source's state, for the checkpoints that can be foreseen there.

        The plan is pairs of an interval and one such batch. An unforeseen save (on a signal, by time, by hand) takes the
        state of an earlier batch.
        """
        settings, state = self._settings, self.state
        # A limit ends the epoch within the source's pass, and the next epoch continues from there.
        pairs = [] if self.most_batches is None else [(ONCE, self.most_batches)]
        if settings.max_steps > state.step:
            pairs.append((ONCE, state.batch + (settings.max_steps - state.step) * window))
        saving = [each for each in callbacks if each.save_top_k or each.save_last]
        if saving:
            pairs.append((SPACING, 0))
            if self.validate_every is not None:
                # An interval that counts across epochs began that many batches before this epoch.
                begun = 0 if settings.check_val_every_n_epoch is not None else state.total_batches - state.batch
                pairs.append((self.validate_every, -begun))
            steps = [each.every_n_train_steps for each in saving if each.every_n_train_steps > 0]
            pairs += [(each * window, state.batch + (each - state.step % each) * window) for each in steps]
        self.loader.plan_states(pairs)

    def _measure(self) -> None:
        """Compute the epoch's number of batches: before the start, and the rest at this world size.

        An int limit counts all batches. A float limit is a fraction of the data, at any world size.
        """
        loader, limit = self.loader, self._settings.limit_train_batches
        length, whole = loader.length, loader.whole_length
        if isinstance(limit, float) and length is not None and whole is not None and length != whole:
            # A run whose world size changed within the epoch has more or fewer batches than one whose size did not.
            length = max(self.state.batch, (limited(whole, limit) or 0) + length - whole)
        else:
            length = limited(length, limit)
        self.num_batches = length if loader.exact_length is not None else None
        self.most_batches = length if limit is not None else None
        self._note(self._users, float("inf") if length is None else length)


def _validation_interval(settings: Settings, length: int | None) -> int | None:
    """Return the batches between two validations. None to validate at an epoch's end, or by time."""
    interval = settings.val_check_interval
    if settings.validation_seconds is not None or interval is None or (interval == 1.0 and isinstance(interval, float)):
        return None
    assert isinstance(interval, (int, float))
    if isinstance(interval, int):
        if length is not None and interval > length and settings.check_val_every_n_epoch is not None:
            raise ValueError(
                f"val_check_interval={interval} is more than the {length} training batches of an epoch. Pass at most that "
                "many, a fraction (float), or check_val_every_n_epoch=None to count batches across epochs."
            )
        return interval
    if length is None:
        raise ValueError(
            f"val_check_interval={interval} is a fraction of the epoch, but the training loader has no length. Pass a number "
            "of batches (int)."
        )
    return max(1, int(length * interval))  # a fraction of a few batches is one batch at least
