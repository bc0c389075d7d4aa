"""Whether and how this process's command can be run again, once per worker."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback

from trainwright.distributed.environment import JOB_VARIABLE
from trainwright.distributed.signals import is_interactive
from trainwright.errors import LaunchError

MAIN_FILE = getattr(sys.modules["__main__"], "__file__", None) or ""
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
    return bool(_unrepeatable_start()) or not MAIN_FILE


def check_worker_calls(reason: str) -> None:
    """Raise LaunchError if this process cannot start others at all."""
    start, advice = "as one worker of a job", "Pass its number of processes as devices, or call the function directly."
    if multiprocessing.parent_process() is not None:
        start, advice = "by multiprocessing", "Put the script's work under `if __name__ == '__main__':`."
    elif JOB_VARIABLE not in os.environ and "RANK" not in os.environ:
        return
    raise LaunchError(f"{reason} needs several processes, and this process was started {start}. {advice}")


def _unrepeatable_start() -> str:
    """Return how this process was started, if its command cannot be run again, or an empty text."""
    if is_interactive():
        return "interactively"
    packages = {str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in traceback.walk_stack(None)}
    if runners := packages & {"_pytest", "doctest", "unittest"}:  # running, not only imported
        return f"by a test runner ({min(runners).strip('_')})"
    is_stream = MAIN_FILE.startswith(("<stdin>", "/dev/stdin", "/dev/fd/"))
    return f"from {MAIN_FILE}, which can be read only once" if is_stream else ""


def _in_hydras_folders(command: list[str]) -> list[str]:
    """Return the command of a Hydra app with this process's folders, which Hydra names by the second of the start."""
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return command
    config = module.HydraConfig.get()
    overrides = []
    for name, folder in (("run", config.run.dir), ("sweep", config.sweep.dir)):
        quoted = os.path.join(config.runtime.cwd, folder).replace("\\", "\\\\").replace("'", "\\'")
        overrides.append(f"hydra.{name}.dir='{quoted}'")
    # Hydra's parser wants its overrides side by side, and the last one of a name counts.
    first = max(2, len(command) - len(sys.argv) + 1)
    given = [at + 1 for at in range(first, len(command)) if "=" in command[at] and not command[at].startswith("-")]
    end = max(given, default=len(command))
    return [*command[:end], *overrides, *command[end:]]


def _start_directory() -> str:
    """Return the directory in which the command was started, even if the script has left it since."""
    # Python makes __main__.__file__ absolute at the start: the part that is not in the argument is the directory.
    for argument in sys.orig_argv[1:]:
        relative = argument.removeprefix("./")
        if MAIN_FILE.endswith(f"/{relative}"):
            return MAIN_FILE.removesuffix(relative)
    return os.getcwd()
