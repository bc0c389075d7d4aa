"""The settings of `trainwright launch`, from the first that has one: a flag, the environment, the config, or a default."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainwright.devices import num_cores
from trainwright.distributed.environment import JOB_VARIABLE
from trainwright.distributed.network import DEFAULT_PORT, LOOPBACK
from trainwright.launch.config import KEY_OF, Config
from trainwright.launch.nodes import WAIT_SECONDS, Nodes
from trainwright.launch.processes import GRACE_SECONDS

__all__ = ["NameCheck", "Sources"]

VARIABLE_OF = {key: variable for variable, key in KEY_OF.items()}

NameCheck = Callable[[str | None, str | None, int], str | None]
"""Refuses an unknown strategy or precision, given the number of processes, and returns the Trainer's name of the precision."""


class LaunchSetting(NamedTuple):
    """A value, its source (a flag, a variable, a line of the config, or "default"), and how errors call both."""

    value: Any
    source: str = "default"
    label: str = ""


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Sources:
    """The flags, the environment and the config of one command."""

    options: argparse.Namespace
    variables: Mapping[str, str]
    config: Config

    def find(self, name: str, *, environment: bool = True, flags_only: bool = False) -> LaunchSetting | None:
        """Return the text of the flag, the variable or the config's entry, or None if none of them is there."""
        flag = getattr(self.options, name, None)
        if isinstance(flag, bool):  # --cpu and --no-cpu
            spelled = flag_of(name if flag else f"no_{name}")
            return LaunchSetting(str(flag).lower(), spelled, spelled)
        if flag is not None:
            return LaunchSetting(flag, flag_of(name), f"{flag_of(name)} {flag}")
        variable = VARIABLE_OF.get(name, "")
        if environment and not flags_only and (text := self.variables.get(variable)):
            return LaunchSetting(text, variable, f"{variable}={text}")
        if flags_only or (entry := self.config.values.get(name)) is None:
            return None
        return LaunchSetting(entry.text, entry.where, f"{entry.where}: {name}: {entry.text}")

    def on_cpu(self) -> bool:
        """Return whether --cpu or the config asks for the CPU (ValueError if the config's word is unknown)."""
        cpu = self.find("cpu") or LaunchSetting("false")
        if cpu.value.lower() not in ("true", "false"):
            raise ValueError(f"{cpu.label}: expected true or false.")
        return bool(cpu.value.lower() == "true")


def resolve(sources: Sources, check_names: NameCheck) -> dict[str, LaunchSetting]:
    """Return all settings with their sources (ValueError if one is wrong, or two contradict)."""
    if JOB_VARIABLE in sources.variables or "LOCAL_RANK" in sources.variables:  # a pod of a PyTorchJob has RANK only
        raise ValueError(
            "this process is itself a rank of a job (the environment has LOCAL_RANK). Start one launcher on each machine. Run "
            "the script without trainwright launch here, or unset the variable."
        )
    # Not at the top: it imports torch, which looks for GPUs as the config's variables say.
    from trainwright.devices import hardware

    num_gpus = 0 if sources.on_cpu() else hardware.count()
    kind = (hardware.built_for() if num_gpus else None) or "cpu"
    cpu = sources.find("cpu") or LaunchSetting("false", f"default: {num_gpus} GPU(s) here")
    settings = {
        "devices": _devices(sources.find("devices"), num_gpus, kind),
        "accelerator": LaunchSetting(kind, cpu.source),
        "strategy": sources.find("strategy") or LaunchSetting("auto"),
        "precision": sources.find("precision") or LaunchSetting(None),
        "gradient_accumulation_steps": read_number(sources.find("gradient_accumulation_steps"), least=1),
        **_nodes(sources),
        "max_restarts": read_number(sources.find("max_restarts"), default=0),
        "grace_seconds": read_number(sources.find("grace_seconds"), default=GRACE_SECONDS),
        "logs": sources.find("logs") or LaunchSetting(None),
        "job_id": sources.find("job_id") or LaunchSetting(None),
    }
    nodes_in(settings)  # checks them together
    strategy, precision = settings["strategy"], settings["precision"]
    num_processes = settings["devices"].value * settings["num_nodes"].value
    try:
        name = check_names(strategy.value, precision.value, num_processes)
    except ValueError as error:
        wrong = precision if str(error).startswith("precision=") else strategy
        raise ValueError(str(error) if wrong.source.startswith("--") else f"{wrong.source}: {error}") from error
    return {**settings, "precision": precision._replace(value=name)}


