"""Config: the YAML file with settings for `trainwright launch`, and the environment variables that concern a job."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainwright.distributed.environment import JOB_VARIABLE
from trainwright.errors import did_you_mean
from trainwright.launch.nodes import JOB_ID_VARIABLE, LOGS_VARIABLE, WAIT_SECONDS
from trainwright.launch.processes import GRACE_SECONDS, GRACE_VARIABLE

__all__ = ["KEYS", "Config", "check_variables", "config_path", "find_config", "printable", "set_variables_of"]

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
OWN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", JOB_VARIABLE, CONFIG_VARIABLE)
NULLS = ("", "~", "null")
"""How a file spells a key without a value."""


@dataclass(frozen=True)
class Config:
    """The entries of a config, by key, as the file spells them."""

    path: str | None = None
    source: str = "default"
    """The flag or the variable that named the file, or "default"."""
    values: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    """The variables under `env`."""


def config_path(given: str | None, variables: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Return the path of the config, and the flag or variable that named it, or "default"."""
    variables = os.environ if variables is None else variables
    if given is not None:
        return given, "--config-file"
    if named := variables.get(CONFIG_VARIABLE):
        return os.path.expanduser(named), CONFIG_VARIABLE
    folder = variables.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return os.path.join(folder, "trainwright", "config.yaml"), "default"


def find_config(given: str | None) -> Config:
    """Return the config that a flag or the environment names, or else the user's, which need not exist.

    Raises:
        ValueError: a named file does not exist or cannot be read, or an entry is wrong.
    """
    import yaml

    path, source = config_path(given)
    if not os.path.exists(path):
        if source == "default":
            return Config()
        raise ValueError(
            f"{source} names {path!r}, which does not exist. Pass the path of a config, or write one with trainwright config."
        )
    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.BaseLoader(file).get_single_data()  # keeps the spelling of `no` and `1:30`
        values, variables = _checked(values)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(
            f"{path}: the config cannot be read as YAML ({problem}). Correct it, or pass another path."
        ) from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return Config(path, source, values, variables)


def _checked(content: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Return the values of a config and its variables (ValueError if a key or a kind of value is wrong)."""
    values = _mapping(content, "a config")
    for key in values:
        if key in ("compute_environment", "distributed_type"):
            raise ValueError(f"{key!r} is a key of Accelerate's configs; `trainwright config` writes ours.")
        if key not in KEYS:
            hint = f" Did you mean {OTHER_WORDS[key]!r}?" if key in OTHER_WORDS else did_you_mean(key, KEYS)
            raise ValueError(f"{key!r} is not a key of a config. Expected one of {', '.join(KEYS)}.{hint}")
    variables = _mapping(values.pop("env", ""), "env")
    check_variables(variables)
    for key, value in {**values, **variables}.items():
        if not isinstance(value, str):
            raise ValueError(f"{key} is {value}. Expected a single value.")
    return {key: value for key, value in values.items() if value not in NULLS}, variables


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if value in (None, *NULLS):
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {value!r}. Expected lines of `name: value`.")
    return value


def check_variables(names: Iterable[str]) -> None:
    """Raise ValueError if a config may not set one of these variables."""
    for name in names:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise ValueError(f"{name!r} is not the name of a variable. Expected only letters, digits and _.")
        if name in KEY_OF:
            raise ValueError(f"env has {name}. Set the key {KEY_OF[name]!r} instead.")
        if name in OWN_VARIABLES:
            raise ValueError(f"env has {name}, which trainwright launch sets itself. Remove it.")


def set_variables_of(config: Config) -> dict[str, str]:
    """Set the variables of a config that are not set yet, before torch looks for GPUs. Return all that are."""
    os.environ.update({name: text for name, text in config.variables.items() if name not in os.environ})
    return dict(os.environ)


def printable(text: str) -> str:
    """Return a text on one line, with control characters as escapes: they would change a terminal."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
