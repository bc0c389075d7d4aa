"""The search for a learning rate: a trial run at growing rates, and its suggestion.

The method is the learning-rate range test of L. N. Smith, "Cyclical Learning Rates for Training Neural Networks", WACV 2017.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from trainwright.callbacks.base import Callback
from trainwright.callbacks.trainer_protocol import TrialTrainer
from trainwright.data.combined_loader import is_read_once, leaves
from trainwright.data.seeding import isolate_rng
from trainwright.hyperparameters import kept_hyper_parameters
from trainwright.rank_zero import rank_zero_warn
from trainwright.value_kinds import computed_tensors

if TYPE_CHECKING:
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer

MODES = ("exponential", "linear")
SMOOTHING = 0.98
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
        if num_training < 1:
            raise ValueError(f"num_training={num_training} is not accepted; pass a number of steps from 1.")
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
        index = self._steepest(skip_begin, skip_end)
        if index is None:
            bad = [i for i, loss in enumerate(self.results["loss"]) if not math.isfinite(loss)]
            first = (
                f"{len(bad)} have a loss that is not finite (first at a rate of {self.results['lr'][bad[0]]:.3g}), and "
                if bad
                else ""
            )
            rank_zero_warn(
                f"The search for a learning rate has {len(self.results['loss'])} points, of which {first}{skip_begin} at the "
                f"beginning and {skip_end} at the end are left out: too few to suggest one. "
                + (
                    "Look for the cause, or pass smaller rates."
                    if bad
                    else "Raise num_training, or pass smaller skip_begin and skip_end."
                )
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
    memo = {id(each): each.detach().clone() for each in computed_tensors(module)}
    try:
        with torch.no_grad():  # or a copied ScriptModule would have parameters with a graph
            copied = copy.deepcopy(module, dict(memo))
    except TypeError as error:
        raise TypeError(
            f"a search trains copies of the module, and {', '.join(_uncopyable(module, memo))} cannot be copied: {error}. "
            "Make it in a hook and delete it there too, or keep it outside of the module."
        ) from error
    for parameter, original in zip(copied.parameters(), module.parameters(), strict=True):
        if parameter.requires_grad != original.requires_grad:
            parameter.requires_grad_()
    copied.__class__ = Trial
    return copied


def _uncopyable(module: nn.Module, memo: dict[int, Tensor]) -> Iterator[str]:
    """Yield the names of the attributes of a module and its submodules that cannot be copied."""
    for name, owner in module.named_modules():
        attributes: Any = {} if isinstance(owner, torch.jit.ScriptModule) else owner.__getstate__()
        for key in sorted(attributes.keys() - vars(nn.Module()).keys()):
            try:
                copy.deepcopy(attributes[key], dict(memo))
            except TypeError:
                yield ".".join(filter(None, (type(module).__name__, name, key)))


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
        own = None if loss is None or trainer.is_dummy_batch else float(loss)
        found = [
            each for each in trainer.engine.ranks.exchange(own, "the search for a learning rate") if each is not None
        ]
        self._losses += [math.fsum(found) / len(found)] if found else []
        if trainer.global_step == self._step:  # the window is open
            return
        if not self._losses and not module.automatic_optimization:
            raise ValueError(
                f"The search for a learning rate follows the loss, and training_step of {type(module).__name__} returned none "
                "for its step, and return it from training_step, also under manual optimization."
            )
        loss, self._losses = self._losses[-1] if self._losses else math.nan, []
        smoothed = self._smoothed(loss) if math.isfinite(loss) else loss
        self.search.results["lr"].append(self.search.rate(self._step))
        self.search.results["loss"].append(smoothed)
        if self.threshold is not None and smoothed - self._best > (self.threshold - 1) * abs(self._best):
            trainer.should_stop = True
        self._best = min(self._best, smoothed) if math.isfinite(smoothed) else self._best

    def _smoothed(self, loss: float) -> float:
        """Take a loss into the running mean, and return the mean without the bias of its first value, 0."""
        self._count += 1
        self._mean = SMOOTHING * self._mean + (1 - SMOOTHING) * loss
        return self._mean / (1 - SMOOTHING**self._count)


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
        AttributeError: none of the owners has it, or it cannot be set.
    """

    def __init__(self, names: Sequence[str], owners: Sequence[Any], search: str) -> None:
        for name in names:
            self.name, self._holders = name, list(_holders_of(name, owners))
            if self._holders:
                self._first = [_value_of(*each) for each in self._holders]
                self._check(search)
                return
        where = " or ".join(type(each).__name__ for each in owners)
        raise AttributeError(
            f"{search} sets {' or '.join(names)}, and {where} has no such attribute, nor its hyper-parameters; assign it in "
            "__init__ and use it there, or name a different attribute."
        )

    @property
    def value(self) -> Any:
        return _value_of(*self._holders[0])

    def set(self, value: Any) -> None:
        """Set it wherever it is held."""
        for holder, key in self._holders:
            _assign(holder, key, value)

    def restore(self) -> None:
        """Restore the first values of all objects."""
        for (holder, key), value in zip(self._holders, self._first, strict=True):
            _assign(holder, key, value)

    def _check(self, search: str) -> None:
        """Assign the current value, so that a read-only attribute fails before the search (AttributeError)."""
        try:
            self.restore()
        except AttributeError as error:
            raise AttributeError(
                f"{search} sets {self.name}, which cannot be set ({error}); give the property a setter, or name a different "
                "attribute."
            ) from error


def _value_of(holder: Any, key: str) -> Any:
    return holder[key] if isinstance(holder, MutableMapping) else getattr(holder, key)


def _assign(holder: Any, key: str, value: Any) -> None:
    if isinstance(holder, MutableMapping):
        holder[key] = value
    else:
        setattr(holder, key, value)


def _holders_of(name: str, owners: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    *path, last = name.removeprefix("hparams.").split(".")
    for owner in owners:
        # All, because save_hyperparameters keeps copies, which the loader hook and the loggers may read.
        for start in (
            kept_hyper_parameters(owner) if name.startswith("hparams.") else (owner, *kept_hyper_parameters(owner))
        ):
            holder = start
            for part in path:
                holder = holder.get(part) if isinstance(holder, MutableMapping) else getattr(holder, part, None)
            if (isinstance(holder, MutableMapping) and last in holder) or (
                holder is not None and not isinstance(holder, MutableMapping) and hasattr(holder, last)
            ):
                yield holder, last