def _devices(devices: LaunchSetting | None, num_gpus: int, kind: str) -> LaunchSetting:
    if devices is None or devices.value == "auto":
        from trainwright.devices.abilities import num_together

        return LaunchSetting(num_together(kind) or 1, "default" if devices is None else f"{devices.source} (auto)")
    if devices.value == "-1":
        return LaunchSetting(num_gpus or num_cores(), devices.source)
    number = read_number(devices, least=1, more=", -1 for all, or auto")
    if num_gpus and number.value > num_gpus:
        raise ValueError(f"{devices.label}: torch sees {num_gpus} GPU(s) here. Pass at most that many, or add --cpu.")
    return number


def _nodes(sources: Sources) -> dict[str, LaunchSetting]:
    """Return the number of machines, which of them this is, and the address and port at which they meet."""
    span = sources.find("nodes")
    if span is None:
        settings = {"num_nodes": read_number(sources.find("num_nodes"), default=1, least=1)}
    else:
        settings = _range(span, sources.find("num_nodes") or sources.find("node_rank", environment=False))
    num_nodes = settings["num_nodes"]
    is_one = num_nodes.value == 1
    # One node needs no variables, and a flag for one node overrides the config's settings of several nodes.
    rank, address, port, wait = (
        sources.find(name, environment=not is_one, flags_only=is_one and num_nodes.source.startswith("--"))
        for name in ("node_rank", "main_address", "main_port", "rendezvous_seconds")
    )
    if is_one:
        for extra in (address, wait):
            if extra is not None:
                raise ValueError(f"{extra.label} is for several machines. Add --num-nodes or --nodes, or leave it out.")
        settings |= {"node_rank": read_number(rank, default=0), "main_address": LaunchSetting(LOOPBACK)}
        return {**settings, "main_port": read_number(port, default=0)}
    if rank is None and span is None:
        raise ValueError(
            f"{num_nodes.label} was given, but not this machine's number. Pass --node-rank, from 0 to {num_nodes.value - 1}, "
            "or set NODE_RANK."
        )
    if address is None:
        which = "with --node-rank 0" if span is None else "at which all meet"
        raise ValueError(
            f"{num_nodes.label} was given, but no main address. Pass --main-address, the name or address of the machine "
            f"{which}, or set MASTER_ADDR, the same on every machine."
        )
    return {
        **settings,
        "node_rank": read_number(rank) if span is None else LaunchSetting(None, "by arrival"),
        "main_address": address,
        "main_port": read_number(port, default=DEFAULT_PORT),
        "rendezvous_seconds": read_number(wait, default=WAIT_SECONDS),
    }


def _range(span: LaunchSetting, other: LaunchSetting | None) -> dict[str, LaunchSetting]:
    """Return the least and the greatest number of machines."""
    if other is not None:
        raise ValueError(
            f"{other.label} was given with {span.label}, which replaces it: the machines are numbered as they arrive. "
            "Leave one of the two out."
        )
    parts = re.fullmatch(r"(\d+)(?::(\d+))?", span.value, re.ASCII)
    least, most = (int(parts[1]), int(parts[2] or parts[1])) if parts else (0, 0)
    if not 1 <= least <= most:
        raise ValueError(
            f"{span.label}: expected MIN:MAX, two integers of at least 1, the second not smaller, such as 1:4, or one number."
        )
    return {"min_nodes": span._replace(value=least), "num_nodes": span._replace(value=most)}


def nodes_in(settings: Mapping[str, LaunchSetting]) -> Nodes:
    """Return the machines of the job (ValueError if their numbers contradict)."""
    value = {name: setting.value for name, setting in settings.items()}
    which = (value["num_nodes"], value["node_rank"], value["main_address"], value["main_port"])
    return Nodes(*which, value.get("min_nodes"), value.get("rendezvous_seconds", WAIT_SECONDS))


def read_number(
    setting: LaunchSetting | None, *, default: int | None = None, least: int = 0, more: str = ""
) -> LaunchSetting:
    """Return a setting with its text as an integer, or the default if there is no setting (ValueError for another text)."""
    if setting is None:
        return LaunchSetting(default)
    # int() would also take " 5" and "1_000", and isdigit() superscripts, which int() rejects.
    if not (setting.value.isascii() and setting.value.isdigit()) or int(setting.value) < least:
        raise ValueError(f"{setting.label}: expected an integer of at least {least}{more}.")
    return setting._replace(value=int(setting.value))
