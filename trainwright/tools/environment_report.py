"""`trainwright env`: versions, devices, strategies, variables and the config, as a bug report needs them."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import trainwright as tw
from trainwright.devices import abilities, cuda, hardware
from trainwright.devices.hardware import describe_devices, package_versions
from trainwright.distributed.masking import HIDDEN, shown
from trainwright.launch.cli import Parser
from trainwright.launch.config import Config, NameCheck, config_path, find_config, resolve
from trainwright.memory.memory_estimate import available_memory, size_text
from trainwright.tools.choices import LISTED_STRATEGIES, why_missing

OF_JOBS = (
    *("TRAINWRIGHT_", "TORCH_", "TORCHELASTIC_", "PYTORCH_", "GLOO_", "OMP_", "MKL_", "DS_", "DEEPSPEED_"),
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_", "OMPI_COMM_WORLD_"),
    *("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "PMI_"),
)
"""How the names of a job's variables begin."""


def env_command(arguments: Sequence[str], check_names: NameCheck) -> int:
    """Run `trainwright env` and return its exit code."""
    about = "Prints the facts that a bug report needs. Values that may be secret are hidden."
    parser = Parser(prog="trainwright env", description=about)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    facts = report(check_names)
    print(json.dumps(facts, indent=2) if options.json else "\n".join(_lines(facts)))
    return 0


def report(check_names: NameCheck) -> dict[str, Any]:
    """Return the versions, devices, strategies, variables and the config as plain data."""
    kind = hardware.accelerator_type() or "cpu"
    return {
        "trainwright": tw.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": package_versions(),
        "devices": {
            "found": describe_devices(),
            "type": kind,
            "memory": size_text(available_memory()),
            "collectives": abilities.collective_backend(kind) or "none",
            "threads of torch": torch.get_num_threads(),
        },
        "strategies": {name: why_missing(name) or "installed" for name in LISTED_STRATEGIES},
        "variables": _of_jobs(Config().set_variables()),
        "config": _config(check_names),
    }


def _of_jobs(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that concern launchers, torch and devices, with secrets hidden."""
    beginnings = (*OF_JOBS, *(f"{name}_" for name in cuda.VARIABLES))
    return {name: shown(name, text) for name, text in sorted(variables.items()) if name.startswith(beginnings)}


def _config(check_names: NameCheck) -> dict[str, Any]:
    """Return the config's file and values. Variables are hidden unless they concern jobs."""
    path, source = config_path(None)
    try:
        config = find_config(None)
        resolve({}, config, check_names)
    except ValueError as error:
        return {"file": path, "named by": source, "error": str(error)}
    if config.path is None:
        return {"file": f"none ({path} does not exist)"}
    return {"file": path, "named by": source, "values": _values(config)}


def _values(config: Config) -> dict[str, str]:
    visible = _of_jobs(config.variables)
    return config.values | {f"env {name}": visible.get(name, HIDDEN) for name in config.variables}


def _lines(facts: Mapping[str, Any], indent: str = "") -> list[str]:
    lines = []
    for name, value in facts.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}:", *(_lines(value, f"{indent}  ") or [f"{indent}  none"])]
        else:
            lines.append(f"{indent}{name}: {value}")
    return lines
