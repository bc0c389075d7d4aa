"""Messages about wrong configs and arguments: the file and the line of a key, and the nearest name that exists."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from traceback import walk_tb
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright.callbacks.base import Callback
from trainwright.data.datamodule import DataModule
from trainwright.loggers.base import Logger
from trainwright.precision import Precision
from trainwright.profilers import Profiler
from trainwright.strategies import Strategy

if TYPE_CHECKING:
    from trainwright.cli.argument_parser import TrainwrightArgumentParser

BASES = (nn.Module, DataModule, Callback, Logger, Strategy, Precision, Profiler, Optimizer, LRScheduler)
"""What a short name in a config is a subclass of."""
SPEC_KEYS = ("class_path", "init_args", "dict_kwargs")
MOST_NAMES = 12
"""The most names that a message lists."""
WRITTEN_BY = re.compile(r"^# trainwright==(\S+)", re.MULTILINE)


class ConfigSource(NamedTuple):
    """A config that a parser was given."""

    parser: TrainwrightArgumentParser
    title: str
    """What messages call it: its path, or where its text comes from."""
    text: str

    @classmethod
    def read(cls, parser: TrainwrightArgumentParser, value: str, title: str | None) -> ConfigSource:
        """Read what `--config` was given: a path, or the text itself."""
        try:
            if os.path.isfile(value):
                with open(value, encoding="utf-8") as file:
                    return cls(parser, value, file.read())
        except (OSError, ValueError):  # jsonargparse says what is wrong with it
            return cls(parser, value, "")
        return cls(parser, title or "the text of --config", value)

    def line(self, node: yaml.Node) -> str:
        """Return where a node is, in words."""
        return f"{self.title}, line {node.start_mark.line + 1}"

    @property
    def root(self) -> yaml.Node | None:
        """Return its nodes, which know their lines; None if it cannot be read."""
        try:
            return _composed(self.text)
        except yaml.YAMLError:
            return None

    @property
    def damage(self) -> str:
        """Return why its text is neither YAML nor JSON, and where; "" if it is."""
        with contextlib.suppress(ValueError):
            json.loads(self.text)  # which takes tabs, unlike YAML
            return ""
        try:
            _composed(self.text)
        except yaml.MarkedYAMLError as error:
            line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
            return f"{self.title}{line} is not YAML: {error.problem or error.context}"
        except yaml.YAMLError as error:
            return f"{self.title} is not YAML: {error}"
        return ""


def _composed(text: str) -> yaml.Node | None:
    """Return the nodes of a YAML text, the keys of its anchors where it merges them (`<<: *anchor`)."""
    root: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    constructor, left, seen = yaml.constructor.SafeConstructor(), [root], set()
    while left:
        node = left.pop()
        if isinstance(node, yaml.CollectionNode) and id(node) not in seen:
            seen.add(id(node))  # an anchor may contain itself
            if isinstance(node, yaml.MappingNode):
                constructor.flatten_mapping(node)
                left += [value for _, value in node.value]
            else:
                left += node.value
    return root


class UnknownKey(NamedTuple):
    """A key of a config that nothing takes."""

    node: yaml.Node
    owner: str
    known: list[str]


def explain(
    message: str,
    sources: Sequence[ConfigSource],
    unfinished: Sequence[ConfigSource],
    arguments: Sequence[str],
    parser: TrainwrightArgumentParser,
) -> str:
    """Return what is wrong: unknown keys of the configs if there are any, else jsonargparse's message and where it applies.

    `unfinished` are those of the configs whose reading an error has ended.
    """
    if damaged := [damage for source in sources if (damage := source.damage)]:
        return "\n".join(damaged)
    if message.startswith("Unexpected config"):
        for source in sources:
            if not _has_values(source.root):
                return f"{source.title} holds no settings; a config has names and values, such as trainer: {{max_epochs: 5}}."
    found = [(source, key) for source in sources for key in _unknown_in(source)]
    if found:
        lines = [f"{source.line(key.node)}: {_unknown(key)}" for source, key in found]
        lines += [_other_version(source) for source in dict.fromkeys(source for source, _ in found)]
        return "\n".join(each for each in lines if each)
    # A number or a class, such as a rate that may be a tensor.
    takes_number = re.search(r"Expected a <class '(?:int|float)'>", message)
    if not takes_number and (name := re.search(r"Expected a dot import path string: (\w+)$", message, re.MULTILINE)):
        key = re.match(r'Parser key "([\w.]+)"', message)
        message = f"{key[0] if key else 'the arguments'}: {_unknown_class(name[1], message)}"
    if named := re.search(r"[Kk]ey ['\"]([\w.]+)['\"]", message):
        # Once all configs are read, a value is that of an option, or of the last config that has the key.
        is_option = not unfinished and _gives(arguments, named[1])
        for source in () if is_option else [*reversed(unfinished), *reversed(sources)]:
            # A config of the program has the settings of the command below its name.
            within = [each for each in arguments if each in source.parser.subcommands][:1]
            keys = named[1].split(".")
            if (node := _node_of(source.root, keys if keys[:1] == within else [*within, *keys])) is not None:
                return f"{source.line(node)}: {message}\n{_other_version(source)}".rstrip()
    if (named := re.match(r"[Uu]nrecognized arguments: --(\S+)", message)) is not None:
        return f"{message}{_near_option(named[1], _names(parser))}"
    if unknown := _unknown_option(arguments):
        return unknown
    return message


def constructor_error(error: Exception) -> Exception | None:
    """Return the error of the constructor that has failed as jsonargparse made objects; None if none has.

    For an argument that takes several types jsonargparse raises another error, and keeps the error of each type in a list.
    """
    left, seen = [error], set()
    while left:
        one = left.pop()
        seen.add(id(one))
        frames = [frame for frame, _ in walk_tb(one.__traceback__)]
        if not (inner := _called_by_jsonargparse(frames)):
            kept = (each for frame in frames for each in frame.f_locals.values() if isinstance(each, list))
            errors = (each for some in kept for each in some if isinstance(each, Exception))
            left += [each for each in errors if id(each) not in seen]
        elif inner[0].f_code.co_name == "__init__" or _package_of(inner[0]) == "trainwright":
            return one
    return None


def refusal(error: Exception) -> str:
    """Return in words that a class of this package has refused its arguments; "" if other code is involved."""
    inner = _called_by_jsonargparse([frame for frame, _ in walk_tb(error.__traceback__)])
    if not isinstance(error, (TypeError, ValueError, ImportError)) or {*map(_package_of, inner)} != {"trainwright"}:
        return ""
    made = next((type(frame.f_locals["self"]).__name__ for frame in inner if "self" in frame.f_locals), "")
    return str(error) if not made or str(error).startswith(made) else f"{made} was given wrong arguments: {error}"


def _called_by_jsonargparse(frames: Sequence[FrameType]) -> Sequence[FrameType]:
    """Return the frames within the last of jsonargparse's; none without any."""
    callers = [at for at, frame in enumerate(frames) if _package_of(frame) == "jsonargparse"]
    return frames[callers[-1] + 1 :] if callers else ()


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _has_values(node: yaml.Node | None) -> bool:
    """Return whether a config has names with values: an empty section has none."""
    if not isinstance(node, yaml.MappingNode):
        return False
    return any(_has_values(value) or not _is_empty(value) for _, value in node.value)


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.MappingNode) or node.tag.endswith(":null")


