"""Oversights: settings and loaders that a run takes and its user may not want, each named in a warning."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import RandomSampler, SubsetRandomSampler

from trainwright.callbacks.base import Callback
from trainwright.callbacks.early_stopping import EarlyStopping
from trainwright.callbacks.timer import Timer
from trainwright.data.combined_loader import CombinedLoader, is_collection
from trainwright.rank_zero import rank_zero_warn
from trainwright.trainer.settings import DEFAULT_MAX_EPOCHS, Settings


def parts_of(loaders: Any) -> list[Any]:
    """Return a stage's loaders in a flat list."""
    return CombinedLoader(loaders).flattened if is_collection(loaders) else getattr(loaders, "flattened", [loaders])


def warn_of_open_end(settings: Settings, callbacks: list[Callback]) -> None:
    """Warn of a fit that ends after a number of epochs that its user has not chosen."""
    is_open = settings.max_epochs is None and settings.max_steps == -1 and settings.max_time is None
    if is_open and not any(isinstance(each, (EarlyStopping, Timer)) for each in callbacks):
        rank_zero_warn(
            f"max_epochs was not given, so fit trains {DEFAULT_MAX_EPOCHS} epochs. Pass max_epochs= (-1 for no limit), "
            "max_steps= or max_time=.",
            stacklevel=2,
        )


def warn_of_misspelled_monitors(callbacks: Iterable[Callback], logged: Iterable[str]) -> None:
    """Warn of callbacks that follow a metric whose name differs a little from the metrics of the sanity check."""
    names = list(logged)
    for callback in callbacks:
        name = str(getattr(callback, "monitor", None))
        close = get_close_matches(name, names, n=1, cutoff=0.85)
        if close and name not in names and close[0][0] == name[0]:  # train_loss is not a misspelled val_loss
            rank_zero_warn(
                f"{type(callback).__name__} follows {name!r}, which the sanity check has not logged. Did you mean "
                f"{close[0]!r}?",
                stacklevel=2,
            )


def warn_of_shuffling(loaders: Any, stage: str) -> None:
    """Warn of evaluation loaders that shuffle."""
    samplers = [getattr(loader, "sampler", None) for loader in parts_of(loaders)]
    if any(isinstance(sampler, (RandomSampler, SubsetRandomSampler)) for sampler in samplers):
        rank_zero_warn(
            f"the {stage} loader shuffles, so with a limit of batches each evaluation scores other samples. Pass "
            "shuffle=False.",
            stacklevel=2,
        )


def warn_of_evaluation_mode(module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Warn of parts with dropout or batch norm that are in evaluation mode although an optimizer steps them."""
    stepped = {each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    for name, part in module.named_modules():
        # A layer without children was chosen separately, such as a batch norm that keeps its statistics.
        if part.training or not list(part.children()) or not any(map(_is_quiet, part.modules())):
            continue
        if not any(p.requires_grad and p in stepped for p in part.parameters()):
            continue
        shown = repr(name) if name else type(module).__name__
        rank_zero_warn(
            f"{shown} is in evaluation mode as training begins, as from_pretrained returns models: dropout and batch norm act "
            "as in evaluation. Call .train() in the module's __init__ or on_train_start, or freeze the parameters.",
            stacklevel=2,
        )
        return


def _is_quiet(layer: nn.Module) -> bool:
    """Return whether a layer would act in another way in training mode."""
    rate = getattr(layer, "p" if "Dropout" in type(layer).__name__ else "dropout", None)
    has_statistics = getattr(layer, "track_running_stats", False)
    return not layer.training and (has_statistics or (isinstance(rate, float) and rate > 0))
