"""The settings of `trainwright launch`: of a flag, else of the environment, of the config (a YAML file), or a default."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainwright.devices import num_cores
from trainwright.distributed.environment import JOB_VARIABLE
from trainwright.distributed.masking import shown
from trainwright.distributed.network import DEFAULT_PORT
from trainwright.errors import did_you_mean
from trainwright.launch.nodes import JOB_ID_VARIABLE, LOGS_VARIABLE, WAIT_SECONDS, Nodes
from trainwright.launch.processes import GRACE_SECONDS, GRACE_VARIABLE

__all__ = ["KEYS", "Config", "NameCheck", "check_variables", "config_path", "find_config", "flag_of", "printable"]
__all__ += ["setting_of"]


class Entry(NamedTuple):
    """A setting: its meaning, its default, its variable, and the pattern of its values, with the words for it."""

    meaning: str
    default: Any = None
    variable: str = ""
    form: tuple[str, str] = (".+", "a value")

    @property
    def about(self) -> str:
        notes = {"variable": self.variable, "default": self.default}
        return self.meaning + "".join(f"; {name}: {note}" for name, note in notes.items() if note not in ("", None))


FROM_0, FROM_1 = ("[0-9]+", "an integer of at least 0"), ("[1-9][0-9]*", "an integer of at least 1")
DEVICES = "auto|-1|[1-9][0-9]*", "an integer of at least 1, -1 for all, or auto"
RANGE = "[1-9][0-9]*(:[1-9][0-9]*)?", "MIN:MAX, two integers of at least 1 in this order, or one number"
KEYS = {
    "devices": Entry("processes on this machine: a number, -1 for every device, or auto", "auto", form=DEVICES),
    "cpu": Entry("true: compute on the CPU even if there is a GPU", form=("true|false", "true or false")),
    "strategy": Entry("how the processes divide the work: auto, or the name of a strategy, such as ddp", "auto"),
    "precision": Entry("such as 32-true, 16-mixed or bf16-mixed; also 32, fp16 or bf16"),
    "gradient_accumulation_steps": Entry("batches per optimizer step", form=FROM_1),
    "num_nodes": Entry("machines of the job, each of which runs this command", 1, form=FROM_1),
    "nodes": Entry("instead of num_nodes and node_rank: MIN:MAX machines, numbered as they arrive", form=RANGE),
    "node_rank": Entry("this machine's number, from 0", None, "NODE_RANK", FROM_0),
    "main_address": Entry("name or address of machine 0", None, "MASTER_ADDR"),
    "main_port": Entry("port of machine 0 (a single machine chooses a free one)", DEFAULT_PORT, "MASTER_PORT", FROM_0),
    "rendezvous_seconds": Entry("how long the machines wait for each other", WAIT_SECONDS, form=FROM_0),
    "max_restarts": Entry("how many times all ranks restart, after a failed rank or a lost machine", 0, form=FROM_0),
    "grace_seconds": Entry("time for the ranks to save and exit after a signal", GRACE_SECONDS, GRACE_VARIABLE, FROM_0),
    "logs": Entry("a folder for the output of each rank, in rank0.log and so on", None, LOGS_VARIABLE),
    "job_id": Entry("a name that tells this job from others, the same on every machine", None, JOB_ID_VARIABLE),
    "env": Entry("environment variables of the processes; those that are set already stay"),
}
"""The keys of a config."""
OTHER_WORDS = {
    "num_processes": "devices",
    "num_machines": "num_nodes",
    "main_process_port": "main_port",
    "mixed_precision": "precision",
}
"""Accelerate's names of settings, and ours."""
NameCheck = Callable[[str | None, str | None, int], str | None]
"""Rejects an unknown strategy or precision, given the number of processes, and returns the Trainer's name of the precision."""


class LaunchSetting(NamedTuple):
    """A value, its source (a flag, a variable, the config's path, or "default"), and how errors call both."""

    value: Any
    source: str = "default"
    label: str = ""