def misplaced(sources: Sequence[ConfigSource]) -> str:
    """Return which sections of the configs hold a number or a list, which jsonargparse would ignore; "" if none does."""
    lines = []
    for source in sources:
        names = _all_names(source.parser)
        for key, value, name in _sections(source.root, names, ""):
            is_text = isinstance(value, yaml.ScalarNode) and value.tag.endswith((":null", ":str"))  # a file's name
            if not isinstance(value, yaml.MappingNode) and not is_text:
                lines.append(
                    f"{source.line(key)}: {name!r} must hold names and values, such as {_example(names, name)}."
                )
    return "\n".join(lines)


def _sections(node: yaml.Node | None, names: Sequence[str], prefix: str) -> Iterator[tuple[yaml.Node, yaml.Node, str]]:
    """Yield (key, value, name) of the keys that name a group of arguments."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        name = f"{prefix}{key.value}"
        if name not in names and any(each.startswith(f"{name}.") for each in names):
            yield key, value, name
            yield from _sections(value, names, f"{name}.")


def _example(names: Sequence[str], group: str) -> str:
    inside = next(each.removeprefix(f"{group}.") for each in names if each.startswith(f"{group}."))
    return f"{inside.partition('.')[0]}: ..."


def _unknown(key: UnknownKey) -> str:
    """Return in words that a key is unknown, and which are there."""
    name = key.node.value
    close = difflib.get_close_matches(name, key.known, n=1)
    hint = f"Did you mean {close[0]!r}?" if close else f"Accepted are {_some(key.known)}."
    return f"{key.owner} has no argument {name!r}. {hint}"


def _some(names: Sequence[str]) -> str:
    return ", ".join([*names[:MOST_NAMES], *(["..."] if len(names) > MOST_NAMES else [])]) or "none"


def _unknown_class(name: str, message: str) -> str:
    known = {each.__name__ for base in BASES for each in _subclasses(base) if not each.__name__.startswith("_")}
    if name in known:
        kind = re.search(r"\b([A-Z]\w*)['\]]", message.partition("Subtypes:")[2])
        return f"{name!r} is not a subclass of {kind[1] if kind else 'what it takes'}; give one."
    close = difflib.get_close_matches(name, sorted(known), n=1)
    hint = f"Did you mean {close[0]!r}?" if close else "Import it in the program."
    return f"no class is named {name!r}; give the name of an imported class, or package.module.Class. {hint}"


def _other_version(source: ConfigSource) -> str:
    """Return which version has written a config, if it is another one."""
    from trainwright import __version__

    written = WRITTEN_BY.search(source.text)
    if written is None or written[1] == __version__:
        return ""
    return (
        f"{source.title} was written by trainwright {written[1]}, and this is {__version__}: remove from it what this version "
        "does not have, or install that one."
    )


def _unknown_in(source: ConfigSource) -> Iterator[UnknownKey]:
    """Yield the unknown keys of a config, in the order of its lines."""
    root = source.root
    if not isinstance(root, yaml.MappingNode):
        return
    owner = "the command" if not source.parser.subcommands else "the program"
    yield from _walk(root, _all_names(source.parser), "", owner)


def _all_names(parser: TrainwrightArgumentParser) -> list[str]:
    """Return the names of a parser's arguments, and those of its subcommands."""
    below = {name: _names(each) for name, each in parser.subcommands.items()}
    inside = [f"{name}.{each}" for name, arguments in below.items() for each in arguments]
    # A subcommand of a root config is a section.
    return [*_names(parser), *inside, *(["subcommand"] if below else [])]


