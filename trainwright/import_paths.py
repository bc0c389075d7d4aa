"""The module paths of Lightning and Accelerate, for scripts in which only the package's name changed.

`from trainwright.utilities.rank_zero import rank_zero_only` finds the name wherever it lives here. These modules have no file,
and exist once they are imported; type checkers do not see them.
"""

from __future__ import annotations

import difflib
import dis
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import Any

from trainwright.replaced_names import instead_of

PATHS = """
    utils utilities utilities.apply_func utilities.argparse utilities.cloud_io utilities.combined_loader utilities.compile
    utilities.consolidate_checkpoint utilities.data utilities.deepspeed utilities.distributed utilities.enums
    utilities.exceptions utilities.grads utilities.imports utilities.memory utilities.migration
    utilities.migration.migration utilities.migration.utils utilities.model_helpers utilities.model_registry
    utilities.model_summary utilities.model_summary.model_summary utilities.model_summary.model_summary_deepspeed
    utilities.parameter_tying utilities.parsing utilities.rank_zero utilities.seed utilities.signature_utils
    utilities.testing utilities.types utilities.upgrade_checkpoint utilities.warnings accelerators accelerators.accelerator
    accelerators.cpu accelerators.cuda accelerators.mps accelerators.xla core core.callback core.datamodule core.hooks
    core.mixins core.mixins.hparams_mixin core.module core.optimizer core.saving callbacks.callback callbacks.checkpoint
    callbacks.lambda_function callbacks.lr_finder callbacks.lr_monitor callbacks.progress callbacks.progress.progress_bar
    callbacks.progress.rich_progress callbacks.progress.tqdm_progress callbacks.spike callbacks.stochastic_weight_avg demos
    demos.boring_classes demos.lstm demos.mnist_datamodule demos.transformer fabric fabric.accelerators fabric.fabric
    fabric.loggers fabric.plugins fabric.plugins.environments fabric.plugins.precision fabric.strategies fabric.utilities
    fabric.utilities.apply_func fabric.utilities.cloud_io fabric.utilities.data fabric.utilities.distributed
    fabric.utilities.exceptions fabric.utilities.imports fabric.utilities.rank_zero fabric.utilities.seed
    fabric.utilities.throughput fabric.utilities.types fabric.wrappers loggers.csv_logs loggers.litlogger loggers.logger
    loggers.neptune loggers.utilities loops loops.evaluation_loop loops.fetchers loops.fit_loop loops.loop
    loops.optimization loops.optimization.automatic loops.optimization.closure loops.optimization.manual
    loops.prediction_loop loops.progress loops.training_epoch_loop loops.utilities overrides overrides.distributed plugins
    plugins.environments plugins.io plugins.io.async_plugin plugins.io.checkpoint_plugin plugins.io.torch_plugin
    plugins.io.wrapper plugins.io.xla_plugin plugins.layer_sync plugins.precision plugins.precision.amp
    plugins.precision.bitsandbytes plugins.precision.deepspeed plugins.precision.double plugins.precision.fsdp
    plugins.precision.half plugins.precision.precision plugins.precision.transformer_engine plugins.precision.xla
    profilers.profiler profilers.xla serve serve.servable_module serve.servable_module_validator strategies.launchers
    strategies.launchers.launcher strategies.launchers.multiprocessing strategies.launchers.subprocess_script
    strategies.launchers.xla strategies.model_parallel strategies.parallel strategies.single_xla strategies.strategy
    strategies.xla trainer.call trainer.configuration_validator trainer.connectors trainer.connectors.accelerator_connector
    trainer.connectors.callback_connector trainer.connectors.checkpoint_connector trainer.connectors.data_connector
    trainer.connectors.logger_connector trainer.connectors.logger_connector.fx_validator
    trainer.connectors.logger_connector.logger_connector trainer.connectors.logger_connector.result
    trainer.connectors.signal_connector trainer.setup tuner tuner.batch_size_scaling tuner.lr_finder tuner.tuning
    accelerator big_modeling data_loader launchers local_sgd logging state tracking utils.dataclasses utils.memory
    utils.operations utils.other utils.random
"""
"""Paths below the package; a real module of the same name comes first."""
_PATHS = frozenset(PATHS.split())

