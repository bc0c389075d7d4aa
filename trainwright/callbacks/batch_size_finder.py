"""BatchSizeFinder: searches the largest batch size that fits into memory before a fit, and trains with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from trainwright.arguments import refuses_unknown
from trainwright.callbacks.base import Callback, check_integers
from trainwright.callbacks.learning_rate_finder import MakeTrial, TunedSetting, refuse_within_run, trial_copy, use_found
from trainwright.data.datamodule import DataModule
from trainwright.data.seeding import isolate_rng
from trainwright.devices.hardware import free_unused_memory, is_out_of_memory
from trainwright.rank_zero import rank_zero_info

if TYPE_CHECKING:
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer

MODES = ("power", "binsearch")


class BatchSizeFinder(Callback):
    """Before a fit, trains copies of the module with growing batch sizes, and sets the module's or data module's `batch_size`.

    The loader hook reads the attribute: `DataLoader(dataset, batch_size=self.batch_size)`. A fit that resumes does not
    search: it sets the size that the saved run has found. A fit on several processes is refused: memory that runs out on one
    of them ends the others too.

    Args:
        mode: "power" doubles the size until memory runs out. "binsearch" then tries sizes in between.
        steps_per_trial: training batches of a trial. With accumulate_grad_batches they are at least the batches of one step.
        init_val: the first size.
        max_trials: the most trials to run.
        batch_arg_name: the attribute, such as "hparams.batch_size".
        margin: in mode binsearch, the fraction that the largest size is reduced by.
        max_val: the largest size.

    `optimal_batch_size` is the size that was found.

    Raises:
        AttributeError: from fit, without an attribute to set.
        ValueError: from fit, with loaders instead of a hook, or on several processes.
        RuntimeError: from fit, if a batch size of 1 needs too much memory.

    >>> class Data(tw.DataModule):
    ...     batch_size = 2
    ...
    ...     def train_dataloader(self):
    ...         return DataLoader(loader.dataset, batch_size=self.batch_size)
    >>> finder = tw.BatchSizeFinder(max_trials=3)
    >>> tw.Trainer(callbacks=finder, max_epochs=1, enable_model_summary=False).fit(module, datamodule=Data())
    >>> finder.optimal_batch_size
    8
    """

    @refuses_unknown
    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode={mode!r} is unknown; choose from {', '.join(MODES)}.")
        if not 0.0 <= margin < 1.0:
            raise ValueError(f"margin={margin} is not accepted; pass a fraction from 0 and below 1.")
        self.mode, self.steps_per_trial, self.init_val, self.max_trials = mode, steps_per_trial, init_val, max_trials
        self.batch_arg_name, self.margin, self.max_val = batch_arg_name, margin, max_val
        check_integers(1, steps_per_trial=steps_per_trial, init_val=init_val, max_trials=max_trials, max_val=max_val)
        self.optimal_batch_size: int | None = None

    def scale_batch_size(self, trainer: AnyTrainer, pl_module: Module) -> NoReturn:
        """Raise RuntimeError: a search within a run, as Lightning has it, is not possible."""
        refuse_within_run(self, "scale_batch_size")

    def state_dict(self) -> dict[str, Any]:
        return {} if self.optimal_batch_size is None else {"optimal_batch_size": self.optimal_batch_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the size that the saved run has found, and set it before a resumed run makes its loaders."""
        self.optimal_batch_size = int(state["optimal_batch_size"])
        use_found(self, lambda module: self._setting(module, module.trainer.datamodule), self.optimal_batch_size)

    def _setting(self, module: Module, datamodule: DataModule | None) -> TunedSetting:
        owners = [module] if datamodule is None else [module, datamodule]
        return TunedSetting((self.batch_arg_name,), owners, "The search for a batch size")

    def on_tune(self, trainer: AnyTrainer, module: Module, data: Mapping[str, Any]) -> None:
        self.search(trainer.trial, module, data)

    def search(self, make_trial: MakeTrial, module: Module, data: Mapping[str, Any]) -> int:
        """Search, set the attribute, and return the size."""
        loaders, datamodule = data.get("train_dataloaders"), data.get("datamodule")
        if isinstance(loaders, DataModule):
            loaders, datamodule = None, loaders
        if loaders is not None:
            raise ValueError(
                "The search for a batch size makes loaders of other sizes, and fit was given loaders; let the module's or the "
                "data module's train_dataloader make them from an attribute."
            )
        setting = self._setting(module, datamodule)
        try:
            size = self._largest(setting, make_trial, module, data)
        except BaseException:
            setting.restore()
            raise
        if self.mode == "binsearch":
            size = max(1, int(size * (1 - self.margin)))
        setting.set(size)
        self.optimal_batch_size = size
        rank_zero_info(f"The batch size {setting.name} is set to {size}.")
        return size

    def _largest(self, setting: TunedSetting, make_trial: MakeTrial, module: Module, data: Mapping[str, Any]) -> int:
        size, fits, too_large = min(self.init_val, self.max_val), 0, 0
        for _ in range(self.max_trials):
            setting.set(size)
            # Memory that torch keeps of the last trial would make this size seem too large.
            free_unused_memory()
            batches = self._fits(make_trial, module, data)
            if batches is None:
                too_large = size
                if size == 1:
                    raise RuntimeError("A batch size of 1 needs too much memory; make the model smaller.")
            else:
                fits = size
                # With one batch an epoch, a larger size gives the same batch.
                if batches <= 1 or size == self.max_val:
                    break
            if fits and too_large and (self.mode == "power" or too_large - fits <= 1):
                break
            size = (fits + too_large) // 2 if too_large else min(2 * size, self.max_val)
        free_unused_memory()
        if not fits:
            raise RuntimeError(
                f"No batch size fits into memory in {self.max_trials} trials; pass a smaller init_val than {self.init_val}."
            )
        return fits

    def _fits(self, make_trial: MakeTrial, module: Module, data: Mapping[str, Any]) -> int | None:
        """Return how many batches an epoch has, or None if memory ran out."""
        look = FitTrial(self.steps_per_trial)
        try:
            with isolate_rng():
                # Without the fit's limit, so that the data determine the number of batches.
                trial = make_trial(callbacks=[look], max_steps=self.steps_per_trial, limit_train_batches=None)
                if trial.world_size > 1:
                    raise ValueError(
                        f"The search for a batch size runs on one process, and this Trainer has {trial.world_size}. Search "
                        "with devices=1, and pass the size."
                    )
                trial.fit(trial_copy(module), **data)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None
        return look.batches


class FitTrial(Callback):
    """Counts the batches of a trial's epoch, and ends the trial after `most` of them, but not within a step."""

    def __init__(self, most: int) -> None:
        self.most, self.batches = most, 0

    def on_train_start(self, trainer: AnyTrainer, module: Module) -> None:
        batches = trainer.num_training_batches
        self.batches = 2**62 if math.isinf(batches) else int(batches)

    def on_train_batch_start(self, trainer: AnyTrainer, module: Module, batch: Any, batch_idx: int) -> int | None:
        if trainer.state.total_batches < max(self.most, trainer.accumulate_grad_batches):
            return None
        trainer.should_stop = True
        return -1
