"""Open arguments: those that a script leaves out, and that a variable of the environment sets."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec

from trainwright.callers import say
from trainwright.distributed.environment import argument_variables
from trainwright.ladder.recorder import trainer_arguments
from trainwright.ladder.recording import active_recording
from trainwright.rank_zero import rank_zero_only

P = ParamSpec("P")


def filled_by_environment(owner: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Let TRAINWRIGHT_<OWNER>_<ARGUMENT> set an argument of a constructor that the script leaves out, and print that once.

    Under the rung of a ladder, its settings replace those of either.

    The text is read as a Python literal (true, false and none in any case), else taken as it is, as that of a path always is.
    """

    def decorate(construct: Callable[P, None]) -> Callable[P, None]:
        parameters = inspect.signature(construct).parameters
        known = list(parameters)[1:]

        @functools.wraps(construct)
        def filled(*args: P.args, **given: P.kwargs) -> None:
            variables, said = argument_variables(owner), []
            for name, text in variables.items():
                _check_known(owner, name, known)
                if name not in given:
                    is_path = "PathLike" in str(parameters[name].annotation)
                    given[name] = text if is_path else _value(text)
                    said.append(
                        f"TRAINWRIGHT_{owner.upper()}_{name.upper()}={text} sets {owner}({name}={given[name]!r})."
                    )
            recording = active_recording()
            if recording is not None:
                given.update(trainer_arguments(recording.active, given))
            try:
                construct(*args, **given)
            finally:  # not before, since a process that becomes the launcher would say it too
                if recording is not None:
                    recording.note_made(owner)
                for each in said:
                    _say(each)

        return filled

    return decorate


def _check_known(owner: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        close = difflib.get_close_matches(name, list(known), n=1)
        hint = f" Did you mean TRAINWRIGHT_{owner.upper()}_{close[0].upper()}?" if close else ""
        raise ValueError(
            f"the environment has TRAINWRIGHT_{owner.upper()}_{name.upper()}, but {owner} has no argument {name}; unset it."
            f"{hint}"
        )


def _value(text: str) -> Any:
    named = {"true": True, "false": False, "none": None}
    if text.lower() in named:
        return named[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@functools.cache
def _say(text: str) -> None:
    if rank_zero_only.rank == 0:
        say(f"trainwright: {text}")