@dataclass(frozen=True)
class Config:
    """The entries of a config by key, and its variables. `source` is the flag or the variable that named the file."""

    path: str | None = None
    source: str = "default"
    values: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    def set_variables(self) -> dict[str, str]:
        """Set the variables that are not set yet, before torch looks for GPUs. Return all that are."""
        os.environ.update({name: text for name, text in self.variables.items() if name not in os.environ})
        return dict(os.environ)

    def table(self, settings: Mapping[str, LaunchSetting]) -> str:
        """Return lines with the config, the settings and the config's variables that hold, and their sources."""
        path = self.path or "none"
        rows = [("config", path, self.source)]
        rows += [(name, str(value), source) for name, (value, source, _) in settings.items() if value is not None]
        new = [(name, text) for name, text in self.variables.items() if os.environ.get(name) == text]
        rows += [(f"env {name}", printable(shown(name, text)), path) for name, text in new]
        names, values = (max(len(row[at]) for row in rows) for at in (0, 1))
        return "\n".join(f"  {name:<{names}}  {value:<{values}}  {source}" for name, value, source in rows)


def config_path(given: str | None) -> tuple[str, str]:
    """Return the path of the config, and the flag or variable that named it, or "default"."""
    if given is not None:
        return given, "--config-file"
    if named := os.environ.get("TRAINWRIGHT_CONFIG"):
        return os.path.expanduser(named), "TRAINWRIGHT_CONFIG"
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return os.path.join(folder, "trainwright", "config.yaml"), "default"


def find_config(given: str | None) -> Config:
    """Return the config that a flag or the environment names, or the user's if it exists (ValueError if it is wrong)."""
    path, source = config_path(given)
    if source == "default" and not os.path.exists(path):
        return Config()
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.BaseLoader(file).get_single_data() or {}  # keeps the spelling of `no` and `1:30`
        variables = values.pop("env", "") or {} if isinstance(values, dict) else None
        if not isinstance(variables, dict):
            raise ValueError("expected lines of `name: value`, also under env.")
        for key in values:
            if key not in KEYS:
                hint = did_you_mean(OTHER_WORDS.get(key, key), KEYS)
                raise ValueError(f"{key!r} is not a key of a config. Expected one of {', '.join(KEYS)}.{hint}")
        for key, value in {**values, **variables}.items():
            if not isinstance(value, str):
                raise ValueError(f"{key} is {value}. Expected a single value.")
        check_variables(variables)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    return Config(path, source, {key: text for key, text in values.items() if text not in ("", "~", "null")}, variables)


def check_variables(names: Iterable[str]) -> None:
    """Raise ValueError if a config may not set one of these variables."""
    ours = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", JOB_VARIABLE, "TRAINWRIGHT_CONFIG"}
    for name in names:
        if name in ours or name in {entry.variable for entry in KEYS.values()}:
            raise ValueError(f"env has {name}, which trainwright launch sets itself. Remove it, or set its key.")


def printable(text: str) -> str:
    """Return a text on one line, with control characters as escapes: they would change a terminal."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return f"--{name.replace('_', '-')}"


def setting_of(name: str, flags: argparse.Namespace, variables: Mapping[str, str], config: Config) -> LaunchSetting:
    """Return the flag, the variable or the config's entry, or else the default (ValueError if its form is wrong)."""
    entry, flag, path = KEYS[name], getattr(flags, name, None), config.path or ""
    if flag is not None:
        text = str(flag).lower() if isinstance(flag, bool) else flag  # --cpu and --no-cpu
        setting = LaunchSetting(text, flag_of(name), f"{flag_of(name)} {text}")
    elif text := variables.get(entry.variable):
        setting = LaunchSetting(text, entry.variable, f"{entry.variable}={text}")
    elif text := config.values.get(name):
        setting = LaunchSetting(text, path, f"{path}: {name}: {text}")
    else:
        return LaunchSetting(entry.default)
    pattern, words = entry.form
    if not re.fullmatch(pattern, text, re.DOTALL):
        raise ValueError(f"{setting.label}: expected {words}.")
    return setting._replace(value=int(text)) if entry.form in (FROM_0, FROM_1) else setting


