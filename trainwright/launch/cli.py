"""The command line: `trainwright launch` runs a script or a module in several processes, on one machine or several.

The subcommands are in `COMMANDS`, and `__main__.py` adds others. Flags override the environment, which overrides
the config, which overrides defaults (sources.py).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from trainwright.devices import num_cores
from trainwright.distributed.environment import JOB_VARIABLE
from trainwright.distributed.masking import shown
from trainwright.distributed.network import DEFAULT_PORT, LOOPBACK
from trainwright.errors import did_you_mean
from trainwright.launch.columns import lay_out, terminal_width
from trainwright.launch.config import CONFIG_VARIABLE, KEY_OF, OTHER_WORDS, Config, find_config, printable
from trainwright.launch.nodes import JOB_ID_VARIABLE, LOGS_VARIABLE, WAIT_SECONDS, Job, Nodes
from trainwright.launch.processes import GRACE_SECONDS, GRACE_VARIABLE, supervise
from trainwright.launch.setting_sources import FLAGS, Given, LaunchSetting, NameCheck, Sources

__all__ = ["Parser", "check_config", "check_script", "split_command"]

NODE_FIELDS = {
    "num_nodes": "count",
    "node_rank": "rank",
    "main_address": "address",
    "main_port": "port",
    "min_nodes": "fewest",
    "rendezvous_seconds": "wait_seconds",
}
"""The settings that describe the job's machines, with the fields of `Nodes`. The last two are for several machines."""
Command = tuple[Callable[[Sequence[str], NameCheck], int], str]
"""The function of a subcommand, which gets the arguments after its name and returns the exit code, and a line of help."""


