"""LearningRateFinder: searches a learning rate before a fit, in a trial run at growing rates, and trains with it.

The method is the learning-rate range test of L. N. Smith, "Cyclical Learning Rates for Training Neural Networks", WACV 2017.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from trainwright.arguments import refuses_unknown
from trainwright.callbacks.base import Callback, check_integers
from trainwright.callbacks.trainer_protocol import TrialTrainer
from trainwright.data.combined_loader import is_read_once, leaves
from trainwright.data.seeding import isolate_rng
from trainwright.hyperparameters import kept_hyper_parameters
from trainwright.rank_zero import rank_zero_info, rank_zero_warn
from trainwright.value_kinds import computed_tensors

if TYPE_CHECKING:
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer

MODES = ("exponential", "linear")
SMOOTHING = 0.98
RATE_NAMES = ("lr", "learning_rate")
NEVER = 2**62
"""A frequency at which no scheduler steps."""


MakeTrial = Callable[..., TrialTrainer]
"""Returns a Trainer for a trial, with the settings given by name."""


class LearningRateSearch:
    """The losses of a trial run by learning rate.

    `results["lr"]` and `results["loss"]` are lists with an entry for every optimizer step. The losses are smoothed, and the
    mean over all ranks. A loss that is NaN or infinite is not smoothed.
    """

    def __init__(self, mode: str, lr_min: float, lr_max: float, num_training: int) -> None:
        if mode not in MODES:
            raise ValueError(f"mode={mode!r} is unknown; choose from {', '.join(MODES)}.")
        if not 0.0 < lr_min < lr_max:
            raise ValueError(f"min_lr={lr_min} and max_lr={lr_max}: expected rates with 0 < min_lr < max_lr.")
        check_integers(1, num_training=num_training)
        self.mode, self.lr_min, self.lr_max, self.num_training = mode, lr_min, lr_max, num_training
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}

    def rate(self, step: int) -> float:
        """Return the learning rate of an optimizer step, from 0."""
        if step == 0:
            return self.lr_min
        fraction = (step + 1) / self.num_training
        if self.mode == "linear":
            return self.lr_min + fraction * (self.lr_max - self.lr_min)
        return float(self.lr_min * (self.lr_max / self.lr_min) ** fraction)

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the rate at which the loss falls fastest, or None with a warning if there are too few points.

        Args:
            skip_begin: points to skip at the beginning.
            skip_end: points to skip at the end, where the loss may already rise.
        """
        index, losses = self._steepest(skip_begin, skip_end), self.results["loss"]
        if index is None:
            count = sum(not math.isfinite(loss) for loss in losses)
            rank_zero_warn(
                f"The search for a learning rate has {len(losses)} points, of which {skip_begin} at the beginning, {skip_end} "
                f"at the end and {count} with a loss that is not finite are skipped: too few to suggest one. Raise "
                "num_training, or pass smaller skip_begin and skip_end, or smaller rates."
            )
            return None
        return self.results["lr"][index]

    def _steepest(self, skip_begin: int, skip_end: int) -> int | None:
        end = len(self.results["loss"]) - skip_end
        kept = [i for i in range(skip_begin, end) if math.isfinite(self.results["loss"][i])]
        if len(kept) < 2:
            return None
        rates, losses = (torch.tensor([self.results[name][i] for i in kept]) for name in ("lr", "loss"))
        # By rate, not by step: exponential rates have unequal distances.
        return kept[int(torch.gradient(losses, spacing=[rates])[0].argmin())]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Draw the loss by learning rate with matplotlib, and return the figure.

        Args:
            suggest: mark the suggested rate.
            show: show the figure in a window, or below a notebook's cell.
            ax: the matplotlib Axes to draw on, or None for a new figure.
        """
        import matplotlib.pyplot

        if ax is None:
            _, ax = matplotlib.pyplot.subplots()
        rates, losses = self.results["lr"], self.results["loss"]
        ax.plot(rates, losses)
        ax.set(xlabel="learning rate", ylabel="loss", xscale="log" if self.mode == "exponential" else "linear")
        index = self._steepest(10, 1) if suggest else None
        if index is not None:
            ax.plot(rates[index], losses[index], marker="o", markersize=10, color="red")
        if show:
            matplotlib.pyplot.show()
        return ax.figure

    def run(self, make_trial: MakeTrial, module: Module, data: Mapping[str, Any], threshold: float | None) -> None:
        """Train a copy of the module at growing rates. The module and the generators stay as they are. Collective."""
        loaders = data.get("train_dataloaders")
        if any(is_read_once(each) for _, each in leaves({"": loaders})):
            raise ValueError(
                "The search for a learning rate reads batches of the training loader, and this one is an iterator: the fit "
                "would train without them. Pass a DataLoader or another iterable that can begin again."
            )
        with isolate_rng():
            make_trial(callbacks=[Sweep(self, threshold)], max_steps=self.num_training).fit(trial_copy(module), **data)


def trial_copy(module: Module) -> Module:
    """Return a copy of a module for a trial run: without the callbacks it configures, and whose schedulers do not step.

    They stay there for hooks that look at them, and are never due, so that none asks for a metric of a validation.
    """

    class Trial(type(module)):  # type: ignore[misc]
        def configure_callbacks(self) -> list[Callback]:
            return []

        def configure_optimizers(self) -> Any:
            return _without_steps(super().configure_optimizers())

    Trial.__name__ = type(module).__name__  # messages name it
    memo: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in computed_tensors(module)}
    try:
        copied = copy.deepcopy(module, memo)
    except TypeError as error:
        raise TypeError(
            f"a search trains copies of the module, and {type(module).__name__} cannot be copied: {error}. Make the attribute "
            "that cannot be copied in a hook and delete it there too, or keep it outside of the module."
        ) from error
    copied.__class__ = Trial
    return copied


def _without_steps(returned: Any) -> Any:
    """Return the result of configure_optimizers, with schedulers that are never due."""
    if isinstance(returned, Mapping):
        scheduler = returned.get("lr_scheduler")
        return returned if scheduler is None else {**returned, "lr_scheduler": _never_due(scheduler)}
    if isinstance(returned, (list, tuple)) and len(returned) == 2 and isinstance(returned[1], (list, tuple)):
        return returned[0], [_never_due(each) for each in returned[1]]
    return [_without_steps(each) for each in returned] if isinstance(returned, (list, tuple)) else returned


def _never_due(scheduler: Any) -> dict[str, Any]:
    config = scheduler if isinstance(scheduler, Mapping) else {"scheduler": scheduler}
    return {**config, "interval": "epoch", "frequency": NEVER}


class Sweep(Callback):
    """Sets the rate of every step of a trial run, and notes the losses."""

    def __init__(self, search: LearningRateSearch, threshold: float | None) -> None:
        self.search, self.threshold = search, threshold
        self._step, self._count, self._mean, self._best = -1, 0, 0.0, math.inf
        self._losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"results": self.search.results}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.search.results.update(state["results"])  # of a trial in processes that were started for it

    def on_train_start(self, trainer: AnyTrainer, module: Module) -> None:
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"The search for a learning rate needs one optimizer, and configure_optimizers returned "
                f"{len(trainer.optimizers)}; set their rates by hand."
            )

    def on_train_batch_start(self, trainer: AnyTrainer, module: Module, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            for group in trainer.optimizers[0].param_groups:
                group["lr"] = self.search.rate(self._step)

    def on_train_batch_end(self, trainer: AnyTrainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        # Exchanged, because the losses end the trial, which has to be at the same step on every rank.
        local = None if loss is None or trainer.is_dummy_batch else float(loss)
        everywhere = trainer.engine.ranks.exchange(local, "the search for a learning rate")
        if known := [value for value in everywhere if value is not None]:
            self._losses.append(math.fsum(known) / len(known))
        if trainer.global_step == self._step:  # the window is open
            return
        if not self._losses and not module.automatic_optimization:
            raise ValueError(
                f"The search for a learning rate follows the loss, and training_step of {type(module).__name__} returned none. "
                "Return the loss from training_step, also under manual optimization."
            )
        loss, self._losses = self._losses[-1] if self._losses else math.nan, []
        smoothed = loss
        if math.isfinite(loss):  # the running mean, without the bias of its first value, 0
            self._count += 1
            self._mean = SMOOTHING * self._mean + (1 - SMOOTHING) * loss
            smoothed = self._mean / (1 - SMOOTHING**self._count)
        self.search.results["lr"].append(self.search.rate(self._step))
        self.search.results["loss"].append(smoothed)
        if self.threshold is not None and smoothed - self._best > (self.threshold - 1) * abs(self._best):
            trainer.should_stop = True
        self._best = min(self._best, smoothed) if math.isfinite(smoothed) else self._best


def refuse_within_run(callback: object, method: str) -> NoReturn:
    """Raise RuntimeError for a search that a hook calls, as Lightning's finders allow."""
    raise RuntimeError(
        f"{type(callback).__name__}.{method} was called within a run. Here it searches only before a fit, with copies of the "
        f"module. To search again at some epoch, end the fit there (max_epochs=), call tw.Tuner(trainer).{method}(module), and "
        "fit again."
    )


