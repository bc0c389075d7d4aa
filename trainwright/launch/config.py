"""The settings of `trainwright launch`, from the first that has one: a flag, the environment, the config, or a default.

The config is a YAML file, which may also set variables of the processes.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainwright.devices import num_cores
from trainwright.distributed.environment import JOB_VARIABLE
from trainwright.distributed.network import DEFAULT_PORT, LOOPBACK
from trainwright.errors import did_you_mean
from trainwright.launch.nodes import JOB_ID_VARIABLE, LOGS_VARIABLE, WAIT_SECONDS, Nodes
from trainwright.launch.processes import GRACE_SECONDS, GRACE_VARIABLE

__all__ = [
    *("KEYS", "Config", "check_variables", "config_path", "find_config", "printable", "set_variables_of"),
    *("NameCheck", "Sources", "flag_of"),
]

CONFIG_VARIABLE = "TRAINWRIGHT_CONFIG"
"""The variable that names the config, where --config-file does not."""
KEYS = {
    "devices": "processes on this machine, one for each device: a number, -1 for all, or auto (every GPU, or one process)",
    "cpu": "true: compute on the CPU even if there is a GPU",
    "strategy": "how the processes divide the work: auto, or the name of a strategy, such as ddp",
    "precision": "such as 32-true, 16-mixed or bf16-mixed; also 32, fp16 or bf16",
    "gradient_accumulation_steps": "batches per optimizer step",
    "num_nodes": "machines of the job, each of which runs this command (default: 1)",
    "nodes": "instead of num_nodes and node_rank: MIN:MAX machines, numbered as they arrive",
    "node_rank": "this machine's number, from 0 (or the variable NODE_RANK)",
    "main_address": "name or address of machine 0 (or MASTER_ADDR)",
    "main_port": "port of machine 0 (or MASTER_PORT; default: 29500, or a free one for a single machine)",
    "rendezvous_seconds": f"how long the machines wait for each other (default: {WAIT_SECONDS})",
    "max_restarts": "how many times all ranks are restarted, after a failed rank or a lost machine (default: 0)",
    "grace_seconds": f"how long the ranks have to save and exit after a signal (or {GRACE_VARIABLE}; default: {GRACE_SECONDS})",
    "logs": f"a folder for the output of each rank, in rank0.log and so on (or {LOGS_VARIABLE})",
    "job_id": f"a name that tells this job from others at the same address, the same on every machine (or {JOB_ID_VARIABLE})",
    "env": "environment variables of the processes; those that are set already stay",
}
"""The keys of a config, with their meanings."""
OTHER_WORDS = {
    "num_processes": "devices",
    "num_machines": "num_nodes",
    "machine_rank": "node_rank",
    "main_process_ip": "main_address",
    "main_process_port": "main_port",
    "mixed_precision": "precision",
    "use_cpu": "cpu",
    "multi_gpu": "devices",
}
"""Keys of Accelerate's configs and flags of its launcher, and the names that we use instead."""
KEY_OF = {
    "NODE_RANK": "node_rank",
    "MASTER_ADDR": "main_address",
    "MASTER_PORT": "main_port",
    GRACE_VARIABLE: "grace_seconds",
    LOGS_VARIABLE: "logs",
    JOB_ID_VARIABLE: "job_id",
}
"""Variables that a key of the config sets."""
VARIABLE_OF = {key: variable for variable, key in KEY_OF.items()}


@dataclass(frozen=True)
class Config:
    """The entries of a config, by key, as the file spells them."""

    path: str | None = None
    source: str = "default"
    """The flag or the variable that named the file, or "default"."""
    values: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    """The variables under `env`."""


def config_path(given: str | None) -> tuple[str, str]:
    """Return the path of the config, and the flag or variable that named it, or "default"."""
    if given is not None:
        return given, "--config-file"
    if named := os.environ.get(CONFIG_VARIABLE):
        return os.path.expanduser(named), CONFIG_VARIABLE
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return os.path.join(folder, "trainwright", "config.yaml"), "default"


def find_config(given: str | None) -> Config:
    """Return the config that a flag or the environment names, or else the user's, which need not exist.

    Raises:
        ValueError: a named file does not exist or cannot be read, or an entry is wrong.
    """
    path, source = config_path(given)
    if source == "default" and not os.path.exists(path):
        return Config()
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.BaseLoader(file).get_single_data()  # keeps the spelling of `no` and `1:30`
        values, variables = _checked(values)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"{path}: the config cannot be read as YAML ({problem}). Correct it, or its path.") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return Config(path, source, values, variables)


