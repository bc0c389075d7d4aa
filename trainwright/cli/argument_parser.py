"""The parser of a TrainwrightCLI: jsonargparse's, with arguments for modules, data, callbacks, optimizers and schedulers."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, NoReturn

from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, class_from_function  # type: ignore[attr-defined]
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau as TorchReduceLROnPlateau

from trainwright.callbacks.base import Callback
from trainwright.cli.config_errors import explain
from trainwright.trainer.trainer import Trainer


class ReduceLROnPlateau(TorchReduceLROnPlateau):
    """Torch's ReduceLROnPlateau with the name of the metric that it follows."""

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


OptimizerCallable = Callable[[Iterable[Parameter]], Optimizer]
"""The type of an argument for an optimizer of a config. Call it with the parameters."""
LRSchedulerCallable = Callable[[Optimizer], LRScheduler | ReduceLROnPlateau]
"""The type of an argument for a scheduler of a config. Call it with the optimizer."""
HAS_NEW_NAMES = hasattr(ArgumentParser, "instantiate")
"""jsonargparse 4.49 renamed `instantiate_classes` and `dump(skip_none=)`, and warns about the earlier names."""
AUTOMATIC = "AUTOMATIC"
"""The `link_to` of optimizers and schedulers for the CLI's configure_optimizers."""


class Linked(NamedTuple):
    """An optimizer or a scheduler of the command line, and its target."""

    kind: type[Any] | tuple[type[Any], ...]
    link_to: str