def _settings(flags: argparse.Namespace, variables: Mapping[str, str], config: Config) -> dict[str, LaunchSetting]:
    counts = [setting_of(name, flags, variables, config).value for name in ("num_nodes", "nodes")]
    of_nodes = (
        ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT") if counts == [1, None] else ()
    )  # they say nothing of this job
    variables = {name: text for name, text in variables.items() if name not in of_nodes}
    return {name: setting_of(name, flags, variables, config) for name in KEYS if name != "env"}


def resolve(
    flags: argparse.Namespace, variables: Mapping[str, str], config: Config, check_names: NameCheck
) -> tuple[dict[str, LaunchSetting], Nodes]:
    """Return the settings and the machines of a job (ValueError if a setting is wrong, or two contradict)."""
    # Not at the top: it imports torch, which looks for GPUs as the config's variables say.
    from trainwright.devices import abilities, hardware

    settings = _settings(flags, variables, config)
    cpu, devices = settings["cpu"], settings["devices"]
    num_gpus = 0 if cpu.value == "true" else hardware.count()
    kind = (hardware.built_for() if num_gpus else None) or "cpu"
    if devices.value == "auto":
        number = abilities.num_together(kind) or 1
    else:
        number = num_gpus or num_cores() if devices.value == "-1" else int(devices.value)
    if num_gpus and number > num_gpus:
        raise ValueError(f"{devices.label}: torch sees {num_gpus} GPU(s) here. Pass at most that many, or add --cpu.")
    nodes = _nodes(settings)
    strategy, precision = settings["strategy"], settings["precision"]
    try:
        name = check_names(strategy.value, precision.value, number * nodes.count)
    except ValueError as error:
        wrong = precision if str(error).startswith("precision=") else strategy
        raise ValueError(f"{wrong.source}: {error}") from error
    settings |= {"devices": devices._replace(value=number), "precision": precision._replace(value=name)}
    return {**settings, "accelerator": cpu._replace(value=kind)}, nodes


def _nodes(settings: dict[str, LaunchSetting]) -> Nodes:
    """Return the machines (ValueError if a setting is missing, or two contradict), and empty the unused settings."""
    count, span, address = settings["num_nodes"], settings["nodes"], settings["main_address"]
    if span.value is None and count.value == 1:  # the environment and the config may describe a job of several
        for name in ("node_rank", "main_port", "main_address", "rendezvous_seconds"):
            if settings[name].source != flag_of(name):
                settings[name] = LaunchSetting(None)
            elif name in ("main_address", "rendezvous_seconds"):
                raise ValueError(f"{flag_of(name)} is for several machines. Add --num-nodes or --nodes, or remove it.")
        return Nodes(rank=settings["node_rank"].value or 0, port=settings["main_port"].value or 0)
    least = most = count.value
    if span.value is not None:
        for name in ("num_nodes", "node_rank"):
            if settings[name].source == flag_of(name):
                raise ValueError(f"{flag_of(name)} was given with {span.label}, which replaces it. Remove one of them.")
            settings[name] = LaunchSetting(None)
        least, most = (int(span.value.split(":")[at]) for at in (0, -1))
        if least > most:
            raise ValueError(f"{span.label}: expected {RANGE[1]}.")
    elif settings["node_rank"].value is None:
        raise ValueError(f"{count.label} needs this machine's number. Pass --node-rank, from 0, or set NODE_RANK.")
    if address.value is None:
        raise ValueError(
            f"{span.label or count.label} needs a main address. Pass --main-address, the name or address of machine 0, or "
            "set MASTER_ADDR, the same on every machine."
        )
    rank, port, wait = (settings[name].value for name in ("node_rank", "main_port", "rendezvous_seconds"))
    return Nodes(most, rank, address.value, port, least, wait)
