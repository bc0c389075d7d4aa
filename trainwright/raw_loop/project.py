"""Project: the folder of a raw loop's checkpoints and logs, and the numbered checkpoints in it."""

from __future__ import annotations

import os
import re
import weakref
from contextlib import suppress
from dataclasses import dataclass

from trainwright.arguments import NamedArguments
from trainwright.checkpoint.discovery import CheckpointEntry, find_candidates, remove_older, same_path
from trainwright.checkpoint.filesystem import resolve
from trainwright.checkpoint.lock import lock_folder
from trainwright.checkpoint.reader import StoredCheckpoint, Verify, open_checkpoint
from trainwright.checkpoint.store import BackgroundSave
from trainwright.engine.engine import Engine
from trainwright.errors import CheckpointError, a_type_of
from trainwright.loggers.files import CHECKPOINTS
from trainwright.paths import absolute
from trainwright.rank_zero import rank_zero_warn

_NUMBERED = re.compile(r"checkpoint_(\d+)", re.ASCII)


@dataclass
class ProjectConfiguration(NamedArguments):
    """Where a raw loop keeps its checkpoints and logs.

    Args:
        project_dir: the project's folder, a path or an fsspec URL.
        logging_dir: the folder of the logs, by default the project's.
        automatic_checkpoint_naming: number every checkpoint, also where `save_state` is given a path.
        total_limit: how many numbered checkpoints are kept. None keeps all. The oldest complete ones are removed once the
            new one is committed.
        iteration: the number of the next checkpoint. If the folder has that one or a later one, it is one more than the last.
        save_on_each_node: accepted on one node, where it changes nothing.

    Raises:
        ValueError, TypeError: a value is wrong.

    >>> project = tw.ProjectConfiguration("runs/digits", automatic_checkpoint_naming=True, total_limit=3)
    >>> accelerator = tw.Accelerator(project_config=project)
    >>> model, optimizer = accelerator.prepare(model, optimizer)
    >>> accelerator.save_state()
    '...runs/digits/checkpoints/checkpoint_0'
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        for name in ("project_dir", "logging_dir"):
            value = getattr(self, name)
            if not isinstance(value, (str, os.PathLike, type(None))):
                raise TypeError(f"{name}={value!r} is {a_type_of(value)}. Expected a path, a URL or None.")
            setattr(self, name, None if value is None else os.fspath(value))
        for name, least in (("total_limit", 1), ("iteration", 0)):
            value = getattr(self, name)
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
            if not is_count and not (value is None and name == "total_limit"):
                raise ValueError(f"{name}={value!r} is not accepted. Pass an integer of at least {least}.")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Use another project's folder, for the logs too unless they have another folder."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


def chosen_project(
    project_dir: str | os.PathLike[str] | None, project_config: ProjectConfiguration | None
) -> ProjectConfiguration:
    """Return the configuration that an Accelerator's arguments mean.

    Raises:
        ValueError, TypeError: they contradict each other, or lack the folder.
    """
    if project_config is None:
        return ProjectConfiguration(project_dir)  # type: ignore[arg-type] # which it converts
    if not isinstance(project_config, ProjectConfiguration):
        raise TypeError(f"project_config is {a_type_of(project_config)}. Expected a tw.ProjectConfiguration.")
    if project_dir is not None:
        given, own = os.fspath(project_dir), project_config.project_dir
        if own not in (None, given):
            raise ValueError(f"project_dir={given!r} and project_config.project_dir={own!r} were both given. Pass one.")
        project_config.set_directories(given)
    if project_config.automatic_checkpoint_naming and project_config.project_dir is None:
        raise ValueError("automatic_checkpoint_naming=True needs a folder. Pass project_dir= too.")
    return project_config


class NumberedCheckpoints:
    """The checkpoints `checkpoint_0`, `checkpoint_1`, .. in a project's folder, of which the newest are kept."""

    def __init__(self, engine: Engine, config: ProjectConfiguration) -> None:
        if config.save_on_each_node and engine.environment.num_nodes > 1:
            raise ValueError(
                "save_on_each_node=True is not supported on several nodes: all ranks write one checkpoint, to one file "
                "system. Leave it out, and give project_dir= a folder that all nodes have."
            )
        self.config = config
        self._engine = engine
        self._source = ""
        """The checkpoint that was loaded by its path, which the same command needs again."""
        self._committing: tuple[str, BackgroundSave | None] | None = None
        """The latest numbered save, and its thread, until it has committed."""
        self._is_locked = False

    @property
    def folder(self) -> str:
        """Return the folder of the numbered checkpoints (ValueError without a project)."""
        if self.config.project_dir is None:
            raise ValueError(
                "no path was given, and this Accelerator has no project: pass a path, or Accelerator(project_dir=...), whose "
                "checkpoints are numbered."
            )
        return f"{absolute(self.config.project_dir).rstrip('/')}/{CHECKPOINTS}"

    def next(self) -> tuple[str, int]:
        """Return the path of the next numbered checkpoint, and its number. Collective.

        Raises:
            ValueError: without a project.
            CheckpointError: on every rank, if the folder cannot be used, or another run holds it.
        """
        folder = self.folder
        self.finish()

        def choose() -> tuple[str, int]:
            self._lock(folder)
            return folder, max([self.config.iteration, *(number + 1 for number in _numbers(folder))])

        folder, number = self._engine.ranks.decide(choose, "the number of a checkpoint")
        return f"{folder}/checkpoint_{number}", number

    def note_save(self, path: str, number: int) -> None:
        """Record that a numbered save was made or begun. Remove the checkpoints that it replaces, once it has committed."""
        self.config.iteration = number + 1
        self._committing = path, self._engine.writer.in_flight
        self._remove_replaced()

    def finish(self) -> None:
        """Wait for a save in flight, and remove the checkpoints that it replaces. Collective.

        Raises:
            CheckpointError: on every rank, if the save failed. Then nothing is removed.
        """
        self._engine.finish_save()
        self._remove_replaced()

    def choose(self, path: str | os.PathLike[str] | None, verify: Verify) -> str | StoredCheckpoint:
        """Return the path of the checkpoint to load, which then stays as long as this process runs, or the newest one."""
        if path is None:
            return self.newest(verify)
        self._source = os.fspath(path)
        return self._source

    def newest(self, verify: Verify) -> StoredCheckpoint:
        """Return the newest complete numbered checkpoint, verified. Collective.

        Raises:
            CheckpointError: on every rank, if the folder has none, or the newest needs another version of trainwright.
        """
        self.finish()
        ranks, folder = self._engine.ranks, self.folder

        def look() -> list[tuple[str, str, bool]]:
            return [(each.path, each.damage, each.is_refused) for _, each in reversed(_entries(folder))]

        for path, damage, is_refused in ranks.decide(look, "the choice of a checkpoint"):
            if is_refused:  # it is complete, so loading an older one would lose training
                raise CheckpointError(f"load_state: the newest checkpoint is {path}. {damage}")
            if not damage:
                try:
                    checkpoint = self._engine.verified(path, verify)
                except CheckpointError as error:
                    damage = str(error)
                else:
                    self.config.iteration = int(path.rpartition("_")[2]) + 1
                    return checkpoint
            rank_zero_warn(f"load_state skips {path}, which is damaged and is left untouched: {damage}", stacklevel=3)
        raise CheckpointError(
            f"load_state: no complete checkpoint of save_state was found in {folder}. Save one first, or pass a path."
        )

    def _lock(self, folder: str) -> None:
        """Lock the folder, on rank 0, until this process ends or drops the Accelerator."""
        if not self._is_locked:
            lock = lock_folder(folder)
            # It also runs at the interpreter's exit.
            weakref.finalize(self, lock.release)
            self._is_locked = True

    def _remove_replaced(self) -> None:
        """Remove the oldest complete checkpoints beyond the limit, on rank 0, if the latest save has committed."""
        if self._committing is None:
            return
        path, save = self._committing
        # Without waiting: the next save and the end look again.
        if save is not None and not save.wait(0):
            return
        self._committing = None
        limit = self.config.total_limit
        if limit is None or self._engine.rank != 0 or (save is not None and not save.is_committed):
            return
        entries = [each.path for _, each in _entries(os.path.dirname(path)) if not each.damage]
        if len(entries) > limit:
            # A checkpoint with missing files must not count towards the limit.
            whole = [each for each in entries if _is_whole(each)]
            remove_older([each for each in whole[:-limit] if not same_path(each, self._source)], path)


def _numbers(folder: str) -> list[int]:
    """Return the numbers that are taken, by complete checkpoints or by anything else."""
    files, inside = resolve(folder)
    with suppress(FileNotFoundError):
        return [int(match[1]) for name in files.listing(inside) if (match := _NUMBERED.fullmatch(name))]
    return []


def _entries(folder: str) -> list[tuple[int, CheckpointEntry]]:
    """Return the numbered checkpoints in the order of their numbers, the damaged ones too."""
    named = ((_NUMBERED.fullmatch(each.path.rpartition("/")[2]), each) for each in find_candidates(folder))
    return sorted(((int(match[1]), each) for match, each in named if match), key=lambda pair: pair[0])


def _is_whole(path: str) -> bool:
    """Return whether the files of a checkpoint are there in their sizes."""
    try:
        open_checkpoint(path, "size")
    except CheckpointError:
        return False
    return True
