"""`trainwright ladder`: runs a script unchanged, in a mixed precision, compiled and under strategies, and compares."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from trainwright.devices import abilities, hardware
from trainwright.devices.hardware import describe_devices, resolve_device_type
from trainwright.distributed.environment import Environment, rung_file
from trainwright.launch.cli import Parser, check_script, parse_command
from trainwright.launch.config import find_config, setting_of
from trainwright.metric_direction import Direction
from trainwright.precision import NAMES
from trainwright.strategies import SPAWNING, STRATEGIES, VARIANTS, resolve_strategy
from trainwright.strategies.memory_plan import ALONE, MEMORY_PLANS
from trainwright.tools.choices import choose, why_missing
from trainwright.tools.columns import fill, terminal_width
from trainwright.tools.ladder.advice import choice_lines, notes, sentence
from trainwright.tools.ladder.attempt import Attempt
from trainwright.tools.ladder.climb import LOG_NAME, Climb
from trainwright.tools.ladder.comparison import ComparedMetric, Comparison, choose_metric
from trainwright.tools.ladder.ladder_table import terminal_table, write_files
from trainwright.tools.ladder.rung import Rung

UNCHANGED, COMPILE = "unchanged", "compile"
LEFT_OUT = {"deepspeed_stage_1"}
"""Strategies that need --rungs. Stage 2 takes less memory than stage 1 and is as fast."""


def known_rungs() -> list[str]:
    """Return the names that --rungs accepts: the rungs of a ladder, then other strategies."""
    others = [name for name in (*STRATEGIES, *VARIANTS) if name not in SPAWNING and name != ALONE]
    return list(dict.fromkeys([UNCHANGED, *NAMES, COMPILE, *MEMORY_PLANS, *others]))


def usual_rungs(device_type: str, num_devices: int) -> list[str]:
    """Return the rungs of a ladder on this machine."""
    half = "16-mixed" if device_type != "cpu" and abilities.autocasts(device_type, torch.float16) else "bf16-mixed"
    strategies = [name for name in MEMORY_PLANS if name not in LEFT_OUT] if num_devices > 1 else []
    return [UNCHANGED, half, COMPILE, *strategies]


def choose_devices(text: str, device_type: str) -> int:
    """Return the number of devices for the strategies.

    Raises:
        ValueError: the text is not a possible number, -1 for all, or "auto".
    """
    present = hardware.count(device_type) if device_type != "cpu" else None
    if text == "auto":
        return 2 if present is None else max(1, abilities.num_together(device_type))
    if text == "-1":
        return torch.get_num_threads() if present is None else present
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(f"--devices {text}: expected an integer of at least 1, -1 for all, or auto.")
    if present is not None and int(text) > present:
        raise ValueError(f"--devices {text}: torch sees {present} of {device_type!r} here; pass fewer, or add --cpu.")
    return int(text)


def settings_of(name: str, results: Mapping[str, Attempt], num_devices: int) -> dict[str, Any]:
    """Return the settings of a rung. It keeps the settings that made earlier rungs faster, where it can."""
    if name == UNCHANGED:
        return {}
    comparison = Comparison(list(results.values()), None)
    compiled = results.get(COMPILE)
    helps = compiled and comparison.is_faster(compiled, results[compiled.rung.precision or UNCHANGED])
    if name in NAMES:
        return {"precision": name, "compile": True if helps else None}
    precisions = ((name, result, COMPILE if result.rung.compile else UNCHANGED) for name, result in results.items())
    fast = [name for name, result, base in precisions if name in NAMES and comparison.is_faster(result, results[base])]
    precision = max(fast, key=lambda name: comparison.gain(results[name], results[UNCHANGED]), default=None)
    if name == COMPILE:
        return {"precision": precision, "compile": True}
    # False under a strategy that cannot compile, since the script may compile.
    compiles = None if resolve_strategy(name, num_devices).capabilities.takes_compile else False
    compiles = True if helps and compiles is None else compiles
    return {"precision": precision, "compile": compiles, "devices": num_devices, "strategy": name}


INTERRUPTED = 130


def ladder_command(arguments: Sequence[str], _: Any) -> int:
    """Run `trainwright ladder`, and return 0, or 1 if the unchanged script fails."""
    parser = _parser()
    options, command = parse_command(parser, arguments)
    script_end = 2 if command[:1] == ["-m"] else 1
    if command[script_end : script_end + 1] == ["--"]:
        del command[script_end]
    try:
        ladder = _ladder(options, command)
    except (ValueError, RuntimeError, OSError) as error:
        parser.error(str(error))
    with _interruptible():
        return ladder.run()


def _parser() -> Parser:
    parser = Parser(
        prog="trainwright ladder",
        usage="trainwright ladder [OPTIONS] (SCRIPT | -m MODULE) [ARGUMENTS OF THE SCRIPT]",
        description="Runs a script that makes a Trainer or an Accelerator several times: unchanged, in a mixed precision, "
        "compiled, and under every strategy. The script itself does not change: a rung's settings replace its arguments. "
        "At the end a table compares speed, memory and the test metric, and names the rung to choose.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    # fmt: off
    add("--rungs", metavar="NAME,NAME", help="of unchanged (always the first), precisions, compile and strategies "
        "(default: all that suit this machine)")
    add("--devices", metavar="N", default="auto", help="devices of the strategies: a number, -1 for all, or auto (the "
        "default): all of the accelerator, or two processes on the CPU")
    add("--cpu", action=argparse.BooleanOptionalAction, help="compute on the CPU even if there is a GPU")
    add("--steps", metavar="N", help="end every training after N optimizer steps")
    add("--timeout", metavar="SECONDS", help="end a run after that time, and go to the next rung")
    add("--out", metavar="DIR", help="a new folder for logs and results (default: ladder/NAME-1 and so on)")
    add("--metric", metavar="NAME", help="the metric to compare (default: one of the test, or of the validation)")
    add("--higher", action="store_true", help="a higher metric is better, if its name does not show it")
    add("--lower", action="store_true", help="a lower metric is better")
    add("--config-file", metavar="PATH", help="use the variables and cpu of this config, as launch does")
    # fmt: on
    return parser


def _ladder(options: argparse.Namespace, command: list[str]) -> Ladder:
    check_script(command)
    if options.higher and options.lower:
        raise ValueError("--higher and --lower exclude each other. Pass one.")
    steps, timeout = _whole(options.steps, "--steps"), _whole(options.timeout, "--timeout")
    config = find_config(options.config_file)
    variables = config.set_variables()
    if (job := Environment.detect(variables)).launched_by != "single" or rung_file() is not None:
        raise ValueError(
            f"this process is rank {job.rank} of a job of {job.world_size} process(es), or runs under a ladder itself. A "
            "ladder starts other jobs, so run it in a shell outside of that job."
        )
    on_cpu = setting_of("cpu", {"cpu": options.cpu}, {}, config).value == "true"
    kind = resolve_device_type("cpu" if on_cpu else "auto")
    num_devices = choose_devices(options.devices, kind)
    names = choose(options.rungs, known_rungs(), usual_rungs(kind, num_devices), "--rungs")
    climb = Climb(
        command=command,
        folder=_new_folder(options.out, command),
        variables=variables,
        steps=steps,
        accelerator="cpu" if on_cpu else None,
        timeout_seconds=timeout,
    )
    direction: Direction | None = "max" if options.higher else "min" if options.lower else None
    wanted = [name for name in names if name != UNCHANGED]
    return Ladder(climb, [UNCHANGED, *wanted], kind, num_devices, options.metric, direction)


class Ladder:
    """Runs the rungs one after another, and compares them."""

    def __init__(
        self,
        climb: Climb,
        names: Sequence[str],
        device_type: str,
        num_devices: int,
        wanted: str | None,
        direction: Direction | None,
    ) -> None:
        self.climb, self.names = climb, names
        self.device_type, self.num_devices = device_type, num_devices
        self.wanted, self.direction = wanted, direction
        self.results: dict[str, Attempt] = {}
        self.metric: ComparedMetric | None = None

    def run(self) -> int:
        """Run the rungs, print and write the comparison, and return the exit code."""
        script = self.climb.command[1] if self.climb.command[0] == "-m" else self.climb.command[0]
        _say(f"The ladder of {script}: {', '.join(self.names)}. This machine has {describe_devices()}.")
        if self.device_type == "cpu" and self.num_devices > 1 and _strategies(self.names):
            _say(f"The strategies run in {self.num_devices} processes on the CPU.")
        _say(f"Logs and results are in {os.path.relpath(self.climb.folder)}.")
        print(flush=True)
        code = 0
        try:
            for name in self.names:
                self._climb(name)
                first = self.results[UNCHANGED]
                if name == UNCHANGED and first.state != "finished":
                    return self._give_up(first)
                if name == UNCHANGED:
                    try:
                        self.metric = choose_metric(first, self.wanted, self.direction)
                    except ValueError as error:
                        _say(f"trainwright ladder: {error}")
                        return 2
                    if short := Comparison([first], None).too_short:
                        _say(f"No rung will be chosen: {short}.")
        except KeyboardInterrupt:
            code = INTERRUPTED
        if (started := self.results.get(UNCHANGED)) is not None and started.state == "finished":
            self._report(f"The ladder of {script}")
        elif started is not None:
            _say("\nThe ladder was interrupted in its first rung, the unchanged script, so nothing can be compared.")
            _say(f"Its output is in {os.path.relpath(started.log)}.")
        return code

    def _climb(self, name: str) -> None:
        settings: dict[str, Any] = {}
        reason = why_missing(name) if name in _strategies(known_rungs()) else ""
        if not reason:
            settings = settings_of(name, self.results, self.num_devices)
        print(f"{name:<{max(map(len, self.names))}}  ", end="", flush=True)
        rung = Rung(name, str(self.climb.folder), **settings)
        if reason:
            self.results[name] = Attempt(rung, "skipped", reason)
        else:
            log = str(self.climb.folder / name / LOG_NAME)
            try:
                self.results[name] = self.climb.run(name, settings)
            except OSError as error:  # of a full disk, for example: the ladder still reports its results
                self.results[name] = Attempt(rung, "failed", str(error), log=log)
            except KeyboardInterrupt:
                self.results[name] = Attempt(rung, "interrupted", "the ladder was interrupted", log=log)
                raise
        print(_outcome(self.results[name]), flush=True)

    def _give_up(self, failed: Attempt) -> int:
        _say(f"\nThe ladder ends at its first rung, the unchanged script: {sentence(failed.reason)}")
        _say(f"Its output is in {os.path.relpath(failed.log)}.")
        return 1

    def _report(self, title: str) -> None:
        comparison = Comparison(list(self.results.values()), self.metric)
        choice = list(choice_lines(comparison, self.climb.command))
        sentences = list(notes(comparison, self.device_type))
        # Files first, since a closed terminal may have interrupted the ladder.
        try:
            paths = write_files(self.climb.folder, title, comparison, [*choice, *sentences])
            written = f"Written: {', '.join(os.path.relpath(path) for path in paths)}"
        except OSError as error:
            written = f"The files could not be written: {error}."
        if any(result.state == "interrupted" for result in comparison.results):
            _say("\nThe ladder was interrupted. Its results so far:")
        print("\n".join(["", *terminal_table(comparison, terminal_width(sys.stdout)), ""]))
        for line in [*sentences, "", *choice]:
            print(line) if line.startswith("    ") else _say(line)
        _say(f"\n{written}")


def _say(text: str) -> None:
    head = "\n" if text.startswith("\n") else ""
    print(head + fill(text.lstrip("\n"), terminal_width(sys.stdout)), flush=True)


def _strategies(names: Sequence[str]) -> list[str]:
    return [name for name in names if name in STRATEGIES or name in VARIANTS]


def _outcome(attempt: Attempt) -> str:
    if attempt.state != "finished" or attempt.record is None:
        return f"{attempt.state}: {attempt.reason}" if attempt.state == "skipped" else attempt.state
    record = attempt.record
    rate = record.samples_per_second
    fast = "" if rate is None else f", {rate:{',.0f' if rate >= 100 else '.3g'}} samples/s"
    return f"{record.steps:,} steps in {record.seconds:.3g} s{fast}"


def _new_folder(out: str | None, command: Sequence[str]) -> Path:
    """Make and return the folder of this ladder (ValueError if it is not empty, or cannot be made or written)."""
    if out is None:
        stem = command[1].replace(".", "_") if command[0] == "-m" else Path(command[0]).resolve().stem
        folder = next(path for number in count(1) if not (path := Path(f"ladder/{stem}-{number}").absolute()).exists())
    else:
        folder = Path(out).absolute()
    shown = os.path.relpath(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise ValueError(f"the folder {shown} cannot be made ({error}); pass another folder with --out.") from error
    if not is_empty:
        raise ValueError(f"--out {out} exists already; pass a new folder, so that no earlier result is replaced.")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"the folder {shown} cannot be written; pass another folder with --out.")
    return folder


def _whole(text: str | None, flag: str) -> int | None:
    if text is not None and not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ValueError(f"{flag} {text}: expected an integer of at least 1.")
    return None if text is None else int(text)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end a ladder as Ctrl-C does, so that no run outlives it."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
