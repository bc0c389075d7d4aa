"""LearningRateMonitor: the learning rates of a run in its loggers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from trainwright.arguments import refuses_unknown
from trainwright.callbacks.base import Callback, require_logger
from trainwright.faults.failing_loggers import outlived

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import TrainerProtocol
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer

INTERVALS = ("step", "epoch")


class LearningRateMonitor(Callback):
    """Logs the learning rate of every optimizer.

    Args:
        logging_interval: "step" logs with the step values (every log_every_n_steps), "epoch" at the start of epochs, None at
            the interval of the optimizer's scheduler, and at both without a scheduler.
        log_momentum: also log the momentum, or the first of the betas, as `<name>-momentum`, or 0 if the optimizer has neither.
        log_weight_decay: also log the weight decay, as `<name>-weight_decay`.
        log_key_prefix: is put before every name, such as "optim/".

    A name is `lr-` and the optimizer's class, or the `name` in the scheduler's dict. A second optimizer of that name gets
    `-1`, and parameter groups add `/pg1`, `/pg2` or their `name`. A step's value is the rate of that step. The values are
    also in trainer.callback_metrics, for a checkpoint's name or a monitor.

    Raises:
        ValueError: the interval is unknown, in fit there is no logger, or two groups of an optimizer have one name.

    >>> monitor = tw.LearningRateMonitor(logging_interval="epoch")
    >>> trainer = tw.Trainer(callbacks=monitor, max_epochs=2, enable_model_summary=False)
    >>> trainer.fit(module, loader)  # its scheduler multiplies the rate by 0.9 at each epoch's end
    >>> round(float(trainer.callback_metrics["lr-SGD"]), 3)
    0.09
    """

    reads_outputs = False

    @refuses_unknown
    def __init__(
        self,
        logging_interval: str | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
        log_key_prefix: str | None = None,
    ) -> None:
        if logging_interval not in (None, *INTERVALS):
            raise ValueError(f"logging_interval={logging_interval!r} is unknown; choose from step, epoch or None.")
        self.logging_interval = logging_interval
        self.log_momentum, self.log_weight_decay = log_momentum, log_weight_decay
        self.log_key_prefix = log_key_prefix or ""
        self._begin()

    def _begin(self) -> None:
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float] = {}
        self.last_weight_decay_values: dict[str, float] = {}
        self._pending: dict[str, float] = {}
        self._pending_at = -1
        self._epoch_begun = -1
        """The latest epoch whose first row is written."""

    @property
    def state_key(self) -> str:
        settings = f"{self.logging_interval!r}, {self.log_momentum}, {self.log_weight_decay}"
        return f"{type(self).__qualname__}({settings})"

    def state_dict(self) -> dict[str, Any]:
        return {"epoch_begun": self._epoch_begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch_begun = int(state["epoch_begun"])

    def setup(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        if stage != "fit":
            return
        require_logger(self, trainer)
        self._begin()

    def on_train_epoch_start(self, trainer: AnyTrainer, module: Module) -> None:
        is_new = trainer.state.batch == 0 and trainer.current_epoch != self._epoch_begun  # otherwise its row is written
        self._epoch_begun = trainer.current_epoch
        if self.logging_interval != "step" and is_new:
            self._write(trainer, self._values(trainer, "epoch"), trainer.state.batches_that_stepped)

    def on_train_batch_start(self, trainer: AnyTrainer, module: Module, batch: Any, batch_idx: int) -> None:
        step, every = trainer.state.batches_that_stepped + 1, trainer.log_every_n_steps
        if self.logging_interval != "epoch" and every and step % every == 0:
            # The scheduler steps before on_train_batch_end.
            self._pending, self._pending_at = self._values(trainer, "step"), step

    def on_train_batch_end(self, trainer: AnyTrainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._pending and trainer.state.batches_that_stepped == self._pending_at:
            self._write(trainer, self._pending, trainer.state.logged_step)
            self._pending = {}

    def _write(self, trainer: TrainerProtocol, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            if name in self.lrs:
                self.lrs[name].append(value)
            elif name.endswith("-momentum"):
                self.last_momentum_values[name] = value
            else:
                self.last_weight_decay_values[name] = value
        trainer.metrics.record(values)
        for logger in trainer.loggers if values and trainer.is_global_zero else ():
            outlived(logger, "log_metrics", {"epoch": trainer.current_epoch, **values}, step)

    def _values(self, trainer: TrainerProtocol, interval: str) -> dict[str, float]:
        values: dict[str, float] = {}
        for optimizer, names, own_interval in self._named(trainer):
            if self.logging_interval is None and own_interval not in (None, interval):
                continue
            for group, name in zip(optimizer.param_groups, names, strict=True):
                self.lrs.setdefault(name, [])
                values[name] = float(group["lr"])
                if self.log_momentum:
                    momentum = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
                    values[f"{name}-momentum"] = float(momentum)
                if self.log_weight_decay:
                    values[f"{name}-weight_decay"] = float(group.get("weight_decay", 0.0))
        return values

    def _named(self, trainer: TrainerProtocol) -> Iterator[tuple[Optimizer, list[str], str | None]]:
        """Yield every optimizer with the names of its groups and its scheduler's interval, or None without a scheduler."""
        configs = trainer.lr_scheduler_configs
        uses: list[tuple[Optimizer, str | None, str | None]] = []
        for config in configs:
            optimizer = getattr(config.scheduler, "optimizer", None)
            if isinstance(optimizer, Optimizer):
                # A scheduler that steps after validations is logged at the next epoch's start.
                uses.append((optimizer, config.name, config.interval if config.interval in INTERVALS else "epoch"))
        uses += [(each, None, None) for each in trainer.optimizers if not any(config.is_of(each) for config in configs)]
        seen: Counter[str] = Counter()
        for optimizer, given, interval in uses:
            base = self.log_key_prefix + (given if given is not None else f"lr-{type(optimizer).__name__}")
            name = f"{base}-{seen[base]}" if seen[base] else base
            seen[base] += 1
            yield optimizer, _group_names(optimizer, name), interval


def _group_names(optimizer: Optimizer, name: str) -> list[str]:
    groups = optimizer.param_groups
    if len(groups) == 1:
        return [f"{name}/{groups[0]['name']}" if groups[0].get("name") else name]
    names = [f"{name}/{group.get('name') or f'pg{number}'}" for number, group in enumerate(groups, start=1)]
    if len(set(names)) < len(names):
        raise ValueError(f"two groups of one optimizer have the same name ({', '.join(names)}); change one of them.")
    return names
