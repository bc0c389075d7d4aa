"""TrainwrightCLI: makes a model, its data and a Trainer of a command's arguments and configs, and calls the run."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import yaml
from jsonargparse import Namespace
from torch.optim import Optimizer

from trainwright.callbacks.base import Callback
from trainwright.cli.argument_parser import (
    AUTOMATIC,
    Linked,
    ReduceLROnPlateau,
    TrainwrightArgumentParser,
    as_class,
    instantiate_class,
    instantiated,
    spec_of,
)
from trainwright.cli.config_errors import constructor_error
from trainwright.cli.saved_config import SaveConfigCallback, newest_checkpoint, plain_config, stored_config
from trainwright.data.datamodule import DataModule
from trainwright.data.seeding import seed_everything
from trainwright.errors import CheckpointError
from trainwright.module import Module, is_overridden
from trainwright.rank_zero import rank_zero_only, rank_zero_warn
from trainwright.strategies import STRATEGIES
from trainwright.trainer.trainer import Trainer

ArgsType = Sequence[str] | dict[str, Any] | Namespace | None
"""The type of `args`: a list of words, a config, or None for the arguments of the program."""
INHERITED = ("default_env", "env_prefix", "parser_mode")
"""Options of the program's parser that its subcommands' parsers share."""
SEARCHED = ("last", "auto")
"""Values of `--ckpt_path` for which a checkpoint is searched before the Trainer is made."""


class TrainwrightCLI:
    """A program that trains, validates, tests and predicts, by its command line, config files and environment variables.

    `python train.py fit --config config.yaml --trainer.max_epochs 5`: the arguments of the Trainer, the model and the data are
    arguments of the program, with the types of their signatures. A later argument wins over an earlier one, and both win over
    the defaults. The config of `fit` is stored in the run's folder and its checkpoints. With `--ckpt_path` and without
    `--config`, the other arguments come from the checkpoint's config.

    Args:
        model_class: the Module's class, or a function that returns a Module. With None, `--model NAME` accepts any subclass.
        datamodule_class: the same for a DataModule, as `--data`, which is optional with None.
        save_config_callback: the callback that stores the config, or None.
        save_config_kwargs: its arguments, such as `{"overwrite": True}`.
        trainer_class: the Trainer's class, or a function that returns a Trainer.
        trainer_defaults: defaults of the Trainer's arguments. Callbacks are added to the callbacks of the config.
        seed_everything_default: the default of `--seed_everything`: a seed, True for a random one, False for none.
        parser_kwargs: arguments of the parser, such as `{"default_env": True}`, or of a subcommand's parser, by its name.
        parser_class: the parser's class.
        subclass_mode_model, subclass_mode_data: accept subclasses of the class, by `class_path` and `init_args`.
        args: words, or a config as a dict or a Namespace, to parse instead of the program's arguments.
        run: False only makes the objects, without subcommands.
        auto_configure_optimizers: add `--optimizer` and `--lr_scheduler`, whose objects replace configure_optimizers.
    """

    model: Module
    datamodule: DataModule | None
    trainer: Trainer

    def __init__(
        self,
        model_class: type[Module] | Callable[..., Module] | None = None,
        datamodule_class: type[DataModule] | Callable[..., DataModule] | None = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: Mapping[str, Any] | None = None,
        trainer_class: type[Trainer] | Callable[..., Trainer] = Trainer,
        trainer_defaults: Mapping[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: Mapping[str, Any] | None = None,
        parser_class: type[TrainwrightArgumentParser] = TrainwrightArgumentParser,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: ArgsType = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
    ) -> None:
        self.save_config_callback = save_config_callback
        self.save_config_kwargs = dict(save_config_kwargs or {})
        self.trainer_class = trainer_class
        self.trainer_defaults = dict(trainer_defaults or {})
        self.seed_everything_default = seed_everything_default
        self.parser_class = parser_class
        self.auto_configure_optimizers = auto_configure_optimizers
        self._model_class, self._datamodule_class = model_class or Module, datamodule_class or DataModule
        self._takes_any = {
            "model": model_class is None or subclass_mode_model,
            "data": datamodule_class is None or subclass_mode_data,
        }
        self._requires_data = datamodule_class is not None
        self.subcommand: str | None = None
        self._notice = ""
        self.parser = self._make_parser(dict(parser_kwargs or {}), run)
        self.config: Namespace = self.parse_arguments(self.parser, args)
        """The parsed config. With subcommands it is below the name of the called one."""
        self.subcommand = self.config.get("subcommand") if run else None
        self._check_linked()
        self._seed()
        self.before_instantiate_classes()
        self.config_init: Namespace
        """The config with its objects."""
        self.instantiate_classes()
        if self._notice and rank_zero_only.rank == 0:  # after the Trainer, which may start the job's processes
            print(self._notice, file=sys.stderr)
        if self.subcommand is not None:
            self._run(self.subcommand)

    # Methods that a subclass may override.

    def add_arguments_to_parser(self, parser: TrainwrightArgumentParser) -> None:
        """Override it to add arguments, link them and set their defaults. Called for the parser of every subcommand."""

    def before_instantiate_classes(self) -> None:
        """Called once the config is parsed."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the subcommands, which are methods of the Trainer, and their arguments that the program hides."""
        evaluated = {name: {"model", "dataloaders", "datamodule"} for name in ("validate", "test", "predict")}
        return {"fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"}, **evaluated}

    @staticmethod
    def configure_optimizers(module: Module, optimizer: Optimizer, lr_scheduler: Any = None) -> Any:
        """Return the value of the module's configure_optimizers for the config's optimizer and scheduler."""
        if lr_scheduler is None:
            return optimizer
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            config = {"scheduler": lr_scheduler, "monitor": lr_scheduler.monitor}
            return {"optimizer": optimizer, "lr_scheduler": config}
        return [optimizer], [lr_scheduler]

    def parse_arguments(self, parser: TrainwrightArgumentParser, args: ArgsType) -> Namespace:
        """Return the config of the arguments."""
        if isinstance(args, (dict, Namespace)):
            parsed: Namespace = parser.parse_object(args)
        else:
            words = sys.argv[1:] if args is None else list(args)
            parsed = parser.parse_args(self._with_stored_config(parser, words))
        return parsed

    def instantiate_classes(self) -> None:
        """Make the objects of the config: the model, the data, then the Trainer."""
        self.config_init = self._instantiated()
        self.datamodule = self._of(self.config_init, "data")
        self.model = self._of(self.config_init, "model")
        self._link_optimizers()
        self.trainer = self.instantiate_trainer()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Return a Trainer of the config. `kwargs` replace its arguments."""
        config = self._of(self.config_init, "trainer")
        arguments = {**self._left_open({} if config is None else dict(vars(config))), **kwargs}
        added = [self._of(self.config_init, key) for key in self._called_parser.callback_keys]
        callbacks = [
            *_listed(arguments.get("callbacks")),
            *(callback for callback in added if callback is not None),
            *_listed(self.trainer_defaults.get("callbacks")),
        ]
        if self.save_config_callback is not None and not arguments.get("fast_dev_run"):
            callbacks.append(
                self.save_config_callback(self._called_parser, self._of_command(self.config), **self.save_config_kwargs)
            )
        if callbacks:
            arguments["callbacks"] = callbacks
        try:
            return self.trainer_class(**arguments)
        except (TypeError, ValueError) as error:
            if self.trainer_class is not Trainer:  # the error may be in the code of a subclass
                raise
            self._called_parser.error(str(error), error)

    # The parsers.

    def _make_parser(self, options: dict[str, Any], run: bool) -> TrainwrightArgumentParser:
        names = self.subcommands() if run else {}
        of_commands = {name: dict(options.pop(name)) for name in names if isinstance(options.get(name), Mapping)}
        for path in STRATEGIES.values():  # which defines their short names
            importlib.import_module(path.partition(":")[0])
        parser = self._new_parser(**options)
        if not run:
            self._add_arguments(parser)
            return parser
        trainer = as_class(self.trainer_class)
        parsers = {}
        inherited = {name: value for name, value in options.items() if name in INHERITED}
        for name, hidden in names.items():
            method = getattr(trainer, name)
            text = (inspect.getdoc(method) or "").partition("\n")[0].partition("Collective")[0].strip()
            command = self._new_parser(**{"description": text, **inherited, **of_commands.get(name, {})})
            self._add_arguments(command)
            skipped = {*hidden} & {*inspect.signature(method).parameters}
            command.add_method_arguments(trainer, name, skip=skipped, fail_untyped=False)
            parsers[name] = (command, text)
        parser.add_subcommand_parsers(parsers)
        return parser

    def _new_parser(self, **options: Any) -> TrainwrightArgumentParser:
        parser = self.parser_class(**options)
        parser.add_config_argument()
        return parser

    def _add_arguments(self, parser: TrainwrightArgumentParser) -> None:
        seed, about = self.seed_everything_default, "The seed of the run; true for a random one, false for none."
        parser.add_argument("--seed_everything", type=bool | int, default=seed, help=about)
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        defaults = {f"trainer.{key}": value for key, value in self.trainer_defaults.items() if key != "callbacks"}
        parser.set_defaults(defaults)
        parser.add_lightning_class_args(self._model_class, "model", subclass_mode=self._takes_any["model"])
        parser.add_lightning_class_args(
            self._datamodule_class, "data", subclass_mode=self._takes_any["data"], required=self._requires_data
        )
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers:
            if not parser.optimizers:
                parser.add_optimizer_args()
            if not parser.schedulers:
                parser.add_lr_scheduler_args()
        parser.link_optimizers()

    def _arguments_of(self, name: str) -> set[str]:
        method = getattr(as_class(self.trainer_class), name)
        return set(inspect.signature(method).parameters) - self.subcommands()[name] - {"self"}

    def _arguments_of_others(self, name: str) -> set[str]:
        """Return the arguments in a stored config that are only for other subcommands, and ckpt_path."""
        taken = {command: self._arguments_of(command) for command in self.subcommands()}
        of_others = set().union(*(taken[command] for command in taken if command != name)) - taken[name]
        return of_others | {"ckpt_path"} | (taken.get("fit", set()) if name != "fit" else set())

    @property
    def _called_parser(self) -> TrainwrightArgumentParser:
        return self.parser if self.subcommand is None else self.parser.subcommands[self.subcommand]

    # The config.

    def _of_command(self, config: Namespace) -> Namespace:
        of_command: Namespace = config if self.subcommand is None else config[self.subcommand]
        return of_command

    def _of(self, config: Namespace, key: str, default: Any = None) -> Any:
        return self._of_command(config).get(key, default)

    def _seed(self) -> None:
        config = self._of_command(self.config)
        seed = config.get("seed_everything")
        if seed is not None and seed is not False:
            config["seed_everything"] = seed_everything(None if seed is True else seed)

    def _left_open(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the Trainer's arguments without defaults, which variables and the launcher may still set."""
        signatures = [inspect.signature(kind).parameters for kind in (Trainer, self.trainer_class)]
        defaults = {name: parameter.default for parameters in signatures for name, parameter in parameters.items()}

        def is_default(name: str, value: Any) -> bool:
            return name in defaults and type(value) is type(defaults[name]) and value == defaults[name]

        return {name: value for name, value in arguments.items() if not is_default(name, value)}

    def _with_stored_config(self, parser: TrainwrightArgumentParser, words: list[str]) -> list[str]:
        """Return the arguments, after the checkpoint's config if they name a checkpoint and no config."""
        name = words[0] if words else ""
        path = _value_of(words, "--ckpt_path")
        if name not in parser.subcommands or path in (None, "", "null", "best"):
            return words
        if any(word.partition("=")[0] in ("-c", "--config") for word in words):
            return words
        if path in SEARCHED:
            root = _value_of(words, "--trainer.default_root_dir") or self.trainer_defaults.get("default_root_dir")
            path = newest_checkpoint(str(root or "."), takes_weights=name != "fit")
        try:
            text = None if path is None else stored_config(path)
        except (CheckpointError, OSError):  # the Trainer will report the error
            text = None
        if text is None:
            return words
        stored = plain_config(text)
        for key in self._arguments_of_others(name):
            stored.pop(key, None)
        header = "".join(f"{line}\n" for line in text.splitlines() if line.startswith("#"))
        text = f"{header}{yaml.safe_dump(stored, sort_keys=False)}"
        self._notice = f"trainwright: arguments that are not in the command come from the config in {path}"
        for called in (parser, parser.subcommands[name]):
            called.note = (
                f"\nArguments that are not in the command come from the config in {path}. --config replaces it."
            )
        return [name, f"--config={text}", *words[1:]]

    # The objects.

    def _check_linked(self) -> None:
        """End the program if the config has a scheduler without an optimizer, or several of either."""
        parser = self._called_parser
        optimizers, schedulers = (self._chosen(linked) for linked in (parser.optimizers, parser.schedulers))
        for keys in (optimizers, schedulers):
            if len(keys) > 1:
                parser.error(
                    f"configure_optimizers returns one of each, but got {', '.join(f'--{key}' for key in keys)}. Pass only "
                    "one, or link them to the model in the program (link_to=)."
                )
        if schedulers and not optimizers:
            parser.error(f"--{schedulers[0]} needs an optimizer. Pass --{next(iter(parser.optimizers), 'optimizer')}.")

    def _chosen(self, linked: Mapping[str, Linked]) -> list[str]:
        """Return the keys of the config's objects for configure_optimizers."""
        return [key for key, target in linked.items() if target.link_to == AUTOMATIC and self._of(self.config, key)]

    def _instantiated(self) -> Namespace:
        """Return the config with its objects. If a class of this package rejects its arguments, the program ends."""
        try:
            return instantiated(self.parser, self.config)
        except Exception as error:
            cause, is_ours = constructor_error(error)
        if is_ours and isinstance(cause, (TypeError, ValueError, ImportError)):
            self._called_parser.error(str(cause), cause)
        raise cause

    def _link_optimizers(self) -> None:
        """Replace the module's configure_optimizers by the config's optimizer and scheduler."""
        parser, specs = self._called_parser, []
        for linked in (parser.optimizers, parser.schedulers):
            for key in self._chosen(linked):
                init, kind = self._of(self.config_init, key), linked[key].kind
                specs.append(init.as_dict() if isinstance(kind, tuple) else spec_of(kind, init))
        if not specs:
            return
        if is_overridden("configure_optimizers", self.model, Module):
            rank_zero_warn(
                f"the config's optimizer replaces the configure_optimizers of {type(self.model).__name__}. Remove one of them, "
                "or pass auto_configure_optimizers=False to the CLI.",
                stacklevel=3,
            )
        vars(self.model)["configure_optimizers"] = partial(_optimizers_of, self.model, type(self), *specs)

    def _run(self, name: str) -> None:
        taken = self._arguments_of(name)
        arguments = {key: value for key, value in vars(self._of_command(self.config_init)).items() if key in taken}
        arguments |= {"model": self.model}
        if self.datamodule is not None:
            arguments |= {"datamodule": self.datamodule}
        getattr(self, f"before_{name}", lambda: None)()
        before = self.trainer.run
        try:
            getattr(self.trainer, name)(**arguments)
        except CheckpointError as error:
            if arguments.get("ckpt_path") is None or self.trainer.run is not before:
                raise
            self._called_parser.error(str(error), error)  # a wrong argument, since no run has begun
        getattr(self, f"after_{name}", lambda: None)()


def _optimizers_of(
    module: Module, cli: type[TrainwrightCLI], optimizer: dict[str, Any], scheduler: dict[str, Any] | None = None
) -> Any:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    instance = instantiate_class((parameters,), optimizer)
    if scheduler is None:
        return cli.configure_optimizers(module, instance)
    return cli.configure_optimizers(module, instance, instantiate_class(instance, scheduler))


def _listed(callbacks: Any) -> list[Callback]:
    return [] if callbacks is None else list(callbacks) if isinstance(callbacks, Sequence) else [callbacks]


def _value_of(words: Sequence[str], option: str) -> str | None:
    value = None
    for word, following in pairwise([*words, ""]):
        if word == option:
            value = following
        elif word.startswith(f"{option}="):
            value = word.partition("=")[2]
    return value
