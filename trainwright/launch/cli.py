"""The command line: `trainwright launch` runs a script or a module in several processes, on one machine or several.

Each subcommand is a line in `COMMANDS`, or one that `__main__.py` adds. Flags override the environment, which overrides
defaults.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from trainwright.distributed.clusters import main_port, read_number
from trainwright.distributed.environment import JOB_VARIABLE
from trainwright.distributed.network import DEFAULT_PORT, LOOPBACK
from trainwright.launch.nodes import WAIT_SECONDS, Job, Nodes
from trainwright.launch.output import refuse_links
from trainwright.launch.processes import GRACE_SECONDS, GRACE_VARIABLE, grace_seconds, num_cores, supervise

NameCheck = Callable[[str | None, str | None, int, str], None]
"""Refuses an unknown strategy or precision; also gets the number of processes and the device type."""
NODE_SETTINGS = {
    "num_nodes": "count",
    "node_rank": "rank",
    "main_address": "address",
    "main_port": "port",
    "min_nodes": "fewest",
    "rendezvous_seconds": "wait_seconds",
}
"""The settings that describe the job's machines, with the fields of `Nodes`; the last two are those of several machines."""
Command = tuple[Callable[[Sequence[str], NameCheck], int], str]
"""The function of a subcommand, which gets the arguments after its name and returns the exit code, and a line of help."""


class Setting(NamedTuple):
    """A value and its source: a flag, a variable of the environment, or "default"."""

    value: Any
    source: str