def _checked(content: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Return the values of a config and its variables (ValueError if a key or a kind of value is wrong)."""
    values: Any = content or {}
    variables: Any = values.pop("env", "") or {} if isinstance(values, dict) else {}
    if not isinstance(values, dict) or not isinstance(variables, dict):
        raise ValueError("expected lines of `name: value`, also under env.")
    for key in values:
        if key in ("compute_environment", "distributed_type"):
            raise ValueError(f"{key!r} is a key of Accelerate's configs; `trainwright config` writes ours.")
        if key not in KEYS:
            hint = f" Did you mean {OTHER_WORDS[key]!r}?" if key in OTHER_WORDS else did_you_mean(key, KEYS)
            raise ValueError(f"{key!r} is not a key of a config. Expected one of {', '.join(KEYS)}.{hint}")
    check_variables(variables)
    for key, value in {**values, **variables}.items():
        if not isinstance(value, str):
            raise ValueError(f"{key} is {value}. Expected a single value.")
    return {key: value for key, value in values.items() if value not in ("", "~", "null")}, variables


def check_variables(names: Iterable[str]) -> None:
    """Raise ValueError if a config may not set one of these variables."""
    ours = (*KEY_OF, "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", JOB_VARIABLE, CONFIG_VARIABLE)
    for name in names:
        if name in ours:
            raise ValueError(f"env has {name}, which trainwright launch sets itself. Remove it, or set its key.")


def set_variables_of(config: Config) -> dict[str, str]:
    """Set the variables of a config that are not set yet, before torch looks for GPUs. Return all that are."""
    os.environ.update({name: text for name, text in config.variables.items() if name not in os.environ})
    return dict(os.environ)


def printable(text: str) -> str:
    """Return a text on one line, with control characters as escapes: they would change a terminal."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


NameCheck = Callable[[str | None, str | None, int], str | None]
"""Refuses an unknown strategy or precision, given the number of processes, and returns the Trainer's name of the precision."""


class LaunchSetting(NamedTuple):
    """A value, its source (a flag, a variable, the config's path, or "default"), and how errors call both."""

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

    def find(self, name: str, default: Any = None, *, flags_only: bool = False) -> LaunchSetting:
        """Return the text of the flag, the variable or the config's entry, or else the default."""
        flag = getattr(self.options, name, None)
        if isinstance(flag, bool):  # --cpu and --no-cpu
            spelled = flag_of(name if flag else f"no_{name}")
            return LaunchSetting(str(flag).lower(), spelled, spelled)
        if flag is not None:
            return LaunchSetting(flag, flag_of(name), f"{flag_of(name)} {flag}")
        variable, entry = VARIABLE_OF.get(name, ""), self.config.values.get(name)
        if not flags_only and (text := self.variables.get(variable)):
            return LaunchSetting(text, variable, f"{variable}={text}")
        if flags_only or entry is None:
            return LaunchSetting(default)
        path = self.config.path or ""
        return LaunchSetting(entry, path, f"{path}: {name}: {entry}")

    def number(
        self, name: str, default: int | None = None, *, least: int = 0, more: str = "", flags_only: bool = False
    ) -> LaunchSetting:
        """Return a setting with its text as an integer, or the default (ValueError for another text)."""
        setting = self.find(name, default, flags_only=flags_only)
        if not isinstance(setting.value, str):
            return setting
        # int() would also take " 5" and "1_000", and isdigit() superscripts, which int() rejects.
        if not (setting.value.isascii() and setting.value.isdigit()) or int(setting.value) < least:
            raise ValueError(f"{setting.label}: expected an integer of at least {least}{more}.")
        return setting._replace(value=int(setting.value))

    def on_cpu(self) -> bool:
        """Return whether --cpu or the config asks for the CPU (ValueError if the config's word is unknown)."""
        cpu = self.find("cpu", "false")
        if cpu.value.lower() not in ("true", "false"):
            raise ValueError(f"{cpu.label}: expected true or false.")
        return bool(cpu.value.lower() == "true")


def resolve(sources: Sources, check_names: NameCheck) -> dict[str, LaunchSetting]:
    """Return all settings with their sources (ValueError if one is wrong, or two contradict)."""
    if JOB_VARIABLE in sources.variables or "LOCAL_RANK" in sources.variables:  # a pod of a PyTorchJob has RANK only
        raise ValueError(
            "this process is itself a rank of a job (the environment has LOCAL_RANK). Run the script without trainwright "
            "launch here, or unset the variable."
        )
    # Not at the top: it imports torch, which looks for GPUs as the config's variables say.
    from trainwright.devices import hardware

    num_gpus = 0 if sources.on_cpu() else hardware.count()
    kind = (hardware.built_for() if num_gpus else None) or "cpu"
    settings = {
        "devices": _devices(sources, num_gpus, kind),
        "accelerator": sources.find("cpu")._replace(value=kind),
        "strategy": sources.find("strategy", "auto"),
        "precision": sources.find("precision"),
        "gradient_accumulation_steps": sources.number("gradient_accumulation_steps", least=1),
        **_nodes(sources),
        "max_restarts": sources.number("max_restarts", 0),
        "grace_seconds": sources.number("grace_seconds", GRACE_SECONDS),
        "logs": sources.find("logs"),
        "job_id": sources.find("job_id"),
    }
    nodes_in(settings)  # checks them together
    strategy, precision = settings["strategy"], settings["precision"]
    num_processes = settings["devices"].value * settings["num_nodes"].value
    try:
        name = check_names(strategy.value, precision.value, num_processes)
    except ValueError as error:
        wrong = precision if str(error).startswith("precision=") else strategy
        raise ValueError(f"{wrong.source}: {error}") from error
    return {**settings, "precision": precision._replace(value=name)}


def _devices(sources: Sources, num_gpus: int, kind: str) -> LaunchSetting:
    devices = sources.find("devices", "auto")
    if devices.value == "auto":
        from trainwright.devices.abilities import num_together

        return devices._replace(value=num_together(kind) or 1)
    if devices.value == "-1":
        return devices._replace(value=num_gpus or num_cores())
    number = sources.number("devices", least=1, more=", -1 for all, or auto")
    if num_gpus and number.value > num_gpus:
        raise ValueError(f"{devices.label}: torch sees {num_gpus} GPU(s) here. Pass at most that many, or add --cpu.")
    return number


def _nodes(sources: Sources) -> dict[str, LaunchSetting]:
    """Return the number of machines, which of them this is, and the address and port at which they meet."""
    span = sources.find("nodes")
    settings = {"num_nodes": sources.number("num_nodes", 1, least=1)} if span.value is None else _range(span, sources)
    num_nodes = settings["num_nodes"]
    if num_nodes.value == 1:  # the environment and the config may describe a job of several nodes
        for name in ("main_address", "rendezvous_seconds"):
            if (extra := sources.find(name, flags_only=True)).value is not None:
                raise ValueError(f"{extra.label} is for several machines. Add --num-nodes or --nodes, or leave it out.")
        rank, port = (sources.number(name, 0, flags_only=True) for name in ("node_rank", "main_port"))
        return {**settings, "node_rank": rank, "main_address": LaunchSetting(LOOPBACK), "main_port": port}
    rank, address = sources.number("node_rank"), sources.find("main_address")
    if span.value is not None:
        rank = LaunchSetting(None, "by arrival")
    elif rank.value is None:
        raise ValueError(f"{num_nodes.label} needs this machine's number. Pass --node-rank, from 0, or set NODE_RANK.")
    if address.value is None:
        raise ValueError(
            f"{num_nodes.label} needs a main address. Pass --main-address, the name or address of machine 0, or set "
            "MASTER_ADDR, the same on every machine."
        )
    settings |= {"node_rank": rank, "main_address": address, "main_port": sources.number("main_port", DEFAULT_PORT)}
    return {**settings, "rendezvous_seconds": sources.number("rendezvous_seconds", WAIT_SECONDS)}


def _range(span: LaunchSetting, sources: Sources) -> dict[str, LaunchSetting]:
    """Return the least and the greatest number of machines."""
    for other in (sources.find("num_nodes"), sources.find("node_rank", flags_only=True)):
        if other.value is not None:
            raise ValueError(f"{other.label} was given with {span.label}, which replaces it. Leave one of the two out.")
    parts = re.fullmatch(r"(\d+)(?::(\d+))?", span.value, re.ASCII)
    least, most = (int(parts[1]), int(parts[2] or parts[1])) if parts else (0, 0)
    if not 1 <= least <= most:
        raise ValueError(f"{span.label}: expected MIN:MAX, two integers of at least 1 in this order, or one number.")
    return {"min_nodes": span._replace(value=least), "num_nodes": span._replace(value=most)}


def nodes_in(settings: Mapping[str, LaunchSetting]) -> Nodes:
    """Return the machines of the job (ValueError if their numbers contradict)."""
    value = {name: setting.value for name, setting in settings.items()}
    which = (value["num_nodes"], value["node_rank"], value["main_address"], value["main_port"])
    return Nodes(*which, value.get("min_nodes"), value.get("rendezvous_seconds", WAIT_SECONDS))
