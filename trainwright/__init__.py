"""Trainwright trains PyTorch models. One changed argument speeds the training up, or lets a larger model fit.

>>> import trainwright as tw

Public names are loaded at their first use, so importing the package costs little more than importing torch.
`LightningModule` and `LightningDataModule` are aliases of Module and DataModule.
"""

from __future__ import annotations

import dis
import importlib
import sys
from typing import Any

try:
    import fcntl  # noqa: F401
except ImportError as error:
    raise ImportError("trainwright needs Linux or macOS; Windows is not supported. Use WSL there.") from error


__version__ = "0.1.0"

_HOMES = {
    "trainwright.checkpoint.foreign_formats": "load_weights",
    "trainwright.data.buckets": "LengthBucketSampler",
    "trainwright.data.combined_loader": "CombinedLoader",
    "trainwright.data.datamodule": "DataModule",
    "trainwright.data.packing": "PackedDataset check_packing document_mask",
    "trainwright.data.padding": "PadCollate pad_collate",
    "trainwright.data.seeding": "isolate_rng seed_everything",
    "trainwright.engine.engine": "Engine",
    "trainwright.memory.memory_estimate": "estimate_memory",
    "trainwright.errors": "CheckpointError LaunchError RunStopped TrainwrightError WorkerFailed",
    "trainwright.loggers": "CSVLogger Logger MLFlowLogger TensorBoardLogger WandbLogger",
    "trainwright.module": "Module",
    "trainwright.precision": "Precision",
    "trainwright.precision.float8": "Float8Precision",
    "trainwright.profilers": "AdvancedProfiler Profiler PyTorchProfiler SimpleProfiler",
    "trainwright.rank_zero": "rank_zero_info rank_zero_only rank_zero_warn",
    "trainwright.raw_loop.accelerator": "Accelerator",
    "trainwright.raw_loop.bare_models": "extract_model_from_parallel init_empty_weights init_on_device",
    "trainwright.raw_loop.batch_size": "find_executable_batch_size release_memory",
    "trainwright.raw_loop.dataloaders": "DataLoaderConfiguration set_seed skip_first_batches",
    "trainwright.raw_loop.gathering": "broadcast gather pad_across_processes reduce synchronize_rng_states",
    "trainwright.raw_loop.job_states": "AcceleratorState DistributedType GradientState PartialState",
    "trainwright.raw_loop.launchers": "debug_launcher notebook_launcher",
    "trainwright.raw_loop.options": "AutocastKwargs DDPCommunicationHookType DistributedDataParallelKwargs GradScalerKwargs "
    "InitProcessGroupKwargs ProfileKwargs",
    "trainwright.raw_loop.plugins": "DeepSpeedPlugin FullyShardedDataParallelPlugin GradientAccumulationPlugin",
    "trainwright.raw_loop.project": "ProjectConfiguration",
    "trainwright.strategies": "Strategy",
    "trainwright.strategies.ddp.strategy": "DDPStrategy",
    "trainwright.strategies.oss.strategy": "ShardedDDPStrategy",
    "trainwright.strategies.zero.strategy": "DeepSpeedStrategy",
    "trainwright.strategies.fsdp2.strategy": "FSDPStrategy",
    "trainwright.strategies.whole_module": "gather_module",
    "trainwright.trainer.trainer": "Trainer",
    "trainwright.trainer.tuner": "Tuner",
}
"""The modules of the public names, except callbacks. __init__.pyi has them for type checkers."""
_CALLBACKS = "trainwright.callbacks"
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
_ALIASES = {"LightningModule": "Module", "LightningDataModule": "DataModule"}

_PACKAGES = ("callbacks", "cli", "loggers", "optim", "profilers", "strategies")
"""Packages, and a module, that may be used in full names, such as `tw.callbacks.EarlyStopping`."""


def __getattr__(name: str) -> Any:
    if name == "pytorch":  # as in `L.pytorch.callbacks.EarlyStopping`
        return sys.modules[__name__]
    if name in _PACKAGES:
        return importlib.import_module(f"trainwright.{name}")
    if name == "__all__":
        return sorted([*_HOME_OF, *_ALIASES, *importlib.import_module(_CALLBACKS).__all__, "__version__"])
    original = _ALIASES.get(name, name)
    home = importlib.import_module(_HOME_OF.get(original, _CALLBACKS))
    if original not in _HOME_OF and original not in home.__all__:
        text = f"module 'trainwright' has no attribute {name!r}{_near(name)}"
        frame = sys._getframe(1)
        is_import = dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"  # hides an AttributeError's text
        raise ImportError(text, name="trainwright") if is_import else AttributeError(text, name=name)
    value = getattr(home, original)
    globals()[name] = value  # so this is called once for each name
    return value


def _near(name: str) -> str:
    from trainwright.arguments import instead_of
    from trainwright.errors import did_you_mean

    if name in ("core", "utilities", "utils"):
        return ". `trainwright migrate SCRIPT` rewrites the imports of a Lightning or Accelerate script."
    if instead := instead_of(name):
        return f"{instead}. See docs/migrating.md."
    return f".{did_you_mean(name, [*__dir__(), *_PACKAGES])}"


def __dir__() -> list[str]:
    names: list[str] = __getattr__("__all__")
    return names
