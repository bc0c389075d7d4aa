"""Whether and how this process's command can be run again, once per worker."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback

from trainwright.distributed.environment import JOB_VARIABLE
from trainwright.distributed.signals import is_interactive
from trainwright.errors import LaunchError

TEST_RUNNERS = ("_pytest", "unittest.case", "unittest.suite", "unittest.main", "doctest")
SCRIPT = (
    "Only a script, a module (-m) or -c code can be run again in each of them. Call trainwright.notebook_launcher(function, "
    "num_processes=...) to run your own loop, put the code into a script, or start it with torchrun."
)


def own_command(reason: str) -> tuple[list[str], str]:
    """Return the command that started this process and its directory. Raise LaunchError if it cannot be run again."""
    check_worker_calls(reason)
    if start := _unrepeatable_start():
        raise LaunchError(f"{reason} needs several processes, and this process was started {start}. {SCRIPT}")
    return [sys.executable, *_in_hydras_folders(sys.orig_argv)[1:]], _start_directory()


def calls_workers() -> bool:
    """Return whether this process makes its calls in workers: its command cannot be run again, or is -c code."""
    is_first = _obstacle() is None
    return is_first and (bool(_unrepeatable_start()) or getattr(sys.modules["__main__"], "__file__", None) is None)


def check_worker_calls(reason: str) -> None:
    """Raise LaunchError if this process cannot start others at all."""
    if (obstacle := _obstacle()) is not None:
        start, advice = obstacle
        raise LaunchError(f"{reason} needs several processes, and this process was started {start}. {advice}")


def _obstacle() -> tuple[str, str] | None:
    """Return how this process was started, if it cannot start others, and what to do instead."""
    if multiprocessing.parent_process() is not None:
        return "by multiprocessing", "Put the script's work under `if __name__ == '__main__':`."
    if JOB_VARIABLE in os.environ or "RANK" in os.environ:
        return "as one worker of a job", "Pass its number of processes as devices, or call the function directly."
    return None if os.name == "posix" else (f"on {sys.platform}", "Start the script with torchrun.")


def _unrepeatable_start() -> str:
    """Return how this process was started, if its command cannot be run again, or an empty text."""
    if is_interactive():
        return "interactively"
    if runner := next(filter(_is_run_by, TEST_RUNNERS), None):
        return f"by a test runner ({runner.strip('_').split('.')[0]})"
    main_file = getattr(sys.modules["__main__"], "__file__", None)
    if main_file == "<stdin>" or (main_file is None and "-c" not in sys.orig_argv):
        return "from standard input"
    # The __main__.py of a zip archive is in no folder, but the archive can be run again.
    is_file = main_file is None or os.path.isfile(main_file) or "__main__" in main_file
    return "" if is_file else f"from {main_file}, which can be read only once"


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
    main_file = getattr(main, "__file__", None) or ""
    if getattr(main, "__spec__", None) is None:  # not a module (-m), whose path is in no argument
        # Python makes __main__.__file__ absolute at the start: the part that is not in the argument is the directory.
        for argument in sys.orig_argv[1:]:
            relative = argument.removeprefix("./")
            if main_file.endswith(f"/{relative}"):
                return main_file.removesuffix(relative)
    return os.getcwd()
