"""The command line: `trainwright launch` runs a script or a module in several processes, on one machine or several.

`__main__.py` chooses the subcommand. config.py reads the settings.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from trainwright.distributed.masking import masked
from trainwright.errors import did_you_mean
from trainwright.launch.config import KEYS, OTHER_WORDS, LaunchSetting, NameCheck, find_config, flag_of, resolve
from trainwright.launch.manifests import FLAGS, emit
from trainwright.launch.nodes import Job, Nodes
from trainwright.launch.processes import supervise

__all__ = ["Parser", "check_script", "parse_command"]


class Parser(argparse.ArgumentParser):
    """Prints an error in one line, with where to find help."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\nSee `{self.prog} --help`.\n")


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
        if "LOCAL_RANK" in os.environ:  # a pod of a PyTorchJob has RANK only
            raise ValueError("this process is itself a rank of a job. Run the script directly, or unset LOCAL_RANK.")
        config = find_config(options.config_file)
        config.set_variables()
        settings, nodes = resolve(vars(options), config, check_names)
        check_script(command)
        job = _job([sys.executable, *command], settings, nodes)
        if job.logs is not None and not options.dry_run:
            os.makedirs(job.logs, exist_ok=True)
    except (ValueError, TypeError, ImportError, OSError) as error:
        parser.error(str(error))
    script = command[1] if command[0] == "-m" else command[0]
    print(f"trainwright launch: {job.num_processes} process(es) of {script} on this machine", file=sys.stderr)
    print(config.table(settings), file=sys.stderr, flush=True)
    if options.dry_run:
        print(f"would run {masked(job.command).text}")
        return 0
    return supervise(job)


def _job(command: list[str], settings: Mapping[str, LaunchSetting], nodes: Nodes) -> Job:
    value = {name: setting.value for name, setting in settings.items()}
    of_job = {name: value[name] for name in ("max_restarts", "logs", "grace_seconds", "job_id")}
    defaults = {name: value[name] for name in ("strategy", "precision", "gradient_accumulation_steps")}
    defaults["strategy"] = None if value["strategy"] == "auto" else value["strategy"]
    defaults["accelerator"] = "cpu" if value["cpu"] == "true" else None
    return Job(command, value["devices"], nodes, **of_job, defaults=defaults)


def check_script(command: Sequence[str]) -> None:
    """Reject a command without a script or a module, or whose script does not exist (ValueError)."""
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
    )
    add = parser.add_argument
    add("--cpu", action=argparse.BooleanOptionalAction, help=KEYS["cpu"].about)
    for name, entry in KEYS.items():
        if name not in ("cpu", "env"):
            add(flag_of(name), metavar=name.rpartition("_")[2].upper(), help=entry.about)
    add("--config-file", metavar="PATH", help="a YAML file for what flags leave open (or the variable TRAINWRIGHT_CONFIG; "
        "default: ~/.config/trainwright/config.yaml, if it is there; trainwright config writes it)")  # fmt: skip
    add("--emit", choices=FLAGS, help="print an sbatch file, or manifests for Kubernetes, and run nothing")
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
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options, unknown = parser.parse_known_args(arguments)
    is_module, command = options.module, options.command
    del options.module, options.command
    if unknown:
        flag = unknown[0].partition("=")[0]
        word = flag.lstrip("-").replace("-", "_")
        hint = did_you_mean(flag_of(OTHER_WORDS.get(word, word)), map(flag_of, vars(options)))
        parser.error(f"{flag!r} is not an option of {parser.prog}.{hint} Put options of the script after its name.")
    command = command[1:] if command[:1] == ["--"] else command
    if is_module and not command:
        parser.error("-m needs the name of a module after it.")
    return options, ["-m", *command] if is_module else command