class Parser(argparse.ArgumentParser):
    """Prints an error in one line, with where to find help."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\nSee `{self.prog} --help`.\n")


def main(arguments: Sequence[str], check_names: NameCheck, others: Mapping[str, Command] | None = None) -> int:
    """Run the subcommand that the arguments name and return the exit code. `others` are further subcommands."""
    commands = {**COMMANDS, **(others or {})}
    parser = Parser(prog="trainwright", usage="trainwright COMMAND ...", add_help=False)
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        lines = [f"  {command:<12}{about}" for command, (_, about) in commands.items()]
        print(
            "usage: trainwright COMMAND ...\n\ncommands:\n" + "\n".join(lines) + "\n\nSee `trainwright COMMAND --help`."
        )
        return 0
    if name not in commands:
        parser.error(f"{name!r} is not a command. Choose from {', '.join(commands)}.{did_you_mean(name, commands)}")
    run, _ = commands[name]
    return run(arguments[1:], check_names)


def launch_command(arguments: Sequence[str], check_names: NameCheck) -> int:
    parser, actions = _launch_parser()
    own, command = split_command(parser, actions, arguments)
    options = parser.parse_args(own)
    try:
        config = find_config(options.config_file, os.environ)
        new = {name: entry.text for name, entry in config.variables.items() if name not in os.environ}
        os.environ.update(new)  # before torch looks for GPUs
        sources = Sources(options, os.environ, config)
        settings = sources.check_names(check_names, resolve(sources))
        check_script(command)
        nodes = _nodes(settings)
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
    sys.stderr.write(_describe(command, settings, config, new))
    sys.stderr.flush()
    if options.dry_run:
        print(describe_job(job, passed_on, new))
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


COMMANDS: dict[str, Command] = {
    "launch": (launch_command, "run a script in several processes, on one machine or several"),
}


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
    actions = [
        add("--devices", metavar="N", help="processes on this machine, one for each device. -1: all devices. "
            "auto (the default): every GPU, or one process"),
        add("--cpu", action=argparse.BooleanOptionalAction, help="compute on the CPU even if there is a GPU"),
        add("--strategy", metavar="NAME", help="how the processes divide the work, such as ddp or deepspeed"),
        add("--precision", metavar="NAME", help="such as 32-true, 16-mixed or bf16-mixed; also 32, fp16 or bf16"),
        add("--gradient-accumulation-steps", metavar="N", help="batches per optimizer step"),
        add("--num-nodes", metavar="N", help="machines of the job. Run this command on each of them (default: 1)"),
        add("--nodes", metavar="MIN:MAX", help="instead of --num-nodes and --node-rank: the job runs on MIN to MAX machines, "
            "numbered as they arrive; one number is both"),
        add("--node-rank", metavar="N", help="this machine's number, from 0 (or the variable NODE_RANK)"),
        add("--main-address", metavar="HOST", help="name or address of machine 0 (or MASTER_ADDR)"),
        add("--main-port", metavar="PORT", help="port of machine 0 (or MASTER_PORT; default: 29500; alone, a free one)"),
        add("--rendezvous-seconds", metavar="N", help=f"how long the machines wait for each other (default: {WAIT_SECONDS})"),
        add("--max-restarts", metavar="N", help="how many times all ranks are restarted, after a failed rank or a lost machine "
            "(default: 0)"),
        add("--grace-seconds", metavar="N", help="on SIGTERM, SIGUSR1 or Ctrl-C, how long the ranks have to save and exit (or "
            f"the variable {GRACE_VARIABLE}; default: {GRACE_SECONDS})"),
        add("--logs", metavar="DIR", help="also append each rank's output to DIR/rank0.log and so on (or the variable "
            f"{LOGS_VARIABLE})"),
        add("--job-id", metavar="NAME", help="a name that tells this job from others at the same address, the same on every "
            f"machine (or {JOB_ID_VARIABLE}; default: the job's command)"),
        add("--config-file", metavar="PATH", help=f"a YAML file for what flags leave open (or the variable {CONFIG_VARIABLE}; "
            "default: ~/.config/trainwright/config.yaml, if it is there; trainwright config writes it)"),
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
            ours = FLAGS.get(OTHER_WORDS.get(flag.lstrip("-").replace("-", "_"), ""))
            hint = f" It is Accelerate's; ours is {ours!r}." if ours in flags else did_you_mean(flag, flags)
            parser.error(f"{flag!r} is not an option of {parser.prog}.{hint} Put options of the script after its name.")
        index += 1 if is_joined or flags[flag].nargs == 0 else 2
    return list(arguments), []


def resolve(sources: Sources) -> dict[str, LaunchSetting]:
    """Return all settings with their sources (ValueError if one is wrong, or two contradict)."""
    if JOB_VARIABLE in sources.variables or "RANK" in sources.variables:
        raise ValueError(
            "this process is itself a rank of a job (the environment has RANK). Start one launcher on each machine. Run the "
            "script without trainwright launch here, or unset the variable."
        )
    # Not at the top: it imports torch, which looks for GPUs as the config's variables say.
    from trainwright.devices import hardware

    on_cpu = sources.on_cpu()
    num_gpus = 0 if on_cpu else hardware.count()
    kind = (hardware.built_for() if num_gpus else None) or "cpu"
    cpu = sources.find("cpu")
    settings = {
        "devices": _devices(sources.find("devices"), num_gpus, kind),
        "accelerator": LaunchSetting(kind, cpu.source if cpu is not None else f"default: {num_gpus} GPU(s) here"),
        "strategy": _text(sources.find("strategy"), "auto"),
        "precision": _text(sources.find("precision"), None),
        "gradient_accumulation_steps": _number(sources.find("gradient_accumulation_steps"), default=None, least=1),
        "num_nodes": _number(sources.find("num_nodes"), default=1, least=1),
    }
    if (span := _range(sources)) is not None:
        settings["min_nodes"], settings["num_nodes"] = span
    settings |= _node(sources, settings["num_nodes"], is_range=span is not None)
    settings["max_restarts"] = _number(sources.find("max_restarts"), default=0)
    settings["grace_seconds"] = _number(sources.find("grace_seconds"), default=GRACE_SECONDS)
    settings["logs"] = _text(sources.find("logs"), None)
    settings["job_id"] = _text(sources.find("job_id"), None)
    return settings


def check_config(config: Config, check_names: NameCheck, *, with_environment: bool = False) -> dict[str, LaunchSetting]:
    """Return the settings of a config without flags, or with the environment's (ValueError if one is wrong)."""
    variables = {name: os.environ[name] for name in KEY_OF if with_environment and name in os.environ}
    sources = Sources(argparse.Namespace(**dict.fromkeys(FLAGS)), variables, config)
    settings = sources.check_names(check_names, resolve(sources))
    _nodes(settings)
    return settings


def _nodes(settings: Mapping[str, LaunchSetting]) -> Nodes:
    return Nodes(**{field: settings[name].value for name, field in NODE_FIELDS.items() if name in settings})


def _devices(given: Given | None, num_gpus: int, kind: str) -> LaunchSetting:
    if given is None or given.text == "auto":
        from trainwright.devices.abilities import num_together

        return LaunchSetting(num_together(kind) or 1, "default" if given is None else f"{given.source} (auto)")
    if given.text == "-1":
        return LaunchSetting(num_gpus or num_cores(), given.source)
    number = _number(given, default=1, least=1, more=", -1 for all, or auto").value
    if num_gpus and number > num_gpus:
        raise ValueError(f"{given.label}: torch sees {num_gpus} GPU(s) here. Pass at most that many, or add --cpu.")
    return LaunchSetting(number, given.source)