_OTHER_HOMES = {
    "trainwright.data.transfer": "to_device",
    "trainwright.engine.optimizers": "SchedulerConfig",
    "trainwright.engine.prepared": "PreparedOptimizer",
    "trainwright.gradient_norms": "grad_norm",
    "trainwright.hyperparameters": "AttributeDict HyperParameters",
    "trainwright.rank_zero": "rank_zero_debug rank_zero_deprecation",
    "trainwright.step_types": "EVAL_DATALOADERS LRSchedulerPLType LRSchedulerTypeUnion OptimizerLRScheduler "
    "OptimizerLRSchedulerConfig STEP_OUTPUT TRAIN_DATALOADERS",
}
"""Homes of names that are found under these paths only."""
_HOME_OF = {name: home for home, names in _OTHER_HOMES.items() for name in names.split()}
_RENAMED = {
    "move_data_to_device": "to_device",
    "LightningOptimizer": "PreparedOptimizer",
    "LRSchedulerConfig": "SchedulerConfig",
    "HyperparametersMixin": "HyperParameters",
    "DummyLogger": "SilentLogger",
    "MisconfigurationException": "ValueError",
}
_BY_PATH = {
    (path, name): ("trainwright.callbacks.layer_summary", "LayerSummary")
    for path in ("trainwright.utilities.model_summary", "trainwright.utilities.model_summary.model_summary")
    for name in ("ModelSummary", "summarize")
}
"""Names that mean something else under one path."""
_FOLDERS = (
    "trainwright",
    "trainwright.callbacks",
    "trainwright.loggers",
    "trainwright.profilers",
    "trainwright.strategies",
)


def find(name: str, path: str) -> Any:
    """Return what Lightning or Accelerate call `name`; ImportError if it is missing."""
    if (path, name) in _BY_PATH:
        home, own = _BY_PATH[path, name]
        return getattr(importlib.import_module(home), own)
    known = _RENAMED.get(name, name)
    if known == "ValueError":
        return ValueError  # what wrong settings raise here
    if known in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[known]), known)
    if not instead_of(name, path):  # one that means something else there
        for folder in _FOLDERS:
            value = getattr(importlib.import_module(folder), known, None)
            if value is not None:
                return value
    raise ImportError(_text(name, path), name=path)


def missing(name: str, path: str, frame: FrameType) -> Exception:
    """Return the error for a name that a module does not have: an ImportError where `frame` imports it."""
    return error_of(_text(name, path), name, path, frame)


def refusing(path: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module, which explains each name that the module does not have."""

    def refuse(name: str) -> Any:
        raise missing(name, path, sys._getframe(1))

    return refuse


def error_of(text: str, name: str, path: str, frame: FrameType) -> Exception:
    """Return an ImportError where `frame` imports the name, else an AttributeError: pickle and hasattr ask for any name."""
    return ImportError(text, name=path) if _imports(frame) else AttributeError(text, name=name)


def _text(name: str, path: str) -> str:
    said = f"trainwright has no {name!r}, as in {path}.{name}"
    if instead := instead_of(name, path):
        return f"{said}{instead} (docs/migrating.md)."
    if name.startswith("_"):
        return f"{said}, whose underscore says that it is private there."
    close = difflib.get_close_matches(name, getattr(sys.modules.get(path), "__all__", ()), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{said}; docs/migrating.md lists the names that are missing, with what to use instead.{hint}"


class PathFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the modules of PATHS; Python asks it last."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, below = fullname.partition(".")
        if fullname == "trainwright.pytorch":
            raise ModuleNotFoundError(
                "'trainwright.pytorch' does not exist: leave out pytorch, as in trainwright.callbacks.",
                name=fullname,
            )
        if package != "trainwright" or below not in _PATHS:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=any(p.startswith(f"{below}.") for p in _PATHS))

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = "Names of Lightning and Accelerate; see trainwright.import_paths."

        def look_up(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if f"{module.__name__}.{name}".partition(".")[2] in _PATHS:
                return importlib.import_module(f"{module.__name__}.{name}")
            try:
                return find(name, module.__name__)
            except ImportError:
                raise missing(name, module.__name__, sys._getframe(1)) from None

        module.__getattr__ = look_up  # type: ignore[method-assign]


def _imports(frame: FrameType) -> bool:
    """Return whether a frame is at `from ... import name`, which would show an AttributeError without its text."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"


def install() -> None:
    """Let Python find the modules; called when the package is imported."""
    sys.meta_path.append(PathFinder())
