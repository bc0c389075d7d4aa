"""`trainwright` and `python -m trainwright`: choose a subcommand, and check names that `launch` cannot import."""

from __future__ import annotations

import importlib
import io
import os
import sys


def check_names(strategy: str | None, precision: str | None, num_processes: int) -> str | None:
    """Return the Trainer's name of the precision (ValueError if the strategy or the precision does not exist)."""
    from trainwright.precision import canonical_name
    from trainwright.strategies import named_strategy

    # The strategy itself is made in the workers, since its engine may take seconds to import.
    if strategy is not None:
        named_strategy(strategy, num_processes)
    return None if precision is None else canonical_name(precision)


COMMANDS = {
    "launch": ("launch.cli:launch_command", "run a script in several processes, on one machine or several"),
    "config": ("tools.config_command:config_command", "ask what launch should use, and write it; config show"),
    "test": ("tools.trials:trials_command", "train under every strategy here, and compare"),
    "ladder": ("tools.ladder.ladder:ladder_command", "run a script under each precision and strategy, and compare"),
    "estimate": ("tools.estimate:estimate_command", "the memory that training a model takes"),
    "env": ("tools.environment_report:env_command", "versions, devices and settings, for a bug report"),
    "runs": ("tools.runs:runs_command", "list runs: state, best values, newest checkpoint"),
    "plot": ("tools.plot:plot_command", "draw the curves of runs as a page or an image"),
    "migrate": ("tools.migrate:migrate_command", "rewrite the imports of a Lightning or Accelerate script"),
    "checkpoint": ("tools.checkpoints:checkpoint_command", "show, verify, export or import a checkpoint"),
}
"""The subcommands: "module:function", imported when chosen, and a line of help."""


def main() -> int:
    """Run the command line of this process."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal's encoding may lack a letter of a path
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in ("-h", "--help"):
        lines = "\n".join(f"  {name:<12}{about}" for name, (_, about) in COMMANDS.items())
        print(f"usage: trainwright COMMAND ...\n\ncommands:\n{lines}\n\nSee `trainwright COMMAND --help`.")
        return 0
    if command not in COMMANDS:
        from trainwright.errors import did_you_mean

        choice = f"Choose from {', '.join(COMMANDS)}.{did_you_mean(command, COMMANDS)}"
        print(f"trainwright: {command!r} is not a command. {choice}\nSee `trainwright --help`.", file=sys.stderr)
        return 2
    module, function = COMMANDS[command][0].split(":")
    try:
        code: int = getattr(importlib.import_module(f"trainwright.{module}"), function)(sys.argv[2:], check_names)
        sys.stdout.flush()
    except BrokenPipeError:  # the output's reader has gone, as after `| head`
        # The interpreter flushes it once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # which shells give to a process that SIGPIPE ends
    return code


if __name__ == "__main__":
    sys.exit(main())
