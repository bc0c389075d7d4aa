"""Whether and how this process's own command can be run again, once for each worker."""

from __future__ import annotations

import multiprocessing
import os
import sys
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple

from trainwright.distributed.environment import JOB_VARIABLE
from trainwright.distributed.signals import is_interactive
from trainwright.errors import LaunchError

TEST_RUNNERS = ("_pytest", "unittest.case", "unittest.suite", "unittest.main", "doctest")


@dataclass(frozen=True)
class Command:
    """A command line and the directory in which it was started."""

    arguments: list[str]
    directory: str


class Obstacle(NamedTuple):
    """What stands against running this process's command again.

    `takes_handover` is True where work can be handed to fresh interpreters instead.
    """

    found: str
    advice: str
    takes_handover: bool = False


def own_command(reason: str) -> Command:
    """Return the command that started this process, or raise a LaunchError where it cannot be run again."""
    if (obstacle := _find_obstacle()) is not None:
        raise LaunchError(
            f"{reason} needs several processes, and this process was started {obstacle.found}; only a script, a module (-m) or "
            f"-c code can be run again in each of them. {obstacle.advice}"
        )
    return Command([sys.executable, *sys.orig_argv[1:]], _start_directory())


def is_for_handover() -> bool:
    """Return whether this is a process from which work is handed over: its command cannot be run again, or is -c code."""
    obstacle = _find_obstacle()
    if obstacle is not None:
        return obstacle.takes_handover
    return getattr(sys.modules["__main__"], "__file__", None) is None  # one that cannot be run again was found above


def check_handover(reason: str) -> None:
    """Raise a LaunchError where work can neither be handed over."""
    obstacle = _find_obstacle()
    if obstacle is not None and not obstacle.takes_handover:
        raise LaunchError(
            f"{reason} needs several processes, and this process was started {obstacle.found}; work can be handed over to "
            f"others by the first process of a program. {obstacle.advice}"
        )


def _find_obstacle() -> Obstacle | None:
    """Return what stands against running the command again; None where nothing does."""
    script = "Put the code into a script, or start it with torchrun."
    function = f"Call trainwright.notebook_launcher(function, num_processes=...) to run a loop of your own. {script}"
    if multiprocessing.parent_process() is not None:
        guard = "Put the script's work under `if __name__ == '__main__':`, so that helper processes do not repeat it."
        return Obstacle("by multiprocessing", guard)
    if JOB_VARIABLE in os.environ or "RANK" in os.environ:
        return Obstacle("as one worker of a job", "Ask for as many devices as the job has processes.")
    if os.name != "posix":
        return Obstacle(f"on {sys.platform}", "Start the script with torchrun.")
    if not sys.executable:
        return Obstacle("inside another program", script)
    if is_interactive():
        return Obstacle("interactively", function, takes_handover=True)
    runner = _find_test_runner()
    if runner is not None:
        return Obstacle(f"by a test runner ({runner})", function, takes_handover=True)
    main_file = getattr(sys.modules["__main__"], "__file__", None)
    if main_file == "<stdin>" or (main_file is None and "-c" not in sys.orig_argv):
        return Obstacle("from standard input", function, takes_handover=True)
    if main_file is not None and not (os.path.isfile(main_file) or "__main__" in main_file):
        return Obstacle(f"from {main_file}, which can be read only once", function, takes_handover=True)
    return None


def _find_test_runner() -> str | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        for runner in TEST_RUNNERS:
            if module == runner or module.startswith(f"{runner}."):
                return runner.strip("_").split(".")[0]
        frame = frame.f_back
    return None


def _start_directory() -> str:
    """Return the directory in which the command was started, even where the script has changed it since."""
    main = sys.modules["__main__"]
    main_file = getattr(main, "__file__", None)
    if main_file is None or not os.path.isabs(main_file) or getattr(main, "__spec__", None) is not None:
        return os.getcwd()
    # Python makes __main__.__file__ absolute at the start: what the argument does not hold of it is the directory.
    for argument in sys.orig_argv[1:]:
        relative = argument.removeprefix("./")
        if not os.path.isabs(argument) and main_file.endswith(f"/{relative}"):
            directory = main_file[: -len(relative) - 1].removesuffix("/.") or "/"
            joined = os.path.join(directory, argument)
            if os.path.exists(joined) and os.path.samefile(joined, main_file):
                return directory
    return os.getcwd()