def _names(parser: Any) -> list[str]:
    """Return the names of a parser's arguments, those of groups with dots."""
    return [str(name) for name in parser.get_defaults(skip_validation=True).keys()]  # noqa: SIM118 - a Namespace


def _walk(node: yaml.MappingNode, names: Sequence[str], prefix: str, owner: str) -> Iterator[UnknownKey]:
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        is_group = any(each.startswith(f"{name}.") for each in names)
        if is_group and isinstance(value, yaml.MappingNode):
            yield from _walk(value, names, f"{name}.", f"{name!r}")
        elif name in names or is_group:
            yield from _walk_value(value)
        else:
            inside = (each.removeprefix(prefix) for each in names if each.startswith(prefix))
            yield UnknownKey(key, owner, list(dict.fromkeys(each.partition(".")[0] for each in inside)))


def _has_class(node: yaml.MappingNode) -> bool:
    return any(key.value == "class_path" for key, _ in node.value)


def _walk_value(node: yaml.Node) -> Iterator[UnknownKey]:
    """Yield the unknown keys of the classes that a value is made of."""
    if isinstance(node, yaml.SequenceNode):
        for each in node.value:
            yield from _walk_value(each)
    elif isinstance(node, yaml.MappingNode) and _has_class(node):  # the keys of other dicts are the reader's own
        items = {key.value: (key, value) for key, value in node.value}
        path = str(items["class_path"][1].value)
        for name, (key, value) in items.items():
            if name not in SPEC_KEYS:
                yield UnknownKey(key, f"the config of {path}", list(SPEC_KEYS))
            elif name == "init_args" and isinstance(value, yaml.MappingNode) and (names := _arguments_of(path)):
                yield from _walk(value, names, "", path.rpartition(".")[2])


