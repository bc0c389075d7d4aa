"""MemorySnapshot: the callback behind `Trainer(memory_snapshot=)`, which writes torch's record of a GPU's memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.callbacks.base import Callback
from trainwright.devices import cuda
from trainwright.devices.hardware import is_out_of_memory
from trainwright.loggers.files import write_file
from trainwright.rank_zero import say

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import TrainerProtocol
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer


class MemorySnapshot(Callback):
    """Records the allocations of a fit, and writes them to `memory-rank<k>.pickle` in the run's folder, on every rank.

    `when` is "on_oom" to write the file if the fit runs out of memory, or the number of first optimizer steps to record.
    """

    reads_outputs = False

    def __init__(self, when: str | int) -> None:
        self.when = when
        self._last_step: int | None = None
        """The step after which the file is written, or None if no step is."""

    def setup(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        if stage == "fit":
            cuda.record_memory(True)

    def on_train_start(self, trainer: AnyTrainer, module: Module) -> None:
        if isinstance(self.when, int):
            self._last_step = trainer.global_step + self.when

    def on_train_batch_end(self, trainer: AnyTrainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._last_step is not None and trainer.global_step >= self._last_step:
            self._write(trainer)

    def on_exception(self, trainer: AnyTrainer, module: Module, exception: BaseException) -> None:
        if is_out_of_memory(exception) and self.when == "on_oom":
            self._write(trainer)

    def teardown(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        if self._last_step is not None:  # the fit was shorter
            self._write(trainer)
        if stage == "fit":
            cuda.record_memory(False)

    def _write(self, trainer: TrainerProtocol) -> None:
        self._last_step = None
        path = f"{trainer.log_dir or trainer.default_root_dir}/memory-rank{trainer.global_rank}.pickle"
        with tempfile.TemporaryDirectory() as folder:  # torch writes local files only
            cuda.save_memory_record(f"{folder}/snapshot")
            cuda.record_memory(False)
            write_file(path, Path(folder, "snapshot").read_bytes())
        say(f"memory snapshot: {path} (open it at https://docs.pytorch.org/memory_viz)")
