"""Cuts: a random run, interrupted in random hooks by exceptions, SIGTERM and SIGKILL, and restarted by the same command.

After at most three cuts the run must end bitwise like an uninterrupted one: what resume.py compares, and all of metrics.csv and
the kept checkpoints. A run to be killed runs in a fork.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import trainwright as tw
from fuzz import resume, run_config
from fuzz.kind import Config, Refused
from fuzz.program import program
from fuzz.record import compare
from fuzz.run_script import compared

NAME, PROCESSES, LIMIT = "cuts", (1,), 120.0
WAYS = ("exception", "SIGTERM", "SIGKILL")
HOOKS = (
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_validation_start", "on_validation_batch_end",
    "on_validation_end", "on_train_epoch_end", "on_save_checkpoint", "on_train_end",
)  # fmt: skip
SIMPLEST: dict[str, list[Any]] = {
    **run_config.SIMPLEST,
    "cuts": [[], ["exception on_train_batch_end 1"], ["exception on_train_batch_end 2"]],
}


def draw(random: random.Random) -> Config:
    """Draw a run and its cuts: how, in which hook, and at which call of the hook."""
    config = run_config.draw(random)
    cuts = [
        f"{random.choice(WAYS)} {random.choice(HOOKS)} {random.randint(1, 12)}" for _ in range(random.randint(1, 3))
    ]
    return {**config, "cuts": cuts}


class Cut(Exception):
    """The exception that cuts a run."""


class Cutter(tw.Callback):
    """Ends the run at the n-th call of a hook, after all other callbacks."""

    priority = -10

    def __init__(self, cut: str) -> None:
        self.way, hook, call = cut.split()
        self.left = int(call)
        setattr(self, hook, self._count)

    def _count(self, trainer: Any, *_: Any) -> None:
        self.left -= not trainer.sanity_checking
        if self.left == 0:
            if self.way == "exception":
                raise Cut
            os.kill(os.getpid(), signal.SIGTERM if self.way == "SIGTERM" else signal.SIGKILL)


def _nothing(self: Cutter, trainer: Any, *_: Any) -> None:
    """Makes each hook count as overridden until a Cutter cuts there."""


for name in HOOKS:
    setattr(Cutter, name, _nothing)


def cut_run(names: dict[str, Any], config: Config, folder: Path, cut: str) -> None:
    """Run the program in a fork until it is cut or ends."""
    child = os.fork()
    if child == 0:
        try:
            resume.run(names, config, folder, "auto", Cutter(cut))
        except (Cut, SystemExit):
            pass
        except BaseException as error:
            (folder / "error").write_text(f"{type(error).__name__}: {error}")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    error = folder / "error"
    if error.exists():
        raise RuntimeError(f"the run that is cut by {cut} raises {error.read_text()}")


def differences(config: Config, folder: Path) -> list[str]:
    names = resume.loaded(config)
    whole = resume.run(names, config, folder / "whole")
    if config["own_save"] and not all(bool(each.isfinite().all()) for each in whole["weights"].values()):
        raise Refused("the run diverges, and its own saves in a run after a cut would replace those with such weights")
    place = folder / "part"
    place.mkdir()
    for cut in config["cuts"]:
        cut_run(names, config, place, cut)
    part = resume.run(names, config, place, "auto")
    # Of the user's own saves "auto" knows nothing.
    return compare(whole, part, goes_on=True) + resume.scores(names, config, part)


def script(config: Config, found: list[str]) -> str:
    """Return the program, the cut runs in forks, the last run and the comparison."""
    lines = []
    for cut in config["cuts"]:
        way, hook, call = cut.split()
        does = "raise KeyError" if way == "exception" else f"os.kill(os.getpid(), signal.{way})"
        lines += [
            "    class Cut(tw.Callback):",
            f"        priority, left = -10, {call}",
            f"        def {hook}(self, trainer, *_):",
            "            self.left -= not trainer.sanity_checking",
            f"            if self.left == 0: {does}",
            "    if (child := os.fork()) == 0:",
            '        try: run(f"{folder}/part", "auto", [Cut()])',
            "        finally: os._exit(0)",
            "    os.waitpid(child, 0)",
        ]
    text = program(config, compared(found, None, lines))
    return "import os, signal\n" + text
