"""Overrides: arguments that something outside a script sets. No other file replaces an argument that a script passes.

There are three sources: the flags of `trainwright launch` and its config, variables TRAINWRIGHT_<OWNER>_<ARGUMENT>, and the
file that TRAINWRIGHT_RUNG names. A tool such as `trainwright ladder` writes it. It also names the tool's observer of loops.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ParamSpec

from trainwright.distributed.environment import RUNG_VARIABLE, Environment, argument_variables, rung_file
from trainwright.errors import did_you_mean
from trainwright.rank_zero import rank_zero_only, rank_zero_warn, say

P = ParamSpec("P")
OPEN = (None, "auto")
"""The values by which a script leaves an argument open."""
_PLAIN = (str, int, float, bool, type(None), list, tuple)

__all__ = ["Override", "OverrideFile", "active_file"]


@dataclass(frozen=True)
class Override:
    """One argument that something outside the script sets."""

    owner: str
    """The class or function that takes the argument, such as "Engine" or "fit"."""
    argument: str
    value: Any
    source: str
    """The flag, the variable or the tool that sets it, as messages name it."""


class OverrideFile:
    """The file of overrides under which this process runs, and which of the script's arguments it has replaced."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.replaced: dict[str, tuple[str, str]] = {}
        """The script's value and the override's, by argument, if they differ."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            self.overrides = [Override(**each) for each in content["overrides"]]
            self._observer = str(content["observer"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"the environment has {RUNG_VARIABLE}={path}, which is not the file of a rung ({type(error).__name__}: "
                f"{error}); `trainwright ladder` sets the variable for the scripts that it runs: unset it."
            ) from error

    @staticmethod
    def write(path: Path, overrides: Iterable[Override], observer: str, **content: Any) -> None:
        """Write a file of overrides. `observer` is "module:class" of an observer, and `content` is for that class."""
        values = {**content, "observer": observer, "overrides": [asdict(each) for each in overrides]}
        path.write_text(json.dumps(values, indent=2), encoding="utf-8")

    @functools.cached_property
    def observer(self) -> Any:
        """Return the tool's observer of this process."""
        module, _, name = self._observer.partition(":")
        return getattr(importlib.import_module(module), name)()

    def apply(self, override: Override, given: Any, *, stays: bool) -> Any:
        """Return the script's value if it `stays`, or the override's, and print once on rank 0 where the two differ."""
        if stays:
            return given
        name, was, now = override.argument, _shown(given), _shown(override.value)
        if was != now and name not in self.replaced:
            self.replaced[name] = (was, now)
            if rank_zero_only.rank == 0:
                say(f"trainwright: {override.source} sets {name}={now}; the script has {was}.")
        return override.value


def active_file() -> OverrideFile | None:
    """Return the file of overrides under which this process runs, or None if no tool runs it."""
    path = rung_file()
    return None if path is None else _active(path)


_active = functools.cache(OverrideFile)


def active_observer() -> Any:
    """Return the observer of the tool that runs this process, or None if no tool runs it."""
    file = active_file()
    return None if file is None else file.observer


def overridden(
    owner: str,
    argument: str,
    given: Any,
    *,
    is_open: bool | None = None,
    is_like: Callable[[Any, Any], bool] = lambda given, value: bool(given == value),
) -> Any:
    """Return the value of an argument: from the file of overrides, from a flag if it is open, or else the script's.

    The argument is open if `is_open` says so, or by default if `given` is None or "auto". A script's value that `is_like` the
    override's, perhaps with more options, stays.
    """
    if (file := active_file()) is not None:
        for override in file.overrides:
            if (override.owner, override.argument) == (owner, argument):
                return file.apply(override, given, stays=is_like(given, override.value))
    for override in _flags(owner):
        if override.argument == argument:
            if given in OPEN if is_open is None else is_open:
                return override.value
            if not is_like(given, override.value):
                names = "precision= or mixed_precision" if argument == "precision" else argument
                rank_zero_warn(
                    f"the command line or its config says {override.source}, and the script {argument}={given!r}; the "
                    f"script's is used. Leave {names}= out of the script to leave it open."
                )
    return given


