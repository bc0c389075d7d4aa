"""The command line: `trainwright launch` runs a script or a module in several processes, on one machine or several.

`__main__.py` adds the other subcommands. config.py reads the settings.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from trainwright.distributed.masking import shown
from trainwright.errors import did_you_mean
from trainwright.launch.config import (
    CONFIG_VARIABLE,
    KEY_OF,
    KEYS,
    OTHER_WORDS,
    Config,
    LaunchSetting,
    NameCheck,
    Sources,
    find_config,
    flag_of,
    nodes_in,
    printable,
    resolve,
    set_variables_of,
)
from trainwright.launch.manifests import NEEDED, emit
from trainwright.launch.nodes import Job
from trainwright.launch.processes import supervise

__all__ = ["Parser", "check_config", "check_script", "parse_command"]

Command = tuple[Callable[[Sequence[str], NameCheck], int], str]
"""The function of a subcommand, which gets the arguments after its name and returns the exit code, and a line of help."""


class Parser(argparse.ArgumentParser):
    """Prints an error in one line, with where to find help."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\nSee `{self.prog} --help`.\n")


def main(arguments: Sequence[str], check_names: NameCheck, others: Mapping[str, Command] | None = None) -> int:
    """Run the subcommand that the arguments name and return the exit code. `others` are the subcommands beside launch."""
    about_launch = "run a script in several processes, on one machine or several"
    commands: dict[str, Command] = {"launch": (launch_command, about_launch), **(others or {})}
    parser = Parser(prog="trainwright", usage="trainwright COMMAND ...", add_help=False)
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        lines = "\n".join(f"  {command:<12}{about}" for command, (_, about) in commands.items())
        print(f"usage: trainwright COMMAND ...\n\ncommands:\n{lines}\n\nSee `trainwright COMMAND --help`.")
        return 0
    if name not in commands:
        parser.error(f"{name!r} is not a command. Choose from {', '.join(commands)}.{did_you_mean(name, commands)}")
    return commands[name][0](arguments[1:], check_names)


def launch_command(arguments: Sequence[str], check_names: NameCheck) -> int:
    parser = launch_parser()
    options, command = parse_command(parser, arguments)
    try:
        if options.emit is not None:
            if options.emit == "slurm" or not command:  # another file system has the script of a pod
                check_script(command)
            print(emit(options, command, check_names), end="")
            return 0
        for name in ("image", "volume", "time", "cpus"):
            if getattr(options, name) is not None:
                raise ValueError(f"{flag_of(name)} is for the files of --emit. Add --emit, or leave it out.")
        config = find_config(options.config_file)
        new = {name: text for name, text in config.variables.items() if name not in os.environ}
        sources = Sources(options, set_variables_of(config), config)
        settings = resolve(sources, check_names)
        check_script(command)
        of_job = {name: settings[name].value for name in ("max_restarts", "logs", "grace_seconds", "job_id")}
        job = Job([sys.executable, *command], settings["devices"].value, nodes_in(settings), **of_job)
        if job.logs is not None and not options.dry_run:
            os.makedirs(job.logs, exist_ok=True)
    except (ValueError, TypeError, ImportError, OSError) as error:
        parser.error(str(error))
    passed_on = {name: settings[name].value for name in ("strategy", "precision", "gradient_accumulation_steps")}
    passed_on["strategy"] = None if passed_on["strategy"] == "auto" else passed_on["strategy"]
    passed_on["accelerator"] = "cpu" if sources.on_cpu() else None
    what = command[1] if command[0] == "-m" else command[0]
    print(_describe(what, settings, config, new), file=sys.stderr, flush=True)
    if options.dry_run:
        print(f"would run {shlex.join(job.command)}")
        return 0
    return supervise(job, passed_on)


def check_script(command: Sequence[str]) -> None:
    """Refuse a command without a script or a module, or whose script does not exist (ValueError)."""
    if not command:
        raise ValueError("no script was given. Pass one, or -m and a module, after the options.")
    if command[0] != "-m" and not os.path.exists(command[0]):
        raise ValueError(f"file {command[0]!r} does not exist. Pass the path of a script, or -m and a module.")


