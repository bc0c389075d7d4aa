"""RayReport: reports metrics and checkpoints to Ray Train."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from trainwright.callbacks.base import Callback
from trainwright.distributed.clusters import ray_folder, ray_train
from trainwright.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import TrainerProtocol
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer


class RayReport(Callback):
    """Reports metrics and checkpoints to Ray Train. A Trainer in a worker of Ray Train adds it.

    It calls `ray.train.report` after every epoch, after every validation within an epoch, and after every save of a
    ModelCheckpoint. A report has the metrics as floats, "epoch" and "step". A complete checkpoint is reported where it is, and
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
        self._has_warned = False
        self._due: list[str] = []
        """The checkpoints to report at the next save point, "" for a report without one."""

    def setup(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        self._due.clear()  # an earlier fit may have failed

    def on_checkpoint_saved(self, trainer: AnyTrainer, module: Module, path: str) -> None:
        self._due.append(path)

    def on_validation_end(self, trainer: AnyTrainer, module: Module) -> None:
        if trainer.state.progress.is_mid_epoch_validation:  # the epoch's end reports any other
            self._due.append("")

    def on_train_epoch_end(self, trainer: AnyTrainer, module: Module) -> None:
        self._due.append("")

    def on_save_point(self, trainer: AnyTrainer, module: Module) -> None:
        """Report the complete checkpoints, or only the metrics if there are none. Collective."""
        due, self._due = self._due, []
        for path in list(filter(None, due)) or due[:1]:
            self._report(trainer, path)

    def on_fit_end(self, trainer: AnyTrainer, module: Module) -> None:
        """Report the save of the run's end, or an epoch that was stopped. Collective."""
        self.on_save_point(trainer, module)

    def _report(self, trainer: TrainerProtocol, path: str) -> None:
        train, folder = ray_train(), ray_folder()
        if train is None:
            return
        counts = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        metrics = counts | {name: float(value) for name, value in trainer.callback_metrics.items()}
        checkpoint = None
        if folder is not None and path.startswith(f"{folder}/"):
            filesystem = train.get_context().get_storage().storage_filesystem
            checkpoint = train.Checkpoint(path.removeprefix("s3://"), filesystem=filesystem)
        elif path and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"Ray gets the metrics without a checkpoint, because {path} is outside of its storage, "
                f"{folder or 'of which no path is known'}. Omit default_root_dir and the dirpath of ModelCheckpoint, and pass "
                "a shared folder or an S3 URL as RunConfig(storage_path=...).",
                stacklevel=2,
            )
        train.report(metrics, checkpoint=checkpoint, checkpoint_upload_mode=train.CheckpointUploadMode.NO_UPLOAD)