def _arguments_of(path: str) -> list[str]:
    """Return the names of the arguments of a class; none if it cannot be found."""
    from trainwright.cli.argument_parser import TrainwrightArgumentParser

    kind = _find(path)
    if kind is None:
        return []
    parser = TrainwrightArgumentParser(exit_on_error=False)
    try:
        parser.add_class_arguments(kind, fail_untyped=False)
        return _names(parser)
    except Exception:  # whatever is wrong with the class, jsonargparse's own message says it
        return []


def _find(path: str) -> type[Any] | None:
    """Return the class of a class_path, or of the short name of a class that is imported."""
    module, _, name = path.rpartition(".")
    if module:
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError:
            return None
        return found if isinstance(found, type) else None
    return next((each for base in BASES for each in _subclasses(base) if each.__name__ == path), None)


def _subclasses(base: type[Any]) -> Iterator[type[Any]]:
    left = [base]
    seen = set()
    while left:
        one = left.pop()
        for each in one.__subclasses__():
            if each not in seen:
                seen.add(each)
                left.append(each)
                yield each


def _node_of(node: yaml.Node | None, names: Sequence[str]) -> yaml.Node | None:
    """Return the key at the end of a path of names; None if the config does not have it."""
    if not isinstance(node, yaml.MappingNode) or not names:
        return None
    for key, value in node.value:
        if key.value == names[0]:
            return key if len(names) == 1 else _node_of(value, names[1:])
    return None


def _gives(arguments: Sequence[str], key: str) -> bool:
    """Return whether one of the arguments is an option for a key, or for a part of its value."""
    options = (each.partition("=")[0].removeprefix("--").rstrip("+") for each in arguments if each.startswith("--"))
    return any(f"{option}.".startswith(f"{key}.") for option in options)


def _near_option(option: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(option.partition("=")[0].lstrip("-"), list(names), n=1)
    return f". Did you mean --{close[0]}?" if close else ""


def _unknown_option(arguments: Sequence[str]) -> str:
    """Return in words which option is unknown to the class that an earlier one has chosen; "" if all are known."""
    chosen: dict[str, str] = {}
    for each, following in pairwise([*arguments, ""]):
        option, _, value = each.partition("=") if "=" in each else (each, "", following)
        owner, _, last = option.rpartition(".")
        path = chosen.get(owner)
        if path is not None and last not in SPEC_KEYS and (names := _arguments_of(path)):
            if last not in {name.partition(".")[0] for name in names}:
                near = _near_option(option, [f"{owner.lstrip('-')}.{name}" for name in names])
                return f"{option} is unknown: {path} has no argument {last!r}{near or f'; it has {_some(names)}.'}"
        elif option.startswith("--"):
            chosen[option.rstrip("+")] = value
    return ""
