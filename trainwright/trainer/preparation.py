"""Preparation: the arguments of a call, checked, and the choice of its checkpoint."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from torch import nn

from trainwright.arguments import foreign_hint
from trainwright.checkpoint.reader import Verify
from trainwright.data.datamodule import DataModule
from trainwright.engine.script_settings import checked_fresh
from trainwright.errors import a_type_of
from trainwright.module import Module, is_overridden
from trainwright.overrides import overridden
from trainwright.tensor_names import is_compiled
from trainwright.trainer.run import Run
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


def check_module(module: Any, needed: list[str], call: str) -> None:
    """Raise TypeError unless it is a Module with the methods that the call needs."""
    if module is None:
        raise TypeError(f"trainer.{call} was given no module, and none was run before. Pass a trainwright.Module.")
    if isinstance(module, type):
        raise TypeError(f"trainer.{call} was given the class {module.__name__}. Pass an instance of it.")
    if not isinstance(module, Module):
        hint = foreign_hint(module)
        if is_compiled(module):
            hint = " Pass the module itself, and compile=True to the Trainer: it compiles the submodules that the steps call."
        elif not hint and isinstance(module, nn.Module):
            hint = " Subclass trainwright.Module, or use trainwright.Accelerator in your own loop."
        raise TypeError(f"trainer.{call} was given {a_type_of(module)}. Expected a trainwright.Module.{hint}")
    missing = [name for name in needed if not is_overridden(name, module, Module)]
    if missing:
        raise TypeError(f"trainer.{call} needs {' and '.join(missing)}, which {type(module).__name__} does not define.")
    if not hasattr(module, "_trainer"):
        raise TypeError(f"{type(module).__name__}.__init__ did not call super().__init__(). Call it first.")


def read_call(
    call: str, stage: str, module: Any, needed: list[str], loaders: Any, datamodule: Any, argument: str, *options: Any
) -> Request:
    """Return the request of a call. Reject a module or data that it cannot use (TypeError, ValueError)."""
    check_module(module, needed, call)
    loaders, datamodule = read_datamodule(loaders, datamodule, argument, call)
    source = find_source(stage, loaders, datamodule, module, argument, call)
    if not source.is_defined:
        source.load()  # raises the error
    return Request(call, module, loaders, datamodule, source, *options)


def read_fit(model: Any, loaders: Any, datamodule: Any, ckpt_path: Any, verify: Verify, fresh: Any) -> Request:
    fresh = checked_fresh(fresh, ckpt_path)
    if ckpt_path == "auto":
        ckpt_path = overridden("fit", "ckpt_path", ckpt_path)
    needed, options = ["training_step", "configure_optimizers"], (ckpt_path, verify, fresh)
    return read_call("fit", "train", model, needed, loaders, datamodule, "train_dataloaders", *options)


def read_evaluation(
    latest: Run, call: str, stage: str, model: Any, loaders: Any, ckpt_path: Any, datamodule: Any, verify: Verify
) -> Request:
    """Return the request of an evaluation.

    Without a module, evaluate the module of the `latest` run, with the weights of its best checkpoint if there is one.
    """
    best = next((each.best_model_path for each in latest.trainer.checkpoint_callbacks if each.best_model_path), "")
    if model is None and ckpt_path is None and best:
        ckpt_path = "best"
        latest.trainer.print(f"trainer.{call} was given no module: it takes the best checkpoint, {best}")
    if ckpt_path in ("", "best") and not best:
        if latest.settings.fast_dev_run and latest.module is not None:
            latest.trainer.print(
                f"trainer.{call}: fast_dev_run saves no checkpoint, so the weights in memory are taken."
            )
            ckpt_path = None
        ckpt_path = overridden(call, "ckpt_path", ckpt_path)
    if model is None:  # then the call is about the latest run, and so about its data
        model = latest.module
        if model is not None and loaders is None and datamodule is None:
            loaders, datamodule = _data_of(latest, stage, call)
    needed = [] if stage == "predict" else [f"{stage}_step"]
    return read_call(call, stage, model, needed, loaders, datamodule, "dataloaders", ckpt_path, verify)


def _data_of(latest: Run, stage: str, call: str) -> tuple[Any, Any]:
    """Return the loaders and the datamodule of the latest run. A hook for the stage comes before the latest loaders."""
    is_hooked = find_source(stage, None, latest.datamodule, latest.module, "", call).is_defined  # type: ignore[arg-type]
    loaders = latest.stages.validation.dataloaders if stage == "validation" and not is_hooked else None
    return loaders, latest.datamodule if loaders is None else None