class Parser(argparse.ArgumentParser):
    """Prints an error in one line, with where to find help."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\nSee `{self.prog} --help`.\n")


def main(arguments: Sequence[str], check_names: NameCheck, others: Mapping[str, Command] | None = None) -> int:
    """Run the subcommand that the arguments name and return the exit code; `others` are further subcommands."""
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
        parser.error(f"{name!r} is not a command; choose from {', '.join(commands)}.{_hint(name, commands)}")
    run, _ = commands[name]
    return run(arguments[1:], check_names)


def launch_command(arguments: Sequence[str], check_names: NameCheck) -> int:
    parser, actions = _launch_parser()
    own, command = _split(parser, actions, arguments)
    options = parser.parse_args(own)
    try:
        settings = resolve(options, os.environ)
        check_names(options.strategy, options.precision, settings["devices"].value, settings["accelerator"].value)
        if not command:
            raise ValueError("no script was given; pass one, or -m and a module, after the options.")
        if command[0] != "-m" and not os.path.exists(command[0]):
            raise ValueError(
                f"file {command[0]!r} does not exist; pass the path of a script, or -m and the name of a module."
            )
        nodes = Nodes(**{name: settings[each].value for each, name in NODE_SETTINGS.items() if each in settings})
        if options.logs is not None:
            os.makedirs(options.logs, exist_ok=True)
            refuse_links(options.logs)
    except (ValueError, TypeError, ImportError, OSError) as error:
        parser.error(str(error))
    sys.stderr.write(_describe(command, settings))
    sys.stderr.flush()
    job = Job(
        [sys.executable, *command],
        settings["devices"].value,
        nodes,
        max_restarts=settings["max_restarts"].value,
        logs=options.logs,
        grace_seconds=settings["grace_seconds"].value,
    )
    accelerator = "cpu" if options.cpu else None
    return supervise(job, {"strategy": options.strategy, "precision": options.precision, "accelerator": accelerator})


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
    )
    add = parser.add_argument
    actions = [
        add("--devices", metavar="N", help="processes on this machine, one for each device; -1 for all, auto (the default) for "
            "every GPU, or one process"),
        add("--cpu", action="store_true", help="compute on the CPU even if there is a GPU"),
        add("--strategy", metavar="NAME", help="how the processes divide the work, such as ddp or deepspeed"),
        add("--precision", metavar="NAME", help="such as 32, 16-mixed or bf16-mixed"),
        add("--num-nodes", metavar="N", help="machines of the job; run this command on each of them (default: 1)"),
        add("--nodes", metavar="MIN:MAX", help="instead of --num-nodes and --node-rank: the job runs on MIN to MAX machines, "
            "numbered as they arrive; one number is both"),
        add("--node-rank", metavar="N", help="this machine's number, from 0 (or the variable NODE_RANK)"),
        add("--main-address", metavar="HOST", help="name or address of machine 0 (or MASTER_ADDR)"),
        add("--main-port", metavar="PORT", help="port of machine 0 (or MASTER_PORT; default: 29500; alone, a free one)"),
        add("--rendezvous-seconds", metavar="N", help=f"how long the machines wait for each other (default: {WAIT_SECONDS})"),
        add("--max-restarts", metavar="N", help="how often all ranks are restarted, after a failed rank or a lost machine "
            "(default: 0)"),
        add("--grace-seconds", metavar="N", help="on SIGTERM, SIGUSR1 or Ctrl-C, how long the ranks have to save and leave (or "
            f"the variable {GRACE_VARIABLE}; default: {GRACE_SECONDS})"),
        add("--logs", metavar="DIR", help="also append each rank's output to DIR/rank0.log and so on"),
        add("-m", "--module", metavar="MODULE", help="run a module, as python -m does, instead of a script"),
    ]  # fmt: skip
    return parser, [*actions, *(each for each in parser._actions if each.dest == "help")]


def _split(parser: Parser, actions: Sequence[argparse.Action], arguments: Sequence[str]) -> tuple[list[str], list[str]]:
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
            parser.error(
                f"{flag!r} is not an option of trainwright launch.{_hint(flag, flags)} Put options of the script after its "
                "name."
            )
        index += 1 if is_joined or flags[flag].nargs == 0 else 2
    return list(arguments), []


def _hint(word: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def resolve(options: argparse.Namespace, variables: Mapping[str, str]) -> dict[str, Setting]:
    """Return all settings with the source of each (ValueError if one is wrong, or two exclude each other)."""
    if JOB_VARIABLE in variables or "RANK" in variables:
        raise ValueError(
            "this process is itself a rank of a job (the environment has RANK); start one launcher on each machine. Run the "
            "script without trainwright launch here, or unset the variable."
        )
    from trainwright.devices import accelerator

    num_gpus = 0 if options.cpu else accelerator.count()
    kind = (accelerator.built_for() if num_gpus else None) or "cpu"
    settings = {
        "devices": _devices(options.devices, num_gpus, kind),
        "accelerator": Setting(kind, "--cpu" if options.cpu else f"default: {num_gpus} GPU(s) here"),
        "strategy": _given(options.strategy, "--strategy", "auto"),
        "precision": _given(options.precision, "--precision", None),
        "num_nodes": _number(options.num_nodes, "--num-nodes", default=1, least=1),
    }
    if options.nodes is not None:
        settings["min_nodes"], settings["num_nodes"] = _range(options)
    settings |= _node(options, variables, settings["num_nodes"].value)
    settings["max_restarts"] = _number(options.max_restarts, "--max-restarts", default=0)
    settings["grace_seconds"] = _number(options.grace_seconds, "--grace-seconds", default=grace_seconds(variables))
    if options.grace_seconds is None and variables.get(GRACE_VARIABLE):
        settings["grace_seconds"] = Setting(settings["grace_seconds"].value, GRACE_VARIABLE)
    settings["logs"] = _given(options.logs, "--logs", None)
    return settings


def _devices(given: str | None, num_gpus: int, kind: str) -> Setting:
    if given is None or given == "auto":
        from trainwright.devices.abilities import num_together

        return Setting(num_together(kind) or 1, "default" if given is None else "--devices auto")
    if given == "-1":
        return Setting(num_gpus or num_cores(), "--devices -1")
    number = _number(given, "--devices", default=1, least=1, more=", -1 for all, or auto").value
    if num_gpus and number > num_gpus:
        raise ValueError(
            f"--devices {number}: torch sees {num_gpus} GPU(s) here; pass at most that many, or add --cpu."
        )
    return Setting(number, "--devices")


def _range(options: argparse.Namespace) -> tuple[Setting, Setting]:
    """Return the fewest and the most machines that --nodes allows."""
    for flag, value in (("--num-nodes", options.num_nodes), ("--node-rank", options.node_rank)):
        if value is not None:
            raise ValueError(
                f"{flag} {value} was given with --nodes {options.nodes}, which replaces it: the machines are numbered as they "
                "arrive. Leave one of the two out."
            )
    first, is_range, last = options.nodes.partition(":")
    numbers = [each for each in (first, last if is_range else first) if each.isascii() and each.isdigit()]
    if len(numbers) < 2 or not 1 <= int(numbers[0]) <= int(numbers[1]):
        raise ValueError(
            f"--nodes {options.nodes}: expected MIN:MAX, two whole numbers from 1 of which the second is not smaller, such as "
            "1:4, or one number."
        )
    return Setting(int(numbers[0]), "--nodes"), Setting(int(numbers[1]), "--nodes")


def _node(options: argparse.Namespace, variables: Mapping[str, str], num_nodes: int) -> dict[str, Setting]:
    """Return which of the job's machines this is, and the address and port at which they meet."""
    if num_nodes == 1:
        several = {"--main-address": options.main_address, "--rendezvous-seconds": options.rendezvous_seconds}
        for flag, value in several.items():
            if value is not None:
                raise ValueError(
                    f"{flag} {value} is for several machines; add --num-nodes N or --nodes, or leave it out."
                )
        return {
            "node_rank": _number(options.node_rank, "--node-rank", default=0),
            "main_address": Setting(LOOPBACK, "default"),
            "main_port": _number(options.main_port, "--main-port", default=0),
        }
    is_numbered = options.nodes is None
    rank = _number(options.node_rank, "--node-rank", default=-1) if is_numbered else Setting(None, "by arrival")
    if rank.source == "default" and variables.get("NODE_RANK"):
        rank = Setting(read_number(variables, "NODE_RANK", "trainwright launch --node-rank"), "NODE_RANK")
    if is_numbered and rank.value < 0:
        raise ValueError(
            f"--num-nodes {num_nodes} was given, but not this machine's number; pass --node-rank, from 0 to "
            f"{num_nodes - 1}, or set NODE_RANK."
        )
    address = _given(options.main_address, "--main-address", None)
    if address.value is None:
        address = Setting(variables.get("MASTER_ADDR"), "MASTER_ADDR")
    if not address.value:
        flag = f"--num-nodes {num_nodes}" if is_numbered else f"--nodes {options.nodes}"
        raise ValueError(
            f"{flag} was given, but no main address; pass --main-address, the name or address of the main machine (that "
            "with --node-rank 0, if they are numbered), or set MASTER_ADDR, the same on every machine."
        )
    port = _number(options.main_port, "--main-port", default=DEFAULT_PORT)
    if port.source == "default" and variables.get("MASTER_PORT"):
        port = Setting(main_port(variables, DEFAULT_PORT), "MASTER_PORT")
    wait = _number(options.rendezvous_seconds, "--rendezvous-seconds", default=WAIT_SECONDS)
    return {"node_rank": rank, "main_address": address, "main_port": port, "rendezvous_seconds": wait}


def _given(value: Any, flag: str, default: Any) -> Setting:
    return Setting(default, "default") if value is None else Setting(value, flag)


def _number(given: str | None, flag: str, *, default: int, least: int = 0, more: str = "") -> Setting:
    if given is None:
        return Setting(default, "default")
    if not given.isdigit() or int(given) < least:
        raise ValueError(f"{flag} {given}: expected a whole number from {least}{more}.")
    return Setting(int(given), flag)


def _describe(command: Sequence[str], settings: Mapping[str, Setting]) -> str:
    what = command[1] if command[0] == "-m" else command[0]
    lines = [f"trainwright launch: {settings['devices'].value} process(es) of {what} on this machine"]
    for name, (value, source) in settings.items():
        shown = "a free one" if name == "main_port" and value == 0 else "none" if value is None else value
        lines.append(f"  {name:<15}{shown!s:<15} {source}")
    return "\n".join(lines) + "\n"
