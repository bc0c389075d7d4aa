"""RayReport: reports metrics and checkpoints to Ray Train."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from trainwright.callbacks.base import Callback
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.distributed.ray_worker import ray_storage, ray_train
from trainwright.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import TrainerProtocol
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer


class RayReport(Callback):
    """Reports metrics and checkpoints to Ray Train. A Trainer in a worker of Ray Train adds it.

    It calls `ray.train.report` after every epoch, after every validation within an epoch, and after every save of a
    ModelCheckpoint, with the metrics as floats and with "epoch" and "step". A complete checkpoint is reported where it is, and
    not copied. Outside of Ray's storage it is not reported, and a warning says so. A save in the background is reported at the
    next save, or at the end. In a process that is no worker of Ray Train, nothing is reported.

    Raises:
        ImportError: Ray is not installed.

    >>> def train(config):  # for ray.train.torch.TorchTrainer
    ...     trainer = tw.Trainer(max_epochs=2, callbacks=[tw.RayReport()])
    ...     trainer.fit(module, loader, val_loader, ckpt_path="auto")
    """

    priority = -30  # after the checkpoints
    reads_outputs = False

    def __init__(self) -> None:
        if find_spec("ray") is None:
            raise ImportError('RayReport needs Ray, which is not installed: pip install "trainwright[ray]".')
        self._is_due = self._has_warned = False
        self._reported: dict[int, tuple[str, int]] = {}
        """The latest reported save of every ModelCheckpoint, by its number among the callbacks."""

    def setup(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        self._is_due = self._has_warned = False
        self._reported = {}

    def on_validation_end(self, trainer: AnyTrainer, module: Module) -> None:
        self._is_due = trainer.state.progress.is_mid_epoch_validation  # the epoch's end reports any other

    def on_train_epoch_end(self, trainer: AnyTrainer, module: Module) -> None:
        self._is_due = True

    def on_save_point(self, trainer: AnyTrainer, module: Module) -> None:
        """Report what an earlier hook has found due, and the checkpoints that are complete since. Collective."""
        paths = list(self._new_checkpoints(trainer))
        if self._is_due or paths:
            self._is_due = False
            for path in paths or [""]:
                self._report(trainer, path)

    def on_fit_end(self, trainer: AnyTrainer, module: Module) -> None:
        """Report the save of the run's end, and an epoch that was stopped. Collective."""
        self.on_save_point(trainer, module)

    def _new_checkpoints(self, trainer: TrainerProtocol) -> list[str]:
        paths = []
        for number, callback in enumerate(trainer.callbacks):
            if isinstance(callback, ModelCheckpoint) and callback.complete != self._reported.get(number, ("", -1)):
                self._reported[number] = callback.complete
                paths.append(callback.complete[0])
        return paths

    def _report(self, trainer: TrainerProtocol, path: str) -> None:
        train = ray_train()
        if train is None:
            return
        counts = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        metrics = counts | {name: float(value) for name, value in trainer.callback_metrics.items()}
        storage = ray_storage()
        checkpoint = None
        if path and storage is not None and path.startswith(f"{storage.folder}/"):
            checkpoint = train.Checkpoint(path.removeprefix(storage.scheme), filesystem=storage.filesystem)
        elif path and not self._has_warned:
            self._has_warned = True
            folder = "RunConfig(storage_path=...)" if storage is None else storage.folder
            rank_zero_warn(
                f"{path} is outside of Ray's storage, so Ray gets the metrics without checkpoints. Omit default_root_dir and "
                f"the dirpath of ModelCheckpoint, or pass a folder in {folder}.",
                stacklevel=2,
            )
        train.report(metrics, checkpoint=checkpoint, checkpoint_upload_mode=train.CheckpointUploadMode.NO_UPLOAD)
