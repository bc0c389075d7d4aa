"""TrainwrightCLI: a training script's command line and config files, made from the signatures of its classes by jsonargparse.

fit, validate, test, predict      command_line.py: the subcommands, and the objects of a run from a config
--optimizer, link_arguments       argument_parser.py: jsonargparse's parser, extended for modules, data and optimizers
config.yaml                       saved_config.py: stores a run's config, and finds it again
a wrong key                       config_errors.py: its file and line, and the nearest name
"""

try:
    import jsonargparse as _jsonargparse  # noqa: F401 - for a plain error, before the files that need it
except ImportError as error:
    raise ImportError('trainwright.cli needs jsonargparse: pip install "trainwright[cli]".') from error

from trainwright.cli.argument_parser import (
    LRSchedulerCallable,
    OptimizerCallable,
    ReduceLROnPlateau,
    TrainwrightArgumentParser,
    instantiate_class,
)
from trainwright.cli.argument_parser import TrainwrightArgumentParser as LightningArgumentParser
from trainwright.cli.command_line import ArgsType, TrainwrightCLI
from trainwright.cli.command_line import TrainwrightCLI as LightningCLI
from trainwright.cli.saved_config import SaveConfigCallback, stored_config

__all__ = [
    "ArgsType", "LRSchedulerCallable", "LightningArgumentParser", "LightningCLI", "OptimizerCallable",
    "ReduceLROnPlateau", "SaveConfigCallback", "TrainwrightArgumentParser", "TrainwrightCLI", "instantiate_class",
    "stored_config",
]  # fmt: skip
