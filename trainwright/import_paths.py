"""The module paths of Lightning and Accelerate, for scripts in which only the package's name changed.

`from trainwright.utilities.rank_zero import rank_zero_only` finds the name wherever it lives here. These modules have no file,
and exist once they are imported; type checkers do not see them.
"""

from __future__ import annotations

import dis
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import Any

PATHS = """
    utils utilities utilities.combined_loader utilities.exceptions utilities.grads utilities.model_summary
    utilities.rank_zero utilities.seed utilities.types core core.callback core.datamodule core.hooks core.mixins
    core.mixins.hparams_mixin core.module core.optimizer callbacks.callback
    callbacks.checkpoint callbacks.lambda_function callbacks.lr_finder
    callbacks.lr_monitor callbacks.progress callbacks.progress.progress_bar callbacks.progress.rich_progress
    callbacks.progress.tqdm_progress callbacks.spike
    callbacks.stochastic_weight_avg loggers.csv_logs loggers.logger plugins
    plugins.environments plugins.precision profilers.profiler strategies.parallel strategies.single_device
    strategies.strategy tuner tuner.batch_size_scaling tuner.lr_finder tuner.tuning
    accelerator big_modeling data_loader launchers local_sgd logging state tracking
    utils.dataclasses utils.memory utils.operations utils.other utils.random
"""
"""Paths below the package; a real module of the same name comes first."""
_PATHS = frozenset(PATHS.split())

_OTHER_HOMES = {
    "trainwright.data.transfer": "to_device",
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
    "HyperparametersMixin": "HyperParameters",
    "DummyLogger": "SilentLogger",
    "MisconfigurationException": "ValueError",
}
_BY_PATH = {
    ("trainwright.utilities.model_summary", "ModelSummary"): ("trainwright.callbacks.layer_summary", "LayerSummary"),
    ("trainwright.utilities.model_summary", "summarize"): ("trainwright.callbacks.layer_summary", "LayerSummary"),
}
"""Names that mean something else under one path."""
ELSEWHERE = {
    "Fabric": "for your own loop use tw.Accelerator",
    "LightningCLI": "it is trainwright.cli.LightningCLI",
    "GPUStatsMonitor": "use DeviceStatsMonitor",
    "ModelParallelStrategy": "strategy='fsdp' shards a module; tensor parallelism is missing",
    "DummyOptim": "make the optimizer in the script",
    "DummyScheduler": "make the scheduler in the script",
    "gather_object": "tw.gather takes plain data",
    "broadcast_object_list": "tw.broadcast takes plain data",
    "dispatch_model": "inference of models larger than a device is missing",
    "cpu_offload": "inference of models larger than a device is missing",
    "load_checkpoint_and_dispatch": "inference of models larger than a device is missing",
    "infer_auto_device_map": "inference of models larger than a device is missing",
    "disk_offload": "inference of models larger than a device is missing",
    "load_checkpoint_in_model": "load the tensors of safetensors.torch.load_file into the model before prepare",
    "prepare_pippy": "inference in a pipeline is missing",
    "send_to_device": "tensors have .to(device), and a prepared loader moves its batches",
    "get_logger": "use logging.getLogger, or tw.rank_zero_info",
    "LoggerType": "log_with takes names, such as 'tensorboard'",
    "GeneralTracker": "subclass tw.Logger, and pass an instance to log_with",
    "TorchDynamoPlugin": "Accelerator(dynamo_backend='inductor'), or model.compile(...) before prepare",
    "DynamoBackend": "dynamo_backend takes torch's names, such as 'inductor'",
    "PrecisionType": "mixed_precision takes 'no', 'fp16' and 'bf16'",
    "RNGType": "rng_types takes names, such as 'torch'",
    "FP8RecipeKwargs": "fp8 is missing",
    "MegatronLMPlugin": "tensor parallelism is missing; FullyShardedDataParallelPlugin and DeepSpeedPlugin shard a model",
    "ParallelismConfig": "tensor parallelism is missing; FullyShardedDataParallelPlugin and DeepSpeedPlugin shard a model",
}
"""Names of Lightning and Accelerate that do not exist here, and what to do instead."""
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
    for folder in _FOLDERS:
        value = getattr(importlib.import_module(folder), known, None)
        if value is not None:
            return value
    raise ImportError(
        f"trainwright has no {name!r}, as in {path}.{name}{instead_of(name)}; docs/migrating.md lists what to use instead of "
        "names that are missing.",
        name=path,
    )


def instead_of(name: str) -> str:
    """Return ": what to use" for a name that is missing; "" if it is not known."""
    return f": {ELSEWHERE[name]}" if name in ELSEWHERE else ""


class PathFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the modules of PATHS; Python asks it last."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, below = fullname.partition(".")
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
            except ImportError as error:
                if _imports(sys._getframe(1)):
                    raise
                raise AttributeError(str(error), name=name) from None  # pickle and hasattr ask any module for any name

        module.__getattr__ = look_up  # type: ignore[method-assign]


def _imports(frame: FrameType) -> bool:
    """Return whether a frame is at `from ... import name`, which would show an AttributeError without its text."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"


def install() -> None:
    """Let Python find the modules; called when the package is imported."""
    sys.meta_path.append(PathFinder())