class TunedSetting:
    """A setting that one or more objects hold, such as `module.lr` and `module.hparams.lr`. `set` changes all of them.

    `restore` gives each its first value back.

    Args:
        names: the names to look for, of which the first that exists counts. "optimizer.lr" is the attribute of an attribute.
        owners: the module, and the data module if there is one.
        search: the name of the search, for the error.

    Raises:
        AttributeError: none of the owners has it.
    """

    def __init__(self, names: Sequence[str], owners: Sequence[Any], search: str) -> None:
        for name in names:
            self.name, self._holders = name, list(_holders_of(name, owners))
            if self._holders:
                self._first = [_value_of(*holder) for holder in self._holders]
                return
        where = " or ".join(type(owner).__name__ for owner in owners)
        raise AttributeError(
            f"{search} sets {' or '.join(names)}, and {where} has no such attribute, nor its hyper-parameters; assign it in "
            "__init__ and use it there, or name a different attribute."
        )

    def set(self, value: Any) -> None:
        for holder, key in self._holders:
            _assign(holder, key, value)

    def restore(self) -> None:
        for (holder, key), value in zip(self._holders, self._first, strict=True):
            _assign(holder, key, value)


def _value_of(holder: Any, key: str) -> Any:
    return holder[key] if isinstance(holder, MutableMapping) else getattr(holder, key)


