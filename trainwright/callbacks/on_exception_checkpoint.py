"""OnExceptionCheckpoint: saves the run that an exception ends."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from trainwright.arguments import refuses_unknown
from trainwright.callbacks.base import Checkpoint
from trainwright.callbacks.checkpoint_files import save_failed
from trainwright.data.seeding import rng_state
from trainwright.paths import absolute

if TYPE_CHECKING:
    from trainwright.module import Module
    from trainwright.trainer.trainer import Trainer


class OnExceptionCheckpoint(Checkpoint):
    """Saves the run as `dirpath/filename.ckpt` when an exception ends a fit, if it can be resumed exactly from there.

    If it cannot (several processes, gradients half computed), a line on standard error says why; the checkpoints of a
    ModelCheckpoint stay. A name that is taken gets -v1, -v2. A first Ctrl-C or another signal raises nothing in the run:
    ModelCheckpoint saves what it stops.

    Args:
        dirpath: where to save: a path (made absolute here) or an fsspec URL.
        filename: the name without its ending.

    Raises:
        ValueError: filename is empty.

    >>> def fail(trainer, module):
    ...     raise RuntimeError("the disk is full")
    >>> callbacks = [tw.OnExceptionCheckpoint("saved"), tw.LambdaCallback(on_train_epoch_start=fail)]
    >>> tw.Trainer(callbacks=callbacks, max_epochs=1, enable_model_summary=False).fit(module, loader)
    Traceback (most recent call last):
        ...
    RuntimeError: the disk is full
    >>> tw.Trainer(max_epochs=1, enable_model_summary=False).fit(module, loader, ckpt_path="saved/on_exception.ckpt")
    resuming from saved/on_exception.ckpt...
    """

    FILE_EXTENSION = ".ckpt"
    reads_outputs = False

    @refuses_unknown
    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "on_exception") -> None:
        if not filename:
            raise ValueError("filename='' is empty; pass a name, such as 'on_exception'.")
        self.dirpath, self.filename = absolute(dirpath).rstrip("/"), filename
        self._is_begun = False
        self._generators: dict[str, Any] = {}

    @property
    def ckpt_path(self) -> str:
        """Return the path of the checkpoint."""
        return f"{self.dirpath}/{self.filename}{self.FILE_EXTENSION}"

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._is_begun, self._generators = False, {}

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self._is_begun = not trainer.fast_dev_run

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        if self._is_begun:
            self._generators = rng_state()  # a resumed run repeats the whole validation

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        self._generators = {}

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        if self._is_begun:
            stem = f"{self.dirpath}/{self.filename}"
            save_failed("OnExceptionCheckpoint", trainer, stem, self.FILE_EXTENSION, False, self._generators)
