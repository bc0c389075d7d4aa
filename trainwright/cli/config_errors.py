"""Messages about wrong configs and arguments, with the nearest existing name.

jsonargparse finds the errors. This file rewrites the messages for an unknown key, an unknown class and a missing class_path.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from traceback import walk_tb
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright.callbacks.base import Callback
from trainwright.data.datamodule import DataModule
from trainwright.loggers.base import Logger
from trainwright.precision import Precision
from trainwright.profilers import Profiler
from trainwright.strategies import Strategy

BASES = (nn.Module, DataModule, Callback, Logger, Strategy, Precision, Profiler, Optimizer, LRScheduler)
"""The classes whose subclasses a config may name without their module."""
UNKNOWN = re.compile(r"(?:(?:Group|Subcommand) '([\w.]+)' does not accept o|O)ption '([\w.]+)'")
"""jsonargparse's message for an unknown key, with the group or subcommand that does not accept it."""
UNKNOWN_OF_CLASS = re.compile(r"class_path '[\w.]*?(\w+)':\s+(no argument '\w+'.*)")
"""Its message for an unknown argument of a class, whose parser has already explained it."""


def explain(message: str, names: Sequence[str]) -> str:
    """Return a clearer message than jsonargparse's. `names` are the names of all arguments."""
    if message.startswith("Problems parsing config: "):
        return f"the config is not YAML: {message.partition(': ')[2]}"
    if message.startswith("Unexpected config"):
        return "the config has no settings; write names and values, such as trainer: {max_epochs: 5}."
    if option := re.match(r"[Uu]nrecognized arguments: --([\w.]+)", message):
        close = difflib.get_close_matches(option[1], names, n=1)
        return f"{message}. Did you mean --{close[0]}?" if close else message
    named = re.search(r"[Kk]ey ['\"]([\w.]+)['\"]", message)
    unknown = UNKNOWN.search(message)
    return _unknown_key(unknown, names) if unknown else _explain_value(message, named[1] if named else "")


def _unknown_key(unknown: re.Match[str], names: Sequence[str]) -> str:
    path = [*(unknown[1].split(".") if unknown[1] else ()), *unknown[2].split(".")]
    for at, name in enumerate(path):
        prefix = "".join(f"{part}." for part in path[:at])
        inside = [known.removeprefix(prefix).partition(".")[0] for known in names if known.startswith(prefix)]
        if name not in inside:
            close = difflib.get_close_matches(name, inside, n=1, cutoff=0.5)
            hint = f"Did you mean {close[0]!r}?" if close else f"Accepted are {', '.join(dict.fromkeys(inside))}."
            return f"{f'{prefix[:-1]!r} has ' if prefix else ''}no argument {name!r}. {hint}"
    return _explain_value(unknown.string, "")


def _explain_value(message: str, key: str) -> str:
    if of_class := UNKNOWN_OF_CLASS.findall(message):
        for kind, text in of_class:
            if kind not in (base.__name__ for base in BASES):
                return f"{kind} has {text}"
        return f"{key} needs class_path, the name of a class; the arguments of the class belong under init_args."
    short = re.search(r"Expected a dot import path string: (\w+)$", message, re.MULTILINE)
    if short and not re.search(r"Expected a <class '(?:int|float)'>", message):  # such as a rate that may be a tensor
        classes = list[type[Any]](BASES)
        for base in classes:
            classes += base.__subclasses__()
        known = sorted({kind.__name__ for kind in classes})
        close = difflib.get_close_matches(short[1], known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else "Import it in the program, or write package.module.Class."
        problem = "is not a class that it accepts." if short[1] in known else f"is not an imported class. {hint}"
        return f"{key}: {short[1]!r} {problem}"
    return message


def constructor_error(error: Exception) -> tuple[Exception, bool]:
    """Return the error of the constructor that jsonargparse called, and whether only code of this package failed.

    If an argument accepts several types, jsonargparse raises another error and keeps the error of each type in a list.
    """
    waiting = [error]
    for candidate in waiting:
        frames = [frame for frame, _ in walk_tb(candidate.__traceback__)]
        packages = [str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame in frames]
        inner = packages[-packages[::-1].index("jsonargparse") :] if packages[-1] != "jsonargparse" else []
        if inner and (frames[-len(inner)].f_code.co_name == "__init__" or inner[0] == "trainwright"):
            return candidate, {*inner} == {"trainwright"}
        lists = (
            value for frame in frames for value in frame.f_locals.values() if isinstance(value, list) and not inner
        )
        errors = (item for values in lists for item in values if isinstance(item, Exception))
        waiting += [other for other in errors if other not in waiting]
    return error, False