def _range(sources: Sources) -> tuple[LaunchSetting, LaunchSetting] | None:
    """Return the fewest and the most machines, if a range was given. A flag for a fixed number overrides the config's range."""
    given = sources.find("nodes")
    if given is None:
        return None
    for name in ("num_nodes", "node_rank"):
        other = sources.find(name, environment=False)
        if other is None:
            continue
        is_flag = other.source == FLAGS[name]
        if is_flag == (given.source == FLAGS["nodes"]):
            raise ValueError(
                f"{other.label} was given with {given.label}, which replaces it: the machines are numbered as they arrive. "
                "Leave one of the two out."
            )
        if is_flag:
            return None
    first, is_range, last = given.text.partition(":")
    numbers = [int(each) for each in (first, last if is_range else first) if each.isascii() and each.isdigit()]
    if len(numbers) < 2 or not 1 <= numbers[0] <= numbers[1]:
        raise ValueError(
            f"{given.label}: expected MIN:MAX, two integers of at least 1, the second not smaller, such as 1:4, or "
            "one number."
        )
    return LaunchSetting(numbers[0], given.source), LaunchSetting(numbers[1], given.source)


def _node(sources: Sources, num_nodes: LaunchSetting, *, is_range: bool) -> dict[str, LaunchSetting]:
    """Return which of the job's machines this is, and the address and port at which they meet."""
    names = ("node_rank", "main_address", "main_port", "rendezvous_seconds")
    if num_nodes.value == 1:
        # A flag for one node overrides the config's settings of several nodes.
        flags_only = num_nodes.source in (FLAGS["num_nodes"], FLAGS["nodes"])
        rank, address, port, wait = (sources.find(name, flags_only=flags_only, environment=False) for name in names)
        for each in (address, wait):
            if each is not None:
                raise ValueError(
                    f"{each.label} is for several machines. Add --num-nodes N or --nodes, or leave it out."
                )
        return {
            "node_rank": _number(rank, default=0),
            "main_address": LaunchSetting(LOOPBACK, "default"),
            "main_port": _number(port, default=0),
        }
    rank, address, port, wait = (sources.find(name) for name in names)
    flag = f"--{'nodes' if is_range else 'num-nodes'} {num_nodes.value}"
    if rank is None and not is_range:
        raise ValueError(
            f"{flag} was given, but not this machine's number. Pass --node-rank, from 0 to {num_nodes.value - 1}, or set "
            "NODE_RANK."
        )
    number = LaunchSetting(None, "by arrival") if is_range else _number(rank, default=0)
    if address is None:
        which = "at which all meet" if is_range else "with --node-rank 0"
        raise ValueError(
            f"{flag} was given, but no main address. Pass --main-address, the name or address of the machine {which}, or set "
            "MASTER_ADDR, the same on every machine."
        )
    return {
        "node_rank": number,
        "main_address": LaunchSetting(address.text, address.source),
        "main_port": _number(port, default=DEFAULT_PORT),
        "rendezvous_seconds": _number(wait, default=WAIT_SECONDS),
    }


def _text(given: Given | None, default: str | None) -> LaunchSetting:
    return LaunchSetting(default, "default") if given is None else LaunchSetting(given.text, given.source)


def _number(given: Given | None, *, default: int | None, least: int = 0, more: str = "") -> LaunchSetting:
    if given is None:
        return LaunchSetting(default, "default")
    # int() would also take " 5" and "1_000", and isdigit() superscripts, which int() rejects.
    if not (given.text.isascii() and given.text.isdigit()) or int(given.text) < least:
        raise ValueError(f"{given.label}: expected an integer of at least {least}{more}.")
    return LaunchSetting(int(given.text), given.source)


def _describe(
    command: Sequence[str], settings: Mapping[str, LaunchSetting], config: Config, new: Mapping[str, str]
) -> str:
    what = command[1] if command[0] == "-m" else command[0]
    lines = [f"trainwright launch: {settings['devices'].value} process(es) of {what} on this machine"]
    rows = [("config", config.path or "none", config.source)]
    for name, (value, source) in settings.items():
        if value is not None or name != "gradient_accumulation_steps":
            is_free = name == "main_port" and value == 0
            rows.append((name, "a free one" if is_free else "none" if value is None else str(value), source))
    rows += [
        (f"env {name}", printable(shown(name, value)), config.variables[name].where) for name, value in new.items()
    ]
    lines += lay_out(rows, terminal_width(sys.stderr), indent=2, shortened=(1, 2))
    return "\n".join(lines) + "\n"


def describe_job(job: Job, passed_on: Mapping[str, Any], new: Mapping[str, str]) -> str:
    """Return a job's command, its processes, and the variables that the config would set."""
    where = f"{job.nodes.address}:{job.nodes.port or 'a free port'}"
    machine = "a machine" if job.nodes.rank is None else f"machine {job.nodes.rank}"
    machines = f"{job.nodes.least} to {job.nodes.count}" if job.nodes.rank is None else f"{job.nodes.count}"
    lines = [
        f"would run {job.num_processes} process(es) on {machine} of {machines}, which meet at {where}:",
        f"  {shlex.join(job.command)}",
        *(f"with {name}={shlex.quote(shown(name, value))}" for name, value in new.items()),
    ]
    chosen = {name: value for name, value in passed_on.items() if value is not None}
    lines.append(f"what the script leaves open is set to: {json.dumps(chosen) if chosen else 'nothing'}")
    return "\n".join(lines)
