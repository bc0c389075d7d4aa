"""Training data: this rank's share of the training loaders, loaded when it is first needed, and what its length says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainwright.data.combined import shard
from trainwright.data.share import Place
from trainwright.data.source_state import SourceState
from trainwright.trainer.evaluate import limited

if TYPE_CHECKING:
    from trainwright.trainer.trainer import Trainer
    from trainwright.trainer.training_run import TrainingRun


def load_training_data(run: TrainingRun) -> None:
    """Load and share out the training data, unless it is there already. Collective."""
    if run.loader is None:
        take_training_data(run, run.source.load())


def reload_data(run: TrainingRun) -> None:
    """Call the loader hooks again at an epoch for which `reload_dataloaders_every_n_epochs` says so. Collective."""
    every, epoch = run.trainer.settings.reload_dataloaders_every_n_epochs, run.state.epoch
    if every and epoch and epoch % every == 0:
        if run.source.owner is not None:
            take_training_data(run, run.source.load())
        if run.validation is not None:
            run.validation.reload()


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
    own = str(loader.length).encode()
    told = engine.agreement.exchange(own, call="the start of the data", timeout_seconds=engine.timeout_seconds)
    lengths = [text.decode() for text in told]
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
    """Return where the epoch's data stands, and the states of its sources there; nothing between two epochs."""
    state, run = trainer.state, trainer.run
    if state.batch == 0 or state.epoch_ended:
        return [], []
    if state.places or run is None or run.loader is None:
        return list(state.places), list(state.sources)
    return run.loader.places(state.batch), run.loader.states(state.batch)


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
