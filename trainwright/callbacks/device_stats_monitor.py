"""DeviceStatsMonitor: the memory and the load of the device in the loggers."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch

from trainwright.arguments import refuses_unknown
from trainwright.callbacks.base import Callback, require_logger
from trainwright.faults.failing_loggers import outlived

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import TrainerProtocol
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer


class DeviceStatsMonitor(Callback):
    """Logs the statistics of the device's memory and the load of the processor, with the step values.

    The names are `DeviceStatsMonitor.on_train_batch_end/<statistic>`: those in torch.accelerator.memory_stats (bytes), and
    cpu_percent, cpu_vm_percent and cpu_swap_percent (percent) of the machine. Rank 0's are logged.

    Args:
        cpu_stats: whether to log the processor's too, by default if the device is the CPU. Needs psutil.

    Raises:
        ValueError: from fit, without a logger.
        ModuleNotFoundError: from fit, if psutil is needed and not installed.

    >>> monitor = tw.DeviceStatsMonitor()
    >>> trainer = tw.Trainer(callbacks=monitor, max_epochs=1, log_every_n_steps=4, enable_model_summary=False)
    >>> trainer.fit(module, loader)
    """

    reads_outputs = False

    @refuses_unknown
    def __init__(self, cpu_stats: bool | None = None) -> None:
        self.cpu_stats = cpu_stats
        self._reads_cpu = False
        self._device = torch.device("cpu")
        self._step = -1
        """The steps before the latest batch."""

    def setup(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        if stage != "fit":
            return
        require_logger(self, trainer)
        self._step, self._device = -1, trainer.strategy.device  # the module is not placed yet
        self._reads_cpu = self._device.type == "cpu" if self.cpu_stats is None else self.cpu_stats
        if self._reads_cpu and importlib.util.find_spec("psutil") is None:
            raise ModuleNotFoundError("DeviceStatsMonitor reads the processor's load with psutil: pip install psutil.")

    def on_train_batch_start(self, trainer: AnyTrainer, module: Module, batch: Any, batch_idx: int) -> None:
        before, self._step = self._step, trainer.state.batches_that_stepped
        if self._step != before:  # the batches of a window have one step
            self._log(trainer, "on_train_batch_start", self._step + 1)

    def on_train_batch_end(self, trainer: AnyTrainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.state.batches_that_stepped != self._step:
            self._log(trainer, "on_train_batch_end", trainer.state.batches_that_stepped)

    def _log(self, trainer: TrainerProtocol, hook: str, step: int) -> None:
        if not trainer.is_global_zero or not trainer.log_every_n_steps or step % trainer.log_every_n_steps:
            return
        values = {f"DeviceStatsMonitor.{hook}/{name}": value for name, value in self._statistics().items()}
        for logger in trainer.loggers if values else ():
            outlived(logger, "log_metrics", values, step - 1)  # as the values that this step logs

    def _statistics(self) -> dict[str, float]:
        values: dict[str, float] = {}
        if self._device.type != "cpu" and torch.accelerator.is_available():
            values |= {name: float(value) for name, value in torch.accelerator.memory_stats(self._device).items()}
        if self._reads_cpu:
            import psutil

            values["cpu_percent"] = psutil.cpu_percent()
            values["cpu_vm_percent"] = psutil.virtual_memory().percent
            values["cpu_swap_percent"] = psutil.swap_memory().percent
        return values
