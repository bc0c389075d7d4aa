"""Whether and how this process's command can be run again, once per worker."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from typing import NamedTuple

from trainwright.distributed.environment import JOB_VARIABLE
from trainwright.distributed.signals import is_interactive
from trainwright.errors import LaunchError

TEST_RUNNERS = ("_pytest", "unittest.case", "unittest.suite", "unittest.main", "doctest")


class Obstacle(NamedTuple):
    """Why this process's command cannot be run again."""

    found: str
    advice: str
    can_call_workers: bool = False
    """Whether calls can be made in fresh interpreters instead."""


def own_command(reason: str) -> tuple[list[str], str]:
    """Return the command that started this process and its directory. Raise LaunchError if it cannot be run again."""
    if (obstacle := _find_obstacle()) is not None:
        raise LaunchError(
            f"{reason} needs several processes, and this process was started {obstacle.found}. Only a script, a module (-m) or "
            f"-c code can be run again in each of them. {obstacle.advice}"
        )
    return [sys.executable, *_in_hydras_folders(sys.orig_argv)[1:]], _start_directory()


def calls_workers() -> bool:
    """Return whether this process makes its calls in workers: its command cannot be run again, or is -c code."""
    obstacle = _find_obstacle()
    if obstacle is not None:
        return obstacle.can_call_workers
    return getattr(sys.modules["__main__"], "__file__", None) is None  # -c code


def check_worker_calls(reason: str) -> None:
    """Raise LaunchError if calls cannot be made in workers either."""
    obstacle = _find_obstacle()
    if obstacle is not None and not obstacle.can_call_workers:
        raise LaunchError(
            f"{reason} needs several processes, and this process was started {obstacle.found}. Only the first process of a "
            f"program can start others. {obstacle.advice}"
        )


def _find_obstacle() -> Obstacle | None:
    script = "Put the code into a script, or start it with torchrun."
    function = f"Call trainwright.notebook_launcher(function, num_processes=...) to run your own loop. {script}"
    if multiprocessing.parent_process() is not None:
        guard = "Put the script's work under `if __name__ == '__main__':`, so that helper processes do not repeat it."
        return Obstacle("by multiprocessing", guard)
    if JOB_VARIABLE in os.environ or "RANK" in os.environ:
        return Obstacle(
            "as one worker of a job", "Pass as many devices as the job has processes, or call the function directly."
        )
    if os.name != "posix":
        return Obstacle(f"on {sys.platform}", "Start the script with torchrun.")
    if is_interactive():
        return Obstacle("interactively", function, can_call_workers=True)
    for runner in TEST_RUNNERS:
        if _is_run_by(runner):
            return Obstacle(f"by a test runner ({runner.strip('_').split('.')[0]})", function, can_call_workers=True)
    main_file = getattr(sys.modules["__main__"], "__file__", None)
    if main_file == "<stdin>" or (main_file is None and "-c" not in sys.orig_argv):
        return Obstacle("from standard input", function, can_call_workers=True)
    # The __main__.py of a zip archive is in no folder, but the archive can be run again.
    if main_file is not None and not (os.path.isfile(main_file) or "__main__" in main_file):
        return Obstacle(f"from {main_file}, which can be read only once", function, can_call_workers=True)
    return None


def _is_run_by(name: str) -> bool:
    """Return whether a function of this module or package has called, at whatever distance. A script may only import it."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(sys._getframe()))
    return any(f"{module}.".startswith(f"{name}.") for module in modules)


def _in_hydras_folders(command: list[str]) -> list[str]:
    """Return the command of a Hydra app with this process's folders, which Hydra names by the second of the start."""
    module = sys.modules.get("hydra.core.hydra_config")
    # The stack, too: a script that composes a config by Hydra parses its command line itself.
    if module is None or not module.HydraConfig.initialized() or not _is_run_by("hydra._internal"):
        return command
    config = module.HydraConfig.get()
    overrides = []
    for name, folder in (("run", config.run.dir), ("sweep", config.sweep.dir)):
        quoted = os.path.join(config.runtime.cwd, folder).replace("\\", "\\\\").replace("'", "\\'")
        overrides.append(f"hydra.{name}.dir='{quoted}'")
    # Hydra's parser wants its overrides side by side, and the last one of a name counts.
    first = max(2, len(command) - len(sys.argv) + 1)
    given = [at for at in range(first, len(command)) if "=" in command[at] and not command[at].startswith("-")]
    end = given[-1] + 1 if given else len(command)
    return [*command[:end], *overrides, *command[end:]]


def _start_directory() -> str:
    """Return the directory in which the command was started, even if the script has left it since."""
    main = sys.modules["__main__"]
    main_file = getattr(main, "__file__", None)
    # With -m there is a __spec__, and no argument holds the file's path.
    if main_file is None or not os.path.isabs(main_file) or getattr(main, "__spec__", None) is not None:
        return os.getcwd()
    # Python makes __main__.__file__ absolute at the start: the part that is not in the argument is the directory.
    for argument in sys.orig_argv[1:]:
        relative = argument.removeprefix("./")
        if not os.path.isabs(argument) and main_file.endswith(f"/{relative}"):
            directory = main_file[: -len(relative) - 1].removesuffix("/.") or "/"
            joined = os.path.join(directory, argument)
            if os.path.exists(joined) and os.path.samefile(joined, main_file):
                return directory
    return os.getcwd()
