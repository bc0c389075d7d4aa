"""Config: the YAML file with settings for `trainwright launch`, and the environment variables that concern a job."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainwright.distributed.environment import JOB_VARIABLE
from trainwright.distributed.masking import shown
from trainwright.errors import did_you_mean
from trainwright.launch.nodes import JOB_ID_VARIABLE, LOGS_VARIABLE, WAIT_SECONDS
from trainwright.launch.processes import GRACE_SECONDS, GRACE_VARIABLE

__all__ = [
    "KEYS",
    "Config",
    "Entry",
    "checked_variable",
    "config_path",
    "find_config",
    "of_jobs",
    "printable",
    "set_variables_of",
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
OWN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", JOB_VARIABLE, CONFIG_VARIABLE)


class Entry(NamedTuple):
    """A value as the file spells it, and its line, "FILE:LINE"."""

    text: str
    where: str


@dataclass(frozen=True)
class Config:
    """The entries of a config, by key."""

    path: str | None = None
    source: str = "default"
    """The flag or the variable that named the file, or "default"."""
    values: dict[str, Entry] = field(default_factory=dict)
    variables: dict[str, Entry] = field(default_factory=dict)
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


def find_config(given: str | None, variables: Mapping[str, str] | None = None) -> Config:
    """Return the config that a flag or the environment names, or else the user's, which need not exist.

    Raises:
        ValueError: a named file does not exist or cannot be read, or an entry is wrong (with its file and line).
    """
    path, source = config_path(given, variables)
    if not os.path.exists(path):
        if source == "default":
            return Config()
        raise ValueError(
            f"{source} names {path!r}, which does not exist. Pass the path of a config, or write one with trainwright config."
        )
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: the config cannot be read ({error}). Pass the path of a YAML file.") from error
    return Config(path, source, *_parse(path, text))


def _parse(path: str, text: str) -> tuple[dict[str, Entry], dict[str, Entry]]:
    import yaml

    try:
        # Nodes rather than values: a node knows its line, and how the file spells it.
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = " ".join(str(getattr(error, "problem", error)).split())
        line = "" if mark is None else f":{mark.line + 1}"
        raise ValueError(f"{path}{line}: this is not YAML ({problem}). Correct the line.") from error
    values: dict[str, Entry] = {}
    variables: dict[str, Entry] = {}
    for key, where, node in _pairs(path, root, "a config"):
        if key in ("compute_environment", "distributed_type"):
            raise ValueError(f"{where}: {key!r} is a key of Accelerate's configs; `trainwright config` writes ours.")
        if key not in KEYS:
            hint = f" Did you mean {OTHER_WORDS[key]!r}?" if key in OTHER_WORDS else did_you_mean(key, KEYS)
            raise ValueError(f"{where}: {key!r} is not a key of a config. Expected one of {', '.join(KEYS)}.{hint}")
        if key == "env":
            variables = {
                name: checked_variable(name, _entry(name, where, value))
                for name, where, value in _pairs(path, node, "env")
                if not _is_null(value)
            }
        elif not _is_null(node):
            values[key] = _entry(key, where, node)
    return values, variables


def _pairs(path: str, node: Any, what: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the keys of a mapping with their lines and values. A repeated key is rejected."""
    if node is None or _is_null(node):
        return
    if node.id != "mapping":
        raise ValueError(f"{path}:{node.start_mark.line + 1}: {what} holds lines of `name: value`, not a {node.id}.")
    seen: dict[str, str] = {}
    for key, value in node.value:
        where = f"{path}:{key.start_mark.line + 1}"
        name = str(key.value)
        if name in seen:
            raise ValueError(f"{where}: {name!r} is there twice, first at {seen[name]}. Remove one.")
        seen[name] = where
        yield name, where, value


def _entry(name: str, where: str, node: Any) -> Entry:
    """Return a value's text as the file spells it, so that `no` and `1:30` keep their letters."""
    if node.id != "scalar":
        raise ValueError(f"{where}: {name} is a {node.id}. Expected a single value.")
    return Entry(node.value, where)


def _is_null(node: Any) -> bool:
    return bool(node.tag == "tag:yaml.org,2002:null")


def checked_variable(name: str, entry: Entry) -> Entry:
    """Return the entry of a variable, which a config may set (ValueError otherwise)."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise ValueError(f"{entry.where}: {name!r} is not the name of a variable. Expected only letters, digits and _.")
    if name in KEY_OF:
        raise ValueError(f"{entry.where}: env has {name}. Set the key {KEY_OF[name]!r} instead.")
    if name in OWN_VARIABLES:
        raise ValueError(f"{entry.where}: env has {name}, which trainwright launch sets itself. Remove it.")
    return entry


OF_JOBS = (
    *("TRAINWRIGHT_", "TORCH_", "TORCHELASTIC_", "PYTORCH_", "GLOO_", "OMP_", "MKL_", "DS_", "DEEPSPEED_"),
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_", "OMPI_COMM_WORLD_"),
    *("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "PMI_"),
)
"""How the names of a job's variables begin."""


def of_jobs(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of this process, or those given, that concern launchers, torch and devices, with secrets hidden."""
    from trainwright.devices import cuda

    variables = os.environ if variables is None else variables
    beginnings = (*OF_JOBS, *(f"{name}_" for name in cuda.VARIABLES))
    return {name: shown(name, text) for name, text in sorted(variables.items()) if name.startswith(beginnings)}


def set_variables_of(config: Config) -> dict[str, str]:
    """Set the variables of a config that are not set yet, before torch looks for GPUs. Return all that are."""
    os.environ.update({name: entry.text for name, entry in config.variables.items() if name not in os.environ})
    return dict(os.environ)


def printable(text: str) -> str:
    """Return a text on one line, with control characters as escapes: they would change a terminal."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