def _flags(owner: str) -> Iterator[Override]:
    """Yield the settings of `trainwright launch`'s command line and config."""
    if owner not in ("Engine", "Trainer", "Accelerator"):
        return
    environment = Environment.detect()
    strategy, precision = environment.strategy, environment.precision
    steps = environment.gradient_accumulation_steps
    accumulation = f"--gradient-accumulation-steps {steps}"
    overrides = (
        Override("Engine", "accelerator", environment.accelerator, "--cpu"),
        Override("Engine", "strategy", strategy, f"--strategy {strategy}"),
        Override("Engine", "precision", precision, f"--precision {precision}"),
        Override("Trainer", "accumulate_grad_batches", steps, accumulation),
        Override("Accelerator", "gradient_accumulation_steps", steps, accumulation),
    )
    yield from (each for each in overrides if each.owner == owner and each.value is not None)


def overridable(owner: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Apply the overrides of an owner to the arguments of its constructor.

    TRAINWRIGHT_<OWNER>_<ARGUMENT> sets an argument that the script omits, which is printed once. Its text is read as a
    Python literal (true, false and none in any case), or taken as it is. A path always is. The file of overrides
    replaces the arguments of both.
    """

    def decorate(construct: Callable[P, None]) -> Callable[P, None]:
        parameters = inspect.signature(construct).parameters

        @functools.wraps(construct)
        def constructed(*args: P.args, **arguments: P.kwargs) -> None:
            filled = [each for each in _variables(owner, parameters) if each.argument not in arguments]
            arguments.update({each.argument: each.value for each in filled})
            file = active_file()
            if file is not None:
                arguments.update(_replaced(file, owner, arguments, parameters))
            try:
                construct(*args, **arguments)
            finally:  # not before, since a process that becomes the launcher would print it too
                if file is not None:
                    file.observer.note_made(owner)
                for each in filled:
                    _say(f"{each.source} sets {owner}({each.argument}={each.value!r}).")

        return constructed

    return decorate


def _variables(owner: str, parameters: Mapping[str, inspect.Parameter]) -> Iterator[Override]:
    """Yield the arguments that variables set (ValueError if the owner lacks one)."""
    known = list(parameters)[1:]
    for name, text in argument_variables(owner).items():
        variable = f"TRAINWRIGHT_{owner.upper()}_{name.upper()}"
        if name not in known:
            hint = did_you_mean(name, known)
            raise ValueError(f"the environment has {variable}, but {owner} has no argument {name}. Unset it.{hint}")
        value = text if "PathLike" in str(parameters[name].annotation) else _literal(text)
        yield Override(owner, name, value, f"{variable}={text}")


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text.capitalize() if text.lower() in ("true", "false", "none") else text)
    except (ValueError, SyntaxError):
        return text


def _replaced(
    file: OverrideFile, owner: str, given: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]
) -> dict[str, Any]:
    """Return the arguments of a constructor with a file's overrides and its observer's arguments."""
    arguments = dict(given)
    for override in file.overrides:
        if override.owner == owner:
            value = arguments.get(override.argument, parameters[override.argument].default)
            stays = _is_within(override, value, arguments)
            arguments[override.argument] = file.apply(override, value, stays=stays)
    return {**arguments, **file.observer.added_arguments(owner, given)}


def _is_within(override: Override, given: Any, arguments: Mapping[str, Any]) -> bool:
    """Return whether the script's value already serves an override's purpose, so that it stays."""
    if override.argument in ("max_steps", "min_steps") and arguments.get("fast_dev_run"):
        return True
    if override.argument == "max_steps":
        return isinstance(given, int) and -1 < given < override.value
    if override.argument == "min_steps":
        return not (isinstance(given, int) and given > arguments.get("max_steps", -1))
    return override.argument == "compile" and bool(given) == override.value  # options of torch.compile stay


@functools.cache
def _say(text: str) -> None:
    if rank_zero_only.rank == 0:
        say(f"trainwright: {text}")


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, _PLAIN) else f"{type(value).__name__}(...)"