def _assign(holder: Any, key: str, value: Any) -> None:
    if isinstance(holder, MutableMapping):
        holder[key] = value
    else:
        setattr(holder, key, value)


def use_found(callback: Callback, setting_of: Callable[[Module], TunedSetting], value: Any) -> None:
    """Set a value that the saved run has found, in a resumed run. Warn if the module has no such setting any more."""
    if (module := vars(callback).get("_running_module")) is not None:
        try:
            setting_of(module).set(value)
        except AttributeError as error:
            rank_zero_warn(f"The saved run has found the value {value}, which this one does not use: {error}")


def _holders_of(name: str, owners: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    """Yield the objects with an attribute of this name, and the last part of the name."""
    *path, last = name.removeprefix("hparams.").split(".")
    for owner in owners:
        # All, because save_hyperparameters keeps copies, which the loader hook and the loggers may read.
        for holder in (*(() if name.startswith("hparams.") else (owner,)), *kept_hyper_parameters(owner)):
            for part in path:
                holder = holder.get(part) if isinstance(holder, MutableMapping) else getattr(holder, part, None)
            if last in holder if isinstance(holder, MutableMapping) else hasattr(holder, last):
                yield holder, last


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
        self._rate = float(state["rate"])
        if self.update_attr:
            use_found(self, self._setting, self._rate)

    def _setting(self, module: Module) -> TunedSetting:
        names = (self.attr_name,) if self.attr_name else RATE_NAMES
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
