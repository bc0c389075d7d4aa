"""OnExceptionCheckpoint: saves the run that an exception ends."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from trainwright.arguments import refuses_unknown
from trainwright.callbacks.base import Checkpoint
from trainwright.callbacks.checkpoint_files import save_failed_run
from trainwright.paths import absolute

if TYPE_CHECKING:
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer


class OnExceptionCheckpoint(Checkpoint):
    """Saves the run as `dirpath/filename.ckpt` when an exception ends a fit, if it can be resumed exactly from there.

    It can on one process and under ddp: while a batch is loaded, and in a training batch unless an optimizer has stepped in it
    or an accumulation window is open. The state before the batch is saved, and a resumed run trains the batch again. The RNG
    state, the logged values of the batch and its changes of buffers are not restored. A line on standard error names them.
    On one process it also can in a validation within an epoch, and in the hooks of an epoch's start. Elsewhere that line says
    why not, and names the last complete checkpoint. A checkpoint of the same name is replaced once the new one is complete;
    anything else stays, and the new one gets -v1. A first Ctrl-C raises nothing in the run: ModelCheckpoint saves it.

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
        self._saved = ""
        self._has_begun = False

    @property
    def ckpt_path(self) -> str:
        """Return the path of the latest checkpoint, or before the first one the path that it will get."""
        return self._saved or f"{self.dirpath}/{self.filename}{self.FILE_EXTENSION}"

    def setup(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        self._has_begun = False

    def on_train_start(self, trainer: AnyTrainer, module: Module) -> None:
        self._has_begun = not trainer.fast_dev_run

    def on_exception(self, trainer: AnyTrainer, module: Module, exception: BaseException) -> None:
        if self._has_begun:
            stem = f"{self.dirpath}/{self.filename}"
            saved = save_failed_run("OnExceptionCheckpoint", trainer, stem, self.FILE_EXTENSION, replaces=True)
            self._saved = saved or self._saved
