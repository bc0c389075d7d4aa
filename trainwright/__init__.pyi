"""The public names, for type checkers. __init__.py loads them at their first use."""

from trainwright.callbacks import *  # noqa: F403
from trainwright.checkpoint.foreign_formats import load_weights as load_weights
from trainwright.data.buckets import LengthBucketSampler as LengthBucketSampler
from trainwright.data.combined_loader import CombinedLoader as CombinedLoader
from trainwright.data.datamodule import DataModule as DataModule
from trainwright.data.packing import PackedDataset as PackedDataset
from trainwright.data.packing import check_packing as check_packing
from trainwright.data.packing import document_mask as document_mask
from trainwright.data.padding import PadCollate as PadCollate
from trainwright.data.padding import pad_collate as pad_collate
from trainwright.data.seeding import isolate_rng as isolate_rng
from trainwright.data.seeding import seed_everything as seed_everything
from trainwright.engine.engine import Engine as Engine
from trainwright.errors import CheckpointError as CheckpointError
from trainwright.errors import LaunchError as LaunchError
from trainwright.errors import RunStopped as RunStopped
from trainwright.errors import TrainwrightError as TrainwrightError
from trainwright.errors import WorkerFailed as WorkerFailed
from trainwright.loggers import CSVLogger as CSVLogger
from trainwright.loggers import Logger as Logger
from trainwright.loggers import MLFlowLogger as MLFlowLogger
from trainwright.loggers import TensorBoardLogger as TensorBoardLogger
from trainwright.loggers import WandbLogger as WandbLogger
from trainwright.memory.memory_estimate import estimate_memory as estimate_memory
from trainwright.module import Module as Module
from trainwright.precision import Precision as Precision
from trainwright.precision.float8 import Float8Precision as Float8Precision
from trainwright.profilers import AdvancedProfiler as AdvancedProfiler
from trainwright.profilers import Profiler as Profiler
from trainwright.profilers import PyTorchProfiler as PyTorchProfiler
from trainwright.profilers import SimpleProfiler as SimpleProfiler
from trainwright.rank_zero import rank_zero_info as rank_zero_info
from trainwright.rank_zero import rank_zero_only as rank_zero_only
from trainwright.rank_zero import rank_zero_warn as rank_zero_warn
from trainwright.raw_loop.accelerator import Accelerator as Accelerator
from trainwright.raw_loop.bare_models import extract_model_from_parallel as extract_model_from_parallel
from trainwright.raw_loop.bare_models import init_empty_weights as init_empty_weights
from trainwright.raw_loop.bare_models import init_on_device as init_on_device
from trainwright.raw_loop.batch_size import find_executable_batch_size as find_executable_batch_size
from trainwright.raw_loop.batch_size import release_memory as release_memory
from trainwright.raw_loop.dataloaders import DataLoaderConfiguration as DataLoaderConfiguration
from trainwright.raw_loop.dataloaders import set_seed as set_seed
from trainwright.raw_loop.dataloaders import skip_first_batches as skip_first_batches
from trainwright.raw_loop.gathering import broadcast as broadcast
from trainwright.raw_loop.gathering import gather as gather
from trainwright.raw_loop.gathering import pad_across_processes as pad_across_processes
from trainwright.raw_loop.gathering import reduce as reduce
from trainwright.raw_loop.gathering import synchronize_rng_states as synchronize_rng_states
from trainwright.raw_loop.job_states import AcceleratorState as AcceleratorState
from trainwright.raw_loop.job_states import DistributedType as DistributedType
from trainwright.raw_loop.job_states import GradientState as GradientState
from trainwright.raw_loop.job_states import PartialState as PartialState
from trainwright.raw_loop.launchers import debug_launcher as debug_launcher
from trainwright.raw_loop.launchers import notebook_launcher as notebook_launcher
from trainwright.raw_loop.options import AutocastKwargs as AutocastKwargs
from trainwright.raw_loop.options import DDPCommunicationHookType as DDPCommunicationHookType
from trainwright.raw_loop.options import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from trainwright.raw_loop.options import GradScalerKwargs as GradScalerKwargs
from trainwright.raw_loop.options import InitProcessGroupKwargs as InitProcessGroupKwargs
from trainwright.raw_loop.options import ProfileKwargs as ProfileKwargs
from trainwright.raw_loop.plugins import DeepSpeedPlugin as DeepSpeedPlugin
from trainwright.raw_loop.plugins import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from trainwright.raw_loop.plugins import GradientAccumulationPlugin as GradientAccumulationPlugin
from trainwright.raw_loop.project import ProjectConfiguration as ProjectConfiguration
from trainwright.strategies import Strategy as Strategy
from trainwright.strategies.ddp.strategy import DDPStrategy as DDPStrategy
from trainwright.strategies.fsdp2.strategy import FSDPStrategy as FSDPStrategy
from trainwright.strategies.oss.strategy import ShardedDDPStrategy as ShardedDDPStrategy
from trainwright.strategies.whole_module import gather_module as gather_module
from trainwright.strategies.zero.strategy import DeepSpeedStrategy as DeepSpeedStrategy
from trainwright.trainer.trainer import Trainer as Trainer
from trainwright.trainer.tuner import Tuner as Tuner

LightningModule = Module
LightningDataModule = DataModule

__version__: str
__all__: list[str]
