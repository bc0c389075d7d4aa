"""Request: the arguments of fit, validate, test or predict, checked and completed before anything runs."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from trainwright.checkpoint.reader import Verify
from trainwright.data.datamodule import DataModule
from trainwright.engine.replicas import refuse_unlike_arguments
from trainwright.engine.script_settings import checked_fresh
from trainwright.module import Module
from trainwright.overrides import overridden
from trainwright.trainer.checkpoint_choice import CheckpointSearch, Choice
from trainwright.trainer.inputs import check_module
from trainwright.trainer.run import Parts, Run
from trainwright.trainer.sources import LoaderSource, find_source, read_datamodule


class Request(NamedTuple):
    """The arguments of a call."""

    call: str
    module: Module
    loaders: Any
    datamodule: DataModule | None
    source: LoaderSource
    ckpt_path: str | os.PathLike[str] | None
    verify: Verify
    fresh: tuple[str, ...] = ()


def read_fit(
    model: Any, train_loaders: Any, val_loaders: Any, datamodule: Any, ckpt_path: Any, verify: Verify, fresh: Any
) -> Request:
    """Return the request of a fit; refuse a module or data that cannot be trained (TypeError, ValueError)."""
    fresh = checked_fresh(fresh, ckpt_path)
    check_module(model, ["training_step", "configure_optimizers"], "fit")
    if ckpt_path == "auto":
        ckpt_path = overridden("fit", "ckpt_path", ckpt_path)
    loaders, datamodule = read_datamodule(train_loaders, datamodule, "train_dataloaders", "fit")
    source = find_source("train", loaders, datamodule, model, "train_dataloaders", "fit")
    if not source.is_defined:
        source.load()  # which says what is missing
    return Request("fit", model, loaders, datamodule, source, ckpt_path, verify, fresh)


def read_evaluation(
    latest: Run, call: str, stage: str, model: Any, loaders: Any, ckpt_path: Any, datamodule: Any, verify: Verify
) -> Request:
    """Return the request of an evaluation; refuse what cannot be evaluated (TypeError, ValueError).

    Without a module it is that of the `latest` run, with the weights of its best checkpoint if there is one.
    """
    best = next((each.best_model_path for each in latest.checkpoint_callbacks if each.best_model_path), "")
    if model is None and ckpt_path is None and best:
        ckpt_path = "best"
        latest.trainer.print(f"trainer.{call} was given no module: it takes the best checkpoint, {best}")
    has_none = ckpt_path in ("", "best") and not best
    if has_none and latest.settings.fast_dev_run and latest.module is not None:
        latest.trainer.print(f"trainer.{call}: fast_dev_run saves no checkpoint, so the weights in memory are taken.")
        ckpt_path = None
    if has_none:
        ckpt_path = overridden(call, "ckpt_path", ckpt_path)
    module: Any = model if model is not None else latest.module
    check_module(module, [] if stage == "predict" else [f"{stage}_step"], call)
    loaders, given_datamodule = read_datamodule(loaders, datamodule, "dataloaders", call)
    # Without a module the call is about the latest run, and so about its data.
    if given_datamodule is None and loaders is None and model is None:
        given_datamodule = latest.datamodule
    source = find_source(stage, loaders, given_datamodule, module, "dataloaders", call)
    if not source.is_defined:
        source.load()  # which says what is missing
    return Request(call, module, loaders, given_datamodule, source, ckpt_path, verify)


def choose_checkpoint(parts: Parts, callbacks: list[Any], request: Request) -> Choice:
    """Return the verified checkpoint that ckpt_path means, once the ranks agree on settings. Collective."""
    refuse_unlike_arguments(parts.settings.shared(callbacks), "Trainer", parts.engine.ranks)
    search = CheckpointSearch(
        parts.engine,
        callbacks,
        parts.loggers,
        parts.root,
        request.call,
        request.verify,
        is_trial=request.call == "fit" and bool(parts.settings.fast_dev_run),
        say=parts.trainer.print,
    )
    return search.choose(request.ckpt_path)
