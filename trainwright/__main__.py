"""`trainwright` and `python -m trainwright`: the command line of `launch/cli.py`, with parts that `launch` cannot import."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


def check_names(strategy: str | None, precision: str | None, num_processes: int, device_type: str) -> None:
    """Refuse a strategy or a precision that does not exist (ValueError)."""
    from trainwright.precision import resolve_precision
    from trainwright.strategies import STRATEGIES, VARIANTS, resolve_strategy

    # A known name is resolved in the workers, since its engine may take seconds to import.
    if strategy is not None and strategy not in ("auto", *STRATEGIES, *VARIANTS):
        resolve_strategy(strategy, num_processes)
    resolve_precision(precision, device_type)


def run_checkpoint(arguments: Sequence[str], _: Any) -> int:
    """Run `trainwright checkpoint`."""
    from trainwright.checkpoint.commands import checkpoint_command

    return checkpoint_command(arguments)


def main() -> int:
    """Run the command line of this process."""
    from trainwright.launch.cli import main as run

    commands = {"checkpoint": (run_checkpoint, "show, verify, export or import a checkpoint")}
    return run(sys.argv[1:], check_names, commands)


if __name__ == "__main__":
    sys.exit(main())
