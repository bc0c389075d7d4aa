"""`trainwright` and `python -m trainwright`: the command line of `launch/cli.py`, with parts that `launch` cannot import."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any


def check_names(strategy: str | None, precision: str | None, num_processes: int) -> str | None:
    """Return the Trainer's name of the precision (ValueError if the strategy or the precision does not exist)."""
    from trainwright.precision import canonical_name
    from trainwright.strategies import named_strategy

    # The strategy itself is made in the workers, since its engine may take seconds to import.
    if strategy is not None:
        named_strategy(strategy, num_processes)
    return None if precision is None else canonical_name(precision)


COMMANDS = {
    "config": ("config_command:config_command", "ask what launch should use, and write it; config show"),
    "test": ("trials:trials_command", "train under every strategy here, and compare"),
    "ladder": ("ladder.ladder:ladder_command", "run a script under each precision and strategy, and compare"),
    "estimate": ("estimate:estimate_command", "the memory that training a model takes"),
    "env": ("environment_report:env_command", "versions, devices and settings, for a bug report"),
    "runs": ("runs:runs_command", "list runs: state, best values, newest checkpoint"),
    "plot": ("plot:plot_command", "draw the curves of runs as a page or an image"),
    "migrate": ("migrate:migrate_command", "rewrite the imports of a Lightning or Accelerate script"),
    "checkpoint": ("checkpoints:checkpoint_command", "show, verify, export or import a checkpoint"),
}
"""The subcommands beside launch: "module:function" in `tools`, imported when chosen, and a line of help."""
LOST_READER = 141
"""The exit code if the output's reader has gone, which shells give to a process that SIGPIPE ends."""


def _run(where: str, arguments: Sequence[str], check: Any) -> int:
    module, name = where.split(":")
    try:
        code: int = getattr(importlib.import_module(f"trainwright.tools.{module}"), name)(arguments, check)
        sys.stdout.flush()
    except BrokenPipeError:  # the output's reader has gone, as after `| head`
        # The interpreter flushes it once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return LOST_READER
    return code


def main() -> int:
    """Run the command line of this process."""
    from trainwright.launch.cli import main as run

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal's encoding may lack a letter of a path
    others = {name: (partial(_run, where), about) for name, (where, about) in COMMANDS.items()}
    return run(sys.argv[1:], check_names, others)


if __name__ == "__main__":
    sys.exit(main())
