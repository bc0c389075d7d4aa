"""SaveConfigCallback: stores a run's config in its folder and checkpoints. stored_config finds it again."""

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
"""Keys that may differ between a run's start and its resume."""


class SaveConfigCallback(Callback):
    """Stores a run's config in the run's folder and its checkpoints. A TrainwrightCLI adds it to its Trainer.

    Rank 0 writes the file once, before training. A run with fast_dev_run writes none. A file with another config stays as it
    is: a resumed run, or a run without loggers, writes `config-v1.yaml`. A new run in the folder of an earlier run is rejected.

    Args:
        parser: the parser of the config.
        config: the parsed config.
        config_filename: the file's name.
        overwrite: replace the file of an earlier run.
        multifile: ignored with a warning. The config is one file, as in checkpoints.
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
        if not isinstance(config_filename, str) or not config_filename or "/" in config_filename:
            raise ValueError(f"config_filename={config_filename!r} is not accepted; pass a file name without a folder.")
        if multifile:
            rank_zero_warn("save_config_kwargs has multifile=True, but one file is written. Remove it.", stacklevel=3)
        self.parser = parser
        self.config = config
        self.config_filename = config_filename
        self.overwrite = overwrite
        self.save_to_log_dir = save_to_log_dir
        self.text = dumped(parser, config)
        """The config as YAML. Its first line names the version of trainwright."""
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
        self._save(trainer, module, "fit")  # not earlier, since a rejected run leaves no folder

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        self._save(trainer, module, "validate")

    def on_test_start(self, trainer: Trainer, module: Module) -> None:
        self._save(trainer, module, "test")

    def on_predict_start(self, trainer: Trainer, module: Module) -> None:
        self._save(trainer, module, "predict")

    def save_config(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Called on rank 0 after the file is written. Override it to store the config elsewhere, such as in a logger."""

    def _save(self, trainer: Trainer, module: Module, stage: str) -> None:
        if stage != self._due:
            return
        self._due, self._is_saved = "", True
        if self.save_to_log_dir:
            trainer.engine.ranks.decide(partial(self._write, trainer), CALL)
        if trainer.is_global_zero:
            self.save_config(trainer, module, stage)

    def _refuse_another(self, trainer: Trainer) -> None:
        """Reject a new run in the folder of an earlier one. On rank 0."""
        path = next(self._paths(trainer))
        has_folder = bool(trainer.loggers) and trainer.log_dir is not None
        if self.overwrite or self._due != "fit" or self._resumes(trainer) or not has_folder:
            return
        if (earlier := _read(path)) is not None and not self._is_this(earlier, trainer):
            raise ValueError(
                f"{path} is the config of another run, whose folder this run would use. Resume that run with --ckpt_path, or "
                "choose another folder (another version or name of the logger). To replace the file, pass "
                'save_config_kwargs={"overwrite": True} to the CLI.'
            )

    def _write(self, trainer: Trainer) -> None:
        """Write the config into the run's folder if it is missing. On rank 0."""
        for path in self._paths(trainer):
            earlier = _read(path)
            if earlier is not None and self._is_this(earlier, trainer):
                return
            if earlier is None or self.overwrite:
                write_file(path, self.text.encode())
                return

    def _resumes(self, trainer: Trainer) -> bool:
        return trainer.ckpt_path is not None or self.config.get("ckpt_path") is not None

    def _is_this(self, earlier: str, trainer: Trainer) -> bool:
        return _is_same(earlier, self.text, OF_A_CALL if self._resumes(trainer) else ())

    def _paths(self, trainer: Trainer) -> Iterator[str]:
        """Yield the possible paths of the config: its name, then with a number."""
        folder = (trainer.log_dir or trainer.default_root_dir).rstrip("/")
        stem, extension = os.path.splitext(self.config_filename)
        yield f"{folder}/{self.config_filename}"
        for number in count(1):
            yield f"{folder}/{stem}-v{number}{extension}"


def stored_config(checkpoint: str | os.PathLike[str]) -> str | None:
    """Return the YAML config of the run that saved a checkpoint, or None if it did not use a TrainwrightCLI.

    A checkpoint of only the weights does not contain it, so the run's folder is searched too.

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
    """Return the newest complete checkpoint of the newest run with one below a root, in the default folders."""
    for run in (*CSVLogger(root).run_folders(), root):
        entries = find_checkpoints(f"{run.rstrip('/')}/{CHECKPOINTS}")
        if paths := [entry.path for entry in entries if takes_weights or not entry.weights_only]:
            return paths[-1]
    return None


def plain_config(text: str) -> dict[str, Any]:
    """Return the content of a stored config.

    Raises:
        CheckpointError: the text is not a config.
    """
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise CheckpointError(f"the stored config cannot be read as YAML: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"the stored config contains {a_type_of(values)}; it must contain names and values.")
    return values


def _read(path: str) -> str | None:
    files, inside = resolve(path)
    try:
        with files.open(inside) as stream:
            return stream.read().decode()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_same(earlier: str, text: str, ignored: Collection[str]) -> bool:
    try:
        pair: list[Mapping[str, Any]] = [plain_config(config) for config in (earlier, text)]
    except CheckpointError:
        return False
    first, second = ({key: value for key, value in config.items() if key not in ignored} for config in pair)
    return first == second
