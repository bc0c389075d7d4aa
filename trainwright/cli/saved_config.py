"""SaveConfigCallback: a run's config in its folder and in its checkpoints; and how a checkpoint's config is found again."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from trainwright.callbacks.base import Callback
from trainwright.checkpoint.discovery import find_checkpoints
from trainwright.checkpoint.filesystem import resolve
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.cli.argument_parser import dumped
from trainwright.errors import CheckpointError, a_type_of
from trainwright.loggers import CSVLogger
from trainwright.loggers.files import CHECKPOINTS, write_file
from trainwright.module import Module
from trainwright.rank_zero import rank_zero_warn
from trainwright.trainer.trainer import Trainer

CONFIG_NAME = "config.yaml"
STATE_KEY = "SaveConfigCallback"
CALL = "the save of the config"
OF_A_CALL = ("ckpt_path", "seed_everything")
"""What may differ between a run's start and its resumption."""


class SaveConfigCallback(Callback):
    """Stores a run's config in the run's folder and in its checkpoints; a TrainwrightCLI adds it to its Trainer.

    Rank 0 writes the file once, before anything is trained; a run with fast_dev_run writes none. A file with another config
    stays as it is: a resumed run, and one without loggers, writes `config-v1.yaml`; a new run in the
    folder of an earlier one is refused.

    Args:
        parser: the parser of the config.
        config: what was parsed.
        config_filename: the file's name.
        overwrite: replace the file of an earlier run.
        multifile: accepted, but the config is one file, as checkpoints hold it as one.
        save_to_log_dir: False if only your `save_config` writes it.
    """

    def __init__(
        self,
        parser: ArgumentParser,
        config: Namespace,
        config_filename: str = CONFIG_NAME,
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        if (
            not isinstance(config_filename, str)
            or not config_filename
            or os.path.basename(config_filename) != config_filename
        ):
            raise ValueError(
                f"config_filename={config_filename!r} is not accepted; give the name of a file, without a folder."
            )
        if multifile:
            rank_zero_warn(
                "save_config_kwargs has multifile=True, but the config is written as one file; leave it out.",
                stacklevel=3,
            )
        self.parser = parser
        self.config = config
        self.config_filename = config_filename
        self.overwrite = overwrite
        self.save_to_log_dir = save_to_log_dir
        self.text = dumped(parser, config)
        """The config as YAML; its first line names the version of trainwright."""
        self._due = ""
        """The stage whose start writes the config."""
        self._is_saved = False

    @property
    def state_key(self) -> str:
        return STATE_KEY

    def state_dict(self) -> dict[str, Any]:
        return {"config": self.text}

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._due = "" if self._is_saved or trainer.fast_dev_run else stage
        if self._due and self.save_to_log_dir:
            trainer.engine.ranks.decide(partial(self._refuse_another, trainer), CALL)

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self._save(trainer, module, "fit")  # now, since a run that is refused before leaves no folder

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        self._save(trainer, module, "validate")

    def on_test_start(self, trainer: Trainer, module: Module) -> None:
        self._save(trainer, module, "test")

    def on_predict_start(self, trainer: Trainer, module: Module) -> None:
        self._save(trainer, module, "predict")

    def save_config(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Called on rank 0 once the file is written; override it to store the config elsewhere, such as in a logger."""

    def _save(self, trainer: Trainer, module: Module, stage: str) -> None:
        if stage != self._due:
            return
        self._due, self._is_saved = "", True
        if self.save_to_log_dir:
            trainer.engine.ranks.decide(partial(self._write, trainer), CALL)
        if trainer.is_global_zero:
            self.save_config(trainer, module, stage)

    def _refuse_another(self, trainer: Trainer) -> None:
        """Refuse a new run in the folder of an earlier one. Rank 0's."""
        path = next(self._paths(trainer))
        has_folder = bool(trainer.loggers) and trainer.log_dir is not None
        if self.overwrite or self._due != "fit" or self._resumes(trainer) or not has_folder:
            return
        if (earlier := _read(path)) is not None and not self._is_this(earlier, trainer):
            raise ValueError(
                f"{path} is the config of another run, whose folder this one would write to. Resume that run with --ckpt_path, "
                "or give this one another folder (another version or name of the logger). To replace the file, pass "
                'save_config_kwargs={"overwrite": True} to the CLI.'
            )

    def _write(self, trainer: Trainer) -> None:
        """Write the config into the run's folder, unless it is there. Rank 0's."""
        for path in self._paths(trainer):
            earlier = _read(path)
            if earlier is not None and self._is_this(earlier, trainer):
                return
            if earlier is None or self.overwrite:
                write_file(path, self.text.encode())
                return

    def _resumes(self, trainer: Trainer) -> bool:
        """Return whether the run continues another one, or would if there were any."""
        return trainer.ckpt_path is not None or self.config.get("ckpt_path") is not None

    def _is_this(self, earlier: str, trainer: Trainer) -> bool:
        return _is_same(earlier, self.text, OF_A_CALL if self._resumes(trainer) else ())

    def _paths(self, trainer: Trainer) -> Iterator[str]:
        """Yield where the config may be in the run's folder: its name, then the same with a number."""
        folder = (trainer.log_dir or trainer.default_root_dir).rstrip("/")
        stem, extension = os.path.splitext(self.config_filename)
        yield f"{folder}/{self.config_filename}"
        for number in count(1):
            yield f"{folder}/{stem}-v{number}{extension}"


def stored_config(checkpoint: str | os.PathLike[str]) -> str | None:
    """Return the config, as YAML, of the run that has saved a checkpoint; None if it was none of a TrainwrightCLI.

    A checkpoint of the weights only does not hold it, so it is looked for in the run's folder.

    Raises:
        CheckpointError: it is not a checkpoint, or is damaged.
    """
    opened = open_checkpoint(os.fspath(checkpoint), "size")
    callbacks = opened.run_state().get("callbacks")
    state = callbacks.get(STATE_KEY) if isinstance(callbacks, dict) else None
    if isinstance(state, dict) and isinstance(state.get("config"), str):
        return str(state["config"])
    run = os.path.dirname(os.path.dirname(opened.path.rstrip("/")))
    return _read(f"{run}/{CONFIG_NAME}")


def newest_checkpoint(root: str, takes_weights: bool) -> str | None:
    """Return the newest complete checkpoint of the newest run below a root that has any, if its folders are the defaults."""
    for run in (*CSVLogger(root).run_folders(), root):
        found = find_checkpoints(f"{run.rstrip('/')}/{CHECKPOINTS}")
        if paths := [each.path for each in found if takes_weights or not each.weights_only]:
            return paths[-1]
    return None


def plain_config(text: str) -> dict[str, Any]:
    """Return the content of a stored config.

    Raises:
        CheckpointError: it is not one.
    """
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise CheckpointError(f"the stored config cannot be read as YAML: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"the stored config holds {a_type_of(values)}; it must hold names and values.")
    return values


def _read(path: str) -> str | None:
    files, inside = resolve(path)
    try:
        with files.open(inside) as stream:
            return stream.read().decode()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_same(earlier: str, text: str, ignored: Collection[str]) -> bool:
    """Return whether two configs have the same content."""
    try:
        pair: list[Mapping[str, Any]] = [plain_config(each) for each in (earlier, text)]
    except CheckpointError:
        return False
    first, second = ({key: value for key, value in each.items() if key not in ignored} for each in pair)
    return first == second