class TrainwrightArgumentParser(ArgumentParser):
    """jsonargparse's ArgumentParser, with the same arguments. Abbreviated options are rejected.

    Variables of the environment, which are read with `default_env=True`, are named by `env_prefix` and the argument:
    `TW_FIT__TRAINER__MAX_EPOCHS`.
    """

    def __init__(self, *args: Any, env_prefix: str = "TW", allow_abbrev: bool = False, **kwargs: Any) -> None:
        from trainwright import __version__

        kwargs.setdefault("dump_header", [f"trainwright=={__version__}"])
        super().__init__(*args, env_prefix=env_prefix, allow_abbrev=allow_abbrev, **kwargs)
        self.callback_keys: list[str] = []
        """The keys of the callbacks from `add_lightning_class_args`."""
        self.optimizers: dict[str, Linked] = {}
        self.schedulers: dict[str, Linked] = {}
        self.subcommands: dict[str, TrainwrightArgumentParser] = {}
        """The parsers of the subcommands."""
        self.note = ""
        """A sentence at the end of every error message."""

    def parse_args(self, *args: Any, **kwargs: Any) -> Namespace:  # type: ignore[override]
        """Return the config of a command's arguments, as jsonargparse does."""
        parsed: Namespace = super().parse_args(*args, **kwargs)
        for name, value in vars(self.get_defaults(skip_validation=True)).items():
            if isinstance(value, Namespace) and not isinstance(parsed.get(name), Namespace):  # jsonargparse accepts it
                self.error(f"key '{name}' is {parsed.get(name)!r}; it needs the names and values of its arguments.")
        return parsed

    def add_config_argument(self) -> None:
        """Add `--config` (`-c`), and with it `--print_config`."""
        self.add_argument(
            "-c", "--config", action=ActionConfigFile, help="A configuration file (YAML or JSON), or its text."
        )

    def add_subcommand_parsers(self, parsers: Mapping[str, tuple[TrainwrightArgumentParser, str]]) -> None:
        """Add subcommands: their parsers and help texts, by name."""
        actions = self.add_subcommands()
        for name, (parser, text) in parsers.items():
            actions.add_subcommand(name, parser, help=text)
            self.subcommands[name] = parser

    def add_lightning_class_args(
        self, lightning_class: Any, nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> list[str]:
        """Add the arguments of a class's constructor, and return their names.

        Args:
            lightning_class: a class, such as a Module, a DataModule, a Trainer or a Callback, or a function that is annotated
                with the class that it returns. The Trainer gets an instance of every Callback.
            nested_key: the prefix of the names.
            subclass_mode: accept any subclass, by `class_path` and `init_args`.
            required: whether subclass_mode requires a class.
        """
        kind = as_class(lightning_class)
        if issubclass(kind, Callback):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            self.add_subclass_arguments(kind, nested_key, fail_untyped=False, required=required)
            return [nested_key]
        return list(
            self.add_class_arguments(kind, nested_key, fail_untyped=False, instantiate=not issubclass(kind, Trainer))
        )

    def add_optimizer_args(
        self,
        optimizer_class: type[Optimizer] | tuple[type[Optimizer], ...] = (Optimizer,),
        nested_key: str = "optimizer",
        link_to: str = AUTOMATIC,
    ) -> None:
        """Add the arguments of an optimizer.

        Args:
            optimizer_class: the class, or a tuple of classes, whose subclasses may be chosen by name.
            nested_key: the prefix of the names.
            link_to: with "AUTOMATIC" configure_optimizers returns it. Otherwise the argument, such as "model.optimizer_init",
                that gets its class_path and init_args for `instantiate_class`.
        """
        self._add_linked(self.optimizers, Optimizer, optimizer_class, nested_key, link_to, skip={"params"})

    def add_lr_scheduler_args(
        self,
        lr_scheduler_class: type[Any] | tuple[type[Any], ...] = (LRScheduler, ReduceLROnPlateau),
        nested_key: str = "lr_scheduler",
        link_to: str = AUTOMATIC,
    ) -> None:
        """Add the arguments of a learning rate scheduler, as `add_optimizer_args` does."""
        self._add_linked(self.schedulers, LRScheduler, lr_scheduler_class, nested_key, link_to, skip={"optimizer"})

    def _add_linked(
        self, linked: dict[str, Linked], base: type[Any], kind: Any, nested_key: str, link_to: str, skip: set[str]
    ) -> None:
        for choice in kind if isinstance(kind, tuple) else (kind,):
            if not (inspect.isclass(choice) and issubclass(choice, base)):
                raise TypeError(f"{nested_key} got {choice!r}; expected {base.__name__} or a subclass.")
        if isinstance(kind, tuple):
            self.add_subclass_arguments(
                kind, nested_key, required=False, instantiate=False, fail_untyped=False, skip=skip
            )
        else:
            self.add_class_arguments(kind, nested_key, instantiate=False, fail_untyped=False, skip=skip)
        linked[nested_key] = Linked(kind, link_to)

    def link_optimizers(self) -> None:
        """Link the optimizers and schedulers to their target arguments."""
        for key, linked in {**self.optimizers, **self.schedulers}.items():
            if linked.link_to != AUTOMATIC:
                compute = None if isinstance(linked.kind, tuple) else partial(spec_of, linked.kind)
                self.link_arguments(key, linked.link_to, compute_fn=compute)

    def print_usage(self, file: Any = None) -> None:
        """Print the usage of the program, without its hundred options."""
        names = f" {{{','.join(self.subcommands)}}}" if self.subcommands else ""
        print(f"usage: {self.prog.replace(' [options]', '')}{names} [options]", file=file)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End the program with exit code 2 and a message."""
        super().error(explain(message, self.argument_names()) + self.note, ex)

    def argument_names(self) -> list[str]:
        """Return the names of all arguments. The arguments of a subcommand begin with its name."""
        names = [str(name) for name in self.get_defaults(skip_validation=True).keys()]  # noqa: SIM118 - a Namespace
        below = self.subcommands.items()
        return names + [f"{command}.{name}" for command, parser in below for name in parser.argument_names()]


def as_class(kind: Any) -> type[Any]:
    """Return a class, or make a class of a function that returns instances."""
    if inspect.isclass(kind):
        return kind
    if not callable(kind):
        raise TypeError(f"{kind!r} is neither a class nor a function that returns an instance. Pass one of these.")
    new_class: type[Any] = class_from_function(kind)
    return new_class


def spec_of(kind: type[Any], init_args: Any) -> dict[str, Any]:
    """Return the class_path and the init_args of an object."""
    plain = init_args.as_dict() if isinstance(init_args, Namespace) else dict(init_args)
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": plain}


def instantiate_class(args: Any, init: Mapping[str, Any]) -> Any:
    """Make an object of a class_path and init_args, with a tuple of first arguments, or a single one."""
    module, _, name = init["class_path"].rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    return kind(*(args if isinstance(args, tuple) else (args,)), **init.get("init_args", {}))


def instantiated(parser: ArgumentParser, config: Namespace) -> Namespace:
    """Return a config with its objects."""
    objects: Namespace = (parser.instantiate if HAS_NEW_NAMES else parser.instantiate_classes)(config)
    return objects


def dumped(parser: ArgumentParser, config: Namespace) -> str:
    """Return a config as YAML, including arguments that are None."""
    options: dict[str, Any] = {"skip_unset" if HAS_NEW_NAMES else "skip_none": False}
    return str(parser.dump(config, **options))
