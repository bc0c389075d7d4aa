"""Training data: this rank's shard of the training loaders, loaded when first needed, and what follows from its length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from trainwright.data.combined import ShardedCombination, shard
from trainwright.data.loader_state import NOT_BEGUN, LoaderState
from trainwright.data.loaders import ShardedLoader
from trainwright.data.source_state import SPACING
from trainwright.data.stateful_iterable import ONCE
from trainwright.engine.engine import Engine
from trainwright.trainer.settings import Settings
from trainwright.trainer.sources import LoaderSource
from trainwright.trainer.stage import limited
from trainwright.trainer.state import TrainerState

if TYPE_CHECKING:
    from trainwright.callbacks.model_checkpoint import ModelCheckpoint


class TrainData:
    """The training data of one fit. Its loader owns the position; epoch and batch are the run state's.

    Args:
        source: where the loaders come from.
        options: keyword arguments of `shard`.
        validates: whether the run validates, so that the interval between validations has to fit the data.
        pulls: whether training_step pulls its batches, which are then read one ahead to know the last.
        note: called with the user's loaders and this rank's batches in an epoch, whenever they change.
    """

    def __init__(
        self,
        source: LoaderSource,
        engine: Engine,
        settings: Settings,
        state: TrainerState,
        options: dict[str, bool],
        *,
        validates: bool,
        pulls: bool,
        note: Callable[[Any, int | float], None],
    ) -> None:
        self._source, self._engine, self._settings, self._state = source, engine, settings, state
        self._options, self._note = options, note
        self._validates, self._pulls = validates, pulls
        self._loader: ShardedLoader | ShardedCombination | None = None
        self._users: Any = None
        self._loaded = NOT_BEGUN
        """The position that was loaded before there was a loader."""
        self.num_batches: int | None = None
        """Batches of this rank in an epoch, within the limit; None if only the loader's end shows it."""
        self.most_batches: int | None = None
        """The limit of the batches; None without one."""
        self.validate_every: int | None = None
        """Batches between two validations; None to validate at an epoch's end, or by time."""
        self.uneven: Mapping[int, list[int]] = {}
        """The loader's uneven rounds (StatefulLoader.uneven)."""

    @property
    def loader(self) -> ShardedLoader | ShardedCombination:
        """Return this rank's shard."""
        assert self._loader is not None, "the training data is not loaded"
        return self._loader

    def load(self) -> None:
        """Load and shard the data, unless that is done. Collective."""
        if self._loader is None:
            self._load(self._loaded)

    @property
    def is_to_reload(self) -> bool:
        """Return whether `reload_dataloaders_every_n_epochs` asks for new loaders in this epoch."""
        every, epoch = self._settings.reload_dataloaders_every_n_epochs, self._state.epoch
        return bool(every and epoch and epoch % every == 0)

    def reload(self) -> None:
        """Call the loader hook again, if there is one. Collective.

        New loaders start from the beginning, whatever the old ones left. Only a run that resumes within such an epoch keeps the
        loaded position: it belongs to loaders that were new at the epoch's start.
        """
        if self._source.owner is not None:
            self._load(self.state_dict() if self._state.batch else NOT_BEGUN)

    def _load(self, position: LoaderState) -> None:
        """Make and shard the loaders, and find the epoch's length and the interval between validations.

        Raises:
            ValueError: no batch, different lengths across ranks, or an interval that does not fit.
        """
        settings, engine = self._settings, self._engine
        self._users = self._source.load(settings.trains_once(self._source.owner is not None))
        self.close()
        self._loader = loader = shard(
            self._users,
            rank=engine.rank,
            world_size=engine.world_size,
            mode="train",
            **self._options,
        )
        loader.load_state_dict(position)
        self.uneven = loader.uneven
        if self._pulls:
            loader.read_ahead()
        length, limit = limited(loader.length, settings.limit_train_batches), settings.limit_train_batches
        lengths = engine.ranks.exchange(str(loader.length), "the start of the data")
        if len(set(lengths)) > 1:
            raise ValueError(
                f"The training loaders have different lengths across ranks ({', '.join(lengths)} batches), which would "
                "deadlock. Pass the same data on every rank; it is sharded for you."
            )
        if length == 0 and limit != 0:
            raise ValueError(
                "the training loader has no batch (its dataset is empty, drop_last dropped all, or limit_train_batches is too "
                "small); give it data."
            )
        self.validate_every = _validation_interval(settings, length) if self._validates else None
        self._measure()

    def close(self) -> None:
        """End the workers that still run."""
        if self._loader is not None:
            self._loader.close()

    def state_dict(self) -> LoaderState:
        """Return the position in the epoch's data; between two epochs, where the last one ended."""
        if self._loader is None:
            return self._loaded
        return self._loader.state_dict(self._state.batch, is_over=self._state.epoch_ended)

    def load_state_dict(self, position: LoaderState) -> None:
        """Let the next epoch begin at a position, also of loaders that do not exist yet."""
        self._loaded = position
        if self._loader is not None:
            self._loader.load_state_dict(position)

    def leave(self) -> None:
        """Keep the position where an epoch ended or was stopped, for the next epoch or a later save."""
        self.load_state_dict(self.state_dict())

    def seek(self, origin: str | None) -> None:
        """Begin the epoch's data at the loaded position, and find how many batches are left.

        Raises:
            ValueError: the position, from the checkpoint `origin`, is beyond the end of the data.
        """
        state, loader = self._state, self.loader
        loader.set_epoch(self._engine.seed, state.epoch, state.batch)
        self._measure()
        if loader.starts_beyond or (self.num_batches is not None and state.batch > self.num_batches):
            whole = limited(loader.whole_length, self._settings.limit_train_batches)
            raise ValueError(
                f"{origin} was saved after batch {state.batch} of its epoch, but the training loader has {whole} batches; "
                "resume with the data that it was saved with, or from a checkpoint of an epoch's end."
            )

    def plan_states(self, window: int, callbacks: Iterable[ModelCheckpoint]) -> None:
        """Tell the loader after which batches a checkpoint can be foreseen, so that it takes its source's state there.

        The plan is pairs of an interval and one such batch. A save that cannot be foreseen (on a signal, by time, by hand)
        takes the state of an earlier batch.
        """
        settings, state = self._settings, self._state

        def after(steps: int) -> int:
            return state.batch + steps * window

        pairs = [] if self.most_batches is None else [(ONCE, self.most_batches)]
        if settings.max_steps > state.step:
            pairs.append((ONCE, after(settings.max_steps - state.step)))
        saving = [each for each in callbacks if each.save_top_k or each.save_last]
        if saving:
            pairs.append((SPACING, 0))
            if self.validate_every is not None:
                begun = 0 if settings.check_val_every_n_epoch is not None else state.total_batches - state.batch
                pairs.append((self.validate_every, -begun))
            steps = [each.every_n_train_steps for each in saving if each.every_n_train_steps > 0]
            pairs += [(each * window, after(each - state.step % each)) for each in steps]
        self.loader.plan_states(pairs)

    def _measure(self) -> None:
        """Find how many batches the epoch has: those before the start, and what is left at this world size.

        A limit that is a number counts all of them; a limit that is a fraction is one of the data, at any world size.
        """
        loader, limit = self.loader, self._settings.limit_train_batches
        length, whole = loader.length, loader.whole_length
        if isinstance(limit, float) and length is not None and whole is not None and length != whole:
            # A run that changed its world size within the epoch has more or fewer batches than one that did not.
            length = max(self._state.batch, (limited(whole, limit) or 0) + length - whole)
        else:
            length = limited(length, limit)
        self.num_batches = length if loader.exact_length is not None else None
        self.most_batches = length if limit is not None else None
        self._note(self._users, float("inf") if length is None else length)


def _validation_interval(settings: Settings, length: int | None) -> int | None:
    """Return the batches between two validations; None to validate at an epoch's end, or by time."""
    interval = settings.val_check_interval
    if settings.validation_seconds is not None or interval is None or (interval == 1.0 and isinstance(interval, float)):
        return None
    assert isinstance(interval, (int, float))
    if isinstance(interval, int):
        if length is not None and interval > length and settings.check_val_every_n_epoch is not None:
            raise ValueError(
                f"val_check_interval={interval} is more than the {length} training batches of an epoch; pass at most that "
                "many, a fraction (float), or check_val_every_n_epoch=None to count batches across epochs."
            )
        return interval
    if length is None:
        raise ValueError(
            f"val_check_interval={interval} is a fraction of the epoch, but the training loader has no length; pass a number "
            "of batches (int)."
        )
    return max(1, int(length * interval))