def launch_parser() -> Parser:
    parser = Parser(
        prog="trainwright launch",
        usage="trainwright launch [OPTIONS] (SCRIPT | -m MODULE) [ARGUMENTS OF THE SCRIPT]",
        description="Runs a script in several processes. A Trainer or an Accelerator in it joins them; what the script passes "
        "to it overrides what is given here.",
        allow_abbrev=False,
        add_help=False,
    )
    add = parser.add_argument
    add("--cpu", action=argparse.BooleanOptionalAction, help=KEYS["cpu"])
    for name, about in KEYS.items():
        if name not in ("cpu", "env"):
            add(flag_of(name), metavar=name.rpartition("_")[2].upper(), help=about)
    add("--config-file", metavar="PATH", help=f"a YAML file for what flags leave open (or the variable {CONFIG_VARIABLE}; "
        "default: ~/.config/trainwright/config.yaml, if it is there; trainwright config writes it)")  # fmt: skip
    add("--emit", choices=NEEDED, help="print an sbatch file, or manifests for Kubernetes, and run nothing")
    add("--image", help="with --emit kubernetes: the container's image, which has the script")
    add("--volume", metavar="CLAIM", help="with --emit kubernetes: the PersistentVolumeClaim to mount at /runs")
    add("--time", metavar="LIMIT", help="with --emit slurm: the time limit of the job, such as 04:00:00")
    add("--cpus", metavar="N", help="with --emit: CPU cores of every process (default: 4)")
    add("--dry-run", action="store_true", help="print what would run, and run nothing")
    return parser


def parse_command(parser: Parser, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return our options, and the script or -m and a module, with its arguments, which may look like our options."""
    about = "followed by the name of a module: run it, as python -m does, instead of a script"
    parser.add_argument("-m", "--module", action="store_true", help=about)
    parser.add_argument("-h", "--help", action="help", help="show this help message and exit")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options, unknown = parser.parse_known_args(arguments)
    is_module, command = options.module, options.command
    del options.module, options.command
    if unknown:
        flag, flags = unknown[0].partition("=")[0], [flag_of(name) for name in vars(options)]
        ours = flag_of(OTHER_WORDS.get(flag.lstrip("-").replace("-", "_"), ""))
        hint = f" It is Accelerate's; ours is {ours!r}." if ours in flags else did_you_mean(flag, flags)
        parser.error(f"{flag!r} is not an option of {parser.prog}.{hint} Put options of the script after its name.")
    command = command[1:] if command[:1] == ["--"] else command
    if is_module and not command:
        parser.error("-m needs the name of a module after it.")
    return options, ["-m", *command] if is_module else command


def check_config(config: Config, check_names: NameCheck, *, with_environment: bool = False) -> dict[str, LaunchSetting]:
    """Return the settings of a config without flags, or with the environment's (ValueError if one is wrong)."""
    variables = {name: os.environ[name] for name in KEY_OF if with_environment and name in os.environ}
    return resolve(Sources(argparse.Namespace(), variables, config), check_names)


def _describe(what: str, settings: Mapping[str, LaunchSetting], config: Config, new: Mapping[str, str]) -> str:
    first = f"trainwright launch: {settings['devices'].value} process(es) of {what} on this machine"
    rows = [("config", config.path or "none", config.source)]
    for name, (value, source, _) in settings.items():
        if value is not None or source != "default":
            rows.append((name, "a free one" if name == "main_port" and value == 0 else str(value), source))
    rows += [(f"env {name}", printable(shown(name, text)), str(config.path)) for name, text in new.items()]
    names, values = (max(len(row[at]) for row in rows) for at in (0, 1))
    return "\n".join([first, *(f"  {name:<{names}}  {value:<{values}}  {source}" for name, value, source in rows)])
