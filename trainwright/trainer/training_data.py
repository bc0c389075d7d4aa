"""Training data: this rank's share of the training loaders, loaded when it is first needed, and what its length says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainwright.data.combined import shard
from trainwright.data.share import Place
from trainwright.data.source_state import SPACING, SourceState
from trainwright.data.stateful_iterable import ONCE
from trainwright.trainer.evaluate import limited

if TYPE_CHECKING:
    from trainwright.trainer.trainer import Trainer
    from trainwright.trainer.training_run import TrainingRun


def load_training_data(run: TrainingRun) -> None:
    """Load and share out the training data, unless it is there already. Collective."""
    if run.loader is None:
        take_training_data(run, _loaded(run))


def reload_data(run: TrainingRun) -> None:
    """Call the loader hooks again at an epoch for which `reload_dataloaders_every_n_epochs` says so. Collective.

    What is made anew begins anew, whatever the state of what it takes the place of, but where a run goes on within such an
    epoch: the state is of what was made at its start.
    """
    every, epoch = run.trainer.settings.reload_dataloaders_every_n_epochs, run.state.epoch
    if every and epoch and epoch % every == 0:
        if run.source.owner is not None:
            take_training_data(run, _loaded(run))
            if not run.state.batch:
                run.state.sources = ()
        if run.validation is not None:
            run.validation.reload()


def _loaded(run: TrainingRun) -> Any:
    return run.source.load(run.trainer.settings.trains_once(run.source.owner is not None))


def begin_data(run: TrainingRun) -> None:
    """Begin an epoch's data, or what is left of it; from here on the loader tells its places. Collective."""
    reload_data(run)
    seek(run)
    run.state.places = run.state.sources = ()


def take_training_data(run: TrainingRun, loaders: Any) -> None:
    """Share out training loaders, and read the epoch's length and the validations' interval off them. Collective.

    Raises:
        ValueError: no batch, ranks with loaders of different lengths, or an interval that does not fit.
    """
    trainer, engine, settings = run.trainer, run.engine, run.trainer.settings
    if run.loader is not None:
        run.loader.close()
        trainer.open_loaders.remove(run.loader)
    run.loader = loader = shard(
        loaders,
        rank=engine.rank,
        world_size=engine.world_size,
        mode="train",
        default_combination="max_size_cycle",
        **trainer.loader_options,
        in_order=bool(trainer.given_settings.overfit_batches),
    )
    if run.pulls:  # one batch ahead, to know which is the last
        loader.read_ahead()
    trainer.open_loaders.append(loader)
    limit = settings.limit_train_batches
    trainer.train_dataloader = loaders
    length = limited(loader.length, limit)
    lengths = engine.ranks.exchange(str(loader.length), "the start of the data")
    if len(set(lengths)) > 1:
        raise ValueError(
            f"the ranks have training loaders of different lengths ({', '.join(lengths)} batches), so some would wait for "
            "ever; give every rank the same data, which is shared out then."
        )
    if length == 0 and limit != 0:
        raise ValueError(
            "the training loader has no batch (its dataset is empty, drop_last dropped all, or limit_train_batches is too "
            "small); give it data."
        )
    run.uneven = loader.uneven
    run.validate_every = _validation_interval(trainer, length) if run.validation is not None else None
    _measure(run)


def seek(run: TrainingRun) -> None:
    """Let the training data begin where the state stands, and read off what the epoch has left from there.

    Raises:
        ValueError: a place beyond the end of the data.
    """
    state, loader = run.state, run.loader
    loader.set_epoch(run.engine.seed, state.epoch, state.batch, state.places, state.sources)
    _measure(run)
    if loader.starts_beyond or (run.num_batches is not None and state.batch > run.num_batches):
        whole = limited(loader.whole_length, run.trainer.settings.limit_train_batches)
        raise ValueError(
            f"{run.trainer.resume_source} stands after batch {state.batch} of its epoch, but the training loader has "
            f"{whole} batches; go on with the data that it was saved with, or from a checkpoint of an epoch's end."
        )


def place_in_data(trainer: Trainer) -> tuple[list[Place], list[SourceState | None]]:
    """Return where the epoch's data stands, and the states of its sources there; between two epochs the states alone."""
    state, run = trainer.state, trainer.run
    if state.places or state.sources or run is None or run.loader is None:
        return list(state.places), list(state.sources)
    if state.epoch_ended:
        return [], run.loader.left(state.batch)
    return run.loader.places(state.batch) if state.batch else [], run.loader.states(state.batch)


def leave_data(run: TrainingRun) -> None:
    """Keep where the epoch that is over, or was stopped, leaves the data: the next one, or a resumed run, goes on there."""
    state = run.state
    places, sources = place_in_data(run.trainer)
    if state.epoch_ended:
        state.next_epoch()
    state.places, state.sources = places, sources


def foreseen_saves(run: TrainingRun) -> list[tuple[int, int]]:
    """Return after which batches of the epoch a checkpoint may be asked for, as far as that shows before they are read.

    Pairs of an interval and one of the batches. A stream that tells its state is asked for it there. Saves that nobody
    foresees (a signal, by time, by hand) take the state of an earlier batch.
    """
    trainer, state, window = run.trainer, run.state, run.accumulate

    def after(steps: int) -> int:
        return state.batch + steps * window

    pairs = [] if run.most_batches is None else [(ONCE, run.most_batches)]
    if trainer.max_steps > state.step:
        pairs.append((ONCE, after(trainer.max_steps - state.step)))
    saving = [each for each in trainer.checkpoint_callbacks if each.save_top_k or each.save_last]
    if not saving:
        return pairs
    pairs.append((SPACING, 0))
    if run.validate_every is not None:
        begun = 0 if trainer.settings.check_val_every_n_epoch is not None else state.total_batches - state.batch
        pairs.append((run.validate_every, -begun))
    steps = [each.every_n_train_steps for each in saving if each.every_n_train_steps > 0]
    return pairs + [(each * window, after(each - state.step % each)) for each in steps]


def _measure(run: TrainingRun) -> None:
    """Read off how many batches the epoch has: those behind the start, and what is left at this world size.

    A limit by number counts all of them; a fraction of the epoch is one of the data, whatever the batches were.
    """
    trainer, loader, limit = run.trainer, run.loader, run.trainer.settings.limit_train_batches
    length, whole = loader.length, loader.whole_length
    if isinstance(limit, float) and length is not None and whole is not None and length != whole:
        begun = length - whole  # more or fewer than an epoch has that was had at this world size from its start
        length = max(run.state.batch, (limited(whole, limit) or 0) + begun)
    else:
        length = limited(length, limit)
    trainer.num_training_batches = float("inf") if length is None else length
    run.num_batches = length if loader.exact_length is not None else None
    run.most_batches = length if limit is not None else None


def _validation_interval(trainer: Trainer, length: int | None) -> int | None:
    """Return the batches between two validations; None where they stand at an epoch's end, or come by time."""
    settings = trainer.settings
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
