"""The command line: `trainwright launch` runs a script or a module in several processes, on one machine or several.

`__main__.py` adds the other subcommands. setting_sources.py reads the settings.
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
from trainwright.launch.columns import lay_out, terminal_width
from trainwright.launch.config import CONFIG_VARIABLE, KEY_OF, KEYS, OTHER_WORDS, Config, find_config, printable
from trainwright.launch.manifests import NEEDED, emit
from trainwright.launch.nodes import Job
from trainwright.launch.processes import supervise
from trainwright.launch.setting_sources import LaunchSetting, NameCheck, Sources, flag_of, nodes_in, resolve

__all__ = ["Parser", "check_config", "check_script", "split_command"]

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
    parser, actions = _launch_parser()
    own, command = split_command(parser, actions, arguments)
    options = parser.parse_args(own)
    try:
        if options.emit is not None:
            if options.emit == "slurm" or not command:  # another file system has the script of a pod
                check_script(command)
            print(emit(options, command, check_names), end="")
            return 0
        for name in ("image", "volume", "time", "cpus"):
            if getattr(options, name) is not None:
                raise ValueError(f"{flag_of(name)} is for the files of --emit. Add --emit, or leave it out.")
        config = find_config(options.config_file, os.environ)
        new = {name: entry.text for name, entry in config.variables.items() if name not in os.environ}
        os.environ.update(new)  # before torch looks for GPUs
        sources = Sources(options, os.environ, config)
        settings = resolve(sources, check_names)
        check_script(command)
        nodes = nodes_in(settings)
        if (logs := settings["logs"].value) is not None and not options.dry_run:
            os.makedirs(logs, exist_ok=True)
    except (ValueError, TypeError, ImportError, OSError) as error:
        parser.error(str(error))
    job = Job(
        [sys.executable, *command],
        settings["devices"].value,
        nodes,
        max_restarts=settings["max_restarts"].value,
        logs=logs,
        grace_seconds=settings["grace_seconds"].value,
        job_id=settings["job_id"].value,
    )
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
    if command[0] == "-m":
        return
    what = "Pass the path of a script, or -m and the name of a module."
    if not os.path.exists(command[0]):
        raise ValueError(f"file {command[0]!r} does not exist. {what}")
    if os.path.isdir(command[0]) and not os.path.exists(os.path.join(command[0], "__main__.py")):
        raise ValueError(f"{command[0]!r} is a folder without a __main__.py, so Python cannot run it. {what}")


def _launch_parser() -> tuple[Parser, list[argparse.Action]]:
    parser = Parser(
        prog="trainwright launch",
        usage="trainwright launch [OPTIONS] (SCRIPT | -m MODULE) [ARGUMENTS OF THE SCRIPT]",
        description="Runs a script in several processes. A Trainer or an Accelerator in it joins them; what the script passes "
        "to it overrides what is given here.",
        allow_abbrev=False,
        add_help=False,
    )
    add = parser.add_argument
    actions = [add("--cpu", action=argparse.BooleanOptionalAction, help=KEYS["cpu"])]
    for name, about in KEYS.items():
        if name not in ("cpu", "env"):
            actions.append(add(flag_of(name), metavar=name.rpartition("_")[2].upper(), help=about))
    actions += [
        add("--config-file", metavar="PATH", help=f"a YAML file for what flags leave open (or the variable {CONFIG_VARIABLE}; "
            "default: ~/.config/trainwright/config.yaml, if it is there; trainwright config writes it)"),
        add("--emit", choices=NEEDED, help="print an sbatch file, or manifests for Kubernetes, and run nothing"),
        add("--image", metavar="IMAGE", help="with --emit kubernetes: the container's image, which has the script"),
        add("--volume", metavar="CLAIM", help="with --emit kubernetes: the PersistentVolumeClaim of the checkpoints, at /runs"),
        add("--time", metavar="LIMIT", help="with --emit slurm: the time limit of the job, such as 04:00:00"),
        add("--cpus", metavar="N", help="with --emit: CPU cores of every process (default: 4)"),
        add("--dry-run", action="store_true", help="print what would run, and run nothing"),
        add("-m", "--module", metavar="MODULE", help="run a module, as python -m does, instead of a script"),
        add("-h", "--help", action="help", help="show this help message and exit"),
    ]  # fmt: skip
    return parser, actions


def split_command(
    parser: Parser, actions: Sequence[argparse.Action], arguments: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return our options, and the script or module with its arguments, which may look like our options."""
    flags = {flag: action for action in actions for flag in action.option_strings}
    index = 0
    while index < len(arguments):
        flag, is_joined, joined = arguments[index].partition("=")
        if flag in ("-m", "--module"):
            command = [joined, *arguments[index + 1 :]] if is_joined else list(arguments[index + 1 :])
            if not command or not command[0]:
                parser.error(f"{flag} needs the name of a module after it.")
            return list(arguments[:index]), ["-m", *command]
        if arguments[index] == "--":
            return list(arguments[:index]), list(arguments[index + 1 :])
        if not flag.startswith("-") or flag == "-":
            return list(arguments[:index]), list(arguments[index:])
        if flag not in flags:
            ours = flag_of(OTHER_WORDS.get(flag.lstrip("-").replace("-", "_"), ""))
            hint = f" It is Accelerate's; ours is {ours!r}." if ours in flags else did_you_mean(flag, flags)
            parser.error(f"{flag!r} is not an option of {parser.prog}.{hint} Put options of the script after its name.")
        index += 1 if is_joined or flags[flag].nargs == 0 else 2
    return list(arguments), []


def check_config(config: Config, check_names: NameCheck, *, with_environment: bool = False) -> dict[str, LaunchSetting]:
    """Return the settings of a config without flags, or with the environment's (ValueError if one is wrong)."""
    variables = {name: os.environ[name] for name in KEY_OF if with_environment and name in os.environ}
    return resolve(Sources(argparse.Namespace(), variables, config), check_names)


def _describe(what: str, settings: Mapping[str, LaunchSetting], config: Config, new: Mapping[str, str]) -> str:
    lines = [f"trainwright launch: {settings['devices'].value} process(es) of {what} on this machine"]
    rows = [("config", config.path or "none", config.source)]
    for name, (value, source, _) in settings.items():
        if value is not None or source != "default":
            rows.append((name, "a free one" if name == "main_port" and value == 0 else str(value), source))
    rows += [(f"env {name}", printable(shown(name, text)), config.variables[name].where) for name, text in new.items()]
    lines += lay_out(rows, terminal_width(sys.stderr), indent=2, shortened=(1, 2))
    return "\n".join(lines)
