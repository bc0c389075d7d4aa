"""LearningRateFinder: searches a learning rate before a fit, and trains with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from trainwright.arguments import refuses_unknown
from trainwright.callbacks.base import Callback
from trainwright.callbacks.learning_rate_search import LearningRateSearch, MakeTrial, TunedSetting, refuse_within_run
from trainwright.rank_zero import rank_zero_info, rank_zero_warn

if TYPE_CHECKING:
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer

NAMES = ("lr", "learning_rate")


class LearningRateFinder(Callback):
    """Before a fit, trains a copy of the module at growing learning rates, and sets the module's `lr` or `learning_rate`.

    The copy has a Trainer like this one, without loggers, checkpoints and other callbacks. The module's weights, its data order
    and the generators are as if it had not run. A fit that resumes does not search: it sets the rate that the saved
    run has found.

    Args:
        min_lr, max_lr: the first and the last rate to try.
        num_training_steps: optimizer steps of the trial, each at a higher rate.
        mode: "exponential" multiplies the rate from step to step, "linear" adds to it.
        early_stop_threshold: the trial ends once the smoothed loss is this many times the best one. None tries all rates.
        update_attr: False keeps the attribute, and `optimal_lr.suggestion()` returns the rate.
        attr_name: the attribute to set, such as "hparams.rate", or "" for lr or learning_rate.

    `optimal_lr` is the LearningRateSearch after the fit has begun.

    Raises:
        AttributeError: from fit, without an attribute to set.
        ValueError: from fit, for several optimizers.

    >>> class Searched(Classifier):
    ...     lr = 0.1
    ...
    ...     def configure_optimizers(self):
    ...         return torch.optim.SGD(self.parameters(), lr=self.lr)
    >>> module, finder = Searched(), tw.LearningRateFinder(min_lr=1e-4, num_training_steps=40)
    >>> tw.Trainer(callbacks=finder, max_epochs=1, enable_model_summary=False).fit(module, loader)
    >>> module.lr == finder.optimal_lr.suggestion()
    True
    """

    @refuses_unknown
    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training_steps: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> None:
        LearningRateSearch(mode, min_lr, max_lr, num_training_steps)  # rejects wrong settings
        self._arguments = (mode, min_lr, max_lr, num_training_steps)
        self.early_stop_threshold, self.update_attr, self.attr_name = early_stop_threshold, update_attr, attr_name
        self.optimal_lr: LearningRateSearch | None = None
        self._rate: float | None = None
        """The rate that the search has set."""

    def state_dict(self) -> dict[str, Any]:
        return {} if self._rate is None else {"rate": self._rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the rate that the saved run has found, and set it before a resumed run makes its optimizers."""
        self._rate, module = float(state["rate"]), vars(self).get("_running_module")
        if module is not None and self.update_attr:
            try:
                self._setting(module).set(self._rate)
            except AttributeError as error:
                rank_zero_warn(f"The saved run has found the rate {self._rate}, which this one does not use: {error}")

    def _setting(self, module: Module) -> TunedSetting:
        names = (self.attr_name,) if self.attr_name else NAMES
        return TunedSetting(names, [module], "The search for a learning rate")

    def on_tune(self, trainer: AnyTrainer, module: Module, data: Mapping[str, Any]) -> None:
        self.search(trainer.trial, module, data)

    def lr_find(self, trainer: AnyTrainer, pl_module: Module) -> NoReturn:
        """Raise RuntimeError: a search within a run, as Lightning has it, is not possible."""
        refuse_within_run(self, "lr_find")

    def search(self, make_trial: MakeTrial, module: Module, data: Mapping[str, Any]) -> LearningRateSearch:
        """Search, and set the attribute. Collective."""
        setting = self._setting(module) if self.update_attr else None
        self.optimal_lr = found = LearningRateSearch(*self._arguments)
        found.run(make_trial, module, data, self.early_stop_threshold)
        self._rate = rate = found.suggestion() if setting is not None else None
        if setting is not None and rate is not None:
            setting.set(rate)
            rank_zero_info(f"The learning rate {setting.name} is set to {rate}.")
        return found
