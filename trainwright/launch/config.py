"""The settings of `trainwright launch`: of a flag, else of the environment, of the config (a YAML file), or a default."""

from __future__ import annotations

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
from trainwright.launch.nodes import Job, Nodes

__all__ = ["KEYS", "Config", "NameCheck", "check_env", "config_path", "find_config", "flag_of", "printable"]
__all__ += ["resolve", "setting_of"]


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
    "rendezvous_seconds": Entry("how long the machines wait for each other", Nodes.wait_seconds, form=FROM_0),
    "max_restarts": Entry("how many times all ranks restart, after a failed rank or a lost machine", 0, form=FROM_0),
    "grace_seconds": Entry(
        "time for the ranks to save and exit after a signal", Job.grace_seconds, "TRAINWRIGHT_GRACE_SECONDS", FROM_0
    ),
    "logs": Entry("a folder for the output of each rank, in rank0.log and so on", None, "TRAINWRIGHT_LOGS"),
    "job_id": Entry("a name that tells this job from others, the same on every machine", None, "TRAINWRIGHT_JOB_ID"),
    "env": Entry("environment variables of the processes; those that are set already stay"),
}
"""The keys of a config."""
OF_SEVERAL = ("node_rank", "main_address", "main_port", "rendezvous_seconds")
OTHER_WORDS = {"num_processes": "devices", "nproc_per_node": "devices", "nnodes": "num_nodes"}
"""Accelerate's and torchrun's names of settings that resemble others of ours, and ours."""
NameCheck = Callable[[str | None, str | None, int], str | None]
"""Rejects an unknown strategy or precision, given the number of processes, and returns the Trainer's name of the precision."""


class LaunchSetting(NamedTuple):
    """A value, and its source: a flag, a variable, the config's path, or "default"."""

    value: Any
    source: str = "default"


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
        rows += [(name, str(value), source) for name, (value, source) in settings.items() if value is not None]
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
        check_env(variables)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    return Config(path, source, {key: text for key, text in values.items() if text not in ("", "~", "null")}, variables)


def check_env(names: Iterable[str]) -> None:
    """Raise ValueError if a config may not set one of these variables."""
    ours = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", JOB_VARIABLE, "TRAINWRIGHT_CONFIG"}
    for name in names:
        if name in ours or name in {entry.variable for entry in KEYS.values()}:
            raise ValueError(f"env has {name}, which trainwright launch sets itself. Remove it, or set its key.")


def printable(text: str, allowed: str = "") -> str:
    """Return a text with escapes for control characters other than the allowed ones: they would change a terminal."""
    return "".join(each if each.isprintable() or each in allowed else ascii(each)[1:-1] for each in text)


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return f"--{name.replace('_', '-')}"


def setting_of(name: str, flags: Mapping[str, Any], variables: Mapping[str, str], config: Config) -> LaunchSetting:
    """Return the flag, the variable or the config's entry, or else the default (ValueError if its form is wrong)."""
    entry, flag = KEYS[name], flags.get(name)
    if flag is not None:
        text = str(flag).lower() if isinstance(flag, bool) else flag  # --cpu and --no-cpu
        source, label = flag_of(name), f"{flag_of(name)} "
    elif text := variables.get(entry.variable, ""):
        source, label = entry.variable, f"{entry.variable}="
    elif text := config.values.get(name, ""):
        source, label = config.path or "", f"{config.path or ''}: {name}: "
    else:
        return LaunchSetting(entry.default)
    pattern, words = entry.form
    if not re.fullmatch(pattern, text, re.DOTALL):
        raise ValueError(f"{label}{text}: expected {words}.")
    return LaunchSetting(int(text) if entry.form in (FROM_0, FROM_1) else text, source)


def settings_of(flags: Mapping[str, Any], variables: Mapping[str, str], config: Config) -> dict[str, LaunchSetting]:
    """Return all settings, None for those that the number of machines excludes (ValueError if the form of one is wrong)."""
    num_nodes, span = (setting_of(name, flags, variables, config).value for name in ("num_nodes", "nodes"))
    # The environment and the config may describe another job. A flag that is excluded is an error of `nodes_of`.
    ignored = ("num_nodes", "node_rank") if span else OF_SEVERAL if num_nodes == 1 else ()
    unused = [name for name in ignored if flags.get(name) is None]
    read = {name: setting_of(name, flags, variables, config) for name in KEYS if name not in ("env", *unused)}
    return {name: read.get(name, LaunchSetting(None)) for name in KEYS if name != "env"}


def nodes_of(settings: Mapping[str, LaunchSetting]) -> Nodes:
    """Return the machines of a job (ValueError if a setting is missing, or two contradict)."""
    count, span, rank, address, port, wait = (settings[name].value for name in ("num_nodes", "nodes", *OF_SEVERAL))
    if span is None and count == 1:
        if address is not None or wait is not None:
            raise ValueError(
                "--main-address and --rendezvous-seconds are for several machines. Add --num-nodes or --nodes, or remove them."
            )
        return Nodes(rank=rank or 0, port=port or 0)
    job = f"nodes={span}" if span else f"num_nodes={count}"
    least, most = (int(str(span or count).split(":")[at]) for at in (0, -1))
    if least > most:
        raise ValueError(f"{job}: expected {RANGE[1]}.")
    if span and (count, rank) != (None, None):
        raise ValueError(f"{job} replaces --num-nodes and --node-rank. Remove one of them.")
    needed = ("main_address",) if span else ("node_rank", "main_address")
    if missing := [name for name in needed if settings[name].value is None]:
        raise ValueError(
            f"{job} needs {' and '.join(f'{name} ({KEYS[name].meaning})' for name in missing)}. Set "
            f"{' and '.join(KEYS[name].variable for name in missing)} on every machine, or start the script with trainwright "
            f"launch {' '.join(map(flag_of, missing))}, torchrun or srun."
        )
    return Nodes(most, rank, address, port, least, wait)


def resolve(
    flags: Mapping[str, Any], config: Config, check_names: NameCheck, variables: Mapping[str, str] = os.environ
) -> tuple[dict[str, LaunchSetting], Nodes]:
    """Return the settings and the machines of a job (ValueError if a setting is wrong, or two contradict)."""
    # Not at the top: it imports torch, which looks for GPUs as the config's variables say.
    from trainwright.devices import abilities, hardware

    settings = settings_of(flags, variables, config)
    cpu, devices, strategy, precision = (settings[name] for name in ("cpu", "devices", "strategy", "precision"))
    num_gpus = 0 if cpu.value == "true" else hardware.count()
    kind = (hardware.built_for() if num_gpus else None) or "cpu"
    if devices.value == "auto":
        number = abilities.num_together(kind) or 1
    else:
        number = num_gpus or num_cores() if devices.value == "-1" else int(devices.value)
    if num_gpus and number > num_gpus:
        raise ValueError(f"devices={number}: torch sees {num_gpus} GPU(s) here. Pass at most that many, or add --cpu.")
    nodes = nodes_of(settings)
    try:
        name = check_names(strategy.value, precision.value, number * nodes.count)
    except ValueError as error:
        wrong = precision if str(error).startswith("precision=") else strategy
        raise ValueError(f"{wrong.source}: {error}") from error
    settings |= {"devices": devices._replace(value=number), "precision": precision._replace(value=name)}
    return {**settings, "accelerator": cpu._replace(value=kind)}, nodes
